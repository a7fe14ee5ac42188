"""Reconcile a chunk's rows with the changes between its low and high watermark. Pure.

A chunk is read by a SELECT while the stream continues, between two messages that we write into the
WAL: the low watermark is committed before the SELECT takes its snapshot, the high watermark after
its last row was read. So the SELECT saw everything that the stream holds before the low watermark
(`cdc.snapshot.incremental.visibility` finds the exception), nothing that it holds after the high
watermark, and any part of the changes between. At the high watermark the chunk's rows are brought
up to date: the changes that the SELECT's snapshot did not see are merged into them, in the stream's
order (`ChunkChanges.reconcile`).

Where a change has a row in full, the log has that row, and the chunk's row is dropped. A change
that left TOAST out has only a part: the missing values are only in the chunk's row, so that row is
published with the newest values of both. A row that took its new key from outside the chunk brings
such values from a row that was read before, or will not be read any more: the caller reads it
again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cdc.decode.pg_snapshot import PgSnapshot

# A row's values as they are in an event, one per column; None where a change did not send it.
Values: TypeAlias = tuple[bytes | None, ...]

# How many changes of one table are kept between the watermarks of a chunk: above this, the chunk is
# read again rather than kept in memory.
MAX_CHANGES: Final = 100_000


class RowChange(NamedTuple):
    """A change of one row of the table, by record keys; a truncate has neither key."""

    xid: int
    before: bytes | None  # the row's key before it; None where the change inserted the row
    after: bytes | None  # its key after it; None where the row was deleted
    values: Values | None = None  # None: the event has all of them

    @property
    def takes_key_without_toast(self) -> bool:
        """Whether the row moved from another key with values that only its old row has."""
        return self.values is not None and self.before != self.after

    @property
    def truncates(self) -> bool:
        return self.before is None and self.after is None


class ChunkChanges:
    """What happened to a table between the watermarks of one chunk."""

    def __init__(self) -> None:
        self._changes: list[RowChange] = []
        self.keys: set[bytes | None] = set()  # of the rows that changed

    @property
    def overflowed(self) -> bool:
        """Whether more happened than is kept."""
        return len(self._changes) > MAX_CHANGES

    def add(self, change: RowChange) -> None:
        """Add the next change of the stream."""
        if not self.overflowed:
            self._changes.append(change)
            self.keys.add(change.before)
            self.keys.add(change.after)

    def truncated_after(self, snapshot: PgSnapshot) -> bool:
        """Whether the table was truncated after the SELECT: then none of its rows is left."""
        return any(change.truncates and not snapshot.sees(change.xid) for change in self._changes)

    def reconcile(self, rows: Mapping[bytes, Values], snapshot: PgSnapshot) -> dict[bytes, Values]:
        """Return which of `rows`, the chunk's rows that `keys` names, must be published, and how.

        The others are to be published as they are, unless `truncated_after` the SELECT.
        """
        # Keys whose rows the log holds in full since one of the changes: nothing is missing.
        complete: set[bytes] = set()
        found = dict(rows)
        for change in self._changes:
            if snapshot.sees(change.xid):
                continue
            if change.truncates:
                found.clear()
                complete.clear()
                continue
            before, after = change.before, change.after
            row = found.pop(before, None) if before is not None else None
            was_complete = before in complete
            complete.discard(before or b"")
            if after is None:
                continue
            found.pop(after, None)
            complete.discard(after)
            if change.values is None or was_complete:
                complete.add(after)
            elif row is not None:
                found[after] = merged(row, change.values)
        return found


def merged(row: Values, newer: Values) -> Values:
    """Return the row with what `newer` sent."""
    return tuple(old if new is None else new for old, new in zip(row, newer, strict=True))
