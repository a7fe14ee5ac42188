"""CASES "Transactions, order, restart": commit order, complete, once, whatever is killed."""

from __future__ import annotations

import base64
import signal
import threading
from typing import Any

import pytest

from tests.fixtures.cases import Case, Event, NewCase

pytestmark = pytest.mark.majors

TABLES = ("CREATE TABLE t (id int PRIMARY KEY, v text)",)
# Small enough that a transaction of some hundred rows is larger than a batch.
SETTINGS: dict[str, dict[str, object]] = {"batch": {"max_events": 50}}
_FAILPOINTS = ("before_commit:2", "after_commit:2", "before_confirm:1")


def reported(events: list[Event]) -> list[tuple[str, int]]:
    return [(each.op, (each.after or each.before)["id"]) for each in events]


def bulk(first: int, rows: int = 500) -> str:
    return f"INSERT INTO t SELECT i, 'x' FROM generate_series({first}, {first + rows - 1}) i"


@pytest.fixture
def empty(case: Case) -> Case:
    """The module's case, with nothing in its table."""
    case("TRUNCATE t")
    return case


def test_interleaved_transactions_come_complete_and_in_the_order_of_their_commits(
    empty: Case,
) -> None:
    with empty.connect(autocommit=False) as a, empty.connect(autocommit=False) as b:
        for i in range(5):
            a.execute(f"INSERT INTO t VALUES ({i}, 'a')".encode())
            b.execute(f"INSERT INTO t VALUES ({10 + i}, 'b')".encode())
        b.commit()
        a.execute("INSERT INTO t VALUES (9, 'a')")
        a.commit()
    events = empty.events()
    assert [each.after["id"] for each in events] == [10, 11, 12, 13, 14, 0, 1, 2, 3, 4, 9]
    assert [each.source["ordinal"] for each in events] == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6]
    assert len({each.source["txId"] for each in events}) == 2
    assert len({each.source["commit_lsn"] for each in events}) == 2
    assert [each.seq for each in events] == list(range(events[0].seq, events[0].seq + 11))


def test_what_is_rolled_back_leaves_nothing(empty: Case) -> None:
    with empty.connect(autocommit=False) as connection:
        connection.execute(bulk(1).encode())
        connection.rollback()
        connection.execute("INSERT INTO t VALUES (1, 'kept')")
        connection.execute("SAVEPOINT one")
        connection.execute("INSERT INTO t VALUES (2, 'lost')")
        connection.execute("SAVEPOINT two")
        connection.execute("UPDATE t SET v = 'lost'")
        connection.execute("RELEASE two")
        connection.execute("ROLLBACK TO one")
        connection.execute("INSERT INTO t VALUES (3, 'kept')")
        connection.execute("SAVEPOINT three")
        connection.execute("DELETE FROM t WHERE id = 1")
        connection.execute("RELEASE three")
        connection.execute(
            "DO $$ BEGIN FOR i IN 4..6 LOOP BEGIN INSERT INTO t VALUES (i, 'x');"
            " IF i = 5 THEN RAISE 'no'; END IF; EXCEPTION WHEN OTHERS THEN NULL; END; END LOOP;"
            " END $$"
        )
    assert reported(empty.events()) == [("c", 1), ("c", 3), ("d", 1), ("c", 4), ("c", 6)]


def test_a_transaction_that_changes_nothing_captured_makes_no_event(empty: Case) -> None:
    assert (
        empty(
            "CREATE SCHEMA IF NOT EXISTS elsewhere",
            "CREATE TABLE IF NOT EXISTS elsewhere.uncaptured (id int)",
            "INSERT INTO elsewhere.uncaptured VALUES (1)",
            "UPDATE t SET v = 'nobody' WHERE false",
            "ANALYZE t",
        )
        == []
    )


@pytest.fixture(scope="module", params=["on", "parallel"])
def streamed(request: pytest.FixtureRequest, case_major: int, new_case: NewCase) -> Case:
    """A daemon to which Postgres sends every transaction above 64 kB while it is open."""
    if request.param == "parallel" and case_major < 16:
        pytest.skip("Postgres 16 is the first that has it")
    return new_case(
        *TABLES,
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET logical_decoding_work_mem = %L',"
        " current_database(), '64kB'); END $$",
        source={"streaming": request.param},
        **SETTINGS,
    )


def test_a_streamed_transaction_is_as_any_other(streamed: Case) -> None:
    streamed("TRUNCATE t")
    with streamed.connect(autocommit=False) as a, streamed.connect(autocommit=False) as b:
        a.execute(bulk(1, 2_000).encode())
        b.execute(bulk(5_001, 2_000).encode())
        a.execute("SAVEPOINT s")
        a.execute(bulk(10_001, 2_000).encode())
        a.execute("ROLLBACK TO s")
        a.execute("SAVEPOINT s2")
        a.execute("UPDATE t SET v = 'y' WHERE id = 1")
        a.execute("RELEASE s2")
        b.execute(bulk(20_001, 2_000).encode())
        b.rollback()
        b.execute(bulk(30_001, 2_000).encode())
        b.commit()
        a.commit()
    events = streamed.events()
    assert reported(events) == [
        *[("c", i) for i in range(30_001, 32_001)],
        *[("c", i) for i in range(1, 2_001)],
        ("u", 1),
    ]
    assert [each.source["ordinal"] for each in events] == [*range(1, 2_001), *range(1, 2_002)]


def test_a_transaction_open_while_the_daemon_restarts_arrives_complete(empty: Case) -> None:
    with empty.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO t VALUES (1, 'before')")
        assert len(empty("INSERT INTO t VALUES (100, 'other')")) == 1
        with empty.away():
            connection.execute("INSERT INTO t VALUES (2, 'meanwhile')")
        assert len(empty("INSERT INTO t VALUES (101, 'other')")) == 1
        connection.execute("INSERT INTO t VALUES (3, 'after')")
    assert reported(empty.events()) == [("c", 1), ("c", 2), ("c", 3)]


@pytest.mark.parametrize("failpoint", _FAILPOINTS)
def test_killed_in_the_middle_of_a_transaction_it_goes_on_where_it_was(
    empty: Case, failpoint: str
) -> None:
    """Ordinals and seq go on; the reader of the topics would fail at a hole or a repeat."""
    line = empty.pipeline
    assert line.daemon.wait_ready().term() == 0
    killed = line.start(failpoint)
    empty.run(bulk(1), "UPDATE t SET v = 'y' WHERE id <= 5")
    assert killed.wait_exit() == -signal.SIGKILL
    line.start()
    events = empty.events()
    assert reported(events) == [("c", i) for i in range(1, 501)] + [("u", i) for i in range(1, 6)]
    assert [each.source["ordinal"] for each in events] == [*range(1, 501), *range(1, 6)]


def test_a_transaction_that_begins_where_the_one_before_ended_is_not_skipped(empty: Case) -> None:
    """There is nothing between two commits on a quiet server: an end LSN is the next first."""
    events = empty("INSERT INTO t VALUES (0, 'x')")
    with empty.away():
        empty.run(*[f"INSERT INTO t VALUES ({i}, 'x')" for i in range(1, 4)])
    events += empty.events()
    assert reported(events) == [("c", i) for i in range(4)]
    assert len({each.source["commit_lsn"] for each in events}) == 4


def test_killed_again_and_again_under_load_key_set_and_last_values_are_the_sources(
    empty: Case,
) -> None:
    done = threading.Event()

    def write() -> None:
        with empty.connect() as connection:
            number = 0
            while not done.is_set():
                number += 1
                # A key recurs after 90 steps, a row is deleted after 150: no two rows become one.
                key = number * 7 % 90
                connection.execute(
                    f"INSERT INTO t VALUES ({key}, '{number}') ON CONFLICT (id)"
                    f" DO UPDATE SET v = '{number}', id = t.id + {number % 5 // 4} * 1000".encode()
                )
                if number % 3 == 0:
                    connection.execute(f"DELETE FROM t WHERE id % 50 = {number % 50}".encode())

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3):
            line = empty.pipeline
            line.daemon.wait_ready()
            line.daemon.kill()
            line.start()
        line.daemon.wait_ready()
    finally:
        done.set()
        writer.join()
    rows: dict[int, Any] = {}
    seen = set()
    for event in empty.events():
        if event.op == "d":
            del rows[event.key["id"]]
        else:
            assert (event.op == "c") == (event.key["id"] not in rows)
            rows[event.key["id"]] = event.after["v"]
        seen.add((event.op, event.key["id"] >= 1000))
    assert seen == {("c", False), ("u", False), ("d", False), ("c", True), ("d", True)}
    wanted = empty.ask("SELECT coalesce(json_object_agg(id, v), '{}') FROM t")
    assert {str(key): value for key, value in rows.items()} == wanted


def test_a_logical_message_keeps_its_place_among_the_rows(empty: Case) -> None:
    with empty.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO t VALUES (1, 'a')")
        connection.execute("SELECT pg_logical_emit_message(true, 'app', 'in between'::bytea)")
        connection.execute("INSERT INTO t VALUES (2, 'b')")
        connection.execute("SELECT pg_logical_emit_message(false, 'app', '\\x00ff'::bytea)")
        connection.commit()
        connection.execute("SELECT pg_logical_emit_message(true, 'app', 'never')")
        connection.execute("SELECT pg_logical_emit_message(false, 'app', 'all the same')")
        connection.rollback()
    events = empty.events()
    found = [
        each.after["id"]
        if each.op == "c"
        else (base64.b64decode(each.value["message"]["content"]), each.source["ordinal"])
        for each in events
    ]
    # One outside transactions is where it was written: before the commit of the open transaction.
    assert found == [(b"\0\xff", 0), 1, (b"in between", 2), 2, (b"all the same", 0)]
    assert [each.value["message"]["transactional"] for each in events if each.op == "m"] == [
        False,
        True,
        False,
    ]
    assert events[0].source["txId"] is None


def test_what_came_by_replication_names_its_origin(empty: Case) -> None:
    with empty.connect() as connection:
        connection.execute("SELECT pg_replication_origin_create(%s)", [empty.database.name])
        connection.execute("SELECT pg_replication_origin_session_setup(%s)", [empty.database.name])
        connection.execute("INSERT INTO t VALUES (1, 'replicated')")
        connection.execute("SELECT pg_replication_origin_session_reset()")
        connection.execute("INSERT INTO t VALUES (2, 'own')")
        connection.execute("SELECT pg_replication_origin_drop(%s)", [empty.database.name])
    replicated, own = empty.events()
    assert replicated.source["origin"] == empty.database.name
    assert "origin" not in own.source


def test_the_times_of_an_event_are_its_commits(empty: Case) -> None:
    with empty.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO t VALUES (1, 'a')")
        connection.execute("SELECT pg_sleep(0.05)")
        connection.execute("INSERT INTO t VALUES (2, 'b')")
    after = empty.ask("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint")
    first, second = empty.events()
    times = {(e.source["ts_ms"], e.source["ts_us"], e.value["ts_us"]) for e in (first, second)}
    assert len(times) == 1
    assert 0 <= after - first.source["ts_us"] < 60_000_000
