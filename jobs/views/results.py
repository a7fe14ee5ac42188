"""What Spark computes of a view, as its store gets it.

Spark's rows have the view's columns, and `#new`: how many rows have that row's key. A key that is
none is an error of the view's definition, which is reported, not raised: an executor's task would
be tried again.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.errors import NoAnswerError
from lockstep.jobs.views.comparing import has_duplicates
from lockstep.sinks.contract import Change
from lockstep.sinks.delta import json as delta_json
from lockstep.sinks.delta import layout
from lockstep.sinks.delta.columns import arrow_type, one_chunk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockstep.jobs.views.plans import ViewPlan
    from lockstep.sinks.contract import Applied

# The column with the number of rows of a key; no column of Postgres' is named so.
COUNT: Final = "#new"


def wrong_key(view: ViewPlan, rows: pa.Table) -> str:
    """Return what is wrong with the keys of rows that are grouped by them; "" if nothing is."""
    return _wrong(view, rows, repeated=bool(pc.any(pc.greater(rows[COUNT], 1)).as_py()))


def checked(view: ViewPlan, rows: pa.Table) -> pa.Table:
    """Return rows that are not grouped; raise NoAnswerError for a key that is none."""
    if wrong := _wrong(view, rows, repeated=has_duplicates(rows, view.key)):
        raise key_error(view, wrong)
    return rows


def _wrong(view: ViewPlan, rows: pa.Table, *, repeated: bool) -> str:
    if repeated:
        return f"several rows with one {', '.join(view.key)}"
    without = next((each for each in view.key if rows[each].null_count), None)
    return f"rows without {without}" if without else ""


def key_error(view: ViewPlan, what: str) -> NoAnswerError:
    """Return the error of a view with such rows."""
    return NoAnswerError(
        f"view {view.name} has {what}",
        hint="`key` must identify its rows: name more columns, or leave such rows out of it",
    )


def typed(view: ViewPlan, rows: pa.Table) -> pa.Table:
    """Return the view's columns with the types of its table in Delta."""
    arrays = {
        name: one_chunk(rows[name]).cast(arrow_type(kind.delta))
        for name, kind in view.columns.items()
    }
    return pa.table(arrays)


def encoded(view: ViewPlan, rows: pa.Table) -> Iterator[tuple[bytes, bytes]]:
    """Yield the key and the complete row of each row of the view's types, as sinks get them."""
    exact = pa.nulls(rows.num_rows, pa.map_(pa.string(), pa.string()))
    return delta_json.rows(rows.append_column(layout.EXACT, exact), view.version)


def change(view: ViewPlan, at: Applied, key: bytes, row: bytes | None) -> Change:
    """Return the change of one key at a frontier; None: it has no row."""
    op = "d" if row is None else "c"
    return Change(key, at.seq, row, view.version.schema_id, at.lsn, at.committed_at_us, op=op)
