"""Divide events into pieces that are reduced at a time. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Piece: TypeAlias = "tuple[list[bytes | None], list[bytes]]"

PIECE_EVENTS: Final = 20_000
_PIECE_BYTES: Final = 32 << 20


def pieces(
    records: Iterable[tuple[bytes | None, bytes | None]],
    *,
    most: int | None = None,
    complete: bool = False,
) -> Iterator[Piece]:
    """Yield a few thousand events at a time, or `most`.

    `complete` keeps a key change's two events together.
    """
    keys: list[bytes | None] = []
    values: list[bytes] = []
    size = 0
    for key, value in records:
        if value is None:
            continue
        full = len(values) >= (most or PIECE_EVENTS) or size >= _PIECE_BYTES
        if full and not (complete and b'"op":"c"' in value and b'"op":"d"' in values[-1]):
            yield keys, values
            keys, values, size = [], [], 0
        keys.append(key)
        values.append(value)
        size += len(value)
    if values:
        yield keys, values
