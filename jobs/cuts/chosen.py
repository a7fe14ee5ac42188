"""Which topics a follower reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.config.stores import follows
from cdc.log import names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cdc.config import Config
    from cdc.config.followers import Follower


class Chosen:
    """Decides for every topic of the pipeline whether a follower reads it."""

    def __init__(self, config: Config, follower: Follower) -> None:
        self._prefix, self._follower = config.prefix, follower
        self._known = {
            names.messages_topic(config.prefix): True,
            names.dead_topic(config.prefix): True,
        }

    def follows(self, topic: str) -> bool:
        """Return whether the topic is read: its tables' topics, all messages and dead letters."""
        if topic not in self._known:
            schema, table = names.table_of(self._prefix, topic)
            self._known[topic] = follows(self._follower, schema, table)
        return self._known[topic]

    def among(self, partitions: Mapping[str, int]) -> dict[str, int]:
        """Return which of the topics are read, with their partition counts."""
        return {topic: count for topic, count in partitions.items() if self.follows(topic)}
