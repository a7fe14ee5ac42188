"""Poll the topics: find lost records and changed topics before a follower does.

Kafka may lose what it acknowledged (an unclean leader election), and people delete, recreate and
empty topics or add partitions to them. Each of these breaks a promise of the log, and none of them
stops a producer by itself. So at each start the newest frontier records are compared with the
resume record and with the partitions' ends, and from then on the topics are checked every few
seconds. What each comparison finds is decided in `cdc.log.expected`.

A problem must be found twice, a moment apart: a broker that has just become a leader may not know
everything yet. A broker that does not answer proves nothing and is asked again later.

It also asks for the topics' cleanup.policy: another one than configured deletes events silently.

And it measures how long the oldest open transaction in one of our topics has held back
read_committed readers. A transaction of ours lasts seconds, so a longer one is from another
producer, or hangs.
"""

from __future__ import annotations

import logging
import math
import time
from threading import Thread
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from msgspec.structs import replace

from cdc.errors import CDCError, FencedError, GapError, UnavailableError
from cdc.log import names, reader, topics, trace
from cdc.log.expected import START_OVER, Expected, same_seq, verify
from cdc.log.offsets import Observed, OffsetSpan, OffsetsQuestion
from cdc.log.policies import Policies

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cdc.config import Config
    from cdc.log.frontiers import FrontierCounts
    from cdc.log.partitions import Partition
    from cdc.log.records import ResumeIdentity, ResumePosition
    from cdc.log.topics import Admin

log = logging.getLogger("cdc.log.topic_monitor")

CHECK_SECONDS: Final = 5.0
# Between two checks of a suspected problem.
_AGAIN_SECONDS: Final = 1.0
_START_TRIES: Final = 10
# Partitions in one check: some milliseconds of CPU. With more of them the checks take turns.
_PARTITIONS: Final = 500
# How many frontier records a start reads back.
_FRONTIER_RECORDS: Final = 1_000
# The share of log.retention_hours within which records must still exist. Clocks differ.
_SURELY_KEPT: Final = 0.9
# Longer than any Kafka transaction of ours may be open.
_HELD_SECONDS: Final = 70.0


class Examined(NamedTuple):
    """A log compared with its own records."""

    problems: list[CDCError]
    topics: dict[str, tuple[str, int]]  # id and partition count, as they are
    held: dict[Partition, int]  # where readers are held back, and at which offset


class Gauges(Protocol):
    """Where the monitor reports what it measures."""

    held_seconds: float
    wrong_policies: dict[str, str]  # cleanup.policy by topic


class TopicMonitor:
    """Checks one session's topics: `start` first, then `poll` in each iteration of the loop."""

    def __init__(self, config: Config, admin: Admin, gauges: Gauges | None = None) -> None:
        """The caller owns `admin`."""
        self._config = config
        self._admin = admin
        # Followers write their topic themselves, again within seconds.
        reports = names.followers_topic(config.prefix)
        own = [each for each in topics.internal_topics(config) if each.name != reports]
        self._own = {each.name: 1 for each in own}
        policies = {each.name: each.config["cleanup.policy"] for each in own}
        self._compacted = {name for name, policy in policies.items() if policy == "compact"}
        self._policies = Policies(
            lambda topic: policies.get(topic) or topics.policy_of(config, topic)
        )
        optional = (names.messages_topic, names.dead_topic, names.snapshot_topic)
        self._expected = Expected(optional=frozenset(name(config.prefix) for name in optional))
        self._question: OffsetsQuestion | None = None
        self._suspect = ""
        self._due_at = 0.0
        self._next = self._asked = 0
        self._gauges = gauges
        self._held = _HeldReaders(config, gauges)

    def start(self, identity: ResumeIdentity, position: ResumePosition) -> None:
        """Compare the log with its own records. Blocks. Raises what must be fixed first."""
        self._read_records(identity, position)
        for _ in range(_START_TRIES + len(self._expected.partitions)):
            observed = self._ask(identity).answer()
            if observed.unanswered or self._check(observed):
                time.sleep(_AGAIN_SECONDS)
            elif self._next >= len(self._expected.partitions):
                break
        else:
            raise _no_answer(observed)
        self._due_at = time.monotonic() + CHECK_SECONDS

    def pin(self, identity: ResumeIdentity) -> ResumeIdentity:
        """Return the identity with the ids of our own topics as `start` found them."""
        seen = {name: its for name, its in self._expected.topic_ids.items() if name in self._own}
        return replace(identity, topic_ids=seen | identity.topic_ids)

    def poll(self, identity: ResumeIdentity, frontiers: FrontierCounts) -> None:
        """Check the topics if it is time to, and never wait. Raises GapError or ConfigError.

        `frontiers` have the partitions' ends as brokers reported them to this session's producers.
        """
        if self._policies.is_waiting():
            return
        if self._gauges is not None:
            self._gauges.wrong_policies = self._policies.wrong
        if self._question is None:
            if time.monotonic() >= self._due_at:
                # Before asking: what is acknowledged while the question is in flight is not in it.
                self._expected.add_acknowledged(frontiers, self._compacted, time.monotonic())
                with trace.span("log watch"):
                    self._question = self._ask(identity)
        elif self._question.answered:
            observed, self._question = self._question.answer(), None
            silent = observed.topics.keys() - {topic for topic, _ in observed.spans}
            if silent or (observed.unanswered and not observed.topics):
                self._replace_admin()
            again = self._check(observed) or bool(silent or observed.unanswered)
            self._due_at = time.monotonic() + (_AGAIN_SECONDS if again else CHECK_SECONDS)
            self._policies.ask(self._admin, observed.topics)

    def examine(self, identity: ResumeIdentity, position: ResumePosition) -> Examined:
        """Return all current problems. Blocks. Raises UnavailableError if brokers don't answer.

        A partition counts as held back if two looks a second apart find it at the same offset: an
        open transaction of a healthy daemon has ended by then.
        """
        found: list[CDCError] = []
        try:
            self._read_records(identity, position)
        except FencedError:
            pass  # a daemon is running, and has compared them at its start
        except GapError as problem:
            found.append(problem)
        first = OffsetsQuestion(self._admin, self._expected.partitions).answer()
        time.sleep(_AGAIN_SECONDS)
        observed = OffsetsQuestion(self._admin, self._expected.partitions).answer()
        if observed.unanswered:
            raise _no_answer(observed)
        held = {
            partition: span.stable
            for partition, span in observed.spans.items()
            if span.stable < span.end and first.spans.get(partition, span).stable == span.stable
        }
        found += verify(self._expected, observed)
        return Examined(found, observed.topics, held)

    def _replace_admin(self) -> None:
        """Continue with a new client: this one may keep asking a leader that no longer exists.

        Or the right one, with the leader epoch from before its restart.
        """
        left = [self._admin]
        self._admin = topics.admin(self._config)
        # Its last reference is dropped on a thread: closing it may take seconds.
        Thread(target=left.clear, name="cdc-topic-monitor", daemon=True).start()

    def _ask(self, identity: ResumeIdentity) -> OffsetsQuestion:
        """Ask about as many topics as one check covers, starting with the next in turn."""
        self._expected.partitions = {**self._own, **identity.partitions}
        wanted = list(self._expected.partitions.items())
        self._next %= len(wanted)
        chosen: dict[str, int] = {}
        for name, count in wanted[self._next :]:
            if chosen and sum(chosen.values()) + count > _PARTITIONS:
                break
            chosen[name] = count
        self._asked = len(chosen)
        return OffsetsQuestion(self._admin, chosen)

    def _check(self, observed: Observed) -> bool:
        """Note the topics' state; return whether to check again soon. Raises what is certain."""
        self._expected.release(self._oldest())
        found = next(verify(self._expected, observed), None)
        if found is None:
            self._suspect = ""
            self._next += self._asked
            self._expected.add_observed(observed)
            self._held.add(observed.spans, time.monotonic())
            return False
        if found.what == self._suspect:
            raise found
        self._suspect = found.what
        self._replace_admin()  # the second answer comes from another client
        return True

    def _oldest(self) -> float:
        """Return the time (monotonic) before which retention may have deleted anything."""
        hours = self._config.log.retention_hours
        return time.monotonic() - hours * _SURELY_KEPT * 3_600 if hours >= 0 else -math.inf

    # --- the log's own records ---

    def _read_records(self, identity: ResumeIdentity, position: ResumePosition) -> None:
        """Read from the log what the partitions must hold; raise if its records contradict it."""
        prefix, expected = self._config.prefix, self._expected
        expected.partitions = {**self._own, **identity.partitions}
        expected.topic_ids.update(identity.topic_ids)
        tail = reader.read_frontier_tail(self._config, _FRONTIER_RECORDS)
        expected.add_recorded(identity.epoch, tail, position, self._oldest())
        if tail:
            with reader.unless_overtaken(self._config, position):
                same_seq(prefix, tail[-1][0], position)
        elif position.seq > sum(events for *_, events in position.pending):
            self._expect_never_written(names.frontier_topic(prefix), position)

    def _expect_never_written(self, topic: str, position: ResumePosition) -> None:
        """Raise GapError for a frontier topic without records that must hold one."""
        end = reader.end_offsets(self._config, [(topic, 0)])[topic, 0]
        age_seconds = time.time() - position.at_us / 1e6
        if end and age_seconds < time.monotonic() - self._oldest():
            raise GapError(
                f"topic {topic} holds no record, though the resume record counts events that had a"
                " frontier, and log.retention_hours promises it: its records were deleted",
                hint=f"followers can't know what is complete; {START_OVER}",
            )
        if not end:
            raise GapError(
                f"topic {topic} never held a record, though the resume record counts events that"
                " had a frontier: it was deleted and created again",
                hint=f"followers can't know what is complete; {START_OVER}",
            )


class _HeldReaders:
    """How long open transactions have held back read_committed readers."""

    def __init__(self, config: Config, gauges: Gauges | None) -> None:
        self._config, self._gauges = config, gauges
        # By partition: its last stable offset, and since when (monotonic) it has not moved.
        self._stable: dict[Partition, tuple[int, float]] = {}
        self._warned = False

    def add(self, spans: Mapping[Partition, OffsetSpan], now: float) -> None:
        """Add what the brokers showed; report how long the oldest has lasted, and warn once."""
        for partition, span in spans.items():
            if span.stable >= span.end:
                self._stable.pop(partition, None)
            elif self._stable.get(partition, (-1, now))[0] != span.stable:
                self._stable[partition] = (span.stable, now)
        seconds = max((now - since for _, since in self._stable.values()), default=0.0)
        if self._gauges:
            self._gauges.held_seconds = seconds
        if seconds > _HELD_SECONDS and not self._warned:
            partition, (stable, _) = min(self._stable.items(), key=lambda item: item[1][1])
            what, hint = held_back(self._config, partition, stable)
            log.warning("readers are held back", extra={"fields": {"error": what, "hint": hint}})
        self._warned = seconds > _HELD_SECONDS


def _no_answer(observed: Observed) -> UnavailableError:
    return UnavailableError(
        f"the brokers do not describe these topics: {', '.join(sorted(observed.unanswered)[:3])}",
        hint="see that the brokers run, and that the principal may Describe the topics",
    )


def held_back(config: Config, partition: Partition, stable: int) -> tuple[str, str]:
    """Return what an open transaction does to readers of a partition, and what ends it."""
    topic, number = partition
    tool = f"kafka-transactions.sh --bootstrap-server {config.log.bootstrap_servers}"
    where = f"--topic {topic} --partition {number}"
    what = (
        f"topic {topic}, partition {number}: an open transaction holds read_committed readers back"
        f" at offset {stable}"
    )
    hint = (
        f"find its producer: {tool} describe-producers {where}; to end it: {tool}"
        f" abort {where} --start-offset {stable}"
    )
    return what, hint
