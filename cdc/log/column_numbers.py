"""Write the numbers of hidden columns to the schema topic, from outside of the daemon.

`cdc setup` and `cdc table add` do this, even while a daemon runs: so not in a transaction of the
pipeline, which would fence it. The daemon writes its own with its current batch
(`cdc.sequence.table_versions`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from confluent_kafka import Producer

from cdc.errors import UnavailableError
from cdc.log import names, records
from cdc.log.client import settings, translate, translated

if TYPE_CHECKING:
    from collections.abc import Iterable

    from confluent_kafka import KafkaError, Message

    from cdc.config import Config

_TIMEOUT_SECONDS: Final = 30.0


def record(config: Config, numbers: records.ColumnNumbers) -> tuple[str, bytes, bytes]:
    """Return topic, key and value."""
    topic = names.schema_topic(config.prefix)
    return topic, records.numbers_key(numbers), records.encode(numbers)


def write(config: Config, numbers: Iterable[records.ColumnNumbers]) -> None:
    """Return once the log holds them. Blocks."""
    topic = names.schema_topic(config.prefix)
    failed: list[KafkaError] = []

    def delivered(error: KafkaError | None, _: Message) -> None:
        if error is not None:
            failed.append(error)

    with translated(f"producing to {topic}"):
        producer = Producer(settings(config, **{"enable.idempotence": True, "acks": "all"}))
        for each in numbers:
            _, key, value = record(config, each)
            producer.produce(topic, value, key, partition=0, on_delivery=delivered)
        left = producer.flush(_TIMEOUT_SECONDS)
    if failed:
        raise translate(failed[0], f"producing to {topic}")
    if left:
        raise UnavailableError(
            f"producing to {topic}: no broker has acknowledged after {_TIMEOUT_SECONDS:.0f} s",
            hint="see that the brokers run; then `cdc setup` again",
        )
