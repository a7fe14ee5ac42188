"""The work of a batch on a mirror, for every applier.

Pure, except for reading the stored values that a batch keeps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from lockstep.sinks.delta import keys, lake
from lockstep.sinks.delta.layout import EXACT, SEQ
from lockstep.sinks.delta.rows import ChangeBatch, only

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deltalake import DeltaTable

    from lockstep.sinks.contract import Change

# How many bytes of a table are searched for a batch's keys at a time.
LOOKED_BYTES: Final = 64 << 20


class Work(NamedTuple):
    """Changes to a mirror, and how it keeps its rows."""

    batch: ChangeBatch
    key: tuple[str, ...]
    truncated: int | None  # the seq below which all stored rows are deleted
    soft: bool  # a deleted row stays, marked
    history: bool  # every version of a row stays
    before: ChangeBatch | None = None  # for a table without a key: old rows, NULLs if there is none
    truncates: tuple[Change, ...] = ()  # for a history, which keeps the versions that they end
    dropped: frozenset[str] = frozenset()  # without a key: columns that identify no row

    @property
    def is_special(self) -> bool:
        """Whether it is more than the newest rows by key, which only delta-rs can apply."""
        return not self.key or self.history or self.truncated is not None

    @property
    def by_spark(self) -> bool:
        """Whether Spark's applier can apply it; of truncates, those that remove every row."""
        return bool(self.key) and not self.history

    def above(self, seq: int) -> Work:
        """Return the remaining work for a table that holds everything up to `seq`."""
        newer = pc.greater(self.batch.rows[SEQ], seq).combine_chunks()
        return self._replace(
            batch=only(self.batch, newer),
            before=self.before and only(self.before, newer),
            truncated=self.truncated if (self.truncated or 0) > seq else None,
            truncates=tuple(each for each in self.truncates if each.seq > seq),
        )


def filled(table: DeltaTable, batch: ChangeBatch, key: Sequence[str]) -> ChangeBatch:
    """Return the batch with values that were not sent filled from the stored rows."""
    if not batch.unchanged:
        return batch
    names = [*dict.fromkeys([*key, *batch.unchanged, EXACT])]
    keeps = any_of(batch.unchanged.values())
    stored = of_keys(table, batch.rows.filter(keeps), key, names)
    return merged(batch, stored, keys.places(batch.rows, stored, key))


def of_keys(
    table: DeltaTable, wanted: pa.Table, key: Sequence[str], columns: Sequence[str]
) -> pa.Table:
    """Return the stored rows that have one of the wanted keys, from a table of any size."""
    found, waiting, size = [lake.arrow_schema(table, columns).empty_table()], [], 0
    for part in lake.streamed(table, columns):
        waiting.append(part)
        size += part.nbytes
        if size >= LOOKED_BYTES:
            found.append(_matching(waiting, wanted, key))
            waiting, size = [], 0
    return pa.concat_tables([*found, *([_matching(waiting, wanted, key)] if waiting else [])])


def _matching(parts: list[pa.Table], wanted: pa.Table, key: Sequence[str]) -> pa.Table:
    stored = pa.concat_tables(parts)
    mine, theirs = keys.identities(wanted, stored, key)
    return stored.filter(pc.is_in(theirs, value_set=mine))


def merged(batch: ChangeBatch, stored: pa.Table, places: pa.Array) -> ChangeBatch:
    """Return the batch with values of `stored`; `places` has the stored row of each row."""
    rows, kept = batch.rows, stored.take(places)
    odd = kept[EXACT].combine_chunks()
    exact = rows[EXACT].to_pylist() if odd.null_count < len(odd) else None
    for name, where in batch.unchanged.items():
        values = pc.if_else(where, kept[name], rows[name])
        rows = rows.set_column(rows.schema.get_field_index(name), name, values)
        if exact is not None:
            texts = pc.if_else(where, lake.looked_up(odd, name), pa.scalar(None, pa.string()))
            for row in pc.indices_nonzero(texts.is_valid()).to_pylist():
                exact[row] = [*(exact[row] or []), (name, texts[row].as_py())]
    if exact is not None:
        place = rows.schema.get_field_index(EXACT)
        rows = rows.set_column(place, EXACT, pa.array(exact, rows.schema.field(place).type))
    return ChangeBatch(rows, batch.deleted, {})


def any_of(values: Iterable[pa.BooleanArray]) -> pa.BooleanArray:
    """Return which rows are true in any of the values."""
    first, *others = values
    for each in others:
        first = pc.or_(first, each)
    return first
