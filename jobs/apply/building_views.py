"""Write all rows of a view in executors, in the one pass that computes them.

Each task has the rows of some keys. In Delta it writes them to files of its own, as they are, and
returns their actions: the driver commits these with the cut, and until then nothing of them is
visible. To another store that many processes may write to it writes them as changes; of a store
that one transaction writes to, it loads them next to the table, and the cut takes them. The driver
gets no rows, except those of a task that has few: a view of few rows is remembered.

A task that is repeated writes its files again under other names; no commit names the former ones.
"""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from cdc import failpoints
from lockstep.jobs.spark.map_in_arrow import in_arrow, packed, unpacked
from lockstep.jobs.views import definitions, results
from lockstep.jobs.views.answers import MOST_ROWS, GatheredRows
from lockstep.jobs.views.computing import Built
from lockstep.sinks.contract import Changes, LoadedByTasks, WrittenByTasks
from lockstep.sinks.delta import buckets, targets
from lockstep.sinks.delta.rows import arranged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyspark.sql import DataFrame

    from lockstep.jobs.views.plans import ViewPlan
    from lockstep.sinks.contract import Applied, Loader, Sink
    from lockstep.sinks.delta.targets import Target

# The rows that a task returns to the driver, if it has no more, as Arrow.
_FEW_BYTES: Final = 1 << 20
# `new`: changes that were new to the store. `few`: a task's rows, "" if they are many.
_RESULTS: Final = "action binary, new long, few binary, wrong string"
_SCHEMA: Final = pa.schema(
    [("action", pa.binary()), ("new", pa.int64()), ("few", pa.binary()), ("wrong", pa.string())]
)


class ViewBuilder:
    """Builds views in one store."""

    def __init__(self, sink: Sink, begin: Callable[[], None]) -> None:
        """`begin` is called before anything is written."""
        self._sink, self._begin = sink, begin
        self.new = 0  # changes that were new to the store

    def __call__(
        self, view: ViewPlan, rows: DataFrame, at: Applied, truncated: int | None
    ) -> Built | None:
        """Write the rows; return None if they must be passed to the sink's `write`."""
        self._begin()
        target = self._target(view, at, truncated)
        loader = self._loader(view) if target is None else None
        if target is None and loader is None:
            return None
        if loader is self._sink:
            self._empty(view, truncated)
            # A sink that gathers small writes sends them before it reads: the definition is in the
            # store before any row.
            definitions.stored(self._sink, [view.name])
        task = _Task(view, tuple(rows.columns), at, target, loader)
        # A name with a point would be a field's.
        numbered = rows.toDF(*(str(place) for place in range(len(rows.columns))))
        found = in_arrow(numbered, partial(_written, task), _RESULTS).collect()
        if wrong := next((row.wrong for row in found if row.wrong), None):
            raise results.key_error(view, wrong)
        if target is not None:
            assert isinstance(self._sink, WrittenByTasks), "it has given the target"
            actions = [json.loads(bytes(row.action)) for row in found if row.action is not None]
            self._sink.stage(target, actions)
        if loader is None or loader is self._sink:
            self.new += sum(row.new or 0 for row in found)
        else:
            assert isinstance(self._sink, LoadedByTasks), "it has given the loader"
            self._empty(view, truncated)
            self.new += self._sink.take(loader, at.seq)
        failpoints.reach("view_built")
        return Built(_few([bytes(row.few) for row in found if row.few is not None]))

    def _loader(self, view: ViewPlan) -> Loader | None:
        """Return what tasks pass changes to: the sink itself, or its loader; None if neither."""
        if self._sink.parallel:
            return self._sink
        if not isinstance(self._sink, LoadedByTasks):
            return None
        found: Loader | None = self._sink.loader(view.version)
        return found

    def _empty(self, view: ViewPlan, truncated: int | None) -> None:
        """Delete the rows below a seq, if one is given."""
        if truncated is not None:
            self.new += self._sink.write(Changes((view.version,), [], truncated))

    def _target(self, view: ViewPlan, at: Applied, truncated: int | None) -> Target | None:
        """Return what tasks need to write files of a Delta table that then has no other rows."""
        if not isinstance(self._sink, WrittenByTasks):
            return None
        found = self._sink.target((view.version,), at.seq, truncated)
        if not isinstance(found, targets.Target) or found.is_history:
            return None
        if found.files and not found.replaces:
            return None
        return found


def _few(parts: list[bytes]) -> pa.Table | None:
    """Return the rows of all tasks; None if they are many."""
    if not parts or not all(parts):
        return None
    rows = pa.concat_tables(map(unpacked, parts))
    return rows if rows.num_rows <= MOST_ROWS else None


# -- in executors ----------------------------------------------------------------------------------


class _Task(NamedTuple):
    """What a task does with its rows. Pickles."""

    view: ViewPlan
    columns: tuple[str, ...]
    at: Applied
    target: Target | None
    loader: Loader | None


class _WrongKeyError(Exception):
    """Rows with a key that is none: to be reported, since another attempt would find them again."""


def _written(task: _Task, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the rows of a task's keys."""
    few, new, actions, wrong = GatheredRows(_FEW_BYTES), 0, list[bytes](), None
    parts = _checked(task, batches, few)
    try:
        if task.target is not None:
            schema, at = task.target.schema, task.at
            typed = (arranged(results.typed(task.view, rows), schema, at) for rows in parts)
            actions = list(buckets.appended(task.target, typed))
            new = sum(_rows(each) for each in actions)
        else:
            new = _passed(task, parts)
    except _WrongKeyError as error:
        wrong = str(error)
    rows: list[dict[str, Any]] = [{"action": each} for each in actions]
    found = few.rows
    data = b"" if few.is_over else None if found is None else packed(found)
    rows.append({"new": new, "few": data, "wrong": wrong})
    yield pa.RecordBatch.from_pylist(rows, _SCHEMA)


def _checked(
    task: _Task, batches: Iterator[pa.RecordBatch], few: GatheredRows
) -> Iterator[pa.Table]:
    for batch in batches:
        rows = pa.Table.from_batches([batch]).rename_columns(list(task.columns))
        if not rows.num_rows:
            continue
        if wrong := results.wrong_key(task.view, rows):
            raise _WrongKeyError(wrong)
        few.add(rows)
        yield rows


def _passed(task: _Task, parts: Iterable[pa.Table]) -> int:
    """Pass rows to the loader; return how many were new to the store."""
    assert task.loader is not None, "there is no target"
    view, new = task.view, 0
    with closing(task.loader) as loader:
        for rows in parts:
            found = results.encoded(view, results.typed(view, rows))
            made = [results.change(view, task.at, key, row) for key, row in found]
            new += loader.write(Changes((view.version,), made))
    return new


def _rows(action: bytes) -> int:
    """Return how many rows the file has that an action adds."""
    found: int = json.loads(json.loads(action)["add"]["stats"])["numRecords"]
    return found
