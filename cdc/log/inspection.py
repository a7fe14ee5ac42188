"""The state of the Kafka cluster: brokers, topics, transactions. Nothing is changed.

For people and for checks: `cdc doctor` and `cdc status`. One exception, for what no query can show:
`probe_transactions` opens a transactional id of its own, which writes no record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from confluent_kafka import KafkaException, Producer

# The package imports them without declaring them as exports.
from confluent_kafka.admin import ConfigResource, ResourceType  # type: ignore[attr-defined]

from cdc.log.client import settings, translated
from cdc.log.reader import read_frontier_tail
from cdc.log.topics import settings_of

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

    from cdc.config import Config
    from cdc.log.records import FrontierRecord

_TIMEOUT_SECONDS: Final = 10.0
# The topic in which the brokers keep the state of transactions.
TRANSACTION_LOG: Final = "__transaction_state"
_PROBE_SECONDS: Final = 20.0


class InspectedCluster(NamedTuple):
    """The cluster, and the settings of one broker; `{}` if we may not read them."""

    cluster_id: str
    brokers: int
    settings: dict[str, str]


class TopicFacts(NamedTuple):
    """A topic as it is."""

    name: str
    partitions: int
    replicas: int  # of the partition that has fewest
    in_sync: int  # of the partition that has fewest
    leaderless: int  # partitions without a leader
    settings: dict[str, str]


def cluster(client: AdminClient) -> InspectedCluster:
    """Return the cluster's facts; raise UnavailableError if no broker answers."""
    with translated("asking the Kafka cluster about itself"):
        found = client.describe_cluster(request_timeout=_TIMEOUT_SECONDS).result()
    nodes = found.nodes
    asked = ConfigResource(ResourceType.BROKER, str(nodes[0].id))
    try:
        answered = client.describe_configs([asked], request_timeout=_TIMEOUT_SECONDS)
        values = {name: entry.value for name, entry in answered[asked].result().items()}
    except KafkaException:
        values = {}  # the principal may lack the permission to read brokers' settings
    return InspectedCluster(found.cluster_id or "", len(nodes), values)


def topics(client: AdminClient, wanted: list[str]) -> dict[str, TopicFacts]:
    """Return those of `wanted` that exist."""
    with translated("listing topics"):
        listing = client.list_topics(timeout=_TIMEOUT_SECONDS).topics
    present = [name for name in wanted if name in listing]
    facts = {}
    for name, its in settings_of(client, present).items():
        parts = listing[name].partitions.values()
        facts[name] = TopicFacts(
            name=name,
            partitions=len(parts),
            replicas=min((len(part.replicas) for part in parts), default=0),
            in_sync=min((len(part.isrs) for part in parts), default=0),
            leaderless=sum(part.leader < 0 for part in parts),
            settings=its,
        )
    return facts


def probe_transactions(config: Config) -> None:
    """Check that transactions work, with an id that no daemon uses; raises as `translate` does."""
    more: dict[str, str | float | bool] = {
        "transactional.id": f"{config.prefix}.{config.pipeline}.doctor",
        "transaction.timeout.ms": 10_000,
    }
    with translated("opening a transactional id"):
        producer = Producer(settings(config, **more))
        producer.init_transactions(_PROBE_SECONDS)


def newest_frontier(config: Config) -> FrontierRecord | None:
    tail = read_frontier_tail(config, 1)
    return tail[0][0] if tail else None
