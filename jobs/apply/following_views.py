"""Apply a follower's views, frontier by frontier of their mirror, as documents are.

The store has the views' rows, and by which definitions these were computed: with another one a view
is replaced in the next cut.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from cdc.events import LSN
from lockstep.jobs.apply.following_documents import DocumentsFollowing
from lockstep.jobs.spark.session import work_session
from lockstep.jobs.views.cuts import ViewCuts
from lockstep.jobs.views.plans import DEFINITIONS, SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

    from cdc.config import Config
    from lockstep.jobs.documents.mirror_cuts import MirrorCut
    from lockstep.sinks.contract import Sink


class ViewsFollowing(DocumentsFollowing):
    """One follower's views: what `Run` calls as its session."""

    def __init__(
        self,
        config: Config,
        name: str,
        sink: Sink,
        *,
        spark: Callable[[], SparkSession] | None = None,
        until: LSN | None = None,
        rebuilt: str | None = None,
    ) -> None:
        """`rebuilt`: compute this view again with the next frontier, and end."""
        self._rebuilt = rebuilt
        super().__init__(config, name, sink, spark=spark, until=until)

    def _cuts(self) -> ViewCuts:
        return ViewCuts(self._config, self._name, self._session)

    def _apply(self, cut: MirrorCut, generation: int) -> int:
        assert isinstance(self._mirror, ViewCuts), "it is made above"
        new = apply(self._mirror, self._sink, cut, generation, self._rebuilt)
        if self._rebuilt is not None:
            self._until = LSN(0)
        return new

    def _named(self) -> set[str]:
        return {f"{SCHEMA}.{name}" for name in self._mirror.names}

    @contextmanager
    def _session(self) -> Iterator[SparkSession]:
        assert self._spark is not None, "followers with views are given a session"
        title = f"{self._config.pipeline}: views of {self._name}"
        with work_session(self._spark(), title, threading.Event()) as spark:
            yield spark


def apply(
    views: ViewCuts, sink: Sink, cut: MirrorCut, generation: int, rebuilt: str | None = None
) -> int:
    """Apply the cut to a store; return how many changes of rows were new to it.

    The view `rebuilt` is computed completely.
    """
    applied = cut.after.applied
    above = cut.before.applied.seq if cut.before else 0
    sink.begin(applied.seq, views.tables_of(applied), above)
    built = definitions(views, sink)
    built.pop(rebuilt or "", None)
    new = sum(sink.write(changes) for changes in views.view_changes(cut, built))
    sink.commit(applied._replace(generation=generation))
    return new


def definitions(views: ViewCuts, sink: Sink) -> dict[str, str]:
    """Return the definitions by which the store's views were computed."""
    keys = [msgspec.json.encode({"view": name}) for name in views.names]
    found = map(msgspec.json.decode, sink.rows(DEFINITIONS, keys).values())
    return {row["view"]: row["definition"] for row in found}
