"""Read a cut's events and count them; those of the next cut while this one is written.

A sink writes files or waits for a server, mostly outside the interpreter. Of a backlog, where the
next cut is full already, a thread reads and reduces its events meanwhile, as far as that needs no
store. At most one cut is ahead, and its turn comes in the order of the log: what is wrong with it
is raised then, not before.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from cdc.errors import MiscountedError
from cdc.log import compaction, names
from cdc.log.partitions import OffsetRange
from lockstep.jobs.cuts.dead_letters import CutLetters
from lockstep.jobs.cuts.reduce import Bounds, NeedsOrderError, Reduced, newest

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from concurrent.futures import Future

    from cdc.config import Config
    from cdc.log.partitions import Partition
    from cdc.log.ranges import RangeReader, Records
    from lockstep.jobs.cuts.cutting import Cut, CutPart
    from lockstep.jobs.cuts.reduce import Events


class Most(NamedTuple):
    """The largest cut that this process reads."""

    events: int
    bytes: int


class CutEvents(NamedTuple):
    """A cut's events, as many as the frontiers count; of one that is large, its messages alone."""

    is_large: bool  # more than this process reads
    records: Mapping[Partition, Records]
    letters: CutLetters
    by_topic: Mapping[str, list[Events]]  # the tables' ones, in their partitions
    newest: Mapping[str, Reduced]  # of the topics for which that is enough


class CutReading:
    """Reads a follower's cuts, each once."""

    def __init__(self, config: Config, log: RangeReader, histories: Collection[str]) -> None:
        """`histories`: the tables of which a store keeps every change. Closes `log`, too."""
        self._config, self._histories = config, histories
        self.log = log  # of the other thread alone, while that reads ahead
        self._pool = ThreadPoolExecutor(1, "ahead")
        self._ahead: tuple[Cut, Future[CutEvents]] | None = None

    def close(self) -> None:
        """Wait for what is read ahead, and close the connections."""
        self._pool.shutdown()
        self.log.close()

    def start(self, cut: Cut, most: Most) -> None:
        """Read a cut in the background, which the next call of `read` asks for."""
        self._ahead = cut, self._pool.submit(self._read, cut, most)

    def read(self, cut: Cut, most: Most) -> CutEvents:
        """Return a cut's events; raise GapError if some are missing, or there twice."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return self._read(cut, most)
        assert ahead[0] is cut, "cuts are read in their order"
        return ahead[1].result()

    def _expect_counts(self, cut: Cut, records: Mapping[Partition, Records]) -> None:
        """Compare each partition's number of events with the frontiers' count."""
        for part in cut.parts:
            place = (part.topic, part.partition)
            read = records.get(place)
            if read is not None and part.events != len(read.values):
                self.log.expect_complete(place, OffsetRange(part.start, part.end))
                raise miscounted(self._config, cut, part, len(read.values))

    def _read(self, cut: Cut, most: Most) -> CutEvents:
        ranges = {
            (part.topic, part.partition): OffsetRange(part.start, part.end) for part in cut.parts
        }
        dead = (names.dead_topic(self._config.prefix), 0)
        letters = CutLetters(self.log, dead, ranges.pop(dead, None))
        records = self.log.read(ranges, most.bytes) if cut.events <= most.events else None
        is_large = records is None
        if records is None:
            messages = (names.messages_topic(self._config.prefix), 0)
            records = self.log.read({at: each for at, each in ranges.items() if at == messages})
        assert records is not None, "this reading has no limit"
        self._expect_counts(cut, records)
        by_topic = self._by_topic(records)
        found = self._newest(by_topic, Bounds(cut.above, cut.seq))
        return CutEvents(is_large, records, letters, by_topic, found)

    def _by_topic(self, records: Mapping[Partition, Records]) -> dict[str, list[Events]]:
        by_topic: dict[str, list[Events]] = {}
        own = f"{self._config.prefix}.cdc."
        for (topic, _), each in sorted(records.items()):
            if not topic.startswith(own) and each.values:
                by_topic.setdefault(topic, []).append((each.keys, each.values))
        return by_topic

    def _newest(self, by_topic: Mapping[str, list[Events]], bounds: Bounds) -> dict[str, Reduced]:
        found = {}
        for topic, partitions in by_topic.items():
            if names.table_name(self._config.prefix, topic) not in self._histories:
                with suppress(NeedsOrderError):
                    found[topic] = newest(partitions, bounds)
        return found


def miscounted(config: Config, cut: Cut, part: CutPart, found: int) -> MiscountedError:
    """Return the error for a partition whose count differs."""
    what = (
        f"holds {found} events from offset {part.start} to {part.end - 1}, where the frontiers of"
        f" seq {cut.above + 1} to {cut.seq} count {part.events}"
    )
    if found < part.events:
        compacted = compaction.explained(config, (part.topic, part.partition), what)
        if compacted is not None:
            return compacted
    return MiscountedError(
        f"{part.topic} [{part.partition}] {what}",
        hint="records are lost or duplicated: the topic was emptied or recreated, truncated by an"
        " unclean election, or was not followed before"
        + (" (this follower reads it from its beginning)" if part.start == 0 else ""),
    )
