"""The primary dies and its standby takes over: the daemon goes on, or reports exactly why not.

Real primaries and real standbys. Two things decide: whether the new primary has all that the log
has, and whether it has the slot.
"""

from __future__ import annotations

import shutil

import psycopg
import pytest

from cdc.events import LSN
from cdc.operate.doctor.run import examine
from cdc.operate.findings import Finding, Severity
from cdc.publication.objects import alter_slot
from tests.fixtures.converge import converge
from tests.fixtures.daemon import PipelineUnderTest, wait_until
from tests.fixtures.load import TABLES, Load
from tests.fixtures.standby import DATABASE, STANDBY_SLOT, NewPair, majors

_CONFIG = 78
_USERS = "CREATE TABLE users (id int PRIMARY KEY, n int)"
# The slot sync worker sleeps up to half a minute when nothing changes.
_SYNC_SECONDS = 120.0
_SYNCED = "SELECT synced AND NOT temporary FROM pg_replication_slots"

pytestmark = [pytest.mark.slow, pytest.mark.majors]


def publish(line: PipelineUnderTest, key: int) -> None:
    """Write a row and wait until it is in the log."""
    seq = line.resume()[1].seq
    line.database.execute(f"INSERT INTO users VALUES ({key}, 1)")
    wait_until(lambda: line.resume()[1].seq > seq, "the row does not arrive")


def about_failover(line: PipelineUnderTest) -> list[Finding]:
    """Return what the doctor reports about the slot on the standbys."""
    checks = ("failover", "standby", "synchronized_standby_slots", "walsender")
    return [each for each in examine(line.config) if each.check.startswith(checks)]


@pytest.mark.parametrize("major", majors(17, 18))
def test_promoted_with_the_slot_synced_it_goes_on_and_loses_nothing(
    major: int, new_pair: NewPair
) -> None:
    pair, line = new_pair(major, *TABLES)
    pair.set(synchronized_standby_slots=STANDBY_SLOT)
    daemon = line.start().wait_ready()
    with Load(pair.both(DATABASE), seed=major, steps_per_second=300) as load:
        wait_until(lambda: pair.ask(_SYNCED, standby=True), "not synced", _SYNC_SECONDS)
        wait_until(
            lambda: {each.severity for each in about_failover(line)} == {Severity.OK},
            "the doctor finds something",
            pause=1.0,
        )
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
    # Killed and restarted, it finds the timeline in the log.
    daemon.kill()
    line.start().wait_ready()
    # The former primary starts again, as a careless operator's script may start it.
    pair.primary.start("postgres")
    former = psycopg.conninfo.make_conninfo(pair.primary_dsn, dbname=DATABASE)
    line.daemon.kill()
    line.refused(
        _CONFIG, "former primary", config_file=line.write("former.yaml", source__dsn=former)
    )


@pytest.mark.parametrize("major", majors(17, 18))
def test_what_the_standby_does_not_have_is_not_published(major: int, new_pair: NewPair) -> None:
    """With synchronized_standby_slots the log is never ahead, so it is not refused."""
    pair, line = new_pair(major, _USERS)
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
    line.database = pair.database(DATABASE)
    daemon.wait_ready()
    publish(line, 3)
    assert line.query("SELECT array_agg(id ORDER BY id) FROM users")[0] == [1, 3]
    assert converge(line.config).events == 2


@pytest.mark.parametrize("major", majors(17, 18))
def test_a_planned_stop_while_the_standby_is_down_is_waited_for(
    major: int, new_pair: NewPair
) -> None:
    """The walsender can't send what the standby lacks, and ends with an error (55000)."""
    pair, line = new_pair(major, _USERS)
    pair.set(synchronized_standby_slots=STANDBY_SLOT)
    daemon = line.start().wait_ready()
    publish(line, 1)
    pair.standby.stop("postgres")
    line.database.execute("INSERT INTO users VALUES (2, 1)")
    wait_until(
        lambda: any(STANDBY_SLOT in each for each in daemon.health().get("warnings", [])),
        "nobody says what it waits for",
    )
    pair.primary.stop("postgres")
    daemon.wait_state("reconnecting")
    assert "synchronized_standby_slots" in daemon.log
    pair.primary.start("postgres")
    pair.standby.start("postgres")
    wait_until(lambda: line.resume()[1].seq == 2, "the row does not arrive")
    assert converge(line.config).events == 2


@pytest.mark.parametrize("major", majors(17, 18))
def test_a_log_ahead_of_the_new_primary_is_refused(major: int, new_pair: NewPair) -> None:
    """It has a row that, for the new primary, was never written."""
    pair, line = new_pair(major, _USERS)
    daemon = line.start().wait_ready()
    publish(line, 1)
    wait_until(lambda: pair.ask(_SYNCED, standby=True), "not synced", _SYNC_SECONDS)
    pair.cut_off()
    publish(line, 2)
    # With its server dead, not even an idle slot's position advances.
    pair.primary["postgres"].kill()
    daemon.wait_state("reconnecting")
    position = line.resume()[1]
    pair.promote()
    output = line.ends(
        daemon, _CONFIG, "bytes of WAL ahead", str(position.end_lsn), "synchronized_standby_slots"
    )
    assert "promoted or restored to timeline 2" in output
    assert line.resume()[1] == position


@pytest.mark.parametrize("major", majors(15, 16, 17, 18))
def test_a_promotion_without_the_slot_is_refused_with_the_remedy(
    major: int, new_pair: NewPair
) -> None:
    """Before 17 every promotion is one; from 17 on, one where source.failover is false."""
    pair, line = new_pair(
        major, _USERS, syncs=False, **({"failover": False} if major >= 17 else {})
    )
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


@pytest.mark.long("the findings have unit tests")
@pytest.mark.parametrize("major", majors(17, 18))
def test_the_doctor_says_what_a_promotion_would_find_missing_and_what_it_says_mends_it(
    major: int, new_pair: NewPair
) -> None:
    """An older slot, a standby that synchronizes no slots, and a log that may run ahead."""
    pair, line = new_pair(major, _USERS, syncs=False, failover=False)
    (finding,) = (each for each in about_failover(line) if each.severity is not Severity.OK)
    assert finding.fix.startswith("cdc slot alter --failover")
    alter_slot(line.config, line.config.slot, failover=True)
    ahead, copy = (each for each in about_failover(line) if each.severity is not Severity.OK)
    for finding, dsn in ((ahead, pair.primary_dsn), (copy, pair.standby_dsn)):
        with psycopg.connect(dsn, autocommit=True) as connection:
            for statement in finding.fix.removeprefix("there: ").split(";")[:-1]:
                connection.execute(statement.encode())
    line.start().wait_ready()
    publish(line, 1)
    wait_until(
        lambda: {each.severity for each in about_failover(line)} == {Severity.OK},
        "it is not repaired",
        _SYNC_SECONDS,
        pause=1.0,
    )


@pytest.mark.parametrize("major", majors(15, 16, 17, 18))
def test_a_server_set_back_by_a_copy_of_its_files_is_refused(major: int, new_pair: NewPair) -> None:
    """Same system, same timeline, and a valid slot: only the end of the WAL shows it."""
    pair, line = new_pair(major, _USERS, standby=False)
    data = pair.primary.home.data / f"postgres-{major}"
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


@pytest.mark.long("a minute; a copy of the files is refused in the first tier")
@pytest.mark.parametrize("last", ["rows", "message"])
@pytest.mark.parametrize("wrote", [True, False], ids=["with rows", "without"])
@pytest.mark.parametrize("major", majors(15, 16, 17, 18))
def test_a_restored_server_whose_wal_has_passed_the_logs_end_is_refused(
    major: int, new_pair: NewPair, *, wrote: bool, last: str
) -> None:
    """Its WAL now ends after the log: only what the slot sends again shows it.

    With followers, a canary, a message outside any transaction, mostly ends the log.
    """
    pair, line = new_pair(major, _USERS, standby=False)
    data = pair.primary.home.data / f"postgres-{major}"
    daemon = line.start().wait_ready()
    publish(line, 1)
    assert daemon.term() == 0
    pair.primary.stop("postgres")
    shutil.copytree(data, data.with_name("copy"))
    pair.primary.start("postgres")
    daemon = line.start().wait_ready()
    for key in range(2, 20):
        publish(line, key)
    if last == "message":
        line.database.execute("SELECT pg_logical_emit_message(false, 'mine', 'a canary')")
        wait_until(lambda: line.resume()[1].xid == 0, "the message is not in the log")
    assert daemon.term() == 0
    pair.primary.stop("postgres")
    shutil.rmtree(data)
    data.with_name("copy").rename(data)
    pair.primary.start("postgres")
    if wrote:
        line.database.execute("INSERT INTO users VALUES (100, 1)")
    line.database.execute("CREATE TABLE passes (id int)", "SELECT pg_switch_wal()")
    end_lsn = line.resume()[1].end_lsn
    for _ in range(2):  # the first refusal confirms nothing
        line.refused(_CONFIG, "this server has another history", str(end_lsn))
    assert LSN.parse(line.slot()) < end_lsn
