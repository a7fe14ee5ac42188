"""Stores are filled from base and archive where Kafka has deleted what they hold."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, Final, cast

import pytest
import redis
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from cdc import failpoints
from cdc.cli.main import run as cdc
from cdc.errors import ConfigError, Exit, GapError
from cdc.events import LSN
from cdc.log import names, reader
from cdc.runtime import spark as files
from lockstep.jobs.apply import stores
from lockstep.jobs.compacting import past, restoring
from lockstep.jobs.compacting.running import Compaction
from lockstep.jobs.following_stores import run_of
from lockstep.jobs.generations.builders import LogBuilder
from lockstep.jobs.generations.from_archive import lsn_at
from lockstep.jobs.generations.in_place import InPlace
from lockstep.jobs.generations.rebuilding import Rebuild
from lockstep.jobs.reading_as_of import read_as_of_arrow
from lockstep.jobs.spark.starting import SparkStart
from lockstep.sinks.contract import Generations, Sink
from tests.fixtures.archived import Archived
from tests.fixtures.daemon import NewPipeline
from tests.fixtures.store_sqlite import SqliteStore

SEED: Final = 15
_JOB_SECONDS: Final = 300
TABLES: Final = (
    "CREATE TABLE users (id int PRIMARY KEY, name text, body text)",
    "ALTER TABLE users ALTER body SET STORAGE EXTERNAL",
    "CREATE TABLE quiet (id int PRIMARY KEY, name text)",
)
ROWS: Final = (
    "INSERT INTO users SELECT g, 'n' || g, repeat('x', 3000) || g FROM generate_series(1, 60) g",
    "INSERT INTO quiet SELECT g, 'q' FROM generate_series(1, 9) g",
)
State = dict[str, dict[int, dict[str, Any]]]


class Past:
    """A pipeline with an archive and three stores, and the states that the source had."""

    def __init__(self, archived: Archived, folder: Path, client: redis.Redis) -> None:
        self.archived, self.folder, self.redis = archived, folder, client
        self.pipeline, self.config = archived.pipeline, archived.config
        self.chance = Random(SEED)
        self.states: list[tuple[LSN, State]] = []
        self.reported: list[str] = []
        self._step = 0

    def change(self) -> None:
        """Change the tables; keep the state with the frontier at which the log has it."""
        step, execute = self._step, self.pipeline.database.execute
        self._step += 1
        one, other = self.chance.randint(3, 9), self.chance.randint(3, 9)
        execute(
            f"UPDATE users SET name = 'step {step}' WHERE id % {one} = 0",
            f"UPDATE users SET id = id + 1000, name = 'moved' WHERE id % {other} = 1",
            f"DELETE FROM users WHERE id % 17 = {step}",
            f"INSERT INTO users VALUES (-{step + 1}, 'large', repeat('y', 200000))",
        )
        if step == 1:
            execute(
                "ALTER TABLE users ADD COLUMN more text DEFAULT 'm';"
                " UPDATE users SET name = 'more' WHERE id % 7 = 0"
            )
        if step == 2:
            execute("TRUNCATE quiet; INSERT INTO quiet VALUES (1, 'again')")
        self.states.append((self.archived.log_reach(), self.source()))

    def source(self) -> State:
        found: State = {}
        with self.pipeline.database.connect() as connection:
            for table in ("users", "quiet"):
                query = f"SELECT id, row_to_json(t) FROM {table} t".encode()
                found[table] = dict(connection.execute(query).fetchall())
        return found

    def forget(self) -> None:
        """Delete from the topics what is archived, frontiers too; the daemon is stopped."""
        ends = self.archived.position().applied.end_of
        mine = [
            TopicPartition(*place, end)
            for place, end in ends.items()
            if end and place[0] != names.schema_topic(self.config.prefix)
        ]
        admin = AdminClient({"bootstrap.servers": self.pipeline.bootstrap})
        for done in admin.delete_records(mine).values():
            done.result(timeout=120)

    def sink(self, name: str) -> Sink:
        return stores.sink(self.config, name, self.config.followers[name])

    def rebuild(self, name: str) -> Rebuild | InPlace:
        sink = self.sink(name)
        builder = LogBuilder(
            self.config, name, lambda: pytest.fail("no Spark"), self.reported.append
        )
        if isinstance(sink, Generations):
            return Rebuild(sink, builder, self.reported.append)
        return InPlace(sink, builder, lambda *_: None, 0)

    def differences(self, table: str, first: str, last: str) -> dict[int, dict[str, Any]]:
        """Return the output of `cdc diff … --json`, by the row's key."""
        command = [sys.executable, "-m", "cdc.cli.main", "diff", f"public.{table}", "--json"]
        given = ["--from", first, "--to", last, "-c", str(self.pipeline.config_file)]
        done = subprocess.run([*command, *given], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        found = [json.loads(line) for line in done.stdout.splitlines()]
        return {each["key"]["id"]: each for each in found}

    def in_redis(self) -> State:
        found: State = {"users": {}, "quiet": {}}
        for table, rows in found.items():
            for name in self.redis.scan_iter(f"{self.config.prefix}:public.{table}:*", count=5_000):
                row = json.loads(cast("bytes", self.redis.get(name)))
                rows[row["id"]] = row
        return found

    def shown(self, name: str) -> State:
        """Return what the generation of a store that readers see holds."""
        sink = self.sink(name)
        assert isinstance(sink, Generations)
        generation = sink.current()
        assert generation is not None
        return self.at(name, generation)

    def in_delta(self) -> State:
        read = read_as_of_arrow(str(self.folder / "lake"), ["public.users", "public.quiet"])
        return {
            name.partition(".")[2]: {row["id"]: _plain(row) for row in table.to_pylist()}
            for name, table in read.tables.items()
        }

    def in_sqlite(self, follower: str = "copy") -> State:
        store = SqliteStore(self.folder / f"{follower}.db")
        return {
            name: {row["id"]: _plain(row) for row in store.query(f"SELECT * FROM {name}")}
            for name in ("users", "quiet")
        }

    def at(self, name: str, generation: int) -> State:
        """Return what a generation of a store holds."""
        sink = self.sink(name)
        assert isinstance(sink, Generations)
        shadow = sink.at(generation)
        state = shadow.open()
        assert state is not None
        builder = LogBuilder(self.config, name, lambda: pytest.fail("no"), print)
        found: State = {"users": {}, "quiet": {}}
        for version in builder.versions(state.applied):
            for _, _, row in shadow.contents(version):
                if row:
                    each = json.loads(row)
                    found[version.table][each["id"]] = _plain(each)
        shadow.close()
        return found


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without a store's own columns."""
    return {name: value for name, value in row.items() if not name.startswith("_")}


@pytest.fixture
def kept(
    pipeline: NewPipeline,
    redis_client: redis.Redis,
    redis_url: str,
    opensearch_url: str,
    tmp_path: Path,
) -> Past:
    """Some states archived with a base, some in the archive after it, some in the topics only."""
    followers: dict[str, object] = {
        "cache": {"redis": {"url": redis_url}},
        "copy": {"sql": {"url": f"sqlite:///{tmp_path}/copy.db"}},
        "mirror": {"delta": {"path": str(tmp_path / "lake")}},
        "search": {"opensearch": {"url": opensearch_url}},
    }
    made = pipeline(
        *TABLES,
        followers=followers,
        archive={"path": str(tmp_path / "archive"), "every_seconds": 0},
        log={"kafka": {"message.max.bytes": 60_000}},
    )
    made.start().wait_ready()
    made.database.execute(*ROWS)
    found = Past(Archived(made), tmp_path, redis_client)
    for _ in range(2):
        found.change()
        found.archived.reach()
    Compaction(made.config, None).run()
    found.change()
    found.archived.reach()
    found.change()
    made.daemon.term()
    # Canaries and an idle slot make frontiers too, in which the state is the same.
    found.states[-1] = (found.archived.frontier(), found.states[-1][1])
    return found


def test_every_store_is_filled_from_base_archive_and_topics(kept: Past) -> None:
    """Nothing that was archived is in Kafka any more, and no daemon reads anything again."""
    kept.forget()
    assert cdc(["topics", "acknowledge", "--yes", "-c", str(kept.pipeline.config_file)]) == 0
    wanted = kept.states[-1][1]
    for name, read in (
        ("cache", kept.in_redis),
        ("copy", kept.in_sqlite),
        ("mirror", kept.in_delta),
    ):
        outcome = kept.rebuild(name).run()
        assert outcome.applied.lsn == kept.states[-1][0], name
        assert read() == wanted, name
    assert sum("filled from base 1" in each for each in kept.reported) == 3, kept.reported
    # The stores continue with what is committed from now on.
    kept.pipeline.start().wait_ready()
    kept.change()
    for name, read in (("cache", kept.in_redis), ("mirror", kept.in_delta)):
        kept.rebuild(name).run()
        assert read() == kept.states[-1][1], name


def test_a_table_without_rows_is_filled_as_an_empty_one(kept: Past) -> None:
    """As it is in stores that have followed its truncate."""
    kept.pipeline.start().wait_ready()
    kept.pipeline.database.execute("TRUNCATE quiet")
    kept.archived.reach()
    Compaction(kept.config, None).run()
    assert kept.pipeline.daemon.term() == 0
    for name, read in (("copy", kept.in_sqlite), ("mirror", kept.in_delta)):
        kept.rebuild(name).run()
        assert read() == kept.source()
        assert read()["quiet"] == {}


def test_a_state_of_the_past_is_built_from_base_and_archive(kept: Past) -> None:
    """Each equals what the source had at its LSN; also before the base."""
    kept.forget()
    for lsn, wanted in kept.states[:-1]:
        for name in ("cache", "mirror"):
            outcome = kept.rebuild(name).as_of(lsn)
            assert outcome.applied.lsn == lsn
            assert kept.at(name, outcome.generation) == wanted


def test_a_lake_is_read_as_of_a_frontier_that_it_does_not_have(kept: Past) -> None:
    """From base and archive; without the configuration there is none so old."""
    kept.forget()
    lsn, wanted = kept.states[0]
    path, tables = str(kept.folder / "lake"), ["public.users", "public.quiet"]
    with pytest.raises(ConfigError, match="no frontier so old"):
        read_as_of_arrow(path, tables, lsn=lsn)
    scratch = str(kept.folder / "scratch")
    for folder in (scratch, scratch, None):
        found = read_as_of_arrow(
            path, tables, lsn=lsn, config=kept.pipeline.config_file, scratch=folder
        )
        assert found.applied.lsn == lsn
        for name, table in found.tables.items():
            rows = {row["id"]: _plain(row) for row in table.to_pylist()}
            assert rows == wanted[name.partition(".")[2]]
    with pytest.raises(ConfigError, match="has another state"):
        read_as_of_arrow(
            path, tables, lsn=kept.states[1][0], config=kept.pipeline.config_file, scratch=scratch
        )


@pytest.mark.long("half a minute; the states themselves are in the first tier")
def test_the_difference_of_two_states_is_the_net_effect_between_them(kept: Past) -> None:
    """Printed by the command, key by key; a seq and a time name the same state as their LSN."""
    kept.forget()
    (first, old), (last, new) = kept.states[0], kept.states[2]
    for table in ("users", "quiet"):
        found = kept.differences(table, str(first), str(last))
        before, after = old[table], new[table]
        assert {key: each["before"] for key, each in found.items() if each["before"]} == {
            key: row for key, row in before.items() if key in found
        }
        assert {key: each["after"] for key, each in found.items() if each["after"]} == {
            key: row for key, row in after.items() if key in found
        }
        unchanged = (before.keys() | after.keys()) - found.keys()
        assert all(before.get(key) == _less(after.get(key), before.get(key)) for key in unchanged)
    state = past.find(kept.config, last)
    assert state is not None
    applied = state.frontier.applied
    at = datetime.fromtimestamp(applied.committed_at_us / 1e6, UTC) + timedelta(milliseconds=1)
    for place in (applied.seq, at):
        # A frontier that an idle slot has made has another LSN, and the same state.
        named = past.find(kept.config, lsn_at(kept.config, place))
        assert named is not None
        assert named.frontier.applied.seq == applied.seq


def _less(row: dict[str, Any] | None, other: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a row with the columns that another has: the later one may have more."""
    return row and {name: row[name] for name in other or row}


def test_a_log_that_does_not_continue_the_archive_is_refused(kept: Past) -> None:
    """By the seq and the chain of the frontier; nothing is written then."""
    state = past.find(kept.config)
    assert state is not None
    frontier = state.frontier
    restoring.expect_seam(kept.config, frontier)
    with pytest.raises(GapError, match="with another chain"):
        restoring.expect_seam(kept.config, frontier._replace(chain="x"))
    kept.forget()
    restoring.expect_seam(kept.config, frontier)
    with pytest.raises(GapError, match="does not continue the chain"):
        restoring.expect_seam(kept.config, frontier._replace(chain="x"))
    applied = frontier.applied._replace(seq=frontier.applied.seq - 1)
    with pytest.raises(GapError, match="counts"):
        restoring.expect_seam(kept.config, frontier._replace(applied=applied))


@pytest.mark.long("the other steps", sample=["restore_written-cache"])
@pytest.mark.parametrize("store", ["cache", "search"])
@pytest.mark.parametrize("failpoint", failpoints.RESTORE_NAMES)
def test_a_rebuild_killed_while_it_reads_the_archive_is_completed_by_the_next(
    kept: Past, failpoint: str, store: str
) -> None:
    """Although rows were deleted, and archived, between the two."""
    kept.forget()
    assert cdc(["topics", "acknowledge", "--yes", "-c", str(kept.pipeline.config_file)]) == 0
    config = str(kept.pipeline.config_file)
    command = [sys.executable, str(files.job("rebuild")), store, "--config", config]
    killed = subprocess.run(
        command,
        env={**os.environ, "LOCKSTEP_FAILPOINT": failpoint},
        capture_output=True,
        timeout=_JOB_SECONDS,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    kept.pipeline.start().wait_ready()
    kept.pipeline.database.execute("DELETE FROM users WHERE id % 2 = 0")
    kept.archived.reach()
    Compaction(kept.config, None).run()
    kept.rebuild(store).run()
    assert kept.shown(store) == kept.source()


def empty(kept: Past, *topics: str) -> None:
    """Delete all that topics have, with the transaction markers at their ends."""
    prefix, many = kept.config.prefix, kept.config.log.partitions
    parts = [
        (f"{prefix}.{topic}", n) for topic in topics for n in range(1 if "cdc" in topic else many)
    ]
    admin = AdminClient({"bootstrap.servers": kept.pipeline.bootstrap})
    ends = reader.end_offsets(kept.config, parts)
    lost = [TopicPartition(*place, end) for place, end in ends.items()]
    for done in admin.delete_records(lost).values():
        done.result(timeout=120)


@pytest.mark.long("a case of the tests next to it")
def test_topics_that_retention_has_emptied_have_lost_nothing_that_is_archived(kept: Past) -> None:
    """They begin after the archive's end: after the marker of the last transaction."""
    kept.pipeline.start().wait_ready()
    kept.archived.reach()
    kept.pipeline.daemon.term()
    empty(kept, "public.users", "public.quiet", "cdc.dead")
    assert cdc(["topics", "acknowledge", "--yes", "-c", str(kept.pipeline.config_file)]) == 0
    kept.rebuild("cache").run()
    assert kept.in_redis() == kept.source()
    assert any("filled from base 1" in each for each in kept.reported), kept.reported


@pytest.mark.long("a minute; a log that does not continue the archive is refused in the first tier")
@pytest.mark.parametrize("topic", ["public.users", "cdc.dead"])
def test_an_archive_that_ends_before_the_topics_begin_is_not_used(kept: Past, topic: str) -> None:
    """Its job was stopped, and events between the two are nowhere: all rows are read again."""
    empty(kept, topic)
    assert cdc(["topics", "acknowledge", "--yes", "-c", str(kept.pipeline.config_file)]) == 0
    kept.pipeline.start().wait_ready()
    for name, read in (("copy", kept.in_sqlite), ("cache", kept.in_redis)):
        kept.rebuild(name).run()
        assert read() == kept.source(), name
    assert sum("the archive is not used" in each for each in kept.reported) >= 2, kept.reported


@pytest.mark.long("half a minute; a rebuild fills every store in the first tier")
def test_a_store_that_was_lost_is_filled_from_the_base(kept: Past) -> None:
    """By the follower itself, when it starts; a new one's error names the base."""
    spark = SparkStart(lambda: pytest.fail("no Spark"), set())
    assert run_of(spark, kept.config, "cache", kept.states[-1][0]).run() == 0
    kept.forget()
    assert cdc(["topics", "acknowledge", "--yes", "-c", str(kept.pipeline.config_file)]) == 0
    new = run_of(spark, kept.config, "mirror", kept.states[-1][0])
    assert new.run() == Exit.CONFIG
    assert new.error is not None
    assert "base 1" in new.error.hint
    lost = run_of(spark, kept.config, "cache", kept.states[-1][0])
    for name in kept.redis.scan_iter(f"{kept.config.prefix}:*", count=5_000):
        kept.redis.delete(name)
    assert lost.run() == 0, lost.error
    assert kept.in_redis() == kept.states[-1][1]
