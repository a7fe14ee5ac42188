"""Tables read again while they change: no row is lost or outdated, and TOAST is complete."""

from __future__ import annotations

import itertools
import json
import threading
import uuid

import pytest

from cdc.cli import main
from cdc.config import load
from cdc.errors import ConfigError, Exit, GapError
from cdc.log import reader
from cdc.log.records import PinnedPublication
from cdc.operate.commands import migrations, snapshots, tables
from cdc.operate.findings import Level
from cdc.operate.status import read_status
from cdc.snapshot.incremental import commands
from cdc.snapshot.incremental import topic as live_topic
from cdc.snapshot.incremental.records import IncrementalRecord
from cdc.source.commands import send_command
from cdc.source.connection import connect
from cdc.source.publications import read_pinned_with_tables
from tests.fixtures.converge import converge
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.load import TABLES, Load
from tests.fixtures.read_back import read_to_end


def say(line: PipelineUnderTest, **command: object) -> str:
    """Emit a command; return the snapshot's id."""
    return say_all(line, command)


def say_all(line: PipelineUnderTest, *them: dict[str, object]) -> str:
    """Emit commands in one transaction, about the snapshot of the first; return its id."""
    number = them[0].setdefault("id", uuid.uuid4().hex[:8])
    with (
        line.database.connect(options="-c synchronous_commit=local") as connection,
        connection.transaction(),
    ):
        for each in ({"id": number, **command} for command in them):
            send_command(connection, line.config, commands.COMMAND, json.dumps(each).encode())
    return str(number)


def begin(line: PipelineUnderTest, *names: str, **more: object) -> str:
    return say(line, do="start", tables=tables_of(*names), **more)


def tables_of(*names: str) -> list[dict[str, str]]:
    return [dict(zip(("schema", "table"), name.split(".", 1), strict=True)) for name in names]


def found(line: PipelineUnderTest, number: str) -> IncrementalRecord | None:
    return next((r for r in live_topic.read(line.config) if r.id == number), None)


_NONE = IncrementalRecord(pipeline="", id="", schema="", table="", state="running")


def wait_state(line: PipelineUnderTest, number: str, state: str = "done") -> IncrementalRecord:
    def reached() -> bool:
        record = found(line, number)
        if record is not None and record.state != state:
            assert record.active or state == record.state, record
        return record is not None and record.state == state

    wait_until(reached, f"{number} is not {state}")
    record = found(line, number)
    assert record is not None
    return record


# Rows older than the log: what it holds of them comes from a snapshot.
_BEFORE = (
    "INSERT INTO users SELECT i, 1, 'u', repeat(md5(i::text), 80) FROM generate_series(1, 3000) i",
    "INSERT INTO pairs SELECT i, 1, chr(65 + i % 58) || i, i FROM generate_series(1, 2000) i",
    "INSERT INTO full_rows SELECT i, 1, repeat(md5(i::text), 80) FROM generate_series(1, 500) i",
    "INSERT INTO named SELECT i, 1, 'c' || i, now() FROM generate_series(1, 500) i",
)


def test_tables_older_than_the_log_are_read_under_load(pipeline: NewPipeline) -> None:
    """Several at once, with keys of several types that change, and TOAST that is not sent."""
    line = pipeline(*TABLES, *_BEFORE, batch={"max_events": 2_000, "max_wait_ms": 50})
    line.start().wait_ready()
    with Load(line.database.dsn, seed=3, truncates=0.0003) as load:
        wait_until(lambda: load.commits > 50, "no load")
        names = ("users", "pairs", "full_rows", "named")
        numbers = {name: begin(line, f"public.{name}") for name in names}
        rows = {name: wait_state(line, number).rows for name, number in numbers.items()}
        seen = load.commits
        wait_until(lambda: load.commits > seen + 50, "no load")
    assert any(rows.values())  # the load may have truncated some
    converge(line.config)
    assert line.daemon.term() == 0


@pytest.mark.parametrize("emptying", ["TRUNCATE users", "DELETE FROM users"])
def test_a_table_older_than_the_log_that_is_empty_by_then(
    pipeline: NewPipeline, emptying: str
) -> None:
    """Its changes before are of rows that the log never had; there is nothing to read."""
    line = pipeline(*TABLES, _BEFORE[0])
    line.start().wait_ready()
    line.database.execute("UPDATE users SET n = n + 1 WHERE id <= 10", emptying)
    assert wait_state(line, begin(line, "public.users")).rows == 0
    line.database.execute("INSERT INTO users VALUES (1, 1, 'new', 'big')")
    converge(line.config)


# One table per key type and shape; each has rows before the log starts.
_SHAPES = (
    "CREATE SCHEMA shapes",
    "CREATE TABLE shapes.numbers (id numeric PRIMARY KEY, v text)",
    "INSERT INTO shapes.numbers VALUES ('NaN'), ('-Infinity'), ('Infinity'), (-0.5), (1e30)",
    "INSERT INTO shapes.numbers SELECT i / 7.0, 'x' FROM generate_series(1, 900) i",
    'CREATE TABLE shapes.texts (a text COLLATE "C", b text COLLATE "en-x-icu", PRIMARY KEY (b, a))',
    (
        "INSERT INTO shapes.texts SELECT chr(60 + i % 70), chr(224 + i % 31) || chr(65 + i)"
        " FROM generate_series(1, 60) i"
    ),
    "INSERT INTO shapes.texts VALUES ('', ''), ('it''s', E'\\\\ \\t%'), ('z', 'Zz'), ('z', 'zZ')",
    "CREATE TABLE shapes.uuids (id uuid PRIMARY KEY, v int)",
    "INSERT INTO shapes.uuids SELECT gen_random_uuid(), i FROM generate_series(1, 700) i",
    "CREATE TABLE shapes.times (id timestamptz, day date, PRIMARY KEY (id, day))",
    (
        "INSERT INTO shapes.times VALUES ('infinity', '-infinity'), ('-infinity', 'infinity'),"
        " ('4713-01-01 00:00:00+00 BC', '2020-01-01')"
    ),
    'CREATE TABLE shapes."We ""ird. T" ("Key %" char(5) PRIMARY KEY, "Body \'s" bytea)',
    'INSERT INTO shapes."We ""ird. T" SELECT i, \'\\x00ff\' FROM generate_series(1, 300) i',
    "CREATE TABLE shapes.empty (id int PRIMARY KEY)",
    (
        "CREATE TABLE shapes.parts (id int, at int, v text, PRIMARY KEY (at, id))"
        " PARTITION BY RANGE (at)"
    ),
    *(
        f"CREATE TABLE shapes.parts_{i} PARTITION OF shapes.parts"
        f" FOR VALUES FROM ({i}00) TO ({i + 1}00)"
        for i in range(3)
    ),
    "INSERT INTO shapes.parts SELECT i, i % 300, 'p' FROM generate_series(1, 900) i",
    "CREATE TYPE shapes.mood AS ENUM ('sad', 'ok')",
    "CREATE TABLE shapes.moods (m shapes.mood, flag boolean, n int, PRIMARY KEY (m, flag, n))",
    (
        "INSERT INTO shapes.moods SELECT CASE WHEN i % 2 = 0 THEN 'ok' ELSE 'sad' END::shapes.mood,"
        " i % 3 = 0, i FROM generate_series(1, 300) i"
    ),
    "CREATE TABLE shapes.keyless (v int)",
    "CREATE TABLE shapes.loose (id int, v int)",
    "ALTER TABLE shapes.loose REPLICA IDENTITY FULL",
)


_MEANWHILE = (
    *(
        f"CREATE TABLE {name} (id int PRIMARY KEY, n int, big text)"
        for name in ("altered", "renamed", "dropped", "parts", "masked")
    ),
    *(
        f"INSERT INTO {name} SELECT i, 1, repeat('b', 3000) FROM generate_series(1, 3000) i"
        for name in ("parts", "masked")
    ),
    # So many that they are still being read when the daemon is asked to pause.
    *(
        f"INSERT INTO {name} SELECT i, 1, 'b' FROM generate_series(1, 20000) i"
        for name in ("altered", "renamed", "dropped")
    ),
)


def test_what_happens_to_a_table_meanwhile(pipeline: NewPipeline) -> None:
    """Paused, altered, renamed, dropped, stopped; parts by a condition, by keys, or by a signal."""
    line = pipeline(
        *_MEANWHILE,
        batch={"max_events": 200, "max_wait_ms": 20},
        tables={
            "public.masked": {
                "exclude": ["n"],
                "mask": {"big": {"fixed": "x"}},
                "where": "id > 2990",
            }
        },
    )
    line.start().wait_ready()
    numbers = {name: begin(line, f"public.{name}") for name in ("altered", "renamed", "dropped")}
    for number in numbers.values():
        wait_until(lambda: (found(line, number) or _NONE).rows, "it does not begin")  # noqa: B023 - called at once
    say(line, do="pause", id=None)
    for number in numbers.values():
        wait_state(line, number, "paused")
    line.database.execute(
        "ALTER TABLE altered ADD more int DEFAULT 5",
        "ALTER TABLE renamed RENAME TO another",
        "DROP TABLE dropped",
    )
    say(line, do="resume", id=None)
    wait_state(line, numbers["altered"])
    again = wait_state(line, numbers["renamed"])
    assert (again.table, again.rows >= 20_000) == ("another", True), "its own topic has all of it"
    assert "drop" in (wait_state(line, numbers["dropped"], "failed").why or "")
    start: dict[str, object] = {"do": "start", "tables": tables_of("public.altered")}
    stopped = say_all(line, start, {"do": "stop"})
    wait_state(line, stopped, "stopped")
    # Parts of a table.
    some = begin(line, "public.parts", where="id % 2 = 0 AND id <= 20")
    assert wait_state(line, some).rows == 10
    keyed = begin(line, "public.parts", keys=[["1"], ["3"], ["999999"]])
    assert wait_state(line, keyed).rows == 2
    # The rows have more bytes than a chunk; no row with another key is read.
    wide = [[str(i)] for i in range(1, 401)]
    assert wait_state(line, begin(line, "public.parts", keys=wide)).rows == 400
    list(migrations.up(line.config, ["signal_table"]))
    data = json.dumps({"data-collections": ["public.parts"], "type": "incremental"})
    line.database.execute(
        f"INSERT INTO lockstep.signal VALUES ('s1', 'execute-snapshot', '{data}')"
    )
    assert wait_state(line, "s1").rows == 3000
    # Columns, rows and masks are as in the stream.
    masked = begin(line, "public.masked")
    assert wait_state(line, masked).rows == 10
    topic = f"{line.config.prefix}.public.masked"
    found_rows = [
        json.loads(message.value() or b"")["after"]
        for message in read_to_end(line.config, {topic: 3})
    ]
    assert sorted(row["id"] for row in found_rows) == list(range(2991, 3001))
    assert {tuple(row) for row in found_rows} == {("id", "big")}
    assert {row["big"] for row in found_rows} == {"x"}
    assert line.daemon.state == "streaming"
    assert line.daemon.term() == 0


def test_keys_of_every_kind_are_read_in_the_servers_order(pipeline: NewPipeline) -> None:
    """In many chunks each; a table without a key is refused, with the reason."""
    line = pipeline(
        *_SHAPES,
        source={"tables": ["shapes.*"]},
        batch={"max_events": 200, "max_wait_ms": 20},
        tables={"shapes.loose": {"key": ["id"]}},
    )
    line.start().wait_ready()
    asked = snapshots.start(line.config, ["shapes.*"])
    for number, name in asked.items():
        refused = name in ("shapes.keyless", "shapes.loose")
        record = wait_state(line, number, "failed" if refused else "done")
        if refused:
            assert "key" in (record.why or "")
    assert line.daemon.state == "streaming"
    converge(line.config)
    # The snapshot added no description of its own: the stream's is the same.
    line.database.execute("INSERT INTO shapes.parts VALUES (7777, 5, 'new')")
    converge(line.config)
    config = ["-c", str(line.config_file)]
    assert main.run(["snapshot", "shapes.uuids", "shapes.empty", "--wait", *config]) == 0
    assert main.run(["snapshot", "list", "--json", *config]) == 0
    assert main.run(["table", "list", *config]) == 0
    assert main.run(["snapshot", "pause", *config]) == Exit.CONFIG, "nothing runs"
    assert main.run(["snapshot", "shapes.nowhere", *config]) == Exit.CONFIG
    bad = ["--where", "1 / (v - 5) > 0", "--wait"]
    assert main.run(["snapshot", "shapes.uuids", *bad, *config]) == Exit.FAILED
    versions = [record.table for record in reader.read_schemas(line.config)]
    assert sorted(versions) == sorted(set(versions))


def test_a_table_is_added_removed_and_added_again_while_the_daemon_runs(
    pipeline: NewPipeline,
) -> None:
    """With its rows, under load; rows deleted while it was out are deleted from the log as well."""
    line = pipeline(*TABLES, "CREATE TABLE public.first (id int PRIMARY KEY)")
    line.start().wait_ready()
    line.database.execute(
        "CREATE TABLE later (id int PRIMARY KEY, n int, big text)",
        "ALTER TABLE later ALTER big SET STORAGE EXTERNAL",
        "INSERT INTO later SELECT i, 1, repeat(md5(i::text), 80) FROM generate_series(1, 2000) i",
    )
    stop = threading.Event()

    def write() -> None:
        with line.database.connect() as connection:
            for i in itertools.count(1):
                if stop.is_set():
                    return
                connection.execute("UPDATE later SET n = n + 1 WHERE id = %s", (1 + i % 2000,))
                connection.execute("UPDATE later SET id = -id WHERE id = %s", (3000 - i % 2000,))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        (snapshot,) = tables.add(line.config, ["public.later"]).values()
        assert snapshot is not None
        wait_state(line, snapshot)
    finally:
        stop.set()
        writer.join()
    converge(line.config)
    # Removed, and rows are deleted meanwhile.
    left_out = load(line.write("without.yaml", source__exclude=["public.later"]), {})
    with pytest.raises(ConfigError):
        tables.remove(line.config, ["public.later"])
    assert tables.remove(left_out, ["public.later"]) == ["public.later"]
    line.database.execute("DELETE FROM later WHERE id % 2 = 0", "INSERT INTO first VALUES (1)")
    wait_until(lambda: "public.later" not in line.resume()[0].publication.tables, "not noted")
    assert line.daemon.state == "streaming"
    assert line.daemon.term() == 0
    assert "public.later" not in [str(each) for each, _ in tables.captured(line.config)]
    line.start().wait_ready()
    (snapshot,) = tables.add(line.config, ["public.later"]).values()
    assert snapshot is not None
    wait_state(line, snapshot)
    converge(line.config)
    assert line.daemon.term() == 0


def test_a_table_that_replaces_another_is_reported_and_read_again(pipeline: NewPipeline) -> None:
    """Dropped and recreated, or renamed: the stream has no events for the rows that it lost."""
    line = pipeline(
        "CREATE TABLE t (id int PRIMARY KEY, v int)",
        source={"tables": ["public.*"], "new_tables": "publish"},
    )
    line.start().wait_ready()
    again = (
        "INSERT INTO t SELECT i, 1 FROM generate_series(1, 50) i",
        "DROP TABLE t",
        "CREATE TABLE t (id text PRIMARY KEY, other bool)",
        "INSERT INTO t SELECT 'new ' || i, true FROM generate_series(1, 30) i",
    )
    swapped = (
        "CREATE TABLE next (LIKE t INCLUDING ALL)",
        "INSERT INTO next SELECT 'next ' || i FROM generate_series(1, 20) i",
        "ALTER TABLE t RENAME TO away",
        "ALTER TABLE next RENAME TO t",
        "ALTER TABLE away RENAME TO next",
        "UPDATE t SET other = false WHERE id = 'next 7'",
        "DELETE FROM next WHERE id = 'new 7'",
    )
    for statements, tables_ in (again, ["t"]), (swapped, ["t", "next"]):
        before = len(line.daemon.log)
        line.database.execute(*statements)
        for table in tables_:
            remedy = f"cdc snapshot public.{table} --replace"
            wait_until(lambda: remedy in line.daemon.log[before:], remedy)  # noqa: B023 - of this round
            wait_state(line, begin(line, f"public.{table}", anew=True))
        converge(line.config)
        wait_until(lambda: read_status(line.config).incomplete_topics == [], "it is incomplete")
    assert line.daemon.term() == 0


@pytest.mark.long("a race; the other table in its place is in the first tier")
def test_a_table_recreated_at_that_very_moment_is_still_published(pipeline: NewPipeline) -> None:
    """The publication and the tables are read one after another, while others change them."""
    line = pipeline(
        "CREATE TABLE t (id int PRIMARY KEY)",
        source={"tables": ["public.*"], "new_tables": "publish"},
    )
    over = threading.Event()

    def make_again() -> None:
        with line.database.connect() as connection:
            while not over.is_set():
                connection.execute("DROP TABLE t")
                connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
                over.wait(0.01)

    maker = threading.Thread(target=make_again)
    maker.start()
    seen = set()
    try:
        with connect(line.config) as connection:
            known = PinnedPublication(line.config.publication, 0, {"public.t": 0})
            for _ in range(300):
                publication, existing = read_pinned_with_tables(connection, known.name, known)
                assert publication.tables.keys() >= existing
                seen.add(bool(existing))
    finally:
        over.set()
        maker.join()
    assert True in seen


def test_a_listed_table_that_was_lost_comes_back_by_being_added(pipeline: NewPipeline) -> None:
    """By a drop, or by hand, even if it was put back by hand: the daemon's hints work."""
    line = pipeline("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    publication = line.config.publication
    made_again = (
        "INSERT INTO t SELECT generate_series(1, 50)",
        "DROP TABLE t",
        "CREATE TABLE t (id text PRIMARY KEY, other bool)",
        "INSERT INTO t SELECT 'new ' || i, true FROM generate_series(1, 30) i",
        "INSERT INTO u VALUES (1)",
    )
    there_and_back = (
        f"ALTER PUBLICATION {publication} DROP TABLE t",
        "DELETE FROM t WHERE id = 'new 3'",
        f"ALTER PUBLICATION {publication} ADD TABLE t",
        "INSERT INTO u VALUES (2)",
    )
    for statements, output in (made_again, "no longer has"), (there_and_back, "came back"):
        line.start().wait_ready()
        line.database.execute(*statements)
        assert "cdc table add" in line.ends(line.daemon, Exit.CONFIG, "public.t", output)
        if output == "came back":
            with pytest.raises(ConfigError, match="captured already"):
                tables.add(line.config, ["public.t"])
            line.database.execute(f"ALTER PUBLICATION {publication} DROP TABLE t")
        with pytest.raises(GapError, match=r"public\.t"):
            line.set_up()
        (snapshot,) = tables.add(line.config, ["public.t"]).values()
        assert snapshot is not None
        line.start().wait_ready()
        wait_state(line, snapshot)
        converge(line.config)
        wait_until(lambda: _well(line), "not all is well")
        assert line.daemon.term() == 0


def _well(line: PipelineUnderTest) -> bool:
    found = read_status(line.config)
    return not found.incomplete_topics and found.verdict.level is Level.OK


def test_a_request_before_the_initial_snapshot_is_refused(pipeline: NewPipeline) -> None:
    """The stream starts after the snapshot, so no daemon would receive the command."""
    line = pipeline(TABLES[0], snapshot={"mode": "initial", "runner": "local"}).set_up()
    with pytest.raises(ConfigError, match="initial snapshot is not taken yet"):
        snapshots.start(line.config, ["public.users"])
    line.start().wait_ready()
    [number] = snapshots.start(line.config, ["public.users"])
    wait_state(line, number)
