r"""Arrays' and hstore's text → JSON arrays and objects, whose elements have their type's own form.

An array becomes a JSON array, nested for more dimensions, with null for NULL. One that states its
lower bounds (`[0:1]={1,2}`) stays Postgres' own text in a JSON string, since a JSON array has no
place for them. The stream marks the arrays of users' types only by the underscore that Postgres
puts before the element's name, so for these the text must be what Postgres would write for an
array, to the byte; any other stays a string.

Grammar: https://www.postgresql.org/docs/current/arrays.html#ARRAYS-IO,
https://www.postgresql.org/docs/current/hstore.html#HSTORE-EXTERNAL-REP
"""

from __future__ import annotations

import re
from binascii import b2a_base64
from typing import TYPE_CHECKING, Final

import orjson
from orjson import dumps

from cdc.encode.values_numbers import floating

if TYPE_CHECKING:
    from collections.abc import Callable

    Form = Callable[[bytes], bytes]

_BRACKETS: Final = bytes.maketrans(b"{}", b"[]")
_ESCAPED: Final = re.compile(rb"\\(.)", re.DOTALL)
_QUOTED: Final = rb'"([^"\\]*(?:\\.[^"\\]*)*)"'
_NULL: Final = b"NULL"
_PAIR: Final = re.compile(_QUOTED + rb"=>(?:NULL|" + _QUOTED + rb")(?:, |\Z)", re.DOTALL)


def quoted(text: bytes) -> bytes:
    """Return a string of text that needs no escapes."""
    return b'"%b"' % text


def string(text: bytes) -> bytes:
    """Return a string of any text; raise UnicodeDecodeError if it is not UTF-8."""
    return dumps(text.decode())


def legible(text: bytes, form: Form = string) -> bytes:
    """Return the `form` of the text, or an object that holds base64 if it is not UTF-8."""
    try:
        return form(text)
    except UnicodeDecodeError:
        return b'{"base64":"%b"}' % b2a_base64(text, newline=False)


def numbers(text: bytes) -> bytes:
    """Return the JSON array of an array of integers."""
    if text[:1] != b"{":
        return b'"%b"' % text
    return text.translate(_BRACKETS).replace(_NULL, b"null")


def floats(text: bytes) -> bytes:
    """Return the JSON array of an array of floats."""
    # NULL, NaN, Infinity, and the zero that readers would parse as an integer.
    if b"N" in text or b"I" in text or b"-0," in text or b"-0}" in text:
        return _FLOATS(text)
    return numbers(text)


def words(text: bytes) -> bytes:
    """Return the JSON array of an array whose elements are strings that need no escapes."""
    if b'"' in text or text[:2] == b"{{" or text[:1] != b"{":
        return _WORDS(text)
    if text == b"{}":
        return b"[]"
    array = b'["' + text[1:-1].replace(b",", b'","') + b'"]'
    return array.replace(b'"NULL"', b"null") if _NULL in text else array


def texts(text: bytes) -> bytes:
    """Return the JSON array of an array of any text."""
    if b'"' in text or text[:2] == b"{{" or text[:1] != b"{":
        return _TEXTS(text)
    if text == b"{}":
        return b"[]"
    elements: list[str | None] = [*text[1:-1].decode().split(",")]
    if _NULL in text:
        elements = [None if element == "NULL" else element for element in elements]
    return dumps(elements)


class ArrayReader:
    """The form of arrays whose elements have the form `element`.

    `otherwise` is the form of text that has no JSON array. `guessed`: only the type's name
    indicates an array.
    """

    def __init__(
        self, element: Form, delimiter: bytes, otherwise: Form, *, guessed: bool = False
    ) -> None:
        self._element = element
        self._otherwise = otherwise
        self._guessed = guessed
        between = re.escape(delimiter)
        # One of three groups: a quoted element, a bare one, a mark.
        self._token = re.compile(
            _QUOTED + rb'|([^\s"\\{}' + between + rb"]+)|([{}" + between + rb"])", re.DOTALL
        )
        self._marks = {b"{": b"[", b"}": b"]", delimiter: b","}
        # What Postgres would put in quotes, and nothing else.
        self._special = re.compile(
            rb'(?:null|.*[\s"\\{}' + between + rb"].*)?", re.DOTALL | re.IGNORECASE
        )

    def __call__(self, text: bytes) -> bytes:
        """Return the JSON array, or the `otherwise`; raise ValueError on a broken array."""
        if text[:1] != b"{":
            return self._otherwise(text)
        array = self._array(text)
        if array is not None and _is_array(array):
            return array
        if self._guessed:
            return self._otherwise(text)
        raise ValueError("not an array's text")

    def _array(self, text: bytes) -> bytes | None:
        parts, size = [], 0
        for quoted, bare, mark in self._token.findall(text):
            if mark:
                size += 1
                parts.append(self._marks[mark])
                continue
            size += len(bare) or len(quoted) + 2
            if bare == _NULL:
                parts.append(b"null")
                continue
            raw = bare or (_ESCAPED.sub(rb"\1", quoted) if b"\\" in quoted else quoted)
            if self._guessed and bool(bare) == bool(self._special.fullmatch(raw)):
                return None
            parts.append(self._element(raw))
        # Text that no group matches was skipped, and then the sizes differ.
        return b"".join(parts) if size == len(text) else None


def _is_array(text: bytes) -> bool:
    try:
        return isinstance(orjson.loads(text), list)
    except orjson.JSONDecodeError:
        return False


# For arrays that the fast forms leave to the parser.
_FLOATS: Final = ArrayReader(floating, b",", quoted)
_WORDS: Final = ArrayReader(quoted, b",", string)
_TEXTS: Final = ArrayReader(string, b",", string)


def hstore(text: bytes) -> bytes:
    """Return the pairs as a JSON object; text that is not an hstore as a string."""
    pairs: dict[str, str | None] = {}
    at = 0
    for found in _PAIR.finditer(text):
        if found.start() != at:
            break
        at = found.end()
        key, value = found.groups()
        pairs[_unescaped(key)] = None if value is None else _unescaped(value)
    return dumps(pairs) if at == len(text) else string(text)


def hstore_json(text: bytes) -> bytes:
    """Return the pairs as a JSON object inside a string."""
    return dumps(hstore(text).decode())


def _unescaped(text: bytes) -> str:
    return (_ESCAPED.sub(rb"\1", text) if b"\\" in text else text).decode()


NAMESPACE: Final = {
    function.__name__: function
    for function in (numbers, floats, words, texts, hstore, hstore_json, legible, string)
}
