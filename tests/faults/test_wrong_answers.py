"""A broker that briefly answers wrongly costs time, loses no snapshot or record, causes no gap.

The answers are those of a broker that has just started: it does not know a topic that exists.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from confluent_kafka import Producer
from msgspec.structs import replace

from cdc.errors import FencedError, GapError, InvariantError, UnavailableError
from cdc.events import LSN
from cdc.log import absence, names, reader, resume, topics
from cdc.log.client import settings
from cdc.log.frontiers import record
from cdc.log.partitions import OffsetRange
from cdc.log.ranges import RangeReader
from cdc.log.records import FrontierRecord
from cdc.operate.commands.setup import set_up
from cdc.operate.status import read_status
from cdc.snapshot.initial import due, topic
from tests.fixtures.converge import converge
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.guarded import GuardedBroker
from tests.fixtures.lying import Liar, NotLeader

_TABLE = "CREATE TABLE users (id int PRIMARY KEY, n int)"
_ROWS = "INSERT INTO users SELECT i, 0 FROM generate_series(1, 500) i"


def through(line: PipelineUnderTest, broker: GuardedBroker, named: str, times: int) -> Liar:
    """Route the pipeline through a proxy that denies one of its topics `times` times."""
    liar = Liar(named, times)
    line.settings["log"]["bootstrap_servers"] = broker.proxied
    line.config_file = line.write("proxied.yaml")
    broker.proxy.answer = liar
    return liar


@pytest.mark.long("other wrong answers are in the first tier")
def test_an_unfinished_snapshot_is_not_skipped_for_one_wrong_answer(
    guarded_broker: GuardedBroker, guarded_line: PipelineUnderTest
) -> None:
    """Every row is in the log but not handed over: streaming now would lose the count of rows."""
    line = guarded_line
    line.settings["snapshot"] = {"mode": "initial", "runner": "local"}
    line.config_file = line.write("lockstep.yaml")
    line.database.execute(_TABLE, _ROWS)
    line.set_up()
    line.start("before_handover").wait_exit()
    line.database.execute("UPDATE users SET n = 1 WHERE id < 300")
    liar = through(line, guarded_broker, names.snapshot_topic(line.config.prefix), 1)
    daemon = line.start().wait_ready()
    assert not liar.left, "nobody asked for the topic"
    done = topic.read_state(line.config)
    assert done is not None
    assert done.stage == "done"
    assert "the snapshot is done" in daemon.log
    line.database.execute("INSERT INTO users VALUES (1000, 0)")
    # 500 rows, 299 changes of them, and this one.
    wait_until(lambda: line.resume()[1].seq >= 800, "the row does not arrive")
    assert line.resume()[1].seq == 800
    assert all(each.holes >= 0 for each in line.frontiers())


@pytest.mark.long("the other topics", sample=["resume_topic"])
@pytest.mark.parametrize(
    "named",
    [names.resume_topic, names.schema_topic, names.frontier_topic],
    ids=["resume_topic", "schema_topic", "frontier_topic"],
)
def test_no_topic_of_ours_is_missed_for_one_wrong_answer(
    named: object, guarded_broker: GuardedBroker, guarded_line: PipelineUnderTest
) -> None:
    line = guarded_line
    line.database.execute(_TABLE)
    line.set_up()
    line.start().wait_ready()
    line.database.execute("INSERT INTO users VALUES (1, 0)")
    wait_until(lambda: line.resume()[1].seq == 1, "the row does not arrive")
    assert line.daemon.term() == 0
    assert callable(named)
    liar = through(line, guarded_broker, named(line.config.prefix), 1)
    line.start().wait_ready()
    assert not liar.left, "nobody asked for the topic"
    line.database.execute("INSERT INTO users VALUES (2, 0)")
    converge(line.config)


def test_a_topic_that_is_not_there_is_proven_to_be_absent(
    guarded_broker: GuardedBroker, guarded_line: PipelineUnderTest
) -> None:
    line = guarded_line
    line.database.execute(_TABLE)
    line.set_up()
    known = names.schema_topic(line.config.prefix)
    through(line, guarded_broker, known, 2)
    assert absence.absent(line.config, [known, f"{known}.not"]) == {f"{known}.not"}


def test_a_partition_that_has_no_leader_for_a_moment_is_waited_for(
    guarded_broker: GuardedBroker, guarded_line: PipelineUnderTest
) -> None:
    """A broker shows a topic before it answers as the leader of its partitions."""
    line = guarded_line
    line.database.execute(_TABLE)
    line.set_up()
    known = (names.resume_topic(line.config.prefix), 0)
    expected = absence.spans(line.config, [known])
    through(line, guarded_broker, known[0], 0)
    liar = guarded_broker.proxy.answer = NotLeader(known[0], 3)
    assert absence.spans(line.config, [known]) == expected
    assert not liar.left
    liar.left = 1_000
    with pytest.raises(UnavailableError, match="NOT_LEADER"):
        absence.ends(topics.connected(line.config, 5), [known], seconds=1)


def test_setup_does_not_write_over_what_another_process_wrote_meanwhile(
    guarded_line: PipelineUnderTest,
) -> None:
    """A standby took the slot and streamed between setup's reading and its writing."""
    line = guarded_line
    line.database.execute(_TABLE)
    line.set_up()
    decided = line.resume()
    line.start().wait_ready()
    line.database.execute("INSERT INTO users VALUES (1, 0)")
    wait_until(lambda: line.resume()[1].seq == 1, "the row does not arrive")
    with pytest.raises(FencedError, match="nothing was written"):
        resume.write_fenced(line.config, *decided, read=decided)
    assert line.resume()[1].seq == 1
    line.database.execute("INSERT INTO users VALUES (2, 0)")
    converge(line.config)


def test_a_second_setup_does_not_start_a_log_that_was_started_meanwhile(
    guarded_line: PipelineUnderTest,
) -> None:
    line = guarded_line
    line.database.execute(_TABLE)
    line.set_up()
    identity, position = line.resume()
    with pytest.raises(FencedError, match="nothing was written"):
        resume.write_fenced(line.config, identity, position, read=None)
    for _ in set_up(line.config):
        pass
    assert line.resume() == (identity, position)


def test_neither_a_resume_record_that_moves_back_nor_a_negative_count_is_written(
    guarded_line: PipelineUnderTest,
) -> None:
    guarded_line.database.execute(_TABLE)
    _, position = guarded_line.set_up().resume()
    frontier = FrontierRecord(
        pipeline="p", epoch=1, lsn=position.end_lsn, seq=9, committed_at_us=0, partitions=(),
        holes=-1,
    )  # fmt: skip
    with pytest.raises(InvariantError, match="negative"):
        record(guarded_line.config, frontier)
    ahead = replace(position, seq=990)
    assert resume.forward(position, ahead) == ahead
    for back in (position, replace(ahead, end_lsn=LSN(position.end_lsn - 1))):
        with pytest.raises(InvariantError, match="nothing was written"):
            resume.forward(ahead, back)


def stranger(line: PipelineUnderTest) -> Producer:
    """Return a producer whose open transaction no broker ends, and that fences no other test's."""
    own = {"transactional.id": f"a stranger to {line.config.prefix}"}
    return Producer(settings(line.config, **own, **{"transaction.timeout.ms": 600_000}))


def test_what_is_committed_and_not_yet_visible_is_waited_for(bare: PipelineUnderTest) -> None:
    """Commit markers reach one topic after the other: here an open transaction comes before."""
    line = bare
    line.database.execute("INSERT INTO users VALUES (1, 'ada')")
    line.config_file = line.write("lockstep.yaml", snapshot={"mode": "initial", "runner": "local"})
    topic_name = names.snapshot_topic(line.config.prefix)
    (ours,) = (each for each in topics.internal_topics(line.config) if each.name == topic_name)
    topics.ensure(topics.admin(line.config), line.config, [ours])
    before = stranger(line)
    before.init_transactions(60.0)
    before.begin_transaction()
    before.produce(topic_name, b"x", key=b'{"pipeline":"another"}')
    before.flush(60.0)
    line.set_up()
    with ThreadPoolExecutor(1) as threads:
        asked = [threads.submit(due.state, line.config)]
        time.sleep(3.0)
        assert not any(each.done() for each in asked), "it decided by what is not visible yet"
        before.abort_transaction(60.0)
        state = asked[0].result(120.0)
    assert state is not None
    assert state.stage == "due"
    assert reader.read_resume(line.config) is not None


def test_an_open_transaction_hides_records_and_is_no_gap(pipeline: NewPipeline) -> None:
    line = pipeline(_TABLE)
    line.start().wait_ready()
    line.database.execute(_ROWS)
    converge(line.config)
    topic_name = names.data_topic(line.config.prefix, "public", "users")
    end = reader.end_offsets(line.config, [(topic_name, 0)])[topic_name, 0]
    held = stranger(line)
    held.init_transactions(60.0)
    held.begin_transaction()
    held.produce(topic_name, b"x", key=b"x", partition=0)
    held.flush(60.0)
    line.database.execute("UPDATE users SET n = 1")
    wait_until(lambda: line.resume()[1].seq == 1_000, "the rows do not arrive")
    # A frontier that is written now must not end before records that it counts.
    place = topic_name, 0
    assert reader.end_offsets(line.config, [place])[place] == end
    assert reader.written_ends(line.config, [place])[place] > end + 1
    with closing(RangeReader(line.config)) as ranges:
        with pytest.raises(UnavailableError, match=r"held back .* by a transaction that is open"):
            ranges.expect_complete((topic_name, 0), OffsetRange(0, end + 3))
        held.abort_transaction(60.0)
        wait_until(lambda: not raises(ranges, (topic_name, 0), end + 3), "it stays held")
        with pytest.raises(GapError, match="should reach"):
            ranges.expect_complete((topic_name, 0), OffsetRange(0, 1_000_000))


def raises(ranges: RangeReader, place: tuple[str, int], end: int) -> bool:
    try:
        ranges.expect_complete(place, OffsetRange(0, end))
    except UnavailableError:
        return True
    return False


def test_a_resume_record_that_an_open_transaction_hides_is_waited_for(
    pipeline: NewPipeline,
) -> None:
    """Continued from the record before, the log would have events twice, or seem to have a gap."""
    line = pipeline(_TABLE)
    daemon = line.start().wait_ready()
    line.database.execute("INSERT INTO users VALUES (1, 0)")
    wait_until(lambda: line.resume()[1].seq == 1, "the first row does not arrive")
    hidden = names.resume_topic(line.config.prefix)
    ids = {"transactional.id": f"stranger-{hidden}", "transaction.timeout.ms": 600_000}
    stranger = Producer(settings(line.config, **ids))
    stranger.init_transactions(60)
    stranger.begin_transaction()
    stranger.produce(hidden, b"{}", b"{}", 0)
    assert stranger.flush(60) == 0
    line.database.execute("INSERT INTO users SELECT i, 0 FROM generate_series(2, 9) i")
    wait_until(lambda: daemon.metric("lockstep_events_total") == 9, "the others do not arrive")
    assert line.resume()[1].seq == 1, "it is hidden"
    daemon.kill()
    line.released()
    # Nor does the status, which compares it with the slot while no daemon works, believe it.
    about_slot = [each for each in read_status(line.config).verdict.causes if each.about == "slot"]
    assert [each.what.partition(" in topic")[0] for each in about_slot] == ["a transaction is open"]
    again = line.start()
    wait_until(lambda: "a transaction is open" in again.log, "it does not say why it waits", 120)
    assert again.process.poll() is None, "it waits"
    stranger.abort_transaction(60)
    again.wait_ready(120)
    line.database.execute("INSERT INTO users VALUES (10, 0)")
    converge(line.config)
    assert line.resume()[1].seq == 10
