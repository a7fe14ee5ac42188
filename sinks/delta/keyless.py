"""A table without a key in its mirror: only the values identify a row.

Inserts are appended. An update or a delete has the complete old row, of which there may be several
equal ones: one of them is deleted. A missing old row was never in the log (a table that was added
without its rows), and is ignored. Columns that the source has dropped do not count: rows keep their
values in them, and no old row has them. `apply` rewrites the table, `replaced` reads none of it:
rows are found by a hash of their values.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import pyarrow as pa

from lockstep.sinks.delta import lake, layout
from lockstep.sinks.delta.keys import is_value, odd_values
from lockstep.sinks.delta.positions import RowsOfFile
from lockstep.sinks.delta.work import merged

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from deltalake import DeltaTable

    from lockstep.sinks.contract import Changes, Version
    from lockstep.sinks.delta.lake import CommitInfo
    from lockstep.sinks.delta.positions import DataFile, Positions
    from lockstep.sinks.delta.rows import ChangeBatch
    from lockstep.sinks.delta.work import Work

T = TypeVar("T")
Id = TypeVar("Id", str, bytes)
Place: TypeAlias = "tuple[DataFile, int]"


def apply(table: DeltaTable, work: Work, commit: CommitInfo) -> None:
    """Apply the work in one commit."""
    batch, before = _filled(work), work.before
    if before is None and work.truncated is None:
        lake.append(table, batch.rows, commit)
        return
    names = batch.rows.column_names
    empty = batch.rows.schema.empty_table()
    stored = lake.read(table, names) if work.truncated is None else empty
    every = pa.concat_tables([stored, batch.rows])
    left = pa.array(_left(stored, work, batch.rows), pa.int64())
    lake.replace(table, every.take(left), commit)


def replaced(work: Work, positions: Positions) -> tuple[list[RowsOfFile], pa.Table]:
    """Return the stored rows that are deleted, and the rows to add. Not for a truncate."""
    batch, before = _filled(work), work.before
    rows = positions.identities(batch.rows)
    old = None if before is None else positions.identities(before.rows).filter(before.deleted)
    if old is None:
        return [], batch.rows
    wanted = old.unique()
    names = wanted.to_pylist()
    stored = defaultdict[bytes, list[Place]](list)
    for each in positions.find(wanted):
        for row, name in zip(each.rows.to_pylist(), each.wanted.to_pylist(), strict=True):
            stored[names[name]].append((each.file, row))
    deletions, removed = _deletions(stored, rows.to_pylist(), old.to_pylist(), work)
    by_file = defaultdict[str, list[Place]](list)
    for place in deletions:
        by_file[place[0].path].append(place)
    hit = [
        RowsOfFile(of[0][0], pa.array(sorted(row for _, row in of), pa.int32()), pa.nulls(len(of)))
        for of in by_file.values()
    ]
    kept = [at for at in range(batch.rows.num_rows) if at not in removed]
    return hit, batch.rows.take(pa.array(kept, pa.int64()))


def old_rows(changes: Changes) -> Changes:
    """Return the changes with their old rows instead; an existing old row counts as deleted."""
    old = [
        change._replace(row=None if change.before else b"{}", unchanged=())
        for change in changes.changes
    ]
    return changes._replace(changes=old)


def _filled(work: Work) -> ChangeBatch:
    """Return the batch with values that were not sent filled from the old rows."""
    batch, before = work.batch, work.before
    if before is None or not batch.unchanged:
        return batch
    return merged(batch, before.rows, pa.array(range(batch.rows.num_rows)))


def _left(stored: pa.Table, work: Work, rows: pa.Table) -> list[int]:
    """Return the indexes of the remaining rows: the stored rows, then the batch's."""
    places: defaultdict[str, list[int]] = defaultdict(list)
    for place, row in enumerate(_values(stored, work)):
        places[row].append(place)
    many = rows.num_rows
    old = _values(work.before.rows.filter(work.before.deleted), work) if work.before else []
    deletions, removed = _deletions(places, _values(rows, work), old, work)
    left = [place for place in range(stored.num_rows) if place not in set(deletions)]
    return [*left, *(stored.num_rows + at for at in range(many) if at not in removed)]


def _deletions(
    stored: Mapping[Id, list[T]], rows: Sequence[Id], old: Sequence[Id], work: Work
) -> tuple[list[T], set[int]]:
    """Return which stored rows and which of the batch's rows, by index, are deleted.

    `stored` has the stored rows by identity, `rows` the identity of each of the batch's rows, and
    `old` those of the old rows that there are.
    """
    has_old = work.before.deleted.to_pylist() if work.before is not None else []
    olds, mine = iter(old), defaultdict[Id, list[int]](list)
    deletions, removed = list[T](), set[int]()
    for at, (row, deleted) in enumerate(zip(rows, work.batch.deleted.to_pylist(), strict=True)):
        if has_old and has_old[at]:
            each = next(olds)
            # The last one that the batch has added, or else any of the stored ones.
            if mine[each]:
                removed.add(mine[each].pop())
            elif stored.get(each):
                deletions.append(stored[each].pop())
        if deleted:
            removed.add(at)
        else:
            mine[row].append(at)
    return deletions, removed


def dropped(names: Iterable[str], version: Version) -> frozenset[str]:
    """Return those of a mirror's columns that a version of its table does not have."""
    present = {column.name.casefold() for column in version.columns}
    return frozenset(
        name for name in names if name not in layout.OURS and name.casefold() not in present
    )


def _values(rows: pa.Table, work: Work) -> list[str]:
    """Return the text of each row's values, which identifies it."""
    names = [each for each in rows.column_names if is_value(each) and each not in work.dropped]
    columns = [rows[name].to_pylist() for name in names]
    exact = names.index(layout.EXACT)
    columns[exact] = odd_values(columns[exact], work.dropped)
    return [repr(row) for row in zip(*columns, strict=True)]
