"""Which of a chunk's rows are still valid when they can be published. Pure.

A chunk is read by a SELECT while the stream continues, between two messages that we write into the
WAL: the low watermark is committed before the SELECT takes its snapshot, the high watermark after
its last row was read. So the SELECT saw everything that the stream holds before the low watermark
(`unseen` finds the exception), nothing that it holds after the high watermark, and any part of the
changes between, the window's. At the high watermark the chunk's rows are brought up to date: the
changes that the SELECT's snapshot did not see are merged into them, in the stream's order
(`settle`).

Where a change has a row in full, the log has that row, and the chunk's row is dropped. A change
that left TOAST out has only a part: the missing values are only in the chunk's row, so that row is
published with the newest values of both. A row that took its new key from outside the chunk brings
such values from a row that was read before, or will not be read any more: the caller reads it
again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from cdc.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# A row's values as they are in an event, one per column; None where a change did not send it.
Values: TypeAlias = tuple[bytes | None, ...]

_XIDS: Final = 1 << 32
# How many changes of one table a window may hold: above this, the chunk is read again rather than
# kept in memory.
MAX_CHANGES: Final = 100_000


class Snapshot(NamedTuple):
    """The result of `pg_current_snapshot()`, by the 32 bits of an xid that the stream has."""

    xmin: int
    xmax: int
    in_progress: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Return the snapshot that is written as `xmin:xmax:xid,xid,…`."""
        xmin, xmax, running = text.split(":")
        xids = frozenset(int(xid) % _XIDS for xid in running.split(",") if xid)
        return cls(int(xmin) % _XIDS, int(xmax) % _XIDS, xids)

    def sees(self, xid: int) -> bool:
        """Whether a committed transaction was seen; xids wrap around, the nearest one is meant."""
        began_later = (xid - self.xmax) % _XIDS < _XIDS // 2
        return not began_later and xid not in self.in_progress


class Change(NamedTuple):
    """A change of one row of the table, by record keys; a truncate has neither key."""

    xid: int
    before: bytes | None  # the row's key before it; None where the change inserted the row
    after: bytes | None  # its key after it; None where the row was deleted
    values: Values | None = None  # None: the event has all of them

    @property
    def moved(self) -> bool:
        """Whether the row moved from another key with values that only its old row has."""
        return self.values is not None and self.before != self.after


class Window:
    """What happened to a table between the watermarks of one chunk."""

    def __init__(self, low_lsn: int) -> None:
        self.low_lsn = low_lsn  # where the low watermark was committed
        self.described = False  # whether the stream described the table meanwhile
        self.changes: list[Change] = []
        self.keys: set[bytes | None] = set()

    @property
    def overflown(self) -> bool:
        """Whether more happened than is kept."""
        return len(self.changes) > MAX_CHANGES

    def add(self, change: Change) -> None:
        """Add the next change of the stream."""
        if not self.overflown:
            self.changes.append(change)
            self.keys.add(change.before)
            self.keys.add(change.after)

    def emptied(self, snapshot: Snapshot) -> bool:
        """Whether the table was truncated after the SELECT: then none of its rows is left."""
        return any(
            change.before is None and change.after is None and not snapshot.sees(change.xid)
            for change in self.changes
        )

    def settle(self, rows: Mapping[bytes, Values], snapshot: Snapshot) -> dict[bytes, Values]:
        """Return which of `rows`, the chunk's rows that `keys` names, must be published, and how.

        The others are to be published as they are, unless the table was `emptied`.
        """
        # Keys whose rows the log holds in full since some change of the window: nothing is missing.
        told: set[bytes] = set()
        found = dict(rows)
        for change in self.changes:
            if snapshot.sees(change.xid):
                continue
            before, after = change.before, change.after
            if before is None and after is None:
                found.clear()
                told.clear()
                continue
            row = found.pop(before, None) if before is not None else None
            whole = before in told
            told.discard(before or b"")
            if after is None:
                continue
            found.pop(after, None)
            told.discard(after)
            if change.values is None or whole:
                told.add(after)
            elif row is not None:
                found[after] = merged(row, change.values)
        return found


def merged(row: Values, newer: Values) -> Values:
    """Return the row with what `newer` sent."""
    return tuple(old if new is None else new for old, new in zip(row, newer, strict=True))


def unseen(decoded: Mapping[int, int], snapshot: Snapshot, low_lsn: int) -> list[int]:
    """Return the transactions decoded before the low watermark that the SELECT did not see.

    A commit is decoded when its record is flushed, and visible a moment later, or much later where
    it waits for a synchronous standby. A row of such a transaction would be read as it was before.
    """
    return [xid for xid, lsn in decoded.items() if lsn < low_lsn and not snapshot.sees(xid)]


def still_unseen(decoded: Mapping[int, int], snapshot: Snapshot) -> dict[int, int]:
    """Return those of `decoded` that a later snapshot may not see either."""
    return {xid: lsn for xid, lsn in decoded.items() if not snapshot.sees(xid)}


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
