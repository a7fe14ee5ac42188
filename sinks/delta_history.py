"""A mirror that keeps every version of a row (SCD type 2).

A change adds a version and ends the one before it: what ends it is the transaction of the change,
so that at any LSN at most one version of a row holds, from `_commit_lsn` to `_valid_to_lsn`
(exclusive; NULL: still). A delete only ends one. Versions of one transaction are all there; those
that none could see end where they begin.

One commit a batch: stored versions end, new ones are added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from sinks import delta_keys, delta_lake
from sinks.delta_lake import quoted
from sinks.delta_layout import COMMIT_LSN, COMMITTED_AT, CURRENT, EXACT, SEQ, VALID_TO, VALID_TO_LSN
from sinks.delta_rows import Batch
from sinks.delta_work import merged

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from sinks.delta_lake import Commit
    from sinks.delta_work import Work

# Of the merge's source alone: the stored version that a row of it ends, NULL in a new version.
_ENDS: Final = "_ends"


def apply(table: DeltaTable, work: Work, commit: Commit) -> None:
    """Do the work, in one commit."""
    new, ended = versions(table, work)
    source = pa.concat_tables([ended, new], promote_options="default")
    values = {quoted(name): f"s.{quoted(name)}" for name in new.column_names if name != _ENDS}
    ends = {quoted(name): f"s.{quoted(name)}" for name in (VALID_TO_LSN, VALID_TO, CURRENT)}
    (
        table.merge(
            source,
            f"t.{quoted(SEQ)} = s.{quoted(_ENDS)} AND t.{quoted(CURRENT)}",
            source_alias="s",
            target_alias="t",
            streamed_exec=False,
            commit_properties=commit.properties,
        )
        .when_matched_update(updates=ends)
        .when_not_matched_insert(updates=values, predicate=f"s.{quoted(_ENDS)} IS NULL")
        .execute()
    )


def versions(table: DeltaTable, work: Work) -> tuple[pa.Table, pa.Table]:
    """Return the new versions, and for each stored one that ends its seq and its end."""
    batch, key = work.batch, work.key
    names = [*dict.fromkeys([*key, SEQ, EXACT, *batch.unchanged])]
    stored = delta_lake.read(table, names, f"{quoted(CURRENT)}")
    rows, theirs = delta_keys.identities(batch.rows, stored, key)
    first = pc.index_in(rows, value_set=theirs).to_pylist()
    before, after = _neighbours(rows.to_pylist())
    batch = _filled(batch, stored, first, before)
    end_lsn, end_at = _ends_of(batch.rows, after)
    new = batch.rows
    for name, values in (
        (VALID_TO_LSN, end_lsn),
        (VALID_TO, end_at),
        (CURRENT, pa.array([each is None for each in after])),
    ):
        place = new.schema.get_field_index(name)
        new = new.set_column(place, new.schema.field(place), values)
    new = new.append_column(_ENDS, pa.nulls(new.num_rows, pa.int64()))
    ending = [
        (at, place)
        for at, (place, earlier) in enumerate(zip(first, before, strict=True))
        if place is not None and earlier is None
    ]
    return new.filter(pc.invert(batch.deleted)), _ending(batch.rows, stored, ending)


def _neighbours(keys: list[Any]) -> tuple[list[int | None], list[int | None]]:
    """Return, for each row, which comes before it and which after it of the same key."""
    before: list[int | None] = [None] * len(keys)
    after: list[int | None] = [None] * len(keys)
    last: dict[Any, int] = {}
    for at, key in enumerate(keys):
        if (earlier := last.get(key)) is not None:
            before[at], after[earlier] = earlier, at
        last[key] = at
    return before, after


def _filled(
    batch: Batch, stored: pa.Table, first: list[int | None], before: list[int | None]
) -> Batch:
    """Return the batch with the values that were not sent: of the version before."""
    if not batch.unchanged:
        return batch
    many = stored.num_rows
    names = [*batch.unchanged, EXACT]
    pool = pa.concat_tables([stored.select(names), batch.rows.select(names)])
    for name, where in batch.unchanged.items():
        kept = where.to_pylist()
        source: list[int | None] = []
        for at, (place, earlier) in enumerate(zip(first, before, strict=True)):
            if not kept[at]:
                source.append(many + at)
            else:
                source.append(source[earlier] if earlier is not None else place)
        one = Batch(batch.rows, batch.deleted, {name: where})
        batch = Batch(
            merged(one, pool, pa.array(source, pa.int64())).rows, batch.deleted, batch.unchanged
        )
    return batch


def _ends_of(rows: pa.Table, after: list[int | None]) -> tuple[pa.Array, pa.Array]:
    ends = pa.array(after, pa.int64())
    return (
        rows[COMMIT_LSN].combine_chunks().take(ends),
        rows[COMMITTED_AT].combine_chunks().take(ends),
    )


def _ending(rows: pa.Table, stored: pa.Table, ending: list[tuple[int, int]]) -> pa.Table:
    """Return the seqs of stored versions, and when they end."""
    at = pa.array([each for each, _ in ending], pa.int64())
    ended = stored[SEQ].combine_chunks().take(pa.array([each for _, each in ending], pa.int64()))
    kind = rows.schema
    return pa.table(
        {
            _ENDS: ended,
            VALID_TO_LSN: rows[COMMIT_LSN].combine_chunks().take(at),
            VALID_TO: rows[COMMITTED_AT].combine_chunks().take(at),
            CURRENT: pa.repeat(pa.scalar(value=False), len(ending)),
        },
        schema=pa.schema(
            [
                (_ENDS, pa.int64()),
                *((n, kind.field(n).type) for n in (VALID_TO_LSN, VALID_TO, CURRENT)),
            ]
        ),
    )
