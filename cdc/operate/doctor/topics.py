"""The doctor's checks of topics: settings that lose events, or block writers or followers.

Pure, from facts. A topic's settings are its effective ones, including the brokers' defaults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cdc.log import names
from cdc.log.policies import parts
from cdc.log.topic_monitor import Examined, held_back
from cdc.log.topics import LAG
from cdc.operate.findings import Finding, error, note, ok, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config
    from cdc.log.inspection import InspectedCluster, TopicFacts
    from cdc.log.topics import Topic

DURABLE_COPIES: Final = 2
_FULL_CLUSTER: Final = 3
# Settings that Kafka returns in another form than they were set, or that may be larger.
_AT_LEAST: Final = frozenset({"max.message.bytes", LAG})


def check_topic(
    config: Config, topic: TopicFacts, wanted: Topic, pinned: int | None
) -> Iterator[Finding]:
    """Yield what is wrong with one topic that exists."""
    if topic.leaderless:
        what = f"{topic.name}: {topic.leaderless} partitions without a leader"
        yield error("topic_leader", what, "start the brokers that hold them")
    # A count that differs from a pinned one is reported by the topic monitor.
    if pinned is None and topic.partitions != wanted.partitions:
        yield error(
            "topic_partitions",
            f"{topic.name} has {topic.partitions} partitions, expected are {wanted.partitions}",
            f"log.partitions: {topic.partitions}, or delete the topic",
        )
    yield from _copies(config, topic)
    for setting, value in wanted.config.items():
        yield from _setting(topic, setting, value)
    if topic.settings.get("unclean.leader.election.enable") == "true":
        yield warning(
            "unclean.leader.election.enable",
            f"{topic.name}: a broker that missed acknowledged events may become leader, and they"
            " are lost",
            _alter(topic.name, "unclean.leader.election.enable=false"),
        )
    if int(topic.settings.get("retention.bytes", "-1")) >= 0 and "retention.ms" in wanted.config:
        yield warning(
            "retention.bytes",
            f"{topic.name}: keeps {topic.settings['retention.bytes']} bytes of a partition at most,"
            " whatever log.retention_hours is",
            _alter(topic.name, "retention.bytes=-1"),
        )


def _copies(config: Config, topic: TopicFacts) -> Iterator[Finding]:
    if 0 < topic.replicas < config.log.replication_factor:
        yield warning(
            "topic_replicas",
            f"{topic.name} has {topic.replicas} copies, configured are "
            f"{config.log.replication_factor}",
            "kafka-reassign-partitions.sh adds copies to a topic that exists",
        )
    least = int(topic.settings.get("min.insync.replicas", "1"))
    fix = _alter(topic.name, f"min.insync.replicas={max(1, topic.replicas - 1)}")
    if 0 < topic.replicas < least:
        yield error(
            "min.insync.replicas",
            f"{topic.name}: {least} copies must be in sync, and it has {topic.replicas}: nothing"
            " can be written",
            fix,
        )
    elif 0 < topic.in_sync < least:
        yield error(
            "topic_in_sync",
            f"{topic.name}: {topic.in_sync} copies are in sync, {least} must be: nothing can be"
            " written until more are",
            "start the brokers that are down",
        )
    elif 1 < topic.replicas == least:
        yield warning(
            "min.insync.replicas",
            f"{topic.name}: all {least} copies must be in sync: one broker away stops the pipeline",
            fix,
        )
    elif least < DURABLE_COPIES <= topic.replicas:
        yield warning(
            "min.insync.replicas",
            f"{topic.name}: an event counts as acknowledged while only {least} broker holds it",
            _alter(topic.name, "min.insync.replicas=2"),
        )


def _setting(topic: TopicFacts, setting: str, value: str) -> Iterator[Finding]:
    actual = topic.settings.get(setting)
    enough = setting in _AT_LEAST and actual is not None and int(actual) >= int(value)
    if actual is None or enough or parts(actual) == parts(value):
        return
    what = f"{topic.name}: {setting} is {actual}, expected {value}"
    fix = _alter(topic.name, f"{setting}={value}")
    if setting == LAG:
        what = f"{what}: events may be compacted before followers have read them"
        yield error(LAG, what, "`cdc run` sets it; see who has lowered it")
    elif setting != "cleanup.policy":
        yield warning("topic_settings", what, fix)
    elif "compact" in parts(value) - parts(actual):
        what = f"{what}: nothing is compacted"
        yield warning("cleanup.policy", what, "`cdc run` sets it when it starts, if it was changed")
    elif value == "compact":
        yield error("cleanup.policy", f"{what}: retention would delete records still needed", fix)
    else:
        yield error(
            "cleanup.policy",
            f"{what}: compaction refuses events without a key, and deletes older ones",
            fix,
        )


def check_retention(config: Config, topics: dict[str, TopicFacts]) -> Iterator[Finding]:
    """Yield where followers could read events, but not which of them are complete."""
    frontier = topics.get(names.frontier_topic(config.prefix))
    if frontier is None:
        return
    kept = _kept_ms(frontier)
    longer = [t for t in topics.values() if ".cdc." not in t.name and _kept_ms(t) > kept]
    if longer:
        most = max(longer, key=_kept_ms)
        value = most.settings["retention.ms"]
        yield warning(
            "frontier_retention",
            f"{frontier.name} keeps its records for {frontier.settings['retention.ms']} ms, and"
            f" {most.name} for {value} ms: where the frontier is deleted, events can't be read as"
            " complete transactions",
            _alter(frontier.name, f"retention.ms={value}"),
        )


def _kept_ms(topic: TopicFacts) -> float:
    value = int(topic.settings.get("retention.ms", "0"))
    return float("inf") if value < 0 else value


def check_transaction_log(cluster: InspectedCluster, state: TopicFacts | None) -> Iterator[Finding]:
    """Yield what the loss of a broker would do to transactions."""
    if state is None or cluster.brokers < DURABLE_COPIES:
        return
    least = int(state.settings.get("min.insync.replicas", "1"))
    if state.replicas < min(_FULL_CLUSTER, cluster.brokers):
        yield warning(
            "transaction.state.log",
            f"{state.name} has {state.replicas} copies on {cluster.brokers} brokers: if one is"
            " lost, so are the pipeline's transactions",
            "kafka-reassign-partitions.sh adds copies; then min.insync.replicas=2 on the topic",
        )
    elif 1 < state.replicas == least:
        yield warning(
            "transaction.state.log",
            f"{state.name}: all {least} copies must be in sync: one broker away stops the pipeline",
            _alter(state.name, f"min.insync.replicas={state.replicas - 1}"),
        )
    else:
        yield ok("transaction.state.log", f"{state.replicas} copies, {least} must be in sync")


def check_examined(config: Config, examined: Examined | None) -> Iterator[Finding]:
    """Yield what has changed in the log since it was written."""
    if examined is None:
        return
    for problem in examined.problems:
        yield error("log", problem.what, problem.hint)
    if not examined.problems:
        yield ok("log", "the topics hold what was acknowledged")
    for place, stable in examined.held.items():
        yield warning("open_transaction", *held_back(config, place, stable))
    if not examined.held:
        yield note("open_transaction", "no open transaction holds readers back")


def _alter(topic: str, setting: str) -> str:
    what = f"--entity-type topics --entity-name {topic}"
    name, _, value = setting.partition("=")
    value = f"[{value}]" if "," in value else value
    return f"kafka-configs.sh --alter {what} --add-config {name}={value}"
