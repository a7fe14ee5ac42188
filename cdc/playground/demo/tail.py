"""Read a pipeline's topics as they grow, read_committed, from the beginning.

One consumer without a group: nothing is stored, every reader sees everything. It tolerates a broker
that goes down and comes back. `caught_up` compares the position with the topics' high watermarks,
which include open transactions, so that a commit whose marker is not written yet is waited for.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from confluent_kafka import (
    OFFSET_BEGINNING,
    IsolationLevel,
    KafkaError,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

from cdc.errors import UnavailableError
from cdc.log import names, topics
from cdc.log.client import translate, translated
from cdc.log.reader import consumer

if TYPE_CHECKING:
    from cdc.config import Config

_ANSWER_SECONDS: Final = 5.0
# A killed broker leads its partitions again within some ten seconds of its restart.
_RETURN_SECONDS: Final = 30.0
_AGAIN_SECONDS: Final = 0.2
_AT_ONCE: Final = 2000  # messages taken in one call

Place = tuple[str, int]


class Seen(NamedTuple):
    """One record, with the time in milliseconds at which the daemon published it."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    published_ms: int


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
        self._consumer = consumer(config, **{"reconnect.backoff.ms": 50})
        self._reached: dict[Place, int] = {}

    def find_topics(self) -> set[str]:
        """Start to read topics that are new, and return the names of all that are read."""
        wanted = {
            (name, partition)
            for name, count in topics.existing(self._admin, self._config.prefix).items()
            if name in self._read or not name.startswith(self._own)
            for partition in range(count)
        }
        new = wanted - self._reached.keys()
        if new:
            self._consumer.incremental_assign([TopicPartition(*n, OFFSET_BEGINNING) for n in new])
            self._reached.update(dict.fromkeys(new, 0))
        return {name for name, _ in self._reached}

    def read(self, timeout_seconds: float) -> list[Seen]:
        """Return what has arrived; an empty list after the timeout."""
        seen = []
        for message in self._consumer.consume(_AT_ONCE, timeout_seconds):
            error = message.error()
            if error is None:
                seen.append(_seen(message))
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the client's name
                self._reached[str(message.topic()), int(message.partition() or 0)] = (
                    message.offset() or 0
                )
            elif error.fatal():
                raise translate(error, f"reading {message.topic()}")
        return seen

    def ends(self) -> dict[Place, int]:
        """Return the high watermark of every partition that is read.

        A broker that has just come back answers before it knows that it leads them: it is asked
        again. Raises UnavailableError when that lasts.
        """
        deadline = time.monotonic() + _RETURN_SECONDS
        while True:
            try:
                return self._ends()
            except UnavailableError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_AGAIN_SECONDS)
                self._admin = topics.admin(self._config)  # it knows the current leaders

    def _ends(self) -> dict[Place, int]:
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        wanted = {TopicPartition(*place): latest for place in self._reached}
        if not wanted:
            return {}
        with translated("looking up the ends of the topics"):
            asked = self._admin.list_offsets(
                wanted,
                isolation_level=IsolationLevel.READ_UNCOMMITTED,
                request_timeout=_ANSWER_SECONDS,
            )
            return {(p.topic, p.partition): f.result().offset for p, f in asked.items()}

    def caught_up(self, ends: dict[Place, int]) -> bool:
        """Return whether everything up to `ends` has been read."""
        return all(self._reached.get(place, 0) >= end for place, end in ends.items())

    def close(self) -> None:
        self._consumer.close()


def _seen(message: Message) -> Seen:
    return Seen(
        str(message.topic()),
        int(message.partition() or 0),
        int(message.offset() or 0),
        message.key(),
        message.value(),
        message.timestamp()[1],
    )
