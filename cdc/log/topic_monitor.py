"""Watch the log: find lost records and changed topics before a follower does.

Kafka may lose what it acknowledged (an unclean leader election), and people delete, recreate and
empty topics or add partitions to them. Each of these breaks a promise of the log, and none of them
stops a producer by itself. So at each start the newest frontier records are compared with the
resume record and with the partitions' ends, and from then on the topics are checked every few
seconds.

A problem must be found twice, a moment apart: a broker that has just become a leader may not know
everything yet. A broker that does not answer proves nothing and is asked again later.

It also measures how long the oldest open transaction in one of our topics has held back
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

from cdc.errors import CDCError, ConfigError, FencedError, GapError, UnavailableError
from cdc.log import names, reader, topics, trace
from cdc.log.offsets import Place, Question, Span, Standing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config
    from cdc.log.frontiers import Frontiers
    from cdc.log.records import FrontierRecord, ResumeIdentity, ResumePosition
    from cdc.log.topics import Admin

log = logging.getLogger("cdc.log.topic_monitor")

WATCH_SECONDS: Final = 5.0
# Between two checks of a suspected problem.
_AGAIN_SECONDS: Final = 1.0
_START_TRIES: Final = 10
# Partitions in one check: some milliseconds of CPU. With more of them the checks take turns.
_PARTITIONS: Final = 500
# How many frontier records a start reads back.
FRONTIERS: Final = 1_000
# The share of log.retention_hours within which records must still exist. Clocks differ.
_SURELY_KEPT: Final = 0.9
# Longer than any Kafka transaction of ours may be open.
HELD_SECONDS: Final = 70.0

# How the names of two topics of ours end; no table of the source has a topic with such an end.
_SCHEMAS, _FRONTIERS = names.schema_topic(""), names.frontier_topic("")
_ANEW: Final = "`cdc teardown --topics`, then `cdc setup` and a snapshot, begin anew"
_LOST: Final = (
    "acknowledged records were lost, as after an unclean leader election (see that"
    f" unclean.leader.election.enable is false and min.insync.replicas at least 2); {_ANEW}"
)
ACKNOWLEDGE: Final = "`cdc topics acknowledge` takes it as it is and begins a new epoch"


class EpochError(ConfigError):
    """A change of the topics that breaks the order of keys or readers' paths, but loses no event.

    A new epoch may start with it, once a person has acknowledged it (`cdc topics acknowledge`).
    """


class Kept(NamedTuple):
    """A record that must not be deleted yet: the one before `offset`, in the log since `since`."""

    offset: int
    since: float  # monotonic


class Known(NamedTuple):
    """What is known of the log: ids of topics, ends of partitions, and what must be kept."""

    topic_ids: dict[str, str]
    ends: dict[Place, int]
    kept: dict[Place, Kept]
    fallen: dict[Place, tuple[int, int]]  # where a partition ended, and the lowest valid end


class Examined(NamedTuple):
    """A log compared with its own records."""

    problems: list[CDCError]
    topics: dict[str, tuple[str, int]]  # id and partition count, as they are
    held: dict[Place, int]  # where readers are held back, and at which offset


class Gauges(Protocol):
    """Where the watch reports what it measures."""

    held_seconds: float


class LogWatch:
    """Checks one session's topics: `begin` at the start, `turn` in each iteration of the loop."""

    def __init__(self, config: Config, admin: Admin, gauges: Gauges | None = None) -> None:
        """The caller owns `admin`."""
        self._config = config
        self._admin = admin
        # Followers write their topic themselves, again within seconds.
        reports = names.followers_topic(config.prefix)
        own = [each for each in topics.internal_topics(config) if each.name != reports]
        self._own = {each.name: 1 for each in own}
        self._compacted = {t.name for t in own if t.config["cleanup.policy"] == "compact"}
        self._known = Known({}, {}, {}, {})
        self._question: Question | None = None
        self._suspect = ""
        self._due_at = 0.0
        self._next = self._asked = 0
        self._held: dict[Place, tuple[int, float]] = {}
        self._warned = False
        self._gauges = gauges

    def begin(self, identity: ResumeIdentity, position: ResumePosition) -> None:
        """Compare the log with its own records. Blocks. Raises what must be fixed first."""
        self._recall(identity, position)
        wanted = len({**self._own, **identity.partitions})
        for _ in range(_START_TRIES + wanted):
            standing = self._ask(identity).answer()
            if standing.untold or self._judge(identity, standing):
                time.sleep(_AGAIN_SECONDS)
            elif self._next >= wanted:
                break
        else:
            raise _no_answer(standing)
        self._due_at = time.monotonic() + WATCH_SECONDS

    def pin(self, identity: ResumeIdentity) -> ResumeIdentity:
        """Return the identity with the ids of our own topics as `begin` found them."""
        seen = {name: its for name, its in self._known.topic_ids.items() if name in self._own}
        return replace(identity, topic_ids=seen | identity.topic_ids)

    def turn(self, identity: ResumeIdentity, frontiers: Frontiers) -> None:
        """Check the topics if it is time to, and never wait. Raises GapError or ConfigError.

        `frontiers` have the partitions' ends as brokers reported them to this session's producers.
        """
        if self._question is None:
            if time.monotonic() >= self._due_at:
                # Before asking: what is acknowledged while the question is in flight is not in it.
                self._learn(frontiers)
                with trace.span("log watch"):
                    self._question = self._ask(identity)
        elif self._question.answered:
            standing, self._question = self._question.answer(), None
            silent = standing.topics.keys() - {topic for topic, _ in standing.spans}
            if silent or (standing.untold and not standing.topics):
                self._ask_anew()
            again = self._judge(identity, standing) or bool(silent or standing.untold)
            self._due_at = time.monotonic() + (_AGAIN_SECONDS if again else WATCH_SECONDS)

    def _ask_anew(self) -> None:
        """Continue with a new client: this one may keep asking a leader that no longer exists.

        Or the right one, with the leader epoch from before its restart.
        """
        left = [self._admin]
        self._admin = topics.admin(self._config)
        # Its last reference is dropped on a thread: closing it may take seconds.
        Thread(target=left.clear, name="cdc-log-watch", daemon=True).start()

    def _ask(self, identity: ResumeIdentity) -> Question:
        """Ask about as many topics as one check covers, starting with the next in turn."""
        wanted = list({**self._own, **identity.partitions}.items())
        self._next %= len(wanted)
        chosen: dict[str, int] = {}
        for name, count in wanted[self._next :]:
            if chosen and sum(chosen.values()) + count > _PARTITIONS:
                break
            chosen[name] = count
        self._asked = len(chosen)
        return Question(self._admin, chosen)

    def examine(self, identity: ResumeIdentity, position: ResumePosition) -> Examined:
        """Return all current problems. Blocks. Raises UnavailableError if brokers don't answer.

        A partition counts as held back if two looks a second apart find it at the same offset: an
        open transaction of a healthy daemon has ended by then.
        """
        found: list[CDCError] = []
        try:
            self._recall(identity, position)
        except FencedError:
            pass  # a daemon is running, and has compared them at its start
        except GapError as problem:
            found.append(problem)
        wanted = {**self._own, **identity.partitions}
        first = Question(self._admin, wanted).answer()
        time.sleep(_AGAIN_SECONDS)
        standing = Question(self._admin, wanted).answer()
        if standing.untold:
            raise _no_answer(standing)
        held = {
            place: span.stable
            for place, span in standing.spans.items()
            if span.stable < span.end and first.spans.get(place, span).stable == span.stable
        }
        found += problems(identity, self._known, self._once_known(standing))
        return Examined(found, standing.topics, held)

    def _recall(self, identity: ResumeIdentity, position: ResumePosition) -> None:
        """Read from the log what the partitions must hold; raise if its records contradict it."""
        prefix, known, oldest = self._config.prefix, self._known, self._oldest()
        known.topic_ids.update(identity.topic_ids)
        tail = reader.read_frontier_tail(self._config, FRONTIERS)
        ends: dict[Place, int] = {}  # of this epoch
        for frontier, since in tail:
            for topic, number, end, events in frontier.partitions:
                place = (topic, number)
                known.ends[place] = end
                # What was missing when an epoch began has been acknowledged.
                if frontier.epoch == identity.epoch:
                    if since > oldest:
                        known.kept.setdefault(place, Kept(end, since))
                    if end < (least := ends.get(place, 0) + events):
                        known.fallen.setdefault(place, (end, least))
                    ends[place] = end
        for topic, number, events in position.pending:
            place = (topic, number)
            known.ends[place] = known.ends.get(place, 0) + events
        if tail:
            with reader.unless_overtaken(self._config, position):
                same_seq(prefix, tail[-1][0], position)
        elif position.seq > sum(events for *_, events in position.pending):
            self._once_written(names.frontier_topic(prefix), position)

    def _once_written(self, topic: str, position: ResumePosition) -> None:
        """Raise GapError if the frontier topic has never held a record, or was emptied."""
        _, end = reader.offsets(self._config, [(topic, 0)])[topic, 0]
        age_seconds = time.time() - position.at_us / 1e6
        if end and age_seconds < time.monotonic() - self._oldest():
            raise GapError(
                f"topic {topic} holds no record, though the resume record counts events that had a"
                " frontier, and log.retention_hours promises it: its records were deleted",
                hint=f"followers can't tell what is whole; {_ANEW}",
            )
        if not end:
            raise GapError(
                f"topic {topic} never held a record, though the resume record counts events that"
                " had a frontier: it was deleted and created again",
                hint=f"followers can't tell what is whole; {_ANEW}",
            )

    def _learn(self, frontiers: Frontiers) -> None:
        """Note what the brokers have acknowledged, and that it must be kept from now on."""
        known, now = self._known, time.monotonic()
        known.fallen.update(frontiers.fallen)
        for place, end in frontiers.ends.items():
            # Above the end at the last check, so it was written after that.
            if end > known.ends.get(place, 0):
                known.ends[place] = end
                if place[0] not in self._compacted:
                    known.kept.setdefault(place, Kept(end, now))

    def _oldest(self) -> float:
        """Return the time (monotonic) before which retention may have deleted anything."""
        hours = self._config.log.retention_hours
        return time.monotonic() - hours * _SURELY_KEPT * 3_600 if hours >= 0 else -math.inf

    def _judge(self, identity: ResumeIdentity, standing: Standing) -> bool:
        """Note the topics' state; return whether to check again soon. Raises what is certain."""
        kept, oldest = self._known.kept, self._oldest()
        for place in [place for place, its in kept.items() if its.since < oldest]:
            del kept[place]
        found = next(problems(identity, self._known, self._once_known(standing)), None)
        if found is None:
            self._suspect = ""
            self._next += self._asked
            self._note(standing)
            return False
        if found.what == self._suspect:
            raise found
        self._suspect = found.what
        self._ask_anew()  # the second answer comes from another client
        return True

    def _once_known(self, standing: Standing) -> Standing:
        """Leave out missing topics that never existed: an older version set the log up."""
        prefix = self._config.prefix
        optional = {names.messages_topic(prefix), names.dead_topic(prefix)}
        optional.add(names.snapshot_topic(prefix))
        return standing._replace(
            missing=standing.missing - (optional - self._known.topic_ids.keys())
        )

    def _note(self, standing: Standing) -> None:
        known, now = self._known, time.monotonic()
        for name, (topic_id, _) in standing.topics.items():
            known.topic_ids.setdefault(name, topic_id)
        for place, span in standing.spans.items():
            known.ends[place] = max(span.end, known.ends.get(place, 0))
            self._note_held(place, span, now)
        seconds = max((now - since for _, since in self._held.values()), default=0.0)
        if self._gauges:
            self._gauges.held_seconds = seconds
        if seconds > HELD_SECONDS and not self._warned:
            place, (stable, _) = min(self._held.items(), key=lambda item: item[1][1])
            what, hint = held_back(self._config, place, stable)
            log.warning("readers are held back", extra={"fields": {"error": what, "hint": hint}})
        self._warned = seconds > HELD_SECONDS

    def _note_held(self, place: Place, span: Span, now: float) -> None:
        if span.stable >= span.end:
            self._held.pop(place, None)
        elif self._held.get(place, (-1, now))[0] != span.stable:
            self._held[place] = (span.stable, now)


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


def problems(identity: ResumeIdentity, known: Known, standing: Standing) -> Iterator[CDCError]:
    """Yield what is wrong with the topics; pure."""
    for topic in sorted(standing.missing):
        yield GapError(
            f"topic {topic} is gone, though the pipeline writes to it",
            hint=f"its events are lost downstream; {_ANEW}",
        )
    for topic, (topic_id, partitions) in standing.topics.items():
        if known.topic_ids.get(topic, topic_id) != topic_id:
            yield GapError(
                f"topic {topic} was deleted and created again: what it held is gone",
                hint=f"its events are lost downstream; {_ANEW}",
            )
        pinned = identity.partitions.get(topic, 1)
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
                hint=f"its events are lost downstream; {_ANEW}",
            )
    for (topic, number), span in standing.spans.items():
        end = known.ends.get((topic, number), 0)
        if span.end < end:
            yield GapError(
                f"topic {topic}, partition {number}, ends at offset {span.end}, but the brokers"
                f" had acknowledged it up to {end}: offsets {span.end} to {end - 1} are lost",
                hint=_LOST,
            )
        yield from _beginning(topic, number, span, known.kept.get((topic, number)))
    yield from _overwritten(known, standing)


def _beginning(topic: str, number: int, span: Span, kept: Kept | None) -> Iterator[CDCError]:
    """Yield what was deleted from the beginning of a partition before its retention ended."""
    if topic.endswith(_SCHEMAS) and span.first:
        yield GapError(
            f"topic {topic} begins at offset {span.first}: table versions before it were deleted",
            hint="see that the topic's cleanup.policy is compact alone; events of those versions"
            f" can't be read; {_ANEW}",
        )
    if kept is None or span.first < kept.offset:
        return
    if topic.endswith(_FRONTIERS):
        yield GapError(
            f"topic {topic} begins at offset {span.first}: frontiers from offset"
            f" {kept.offset - 1} on are gone, though log.retention_hours promises them",
            hint=f"followers can't tell what is whole; {_ANEW}",
        )
        return
    yield EpochError(
        f"topic {topic}, partition {number}, begins at offset {span.first}: events from"
        f" offset {kept.offset - 1} on are gone, though log.retention_hours promises them to"
        " followers",
        hint="see the topic's retention.ms and retention.bytes, and who deleted records;"
        f" rebuild each follower that was behind; then {ACKNOWLEDGE}",
    )


def _overwritten(known: Known, standing: Standing) -> Iterator[CDCError]:
    """Yield the losses that the acknowledgements show, whatever the partitions' ends are now.

    Of topics that still exist: a topic that was recreated starts its offsets again.
    """
    for (topic, number), (ended, least) in known.fallen.items():
        if topic in standing.topics:
            yield GapError(
                f"topic {topic}, partition {number}, ends at offset {ended} where all that the"
                f" brokers had acknowledged ends at {least} or beyond: some of it is lost, and"
                " other records have taken its offsets",
                hint=_LOST,
            )


def _no_answer(standing: Standing) -> UnavailableError:
    return UnavailableError(
        f"the brokers do not tell how these topics stand: {', '.join(sorted(standing.untold)[:3])}",
        hint="see that the brokers run, and that the principal may Describe the topics",
    )


def held_back(config: Config, place: Place, stable: int) -> tuple[str, str]:
    """Return what an open transaction does to readers of a partition, and what ends it."""
    topic, number = place
    tool = f"kafka-transactions.sh --bootstrap-server {config.log.bootstrap_servers}"
    where = f"--topic {topic} --partition {number}"
    what = (
        f"topic {topic}, partition {number}: an open transaction holds read_committed readers back"
        f" at offset {stable}"
    )
    hint = (
        f"find whose it is: {tool} describe-producers {where}; where nobody will end it: {tool}"
        f" abort {where} --start-offset {stable}"
    )
    return what, hint
