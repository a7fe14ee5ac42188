"""setup, status, tail, slot, teardown on real servers: what they do, and what they refuse."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from cdc.cli.main import run
from cdc.config import load
from cdc.errors import Exit, UnavailableError
from cdc.log import reader, resume
from tests.fixtures.servers import Database, KafkaServer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path, database: Database, kafka_server: KafkaServer, topic_prefix: str) -> Path:
    """Write the configuration of a pipeline that only this test uses."""
    path = tmp_path / "lockstep.yaml"
    path.write_text(
        f"pipeline: {topic_prefix}\n"
        f"source: {{dsn: '{database.dsn}'}}\n"
        f"log: {{bootstrap_servers: '{kafka_server.bootstrap}', partitions: 2}}\n"
        "http: {listen: ''}\n"
        "snapshot: {mode: never}\n",
        encoding="utf-8",
    )
    return path


@pytest.fixture
def users(database: Database) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")


class Cdc:
    """Runs commands on one configuration, in this process."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._path = path
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *words: str) -> int:
        """Run the command and return its exit code; `out` and `err` hold what it printed."""
        group = words[:2] if words[0] in ("slot", "config") else words[:1]
        code = run([*group, "-c", str(self._path), *words[len(group) :]])
        self.out, self.err = self._capsys.readouterr()
        return code

    def json(self, *words: str) -> Any:  # noqa: ANN401 - whatever the command prints
        self(*words, "--json")
        return json.loads(self.out)


@pytest.fixture
def cdc(path: Path, capsys: pytest.CaptureFixture[str]) -> Cdc:
    return Cdc(path, capsys)


@contextmanager
def daemon(path: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "cdc.cli.main", "run", "-c", str(path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=120) == Exit.OK


def eventually(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not become true"
        time.sleep(0.1)


def count(database: Database, query: str) -> int:
    with database.connect() as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return int(row[0])


def test_setup_may_be_repeated_and_teardown_takes_all_away(
    cdc: Cdc, database: Database, users: None
) -> None:
    assert cdc("setup") == Exit.OK
    assert "created the publication" in cdc.out
    assert "the log starts at" in cdc.out
    assert "next: cdc run" in cdc.err
    assert cdc("setup") == Exit.OK
    assert "created" not in cdc.out
    assert "the log continues from" in cdc.out
    assert cdc("doctor", "--quiet") == Exit.OK
    assert "✗" not in cdc.out
    assert cdc("teardown", "--topics", "--yes") == Exit.OK
    assert "of WAL" in cdc.out
    assert count(database, "SELECT count(*) FROM pg_publication") == 0
    assert cdc("teardown", "--yes") == Exit.OK
    assert "there is no slot" in cdc.out


def test_setup_reports_which_rows_the_log_will_not_hold(cdc: Cdc, database: Database) -> None:
    database.execute(
        "CREATE TABLE full_ (id int PRIMARY KEY)",
        "CREATE TABLE empty (id int PRIMARY KEY)",
        "CREATE TABLE blind (x text)",
        "INSERT INTO full_ SELECT generate_series(1, 1234)",
        "CREATE UNLOGGED TABLE fleeting (id int PRIMARY KEY)",
        "CREATE VIEW seen AS SELECT 1",
    )
    assert cdc("setup") == Exit.OK
    assert "public.full_ (1,234)" in cdc.out
    assert "empty (" not in cdc.out
    assert "public.blind: without a key" in cdc.out
    assert "fleeting" not in cdc.out
    assert "seen" not in cdc.out


def test_setup_publishes_names_of_every_kind(
    cdc: Cdc, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute(
        'CREATE SCHEMA "Odd. ""Schema"',
        'CREATE TABLE "Odd. ""Schema"."tä.ble" (id int PRIMARY KEY)',
        "CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE part PARTITION OF parts FOR VALUES FROM (0) TO (10)",
    )
    monkeypatch.setenv("LOCKSTEP_SOURCE_TABLES", '"Odd. ""Schema".*,public.parts')
    assert cdc("setup") == Exit.OK
    assert cdc("doctor", "--quiet") == Exit.OK, cdc.out
    with database.connect() as connection:
        rows = connection.execute("SELECT tablename FROM pg_publication_tables ORDER BY 1")
        assert [name for (name,) in rows] == ["parts", "tä.ble"]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("public.nope", "names public.nope, which does not exist"),
        ("public.seen", "which is a view"),
        ("public.fleeting", "which is an unlogged table"),
        ("other.*", "matches no table"),
    ],
)
def test_setup_refuses_what_cannot_be_captured(
    cdc: Cdc, database: Database, monkeypatch: pytest.MonkeyPatch, table: str, says: str
) -> None:
    database.execute("CREATE VIEW seen AS SELECT 1", "CREATE UNLOGGED TABLE fleeting (id int)")
    monkeypatch.setenv("LOCKSTEP_SOURCE_TABLES", table)
    assert cdc("setup") == Exit.CONFIG
    assert says in cdc.err
    assert count(database, "SELECT count(*) FROM pg_publication") == 0


def test_a_slot_that_the_log_does_not_know_is_taken_only_when_asked(
    cdc: Cdc, database: Database, users: None, topic_prefix: str
) -> None:
    database.execute(
        f"SELECT pg_create_logical_replication_slot('lockstep_{topic_prefix}', 'pgoutput')"
    )
    assert cdc("setup") == Exit.CONFIG
    assert "--adopt-slot" in cdc.err
    assert cdc("doctor") == Exit.FAILED
    assert "the log holds no resume record" in cdc.out
    assert cdc("status") == Exit.CONFIG
    assert cdc("setup", "--adopt-slot") == Exit.OK
    assert "took over the slot" in cdc.out
    assert cdc("doctor") == Exit.OK


def test_somebody_elses_slot_is_left_alone(
    cdc: Cdc, database: Database, users: None, topic_prefix: str
) -> None:
    database.execute(
        f"SELECT pg_create_logical_replication_slot('lockstep_{topic_prefix}', 'test_decoding')"
    )
    assert cdc("setup", "--adopt-slot") == Exit.CONFIG
    assert "belongs to something else" in cdc.err


def test_a_lost_slot_is_never_recreated(cdc: Cdc, users: None) -> None:
    assert cdc("setup") == Exit.OK
    assert cdc("slot", "drop", "--yes") == Exit.OK
    assert "of WAL" in cdc.out
    assert cdc("setup") == Exit.CONFIG
    assert "is missing" in cdc.err
    assert cdc("status") == Exit.CONFIG
    assert cdc("doctor") == Exit.FAILED
    assert cdc("teardown", "--topics", "--yes") == Exit.OK
    eventually(lambda: cdc("setup") == Exit.OK)


def test_a_slot_recreated_by_somebody_is_a_gap(
    cdc: Cdc, database: Database, users: None, topic_prefix: str
) -> None:
    assert cdc("setup") == Exit.OK
    assert cdc("slot", "drop", "--yes") == Exit.OK
    database.execute(
        "INSERT INTO users VALUES (1)",
        f"SELECT pg_create_logical_replication_slot('lockstep_{topic_prefix}', 'pgoutput')",
    )
    assert cdc("status") == Exit.CONFIG
    assert "is at" in cdc.out
    assert "fix: cdc run" not in cdc.out
    assert cdc("doctor") == Exit.FAILED
    assert "are no longer in the stream" in cdc.out


def test_a_log_does_not_begin_in_topics_that_hold_records(
    cdc: Cdc, users: None, monkeypatch: pytest.MonkeyPatch, topic_prefix: str
) -> None:
    assert cdc("setup") == Exit.OK
    assert cdc("slot", "drop", "--yes") == Exit.OK
    monkeypatch.setenv("LOCKSTEP_PIPELINE", f"{topic_prefix}_other")
    monkeypatch.setenv("LOCKSTEP_LOG_PREFIX", topic_prefix)
    assert cdc("setup") == Exit.CONFIG
    assert "topics that hold records already" in cdc.err


def test_a_setup_that_fails_leaves_no_slot(
    cdc: Cdc, database: Database, users: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise UnavailableError("the broker went away", hint="wait")

    with monkeypatch.context() as broken:
        broken.setattr(resume, "write_fenced", fail)
        assert cdc("setup") == Exit.UNAVAILABLE
    assert count(database, "SELECT count(*) FROM pg_replication_slots WHERE database ="
                 " current_database()") == 0  # fmt: skip
    assert cdc("setup") == Exit.OK


def test_new_tables_are_added_and_a_table_that_left_is_not_put_back(
    cdc: Cdc, path: Path, database: Database, users: None, topic_prefix: str
) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    assert cdc("setup") == Exit.OK
    database.execute("CREATE TABLE later (id int PRIMARY KEY)")
    assert cdc("setup") == Exit.OK
    assert "added public.later to the publication" in cdc.out
    database.execute(f"ALTER PUBLICATION lockstep_{topic_prefix} DROP TABLE users")
    assert cdc("setup") == Exit.CONFIG
    assert "public.users left the publication" in cdc.err
    assert cdc("doctor") == Exit.FAILED
    database.execute("DROP TABLE users")
    assert cdc("setup") == Exit.OK
    assert "the log continues without public.users" in cdc.out
    record = reader.read_resume(load(path))
    assert record is not None
    assert set(record[0].publication.tables) == {"public.orders", "public.later"}
    assert cdc("doctor") == Exit.OK


def test_without_privileges_setup_prints_the_sql_that_mends_it(
    cdc: Cdc, database: Database, users: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = f"r_{database.name}"
    database.execute(f"CREATE ROLE {role} LOGIN REPLICATION")
    try:
        monkeypatch.setenv("LOCKSTEP_SOURCE_DSN", make_conninfo(database.dsn, user=role))
        assert cdc("setup") == Exit.PERMISSION
        assert "our role does not own public.users" in cdc.err
        statement = next(line for line in cdc.err.splitlines() if "CREATE PUBLICATION" in line)
        database.execute(statement.partition("fix:")[2])
        assert cdc("setup") == Exit.OK
        assert "may not be read" in cdc.out
    finally:
        database.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_status_and_tail_follow_a_daemon(
    cdc: Cdc, path: Path, database: Database, users: None
) -> None:
    assert cdc("status") == Exit.CONFIG
    assert "is not set up" in cdc.out
    assert cdc("setup") == Exit.OK
    assert cdc("status") == Exit.FAILED
    assert "no daemon reads" in cdc.out
    with daemon(path):
        eventually(lambda: cdc("status") == Exit.OK)
        assert "✓ the log " in cdc.out
        assert cdc("teardown", "--yes") == Exit.TEMPORARY
        assert "stop the daemon" in cdc.err
        database.execute(
            "INSERT INTO users VALUES (1, 'Ada'), (2, 'Bob')",
            "UPDATE users SET name = 'Eve' WHERE id = 1",
            "DELETE FROM users WHERE id = 2",
        )
        eventually(lambda: bool(cdc.json("status")["resume"]["seq"] == 4))
        assert cdc("tail", "--from-beginning", "--limit", "4", "public.users") == Exit.OK
        # In the order of arrival: the two keys may be in two partitions.
        words = [line.split()[4] for line in cdc.out.splitlines()]
        assert sorted(words) == ["delete", "insert", "insert", "update"]
        assert "id=1  name=Eve" in cdc.out
        assert cdc("tail", "--from-beginning", "--limit", "4", "--json") == Exit.OK
        events = [json.loads(line)["event"] for line in cdc.out.splitlines()]
        assert sorted(event["source"]["seq"] for event in events) == [1, 2, 3, 4]
    # The walsender ends a moment after its client.
    eventually(lambda: cdc.json("status")["slot"]["active_pid"] is None)
    status = cdc.json("status")
    assert status["ok"] is False
    assert status["frontier"]["seq"] == 4


def test_tail_prints_what_comes_from_now_on(
    cdc: Cdc, path: Path, database: Database, users: None
) -> None:
    assert cdc("setup") == Exit.OK
    with daemon(path):
        eventually(lambda: cdc("status") == Exit.OK)
        database.execute("INSERT INTO users VALUES (1, 'before')")
        eventually(lambda: bool(cdc.json("status")["resume"]["seq"] == 1))
        command = [sys.executable, "-m", "cdc.cli.main", "tail", "-c", str(path), "--limit", "1"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as tail:
            assert tail.stdout is not None
            # The event must come after the reader got the end offset; a new one each time is fine.
            ids = iter(range(2, 1000))
            while tail.poll() is None:
                database.execute(f"INSERT INTO users VALUES ({next(ids)}, 'after')")
                time.sleep(0.2)
            assert "name=after" in tail.stdout.read()


def test_tail_of_an_unknown_table_names_the_known_ones(cdc: Cdc, users: None) -> None:
    assert cdc("tail") == Exit.CONFIG
    assert "`cdc setup` creates them" in cdc.err
    assert cdc("setup") == Exit.OK
    assert cdc("tail", "public.nope") == Exit.CONFIG
    assert "it holds public.users" in cdc.err
    assert cdc("tail", "users") == Exit.USAGE


def test_slot_show_reports_state_and_cost(cdc: Cdc, users: None, topic_prefix: str) -> None:
    assert cdc("slot", "show") == Exit.CONFIG
    assert "there is no slot" in cdc.err
    assert cdc("setup") == Exit.OK
    assert cdc("slot", "show") == Exit.OK
    assert "nobody" in cdc.out
    assert cdc.json("slot", "show")["name"] == f"lockstep_{topic_prefix}"
    assert f"lockstep_{topic_prefix}" in [
        each["name"] for each in cdc.json("slot", "show", "--all")
    ]
    assert cdc("slot", "drop", "no_such_slot", "--yes") == Exit.CONFIG


def test_a_server_that_does_not_answer_is_69(
    cdc: Cdc, users: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cdc("setup") == Exit.OK
    monkeypatch.setenv("LOCKSTEP_SOURCE_DSN", "postgresql://postgres@127.0.0.1:1/x")
    assert cdc("status") == Exit.UNAVAILABLE
    assert "127.0.0.1:1" in cdc.out
    assert cdc("setup") == Exit.UNAVAILABLE


def test_a_name_of_a_table_forges_no_line(cdc: Cdc, database: Database) -> None:
    database.execute(
        'CREATE TABLE "a\n2026 ERROR forged\x1b[2K" (id int PRIMARY KEY)',
        'CREATE TABLE "b\n2026 ERROR forged\x1b[2K" (id int)',  # doctor: it has no key
    )
    named = 0
    for words in (
        ["doctor"], ["setup"], ["setup"], ["status"], ["table", "list"], ["doctor"],
        ["snapshot", "public.none"],
    ):  # fmt: skip
        cdc(*words)
        lines = (cdc.out + cdc.err).split("\n")
        named += any(r"\n2026 ERROR forged\x1b[2K" in line for line in lines)
        assert all(line.isprintable() and not line.startswith("2026") for line in lines)
    assert named >= 4, "most of them name the table"
