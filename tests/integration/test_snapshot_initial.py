"""The initial snapshot on a real server: what it describes, what it copies, and what it meets.

One pipeline per way of publishing partitions holds tables of every kind: a snapshot of many tables
takes no longer than that of one.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from cdc.cli.main import run
from cdc.errors import Exit
from cdc.log import reader
from cdc.snapshot.initial import topic
from tests.fixtures.converge import converge
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.load import TABLES as LOADED
from tests.fixtures.load import Load
from tests.fixtures.read_back import read_to_end
from tests.fixtures.servers import PostgresServer

INITIAL: dict[str, object] = {"mode": "initial", "runner": "local"}

TABLES = (
    "CREATE TYPE mood AS ENUM ('so so', 'glad')",
    "CREATE DOMAIN small AS int CHECK (VALUE < 1000)",
    "CREATE TABLE plain (id int PRIMARY KEY, t text, m mood, s small, a small[])",
    "INSERT INTO plain SELECT i, 't' || i, 'glad', i % 9, '{1}' FROM generate_series(1, 900) i",
    "CREATE TABLE empty (id int PRIMARY KEY)",
    "CREATE TABLE nulls (id int PRIMARY KEY, a text, b int, c mood)",
    "INSERT INTO nulls SELECT generate_series(1, 50)",
    "CREATE TABLE keyless (a int, b text)",
    "ALTER TABLE keyless REPLICA IDENTITY FULL",
    "INSERT INTO keyless SELECT i % 3, 'same' FROM generate_series(1, 30) i",
    'CREATE TABLE odd (b int, "A.b ""c" text, n int, PRIMARY KEY (n, b))',
    "INSERT INTO odd SELECT i, 'x', i + 1 FROM generate_series(1, 20) i",
    'ALTER TABLE odd DROP COLUMN "A.b ""c", ADD COLUMN late text DEFAULT \'since\'',
    "CREATE TABLE by_index (id int, code text NOT NULL, big text)",
    "CREATE UNIQUE INDEX by_code ON by_index (code)",
    "ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_code",
    "INSERT INTO by_index SELECT i, 'c' || i, repeat('x', 3000) FROM generate_series(1, 20) i",
    "CREATE TABLE generated (id int PRIMARY KEY, d int GENERATED ALWAYS AS (id * 2) STORED)",
    "INSERT INTO generated SELECT generate_series(1, 5)",
    "CREATE TABLE wide (id int PRIMARY KEY, big text)",
    "INSERT INTO wide VALUES (1, repeat('w', 20000000)), (2, 'small')",
    "CREATE TABLE parts (id int, k text, v int, PRIMARY KEY (id, k)) PARTITION BY LIST (k)",
    "CREATE TABLE parts_a PARTITION OF parts FOR VALUES IN ('a')",
    # A partition may have its columns in another order.
    "CREATE TABLE parts_b (dropped int, v int, k text NOT NULL, id int NOT NULL)",
    "ALTER TABLE parts_b DROP COLUMN dropped",
    "ALTER TABLE parts ATTACH PARTITION parts_b FOR VALUES IN ('b')",
    "CREATE TABLE parts_c PARTITION OF parts FOR VALUES IN ('c') PARTITION BY RANGE (id)",
    "CREATE TABLE parts_c1 PARTITION OF parts_c FOR VALUES FROM (0) TO (1000)",
    "INSERT INTO parts SELECT i, substr('abc', i % 3 + 1, 1), i FROM generate_series(1, 99) i",
    "CREATE VIEW seen AS SELECT * FROM plain",
    "CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY)",
    "INSERT INTO unlogged VALUES (1)",
)
# Tables for which the log does not have to equal the database.
CHOSEN = (
    "CREATE TABLE chosen (id int PRIMARY KEY, region text, name text, secret text, n int)",
    "ALTER TABLE chosen REPLICA IDENTITY FULL",
    "INSERT INTO chosen SELECT i, left('eu', 2 - i % 2), 'n', 's', i FROM generate_series(1, 40) i",
    "CREATE TABLE unread (id int PRIMARY KEY)",
    "INSERT INTO unread VALUES (1)",
    # A deferrable key may be violated for a moment, so it identifies nothing.
    "CREATE TABLE late_key (id int PRIMARY KEY DEFERRABLE, t text)",
    "INSERT INTO late_key VALUES (1, 'a')",
    # Columns that an index only includes are not part of the key.
    "CREATE TABLE carried (id int, code text NOT NULL, more int NOT NULL)",
    "CREATE UNIQUE INDEX by_carried ON carried (code) INCLUDE (more)",
    "ALTER TABLE carried REPLICA IDENTITY USING INDEX by_carried",
    "INSERT INTO carried VALUES (1, 'a', 1)",
    # A child's rows are its own.
    "CREATE TABLE parent (id int PRIMARY KEY, t text)",
    "CREATE TABLE child () INHERITS (parent)",
    "ALTER TABLE child ADD PRIMARY KEY (id)",
    "INSERT INTO parent VALUES (1, 'parent')",
    "INSERT INTO child VALUES (2, 'child')",
)
_CHOSEN_NAMES = ("chosen", "unread", "late_key", "carried", "parent", "child")


@pytest.mark.long("a sample of it is in the other tests")
def test_the_stream_finds_every_table_as_the_snapshot_left_it(
    pipeline: NewPipeline, postgres_server: PostgresServer
) -> None:
    """Values, keys, versions: the first change finds its table described already, by the root."""
    line = pipeline(
        *TABLES,
        *CHOSEN,
        source={"partitions": "root", "exclude": [f"public.{name}" for name in _CHOSEN_NAMES]},
        log={"kafka": {"message.max.bytes": 20_500_000}},
        snapshot={**INITIAL, "range_bytes": 65_536},
    )
    daemon = line.start().wait_ready()
    reported = daemon.health()["snapshot"]
    assert reported["percent"] == 100
    assert {t["table"]: t["rows"] for t in reported["tables"]}["public.parts"] == 99
    assert daemon.metric("lockstep_snapshot_rows") == reported["rows"]
    converge(line.config)
    _touch_all(line)
    proof = converge(line.config)
    assert proof.rows > 1100
    versions = reader.read_schemas(line.config)
    tables = [(each.schema, each.table) for each in versions]
    assert len(tables) == len(set(tables)), "the first change made a version of its own"
    known = topic.read(line.config)
    assert known.state is not None
    assert (known.state.stage, known.state.generation, known.ranges) == ("done", 1, [])
    assert known.state.rows == reported["rows"]
    if postgres_server.major >= 18:
        (generated,) = [each for each in versions if each.table == "generated"]
        assert [column.name for column in generated.columns] == ["id", "d"]
    assert daemon.term() == Exit.OK
    line.start().wait_ready()
    line.database.execute("DELETE FROM parts", "TRUNCATE plain")
    converge(line.config)


def _touch_all(line: PipelineUnderTest) -> None:
    """Change a row in every table, and give each a new one."""
    line.database.execute(
        "UPDATE plain SET t = t || '!' WHERE id % 10 = 0",
        "DELETE FROM plain WHERE id = 7",
        "INSERT INTO empty VALUES (1)",
        "UPDATE nulls SET b = 1 WHERE id = 3",
        "DELETE FROM keyless WHERE ctid = (SELECT min(ctid) FROM keyless)",
        "UPDATE odd SET late = 'now' WHERE b < 5",
        # Unchanged TOAST: only the snapshot has the value.
        "UPDATE by_index SET id = -id WHERE id = 3",
        "INSERT INTO generated VALUES (6)",
        "INSERT INTO wide VALUES (3, 'x')",
        "UPDATE parts SET k = 'a', v = -v WHERE id < 12",
    )


@pytest.mark.pg(">= 15")
def test_by_leaf_and_by_choice_the_snapshot_holds_what_the_stream_would(
    pipeline: NewPipeline,
) -> None:
    """Filters, columns, masks, keys and snapshot options; partitions as topics of their own."""
    line = pipeline(
        *TABLES,
        *CHOSEN,
        source={"partitions": "leaf", "exclude": ["public.wide"]},
        tables={
            "public.chosen": {
                "where": "region = 'eu'",
                "snapshot_where": "n > 10",
                "exclude": ["secret"],
                "mask": {"name": {"hmac": "0123456789abcdef"}},
                "key": ["n"],
            },
            "public.unread": {"snapshot": "none"},
        },
        snapshot={**INITIAL, "max_parallel": 1},
    )
    line.start().wait_ready()
    line.database.execute(
        "UPDATE chosen SET n = -1 WHERE id IN (2, 20)",
        "UPDATE parts SET v = 0 WHERE id < 9",
        "INSERT INTO late_key VALUES (2, 'b')",
        "UPDATE carried SET id = 2",
        "UPDATE parent SET t = t || '!'",
    )
    _caught_up(line)
    seen = _rows(line, "chosen")
    before, stream = seen[:15], seen[15:]
    assert sorted(row["after"]["n"] for row in before) == list(range(12, 42, 2))[:15]
    assert {row["op"] for row in before} == {"r"}
    masked = {row["after"]["id"]: row["after"]["name"] for row in seen if row["after"]}
    assert len(masked[20]) == 64
    (changed,) = [e for e in stream if e["op"] == "c" and e["after"]["id"] == 20]
    assert changed["after"]["name"] == masked[20]
    assert changed["source"]["schema_id"] == before[0]["source"]["schema_id"]
    assert not _rows(line, "unread")
    for table, ops in (("late_key", "rc"), ("carried", "ru"), ("parent", "ru"), ("child", "ru")):
        (copied, changed) = _rows(line, table)
        assert copied["op"] + changed["op"] == ops
        assert copied["source"]["schema_id"] == changed["source"]["schema_id"]
    assert {r["source"]["table"] for r in _rows(line, "parts_b")} == {"parts_b"}
    versions = [(each.schema, each.table) for each in reader.read_schemas(line.config)]
    assert len(versions) == len(set(versions))


def _caught_up(line: PipelineUnderTest) -> None:
    (end,) = line.query("SELECT pg_current_wal_lsn()")
    confirmed = "SELECT confirmed_flush_lsn >= %s FROM pg_replication_slots WHERE slot_name = %s"
    wait_until(lambda: line.query(confirmed, end, line.config.slot)[0], "the slot lags")


def _rows(line: PipelineUnderTest, table: str) -> list[dict[str, Any]]:
    """Return the table's events in the order of their seq."""
    name = f"{line.config.prefix}.public.{table}"
    events = [
        json.loads(message.value() or b"")
        for message in read_to_end(line.config, {name: line.resume()[0].partitions[name]})
        if message.value()
    ]
    return sorted(events, key=lambda event: int(event["source"]["seq"]))


def test_what_is_written_meanwhile_is_in_effect_once(pipeline: NewPipeline) -> None:
    """Writers never pause, transactions are open at the consistent point, and one is prepared."""
    line = pipeline(
        *LOADED,
        "INSERT INTO users SELECT i, 0, 'old', repeat('x', 200) FROM generate_series(1, 4000) i",
        "INSERT INTO lines SELECT i, 0, 'old', NULL FROM generate_series(1, 500) i",
        source={"tables": ["public.*"]},
        snapshot={**INITIAL, "range_bytes": 65_536, "max_parallel": 2},
    )
    with Load(line.database.dsn, seed=5, truncates=0) as load, line.database.connect() as late:
        wait_until(lambda: load.commits > 20, "nothing is written")
        late.autocommit = False
        late.execute("UPDATE users SET n = n + 100 WHERE id = 3999")
        daemon = line.start()
        wait_until(lambda: "waiting for" in str(daemon.health().get("reason")), "nobody waits")
        wait_until(lambda: f"pid {late.info.backend_pid}" in daemon.log, "it is not reported who")
        standby = line.start()
        wait_until(lambda: standby.state == "standby", "the second does not wait")
        # It can write all the same: what it writes commits after the point, and is streamed.
        late.execute("UPDATE users SET n = n + 1000 WHERE id = 3998")
        late.commit()
        # Either may stream: between snapshot and stream the slot is free for a moment.
        both = {daemon, standby}
        wait_until(
            lambda: {each.state for each in both} == {"streaming", "standby"}, "none streams"
        )
        after = load.commits
        wait_until(lambda: load.commits > after + 20, "nothing is written")
    converge(line.config)
    wait_until(lambda: {each.state for each in both} == {"streaming", "standby"}, "one ended")
    assert topic.read(line.config).state is not None


@pytest.mark.long("a minute; kills between any two steps are in the first tier")
def test_a_stop_in_the_middle_is_clean_and_says_what_becomes_of_it(
    pipeline: NewPipeline,
) -> None:
    """SIGTERM: exit 0, no transaction left open, the next start starts a new generation."""
    line = pipeline(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 20000) i",
        "CREATE TABLE dropped (id int)",
        "INSERT INTO dropped SELECT generate_series(1, 300)",
        # Forty seconds: it is stopped long before its end.
        snapshot={**INITIAL, "range_bytes": 65_536, "rows_per_second": 500},
    )
    daemon = line.start()
    wait_until(lambda: (daemon.health().get("snapshot") or {}).get("rows", 0) > 1000, "no rows")
    assert daemon.health()["ready"]
    assert daemon.metric("lockstep_snapshot_percent") > 0
    assert daemon.term() == Exit.OK
    assert "copies a new generation" in daemon.log
    known = topic.read(line.config)
    assert known.state is not None
    assert known.state.stage == "running"
    assert known.ranges
    # What is left of generation 1 must vanish: rows deleted while no daemon ran.
    line.database.execute("DELETE FROM t WHERE id % 4 = 0", "TRUNCATE dropped")
    file = line.write("fast.yaml", snapshot={**INITIAL, "range_bytes": 65_536})
    line.start(config_file=file).wait_ready(120)
    state = topic.read(line.config).state
    assert state is not None
    assert (state.stage, state.generation) == ("done", 2)
    proof = converge(line.config)
    assert proof.rows == 15_000


@pytest.mark.long("a minute")
def test_the_command_takes_it_alone_and_every_other_one_knows_of_it(
    pipeline: NewPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    """`cdc doctor` before, `cdc snapshot --initial`, `cdc status` after it; then the stream."""
    line = pipeline(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, 'v' FROM generate_series(1, 500) i",
        "ANALYZE",
        snapshot=INITIAL,
        http={"listen": ""},
    )

    def cdc(*words: str) -> str:
        capsys.readouterr()
        run([*words, "-c", str(line.config_file)])
        return capsys.readouterr().out

    (note,) = [
        f for f in json.loads(cdc("doctor", "--json"))["findings"] if f["check"] == "snapshot"
    ]
    assert note["severity"] == "note"
    assert "about 500 rows" in note["what"]
    assert json.loads(cdc("status", "--json"))["snapshot"]["stage"] == "due"
    reported = json.loads(cdc("snapshot", "--initial", "--json"))
    assert (reported["stage"], reported["generation"], reported["rows"]) == ("done", 1, 500)
    assert json.loads(cdc("snapshot", "--initial", "--json")) == reported
    assert "500 rows, done in" in cdc("status")
    assert not [
        f for f in json.loads(cdc("doctor", "--json"))["findings"] if f["check"] == "snapshot"
    ]
    line.database.execute("UPDATE t SET v = 'w' WHERE id < 9")
    daemon = line.start()
    wait_until(lambda: "streaming" in daemon.log, "it does not stream")
    converge(line.config)
