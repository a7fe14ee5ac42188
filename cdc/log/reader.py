"""Read the log back: read_committed, up to an end that was fixed first.

Consumers here belong to no group and commit no offsets: each reader keeps its own position.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import Consumer, IsolationLevel, KafkaError, TopicPartition

from cdc.errors import CDCError, FencedError, GapError, Policy, UnavailableError
from cdc.log import absence, names, records
from cdc.log.client import settings, translate, translated, watermarks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from confluent_kafka import Message

    from cdc.config import Config

_TIMEOUT_SECONDS: Final = 15.0
# `consume` returns when it has this many records or the time is up, whichever is first.
_CHUNK: Final = 2_000
_CHUNK_SECONDS: Final = 0.01
_TAIL_OFFSETS: Final = 100
# How often a topic is looked up while the brokers alternate between knowing it and not.
_TRIES: Final = 3


def consumer(config: Config, **more: str | float | bool) -> Consumer:
    """Return a consumer that sees committed records only, and reports where a partition ends."""
    with translated("creating a consumer"):
        return Consumer(
            settings(
                config,
                **{
                    "group.id": f"lockstep-{config.pipeline}-reader",  # required, never joined
                    "enable.auto.commit": False,
                    "isolation.level": "read_committed",
                    "enable.partition.eof": True,
                    "auto.offset.reset": "error",
                    "fetch.wait.max.ms": 20,
                    # The default of a second stalls a reader whose queue was full for a moment.
                    "fetch.queue.backoff.ms": 5,
                    **more,
                },
            )
        )


def read_to_end(config: Config, topics: dict[str, int]) -> Iterator[Message]:
    """Yield every committed record that the topics (name → partition count) hold now.

    The order is each partition's own. Raises UnavailableError when nothing arrives for a while.
    """
    client = consumer(config)
    try:
        yield from _drain(client, _ranges(client, topics))
    finally:
        client.close()


def read_partition(
    config: Config, topic: str, number: int
) -> Iterator[tuple[bytes | None, bytes | None]]:
    """Yield key and value of every committed record that the partition holds now."""
    client = consumer(config)
    try:
        place = topic, number
        with translated(f"looking up the offsets of {topic} [{number}]", client):
            low, high = watermarks(client, TopicPartition(*place), timeout=_TIMEOUT_SECONDS)
        for message in _drain(client, {place: (low, high)}):
            yield message.key(), message.value()
    finally:
        client.close()


def _ranges(client: Consumer, topics: dict[str, int]) -> dict[tuple[str, int], tuple[int, int]]:
    """Return the offsets that every partition spans, by one answer each."""
    ranges = {}
    for topic, count in topics.items():
        for number in range(count):
            with translated(f"looking up the offsets of {topic} [{number}]", client):
                ranges[topic, number] = watermarks(
                    client, TopicPartition(topic, number), timeout=_TIMEOUT_SECONDS
                )
    return ranges


def _drain(client: Consumer, ranges: dict[tuple[str, int], tuple[int, int]]) -> Iterator[Message]:
    """Yield the committed records of each partition from its first offset to before its last."""
    ranges = {place: (low, high) for place, (low, high) in ranges.items() if high > low}
    client.assign([TopicPartition(*place, low) for place, (low, _) in ranges.items()])
    ends = {place: high for place, (_, high) in ranges.items()}
    moved_at = time.monotonic()
    while ends:
        batch = client.consume(_CHUNK, timeout=_CHUNK_SECONDS)
        if batch:
            moved_at = time.monotonic()
        elif time.monotonic() - moved_at > _TIMEOUT_SECONDS:
            raise UnavailableError(
                f"reading {next(iter(ends))[0]}: nothing came for {_TIMEOUT_SECONDS:.0f} s",
                hint="a transaction may hang in the topic, or the brokers are down; see"
                " kafka-transactions.sh find-hanging",
            )
        for message in batch:
            yield from _keep(message, ends)


def _keep(message: Message, ends: dict[tuple[str, int], int]) -> Iterator[Message]:
    """Yield a record below its partition's end; note the partition's end when it is reached."""
    error = message.error()
    if error is not None and error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
        return  # the group's coordinator is looked up anyway, although no consumer here joins it
    place = (str(message.topic()), _int(message.partition()))
    if error is not None and error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001
        raise translate(error, f"reading {place[0]}")
    offset = _int(message.offset())
    if error is None and place in ends and offset < ends[place]:
        yield message
    # At the end of a partition the message's offset is the next one; past aborted records and
    # transaction markers only this shows that the end was reached.
    reached = offset if error is not None else offset + 1
    if place in ends and reached >= ends[place]:
        del ends[place]


def assign(client: Consumer, topic: str, number: int, offset: int) -> None:
    """Have the consumer read one partition from an offset on."""
    with translated(f"assigning {topic} [{number}]"):
        client.assign([TopicPartition(topic, number, offset)])


def waiting(client: Consumer) -> list[Message]:
    """Return the records that have arrived, without waiting; ends of partitions are left out."""
    return [each for each in client.consume(_CHUNK, timeout=0) if each.error() is None]


def read_resume(
    config: Config,
) -> tuple[records.ResumeIdentity, records.ResumePosition] | None:
    """Return the pipeline's resume record, or None if there is proven to be none.

    Raises GapError if only one of its parts exists: both were written in one transaction.
    """
    topic = names.resume_topic(config.prefix)
    found = _resume_parts(config, topic)
    if found == (None, None):
        absence.settle(config, topic)
        found = _resume_parts(config, topic)
    if found is None or found == (None, None):
        return None
    identity, position = found
    if not identity or not position:
        missing = "position" if identity else "identity"
        raise GapError(
            f"topic {topic} holds no {missing} of pipeline {config.pipeline}, though it holds the"
            " other part of its resume record",
            hint="records of the topic were deleted, or its cleanup.policy is not compact;"
            " `cdc teardown --topics`, then `cdc setup` and a snapshot start over",
        )
    return (
        records.decode(records.ResumeIdentity, identity, topic),
        records.decode(records.ResumePosition, position, topic),
    )


@contextmanager
def unless_overtaken(config: Config, position: records.ResumePosition) -> Iterator[None]:
    """Raise FencedError instead of an error that halts, if the log has moved on from `position`.

    Log and source are read one after the other. A daemon that takes our slot in between fences us,
    continues from the same record and writes the next ones; then a comparison with the old record
    proves nothing.
    """
    try:
        yield
    except CDCError as error:
        resumed = read_resume(config) if error.policy is Policy.HALT else None
        if resumed is None or resumed[1] == position:
            raise
        raise FencedError(
            "another daemon has written to the log since this one read the resume record",
            hint="it has the slot; this one goes back to waiting for it",
        ) from error


def _resume_parts(config: Config, topic: str) -> tuple[bytes | None, bytes | None] | None:
    """Return the values of identity and position; None if the topic is proven not to exist."""
    with _opened(config, topic) as (client, ranges):
        newest = {message.key(): message.value() for message in _drain(client, ranges)}
    identity = newest.get(records.resume_key(config.pipeline, "identity"))
    position = newest.get(records.resume_key(config.pipeline, "position"))
    return (identity or None, position or None) if ranges else None


def read_schemas(config: Config) -> list[records.SchemaRecord]:
    """Return every table version, oldest first; DDL statements are in the topic too."""
    topic = names.schema_topic(config.prefix)
    found = {}
    for message in read_if_there(config, topic):
        if not records.is_schema_key(message.key() or b""):
            continue
        record = records.decode(records.SchemaRecord, message.value() or b"", topic)
        found[record.schema_id] = record
    return [found[schema_id] for schema_id in sorted(found)]


def read_column_numbers(config: Config) -> list[records.ColumnNumbers]:
    """Return the column numbers of tables that hide columns, oldest first."""
    topic = names.schema_topic(config.prefix)
    found = {}
    for message in read_if_there(config, topic):
        if records.is_numbers_key(message.key() or b"") and message.value():
            record = records.decode(records.ColumnNumbers, message.value() or b"", topic)
            found[record.relation_id, record.lsn] = record
    return sorted(found.values(), key=lambda each: each.lsn)


def read_frontiers(config: Config) -> list[records.FrontierRecord]:
    """Return the frontier records that the topic still holds, oldest first."""
    topic = names.frontier_topic(config.prefix)
    return [
        records.decode(records.FrontierRecord, message.value() or b"", topic)
        for message in read_if_there(config, topic)
    ]


def read_frontier_tail(config: Config, limit: int) -> list[tuple[records.FrontierRecord, float]]:
    """Return the newest frontier records, oldest first, and when (monotonic) each was written.

    Reads only the topic's end: with the data's retention it can hold millions of records.
    """
    topic = names.frontier_topic(config.prefix)
    place = (topic, 0)
    with _opened(config, topic) as (client, ranges):
        if not ranges:
            return []
        low, high = ranges[place]
        # Each record is followed by its transaction's marker; an aborted one leaves only markers.
        behind = _TAIL_OFFSETS + 2 * limit
        while True:
            start = max(low, high - behind)
            found = deque(_drain(client, {place: (start, high)}), maxlen=limit)
            if found or start == low:
                return [_dated(message, topic) for message in found]
            behind *= 10


def _dated(message: Message, topic: str) -> tuple[records.FrontierRecord, float]:
    age_seconds = max(0.0, time.time() - message.timestamp()[1] / 1_000)
    record = records.decode(records.FrontierRecord, message.value() or b"", topic)
    return record, time.monotonic() - age_seconds


def end_offsets(config: Config, parts: list[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """Return each partition's end: above every record there now, below the next one."""
    return {place: end for place, (_, end) in offsets(config, parts).items()}


def written_ends(config: Config, parts: list[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """Return each partition's end as the leaders have it, above what open transactions hide.

    For a frontier's ends: after a transaction that hangs there may be records that it counts.
    """
    ends = end_offsets(config, parts)
    every = absence.spans(config, parts, IsolationLevel.READ_UNCOMMITTED)
    return {place: max(end, every[place][1]) for place, end in ends.items()}


def offsets(config: Config, parts: list[tuple[str, int]]) -> dict[tuple[str, int], tuple[int, int]]:
    """Return the first offset that each partition still has, and its end."""
    if not parts:
        return {}
    client = consumer(config)
    try:
        found = {}
        for topic, partition in parts:
            with translated(f"looking up the offsets of {topic} [{partition}]"):
                found[topic, partition] = watermarks(
                    client, TopicPartition(topic, partition), timeout=_TIMEOUT_SECONDS
                )
        return absence.confirmed(config, found)
    finally:
        client.close()


def read_if_there(config: Config, topic: str) -> Iterator[Message]:
    """Yield the records of a one-partition topic; none if it is proven not to exist."""
    with _opened(config, topic) as (client, ranges):
        yield from _drain(client, ranges)


@contextmanager
def _opened(
    config: Config, topic: str
) -> Iterator[tuple[Consumer, dict[tuple[str, int], tuple[int, int]]]]:
    """Yield a consumer and the offsets of a one-partition topic; no offsets if there is none.

    Raises UnavailableError if the brokers alternate between knowing the topic and not.
    """
    client = consumer(config)
    try:
        for left in reversed(range(_TRIES)):
            try:
                ranges = absence.confirmed(config, _ranges(client, {topic: 1}))
                break
            except CDCError as error:
                if not absence.says_unknown(error):
                    raise
                if absence.absent(config, [topic]):
                    ranges = {}
                    break
                if not left:
                    raise
        yield client, ranges
    finally:
        client.close()


def _int(value: Any) -> int:  # noqa: ANN401 - librdkafka's stubs say int | None
    return int(value)
