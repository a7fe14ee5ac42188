"""Run followers in this process, a thread for each: for `jobs.follow`, and for applications."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cdc.errors import Exit
from cdc.events import LSN
from lockstep.jobs.apply.running import FollowerRun
from lockstep.jobs.spark.starting import SparkStart, session_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pyspark.sql import SparkSession

    from cdc.config import Config
    from cdc.errors import CDCError, StoreLostError
    from lockstep.sinks.contract import Sink

_TURN_SECONDS: Final = 0.2


def follow(
    config: str | Path,
    followers: Iterable[str] = (),
    *,
    until: str | LSN | None = None,
    stopping: threading.Event | None = None,
    spark: SparkSession | None = None,
) -> None:
    """Keep the stores of followers (default: all) equal to the source, as `cdc follow` does.

    Returns once all have applied the LSN `until`, or after the current batches once `stopping` is
    set. A follower that halts does not affect the others; its error is raised when they have ended.
    Large cuts are applied in `spark`, or in a session that is started when it is needed.
    """
    from cdc.config import load  # noqa: PLC0415 - `jobs.follow` has loaded it
    from cdc.config.followers import chosen_names  # noqa: PLC0415 - as above

    loaded = load(Path(config))
    names = chosen_names(loaded.followers, list(followers) or None)
    end = LSN.parse(until) if isinstance(until, str) else until
    start = start_of(loaded, names, spark)
    runs = [run_of(start, loaded, name, end) for name in names]
    run_all(runs, stopping or threading.Event())
    for run in runs:
        if run.exit is not Exit.OK and run.error is not None:
            raise run.error


def start_of(config: Config, names: Sequence[str], spark: SparkSession | None = None) -> SparkStart:
    """Return the start of the session that these followers share, `spark` if it is there."""
    title = f"lockstep followers of {config.pipeline}"
    begin = partial(session_of, title, config, names) if spark is None else lambda: spark
    return SparkStart(begin, {name for name in names if not config.followers[name].is_derived})


def run_of(
    spark: SparkStart,
    config: Config,
    name: str,
    until: LSN | None = None,
    standby_seconds: float | None = None,
) -> FollowerRun:
    """Return the run of one follower."""
    from lockstep.jobs.apply import stores  # noqa: PLC0415 - the job has printed its first line

    follower = config.followers[name]
    sink = stores.sink(config, name, follower)
    return FollowerRun(
        config,
        name,
        stores.kind(follower),
        _following(spark, config, name, sink, until),
        # A lost store of views starts over: its first cut computes all of them.
        repair=None if follower.views else partial(_repair, config, name, spark.now),
        standby_seconds=standby_seconds,
        remedy=partial(_with_start, config, name, sink),
    )


# Only what these followers use is imported: a restarted one is late by what it imports first, and
# views alone import Spark.


def _following(
    spark: SparkStart, config: Config, name: str, sink: Sink, until: LSN | None
) -> Callable[[FollowerRun], None]:
    """Return the session of a follower of tables, documents or views."""
    follower = config.followers[name]
    if follower.views:
        from lockstep.jobs.apply.following_views import ViewsFollowing  # noqa: PLC0415 - see above

        return ViewsFollowing(config, name, sink, spark=spark.now, until=until)
    if follower.documents:
        from lockstep.jobs.apply.following_documents import DocumentsFollowing  # noqa: PLC0415 - see above

        return DocumentsFollowing(config, name, sink, spark=spark.now, until=until)
    from lockstep.jobs.apply.following import Following  # noqa: PLC0415 - see above

    return Following(spark, config, name, sink, until=until)


def _repair(
    config: Config,
    name: str,
    spark: Callable[[], SparkSession],
    run: FollowerRun,
    sink: Sink,
    error: StoreLostError,
) -> None:
    from lockstep.jobs.generations.repairing import Repair  # noqa: PLC0415 - see above

    Repair(config, name, spark)(run, sink, error)


def _with_start(config: Config, name: str, sink: Sink, error: CDCError) -> CDCError:
    from lockstep.jobs.compacting import restoring  # noqa: PLC0415 - see above

    return restoring.with_start(config, name, sink, error)


def run_all(
    runs: Sequence[FollowerRun], stop: threading.Event, on_stop: Callable[[], None] = lambda: None
) -> None:
    """Run them until all have ended, asked to stop, or without the JVM that one of them needs."""
    threads = [threading.Thread(target=run.run, name=run.name) for run in runs]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        # Only another process can start Spark again.
        if any(run.exit is Exit.TEMPORARY for run in runs) or stop.wait(_TURN_SECONDS):
            on_stop()
            for run in runs:
                run.stop()
            for thread in threads:
                thread.join()
