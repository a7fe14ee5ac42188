"""A statement's text without its literals and comments, each of which may hold a row's value.

Pure. What is left is Postgres' own words, names, operators and `?`. It never shows more than
Postgres' lexer takes for code, whatever `standard_conforming_strings` is: a text of which that
depends ends there, and so does one whose last literal has no end.
"""

from __future__ import annotations

import re
from typing import Final

PLACEHOLDER: Final = "?"

# Postgres takes every byte above 127 for a letter.
_LETTER: Final = r"A-Za-z_\u0080-\U0010ffff"
_DOLLAR: Final = rf"\$(?:[{_LETTER}][{_LETTER}\d]*)?\$"
_TOKEN: Final = re.compile(
    rf"""
      (?P<literal>
          [eE]'(?:[^'\\]|\\.|'')*'(?!')                 # with escapes
        | (?:[bBxXnN]|[uU]&)?'(?:[^'\\]|'')*'(?!')      # a backslash may escape, or not
        | (?P<tag>{_DOLLAR}).*?(?P=tag)
        | \.?\d[\w.]*(?:(?<=[eE])[+-]\w+)?
      )
    | (?P<comment>--[^\n\r]*)
    | (?P<name>(?:[uU]&)?"(?:[^"]|"")*" | [{_LETTER}][{_LETTER}\d$]*)
    | (?P<opens>/\*|['"]|{_DOLLAR})
    | (?P<other>.)
    """,
    re.DOTALL | re.VERBOSE | re.ASCII,
)
_NESTED: Final = re.compile(r"/\*|\*/")


def without_literals(statement: str) -> str:
    """Return the statement with `?` for each literal, and a space for each comment."""
    kept, at = list[str](), 0
    while at < len(statement):
        token = _TOKEN.match(statement, at)
        assert token is not None, "any character is a token"
        at = token.end()
        match token.lastgroup:
            case "literal":
                kept.append(PLACEHOLDER)
            case "comment":
                kept.append(" ")
            case "opens" if token[0] == "/*" and (end := _comment_end(statement, at)):
                kept.append(" ")
                at = end
            case "opens":  # it has no end, or not the same one in every session
                return "".join([*kept, PLACEHOLDER])
            case _:
                kept.append(token[0])
    return "".join(kept)


def _comment_end(statement: str, at: int) -> int | None:
    """Return where a comment, which may hold others, ends; None if it does not."""
    depth = 1
    for mark in _NESTED.finditer(statement, at):
        depth += 1 if mark[0] == "/*" else -1
        if not depth:
            return mark.end()
    return None
