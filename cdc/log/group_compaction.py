"""Notice that compaction removed events which a group of readers has not received.

Kafka skips them for its consumers without a word. So in topics that are compacted the events after
a group's place are counted, when a member gets the partition and, while it reads, again before the
compaction lag could pass. Nothing is read where all of them are younger than the lag.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.log import compaction, topics
from cdc.log.frontier_search import FrontierSearch
from cdc.log.table_cuts import expect_counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cdc.config import Config
    from cdc.log.partitions import Partition

# How many checks there are within a lag.
_TIMES: Final = 4
_MOST_SECONDS: Final = 600.0
# Clocks of producers differ.
_MARGIN_SECONDS: Final = 60.0


class GroupPlace(NamedTuple):
    """Where a group is in a partition; no record from there on was published before `ms`.

    In milliseconds since 1970; 0 if it is not known.
    """

    offset: int
    ms: int


class GroupCompaction:
    """Checks the places of one member in those of its topics that are compacted."""

    def __init__(self, config: Config, read: Iterable[str]) -> None:
        """Ask which topics are compacted. Blocks."""
        self._config = config
        self._topics = frozenset(each for each in read if compaction.is_compacted(config, each))
        self._lag_seconds = 0.0
        if self._topics:
            self._lag_seconds = _lag_seconds(config, self._topics)
        self._checked: dict[Partition, GroupPlace] = {}
        self._check_at = 0.0

    def check(self, places: Mapping[Partition, GroupPlace]) -> None:
        """Raise CompactedError if events from these places on are missing."""
        mine = {each: at for each, at in places.items() if each[0] in self._topics}
        self._check_at = time.monotonic() + min(_MOST_SECONDS, self._lag_seconds / _TIMES)
        if not mine:
            return
        youngest_ms = 1_000 * (time.time() + _MARGIN_SECONDS - self._lag_seconds)
        old = {each: at for each, at in mine.items() if at.ms < youngest_ms}
        if not old:
            return
        with closing(FrontierSearch(self._config)) as search:
            found = {each: _seq_before(search, each, at) for each, at in old.items()}
        for each, seq in found.items():
            expect_counted(self._config, each[0], seq, {each})

    def check_if_due(self, places: Mapping[Partition, GroupPlace]) -> None:
        """Check from the places of the last check on, if the lag could pass; note these."""
        if not self._topics or time.monotonic() < self._check_at:
            return
        self.check({each: self._checked[each] for each in places if each in self._checked})
        self._checked |= places

    def got(self, places: Mapping[Partition, GroupPlace]) -> None:
        """Check the places of partitions that the member has got, and note them."""
        self.check(places)
        self._checked |= places


def _seq_before(search: FrontierSearch, partition: Partition, place: GroupPlace) -> int:
    """Return the seq of the last frontier whose events in a partition are all before a place."""
    found = search.published_before(place.ms - int(1_000 * _MARGIN_SECONDS))
    seq, start = (found.record.seq, found.offset + 1) if found else (0, search.first)
    for each in search.read(start, search.end):
        ends = (end for *at, end, _ in each.record.partitions if tuple(at) == partition)
        if next(ends, 0) > place.offset:
            break
        seq = each.record.seq
    return seq


def _lag_seconds(config: Config, chosen: Iterable[str]) -> float:
    """Return for how long none of these topics loses an event to compaction."""
    found = compaction.readable_settings(config, sorted(chosen)).values()
    least = [int(each.get(topics.LAG, "0")) for each in found]
    return min(topics.lag_ms(config), *least) / 1_000
