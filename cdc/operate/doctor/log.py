"""The doctor's checks of the log: pure functions from facts.

The facts are gathered once (`cdc.log.inspection`, `cdc.log.reader`); nothing here connects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdc.log.publisher import TRANSACTION_TIMEOUT_SECONDS
from cdc.operate.doctor.topics import (
    DURABLE_COPIES,
    check_examined,
    check_retention,
    check_topic,
    check_transaction_log,
)
from cdc.operate.findings import Finding, error, note, ok, warning
from cdc.operate.readable import listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config
    from cdc.log.inspection import InspectedCluster, TopicFacts
    from cdc.log.resume import Resume
    from cdc.log.topic_monitor import Examined
    from cdc.log.topics import Topic


class LogFacts(NamedTuple):
    """All facts that the checks use; `resume` and `examined` are None before `cdc setup`."""

    cluster: InspectedCluster
    wanted: list[Topic]  # internal topics, and one for each matched table
    topics: dict[str, TopicFacts]
    transactions: str | None  # what is wrong with them, or None
    resume: Resume | None
    transaction_log: TopicFacts | None  # the brokers' own topic
    examined: Examined | None


def check_log(config: Config, facts: LogFacts) -> list[Finding]:
    return [
        *_cluster(config, facts.cluster),
        *_transactions(config, facts),
        *check_transaction_log(facts.cluster, facts.transaction_log),
        *_topics(config, facts),
        *check_retention(config, facts.topics),
        *check_examined(config, facts.examined),
    ]


def _cluster(config: Config, cluster: InspectedCluster) -> Iterator[Finding]:
    brokers = f"{cluster.brokers} broker" + "s" * (cluster.brokers != 1)
    yield ok("kafka", f"cluster {cluster.cluster_id}, {brokers}")
    copies = config.log.replication_factor
    if copies > cluster.brokers:
        yield error(
            "replication_factor",
            f"{copies} copies of each topic, on {brokers}",
            f"log.replication_factor: {cluster.brokers}",
        )
    elif copies == 1 and cluster.brokers > 1:
        yield warning(
            "replication_factor",
            f"one copy of each topic, though there are {brokers}: a lost disk loses the log",
            f"log.replication_factor: {min(3, cluster.brokers)}, before cdc setup",
        )
    elif copies == 1:
        yield note("replication_factor", "one broker, one copy: good for trying out only")
    else:
        yield ok("replication_factor", f"{copies} copies on {brokers}")
    least = int(cluster.settings.get("min.insync.replicas") or 1)
    if copies > 1 and least < DURABLE_COPIES:
        yield warning(
            "min.insync.replicas",
            f"{least}: an event counts as acknowledged while only {least} broker holds it",
            "kafka-configs.sh --alter --entity-type brokers --entity-default "
            "--add-config min.insync.replicas=2",
        )


def _transactions(config: Config, facts: LogFacts) -> Iterator[Finding]:
    if facts.transactions is None:
        yield ok("transactions", "the cluster accepts them")
    else:
        yield error(
            "transactions",
            facts.transactions,
            "transaction.state.log.replication.factor and .min.isr of the brokers must fit their "
            "number; with ACLs, allow Write and Describe on the transactional ids that start with "
            f"{config.prefix}.{config.pipeline}",
        )
    ours = TRANSACTION_TIMEOUT_SECONDS * 1_000
    wanted = int(config.log.kafka.get("transaction.timeout.ms", ours))
    most = facts.cluster.settings.get("transaction.max.timeout.ms")
    if most is None:
        yield note("transaction.max.timeout.ms", "the brokers do not allow us to read it")
    elif wanted > int(most):
        yield error(
            "transaction.max.timeout.ms",
            f"the brokers allow {most} ms, transactions would ask for {wanted} ms",
            f"log.kafka: {{transaction.timeout.ms: {most}}}, or raise it on the brokers",
        )
    else:
        yield ok("transaction.max.timeout.ms", f"{most} ms, at most {wanted} ms are used")


def _topics(config: Config, facts: LogFacts) -> Iterator[Finding]:
    wanted = {topic.name: topic for topic in facts.wanted}
    pinned = facts.resume[0].partitions if facts.resume else {}
    missing = [name for name in wanted if name not in facts.topics]
    own = facts.topics.keys() & {name for name in wanted if ".cdc." in name}
    if facts.resume is None and own:
        yield note("topics", "the topics exist, without a resume record", "cdc setup")
    elif missing and facts.resume is None:
        yield note("topics", f"{len(missing)} do not exist yet", "cdc setup")
    elif new := [name for name in missing if name not in pinned]:
        yield note("topics", f"not created yet: {listed(new)}", "cdc setup")
    elif not missing:
        yield ok("topics", f"all {len(wanted)} exist")
    for name, topic in facts.topics.items():
        yield from check_topic(config, topic, wanted[name], pinned.get(name))
