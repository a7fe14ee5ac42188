"""Write a large cut's changes to a history from many processes, each with some of the keys.

As `sinks.delta.buckets` does it for the newest rows. A task gets every change of its keys, by key
and seq, and holds `HELD_BYTES` of them: of a key that continues it keeps the newest version, whose
end is not known yet and whose values the next ones may take over. A stored version that ends is
read, and written again with its end, a few thousand rows at a time.

The rows are those of `sinks.delta.history`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from lockstep.sinks.delta import keys as delta_keys
from lockstep.sinks.delta import targets
from lockstep.sinks.delta.history import Ends, kept_columns, neighbours, roots
from lockstep.sinks.delta.layout import CURRENT, EXACT, SEQ
from lockstep.sinks.delta.rows import ChangeBatch, batch, joined, taken
from lockstep.sinks.delta.targets import Piece, StoredRows, only, packed
from lockstep.sinks.delta.work import merged

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lockstep.sinks.contract import Changes
    from lockstep.sinks.delta.columns import ColumnReader
    from lockstep.sinks.delta.parts import Parts
    from lockstep.sinks.delta.targets import StoredFile, Target


class HistoryWriting:
    """One task's work on one history."""

    def __init__(self, target: Target, parts: Parts) -> None:
        self._target, self._parts = target, parts
        self._stored = StoredRows(target)
        self._readers: dict[int, ColumnReader] = {}
        self._held: list[ChangeBatch] = []
        self._bytes = 0
        # The newest version of the key that may continue: its place in what is held.
        self._last: int | None = None
        # Whether the first row that is held was in what was held before.
        self._continues = False

    def add(self, changes: Changes) -> Iterator[Piece]:
        """Add changes; those up to the history's own seq are in it."""
        new = [change for change in changes.changes if change.seq > self._target.seq]
        if not new:
            return
        found = batch(changes._replace(changes=new), self._target.schema, self._readers)
        last = max(new, key=lambda change: (change.key or b"", change.seq)).seq
        held = sum(each.rows.num_rows for each in self._held)
        self._last = held + pc.index(found.rows[SEQ], last).as_py()
        self._held.append(found)
        self._bytes += found.rows.nbytes
        if self._bytes >= targets.HELD_BYTES:
            yield from self._flush(self._last)

    def flush(self) -> Iterator[Piece]:
        """Write what is held."""
        yield from self._flush(None)

    def _flush(self, kept: int | None) -> Iterator[Piece]:
        """Write what is held, except for the row at `kept`, which continues."""
        if not self._held:
            return
        target, changes = self._target, joined(self._held)
        new = _NewVersions(changes, target, self._parts, kept)
        heads = new.heads[1:] if self._continues else new.heads
        wanted = changes.rows.take(pa.array(heads, pa.int64()))
        for found, current in self._stored.find(wanted, CURRENT) if heads else ():
            hits = only(found, pc.fill_null(current, fill_value=False))
            if not len(hits.positions):
                continue
            yield Piece(target.place, hits.path, hits.rows, packed(hits.positions))
            for stored, places in self._stored.rows(hits, kept_columns(target.schema)):
                mine = [heads[each] for each in places.to_pylist()]
                self._parts.add_all(new.ends.rows(stored, mine, target.schema))
                new.write_filled(stored, mine)
        row = new.write_rest()
        self._held = [] if row is None else [row]
        self._bytes = 0 if row is None else row.rows.nbytes
        self._last = None if row is None else 0
        self._continues = row is not None


class _NewVersions:
    """The changes that a task holds, as versions."""

    def __init__(
        self, changes: ChangeBatch, target: Target, parts: Parts, kept: int | None
    ) -> None:
        self._parts, self._kept = parts, kept
        self._kept_row: ChangeBatch | None = None
        as_text = delta_keys.needs_text(changes.rows, target.key)
        keys = delta_keys.identities_of(changes.rows, target.key, as_text=as_text).to_pylist()
        before, after = neighbours(keys)
        # The first change of each key, which ends the stored version.
        self.heads = [at for at, earlier in enumerate(before) if earlier is None]
        self.ends = Ends(changes.rows, target.truncates)
        seqs = changes.rows[SEQ].to_pylist()
        ends = [self.ends.of(seqs[at], following) for at, following in enumerate(after)]
        self._changes = changes._replace(rows=Ends.written(changes.rows, ends))
        self._roots = {
            name: roots(where.to_pylist(), before) for name, where in changes.unchanged.items()
        }
        # The rows that are not written yet and take values of the stored version, by the first
        # change of their key; and those that do not.
        self._waiting = defaultdict[int, list[int]](list)
        self._rest = list[int]()
        for at in range(len(seqs)):
            stored = next((~root[at] for root in self._roots.values() if root[at] < 0), None)
            (self._rest if stored is None else self._waiting[stored]).append(at)

    def write_filled(self, stored: pa.Table, heads: Sequence[int]) -> None:
        """Write the versions that take values of stored rows; `heads` has the change of each."""
        places = {head: at for at, head in enumerate(heads)}
        rows = [at for head in heads for at in self._waiting.pop(head, ())]
        self._write(rows, stored, places)

    def write_rest(self) -> ChangeBatch | None:
        """Write the other versions; return the one that continues."""
        unknown = [at for rows in self._waiting.values() for at in rows]
        self._write([*self._rest, *unknown], self._changes.rows.schema.empty_table(), {})
        return self._kept_row

    def _write(self, rows: Sequence[int], stored: pa.Table, places: Mapping[int, int]) -> None:
        """Write versions; `places` has the stored row that the first change of a key ends."""
        names = [*self._changes.unchanged, EXACT]
        pool = pa.concat_tables([stored.select(names), self._changes.rows.select(names)])
        for first in range(0, len(rows), targets.ROWS_AT_ONCE):
            some = rows[first : first + targets.ROWS_AT_ONCE]
            one = taken(self._changes, pa.array(some, pa.int64()))
            for name, where in one.unchanged.items():
                if where.true_count:
                    mine = (self._roots[name][at] for at in some)
                    source = [stored.num_rows + at if at >= 0 else places.get(~at) for at in mine]
                    filled = merged(
                        ChangeBatch(one.rows, one.deleted, {name: where}),
                        pool,
                        pa.array(source, pa.int64()),
                    )
                    one = one._replace(rows=filled.rows)
            if self._kept in some:
                last = pa.array([some.index(self._kept)])
                self._kept_row = taken(one._replace(unchanged={}), last)
            new = [at != self._kept for at in some]
            self._parts.add_all(one.rows.filter(pc.and_not(pa.array(new), one.deleted)))


def truncated(
    target: Target, file: StoredFile, ended: pa.Int32Array, parts: Parts
) -> pa.Int32Array:
    """Write a file's valid versions with their ends by a truncate; return all that end.

    Except for those at the positions `ended`, which end by a change of their key.
    """
    stored, every = StoredRows(target), [ended]
    ends = Ends(target.schema.empty_table(), target.truncates)
    for valid in stored.valid(file):
        left = only(valid, pc.invert(pc.is_in(valid.positions, value_set=ended)))
        every.append(left.positions)
        for rows, _ in stored.rows(left, kept_columns(target.schema)):
            parts.add_all(ends.rows(rows, [None] * rows.num_rows, target.schema))
    return pa.concat_arrays(every)
