"""A table without a key in its mirror: only the values identify a row.

Inserts are appended. An update or a delete has the complete old row, of which there may be several
equal ones: one of them is deleted, and the table is rewritten. A missing old row was never in the
log (a table that was added without its rows), and is ignored.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from lockstep.sinks.delta import lake, layout
from lockstep.sinks.delta.work import merged

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from lockstep.sinks.delta.lake import Commit
    from lockstep.sinks.delta.work import Work

_OURS: Final = {layout.SEQ, layout.COMMIT_LSN, layout.COMMITTED_AT}


def apply(table: DeltaTable, work: Work, commit: Commit) -> None:
    """Apply the work in one commit."""
    batch, before = work.batch, work.before
    if before is not None and batch.unchanged:
        batch = merged(batch, before.rows, pa.array(range(batch.rows.num_rows)))
    if before is None and work.truncated is None:
        lake.append(table, batch.rows, commit)
        return
    names = batch.rows.column_names
    empty = batch.rows.schema.empty_table()
    stored = lake.read(table, names) if work.truncated is None else empty
    every = pa.concat_tables([stored, batch.rows])
    left = pa.array(_left(stored, work, batch.rows), pa.int64())
    lake.replace(table, every.take(left), commit)


def _left(stored: pa.Table, work: Work, rows: pa.Table) -> list[int]:
    """Return the indexes of the remaining rows: the stored rows, then the batch's."""
    places: defaultdict[str, list[int]] = defaultdict(list)
    for place, row in enumerate(_values(stored)):
        places[row].append(place)
    first = stored.num_rows
    old = _values(work.before.rows) if work.before is not None else [""] * rows.num_rows
    has_old = work.before.deleted.to_pylist() if work.before is not None else []
    removed = set[int]()
    for at, (row, deleted) in enumerate(
        zip(_values(rows), work.batch.deleted.to_pylist(), strict=True)
    ):
        if has_old and has_old[at] and places[old[at]]:
            removed.add(places[old[at]].pop())
        if deleted:
            removed.add(first + at)
        else:
            places[row].append(first + at)
    return [place for place in range(first + rows.num_rows) if place not in removed]


def _values(rows: pa.Table) -> list[str]:
    """Return the text of each row's values, which identifies it."""
    names = [name for name in rows.column_names if name not in _OURS]
    columns = [rows[name].to_pylist() for name in names]
    if layout.EXACT in names:
        exact = columns[names.index(layout.EXACT)]
        exact[:] = [each and sorted(each) for each in exact]
    return [repr(row) for row in zip(*columns, strict=True)]
