"""Rows as `COPY … (FORMAT binary)` writes them. Pure.

Grammar: https://www.postgresql.org/docs/current/sql-copy.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable


def row_bytes(values: Iterable[bytes | None]) -> bytes:
    """Return a row as a binary COPY writes it, without the count of its columns."""
    parts = []
    for value in values:
        if value is None:
            parts.append(b"\xff\xff\xff\xff")
        else:
            parts += (len(value).to_bytes(4, "big"), value)
    return b"".join(parts)


def row_values(row: bytes, at: int, columns: int) -> list[bytes | None]:
    """Return the values of a row that a binary COPY wrote; its first column starts at `at`."""
    values: list[bytes | None] = []
    for _ in range(columns):
        size = int.from_bytes(row[at : at + 4], "big", signed=True)
        at += 4
        if size < -1 or at + size > len(row):
            raise ProtocolError(f"a row of {len(row)} bytes is no row of a COPY")
        values.append(None if size < 0 else row[at : at + size])
        at += max(size, 0)
    return values
