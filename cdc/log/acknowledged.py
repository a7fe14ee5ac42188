"""Write records outside of transactions, and wait until the brokers have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from confluent_kafka import Producer

from cdc.errors import UnavailableError
from cdc.log.client import settings, translate, translated

if TYPE_CHECKING:
    from collections.abc import Iterable

    from confluent_kafka import KafkaError, Message

    from cdc.config import Config

_TIMEOUT_SECONDS: Final = 30.0


class AcknowledgedWriter:
    """Writes into one topic's partition 0, with a connection that stays open."""

    def __init__(self, config: Config, topic: str) -> None:
        self._topic = topic
        with translated(f"producing to {topic}"):
            self._producer = Producer(
                settings(config, **{"enable.idempotence": True, "acks": "all", "linger.ms": 0})
            )

    def write(self, written: Iterable[tuple[bytes, bytes | None]]) -> None:
        """Return once the log holds these keys and values. Blocks."""
        failed: list[KafkaError] = []

        def delivered(error: KafkaError | None, _: Message) -> None:
            if error is not None:
                failed.append(error)

        topic = self._topic
        with translated(f"producing to {topic}"):
            for key, value in written:
                self._producer.produce(topic, value, key, partition=0, on_delivery=delivered)
            left = self._producer.flush(_TIMEOUT_SECONDS)
        if failed:
            raise translate(failed[0], f"producing to {topic}")
        if left:
            raise UnavailableError(
                f"producing to {topic}: no broker has acknowledged after {_TIMEOUT_SECONDS:.0f} s",
                hint="see that the brokers run; then repeat it",
            )


def write(config: Config, topic: str, written: Iterable[tuple[bytes, bytes | None]]) -> None:
    """Return once the log holds these keys and values, in partition 0. Blocks."""
    AcknowledgedWriter(config, topic).write(written)
