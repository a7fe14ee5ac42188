"""What the log's own records expect of its topics, and how the topics differ from it.

Pure: `verify` compares two values, what is expected and what the brokers showed, and returns what
is lost or changed. What no broker answered is no finding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.errors import CDCError, ConfigError, GapError
from cdc.log import names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cdc.log.frontiers import FrontierCounts
    from cdc.log.offsets import Observed, OffsetSpan
    from cdc.log.partitions import Partition
    from cdc.log.records import FrontierRecord, ResumePosition

# How the names of two topics of ours end; no table of the source has a topic with such an end.
_SCHEMAS, _FRONTIERS = names.schema_topic(""), names.frontier_topic("")
START_OVER: Final = "`cdc teardown --topics`, then `cdc setup` and a snapshot, start over"
_LOST: Final = (
    "acknowledged records were lost, as after an unclean leader election (see that"
    f" unclean.leader.election.enable is false and min.insync.replicas at least 2); {START_OVER}"
)
ACKNOWLEDGE: Final = "`cdc topics acknowledge` accepts it and begins a new epoch"


class EpochError(ConfigError):
    """A change of the topics that breaks the order of keys or readers' paths, but loses no event.

    A new epoch may start with it, once a person has acknowledged it (`cdc topics acknowledge`).
    """


class Retained(NamedTuple):
    """A record that must not be deleted yet: the one before `offset`, in the log since `since`."""

    offset: int
    since: float  # monotonic


@dataclass(slots=True)
class Expected:
    """What must be in the brokers' answers."""

    partitions: dict[str, int] = field(default_factory=dict)  # how many each topic must have
    # Topics that need not exist unless they have an id: an older version did not create them.
    optional: frozenset[str] = frozenset()
    topic_ids: dict[str, str] = field(default_factory=dict)
    ends: dict[Partition, int] = field(default_factory=dict)
    retained: dict[Partition, Retained] = field(default_factory=dict)
    # Of partitions that have lost records: where one ended, and the lowest valid end.
    regressed: dict[Partition, tuple[int, int]] = field(default_factory=dict)

    def add_recorded(
        self,
        epoch: int,
        tail: Iterable[tuple[FrontierRecord, float]],
        position: ResumePosition,
        oldest: float,
    ) -> None:
        """Add what the newest frontier records and the resume record count.

        Retention may delete records that were written (monotonic) before `oldest`.
        """
        ends: dict[Partition, int] = {}  # of this epoch
        for frontier, since in tail:
            for topic, number, end, events in frontier.partitions:
                partition = (topic, number)
                self.ends[partition] = end
                # What was missing when an epoch began has been acknowledged.
                if frontier.epoch == epoch:
                    if since > oldest:
                        self.retained.setdefault(partition, Retained(end, since))
                    if end < (least := ends.get(partition, 0) + events):
                        self.regressed.setdefault(partition, (end, least))
                    ends[partition] = end
        for topic, number, events in position.pending:
            self.ends[topic, number] = self.ends.get((topic, number), 0) + events

    def add_acknowledged(self, frontiers: FrontierCounts, compacted: set[str], now: float) -> None:
        """Add what the brokers have acknowledged to this session, to be retained from now on."""
        self.regressed.update(frontiers.regressed)
        for partition, end in frontiers.ends.items():
            # Above the end at the last check, so it was written after that.
            if end > self.ends.get(partition, 0):
                self.ends[partition] = end
                if partition[0] not in compacted:
                    self.retained.setdefault(partition, Retained(end, now))

    def add_observed(self, observed: Observed) -> None:
        """Add what brokers showed that `verify` found nothing wrong with."""
        for name, (topic_id, _) in observed.topics.items():
            self.topic_ids.setdefault(name, topic_id)
        for partition, span in observed.spans.items():
            self.ends[partition] = max(span.end, self.ends.get(partition, 0))

    def release(self, oldest: float) -> None:
        """Let retention delete what was written before `oldest`."""
        for partition in [each for each, its in self.retained.items() if its.since < oldest]:
            del self.retained[partition]


def same_seq(prefix: str, newest: FrontierRecord, position: ResumePosition) -> None:
    """Raise GapError if the newest frontier and the resume record do not belong together.

    The events since that frontier are `pending` in the resume record, so that both must count to
    the same seq: the one that counts less has lost its newest records.
    """
    counted = newest.seq + sum(events for *_, events in position.pending)
    if counted == position.seq and newest.lsn <= position.end_lsn:
        return
    resume, frontier = names.resume_topic(prefix), names.frontier_topic(prefix)
    short = frontier if counted < position.seq else resume
    raise GapError(
        f"topic {short} has lost its newest records: {frontier} counts up to seq {counted}"
        f" ({newest.lsn}), {resume} up to seq {position.seq} ({position.end_lsn})",
        hint=_LOST,
    )


def verify(expected: Expected, observed: Observed) -> Iterator[CDCError]:
    """Yield each difference between what is expected of the topics and what the brokers showed."""
    for topic in sorted(observed.missing - (expected.optional - expected.topic_ids.keys())):
        yield GapError(
            f"topic {topic} was deleted, though the pipeline writes to it",
            hint=f"its events are lost downstream; {START_OVER}",
        )
    for topic, (topic_id, partitions) in observed.topics.items():
        yield from _topic(expected, topic, topic_id, partitions)
    for partition, span in observed.spans.items():
        topic, number = partition
        end = expected.ends.get(partition, 0)
        if span.end < end:
            yield GapError(
                f"topic {topic}, partition {number}, ends at offset {span.end}, but the brokers"
                f" had acknowledged it up to {end}: offsets {span.end} to {end - 1} are lost",
                hint=_LOST,
            )
        yield from _beginning(partition, span, expected.retained.get(partition))
    for (topic, number), (ended, least) in expected.regressed.items():
        # A topic that was recreated starts its offsets again; that is another finding.
        if topic in observed.topics:
            yield GapError(
                f"topic {topic}, partition {number}, ends at offset {ended} where all that the"
                f" brokers had acknowledged ends at {least} or beyond: some of it is lost, and"
                " other records have taken its offsets",
                hint=_LOST,
            )


def _topic(expected: Expected, topic: str, topic_id: str, partitions: int) -> Iterator[CDCError]:
    """Yield whether it is another topic of the same name, or has other partitions."""
    if expected.topic_ids.get(topic, topic_id) != topic_id:
        yield GapError(
            f"topic {topic} was deleted and created again: what it held is lost",
            hint=f"its events are lost downstream; {START_OVER}",
        )
    pinned = expected.partitions.get(topic, 1)
    if partitions > pinned:
        yield EpochError(
            f"topic {topic} has {partitions} partitions, the resume record pins {pinned}: keys"
            " would change partition and lose their order",
            hint=ACKNOWLEDGE,
        )
    if partitions < pinned:
        yield GapError(
            f"topic {topic} has {partitions} partitions, the resume record pins {pinned}: it"
            " was deleted and created again",
            hint=f"its events are lost downstream; {START_OVER}",
        )


def _beginning(
    partition: Partition, span: OffsetSpan, retained: Retained | None
) -> Iterator[CDCError]:
    """Yield what was deleted from the beginning of a partition before its retention ended."""
    topic, number = partition
    if topic.endswith(_SCHEMAS) and span.first:
        yield GapError(
            f"topic {topic} begins at offset {span.first}: table versions before it were deleted",
            hint="see that the topic's cleanup.policy is compact alone; events of those versions"
            f" can't be read; {START_OVER}",
        )
    if retained is None or span.first < retained.offset:
        return
    deleted = f"from offset {retained.offset - 1} on were deleted, though log.retention_hours"
    if topic.endswith(_FRONTIERS):
        yield GapError(
            f"topic {topic} begins at offset {span.first}: frontiers {deleted} promises them",
            hint=f"followers can't know what is complete; {START_OVER}",
        )
        return
    yield EpochError(
        f"topic {topic}, partition {number}, begins at offset {span.first}: events {deleted}"
        " promises them to followers",
        hint="see the topic's retention.ms and retention.bytes, and who deleted records;"
        f" rebuild each follower that had not read them; then {ACKNOWLEDGE}",
    )
