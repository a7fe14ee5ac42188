"""How large a record each topic accepts: the least of what its brokers and our producer allow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from confluent_kafka import KafkaException

# The package imports them without declaring them as exports.
from confluent_kafka.admin import ConfigResource, ResourceType  # type: ignore[attr-defined]

from cdc.errors import ConfigError
from cdc.log.client import MAX_MESSAGE_BYTES
from cdc.log.publisher import BATCH_BYTES
from cdc.log.topics import PIECE, pieces

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

    from cdc.config import Config

_TIMEOUT_SECONDS: Final = 15.0

# Record headers, batch header and what a protocol version may add, with a margin.
OVERHEAD_BYTES: Final = 4_096


def record_limit(max_message_bytes: int) -> int:
    """Return how long a key and a value may be together if the topic takes messages this large."""
    return max_message_bytes - OVERHEAD_BYTES


def ours(config: Config) -> int:
    """Return how long a key and a value may be together for the producer."""
    return record_limit(int(config.log.kafka.get("message.max.bytes", MAX_MESSAGE_BYTES)))


def limits(client: AdminClient, config: Config, topics: list[str]) -> dict[str, int]:
    """Return how long a key and a value may be together, by topic. Blocks.

    If we may not read a topic's settings, its broker refuses what is too large. Raises ConfigError
    if a topic does not accept the producer's batches: the broker's limit is for those, and
    librdkafka does not split one that was refused.
    """
    most, batch = ours(config), int(config.log.kafka.get("batch.size", BATCH_BYTES))
    found = dict.fromkeys(topics, most)
    for piece in pieces(topics, PIECE):
        resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in piece]
        futures = client.describe_configs(resources, request_timeout=_TIMEOUT_SECONDS)
        for resource, future in futures.items():
            try:
                setting = int(future.result()["max.message.bytes"].value)
            except KafkaException:
                continue
            if setting < batch:
                raise ConfigError(
                    f"topic {resource.name} takes {setting} bytes at once, the producer sends up to"
                    f" {batch}",
                    hint="raise the topic's max.message.bytes, or set batch.size under log.kafka to"
                    " less than it",
                )
            found[resource.name] = min(most, record_limit(setting))
    return found
