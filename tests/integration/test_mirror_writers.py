"""Mirrors filled by the tasks that read the rows: the same as by Spark's own writer, and once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from pyspark import TaskContext, cloudpickle
from pyspark.sql.pandas.types import from_arrow_schema

from cdc.errors import ConfigError
from lockstep.jobs.copying.mirror_writers import ByTasks, MirrorRows
from lockstep.sinks.delta import layout as delta_layout
from lockstep.sinks.delta import parts
from lockstep.sinks.delta.lake import CommitInfo

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MANY = 60
FIRST = datetime(2024, 1, 1, tzinfo=UTC)
LAST = datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _readers_travel_complete() -> Iterator[None]:
    """Tasks get this module's readers by value: they can't import it."""
    here = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(here)  # type: ignore[no-untyped-call]
    yield
    cloudpickle.unregister_pickle_by_value(here)  # type: ignore[no-untyped-call]


class Reader:
    """Yields each partition's rows, in batches of ten."""

    def __init__(self, shares: list[pa.Table]) -> None:
        self.shares = shares

    def partitions(self) -> list[int]:
        return list(range(len(self.shares)))

    def read(self, partition: int) -> Iterator[pa.RecordBatch]:
        yield from self.shares[partition].to_batches(10)


class Killed(Reader):
    """Its first attempts are killed after they have written a file and started another."""

    def read(self, partition: int) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        for number, batch in enumerate(super().read(partition)):
            if context.attemptNumber() == 0:
                # In the process that is killed.
                parts.GROUP_BYTES = parts.FILE_BYTES = 1  # type: ignore[misc]
                if number == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
            yield batch


def rows_of(*shares: pa.Table, replaces: bool = True, kind: type[Reader] = Reader) -> MirrorRows:
    schema = from_arrow_schema(shares[0].schema)
    return MirrorRows(None, schema, kind(list(shares)), replaces)  # type: ignore[arg-type]


def output(number: int) -> CommitInfo:
    return CommitInfo("snapshot-test", number, {"group": number})


def every_type(first: int) -> pa.Table:
    """Return rows of each type that a mirror has, with its extreme values and NULLs."""
    numbers = range(first, first + MANY)
    times = [FIRST + timedelta(microseconds=7 * n) for n in numbers]
    ends = [LAST, datetime(1, 1, 1, tzinfo=UTC), *[FIRST] * (MANY - 2)]
    days = [date(1, 1, 1), date(9999, 12, 31), *[date(2024, 2, 29)] * (MANY - 2)]
    columns: dict[str, tuple[pa.DataType, list[Any]]] = {
        "text": (pa.string(), [f"{n:05}{'x' * 40}" for n in numbers]),
        "short": (pa.int16(), [-(2**15), *[1] * (MANY - 1)]),
        "price": (pa.decimal128(12, 2), [Decimal(n) / 4 for n in numbers]),
        "large": (pa.decimal128(38, 3), [Decimal(n - 10**34) for n in numbers]),
        "seen": (pa.timestamp("us", "UTC"), times),
        "odd_time": (pa.timestamp("us", "UTC"), ends),
        "local": (pa.timestamp("us"), [each.replace(tzinfo=None) for each in times]),
        "day": (pa.date32(), days),
        "real": (pa.float32(), [n / 4 for n in numbers]),
        "odd": (pa.float64(), [float("nan"), float("inf"), -0.0, *map(float, numbers[3:])]),
        "is_so": (pa.bool_(), [n % 2 == 0 for n in numbers]),
        "raw": (pa.binary(), [b"\x00\xff" * (n % 3) for n in numbers]),
        "list": (pa.list_(pa.int32()), [[n, None] if n % 2 else [] for n in numbers]),
        "exact": (pa.map_(pa.string(), pa.string()), [[("day", "infinity")], *[None] * (MANY - 1)]),
        "none": (pa.string(), [None] * MANY),
    }  # fmt: skip
    made = {name: pa.array([*given[:-1], None], kind) for name, (kind, given) in columns.items()}
    return pa.table({"id": pa.array(numbers, pa.int64()), **made})


def as_rows(table: pa.Table) -> list[str]:
    return sorted(map(repr, table.to_pylist()))


def loaded(spark: SparkSession, path: Path) -> DataFrame:
    return spark.read.format("delta").load(str(path))


def test_rows_are_the_same_as_by_spark_and_files_are_passed_over(
    spark: SparkSession, tmp_path: Path
) -> None:
    shares = [every_type(1), every_type(1001)]
    complete = pa.concat_tables(shares)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ByTasks(spark, str(ours), {}).write(rows_of(*shares), output(0))
    spark.createDataFrame(complete, from_arrow_schema(complete.schema)).write.format("delta").save(
        str(theirs)
    )
    assert loaded(spark, ours).schema == loaded(spark, theirs).schema
    assert DeltaTable(ours).schema().to_json() == DeltaTable(theirs).schema().to_json()
    assert as_rows(loaded(spark, ours).toArrow()) == as_rows(loaded(spark, theirs).toArrow())
    assert as_rows(DeltaTable(ours).to_pyarrow_table()) == as_rows(complete)

    # A query for rows of one file does not open the other, which is deleted.
    files = pa.table(DeltaTable(ours).get_add_actions(flatten=True)).to_pylist()
    assert {each["min.id"]: each["num_records"] for each in files} == {1: MANY, 1001: MANY}
    [deleted] = [each["path"] for each in files if each["min.id"] == 1001]
    (ours / deleted).unlink()
    for where, many in {
        "id < 1000": MANY,
        "text < '00050'": 49,
        "price < 10": 39,
        "real < 10": 39,
        "seen < timestamp '2024-01-01 00:00:00.003'": MANY - 1,
        "local < timestamp_ntz '2024-01-01 00:00:00.003'": MANY - 1,
        f"large < -{10**34 - 10}": 9,
        "day = '2024-02-29' AND id = 10": 1,
    }.items():
        assert loaded(spark, ours).where(where).count() == many, where
    query = "SELECT id FROM t WHERE id < 1000 AND text < '00050' AND price < 10"
    found = QueryBuilder().register("t", DeltaTable(ours)).execute(query).read_all()
    assert pa.table(found).num_rows == 39


def test_a_killed_tasks_rows_are_there_once(spark: SparkSession, tmp_path: Path) -> None:
    """Its files are in no commit: a vacuum deletes them."""
    shares = [every_type(1), every_type(1001)]
    ByTasks(spark, str(tmp_path), {}).write(rows_of(*shares, kind=Killed), output(0))
    table = DeltaTable(tmp_path)
    assert sorted(table.to_pyarrow_table()["id"].to_pylist()) == [
        *range(1, 1 + MANY),
        *range(1001, 1001 + MANY),
    ]
    there = {each.name for each in tmp_path.glob("*.parquet")}
    named = {Path(each).name for each in table.file_uris()}
    assert named < there
    rubbish = table.vacuum(0, dry_run=True, enforce_retention_duration=False, full=True)
    assert set(rubbish) == there - named


def test_a_commit_creates_the_version_after_the_one_that_it_read(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two writers of a group, the second finds it done; an older generation adds nothing."""
    shares = [every_type(1)]
    mirror = ByTasks(spark, str(tmp_path), {})
    plain = shares[0].select(["id", "text"])
    write_deltalake(tmp_path, plain, mode="error")
    DeltaTable(tmp_path).delete("id = 3")
    commit = mirror.commit
    meanwhile: list[Callable[[], None]] = [
        lambda: mirror.write(rows_of(*shares), output(5)),
        lambda: write_deltalake(tmp_path, plain, mode="append"),
    ]

    def late(*given: Any) -> None:  # noqa: ANN401
        if meanwhile:
            meanwhile.pop()()
        commit(*given)

    monkeypatch.setattr(mirror, "commit", late)
    # Group 4 is read, another writer appends, then a newer generation replaces everything.
    mirror.write(rows_of(*shares), output(4))
    assert not meanwhile
    # The schema changed, and with it the features that readers must support.
    assert {"timestampNtz"} <= set(DeltaTable(tmp_path).protocol().reader_features or ())
    assert loaded(spark, tmp_path).count() == MANY
    version = DeltaTable(tmp_path).version()
    for old in (4, 5):
        mirror.write(rows_of(*shares, replaces=old == 4), output(old))
    assert DeltaTable(tmp_path).version() == version
    reported = [delta_layout.facts(each) for each, _ in mirror.commits()]
    assert [each["group"] for each in reported if each] == [5]
    mirror.write(rows_of(*shares, replaces=False), output(6))
    assert loaded(spark, tmp_path).count() == 2 * MANY
    elsewhere = [replace(part, path="elsewhere") for part in mirror.write_files(rows_of(*shares))]
    with pytest.raises(ConfigError, match="does not find the files"):
        commit(DeltaTable(tmp_path), rows_of(*shares), elsewhere, output(7))
    [metrics] = [dict(each) for text, each in mirror.commits() if '"group": 6' in (text or "")]
    assert metrics["numOutputRows"] == str(MANY)
    history = loaded(spark, tmp_path).sparkSession.sql(f"DESCRIBE HISTORY delta.`{tmp_path}`")
    assert history.first()["operationMetrics"]["numOutputRows"] == str(MANY)  # type: ignore[index]
