"""Spark's MERGE into mirrors, and Spark's readers of what the other appliers write."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest

from cdc.errors import ConfigError
from lockstep.conformance.store import USERS, applied, apply, change, key, row
from lockstep.jobs.reading_as_of import read_as_of, read_as_of_arrow
from lockstep.sinks.contract import Change, Changes
from lockstep.sinks.delta.settings import DeltaSettings
from lockstep.sinks.delta.sink import DeltaSink
from tests.property.test_delta_appliers import TABLES, opened, play_on

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
DELTA = ROOT / "docs" / "DELTA.md"


@pytest.mark.long("a minute of Spark; tests/property has the other appliers")
@pytest.mark.parametrize("table", TABLES)
def test_all_appliers_leave_the_same_rows(
    spark: SparkSession,
    tmp_path: Path,
    table: str,
) -> None:
    play_on(tmp_path, Random(7), TABLES[table], "delta-rs", "vectors", "spark", turns=4)


def test_spark_reads_several_mirrors_as_of_one_lsn(spark: SparkSession, tmp_path: Path) -> None:
    """Also one with deletion vectors that we wrote, a checkpoint, and a history."""
    sink = opened(tmp_path, "vectors")
    for seq in range(1, 8):
        rows = [change(USERS, seq, row(USERS, seq, n), n) for n in range(1, 4)]
        apply(sink, seq, Changes((USERS,), rows))
    sink.close()
    path = str(tmp_path / "vectors")
    for seq in (3, 7):
        lsn = applied(seq).lsn
        found = read_as_of(spark, path, ["public.users"], lsn=lsn)
        assert found.applied == applied(seq)
        read = found.tables["public.users"].select("id", "name", "_seq").collect()
        assert sorted(map(tuple, read)) == [(n, f"n{seq}", seq) for n in range(1, 4)]
    with pytest.raises(ConfigError, match="so old"):
        read_as_of(spark, path, ["public.users"], lsn="0/1")
    with pytest.raises(ConfigError, match="no mirror"):
        read_as_of(spark, path, ["public.orders"])


@pytest.mark.long("a minute of Spark; reading as of an LSN is in the first tier")
def test_one_query_returns_the_versions_of_all_mirrors_at_one_frontier(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The query of docs/DELTA.md, word for word but for the path: of full rows and partial ones."""
    (query,) = re.findall(r"```sql\n(WITH newest .*?)```", DELTA.read_text(), re.DOTALL)
    query = query.replace("/lake/shop", str(tmp_path))
    names = [f"t{number}" for number in range(5)]
    tables = {
        name: USERS._replace(schema_id=at, table=name, topic=f"shop.public.{name}")
        for at, name in enumerate(names, 10)
    }
    sink = DeltaSink(DeltaSettings("shop", "mirror", "shop", str(tmp_path)))
    sink.open()
    # All change: a full row; one and two: partial rows; none; all again.
    for seq, some in enumerate((names, names[:1], names[3:4], [], names), 1):
        rows = [(tables[each], [change(tables[each], seq, row(USERS, seq, 1), 1)]) for each in some]
        apply(sink, seq, *(Changes((version,), its) for version, its in rows))
        found = spark.sql(query).collect()
        stored = spark.read.format("delta").load(str(tmp_path / "_frontiers"))
        assert stored.where(f"seq = {seq} AND versions IS NULL").count() == (1 < seq < 5)
        assert {each.lsn for each in found} == {int(applied(seq).lsn)}
        assert sorted(each.mirror for each in found) == [f"public.{name}" for name in names]
        expected = read_as_of_arrow(str(tmp_path), [f"public.{name}" for name in names]).tables
        every = (
            f"SELECT '{each.mirror}', id, _seq FROM delta.`{tmp_path / each.mirror}`"
            f" VERSION AS OF {each.version}"
            for each in found
        )
        read = spark.sql(" UNION ALL ".join(every)).collect()
        same = {(name, 1, rows["_seq"][0].as_py()) for name, rows in expected.items()}
        assert set(map(tuple, read)) == same
    sink.close()


def test_names_that_parquet_refuses_are_mapped(spark: SparkSession, tmp_path: Path) -> None:
    """So is a column that is added later: Spark reads both."""
    name = USERS.columns[1]._replace(name="a name, {odd}")
    version = USERS._replace(columns=(USERS.columns[0], name))
    wider = version._replace(schema_id=9, columns=(*version.columns, name._replace(name="b b")))
    sink = DeltaSink(DeltaSettings("shop", "mirror", "shop", str(tmp_path)))
    sink.open()

    def cut(seq: int, at: int, **values: object) -> None:
        reported = msgspec.json.encode({"id": at, **values})
        version_ = wider if "b b" in values else version
        new = Change(key(USERS, at), seq, reported, version_.schema_id, 1, seq)
        apply(sink, seq, Changes((version_,), [new]))

    cut(1, 1, **{"a name, {odd}": "x"})
    cut(2, 2, **{"a name, {odd}": "y", "b b": "z"})
    cut(3, 1, **{"a name, {odd}": "w", "b b": None})
    sink.close()
    read = read_as_of(spark, str(tmp_path), ["public.users"]).tables["public.users"]
    rows = read.select("id", "`a name, {odd}`", "`b b`").collect()
    assert sorted(map(tuple, rows)) == [(1, "w", None), (2, "y", "z")]


_READER = """\
import json, sys
from pyspark.sql import SparkSession
from lockstep.jobs import reading_as_of

path, how = sys.argv[1:3]
if how == "ours":
    spark = reading_as_of.session()
else:
    builder = SparkSession.Builder().master("local[1]")
    for name, value in json.loads(sys.argv[3]).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
table = reading_as_of.read_as_of(spark, path, ["public.users"], lsn=sys.argv[4]).tables
print("rows", table["public.users"].count())
"""


@pytest.mark.long("starts Spark once more; reading as of an LSN is in the first tier")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["ours", "settings"])
def test_a_process_of_its_own_reads_as_of_an_lsn(tmp_path: Path, how: str) -> None:
    """With our session, and with one that has only the settings that the commands print."""
    sink = opened(tmp_path, "vectors")
    for seq in range(1, 4):
        rows = [change(USERS, seq, row(USERS, seq, n), n) for n in range(1, 4)]
        apply(sink, seq, Changes((USERS,), rows))
    sink.close()

    def printed(*given: str) -> str:
        command = [sys.executable, "-m", "cdc.cli.main", "spark", *given]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    conf = json.loads(printed("conf", "--json"))
    conf |= {"spark.jars": printed("jars").strip(), "spark.ui.enabled": "false"}
    # Less work for a busy machine; this does not affect what is read.
    conf |= {"spark.databricks.delta.snapshotPartitions": "1", "spark.sql.shuffle.partitions": "1"}
    conf |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    given = [str(tmp_path / "vectors"), how, json.dumps(conf), str(applied(2).lsn)]
    done = subprocess.run(
        [sys.executable, "-c", _READER, *given],
        capture_output=True, text=True, check=False, cwd=ROOT, timeout=600,
    )  # fmt: skip
    assert "rows 3" in done.stdout, done.stderr[-2_000:]
