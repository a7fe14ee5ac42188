"""Create topics with stated settings, and look at those that exist.

Of a topic that exists only its settings are changed, and only those that are given: a changed
partition count moves keys to other partitions, so the pipeline refuses it and a person must fix it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from cdc.errors import ConfigError, UnavailableError
from cdc.log import names
from cdc.log.client import MAX_MESSAGE_BYTES, settings, translate, translated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from cdc.config import Config
    from cdc.config.tables import Cleanup
    from cdc.log.partitions import Partition

Admin = AdminClient
T = TypeVar("T")

_TIMEOUT_SECONDS: Final = 15.0
# How many records of the controller one request writes: one for each topic, partition and setting.
# The controller refuses more than 10,000 in one operation (POLICY_VIOLATION).
_RECORDS: Final = 2_000
# Topics in one read-only request: the response stays small and arrives within the timeout.
PIECE: Final = 500
# The controller writes its records first and the brokers follow: a full request takes seconds.
_CHANGE_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.1
# Within which brokers take a topic's changed policy.
_POLICY_SECONDS: Final = 15.0
# The resume topic is read completely at each start: small segments let compaction keep it short.
_COMPACTED: Final = {
    "cleanup.policy": "compact",
    "segment.bytes": str(8 << 20),
    "min.cleanable.dirty.ratio": "0.1",
}


# Kafka's words for the configuration's.
_POLICIES: Final[dict[Cleanup, str]] = {
    "delete": "delete",
    "compact": "compact",
    "both": "compact,delete",
}
LAG: Final = "min.compaction.lag.ms"
# The largest that Kafka takes: with this lag nothing is ever compacted.
NO_COMPACTION: Final = (1 << 63) - 1

_REFUSED: Final = {
    KafkaError.INVALID_CONFIG: "the cluster's policy refuses the topic's settings; create the topic"
    " by hand with what it allows",
    KafkaError.POLICY_VIOLATION: "the cluster's policy for new topics refuses it: see"
    " log.partitions, log.replication_factor and the brokers' create.topic.policy.class.name",
    KafkaError.TOPIC_EXCEPTION: "Kafka keeps apart no two topics that differ only in `.` and `_`:"
    " leave one of the two tables out of source.tables",
}
_TOO_FEW_BROKERS: Final = (
    "start the brokers that are down; if the cluster has no more, set log.replication_factor to"
    " what it has"
)


class Topic(NamedTuple):
    """A topic that must exist: its name and settings."""

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


def groups_topic(config: Config) -> Topic:
    """Return the topic of the groups of readers."""
    return Topic(names.groups_topic(config.prefix), 1, _COMPACTED)


def retries_topic(config: Config) -> Topic:
    """Return the topic of what queues are to give out again."""
    return Topic(names.retries_topic(config.prefix), 1, _kept(config))


def data_topic(config: Config, schema: str, table: str) -> Topic:
    """Return the topic of one table."""
    name = names.data_topic(config.prefix, schema, table)
    return Topic(name, config.log.partitions, _of_data(config, cleanup(config, schema, table)))


def cleanup(config: Config, schema: str, table: str) -> Cleanup:
    """Return what Kafka is to remove from a table's topic."""
    if not any(rule.cleanup for rule in config.tables.values()):
        return config.log.cleanup  # without parsing every pattern
    return config.selection.of((schema, table)).cleanup or config.log.cleanup


def cleanup_of(config: Config, topic: str) -> Cleanup:
    """Return what Kafka is to remove from a data topic."""
    return cleanup(config, *names.table_of(config.prefix, topic))


def compacts(config: Config) -> bool:
    """Whether some table's topic may be compacted."""
    chosen = (config.log.cleanup, *(rule.cleanup for rule in config.tables.values()))
    return any(each not in {None, "delete"} for each in chosen)


def policy_of(config: Config, topic: str) -> str:
    """Return the cleanup.policy that a data topic should have."""
    return _POLICIES[cleanup_of(config, topic)]


def admin(config: Config) -> AdminClient:
    """Return an admin client; keep it until its futures have resolved."""
    return AdminClient(settings(config))


def connected(config: Config, seconds: float) -> AdminClient:
    """Return an admin client that a broker has answered; raise KafkaException after `seconds`.

    For what depends on partitions' leaders: if no broker is connected when they are looked up,
    librdkafka asks for them again only after three seconds.
    """
    client = admin(config)
    client.describe_cluster(request_timeout=seconds).result()
    return client


class Described(NamedTuple):
    """A topic that exists."""

    partitions: int
    topic_id: str  # Kafka's; a topic that is deleted and recreated has another


def describe(
    client: AdminClient, topics: Sequence[str], seconds: float = _TIMEOUT_SECONDS
) -> dict[str, Described]:
    """Return those of `topics` that exist; each request asks about a bounded number of them."""
    found = {}
    for piece in pieces(topics, PIECE):
        asked = TopicCollection(list(piece))
        for name, future in client.describe_topics(asked, request_timeout=seconds).items():
            try:
                topic = future.result()
                found[name] = Described(len(topic.partitions), str(topic.topic_id))
            except KafkaException as error:
                if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise translate(error.args[0], f"describing topic {name}") from error
    return found


def ensure(client: AdminClient, config: Config, topics: list[Topic]) -> dict[str, Described]:
    """Create what is missing; return every topic as it is.

    Raises ConfigError if Kafka refuses a topic's settings.
    """
    present = describe(client, [topic.name for topic in topics])
    missing = [topic for topic in topics if topic.name not in present]
    for made in create(client, config, missing):
        present |= made
    return present


def create(
    client: AdminClient, config: Config, missing: list[Topic]
) -> Iterator[dict[str, Described]]:
    """Create topics in requests of bounded size; yield the topics of each once brokers show them.

    Raises ConfigError if Kafka refuses a topic's settings.
    """
    for piece in pieces(missing, _RECORDS, lambda topic: 1 + topic.partitions + len(topic.config)):
        _create(client, config, piece)
        yield _shown(client, [topic.name for topic in piece], created=True)


def _shown(client: AdminClient, names: list[str], *, created: bool) -> dict[str, Described]:
    """Return the topics that brokers show, once they show all that are created, none deleted."""
    count, deadline = len(names), time.monotonic() + _CHANGE_SECONDS
    while True:
        present = describe(client, names)
        left = set(names) - present.keys() if created else set(present)
        if not left:
            return present
        if len(left) < count:
            # Slow is not stuck: the timeout restarts with each topic that has changed.
            count, deadline = len(left), time.monotonic() + _CHANGE_SECONDS
        if time.monotonic() > deadline:
            what = "created but the brokers do not" if created else "deleted but the brokers still"
            raise UnavailableError(
                f"{len(left)} topics were {what} show them, the first is {min(left)}",
                hint="check that all brokers run, then repeat the command: it does the rest",
            )
        time.sleep(_LOOK_SECONDS)


def pieces(
    items: Sequence[T], most: int, weight: Callable[[T], int] = lambda _: 1
) -> Iterator[list[T]]:
    """Yield `items` in their order, as lists whose weights sum to at most `most`.

    One item that weighs more comes alone.
    """
    piece: list[T] = []
    total = 0
    for item in items:
        its = weight(item)
        if piece and total + its > most:
            yield piece
            piece, total = [], 0
        piece.append(item)
        total += its
    if piece:
        yield piece


def _create(client: AdminClient, config: Config, missing: list[Topic]) -> None:
    wanted = [
        NewTopic(topic.name, topic.partitions, config.log.replication_factor, config=topic.config)
        for topic in missing
    ]
    futures = client.create_topics(
        wanted, operation_timeout=_CHANGE_SECONDS, request_timeout=_CHANGE_SECONDS
    )
    for name, future in futures.items():
        try:
            future.result()
        except KafkaException as error:
            code = error.args[0].code()
            if code == KafkaError.TOPIC_ALREADY_EXISTS:
                continue
            what = f"creating topic {name}: {error.args[0].str()}"
            if code in _REFUSED:
                raise ConfigError(what, hint=_REFUSED[code]) from error
            if code == KafkaError.INVALID_REPLICATION_FACTOR:
                # Of a cluster that is restarted or overloaded, too: its brokers come back.
                raise UnavailableError(what, hint=_TOO_FEW_BROKERS) from error
            raise translate(error.args[0], f"creating topic {name}") from error


def delete(client: AdminClient, topics: Sequence[str]) -> None:
    """Delete topics; missing ones are not an error."""
    # A topic's partition count is unknown here; few have too many for this many topics at once.
    for piece in pieces(topics, PIECE // 2):
        futures = client.delete_topics(
            piece, operation_timeout=_CHANGE_SECONDS, request_timeout=_CHANGE_SECONDS
        )
        for name, future in futures.items():
            try:
                future.result()
            except KafkaException as error:
                if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise translate(error.args[0], f"deleting topic {name}") from error
        _shown(client, piece, created=False)  # so that they can be created again


def delete_records(client: AdminClient, ends: Mapping[Partition, int]) -> None:
    """Delete the records of partitions before these offsets; those of deleted ones are no error.

    Kafka keeps them on disk, unreadable, until no later record is in their segment. Raises
    ConfigError if a topic's policy has no `delete`, also after brokers had the time to take a
    changed one.
    """
    wanted = [TopicPartition(*place, end) for place, end in ends.items()]
    deadline = time.monotonic() + _POLICY_SECONDS
    while refused := [each for part in pieces(wanted, PIECE) for each in _refused(client, part)]:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"Kafka deletes no records of {refused[0].topic}: its cleanup.policy has no"
                " `delete`",
                hint="set the policy that the configuration has: `cdc doctor` has the command; then"
                " repeat this",
            )
        wanted = refused
        time.sleep(_LOOK_SECONDS)


def _refused(client: AdminClient, wanted: list[TopicPartition]) -> list[TopicPartition]:
    """Delete records; return of which partitions the topic's policy does not allow it."""
    found = []
    for place, future in client.delete_records(wanted, request_timeout=_CHANGE_SECONDS).items():
        try:
            future.result()
        except KafkaException as error:
            code = error.args[0].code()
            if code == KafkaError.POLICY_VIOLATION:
                found.append(place)
            elif code != KafkaError.OFFSET_OUT_OF_RANGE:  # its beginning is after them already
                raise translate(error.args[0], f"deleting records of {place.topic}") from error
    return found


def allow_deletions(client: AdminClient, names: Iterable[str]) -> None:
    """Allow records of compacted topics to be deleted by offset, and none by retention."""
    unlimited = {"retention.ms": "-1", "retention.bytes": "-1"}
    alter(client, dict.fromkeys(names, unlimited | {"cleanup.policy": _POLICIES["both"]}))


def restore_policies(client: AdminClient, config: Config, names: Iterable[str]) -> None:
    """Give data topics the policy and the retention that the configuration has."""
    wanted = {}
    for name in names:
        its = _of_data(config, cleanup_of(config, name))
        mine = {key: its[key] for key in ("cleanup.policy", "retention.ms")}
        wanted[name] = {**mine, "retention.bytes": None}
    alter(client, wanted)


def existing(client: AdminClient, prefix: str) -> dict[str, int]:
    """Return every topic under the prefix with its partition count.

    Raises PermissionDeniedError where we may not see them: a list leaves out what is not allowed.
    """
    describe(client, [names.resume_topic(prefix)])
    with translated("listing topics"):
        topics = client.list_topics(timeout=_TIMEOUT_SECONDS).topics
    return {n: len(t.partitions) for n, t in topics.items() if n.startswith(f"{prefix}.")}


def settings_of(client: AdminClient, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the effective settings of topics that exist."""
    found = {}
    for piece in pieces(names, PIECE):
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in piece]
        futures = client.describe_configs(resources, request_timeout=_TIMEOUT_SECONDS)
        for resource, future in futures.items():
            with translated(f"reading the topics' settings: {resource.name}"):
                entries = future.result()
            found[resource.name] = {name: str(entry.value) for name, entry in entries.items()}
    return found


def alter(client: AdminClient, wanted: Mapping[str, Mapping[str, str | None]]) -> None:
    """Change these settings of topics that exist, and no others; None: to the brokers' default.

    Raises ConfigError if Kafka refuses one.
    """
    for piece in pieces(list(wanted), _RECORDS // 10):
        resources = [
            ConfigResource(
                ResourceType.TOPIC,
                name,
                incremental_configs=[
                    ConfigEntry(
                        key,
                        value,
                        incremental_operation=AlterConfigOpType.DELETE
                        if value is None
                        else AlterConfigOpType.SET,
                    )
                    for key, value in wanted[name].items()
                ],
            )
            for name in piece
        ]
        futures = client.incremental_alter_configs(resources, request_timeout=_CHANGE_SECONDS)
        for resource, future in futures.items():
            try:
                future.result()
            except KafkaException as error:
                code, doing = error.args[0].code(), f"altering topic {resource.name}"
                if code in {KafkaError.INVALID_CONFIG, KafkaError.POLICY_VIOLATION}:
                    raise ConfigError(
                        f"{doing}: {error.args[0].str()}",
                        hint="set log.cleanup and log.compaction_lag_hours to what the cluster"
                        " allows",
                    ) from error
                raise translate(error.args[0], doing) from error


def lag_ms(config: Config) -> int:
    """Return how long every event of a compacted topic is kept."""
    return max(1, int(config.log.compaction_lag_hours * 3_600_000))


def _of_data(config: Config, chosen: Cleanup) -> dict[str, str]:
    kept = _kept(config) | {"cleanup.policy": _POLICIES[chosen]}
    if chosen == "delete":
        return kept
    lag = str(lag_ms(config))
    # Kafka refuses a least lag above the largest one, which a cluster may have set lower.
    longest = {"max.compaction.lag.ms": str(NO_COMPACTION)}
    return kept | longest | {LAG: lag, "delete.retention.ms": lag}


def _kept(config: Config) -> dict[str, str]:
    hours = config.log.retention_hours
    return {
        "cleanup.policy": "delete",
        "retention.ms": str(int(hours * 3_600_000)) if hours >= 0 else "-1",
        "max.message.bytes": str(MAX_MESSAGE_BYTES),
    }
