"""Topics that Kafka compacts: no reader misses an event without an error, and bases fill stores."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

import lockstep
from cdc.config import Config, load
from cdc.errors import CompactedError, ConfigError, Exit
from cdc.events import LSN, TRUNCATE_KEY
from cdc.log import topics
from cdc.log.table_cuts import expect_counted
from cdc.operate.doctor.run import examine
from cdc.operate.findings import Severity
from cdc.operate.followers import ARCHIVE
from cdc.verify import topics as topics_proof
from lockstep.jobs.apply import stores
from lockstep.jobs.apply.running import FollowerRun
from lockstep.jobs.archiving import versions
from lockstep.jobs.archiving.running import Archiving
from lockstep.jobs.compacting.running import Compaction
from lockstep.jobs.cuts.frontiers import BEGINNING, LATEST
from lockstep.jobs.following_stores import run_of
from lockstep.jobs.generations.builders import LogBuilder
from lockstep.jobs.generations.in_place import InPlace
from lockstep.jobs.replaying import RangeReplay
from lockstep.jobs.spark.starting import SparkStart
from tests.fixtures.archived import Archived
from tests.fixtures.console import ConsoleUnderTest
from tests.fixtures.daemon import START_SECONDS, NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.event_source import EventSource
from tests.fixtures.store_sqlite import SqliteStore
from tests.fixtures.witness import records_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TABLE: Final = "CREATE TABLE users (id int PRIMARY KEY, n int)"
_SECONDS: Final = START_SECONDS
# What lets the cleaner run over every segment but the last, as soon as it looks.
_EAGER: Final = {
    "segment.ms": "50",
    "min.cleanable.dirty.ratio": "0.0001",
    topics.LAG: "0",
    "max.compaction.lag.ms": str(topics.NO_COMPACTION),
}


class Overwritten:
    """A pipeline whose table's topic is compacted, with rows that are updated again and again."""

    def __init__(self, made: PipelineUnderTest) -> None:
        self.made, self.config = made, made.config
        self.archived = Archived(made)
        self.topic = f"{made.config.prefix}.public.users"
        self.admin = topics.admin(made.config)

    def settings(self) -> dict[str, str]:
        return topics.settings_of(self.admin, [self.topic])[self.topic]

    def update(self, times: int) -> None:
        """Update every row so many times, each in segments of its own."""
        for _ in range(times):
            self.made.database.execute("UPDATE users SET n = n + 1")
            self.archived.log_reach()

    def events(self) -> int:
        """Return how many events the topic has."""
        found = records_of(self.made, lambda name: name == self.topic)
        return sum(each.value is not None for each in found)

    def compact(self) -> None:
        """Stop the daemon, which protects its readers, and let Kafka compact the topic."""
        assert self.made.daemon.term() == 0
        before = self.events()
        _look_often(self.admin)
        topics.alter(self.admin, {self.topic: _EAGER})
        wait_until(lambda: self.events() < before // 2, "Kafka compacts nothing", _SECONDS)

    def rows(self) -> list[dict[str, Any]]:
        """Return the source's rows."""
        with self.made.database.connect() as connection:
            found = connection.execute(b"SELECT id, n FROM users ORDER BY id").fetchall()
        return [{"id": key, "n": n} for key, n in found]

    def run(self, name: str, until: LSN) -> FollowerRun:
        spark = SparkStart(lambda: pytest.fail("no Spark"), set())
        return run_of(spark, self.config, name, until)


def _look_often(admin: topics.Admin) -> None:
    """Let the broker look for something to compact several times a second."""
    [node, *_] = admin.describe_cluster().result().nodes
    often = ConfigEntry(
        "log.cleaner.backoff.ms", "200", incremental_operation=AlterConfigOpType.SET
    )
    asked = ConfigResource(ResourceType.BROKER, str(node.id), incremental_configs=[often])
    admin.incremental_alter_configs([asked])[asked].result(60)


def overwritten(pipeline: NewPipeline, **sections: dict[str, object]) -> Overwritten:
    """Return a pipeline whose daemon runs and has published ten rows."""
    made = pipeline(_TABLE, **{"log": {"cleanup": "compact"}, **sections})
    made.start().wait_ready()
    made.database.execute("INSERT INTO users SELECT g, 0 FROM generate_series(1, 10) g")
    found = Overwritten(made)
    found.archived.log_reach()
    topics.alter(found.admin, {found.topic: {"segment.ms": "50"}})
    return found


def receive(config: Config, group: str, count: int) -> list[int]:
    """Return the seqs of the changes that a group receives, which it acknowledges."""
    found: list[int] = []
    with (
        lockstep.Client(config) as client,
        client.changes(["public.users"], group, "beginning") as changes,
    ):

        def done() -> bool:
            for change in changes.receive(0.2):
                found.append(change.seq)
                changes.acknowledge(change)
            return len(found) >= count

        wait_until(done, "the group receives nothing", _SECONDS)
    return found


def test_no_reader_of_a_compacted_range_misses_events_and_a_base_fills_a_store(
    pipeline: NewPipeline, tmp_path: Path
) -> None:
    store = SqliteStore(tmp_path / "copy.db")
    line = overwritten(
        pipeline,
        archive={"path": str(tmp_path / "archive"), "every_seconds": 0},
        followers={"copy": {"sql": {"url": f"sqlite:///{store.path}"}}},
    )
    made, config = line.made, line.config
    first = line.archived.reach()
    other = load(made.write("other.yaml", archive__path=str(tmp_path / "other")), {})
    assert archive(other, first).error is None
    received = receive(config, "late", 10)
    assert len(set(received)) == 10
    line.update(12)
    until = line.archived.reach()
    base, _ = Compaction(config, None).run()
    line.compact()

    range_ = r"public\.users \[\d\] .* from offset .* seq .*: Kafka has compacted it"
    # A follower that is new, and what fills it.
    run = line.run("copy", until)
    assert run.run() == Exit.CONFIG
    assert isinstance(run.error, CompactedError), run.error
    assert f"base {base.number} at {base.lsn}" in run.error.hint
    sink = stores.sink(config, "copy", config.followers["copy"])
    builder = LogBuilder(config, "copy", lambda: pytest.fail("no Spark"), lambda _: None)
    InPlace(sink, builder, lambda *_: None, 0).run()
    assert store.query("SELECT id, n FROM users ORDER BY id") == line.rows()
    # An archive that lags.
    lagging = archive(other, until)
    assert isinstance(lagging.error, CompactedError), lagging.error
    assert "needs every event" in lagging.error.hint
    # A replay from the topics, with no archive that has the range.
    with pytest.raises(CompactedError, match=range_):
        RangeReplay(other, f"{config.prefix}-replayed", BEGINNING, LATEST).run()
    RangeReplay(config, f"{config.prefix}-replayed", BEGINNING, LATEST).run()
    # Versions of a row: the archive has them all, the topic has not.
    assert len(versions.history(config, "public.users", "1")) == 13
    with pytest.raises(CompactedError, match="Kafka has compacted it"):
        versions.history(other, "public.users", "1")
    # A group, whose next changes are compacted, and what a stream of a table reads.
    with pytest.raises(CompactedError, match="Kafka has compacted it"):
        receive(config, "late", 1)
    with pytest.raises(CompactedError, match="Kafka has compacted it"):
        expect_counted(config, line.topic, max(received))
    with (
        lockstep.Client(config) as client,
        pytest.raises(ConfigError, match="is compacted, and a queue"),
    ):
        client.queue(["public.users"], "q", "beginning")
    # The proof does not take it for an altered log, and does not claim to have compared it.
    proof = topics_proof.prove(load(made.write("short.yaml", log__compaction_lag_hours=1e-6), {}))
    assert proof.findings == ()
    assert proof.compacted
    assert topics_proof.prove(config).findings, "within its lag nothing may be compacted"


def archive(config: Config, until: LSN) -> FollowerRun:
    """Archive up to an LSN; return how that ended."""
    run = FollowerRun(config, ARCHIVE, "delta", Archiving(config, None, until))
    run.run()
    return run


def test_the_daemon_holds_compaction_for_who_lags_and_changes_what_the_configuration_has(
    pipeline: NewPipeline, tmp_path: Path
) -> None:
    """And a truncate gets a key, since Kafka accepts no other record in a compacted topic."""
    store = SqliteStore(tmp_path / "copy.db")
    line = overwritten(
        pipeline,
        log={"cleanup": "delete", "compaction_lag_hours": 20 / 3_600},
        followers={"copy": {"sql": {"url": f"sqlite:///{store.path}"}}},
    )
    made = line.made
    assert line.settings()["cleanup.policy"] == "delete"
    assert made.daemon.term() == 0
    made.config_file = made.write("both.yaml", tables={"public.*": {"cleanup": "both"}})
    made.start().wait_ready()
    held = {"cleanup.policy": "compact,delete", topics.LAG: str(topics.NO_COMPACTION)}
    wait_until(lambda: held.items() <= line.settings().items(), "the topic is not altered")
    wait_until(lambda: made.daemon.health()["compaction_held"] == ["copy"], "nothing is held")
    sentences = [each["what"] for each in made.daemon.health()["verdict"]["causes"]]
    assert "no topic is compacted, and all of them grow, while these lag: copy" in sentences

    made.database.execute("TRUNCATE users", "INSERT INTO users VALUES (7, 7)")
    until = line.archived.log_reach()
    assert TRUNCATE_KEY in {each.key for each in records_of(made, lambda at: at == line.topic)}
    run = line.run("copy", until)
    assert run.run() == 0, run.error
    assert store.query("SELECT id, n FROM users") == [{"id": 7, "n": 7}]
    lag = {topics.LAG: "20000"}
    wait_until(lambda: lag.items() <= line.settings().items(), "it is held still", _SECONDS)
    wait_until(lambda: made.daemon.health()["compaction_held"] == [], "it says that it is held")
    # Somebody else's policy stays, and is found; the configuration's replaces it with a change.
    topics.alter(line.admin, {line.topic: {"cleanup.policy": "compact"}})
    wrong = {line.topic: "compact"}
    wait_until(lambda: made.daemon.health()["wrong_policies"] == wrong, "nobody sees it")
    assert made.daemon.term() == 0
    made.config_file = made.write("delete.yaml")
    made.start().wait_ready()
    right = {"cleanup.policy": "delete"}
    wait_until(lambda: right.items() <= line.settings().items(), "the topic is not altered")
    stated = {line.topic: "delete"}
    wait_until(lambda: made.resume()[0].cleanup == stated, "the log does not state it")


def test_a_table_without_a_key_cannot_be_compacted(pipeline: NewPipeline) -> None:
    made = pipeline(_TABLE, "CREATE TABLE clicks (n int)")
    made.config_file = made.write("compact.yaml", log__cleanup="compact")
    named = "public.clicks has no key, so its topic can't be compacted"
    errors = [each.what for each in examine(made.config) if each.severity is Severity.ERROR]
    assert any(named in each for each in errors), errors
    made.start().wait_ready()
    made.database.execute("INSERT INTO clicks VALUES (1)")
    made.ends(made.daemon, Exit.CONFIG, named)
    made.config_file = made.write(
        "one.yaml", log__cleanup="compact", tables={"public.clicks": {"cleanup": "delete"}}
    )
    made.start().wait_ready()
    topic = f"{made.config.prefix}.public.clicks"
    wait_until(lambda: bool(records_of(made, lambda at: at == topic)), "the row does not arrive")


@pytest.mark.long("the console's and Spark's way of reading what the commit's test reads otherwise")
def test_streams_and_spark_name_a_compacted_range(
    pipeline: NewPipeline, spark: SparkSession, tmp_path: Path
) -> None:
    line = overwritten(pipeline, archive={"path": str(tmp_path / "archive"), "every_seconds": 0})
    first = line.made.frontiers()[-1].seq
    line.update(12)
    line.archived.reach()
    base, _ = Compaction(line.config, None).run()
    line.compact()
    frame = lockstep.changes(spark, line.made.config_file, ["public.users"])
    with pytest.raises(Exception, match="Kafka has compacted it") as error:
        frame.collect()
    assert f"The newest base is {base.number}, at {base.lsn}" in str(error.value)
    console = ConsoleUnderTest(line.made.config_file, tmp_path / "console.log")
    try:
        assert console.port is not None
        with closing(EventSource(console.port, "public.users", first)) as stream:
            [closed] = [each.data for each in stream if each.kind == "closed"]
        assert closed["reason"] == "gap"
        assert "Kafka has compacted it" in closed["error"]
    finally:
        console.close()
