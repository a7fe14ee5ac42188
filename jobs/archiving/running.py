"""The archive's session: cut after cut of the log into its table. Read this first.

A cut is what lies between two frontiers, of all topics. Its records are read, compared with the
frontiers' counts and digests, and written to files, in this process or, of a large cut, in
executors. One commit names the files of the cut, with the position up to which the archive then
holds the log. The position is nowhere else: so a cut is in the archive completely and once,
wherever the job is killed and however often it runs.

Of a backlog executors start with the next cut while this one is written (`cuts`). A conflict with
another copy's commit ends the session, as any error does; the next one starts from the table.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Final

from cdc import failpoints
from cdc.errors import CDCError, ConfigError, GapError
from cdc.log.frontier_tail import FrontierTail
from cdc.log.ranges import RangeReader
from cdc.operate.followers import NEW_ARCHIVE
from lockstep.jobs.archiving.cuts import Cuts, end_of
from lockstep.jobs.archiving.table import ArchiveTable
from lockstep.jobs.archiving.upkeep import ArchiveUpkeep
from lockstep.jobs.cuts.cutting import Cutter, Limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from cdc.config import Config
    from cdc.events import LSN
    from lockstep.jobs.apply.running import FollowerRun
    from lockstep.jobs.archiving.cuts import StartedCut
    from lockstep.jobs.archiving.layout import ArchivePosition
    from lockstep.jobs.cuts.cutting import Cut
    from lockstep.sinks.contract import Applied

_POLL_SECONDS: Final = 0.25
# How often an idle log's frontier is committed without records.
_IDLE_SECONDS: Final = 60.0


class Archiving:
    """Archives the log until asked to stop; called once a session by its `FollowerRun`."""

    def __init__(
        self, config: Config, spark: Callable[[], SparkSession] | None, until: LSN | None = None
    ) -> None:
        """`spark` returns the session for large cuts; without it this process takes them."""
        self._config, self._spark, self._until = config, spark, until

    def __call__(self, run: FollowerRun) -> None:
        config = self._config
        archive = opened(config)
        position = archive.open()
        run.opened_at(position.applied)
        run.commit = archive.newest_commit()
        failpoints.reach("archive_opened")
        upkeep = ArchiveUpkeep(archive, config.archive)
        with (
            closing(RangeReader(config)) as reader,
            closing(Cuts(config, archive, reader, self._spark)) as cuts,
            closing(_Tail(config, position.applied, self._until)) as tail,
        ):
            self._follow(run, cuts, tail, position, upkeep)

    def _follow(
        self,
        run: FollowerRun,
        cuts: Cuts,
        tail: _Tail,
        position: ArchivePosition,
        upkeep: ArchiveUpkeep,
    ) -> None:
        ahead: StartedCut | CDCError | None = None
        while not run.stopping.is_set() and not self._reached(position.applied):
            if isinstance(ahead, CDCError):
                raise ahead
            started = ahead
            if started is None:
                cut = tail.next(_POLL_SECONDS)
                if cut is None:
                    run.polled()
                    continue
                started = cuts.start(cut, end_of(position))
            began = time.monotonic()
            failpoints.reach("archive_cut")
            ahead = self._start_next(cuts, tail, started)
            position, topics = cuts.archive(started, position)
            failpoints.reach("archive_committed")
            tail.committed()
            assert position.newest is not None
            seconds = time.monotonic() - began
            run.commit = cuts.newest_commit()
            run.has_applied(position.applied, position.newest.events, topics, seconds, None)
            if upkeep.tick(position):
                run.commit = cuts.newest_commit()

    @staticmethod
    def _start_next(cuts: Cuts, tail: _Tail, started: StartedCut) -> StartedCut | CDCError | None:
        """Start the next cut while executors write one, if it is full; return its error.

        An error is raised in its turn, so that what is before it is archived.
        """
        try:
            cut = tail.full() if started.tasks is not None else None
            return None if cut is None else cuts.start(cut, started.end)
        except CDCError as error:
            return error

    def _reached(self, applied: Applied) -> bool:
        return self._until is not None and applied.lsn >= self._until


def with_remedy(error: CDCError) -> CDCError:
    """Return a gap with how there is an archive again; return any other error unchanged."""
    if not isinstance(error, GapError) or NEW_ARCHIVE in error.hint:
        return error
    hint = f"{error.hint}. If the log can't be restored: {NEW_ARCHIVE}"
    return type(error)(error.what, hint=hint)


def opened(config: Config) -> ArchiveTable:
    """Return the configured archive; raise ConfigError if there is none."""
    if config.archive.path is None:
        raise ConfigError(
            "no archive is configured", hint="set archive.path to where its table shall be"
        )
    return ArchiveTable(config.archive.path, config.archive.storage, config.pipeline)


class _Tail:
    """The cuts after a position, as frontiers arrive, at most one in `archive.every_seconds`."""

    def __init__(self, config: Config, applied: Applied, until: LSN | None) -> None:
        ours = config.archive
        limits = Limits(ours.max_events, ours.max_bytes)
        self._cutter = Cutter(applied, lambda _: True, limits, through=until)
        self._tail = FrontierTail(config, applied.place, applied.seq)
        self._seconds, self._until = ours.every_seconds, until
        self._committed_at = 0.0
        self._newest, self._newest_seq = applied.lsn, applied.seq
        self._seq = applied.seq

    def close(self) -> None:
        self._tail.close()

    def committed(self) -> None:
        """Note that a cut was committed."""
        self._committed_at = time.monotonic()

    def next(self, seconds: float) -> Cut | None:
        """Return the next cut; None if none is due within these seconds. Raises GapError."""
        self._gather(seconds)
        elapsed = time.monotonic() - self._committed_at
        idle = self._newest_seq == self._seq
        if self._is_full or elapsed >= (_IDLE_SECONDS if idle else self._seconds):
            return self._take()
        return None

    def full(self) -> Cut | None:
        """Return the next cut if what arrives later changes nothing of it. Raises GapError."""
        self._gather(0.0)
        return self._take() if self._is_full else None

    @property
    def _is_full(self) -> bool:
        is_last = self._until is not None and self._newest >= self._until
        return self._cutter.has_enough or is_last

    def _gather(self, seconds: float) -> None:
        if not self._cutter.has_enough:
            for record, offset in self._tail.arrivals(seconds):
                self._cutter.add(record, offset)
                self._newest, self._newest_seq = record.lsn, record.seq

    def _take(self) -> Cut | None:
        cut = self._cutter.take(time.monotonic())
        if cut is not None:
            self._seq = cut.seq
        return cut
