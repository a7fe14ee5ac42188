"""How far groups are, by Kafka's own answers: members, what is committed, what topics hold.

With an admin client alone, which joins nothing and may be kept. A group that cannot go on without a
decision has a `gap`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from confluent_kafka import (
    OFFSET_INVALID,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    TopicPartition,
)

# The package imports it without declaring it as an export.
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

from cdc.log import group_records, topics
from cdc.log.client import translated
from cdc.log.groups import group_id
from cdc.log.partitions import OffsetRange, Partition

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.log.group_records import GroupRecord
    from cdc.log.topics import Admin

_TIMEOUT_SECONDS: Final = 15.0


class GroupState(NamedTuple):
    """How far a group is: its members, and for each partition what is committed and held."""

    name: str
    members: int
    committed: dict[Partition, int]
    held: dict[Partition, OffsetRange]
    gap: str = ""  # why it cannot go on where it was

    @property
    def lag(self) -> int:
        """How many offsets are not acknowledged; there are some without an event among them."""
        return sum(max(0, held.end - self.committed[at]) for at, held in self.held.items())

    @property
    def unacknowledged(self) -> dict[Partition, OffsetRange]:
        """The ranges that are not acknowledged and still held."""
        ranges = {
            at: OffsetRange(max(held.start, self.committed[at]), held.end)
            for at, held in self.held.items()
        }
        return {at: each for at, each in ranges.items() if each.start < each.end}


def state(client: Admin, config: Config, record: GroupRecord) -> GroupState:
    """Return how far a group is, in what it still reads."""
    record = group_records.of_configured(config, record)
    name = group_id(config, record.group)
    present = topics.describe(client, list(record.topics))
    places = [(topic, number) for topic, its in present.items() for number in range(its.partitions)]
    with translated(f"reading the offsets of {name}"):
        # In this order: meanwhile the group may commit more, and retention delete what it had.
        starts = _offsets(client, places, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
        answered = _committed(client, name, places)
        ends = _offsets(client, places, OffsetSpec.latest())  # type: ignore[no-untyped-call]
        held = {at: OffsetRange(start, ends[at]) for at, start in starts.items()}
        described = client.describe_consumer_groups([name])
        members = len(described[name].result(_TIMEOUT_SECONDS).members)
    committed, gap = dict[Partition, int](), ""
    for topic, began in record.topics.items():
        if topic not in present or present[topic].topic_id != began.id:
            gap = f"{topic} was deleted or created again"
    for at in places:
        topic, number = at
        began = record.topics[topic]
        found = answered.get(at, OFFSET_INVALID)
        if found < 0 and number < len(began.offsets) and not gap:
            gap = f"Kafka has forgotten its offset of {topic} [{number}]"
        committed[at] = max(0, found)
        if committed[at] < held[at].start:
            gap = gap or (
                f"retention has deleted {committed[at]} to {held[at].start - 1} of"
                f" {topic} [{number}], which it has not received"
            )
        elif committed[at] > held[at].end:
            gap = gap or f"{topic} [{number}] ends before what it has received"
    return GroupState(record.group, members, committed, held, gap)


def _offsets(client: Admin, places: list[Partition], spec: OffsetSpec) -> dict[Partition, int]:
    if not places:
        return {}
    asked: Any = {TopicPartition(*each): spec for each in places}
    answers = client.list_offsets(
        asked,
        isolation_level=IsolationLevel.READ_COMMITTED,
        request_timeout=_TIMEOUT_SECONDS,
    )
    return {(at.topic, at.partition): done.result().offset for at, done in answers.items()}


def _committed(client: Admin, name: str, places: list[Partition]) -> dict[Partition, int]:
    if not places:
        return {}
    asked = ConsumerGroupTopicPartitions(name, [TopicPartition(*each) for each in places])
    answer = client.list_consumer_group_offsets([asked], request_timeout=_TIMEOUT_SECONDS)
    found = answer[name].result().topic_partitions
    return {(each.topic, each.partition): each.offset for each in found}
