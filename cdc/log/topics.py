"""Create topics with stated settings, and look at those that exist.

Nothing here changes a topic that exists: a changed partition count moves keys to other partitions,
so it is the pipeline's to refuse and a person's to mend.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from cdc.errors import ConfigError, UnavailableError
from cdc.log import names
from cdc.log.client import MAX_MESSAGE_BYTES, settings, translate, translated

if TYPE_CHECKING:
    from cdc.config import Config

Admin = AdminClient

_TIMEOUT_SECONDS: Final = 15.0
# The resume topic is read whole at each start: small segments let compaction keep it short.
_COMPACTED: Final = {
    "cleanup.policy": "compact",
    "segment.bytes": str(8 << 20),
    "min.cleanable.dirty.ratio": "0.1",
}


_REFUSED: Final = {
    KafkaError.INVALID_REPLICATION_FACTOR: "set log.replication_factor to what the cluster has"
    " brokers for",
    KafkaError.INVALID_CONFIG: "the cluster's policy refuses the topic's settings; create the topic"
    " by hand with what it allows",
    KafkaError.TOPIC_EXCEPTION: "Kafka keeps apart no two topics that differ only in `.` and `_`:"
    " leave one of the two tables out of source.tables",
}


class Topic(NamedTuple):
    """A topic to be there: its name and settings."""

    name: str
    partitions: int
    config: dict[str, str]


def internal_topics(config: Config) -> list[Topic]:
    """Return the pipeline's own topics."""
    return [
        Topic(names.resume_topic(config.prefix), 1, _COMPACTED),
        Topic(names.frontier_topic(config.prefix), 1, _kept(config)),
        Topic(names.schema_topic(config.prefix), 1, {"cleanup.policy": "compact"}),
        Topic(names.messages_topic(config.prefix), 1, _kept(config)),
        Topic(names.dead_topic(config.prefix), 1, _kept(config)),
        Topic(
            names.snapshot_topic(config.prefix),
            1,
            {**_COMPACTED, "max.message.bytes": str(MAX_MESSAGE_BYTES)},
        ),
        *([followers_topic(config)] if config.followers else []),
    ]


def followers_topic(config: Config) -> Topic:
    """Return the topic in which followers report."""
    return Topic(names.followers_topic(config.prefix), 1, _COMPACTED)


def data_topic(config: Config, schema: str, table: str) -> Topic:
    """Return the topic of one table."""
    name = names.data_topic(config.prefix, schema, table)
    return Topic(name, config.log.partitions, _kept(config))


def admin(config: Config) -> AdminClient:
    """Return an admin client; keep it until its futures have resolved."""
    return AdminClient(settings(config))


class Described(NamedTuple):
    """A topic that exists."""

    partitions: int
    topic_id: str  # Kafka's; a topic that is deleted and created again has another


def describe(client: AdminClient, topics: list[str]) -> dict[str, Described]:
    """Return those of `topics` that exist."""
    if not topics:
        return {}
    found = {}
    futures = client.describe_topics(TopicCollection(topics), request_timeout=_TIMEOUT_SECONDS)
    for name, future in futures.items():
        try:
            topic = future.result()
            found[name] = Described(len(topic.partitions), str(topic.topic_id))
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise translate(error.args[0], f"describing topic {name}") from error
    return found


def ensure(client: AdminClient, config: Config, topics: list[Topic]) -> dict[str, Described]:
    """Create what is missing; return every topic as it is.

    Raises ConfigError where Kafka refuses a topic's settings.
    """
    names = [topic.name for topic in topics]
    present = describe(client, names)
    missing = [topic for topic in topics if topic.name not in present]
    if missing:
        _create(client, config, missing)
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while len(present) < len(names):
        # A broker may answer for a moment without the topics that were just created.
        present = describe(client, names)
        if len(present) < len(names) and time.monotonic() > deadline:
            raise UnavailableError(
                f"topics were created but are not to be seen: {sorted(set(names) - set(present))}",
                hint="see that all brokers run",
            )
    return present


def _create(client: AdminClient, config: Config, missing: list[Topic]) -> None:
    wanted = [
        NewTopic(topic.name, topic.partitions, config.log.replication_factor, config=topic.config)
        for topic in missing
    ]
    for name, future in client.create_topics(wanted, request_timeout=_TIMEOUT_SECONDS).items():
        try:
            future.result()
        except KafkaException as error:
            code = error.args[0].code()
            if code == KafkaError.TOPIC_ALREADY_EXISTS:
                continue
            if code in _REFUSED:
                raise ConfigError(
                    f"creating topic {name}: {error.args[0].str()}", hint=_REFUSED[code]
                ) from error
            raise translate(error.args[0], f"creating topic {name}") from error


def delete(client: AdminClient, topics: list[str]) -> None:
    """Delete topics; those that are not there are no error."""
    for name, future in client.delete_topics(topics, request_timeout=_TIMEOUT_SECONDS).items():
        try:
            future.result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise translate(error.args[0], f"deleting topic {name}") from error


def existing(client: AdminClient, prefix: str) -> dict[str, int]:
    """Return every topic under the prefix with its partition count."""
    with translated("listing topics"):
        topics = client.list_topics(timeout=_TIMEOUT_SECONDS).topics
    return {n: len(t.partitions) for n, t in topics.items() if n.startswith(f"{prefix}.")}


def _kept(config: Config) -> dict[str, str]:
    hours = config.log.retention_hours
    return {
        "cleanup.policy": "delete",
        "retention.ms": str(int(hours * 3_600_000)) if hours >= 0 else "-1",
        "max.message.bytes": str(MAX_MESSAGE_BYTES),
    }
