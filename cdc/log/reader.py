"""Read the log's own records back, and complete topics, up to an end that was fixed first."""

from __future__ import annotations

import time
from collections import deque
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from confluent_kafka import IsolationLevel

from cdc.errors import CDCError, FencedError, GapError, Policy
from cdc.events import row_key
from cdc.log import absence, names, records
from cdc.log.consumer import LogConsumer

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from confluent_kafka import Message

    from cdc.config import Config
    from cdc.log.partitions import OffsetRange, Partition

_TAIL_OFFSETS: Final = 100


def read_partition(
    config: Config, topic: str, number: int
) -> Iterator[tuple[bytes | None, bytes | None]]:
    """Yield a row's key and the value of every committed record that the partition holds now."""
    with closing(LogConsumer(config)) as consumer:
        for _, messages in consumer.pieces(consumer.look_up([(topic, number)])):
            for message in messages:
                yield row_key(message.key()), message.value()


def read_resume(
    config: Config,
) -> tuple[records.ResumeIdentity, records.ResumePosition] | None:
    """Return the pipeline's resume record, or None if there is proven to be none.

    Raises GapError if only one of its parts exists: both were written in one transaction.
    """
    topic = names.resume_topic(config.prefix)
    newest = _newest_resume(config, topic)
    if newest is None:
        return None
    found = resume_in(config, newest)
    if found is None:
        absence.wait_for_markers(config, topic)
        found = resume_in(config, _newest_resume(config, topic) or {})
    return found


def read_last_resume(
    config: Config,
) -> tuple[records.ResumeIdentity, records.ResumePosition] | None:
    """Return the last resume record that was written by now, where its writers are fenced.

    A transaction that is open in its topic, of anyone, hides records that were committed after it
    began: an older one is visible until then. Raises UnavailableError if one stays open.
    """
    absence.wait_for_markers(config, names.resume_topic(config.prefix))
    return read_resume(config)


def resume_in(
    config: Config, newest: Mapping[bytes, bytes]
) -> tuple[records.ResumeIdentity, records.ResumePosition] | None:
    """Return the pipeline's resume record by the newest value of each key; None without both parts.

    Raises GapError if there is one of its parts only: both were written in one transaction.
    """
    topic = names.resume_topic(config.prefix)
    identity = newest.get(records.resume_key(config.pipeline, "identity"))
    position = newest.get(records.resume_key(config.pipeline, "position"))
    if not identity and not position:
        return None
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
    proves nothing. Nor does it where a broker that has just been elected has shown an old one: it
    is read again after a moment.
    """
    try:
        yield
    except CDCError as error:
        if error.policy is not Policy.HALT:
            raise
        absence.pause(absence.AGAIN_SECONDS)
        resumed = read_last_resume(config)
        if resumed is None or resumed[1] == position:
            raise
        raise FencedError(
            "the log has a newer resume record than the one that this daemon has read",
            hint="another daemon may have the slot; this one goes back to waiting for it",
        ) from error


def _newest_resume(config: Config, topic: str) -> dict[bytes, bytes] | None:
    """Return the newest value of each key; None if the topic is proven not to exist."""
    with closing(LogConsumer(config)) as consumer:
        there = consumer.confirmed_if_exists((topic, 0))
        if there is None:
            return None
        pieces = consumer.pieces({(topic, 0): there})
        return newest_values(message for _, piece in pieces for message in piece)


def newest_values(messages: Iterable[Message]) -> dict[bytes, bytes]:
    """Return the newest value of each key; that of a tombstone is empty."""
    return {message.key() or b"": message.value() or b"" for message in messages}


def read_schemas(config: Config) -> list[records.SchemaRecord]:
    """Return every table version, oldest first."""
    return read_schema_topic(config).versions()


def read_column_numbers(config: Config) -> list[records.ColumnNumbers]:
    """Return the column numbers of tables that hide columns, oldest first."""
    return read_schema_topic(config).column_numbers()


class SchemaTopic(NamedTuple):
    """Every record of the schema topic, with its offset, and the offset after them.

    It has table versions, column numbers and DDL statements.
    """

    name: str
    entries: list[tuple[int, bytes, bytes | None]]
    end: int

    def versions(self) -> list[records.SchemaRecord]:
        """Return every table version, oldest first."""
        return versions_in(self.name, ((key, value or b"") for _, key, value in self.entries))

    def column_numbers(self) -> list[records.ColumnNumbers]:
        """Return the column numbers of tables that hide columns, oldest first."""
        found = {}
        for _, key, value in self.entries:
            if records.is_numbers_key(key) and value:
                record = records.decode(records.ColumnNumbers, value, self.name)
                found[record.relation_id, record.lsn] = record
        return sorted(found.values(), key=lambda each: each.lsn)

    def since(self, offset: int) -> list[tuple[bytes, bytes | None]]:
        """Return the keys and values from an offset on.

        A topic that ends before it was created again: all of them count then.
        """
        first = offset if offset <= self.end else 0
        return [(key, value) for at, key, value in self.entries if at >= first]


def read_schema_topic(config: Config) -> SchemaTopic:
    """Return every record that the schema topic has; none if it is proven not to exist."""
    name = names.schema_topic(config.prefix)
    with closing(LogConsumer(config)) as consumer:
        there = consumer.confirmed_if_exists((name, 0))
        if there is None:
            return SchemaTopic(name, [], 0)
        pieces = consumer.pieces({(name, 0): there})
        found = [
            (each.offset() or 0, each.key() or b"", each.value())
            for _, piece in pieces
            for each in piece
        ]
        return SchemaTopic(name, found, there.end)


def versions_in(topic: str, read: Iterable[tuple[bytes, bytes]]) -> list[records.SchemaRecord]:
    """Return the table versions among keys and values of the schema topic, oldest first."""
    found = {}
    for key, value in read:
        if records.is_schema_key(key):
            record = records.decode(records.SchemaRecord, value, topic)
            found[record.schema_id] = record
    return [found[schema_id] for schema_id in sorted(found)]


def read_frontier_tail(config: Config, limit: int) -> list[tuple[records.FrontierRecord, float]]:
    """Return the newest frontier records, oldest first, and when (monotonic) each was written.

    Reads only the topic's end: with the data's retention it can hold millions of records.
    """
    topic = names.frontier_topic(config.prefix)
    with closing(LogConsumer(config)) as consumer:
        there = consumer.confirmed_if_exists((topic, 0))
        if there is None:
            return []
        # Each record is followed by its transaction's marker; an aborted one leaves only markers.
        for tail in there.tails(_TAIL_OFFSETS + 2 * limit):
            pieces = consumer.pieces({(topic, 0): tail})
            found = deque((message for _, piece in pieces for message in piece), maxlen=limit)
            if found:
                return [_dated(message, topic) for message in found]
        return []


def _dated(message: Message, topic: str) -> tuple[records.FrontierRecord, float]:
    age_seconds = max(0.0, time.time() - message.timestamp()[1] / 1_000)
    record = records.decode(records.FrontierRecord, message.value() or b"", topic)
    return record, time.monotonic() - age_seconds


def end_offsets(config: Config, partitions: Collection[Partition]) -> dict[Partition, int]:
    """Return each partition's end: above every record there now, below the next one."""
    return {each: there.end for each, there in offsets(config, partitions).items()}


def written_ends(config: Config, partitions: Collection[Partition]) -> dict[Partition, int]:
    """Return each partition's end as the leaders have it, above what open transactions hide.

    For a frontier's ends: after a transaction that hangs there may be records that it counts.
    """
    ends = end_offsets(config, partitions)
    every = absence.spans(config, partitions, IsolationLevel.READ_UNCOMMITTED)
    return {each: max(end, every[each].end) for each, end in ends.items()}


def offsets(config: Config, partitions: Collection[Partition]) -> dict[Partition, OffsetRange]:
    """Return the offsets that each partition holds, by two answers."""
    if not partitions:
        return {}
    with closing(LogConsumer(config)) as consumer:
        return consumer.confirmed(partitions)


def read_if_there(config: Config, topic: str) -> Iterator[Message]:
    """Yield the records of a one-partition topic; none if it is proven not to exist."""
    with closing(LogConsumer(config)) as consumer:
        there = consumer.confirmed_if_exists((topic, 0))
        if there is not None:
            for _, messages in consumer.pieces({(topic, 0): there}):
                yield from messages
