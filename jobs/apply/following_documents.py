"""Apply a follower's documents, frontier by frontier of their mirror.

A session polls the mirror (`jobs.documents.mirror_cuts`) for a cut from the store's frontier to the
newest one, and applies it.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Final

from cdc.config.stores import seconds_between_cuts
from cdc.errors import GapError, OvertakenError
from cdc.events import LSN
from cdc.log import names
from cdc.log.partitions import OffsetRange
from cdc.log.ranges import RangeReader
from lockstep.jobs.apply import canaries, positions
from lockstep.jobs.documents.kinds import SCHEMA
from lockstep.jobs.documents.mirror_cuts import MirrorCut, MirrorCuts
from lockstep.sinks.contract import StoreState

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from cdc.config import Config
    from lockstep.jobs.apply.running import FollowerRun
    from lockstep.sinks.contract import Sink


# Seconds between two polls for a new frontier of the mirror.
_POLL_SECONDS: Final = 0.2
# Tables of this size, in bytes: a smaller build takes less than the start of a session.
EXECUTORS_FROM_BYTES: Final = 16 << 20
# How many of the latest messages are searched for the newest canary.
_CANARY_OFFSETS: Final = 200


class DocumentsFollowing:
    """One follower's documents: what `FollowerRun` calls as its session."""

    def __init__(
        self,
        config: Config,
        name: str,
        sink: Sink,
        *,
        spark: Callable[[], SparkSession] | None = None,
        until: LSN | None = None,
        exactly: bool = False,
    ) -> None:
        """`until`: end once that LSN is applied, `exactly` there; `spark` starts a session."""
        self._spark = spark
        self._config, self._name, self._sink, self._until = config, name, sink, until
        self._through = until if exactly else None
        self._mirror = self._cuts()

    def _cuts(self) -> MirrorCuts:
        return MirrorCuts(self._config, self._name)

    @property
    def _most_events(self) -> int | None:
        """How many events a cut may span, because the driver holds what it changes."""
        return self._config.followers[self._name].max_events

    def _apply(self, cut: MirrorCut, generation: int) -> int:
        return apply(self._mirror, self._sink, cut, generation, self._spark)

    def _before_cut(self) -> None:
        """Do what is due before each cut, and each look for one."""

    def _named(self) -> set[str]:
        """Return what the store has, as tables."""
        return {f"{SCHEMA}.{name}" for name in self._mirror.names}

    def __call__(self, run: FollowerRun) -> None:
        """Follow until asked to stop, or until an error."""
        every = max(_POLL_SECONDS, seconds_between_cuts(self._config, self._name))
        with closing(self._sink), closing(RangeReader(self._config)) as log:
            state = positions.open_in_log(run, self._sink)
            run.progress.reach("opened")
            applied = state.applied
            while not run.stopping.is_set():
                if self._until is not None and applied.lsn >= self._until:
                    return
                self._before_cut()
                cut = self._mirror.cut(state, self._through, self._most_events)
                if cut is None:
                    run.polled()
                    run.stopping.wait(_POLL_SECONDS)
                    continue
                if cut.before is None:  # its first build may take long
                    run.to("catching_up")
                began = time.monotonic()
                try:
                    new = self._apply(cut, applied.generation)
                except OvertakenError:
                    run.stopping.wait(_POLL_SECONDS)
                    state = positions.open_in_log(run, self._sink)
                    applied = state.applied
                    continue
                applied = cut.after.applied._replace(generation=applied.generation)
                state = StoreState(applied, applied.seq)
                seconds = time.monotonic() - began
                run.has_applied(applied, new, self._named(), seconds, self._canary(cut, log))
                run.stopping.wait(max(0.0, every - seconds))

    def _canary(self, cut: MirrorCut, log: RangeReader) -> int | None:
        """Return when the newest canary up to the mirror's frontier was sent."""
        topic = names.messages_topic(self._config.prefix)
        before = cut.before.applied.ends if cut.before else {}
        (first, *_), (end, *_) = (
            ends.get(topic, (0,)) or (0,) for ends in (before, cut.after.applied.ends)
        )
        first = max(first, end - _CANARY_OFFSETS)
        if first >= end:
            return None
        try:
            found = log.read({(topic, 0): OffsetRange(first, end)})
        except GapError:
            return None  # retention has deleted them; this time is only reported
        return canaries.newest(self._config, found or {})


def apply(
    mirror: MirrorCuts,
    sink: Sink,
    cut: MirrorCut,
    generation: int,
    spark: Callable[[], SparkSession] | None = None,
) -> int:
    """Apply the cut to a store; return how many document changes were new to it.

    `spark` starts the session in which executors build all documents of large tables.
    """
    applied = cut.after.applied
    above = None if cut.replaces else cut.before.applied.seq if cut.before else 0
    sink.begin(applied.seq, [kind.version for kind in mirror.kinds(applied)], above)
    first = mirror.builds(cut) if spark is not None and sink.parallel else None
    if spark is not None and first is not None and first[1] >= EXECUTORS_FROM_BYTES:
        from lockstep.jobs.apply import building_documents as building  # noqa: PLC0415 - pyspark takes a second to import

        new = building.build(spark(), first[0], sink, first[1])
    else:
        new = sum(sink.write(changes) for changes in mirror.changes(cut))
    sink.commit(applied._replace(generation=generation))
    return new
