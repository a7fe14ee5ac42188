"""Apply a batch to a mirror by delta-rs: for tables that are small, or change everywhere.

Files that hold a row of the batch are rewritten, so the cost of a merge is the size of those files.
One commit per batch, with any content.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from lockstep.sinks.delta import history, keyless, keys, lake, layout
from lockstep.sinks.delta import work as delta_work
from lockstep.sinks.delta.lake import quoted

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from lockstep.sinks.delta.lake import CommitInfo
    from lockstep.sinks.delta.work import Work

# A column of the source only: which rows are deletes.
IS_DELETE: Final = "_is_delete"


def apply(table: DeltaTable, work: Work, commit: CommitInfo) -> None:
    """Apply the work in one commit."""
    with lake.translated(table.table_uri):
        if work.history:
            history.apply(table, work, commit)
        elif not work.key:
            keyless.apply(table, work, commit)
        elif work.truncated is not None:
            lake.replace(table, work.batch.rows.filter(pc.invert(work.batch.deleted)), commit)
        else:
            _merge(table, work, commit)


def _merge(table: DeltaTable, work: Work, commit: CommitInfo) -> None:
    batch = delta_work.filled(table, work.batch, work.key)
    rows = batch.rows.append_column(IS_DELETE, batch.deleted)
    on = " AND ".join(keys.same(batch.rows, name) for name in work.key)
    newer = f"s.{quoted(layout.SEQ)} > t.{quoted(layout.SEQ)}"
    values = {quoted(name): f"s.{quoted(name)}" for name in batch.rows.column_names}
    merge = table.merge(
        rows,
        on,
        source_alias="s",
        target_alias="t",
        # With the complete batch in memory, its keys decide which files are read. Not for array
        # keys: delta-rs has no array literals.
        streamed_exec=any(pa.types.is_list(batch.rows[name].type) for name in work.key),
        commit_properties=commit.properties,
    )
    if pc.any(batch.deleted).as_py():
        merge = _deletes(merge, newer, soft=work.soft)
    merge.when_matched_update(
        updates=values, predicate=f"{newer} AND NOT s.{quoted(IS_DELETE)}"
    ).when_not_matched_insert(updates=values, predicate=f"NOT s.{quoted(IS_DELETE)}").execute()


def _deletes(merge: Any, newer: str, *, soft: bool) -> Any:  # noqa: ANN401 - delta-rs' builder
    deletes = f"{newer} AND s.{quoted(IS_DELETE)}"
    if not soft:
        return merge.when_matched_delete(predicate=deletes)
    marked = {quoted(name): f"s.{quoted(name)}" for name in layout.MARKED}
    return merge.when_matched_update(updates=marked, predicate=deletes)
