"""What a chunk of a table is worth by the time its rows can be published. Pure.

A chunk is read by a SELECT while the stream goes on, between two messages that we write into the
WAL: the low mark is committed before the SELECT takes its snapshot, the high mark after its last
row has come. So of what the stream holds before the low mark the SELECT saw everything (`unseen`
finds the exception), of what it holds behind the high mark nothing, and of the changes between, the
window's, any part. At the high mark the chunk's rows are made what the table is there: the changes
that the SELECT's snapshot did not see are carried out on them, in the stream's order (`settle`).

What a change told of a row in full stands in the log, and its row is dropped. A change that left
TOAST out tells a part: what is missing is in the chunk's row only, so that row goes out with the
newest values of both. A row that took its new key from outside of the chunk brings such values from
a row that was read before, or will not be read any more: who keeps the chunks reads it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from cdc.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# A row's values as they stand in an event, one a column; None where a change did not send it.
Values: TypeAlias = tuple[bytes | None, ...]

_XIDS: Final = 1 << 32
# So many changes of one table within a window: the chunk is read again rather than kept in memory.
MAX_CHANGES: Final = 100_000


class Snapshot(NamedTuple):
    """What `pg_current_snapshot()` says, by the 32 bits of an xid that the stream tells."""

    xmin: int
    xmax: int
    in_progress: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Return the snapshot that `xmin:xmax:xid,xid,…` writes."""
        xmin, xmax, running = text.split(":")
        xids = frozenset(int(xid) % _XIDS for xid in running.split(",") if xid)
        return cls(int(xmin) % _XIDS, int(xmax) % _XIDS, xids)

    def sees(self, xid: int) -> bool:
        """Whether a transaction that has committed was seen; xids go round, nearest is meant."""
        began_later = (xid - self.xmax) % _XIDS < _XIDS // 2
        return not began_later and xid not in self.in_progress


class Change(NamedTuple):
    """A change of one row of the table, by record keys; a truncate has neither key."""

    xid: int
    before: bytes | None  # the row's key so far; None where the change made the row
    after: bytes | None  # its key from here on; None where it is gone
    values: Values | None = None  # None: the event has all of them

    @property
    def moved(self) -> bool:
        """Whether the row came from another key with values that only its old row has."""
        return self.values is not None and self.before != self.after


class Window:
    """What happened to a table between the marks of one chunk."""

    def __init__(self, low_lsn: int) -> None:
        self.low_lsn = low_lsn  # where the low mark was committed
        self.described = False  # whether the stream described the table meanwhile
        self.changes: list[Change] = []
        self.keys: set[bytes | None] = set()

    @property
    def overflown(self) -> bool:
        """Whether more happened than is kept."""
        return len(self.changes) > MAX_CHANGES

    def add(self, change: Change) -> None:
        """Take the next change of the stream."""
        if not self.overflown:
            self.changes.append(change)
            self.keys.add(change.before)
            self.keys.add(change.after)

    def emptied(self, snapshot: Snapshot) -> bool:
        """Whether the table was truncated behind the SELECT: then none of its rows is left."""
        return any(
            change.before is None and change.after is None and not snapshot.sees(change.xid)
            for change in self.changes
        )

    def settle(self, rows: Mapping[bytes, Values], snapshot: Snapshot) -> dict[bytes, Values]:
        """Return what is to be published of `rows`, those of the chunk that `keys` names.

        The others are to be published as they are, unless the table was `emptied`.
        """
        # A row that the log holds in full since some change of the window: nothing is missing.
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
    """Return the transactions that the stream told before the low mark, and the SELECT did not see.

    A commit is decoded when its record is flushed, and visible a moment later; where it waits for a
    synchronous standby, much later. A row of such a transaction would be read as it was before it.
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
    """Return the values of a row that a binary COPY wrote; its first column stands at `at`."""
    values: list[bytes | None] = []
    for _ in range(columns):
        size = int.from_bytes(row[at : at + 4], "big", signed=True)
        at += 4
        if size < -1 or at + size > len(row):
            raise ProtocolError(f"a row of {len(row)} bytes is no row of a COPY")
        values.append(None if size < 0 else row[at : at + size])
        at += max(size, 0)
    return values
