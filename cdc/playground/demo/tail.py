"""Read a pipeline's topics as they grow, read_committed, from the beginning.

One consumer without a group: nothing is stored, every reader sees everything. It tolerates a broker
that goes down and comes back. `caught_up` compares the position with the topics' high watermarks,
which include open transactions, so that a commit whose marker is not written yet is waited for.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from confluent_kafka import IsolationLevel, Message

from cdc.errors import UnavailableError
from cdc.log import absence, names, topics
from cdc.log.consumer import BEGINNING, LogConsumer

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.log.partitions import Partition

# A killed broker leads its partitions again within some ten seconds of its restart.
RETURN_SECONDS: Final = 30.0
AGAIN_SECONDS: Final = 0.2


class Seen(NamedTuple):
    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


class Tail:
    """Reads topics of events, frontiers and dead letters that exist at each `find_topics`."""

    def __init__(self, config: Config) -> None:
        self.frontier_topic = names.frontier_topic(config.prefix)
        self.dead_topic = names.dead_topic(config.prefix)
        self._config = config
        self._own = f"{config.prefix}.cdc."
        self.messages_topic = names.messages_topic(config.prefix)
        self._read = {self.frontier_topic, self.dead_topic, self.messages_topic}
        self._admin = topics.admin(config)
        self._consumer = LogConsumer(config)

    def find_topics(self) -> set[str]:
        """Start to read topics that are new, and return the names of all that are read."""
        wanted = {
            (name, partition)
            for name, count in topics.existing(self._admin, self._config.prefix).items()
            if name in self._read or not name.startswith(self._own)
            for partition in range(count)
        }
        if new := wanted - self._consumer.positions.keys():
            self._consumer.follow(dict.fromkeys(new, BEGINNING))
        return {name for name, _ in self._consumer.positions}

    def read(self, timeout_seconds: float) -> list[Seen]:
        """Return what has arrived; an empty list after the timeout."""
        return [_seen(each) for each in self._consumer.arrivals(timeout_seconds, gather=True)]

    def ends(self) -> dict[Partition, int]:
        """Return the high watermark of every partition that is read.

        A broker that has just come back answers before it knows that it leads them: it is asked
        again. Raises UnavailableError when that lasts.
        """
        deadline = time.monotonic() + RETURN_SECONDS
        while True:
            try:
                spans = absence.spans(
                    self._config, self._consumer.positions, IsolationLevel.READ_UNCOMMITTED
                )
            except UnavailableError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(AGAIN_SECONDS)
            else:
                return {each: there.end for each, there in spans.items()}

    def caught_up(self, ends: dict[Partition, int]) -> bool:
        """Return whether everything up to `ends` has been read."""
        positions = self._consumer.positions
        return all(positions.get(each, 0) >= end for each, end in ends.items())

    def close(self) -> None:
        self._consumer.close()


def _seen(message: Message) -> Seen:
    return Seen(
        str(message.topic()),
        int(message.partition() or 0),
        int(message.offset() or 0),
        message.key(),
        message.value(),
    )
