"""A Spark session that starts while followers already work without it.

Starting a JVM takes most of a small machine for ten seconds, and those are the seconds in which
followers catch up after a restart. So it waits until each of them has, or until one cannot continue
without it. spark-submit has started the JVM already: its cores catch up faster, and are soon used.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Final

from cdc.errors import StoppedError
from cdc.runtime import spark as files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pyspark.sql import SparkSession

    from cdc.config import Config

# How long followers may work before spark-submit's session is used anyway.
_WAIT_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.1


class SparkStart:
    """Starts a session in a thread of its own, once all `followers` or a large cut want it."""

    def __init__(self, start: Callable[[], SparkSession], followers: set[str]) -> None:
        self.session: Future[SparkSession] = Future()
        self.cores = 0  # how many tasks the session runs at a time
        self._start, self._missing = start, set(followers)
        self._wanted, self._starting = threading.Event(), threading.Lock()
        self._is_started = False
        if followers:
            self._begin()

    def want(self, follower: str) -> None:
        """Note that a follower has caught up."""
        self._missing.discard(follower)
        if not self._missing:
            self._wanted.set()

    def now(self) -> SparkSession:
        """Return the session, which starts now if it has not."""
        return self.started(threading.Event())

    def started(self, stopping: threading.Event) -> SparkSession:
        """Return the session, which starts now if it has not; raise the error that prevents it.

        Raises StoppedError if `stopping` is set first.
        """
        self._wanted.set()
        self._begin()
        while not stopping.is_set():
            if wait([self.session], _POLL_SECONDS).done:
                return self.session.result()
        raise StoppedError

    def _begin(self) -> None:
        with self._starting:
            if not self._is_started:
                self._is_started = True
                threading.Thread(target=self._run, name="spark-start", daemon=True).start()

    def _run(self) -> None:
        self._wanted.wait(_WAIT_SECONDS if files.submitted() else None)
        try:
            session = self._start()
            self.cores = session.sparkContext.defaultParallelism
            self.session.set_result(session)
        except BaseException as error:  # noqa: BLE001 - raised where the session is used
            self.session.set_exception(error)


def session_of(title: str, config: Config, followers: Iterable[str]) -> SparkSession:
    """Start the session that these followers need."""
    from cdc.runtime.progress import Progress  # noqa: PLC0415 - only where Spark is needed
    from lockstep.jobs.spark.session import session  # noqa: PLC0415 - pyspark takes a second

    chosen = [config.followers[name] for name in followers]
    delta = any(each.delta is not None or each.is_derived for each in chosen)
    return session(title, delta=delta, jars=() if files.submitted() else files.jars(Progress()))
