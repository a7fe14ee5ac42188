"""The primary dies and its standby takes over: the daemon goes on, or says exactly why it may not.

Real primaries and real standbys. What decides is whether the new primary has all that the log
holds, and whether the slot came along.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tests.fixtures.converge import converge
from tests.fixtures.daemon import PipelineUnderTest, wait_until
from tests.fixtures.load import TABLES, Load
from tests.fixtures.servers import Database, KafkaServer
from tests.fixtures.standby import STANDBY_SLOT, NewPair, Pair

_CONFIG = 78
_NAME = "shop"
_USERS = "CREATE TABLE users (id int PRIMARY KEY, n int)"
_SMALL: dict[str, object] = {"max_events": 200, "max_wait_ms": 50}
# The worker that copies slots sleeps up to half a minute when nothing changes.
_SYNC_SECONDS = 60.0
_SYNCED = "SELECT synced AND NOT temporary FROM pg_replication_slots"

NewLine = Callable[..., tuple[Pair, PipelineUnderTest]]

pytestmark = pytest.mark.slow


@pytest.fixture
def new_line(
    new_pair: NewPair, kafka_server: KafkaServer, topic_prefix: str, tmp_path: Path
) -> Iterator[NewLine]:
    """Make a pair of servers of some major, and a pipeline that finds whichever is primary."""
    made: list[PipelineUnderTest] = []

    def new(
        major: int, *tables: str, syncs: bool = True, **source: object
    ) -> tuple[Pair, PipelineUnderTest]:
        pair = new_pair(major)
        with psycopg.connect(pair.primary_dsn, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {_NAME}".encode())
        dsn = psycopg.conninfo.make_conninfo(pair.primary_dsn, dbname=_NAME)
        database = Database(dsn, _NAME)
        database.execute(*(tables or (_USERS,)))
        # Before the slot: a standby copies what is made while it follows.
        pair.add_standby(_NAME, syncs=syncs)
        line = PipelineUnderTest(
            database,
            kafka_server.bootstrap,
            topic_prefix,
            tmp_path,
            source={**source, "dsn": pair.both(_NAME)},
            batch=_SMALL,
        )
        made.append(line)
        return pair, line.set_up()

    yield new
    for line in made:
        line.close()


def publish(line: PipelineUnderTest, key: int) -> None:
    """Write a row and wait until it is in the log."""
    seq = line.resume()[1].seq
    line.database.execute(f"INSERT INTO users VALUES ({key}, 1)")
    wait_until(lambda: line.resume()[1].seq > seq, "the row does not arrive")


@pytest.mark.parametrize("major", [17, 18])
def test_promoted_with_the_slot_synced_it_goes_on_and_loses_nothing(
    major: int, new_line: NewLine
) -> None:
    pair, line = new_line(major, *TABLES)
    pair.set(synchronized_standby_slots=STANDBY_SLOT)
    daemon = line.start().wait_ready()
    with Load(pair.both(_NAME), seed=major, steps_per_second=300) as load:
        wait_until(lambda: pair.ask(_SYNCED, standby=True), "not synced", _SYNC_SECONDS)
        for timeline in (1, 2):
            assert line.resume()[0].timeline == timeline
            seen = load.commits
            wait_until(lambda: load.commits > seen + 50, "no load")  # noqa: B023 - at once
            if timeline == 1:
                pair.promote()
                wait_until(lambda: line.resume()[0].timeline == 2, "not followed")
    assert converge(line.config).events > 100
    assert daemon.metric("lockstep_timeline") == 2
    assert "following a promotion" in daemon.log
    # Killed and started anew, it finds the timeline in the log.
    daemon.kill()
    line.start().wait_ready()
    # The former primary comes back, as a careless operator's script may have it.
    pair.primary.start("postgres")
    former = psycopg.conninfo.make_conninfo(pair.primary_dsn, dbname=_NAME)
    line.daemon.kill()
    line.refused(
        _CONFIG, "former primary", config_file=line.write("former.yaml", source__dsn=former)
    )


def test_what_the_standby_does_not_have_is_not_published(new_line: NewLine) -> None:
    """With synchronized_standby_slots the log never runs ahead: so it need not be refused."""
    pair, line = new_line(17)
    pair.set(synchronized_standby_slots=STANDBY_SLOT)
    daemon = line.start().wait_ready()
    publish(line, 1)
    wait_until(lambda: pair.ask(_SYNCED, standby=True), "not synced", _SYNC_SECONDS)
    pair.cut_off()
    line.database.execute("INSERT INTO users VALUES (2, 1)")
    wait_until(
        lambda: any(STANDBY_SLOT in each for each in daemon.health().get("warnings", [])),
        "nobody says what it waits for",
    )
    assert line.resume()[1].seq == 1
    pair.promote()
    line.database = pair.database(_NAME)
    daemon.wait_ready()
    publish(line, 3)
    assert line.query("SELECT array_agg(id ORDER BY id) FROM users")[0] == [1, 3]
    assert converge(line.config).events == 2


@pytest.mark.parametrize("major", [17, 18])
def test_a_log_ahead_of_the_new_primary_is_refused(major: int, new_line: NewLine) -> None:
    """It holds a row that, as far as the new primary knows, was never written."""
    pair, line = new_line(major)
    daemon = line.start().wait_ready()
    publish(line, 1)
    wait_until(lambda: pair.ask(_SYNCED, standby=True), "not synced", _SYNC_SECONDS)
    pair.cut_off()
    publish(line, 2)
    position = line.resume()[1]
    pair.promote()
    said = line.ends(
        daemon, _CONFIG, "bytes of WAL ahead", str(position.end_lsn), "synchronized_standby_slots"
    )
    assert "promoted or restored to timeline 2" in said
    assert line.resume()[1] == position


@pytest.mark.parametrize("major", [15, 17])
def test_a_promotion_without_the_slot_is_refused_with_the_remedy(
    major: int, new_line: NewLine
) -> None:
    """Before 17 there is no other; from 17 on, where source.failover is false."""
    pair, line = new_line(major, syncs=False, **({"failover": False} if major == 17 else {}))
    daemon = line.start().wait_ready()
    publish(line, 1)
    pair.promote()
    line.ends(
        daemon,
        _CONFIG,
        f'slot "{line.config.slot}" does not exist on this server, which was promoted',
        "failover = true",
        "cdc teardown --topics",
    )


def test_a_server_set_back_by_a_copy_of_its_files_is_refused(new_line: NewLine) -> None:
    """Same system, same timeline, and a slot that is in order: only the WAL's end tells."""
    pair, line = new_line(17, syncs=False)
    data = pair.primary.home.data / "postgres-17"
    pair.standby.down()
    daemon = line.start().wait_ready()
    publish(line, 1)
    assert daemon.term() == 0
    pair.primary.stop("postgres")
    shutil.copytree(data, data.with_name("copy"))
    pair.primary.start("postgres")
    daemon = line.start().wait_ready()
    for key in range(2, 20):
        publish(line, key)
    assert daemon.term() == 0
    pair.primary.stop("postgres")
    shutil.rmtree(data)
    data.with_name("copy").rename(data)
    pair.primary.start("postgres")
    line.refused(_CONFIG, "the server was set back", str(line.resume()[1].end_lsn))
