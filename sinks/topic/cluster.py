"""The Kafka part of the store: its topics, whose they are, what they hold, and transactions.

A prefix belongs to one follower: the frontier record names it, as the header of every row does. The
transactional id is the name of the store's own topic, so a writer that opens it ends what any other
of this prefix has not committed, and has read the frontier record after that.
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from confluent_kafka import IsolationLevel

from cdc import failpoints
from cdc.errors import ConfigError, StoreLostError
from cdc.log import absence, limits, names, reader, topics
from cdc.log.client import MAX_MESSAGE_BYTES
from cdc.log.consumer import LogConsumer
from cdc.log.partitions import OffsetRange, Partition
from cdc.log.publisher import BoundedPublisher
from lockstep.sinks.topic.records import FOLLOWER, SEQ, TopicTable, decoded, owner_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from confluent_kafka import Message
    from confluent_kafka.admin import AdminClient

    from cdc.config import Config
    from lockstep.sinks.contract import Version
    from lockstep.sinks.topic.records import Started, TopicFrontier

# No record is compacted away by a newer one that is younger than this: readers have as long to read
# what the frontier record names.
_LAG_MS: Final = 3_600_000
# A reader that continues from its offsets within this time gets every tombstone; brokers may have
# another default.
_TOMBSTONE_MS: Final = 24 * 3_600_000
_BOTH: Final = {"cleanup.policy": "compact", "max.message.bytes": str(MAX_MESSAGE_BYTES)}
_OF_ROWS: Final = {
    **_BOTH, "min.compaction.lag.ms": str(_LAG_MS), "delete.retention.ms": str(_TOMBSTONE_MS),
    "segment.bytes": str(64 << 20),
}  # fmt: skip
_OWN: Final = {**_BOTH, "min.cleanable.dirty.ratio": "0.1", "segment.bytes": str(8 << 20)}
# A huge cut takes minutes to send. Readers wait as long for a writer that was killed for good.
_TRANSACTION_SECONDS: Final = 300
_VISIBLE_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 0.02


class TopicSettings(NamedTuple):
    """The configuration of a follower in topics."""

    # The pipeline's, with the brokers, prefix and form of the follower's topics as its `log`.
    config: Config
    pipeline: str
    follower: str


class FollowerTopics:
    """The topics below one prefix."""

    def __init__(self, settings: TopicSettings) -> None:
        self._config = settings.config
        self._prefix = settings.config.prefix
        self.own = f"{self._prefix}.cdc.follower"
        self.owner = owner_of(settings.pipeline, settings.follower)
        self.publisher: BoundedPublisher | None = None  # while nobody is known to have fenced it
        self._own_id = ""  # Kafka's, once it is opened
        self._limits: dict[str, int] = {}

    @cached_property
    def admin(self) -> AdminClient:
        return topics.admin(self._config)

    @cached_property
    def consumer(self) -> LogConsumer:
        return LogConsumer(self._config, skip_deleted=True)

    def close(self) -> None:
        self.let_go()
        if "consumer" in self.__dict__:
            self.consumer.close()
        for each in ("admin", "consumer"):
            self.__dict__.pop(each, None)

    # --- transactions ---

    @property
    def transaction_seconds(self) -> float:
        """How long a transaction may be open before brokers end it and fence its writer."""
        own = self._config.log.kafka.get("transaction.timeout.ms")
        return _TRANSACTION_SECONDS if own is None else float(own) / 1_000

    def fence(self) -> None:
        """End what other writers have not committed, and be the only one. Blocks."""
        self.publisher = BoundedPublisher(
            self._config, transaction_seconds=_TRANSACTION_SECONDS, transactional_id=self.own
        )
        self.publisher.open()

    def let_go(self) -> None:
        """Abort what is open, after an error or at the end."""
        publisher, self.publisher = self.publisher, None
        if publisher is not None and publisher.started:
            publisher.abort()

    def put(self, records: Mapping[bytes, bytes]) -> None:
        """Write records of the own topic, and commit the transaction."""
        assert self.publisher is not None, "the caller has opened it"
        for key, value in records.items():
            self.publisher.add(self.own, key, value)
        self.publisher.flush()
        failpoints.reach("topic_flushed")
        self.publisher.commit()

    def written_ends(self, held: Mapping[str, TopicTable]) -> dict[str, TopicTable]:
        """Return topics with their ends after what the open transaction has written to them."""
        assert self.publisher is not None, "the caller has opened it"
        ends = self.publisher.take_ends()
        unknown = [place for place, end in ends.items() if end < 0]
        ends |= reader.written_ends(self._config, unknown)
        return {name: table.at(ends) for name, table in held.items()}

    # --- the own topic ---

    def open(self) -> None:
        """Create the own topic if it is missing, and forget what was known of the others."""
        self.let_go()
        self._limits.clear()
        resume = names.resume_topic(self._prefix)
        if resume in topics.describe(self.admin, [resume]):
            raise ConfigError(
                f"{self._prefix} is the prefix of a pipeline's own topics",
                hint="give the follower another `topic.prefix`",
            )
        made = topics.ensure(self.admin, self._config, [topics.Topic(self.own, 1, _OWN)])
        self._own_id = made[self.own].topic_id

    def read(self) -> tuple[TopicFrontier, Started] | None:
        """Return the newest records; None if there is no store.

        What was just committed is waited for, but not for a writer that does not end: its
        transaction ends when the next one opens.
        """
        there = self.consumer.confirmed_if_exists((self.own, 0))
        if there is None:
            return None
        deadline = time.monotonic() + _VISIBLE_SECONDS
        every, only = IsolationLevel.READ_UNCOMMITTED, [(self.own, 0)]
        end = absence.spans(self._config, only, every)[self.own, 0].end
        while there.end < end and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            there = absence.spans(self._config, only)[self.own, 0]
        found: dict[bytes, bytes] = {}
        for _, messages in self.consumer.pieces({(self.own, 0): there}):
            found |= {m.key() or b"": m.value() or b"" for m in messages}
        known = decoded(self.own, found)
        if known and owner_of(known[0].pipeline, known[0].follower) != self.owner:
            raise ConfigError(
                f"the topics below {self._prefix} are those of follower {known[0].follower} of"
                f" pipeline {known[0].pipeline}",
                hint="give this follower another `topic.prefix`",
            )
        return known

    # --- topics of rows ---

    def expect_held(self, held: Collection[TopicTable]) -> None:
        """Raise StoreLostError unless these topics exist, and are those that were written to."""
        wanted = {self.own: self._own_id} | {each.topic: each.topic_id for each in held}
        found = topics.describe(self.admin, list(wanted))
        missing = [topic for topic in wanted if topic not in found]
        missing = sorted(absence.absent(self._config, missing)) if missing else []
        again = [topic for topic, its in found.items() if its.topic_id != wanted[topic]]
        if missing or again:
            what = "does not exist" if missing else "was deleted and created again"
            raise StoreLostError(f"topic {(missing or again)[0]} {what}")

    def expect_complete(self, held: Collection[TopicTable]) -> None:
        """Raise StoreLostError if records of topics were deleted, or ConfigError if they may be."""
        ends = {
            place: end
            for each in held
            for place, end in zip(each.partitions, each.ends, strict=True)
        }
        every = IsolationLevel.READ_UNCOMMITTED
        for place, (low, end) in absence.spans(self._config, ends, every).items():
            if low or end < ends[place]:
                what = f"begins at offset {low}" if low else f"ends at {end}, not {ends[place]}"
                raise StoreLostError(f"{place[0]} [{place[1]}] {what}: records were deleted")
        checked = [self.own, *(each.topic for each in held)]
        for topic, its in topics.settings_of(self.admin, checked).items():
            if (policy := its.get("cleanup.policy")) != "compact":
                raise ConfigError(
                    f"cleanup.policy of {topic} is {policy}: Kafka would delete rows",
                    hint=f"kafka-configs.sh --alter --topic {topic} --add-config"
                    " cleanup.policy=compact",
                )

    def take(self, versions: Iterable[Version]) -> dict[str, tuple[TopicTable, bool]]:
        """Return the topics of tables that have none here, created if they are missing.

        And whether one has rows, left by an earlier filling. Raises ConfigError for a topic that
        has records of anything else.
        """
        wanted = {names.data_topic(self._prefix, v.schema, v.table): v for v in versions}
        count = self._config.log.partitions
        made = topics.ensure(
            self.admin, self._config, [topics.Topic(topic, count, _OF_ROWS) for topic in wanted]
        )
        found = {
            version.name: TopicTable(
                topic, made[topic].topic_id, version.key, (0,) * made[topic].partitions
            )
            for topic, version in wanted.items()
        }
        written = self._written(found)
        for table, owner in written.values():
            if owner != self.owner:
                raise ConfigError(
                    f"topic {table.topic} has records of {owner.decode() or 'something else'}",
                    hint="give the follower another `topic.prefix`, or delete the topic",
                )
        empty = {name: (table, False) for name, table in found.items()}
        return empty | {name: (table, True) for name, (table, _) in written.items()}

    def leftovers(self) -> dict[str, TopicTable]:
        """Return the topics below the prefix that have rows of this follower, by table."""
        below = [topic for topic in topics.existing(self.admin, self._prefix) if topic != self.own]
        found = {}
        for topic, its in topics.describe(self.admin, below).items():
            with suppress(ConfigError):  # the name is no table's
                name = names.table_name(self._prefix, topic)
                found[name] = TopicTable(topic, its.topic_id, (), (0,) * its.partitions)
        written = self._written(found)
        return {name: table for name, (table, owner) in written.items() if owner == self.owner}

    def _written(self, tables: Mapping[str, TopicTable]) -> dict[str, tuple[TopicTable, bytes]]:
        """Return those with records, at their ends, and the owner that the first record names."""
        found = {}
        for name, table in tables.items():
            there = self.consumer.confirmed(table.partitions)
            for _, messages in self.consumer.pieces(there):
                at_end = table.at({place: span.end for place, span in there.items()})
                found[name] = at_end, _headers(messages[0]).get(FOLLOWER, b"")
                break
        return found

    def limit(self, topic: str) -> int:
        """Return how long a key and a value may be together."""
        if topic not in self._limits:
            self._limits |= limits.limits(self.admin, self._config, [topic])
        return self._limits[topic]

    def records(
        self, ranges: Mapping[Partition, OffsetRange]
    ) -> Iterator[list[tuple[bytes, int, bytes | None]]]:
        """Yield the key, seq and value of each record in the ranges, in its partition's order."""
        for _, messages in self.consumer.pieces(ranges):
            yield [(each.key() or b"", _seq(each), each.value()) for each in messages]


def _seq(message: Message) -> int:
    found = _headers(message).get(SEQ)
    if found is None:
        raise ConfigError(
            f"{message.topic()} [{message.partition()}] has a record of something else at offset"
            f" {message.offset()}",
            hint="stop what writes to it, delete the topic, and start the follower",
        )
    return int(found)


def _headers(message: Message) -> dict[str, bytes]:
    found: Any = message.headers() or ()
    return dict(found)
