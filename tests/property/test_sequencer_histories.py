"""However frames are cut, committed, lost and replayed, the log holds the same records once."""

from __future__ import annotations

from collections import defaultdict
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from cdc.events import LSN
from cdc.log.records import ResumePosition, SchemaRecord
from tests.property.histories import KEYS, History, expected, frames, histories
from tests.property.stream import MANY, Published, Session, position
from tests.property.test_encoder_events import in_order

chances = st.integers(0, 2**32 - 1).map(Random)


class Log:
    """What was committed: records, table versions, and where the daemon resumes."""

    def __init__(self) -> None:
        self.records: list[Published] = []
        self.schemas: list[SchemaRecord] = []
        self.resume: ResumePosition = position()

    def session(self, max_events: int = MANY) -> Session:
        return Session(self.resume, KEYS, known=list(self.schemas), max_events=max_events)

    def commit(self, session: Session) -> None:
        """Commit what the session sequenced, with its resume position, as the pipeline does."""
        sequencer = session.sequencer
        self.records += session.waiting()
        self.schemas += session.new_versions
        session.new_versions = []
        session.batch.close()
        self.resume = position(
            end_lsn=sequencer.end_lsn,
            commit_lsn=sequencer.last_change.commit_lsn,
            ordinal=sequencer.last_change.ordinal,
            is_open=sequencer.last_change.open,
            seq=sequencer.seq,
            schema_id=session.relations.schema_id,
        )
        sequencer.start_batch()

    def may_cut(self, session: Session) -> bool:
        """With events to write, or between source transactions if none is split."""
        sequencer = session.sequencer
        rests = not sequencer.in_transaction and not sequencer.last_change.open
        return sequencer.events > 0 or rests

    def first_uncovered(self, history: History) -> int:
        """Return the latest transaction that a replay may start at."""
        for index, transaction in enumerate(history):
            if transaction.final_lsn >= self.resume.end_lsn:
                return index
        return len(history)


def by_partition(records: list[Published]) -> dict[tuple[str, int], list[Published]]:
    found = defaultdict(list)
    for record in records:
        found[record.topic, record.partition].append(record)
    return dict(found)


def published_at_once(history: History) -> Log:
    log = Log()
    session = log.session()
    session.feed(list(frames(history)))
    log.commit(session)
    return log


@given(histories)
def test_seq_is_dense_ordinals_count_changes_and_order_is_commit_order(history: History) -> None:
    log = published_at_once(history)
    assert in_order(log.records) == expected(history)
    places = [
        (source["seq"], LSN.parse(source["commit_lsn"]), source["ordinal"])
        for source in (e.value["source"] for e in in_order(log.records) if e.value)
    ]
    assert [seq for seq, _, _ in places] == list(range(1, len(places) + 1))
    assert [place[1:] for place in places] == sorted(place[1:] for place in places)
    assert log.resume.seq == len(places)
    assert log.resume.end_lsn == history[-1].end_lsn
    assert not log.resume.open


@given(histories, chances)
def test_any_chunking_of_frames_gives_the_same_records(history: History, chance: Random) -> None:
    """Also where `feed` stops at each commit because the batch has reached its size."""
    log = Log()
    session = log.session(max_events=chance.randint(1, 5))
    left = list(frames(history))
    while left:
        size = chance.randint(1, len(left))
        session.feed(left[:size])
        left = left[size:]
    log.commit(session)
    at_once = published_at_once(history)
    assert by_partition(log.records) == by_partition(at_once.records)
    assert (log.resume, log.schemas) == (at_once.resume, at_once.schemas)


@given(histories, chances)
def test_crashes_and_replays_publish_every_event_once_with_the_same_bytes(
    history: History, chance: Random
) -> None:
    """Cut anywhere, lose what was not committed, replay from any boundary that Postgres may use."""
    log = Log()
    for last in [False] * chance.randint(0, 4) + [True]:
        since = chance.randint(0, log.first_uncovered(history))
        session = log.session()
        left = list(frames(history[since:]))
        if not last:
            left = left[: chance.randint(0, len(left))]
        while left:
            size = chance.randint(1, len(left))
            session.feed(left[:size])
            left = left[size:]
            if log.may_cut(session) and chance.random() < 0.5:
                log.commit(session)
        if last and log.may_cut(session):
            log.commit(session)
    at_once = published_at_once(history)
    assert by_partition(log.records) == by_partition(at_once.records)
    assert log.schemas == at_once.schemas
    assert log.resume.seq == at_once.resume.seq
    assert (log.resume.end_lsn, log.resume.open) == (at_once.resume.end_lsn, False)


@given(histories, st.integers(0, 5))
def test_a_replay_of_what_the_log_holds_publishes_nothing(history: History, since: int) -> None:
    log = published_at_once(history)
    session = log.session()
    session.feed(list(frames(history[since:])))
    assert session.waiting() == []
    assert session.new_versions == []
    assert session.sequencer.seq == log.resume.seq
    assert session.sequencer.end_lsn == log.resume.end_lsn


@given(histories, chances)
def test_an_idle_move_of_the_end_lsn_covers_what_went_before(
    history: History, chance: Random
) -> None:
    """When idle, the resume record moves to a keepalive's WAL end, at most to the next commit."""
    at = chance.randint(1, len(history))
    log = Log()
    session = log.session()
    session.feed(list(frames(history[:at])))
    next_lsn = history[at].final_lsn if at < len(history) else history[-1].end_lsn + 100
    session.sequencer.reach(LSN(chance.randint(history[at - 1].end_lsn, next_lsn)))
    log.commit(session)
    restarted = log.session()
    restarted.feed(list(frames(history[chance.randint(0, at) :])))
    log.commit(restarted)
    assert by_partition(log.records) == by_partition(published_at_once(history).records)
