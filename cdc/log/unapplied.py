"""Since when the log holds what a follower has not applied: by the next frontier record."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from confluent_kafka import KafkaError, TopicPartition

from cdc.log import names
from cdc.log.client import translate, translated, watermarks
from cdc.log.reader import consumer

if TYPE_CHECKING:
    from confluent_kafka import Consumer

    from cdc.config import Config

_TIMEOUT_SECONDS: Final = 10.0


class Unapplied(NamedTuple):
    """When the oldest frontier was written that is not applied; None if all are applied.

    `forgotten`: the log has deleted frontiers after the place, and the events with them.
    """

    since_us: int | None = None
    forgotten: bool = False


class Places:
    """Looks up offsets of the frontier topic, with a consumer that stays open but unassigned."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._topic = names.frontier_topic(config.prefix)
        self._client: Consumer | None = None

    def unapplied(self, place: int) -> Unapplied:
        """Return what is at a place, the offset after an applied frontier's record."""
        if self._client is None:
            self._client = consumer(self._config)
        client, part = self._client, TopicPartition(self._topic, 0, place)
        with translated(f"looking up the offsets of {self._topic}", client):
            low, end = watermarks(client, part, timeout=_TIMEOUT_SECONDS)
        if place >= end:
            return Unapplied()
        part.offset = max(place, low)
        try:
            with translated(f"assigning {self._topic}"):
                client.assign([part])
            return Unapplied(self._written_us(client), place < low)
        finally:
            client.unassign()

    def _written_us(self, client: Consumer) -> int | None:
        """Return when the next record was written; None if the topic ends first."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            message = client.poll(left)
            error = message.error() if message is not None else None
            if message is not None and error is None:
                return int(message.timestamp()[1]) * 1_000
            if error is not None and error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001
                return None  # after the place there are only transaction markers
        raise translate(KafkaError(KafkaError._TIMED_OUT), f"reading {self._topic}")  # noqa: SLF001

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None
