"""Repair a store that lost a part: a shadow build of that part, switched to once it is proved.

What is left stays as it is until then, and the follower's report says that it is at no frontier. It
is deleted after the switch, once no reader uses it. Rows that the log no longer has are read again
through the stream (`cdc snapshot`), which needs a daemon that streams: without one the follower
waits. Killed at any time, the next start continues.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.errors import StoppedError, StoreLostError
from lockstep.jobs.generations.builders import LogBuilder, MirrorBuilder, switching
from lockstep.jobs.generations.rebuilding import Rebuild
from lockstep.sinks.contract import Generations, ReadByGenerations

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from cdc.config import Config
    from lockstep.jobs.apply.running import FollowerRun
    from lockstep.sinks.contract import Applied, Sink


class Repair:
    """The repair of one follower's store: `FollowerRun` calls it with what the store has lost."""

    def __init__(self, config: Config, name: str, spark: Callable[[], SparkSession]) -> None:
        """`spark` waits for the session."""
        self._config, self._name, self._spark = config, name, spark

    def __call__(self, run: FollowerRun, sink: Sink, error: StoreLostError) -> None:
        """Return once readers see a generation that has everything."""
        assert isinstance(sink, Generations), "others start over"

        def progress(what: str) -> None:
            if run.stopping.is_set():
                raise StoppedError
            run.to("rebuilding", StoreLostError(f"{error.what}. {what}", hint=error.hint))

        def report(applied: Applied, why: str) -> None:
            if not why:
                run.opened_at(applied)
            switching(self._config, self._name, applied, why)

        builder = (
            MirrorBuilder(self._config, self._name, progress)
            if self._config.followers[self._name].documents
            else LogBuilder(self._config, self._name, self._spark, progress)
        )
        reported = run.read_report()
        rebuild = Rebuild(
            sink, builder, progress, report, reported=reported.generation if reported else 0
        )
        outcome = rebuild.run(error.tables, is_lost=True)
        if outcome.former in (None, outcome.generation):
            return
        if isinstance(sink, ReadByGenerations):
            sink.drop_unread(outcome.former)
        else:
            sink.drop(outcome.former)
