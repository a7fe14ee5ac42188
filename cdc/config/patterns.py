"""Names and patterns in the configuration: `public.users`, `public.*`, `shop_*.log_*`.

Pure. A name is written as in the catalog, with no folding to lower case; a star is any text. Double
quotes, doubled inside, make a name exact and are needed only around dots, spaces, stars and quotes.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_NAME = r'"(?:[^"]|"")+"|[^\s".]+'
_TABLE = re.compile(rf"({_NAME})\.({_NAME})")
_QUOTED = re.compile(r'"(?:[^"]|"")+"')


class NamePattern(NamedTuple):
    """A name, or with stars a pattern."""

    text: str  # as it is written
    exact: str | None  # the single name that it matches
    wild: re.Pattern[str] | None

    def matches(self, name: str) -> bool:
        return name == self.exact if self.wild is None else bool(self.wild.fullmatch(name))


def parse_name(text: str) -> NamePattern:
    if _QUOTED.fullmatch(text):
        return NamePattern(text, text[1:-1].replace('""', '"'), None)
    if "*" not in text:
        return NamePattern(text, text, None)
    wild = ".*".join(re.escape(part) for part in text.split("*"))
    return NamePattern(text, None, re.compile(wild, re.DOTALL))


class TablePattern(NamedTuple):
    """One table, or with stars a pattern."""

    text: str  # as it is written
    schema: NamePattern
    table: NamePattern

    def matches(self, schema: str, table: str) -> bool:
        return self.schema.matches(schema) and self.table.matches(table)

    @property
    def exact(self) -> tuple[str, str] | None:
        """Schema and name of the one table that it names; None where it is a pattern."""
        if self.schema.exact is None or self.table.exact is None:
            return None
        return self.schema.exact, self.table.exact

    @property
    def complete_schema(self) -> str | None:
        """The schema of which it matches every table: `schema.*`."""
        return self.schema.exact if self.table.text == "*" else None


def parse_table_pattern(text: str) -> TablePattern:
    """Return the pattern that `text` describes; raise ValueError where it is none."""
    match = _TABLE.fullmatch(text)
    if match is None:
        raise ValueError(f"not a table pattern: {text!r}")
    return TablePattern(text, parse_name(match[1]), parse_name(match[2]))
