"""Postgres' array text, read and written character by character: slow, for tests.

https://www.postgresql.org/docs/current/arrays.html#ARRAYS-IO
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Nested = list[Any]  # of lists, or of elements


def read(text: str, element: Callable[[str], object], delimiter: str = ",") -> Nested | str:
    """Return the array as nested lists, None for NULL; the text if it states lower bounds."""
    if not text.startswith("{"):
        return text
    complete, at = _list(text, 0, element, delimiter)
    assert at == len(text), "text after an array"
    return complete


def _list(
    text: str, at: int, element: Callable[[str], object], delimiter: str
) -> tuple[Nested, int]:
    items: Nested = []
    at += 1
    while text[at] != "}":
        if text[at] == delimiter:
            at += 1
        if text[at] == "{":
            item, at = _list(text, at, element, delimiter)
            items.append(item)
        elif text[at] == '"':
            word, at = _quoted(text, at)
            items.append(element(word))
        else:
            end = at
            while text[end] not in (delimiter, "}"):
                end += 1
            word, at = text[at:end], end
            items.append(None if word == "NULL" else element(word))
    return items, at + 1


def _quoted(text: str, at: int) -> tuple[str, int]:
    word = ""
    at += 1
    while text[at] != '"':
        if text[at] == "\\":
            at += 1
        word += text[at]
        at += 1
    return word, at + 1


def write(array: Nested, element: Callable[[Any], str], delimiter: str = ",") -> str:
    """Return text that Postgres reads as this array."""

    def each(item: object) -> str:
        if item is None:
            return "NULL"
        if isinstance(item, list):
            return write(item, element, delimiter)
        word = element(item).replace("\\", "\\\\").replace('"', '\\"')
        return f'"{word}"'

    return "{" + delimiter.join(map(each, array)) + "}"
