"""CASES "Slot, LSN, failures" that no test of tests/integration or tests/faults covers.

Those cover many; docs/GUARANTEES.md, "Cases", lists which.
"""

from __future__ import annotations

import base64
from contextlib import closing

import psycopg
import pytest

from cdc.events import LSN
from tests.fixtures.cases import Case, NewCase
from tests.fixtures.daemon import wait_until

pytestmark = pytest.mark.majors

TABLES = ("CREATE TABLE t (id int PRIMARY KEY, v text)",)


def test_a_slot_that_a_stranger_reads_is_waited_for_and_taken_over(case: Case) -> None:
    line = case.pipeline
    assert len(case("INSERT INTO t VALUES (1, 'a')")) == 1
    assert line.daemon.wait_ready().term() == 0
    publication, slot = line.config.publication, line.config.slot
    # Not as a context: it would commit, which a walsender that streams does not accept.
    # It sends no feedback: without a timeout it keeps the slot however long the daemon takes.
    stranger = psycopg.connect(
        case.database.dsn,
        autocommit=True,
        replication="database",
        options="-c wal_sender_timeout=0",
    )
    with closing(stranger):
        stranger.pgconn.send_query(
            f"START_REPLICATION SLOT {slot} LOGICAL 0/0"
            f" (proto_version '1', publication_names '{publication}')".encode()
        )
        wait_until(lambda: line.slot("active"), "the stranger does not read")
        waiting = line.start()
        waiting.wait_state("standby")
        case.run("INSERT INTO t VALUES (2, 'b')")
        assert waiting.metric("lockstep_events_total") == 0
    [event] = case.events()
    assert event.after == {"id": 2, "v": "b"}


def test_what_is_confirmed_never_goes_back_and_never_beyond_the_log(case: Case) -> None:
    line, seen = case.pipeline, LSN(0)
    for number in range(100, 110):
        case(f"INSERT INTO t VALUES ({number}, 'x')")
        confirmed = LSN.parse(line.slot())
        assert seen <= confirmed <= line.resume()[1].end_lsn
        seen = confirmed


@pytest.mark.parametrize("ended", ["the walsender", "every connection"])
def test_a_connection_that_an_operator_ends_is_reopened(case: Case, ended: str) -> None:
    line = case.pipeline
    line.daemon.wait_ready()
    pid = line.slot("active_pid")
    who = "true" if ended == "every connection" else f"pid = {pid}"
    case.run(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        f" WHERE datname = current_database() AND pid <> pg_backend_pid() AND {who}",
        f"INSERT INTO t VALUES ({200 + len(ended)}, 'x')",
    )
    assert len(case.events()) == 1
    assert line.slot("active_pid") != pid


def test_a_slot_dropped_under_the_daemon_is_reported_and_not_recreated(new_case: NewCase) -> None:
    dropped = new_case(*TABLES)
    line = dropped.pipeline
    assert len(dropped("INSERT INTO t VALUES (1, 'a')")) == 1
    line.query(
        "SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots"
        " WHERE slot_name = %s",
        line.config.slot,
    )
    # Between its disconnect and its reconnect the daemon does not occupy the slot.
    wait_until(lambda: _drop(dropped), "the slot is never free", pause=0.005)
    line.ends(line.daemon, 78, "does not exist")
    assert (
        dropped.ask(
            f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{line.config.slot}'"
        )
        == 0
    )


def _drop(dropped: Case) -> bool:
    slot = dropped.pipeline.config.slot
    try:
        dropped.run(
            f"SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots"
            f" WHERE slot_name = '{slot}' AND active_pid IS NOT NULL",
            f"SELECT pg_drop_replication_slot('{slot}')",
        )
    except psycopg.errors.ObjectInUse:
        return False
    return True


def test_text_that_cannot_be_converted_stops_or_goes_on_as_its_bytes(new_case: NewCase) -> None:
    """Only a database with encoding SQL_ASCII can hold such text."""
    anything = new_case(
        *TABLES, "UPDATE pg_database SET encoding = 0 WHERE datname = current_database()"
    )
    line = anything.pipeline
    assert len(anything("INSERT INTO t VALUES (1, 'a')")) == 1
    anything.run("INSERT INTO t VALUES (2, E'\\377b')", "INSERT INTO t VALUES (3, 'c')")
    line.ends(line.daemon, 78, "invalid.text.handling.mode", "public.t")
    line.config_file = line.write("lockstep.yaml", values={"invalid.text.handling.mode": "base64"})
    line.start()
    poisoned, after = anything.events()
    assert poisoned.after == {"id": 2, "v": {"base64": base64.b64encode(b"\xffb").decode()}}
    assert after.after == {"id": 3, "v": "c"}


def test_a_row_too_large_for_its_topic_leaves_a_pointer_and_the_stream_goes_on(
    new_case: NewCase,
) -> None:
    large = new_case(*TABLES, log={"kafka": {"message.max.bytes": 1_100_000}})
    small, pointer, after = large(
        "INSERT INTO t VALUES (1, 'small')",
        "INSERT INTO t VALUES (2, repeat('x', 3000000))",
        "INSERT INTO t VALUES (3, 'after')",
    )
    assert (small.after["v"], after.after["v"]) == ("small", "after")
    assert pointer.key == {"id": 2}
    assert pointer.after == {"id": 2, "v": "__debezium_unavailable_value"}
    dead = pointer.source["dead"]
    assert (dead["reason"], dead["columns"]) == ("size", ["v"])
    assert dead["id"] == f"{pointer.source['epoch']}-{pointer.seq}"
