"""The initial snapshot on Spark: through the log, and directly into Delta Lake."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from cdc.errors import GapError, StoppedError, UnavailableError
from cdc.log import reader
from lockstep.jobs import snapshot
from lockstep.jobs.copying import direct
from lockstep.jobs.copying.data_source import SnapshotSource, table_of
from lockstep.sinks.delta import layout as delta_layout
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.read_back import read_to_end

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc.snapshot.initial.records import RangeRecord, SnapshotPlan

TABLES = (
    "CREATE TABLE big (id int PRIMARY KEY, a text, n numeric(10,2), at timestamptz)",
    "INSERT INTO big SELECT i, repeat('x', 100), i / 7.0, now() FROM generate_series(1, 5000) i",
    "INSERT INTO big VALUES (0, NULL, 'NaN', 'infinity')",
    'CREATE TABLE parts (id int PRIMARY KEY, "a b" text) PARTITION BY RANGE (id)',
    "CREATE TABLE low PARTITION OF parts FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE high PARTITION OF parts FOR VALUES FROM (100) TO (200)",
    "INSERT INTO parts SELECT i, 'p' || i FROM generate_series(1, 150) i",
    "CREATE TABLE nothing (id int PRIMARY KEY)",
    "CREATE TABLE small (id int PRIMARY KEY, a text)",
    "INSERT INTO small SELECT i, 's' || i FROM generate_series(1, 300) i",
)
DIRECT = {f"public.{name}": {"snapshot": "direct"} for name in ("big", "parts", "nothing")}


def on_spark(pipeline: PipelineUnderTest) -> dict[str, Any]:
    """Run the job in this process, in the tests' session."""
    return snapshot.run(snapshot.Driver(pipeline.config_file), pipeline.config_file)


def mirror(lake: Path, table: str) -> DeltaTable:
    return DeltaTable(lake / f"public.{table}")


def facts(table: DeltaTable) -> list[dict[str, object]]:
    """Return the metadata of each commit, oldest first."""
    commits = reversed(table.history())
    return [delta_layout.facts(commit.get("userMetadata")) for commit in commits]


class Stumbling:
    """The log of a mirror's groups: it fails on request, after Delta's commit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fail: list[Callable[[], None]] = []  # one a call
        self.plans: list[SnapshotPlan] = []
        record, copy = direct.CopyLog.record, direct.copy

        def recording(log: direct.CopyLog, records: list[RangeRecord]) -> None:
            if self.fail:
                self.fail.pop(0)()
            record(log, records)

        def copying(spark: SparkSession, *given: Any) -> list[RangeRecord]:  # noqa: ANN401
            self.plans.append(given[-1])
            return copy(spark, *given)

        monkeypatch.setattr(direct.CopyLog, "record", recording)
        monkeypatch.setattr(direct, "copy", copying)


def stumble() -> None:
    raise UnavailableError("stumbled", hint="it goes on by itself")


@pytest.mark.commit("the snapshot's path on Spark")
def test_tables_are_copied_directly_into_mirrors_and_the_stream_continues(
    spark: SparkSession, pipeline: NewPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = tmp_path / "lake"
    made = pipeline(
        *TABLES,
        snapshot={"mode": "initial", "range_bytes": 65_536},
        delta={"path": str(lake)},
        tables=DIRECT,
    )
    config = made.config
    monkeypatch.setattr(direct, "GROUP_BYTES", 8 * 65_536)
    stumbling = Stumbling(monkeypatch)

    # Generation 1 twice fails to record a committed group, then its driver is stopped.
    driver = snapshot.Driver(made.config_file)

    def stop() -> None:
        driver.stopping = True
        stumble()

    stumbling.fail = [stumble, stop]
    with pytest.raises(StoppedError):
        snapshot.run(driver, made.config_file)
    old = facts(mirror(lake, "big"))
    assert [(each["generation"], each["group"], each["frontier"]) for each in old] == [(1, 0, None)]

    # Its export has ended, and rows have changed: generation 2 replaces it.
    made.database.execute(
        "DELETE FROM big WHERE id = 1", "INSERT INTO small VALUES (1000, 'later')"
    )
    assert on_spark(made) == {"outcome": "taken", "generation": 2}
    big = mirror(lake, "big")
    output = facts(big)[1:]
    assert [(each["generation"], each["group"]) for each in output] == [
        (2, number) for number in range(len(output))
    ]
    assert len(output) > 1
    assert [each["frontier"] for each in output] == [None] * (len(output) - 1) + [output[-1]["lsn"]]
    rows = big.to_pyarrow_table().to_pylist()
    assert sorted(row["id"] for row in rows) == [0, *range(2, 5001)]
    assert len({row["_seq"] for row in rows}) == 5000
    odd = next(row for row in rows if row["id"] == 0)
    assert (odd["n"], dict(odd["_exact"])) == (None, {"n": "NaN", "at": "infinity"})
    assert spark.read.format("delta").load(str(lake / "public.parts")).count() == 150
    assert spark.read.format("delta").load(str(lake / "public.nothing")).count() == 0

    # None of their rows is in the log. What the stream adds is newer than any of them.
    assert {message.topic() for message in events(made)} == {f"{config.prefix}.public.small"}
    daemon = made.start().wait_ready()
    made.database.execute("UPDATE big SET n = 1 WHERE id = 0")
    topic_of_big = f"{config.prefix}.public.big"
    wait_until(
        lambda: any(message.topic() == topic_of_big for message in events(made)), "the update"
    )
    [update] = [json.loads(m.value()) for m in events(made) if m.topic() == topic_of_big]
    assert update["op"] == "u"
    assert update["source"]["seq"] > max(row["_seq"] for row in rows)
    assert daemon.term() == 0

    # A late writer of generation 1: Delta itself skips its write, and it gets an error.
    version = big.version()
    with pytest.raises(GapError, match="not an older one"):
        write_late(spark, made, stumbling.plans[0])
    assert mirror(lake, "big").version() == version


def write_late(spark: SparkSession, made: PipelineUnderTest, plan: SnapshotPlan) -> None:
    """Write and record a group as the driver of this plan's generation would."""
    spark.dataSource.register(SnapshotSource)
    table = table_of(plan, "public.big")
    late = direct.MirrorCopy(spark, made.config, made.config_file, plan, table)
    group = direct.groups(table.ranges)[1]
    late.write(group)
    late.records(group, 0.0)


def events(made: PipelineUnderTest) -> list[Any]:
    """Return the records of all data topics."""
    config = made.config
    found = reader.read_resume(config)
    assert found is not None
    return list(read_to_end(config, found[0].partitions))
