"""Prove that a topic does not exist, and where a partition ends, before a decision depends on it.

A lookup may answer wrongly for a moment: a broker that has just started or been elected does not
know every topic yet, a leader that was replaced answers with an old end, a client uses old
metadata. Code that takes such an answer for "there is nothing" skips an unfinished snapshot, starts
a log a second time, or reports a gap that does not exist.

So absence needs two answers that agree: to two kinds of request (by name, and the list of all), by
two clients created for it, a moment apart. One answer that names the topic refutes it. Ends of
partitions only grow, and so do their beginnings: of two answers the higher end and the lower
beginning are the ones that leave nothing out.

The callers compare what the resume record lists: it outranks the brokers' answers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

from cdc.errors import CDCError, UnavailableError
from cdc.log import names, topics
from cdc.log.client import LEADER_SECONDS, NO_LEADER, translated
from cdc.log.partitions import OffsetRange, Partition

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from cdc.config import Config

# The errors for a topic or partition that a client does not know at this moment.
UNKNOWN: Final = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.UNKNOWN_TOPIC_ID,
        KafkaError._NOENT,  # noqa: SLF001 - librdkafka's local errors are spelled so
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001
    }
)
_TIMEOUT_SECONDS: Final = 15.0
# Between the two answers: a broker that has just started has caught up by then.
AGAIN_SECONDS: Final = 1.0
_OPEN_SECONDS: Final = 0.05  # between two looks at an open transaction


def means_unknown(error: BaseException | None) -> bool:
    """Return whether an error means that the brokers do not know a topic; that proves nothing."""
    while error is not None:
        if isinstance(error, KafkaException):
            return error.args[0].code() in UNKNOWN
        error = error.__cause__
    return False


def absent(config: Config, asked: Collection[str]) -> set[str]:
    """Return those of the topics that are proven not to exist. Blocks.

    Raises UnavailableError if the brokers do not answer.
    """
    missing = set(asked) - named(config, asked)
    if missing:
        pause(AGAIN_SECONDS)
        missing -= listed(config)
    return missing


def expect_set_up(config: Config) -> None:
    """Raise UnavailableError if the pipeline is proven not to be set up. Blocks.

    A record in one of its topics before that prevents `cdc setup`, which starts a log in topics
    without records only.
    """
    topic = names.frontier_topic(config.prefix)
    if absent(config, [topic]):
        raise UnavailableError(
            f"the pipeline {config.pipeline} is not set up: there is no topic {topic}",
            hint="run `cdc setup` with the same configuration; this continues then",
        )


def confirmed(config: Config, first: dict[Partition, OffsetRange]) -> dict[Partition, OffsetRange]:
    """Return offsets from one answer, combined with the answer to a second client."""
    second = spans(config, first)
    return {
        each: OffsetRange(min(low, second[each].start), max(end, second[each].end))
        for each, (low, end) in first.items()
    }


def wait_for_markers(config: Config, topic: str) -> None:
    """Wait until all that was written to a one-partition topic by now is committed or aborted.

    A broker answers a commit before it has written the markers that make it visible: what was just
    committed is not visible for a moment. Blocks. Raises UnavailableError if a transaction stays
    open.
    """
    only, deadline = (topic, 0), time.monotonic() + _TIMEOUT_SECONDS
    every = IsolationLevel.READ_UNCOMMITTED
    while True:
        try:
            end = max(spans(config, [only], every)[only].end for _ in range(2))
        except CDCError as error:
            if not means_unknown(error) or time.monotonic() > deadline:
                raise
            if absent(config, [topic]):
                return
            pause(_OPEN_SECONDS)
        else:
            break
    while spans(config, [only])[only].end < end:
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"a transaction is open in topic {topic}, so what it holds is unknown",
                hint="its writer was killed or hangs: the brokers end it after"
                " log.kafka.transaction.timeout.ms; try again then",
            )
        pause(_OPEN_SECONDS)


def expect_not_held(config: Config, partition: Partition, wanted: int) -> None:
    """Raise UnavailableError if a partition reaches `wanted` but an open transaction hides it.

    A read_committed reader gets no further than the last stable offset.
    """
    topic, number = partition
    if spans(config, [partition], IsolationLevel.READ_UNCOMMITTED)[partition].end >= wanted:
        raise UnavailableError(
            f"{topic} [{number}] is held back below offset {wanted} by a transaction that is open",
            hint="reading continues when it ends: brokers end it after its transaction.timeout.ms;"
            " `kafka-transactions.sh find-hanging` names its writer, and `abort` ends it",
        )


# --- the lookups themselves ---


def named(config: Config, asked: Collection[str]) -> set[str]:
    """Return which of the topics exist, asked for by their names."""
    return set(topics.describe(topics.admin(config), sorted(asked)))


def listed(config: Config) -> set[str]:
    """Return every topic that exists."""
    with translated("listing topics"):
        client = topics.admin(config)
        return set(client.list_topics(timeout=_TIMEOUT_SECONDS).topics)


def spans(
    config: Config,
    partitions: Iterable[Partition],
    isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
) -> dict[Partition, OffsetRange]:
    """Return the first offset and the end of partitions, as a reader with `isolation` sees them."""
    parts = [TopicPartition(*each) for each in partitions]
    if not parts:
        return {}
    with translated(f"looking up the offsets of {parts[0].topic}"):
        client = topics.connected(config, _TIMEOUT_SECONDS)
    # One after the other: librdkafka 2.16 may crash if a client looks up leaders twice at once.
    lows = _offsets(client, parts, OffsetSpec.earliest(), isolation)  # type: ignore[no-untyped-call]
    found = _offsets(client, parts, OffsetSpec.latest(), isolation)  # type: ignore[no-untyped-call]
    return {each: OffsetRange(lows[each], end) for each, end in found.items()}


def ends(
    client: topics.Admin,
    partitions: Iterable[Partition],
    isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
    seconds: float = _TIMEOUT_SECONDS,
) -> dict[Partition, int]:
    """Return the ends of partitions as a reader with `isolation` sees them, by one answer.

    It may be outdated.
    """
    parts = [TopicPartition(*each) for each in partitions]
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    return _offsets(client, parts, latest, isolation, seconds)


def _offsets(
    client: topics.Admin,
    parts: list[TopicPartition],
    which: OffsetSpec,
    isolation: IsolationLevel,
    seconds: float = _TIMEOUT_SECONDS,
) -> dict[Partition, int]:
    """Return each partition's offset; wait while it has no leader, up to `seconds`.

    A broker shows a topic that was just created before it answers as its leader.
    """
    found = dict[Partition, int]()
    deadline = time.monotonic() + seconds
    left = parts
    while left:
        asked = client.list_offsets(
            dict.fromkeys(left, which),
            isolation_level=isolation,
            request_timeout=max(LEADER_SECONDS, deadline - time.monotonic()),
        )
        left = []
        for part, future in asked.items():
            topic, number = str(part.topic), int(part.partition)
            with translated(f"looking up the offsets of {topic} [{number}]"):
                try:
                    found[topic, number] = int(future.result().offset)
                except KafkaException as error:
                    if error.args[0].code() not in NO_LEADER or time.monotonic() > deadline:
                        raise
                    left.append(part)
        if left:
            pause(LEADER_SECONDS)
    return found


def pause(seconds: float) -> None:
    """Wait between two answers."""
    time.sleep(seconds)
