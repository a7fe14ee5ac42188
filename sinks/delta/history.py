"""A mirror that keeps every version of a row (SCD type 2).

A change adds a version and ends the previous one at the change's transaction, so that at any LSN at
most one version of a row is valid, from `_commit_lsn` to `_valid_to_lsn` (exclusive; NULL: still
valid). A delete only ends one. All versions of one transaction are kept; those that were never
visible end where they start.

One commit per batch: it ends stored versions and adds new ones. `apply` merges, and reads all
valid versions; `replaced` reads those of the batch's keys.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import WriterProperties

from lockstep.sinks.delta import keys as delta_keys
from lockstep.sinks.delta import lake
from lockstep.sinks.delta.lake import quoted
from lockstep.sinks.delta.layout import (
    COMMIT_LSN,
    COMMITTED_AT,
    CURRENT,
    EXACT,
    SEQ,
    VALID_TO,
    VALID_TO_LSN,
)
from lockstep.sinks.delta.parquet_form import GROUP_ROWS
from lockstep.sinks.delta.rows import ChangeBatch
from lockstep.sinks.delta.work import merged

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deltalake import DeltaTable

    from lockstep.sinks.contract import Change
    from lockstep.sinks.delta.lake import CommitInfo
    from lockstep.sinks.delta.positions import Positions, RowsOfFile
    from lockstep.sinks.delta.work import Work

# The stored version that a row ends; in the merge's source its seq, and NULL in a new version.
_ENDS: Final = "_ends"
# What an end changes in a version.
ENDED: Final = (VALID_TO_LSN, VALID_TO, CURRENT)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_End: TypeAlias = "tuple[int, int, datetime]"  # seq, commit LSN and time of what ends a version


def apply(table: DeltaTable, work: Work, commit: CommitInfo) -> None:
    """Apply the work in one commit."""
    stored = _current(table, work)
    new, ended = versions(stored, work)
    if work.truncated is not None:
        lake.replace(table, new, commit)
        return
    of = stored.take(ended[_ENDS])
    ended = ended.set_column(0, _ENDS, of[SEQ])
    # Rows of a view, and of a direct snapshot, share a seq: only its key shows which of them ends.
    shared = pc.count_distinct(stored[SEQ]).as_py() < stored.num_rows
    keys = work.key if shared else ()
    for name in (*keys, EXACT) if shared else ():
        ended = ended.append_column(of.schema.field(name), of[name])
    source = pa.concat_tables(
        [ended, new.append_column(_ENDS, pa.nulls(new.num_rows, pa.int64()))],
        promote_options="default",
    )
    same = "".join(f" AND {delta_keys.same(of, name)}" for name in keys)
    values = {quoted(name): f"s.{quoted(name)}" for name in new.column_names}
    ends = {quoted(name): f"s.{quoted(name)}" for name in ENDED}
    (
        table.merge(
            source,
            f"t.{quoted(SEQ)} = s.{quoted(_ENDS)} AND t.{quoted(CURRENT)}{same}",
            source_alias="s",
            target_alias="t",
            # With the complete batch in memory, its values decide which files are read. Not for
            # keys: bounds do not know -0, and there are no array literals.
            streamed_exec=shared,
            writer_properties=WriterProperties(max_row_group_size=GROUP_ROWS),
            commit_properties=commit.properties,
        )
        .when_matched_update(updates=ends)
        .when_not_matched_insert(updates=values, predicate=f"s.{quoted(_ENDS)} IS NULL")
        .execute()
    )


def replaced(
    table: DeltaTable, work: Work, positions: Positions
) -> tuple[list[RowsOfFile], pa.Table]:
    """Return the stored versions that end, and the rows to add: the ended ones, and new versions.

    Not for a batch with a truncate, which ends every version.
    """
    schema = lake.arrow_schema(table)
    kept = pa.schema([field for field in schema if field.name not in ENDED])
    found = list(positions.find(positions.identities(work.batch.rows).unique()))
    parts = [positions.rows(table, each, kept) for each in found]
    stored = pa.concat_tables([kept.empty_table(), *parts])
    new, ended = versions(stored, work)
    places = ended[_ENDS].combine_chunks()
    rows = stored.take(places)
    for name in ENDED:
        rows = rows.append_column(schema.field(name), ended[name])
    rows = rows.select(schema.names)
    ends = pc.is_in(pa.arange(0, stored.num_rows), value_set=places)
    first = accumulate((len(each.rows) for each in found), initial=0)
    hit = [
        each.only(ends.slice(at, len(each.rows))) for each, at in zip(found, first, strict=False)
    ]
    return [each for each in hit if len(each.rows)], pa.concat_tables([new, rows])


def _current(table: DeltaTable, work: Work) -> pa.Table:
    """Return the stored versions that are valid, which a batch can end or fill values from."""
    names = [*dict.fromkeys([*work.key, SEQ, EXACT, *work.batch.unchanged])]
    if work.truncated is not None:  # all rows are of another generation and are replaced
        return lake.arrow_schema(table).empty_table().select(names)
    return lake.read(table, names, quoted(CURRENT))


def versions(stored: pa.Table, work: Work) -> tuple[pa.Table, pa.Table]:
    """Return the new versions, and the index and end of each stored version that ends."""
    batch, key = work.batch, work.key
    rows, theirs = delta_keys.identities(batch.rows, stored, key)
    first = pc.index_in(rows, value_set=theirs).to_pylist()
    before, after = neighbours(rows.to_pylist())
    batch = _filled(batch, stored, first, before)
    ends = Ends(batch.rows, work.truncates)
    heads = {
        place: at
        for at, (place, earlier) in enumerate(zip(first, before, strict=True))
        if place is not None and earlier is None
    }
    seqs = stored[SEQ].to_pylist()
    touched = range(len(seqs)) if work.truncates else heads
    ended = {place: ends.of(seqs[place], heads.get(place)) for place in touched}
    mine = batch.rows[SEQ].to_pylist()
    new = ends.written(batch.rows, [ends.of(mine[at], next_) for at, next_ in enumerate(after)])
    return new.filter(pc.invert(batch.deleted)), ends.alone(ended, new.schema)


class Ends:
    """The ends of versions: the next change of their key, or a truncate before it."""

    def __init__(self, changes: pa.Table, truncates: Iterable[Change]) -> None:
        names = (SEQ, COMMIT_LSN, COMMITTED_AT)
        seqs, lsns, times = (changes[name].to_pylist() for name in names)
        self._changes = list(zip(seqs, lsns, times, strict=True))
        self._truncates = sorted(
            (each.seq, each.commit_lsn, _instant(each.committed_at_us)) for each in truncates
        )

    def of(self, seq: int, change: int | None) -> _End | None:
        """Return the end of the version with that seq; `change` is the next one of its key."""
        followed = [] if change is None else [self._changes[change]]
        cut = next((each for each in self._truncates if each[0] > seq), None)
        return min([*followed, *([cut] if cut else [])], default=None)

    def rows(self, stored: pa.Table, changes: Sequence[int | None], schema: pa.Schema) -> pa.Table:
        """Return stored versions with their ends; each has the next change of its key."""
        seqs = stored[SEQ].to_pylist()
        ends = [self.of(seq, change) for seq, change in zip(seqs, changes, strict=True)]
        return self.written(lake.under(stored, schema), ends)

    @staticmethod
    def written(rows: pa.Table, ends: list[_End | None]) -> pa.Table:
        """Return new versions with the columns of their ends."""
        for name, values in (
            (VALID_TO_LSN, [end and end[1] for end in ends]),
            (VALID_TO, [end and end[2] for end in ends]),
            (CURRENT, [end is None for end in ends]),
        ):
            place = rows.schema.get_field_index(name)
            field = rows.schema.field(place)
            rows = rows.set_column(place, field, pa.array(values, field.type))
        return rows

    @staticmethod
    def alone(ended: dict[int, _End | None], schema: pa.Schema) -> pa.Table:
        """Return the indexes of stored versions that end, with their ends."""
        ending = [(place, end) for place, end in ended.items() if end is not None]
        return pa.table(
            {
                _ENDS: [place for place, _ in ending],
                VALID_TO_LSN: [end[1] for _, end in ending],
                VALID_TO: [end[2] for _, end in ending],
                CURRENT: [False] * len(ending),
            },
            schema=pa.schema(
                [
                    (_ENDS, pa.int64()),
                    *(schema.field(name) for name in ENDED),
                ]
            ),
        )


def _instant(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)


def neighbours(keys: list[Any]) -> tuple[list[int | None], list[int | None]]:
    """Return, for each row, the previous and the next row of the same key."""
    before: list[int | None] = [None] * len(keys)
    after: list[int | None] = [None] * len(keys)
    last: dict[Any, int] = {}
    for at, key in enumerate(keys):
        if (earlier := last.get(key)) is not None:
            before[at], after[earlier] = earlier, at
        last[key] = at
    return before, after


def roots(kept: Sequence[bool], before: Sequence[int | None]) -> list[int]:
    """Return the row whose value each row has in a column that some rows keep.

    `~n` for a value of the stored version that row `n` ends.
    """
    found: list[int] = []
    for at, (is_kept, earlier) in enumerate(zip(kept, before, strict=True)):
        if not is_kept:
            found.append(at)
        else:
            found.append(~at if earlier is None else found[earlier])
    return found


def kept_columns(schema: pa.Schema) -> list[str]:
    """Return the columns that a version keeps when it ends."""
    return [name for name in schema.names if name not in ENDED]


def _filled(
    batch: ChangeBatch, stored: pa.Table, first: list[int | None], before: list[int | None]
) -> ChangeBatch:
    """Return the batch with values that were not sent filled from the previous version."""
    if not batch.unchanged:
        return batch
    many = stored.num_rows
    names = [*batch.unchanged, EXACT]
    pool = pa.concat_tables([stored.select(names), batch.rows.select(names)])
    for name, where in batch.unchanged.items():
        source = [many + at if at >= 0 else first[~at] for at in roots(where.to_pylist(), before)]
        one = ChangeBatch(batch.rows, batch.deleted, {name: where})
        batch = ChangeBatch(
            merged(one, pool, pa.array(source, pa.int64())).rows, batch.deleted, batch.unchanged
        )
    return batch
