"""Hold Kafka's compaction back while a reader of the log lags.

Followers, the archive, and groups of readers need every event that they have not read. So the
daemon compares how long the log has held what they lack with the compaction lag. From half of it
on nothing of any topic is compacted, until all of them are nearer again; so a daemon that stops
afterwards, for however long, costs them nothing. A configured follower that has never run holds
compaction too: it would read the topics from their beginning.

It is also how the topics get their lag: a changed setting, and one that somebody else has lowered,
are corrected here.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from cdc.log import group_states, topics
from cdc.log.consumer import LogConsumer
from cdc.log.group_records import GroupReadings
from cdc.operate.followers import FollowersReader
from cdc.operate.monitor import Monitor
from cdc.operate.verdict import GROUP

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.config import Config
    from cdc.log.partitions import OffsetRange, Partition
    from cdc.operate.metrics import Metrics

log = logging.getLogger("cdc.operate.compaction")

_CHECK_SECONDS: Final = 15.0
# The share of the compaction lag that a reader may lag.
_SHARE: Final = 0.5
# How many checks there are at least within this share.
_TIMES: Final = 4


class LagsReader:
    """Reads how long the log has held what its readers lack, until `close`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.admin = topics.admin(config)
        self._followers = FollowersReader(config)
        self._groups = GroupReadings(config)
        self._log: LogConsumer | None = None

    def lagging(self, seconds: float, compacted: frozenset[str]) -> list[str]:
        """Return the readers that lag by more than this, and have not lost anything yet.

        Of groups only what they lack of the compacted topics counts.
        """
        found = []
        for each in self._followers.read(None):
            lost = each.unapplied is not None and each.unapplied.forgotten
            if not lost and (each.record is None or (each.lag_seconds or 0.0) > seconds):
                found.append(each.name)
        self._groups.read_new()
        for record in self._groups.groups.values():
            state = group_states.state(self.admin, self._config, record)
            left = {at: its for at, its in state.unacknowledged.items() if at[0] in compacted}
            if not state.gap and self._lag_seconds(left) > seconds:
                found.append(GROUP + record.group)
        return sorted(found)

    def _lag_seconds(self, ranges: dict[Partition, OffsetRange]) -> float:
        if not ranges:
            return 0.0
        if self._log is None:
            self._log = LogConsumer(self._config, skip_deleted=True)
        oldest_us = self._log.oldest_us(ranges)
        return 0.0 if oldest_us is None else time.time() - oldest_us / 1e6

    def close(self) -> None:
        """Close the connections."""
        self._followers.close()
        self._groups.close()
        if self._log is not None:
            self._log.close()


class CompactionHold(Monitor[None]):
    """Gives the compacted topics of a session their lag, until `close`."""

    def __init__(
        self, config: Config, compacted: Callable[[], frozenset[str]], metrics: Metrics
    ) -> None:
        """Start at once. `compacted` returns the topics as they are by now."""
        self._compacted, self._metrics = compacted, metrics
        self._lag_ms = topics.lag_ms(config)
        self._seconds = _SHARE * self._lag_ms / 1_000
        self._lags = lags = LagsReader(config)
        seconds = min(_CHECK_SECONDS, self._seconds / _TIMES)
        super().__init__("compaction", seconds, lags, self._hold, None)

    def _hold(self) -> None:
        reader, compacted = self._lags, self._compacted()
        lagging = reader.lagging(self._seconds, compacted) if compacted else []
        wanted = str(topics.NO_COMPACTION if lagging else self._lag_ms)
        found = topics.settings_of(reader.admin, sorted(compacted))
        wrong = [topic for topic, its in found.items() if its.get(topics.LAG) != wanted]
        if self._over.is_set():  # another session's may hold it by now
            return
        topics.alter(reader.admin, {topic: {topics.LAG: wanted} for topic in wrong})
        if lagging != self._metrics.compaction_held:
            log.info("compaction", extra={"fields": {"held_by": lagging}})
        self._metrics.compaction_held = lagging
