"""Fill a follower's generation from the newest base and the archive, where they reach.

Used if there is a base, or if the topics have lost their beginning; otherwise the topics alone are
read. Not for followers that need every change of a table, nor for tables whose rows the archive
does not have: those are read again from the source, as without an archive.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from cdc.events import LSN
from cdc.log import names
from lockstep.jobs.apply.refilling import shortened
from lockstep.jobs.archiving.seam import lost_after
from lockstep.jobs.compacting import past, restoring
from lockstep.jobs.compacting.changes import PastChanges
from lockstep.jobs.compacting.restoring import Restoring
from lockstep.jobs.cuts.frontiers import FrontierFinder
from lockstep.sinks.contract import discard

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from cdc.config import Config
    from cdc.log.partitions import Partition
    from lockstep.jobs.compacting.past import PastState
    from lockstep.jobs.compacting.restoring import FillStart
    from lockstep.jobs.cuts.frontiers import Position
    from lockstep.jobs.generations.comparing import Newest
    from lockstep.sinks.contract import Applied, Sink, Version


class FromArchive:
    """The archive as a source of one follower's generations."""

    def __init__(
        self,
        config: Config,
        name: str,
        spark: Callable[[], SparkSession],
        progress: Callable[[str], None],
    ) -> None:
        self._config, self._name = config, name
        self._spark, self._progress = spark, progress
        self._state: PastState | None = None

    def start(self, sink: Sink, until: LSN | None, *, is_shortened: bool) -> FillStart | None:
        """Return from where to fill the follower; None if the topics, or the source, are read."""
        found = restoring.possible(self._config, self._name, sink, until)
        if found is None or not (found.state.base or is_shortened):
            return None
        if until is None and (late := self._begins_late(found)) is not None:
            self._progress(
                f"the archive ends at {found.state.frontier.applied.lsn}, and {late[0]}"
                f" [{late[1]}] begins later: the archive is not used"
            )
            return None
        return found

    def _begins_late(self, start: FillStart) -> Partition | None:
        """Return a partition that has lost events which the archive does not have either."""
        applied = start.state.frontier.applied
        counts = {topic: len(its) for topic, its in applied.ends.items()}
        firsts = shortened(self._config, {t: n for t, n in counts.items() if t in start.topics})
        frontier, ends = (names.frontier_topic(self._config.prefix), 0), applied.end_of
        late = {at: n for at, n in firsts.items() if at != frontier and n > ends.get(at, 0)}
        return lost_after(self._config, applied, late)

    def fill(
        self,
        sink: Sink,
        generation: int,
        start: FillStart,
        tables: frozenset[str] | None = None,
        *,
        joins: bool = True,
    ) -> Applied:
        """Fill a generation, unless it is at a frontier already; return its frontier.

        One that was partly filled is started over: rows may have been deleted since.
        """
        with closing(sink):
            state = sink.open()
            if state is not None and state.applied.place:
                return state.applied
            if state is not None and state.reached:
                discard(sink, generation)
                sink.open()
            filling = Restoring(self._config, self._name, start, self._spark, self._progress)
            return filling.fill(sink, generation, tables, joins=joins)

    def add(self, version: Version, applied: Applied, newest: Newest) -> dict[Partition, int]:
        """Add the archive's rows of a table, up to a frontier; return where its topic continues."""
        if self._config.archive.path is None:
            return {}
        if self._state is None or self._state.past.seq > applied.seq:
            self._state = past.find(self._config, applied.seq)
        state = self._state
        if state is None:
            return {}
        reader = PastChanges(state.past)
        for part in state.slices(frozenset({version.topic})):
            rows = reader.rows(part)
            columns = (rows[name].to_pylist() for name in ("topic", "key", "seq", "op"))
            for topic, key, seq, op in zip(*columns, strict=True):
                if topic == version.topic and key is not None:
                    newest.add(key, seq, there=op != "d")
        return state.frontier.applied.end_of


def lsn_at(config: Config, wanted: Position) -> LSN:
    """Return an LSN, or that of the last frontier not above a seq or a time.

    Raises GapError if neither topics nor archive have one.
    """
    if isinstance(wanted, LSN):
        return wanted
    with closing(FrontierFinder(config)) as log:
        placed = log.newest(wanted)
    if placed is not None:
        return LSN(placed.record.lsn)
    found = past.find(config, wanted) if config.archive.path is not None else None
    if found is None:
        raise past.missing_frontier(wanted)
    return found.frontier.applied.lsn
