"""The Spark data source `lockstep`: rows of the log between two frontiers, all or none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import TopicPartition
from pyspark.sql.types import StructType

import lockstep
from cdc.errors import GapError
from cdc.events import LSN
from cdc.log import names, reader, topics
from lockstep.jobs.cuts import frontiers
from lockstep.jobs.spark.changes_source import Planner, SourceOptions, StreamReader, wanted
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, patiently, wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TABLES = (
    "CREATE TABLE orders (id int PRIMARY KEY, customer text, amount numeric(12,2), note text)",
    "ALTER TABLE orders REPLICA IDENTITY FULL",
    "ALTER TABLE orders ALTER note SET STORAGE EXTERNAL",
    "CREATE TABLE days (at date PRIMARY KEY, many bigint)",
    "CREATE TABLE clicks (id int, name text)",
)


@pytest.fixture
def line(pipeline: NewPipeline) -> PipelineUnderTest:
    made = pipeline(*TABLES)
    made.start().wait_ready()
    return made


def in_log(line: PipelineUnderTest) -> LSN:
    """Return a frontier's LSN, up to which everything committed is in the log."""
    lsn = LSN.parse(line.query("SELECT pg_current_wal_insert_lsn()::text")[0])
    line.database.execute("SELECT pg_logical_emit_message(true, 'mark', 'x')")

    def newest() -> LSN:
        tail = patiently(lambda: reader.read_frontier_tail(line.config, 1))
        return tail[-1][0].lsn if tail else LSN(0)

    wait_until(lambda: newest() >= lsn, "the frontier has not come")
    return newest()


def read(
    spark: SparkSession,
    line: PipelineUnderTest,
    *tables: str,
    **how: Any,  # noqa: ANN401 - as of `changes`
) -> list[dict[str, Any]]:
    frame = lockstep.changes(spark, line.config_file, tables, **how)
    return [row.asDict(recursive=True) for row in frame.orderBy("seq").collect()]


def test_rows_have_the_types_of_their_table_and_nothing_is_left_out(
    spark: SparkSession, line: PipelineUnderTest
) -> None:
    line.database.execute(
        "INSERT INTO orders VALUES (1, 'ada', 12.50, 'x'), (2, 'bob', 'NaN', NULL)",
        "UPDATE orders SET amount = 13 WHERE id = 1",
        "DELETE FROM orders WHERE id = 2",
        "INSERT INTO days VALUES ('2026-01-02', 9007199254740993), ('infinity', 1)",
        "TRUNCATE days",
    )
    in_log(line)
    rows = read(spark, line, "public.orders")
    assert [row["op"] for row in rows] == ["c", "c", "u", "d"]
    first, odd, update, delete = rows
    assert first["key"] == {"id": 1}
    assert (first["table"], first["after"]["customer"]) == ("public.orders", "ada")
    assert str(first["after"]["amount"]) == "12.50"
    assert first["before"] is None
    assert odd["after"]["amount"] is None
    assert dict(odd["after"]["_exact"]) == {"amount": "NaN"}
    assert (str(update["before"]["amount"]), str(update["after"]["amount"])) == ("12.50", "13.00")
    assert delete["after"] is None
    assert delete["before"]["customer"] == "bob"
    assert len({row["frontier"] for row in rows}) == 1
    assert rows[-1]["frontier"] >= rows[-1]["seq"]
    days = read(spark, line, "public.days")
    assert [row["op"] for row in days] == ["c", "c", "t"]
    assert days[0]["after"]["many"] == 9007199254740993
    assert dict(days[1]["key"]["_exact"]) == {"at": "infinity"}
    assert days[2]["key"] is None


def test_several_tables_are_json_as_in_the_log(
    spark: SparkSession, line: PipelineUnderTest
) -> None:
    line.database.execute(
        "INSERT INTO orders VALUES (1, 'ada', 12.50, 'x')", "INSERT INTO clicks VALUES (1, 'c')"
    )
    in_log(line)
    rows = read(spark, line)
    assert [row["table"] for row in rows] == ["public.orders", "public.clicks"]
    assert json.loads(rows[0]["after"])["amount"] == "12.50"
    assert rows[1]["key"] is None


def test_ranges_between_frontiers_join_without_gap_or_overlap(
    spark: SparkSession, line: PipelineUnderTest
) -> None:
    marks = []
    for number in range(4):
        line.database.execute(f"INSERT INTO orders VALUES ({number}, 'c', {number}, NULL)")
        marks.append(in_log(line))
    seqs = [row["seq"] for row in read(spark, line, "public.orders")]
    bounds: list[str | LSN] = ["beginning", *marks, "latest"]
    parts = [
        row["seq"]
        for start, end in pairwise(bounds)
        for row in read(spark, line, "public.orders", start=start, end=end)
    ]
    assert parts == seqs
    frontier = read(spark, line, "public.orders", end=marks[1])[0]["frontier"]
    after = read(spark, line, "public.orders", start=frontier)
    assert [row["seq"] for row in after] == seqs[2:]


def test_net_changes_have_each_key_once_with_values_that_were_not_sent(
    spark: SparkSession, line: PipelineUnderTest
) -> None:
    long = "'" + "x" * 9_000 + "'"
    line.database.execute(
        "ALTER TABLE orders REPLICA IDENTITY DEFAULT",
        f"INSERT INTO orders SELECT g, 'c', g, {long} FROM generate_series(1, 60) g",
        "UPDATE orders SET amount = amount + 1",
        "DELETE FROM orders WHERE id > 50",
    )
    in_log(line)
    middle = read(spark, line, "public.orders")[-1]["frontier"]
    rows = read(spark, line, "public.orders", net=True)
    assert len(rows) == 60
    kept = [row for row in rows if row["op"] == "u"]
    assert len(kept) == 50
    assert all(len(row["after"]["note"]) == 9_000 and not row["unchanged"] for row in kept)
    line.database.execute("UPDATE orders SET amount = 0 WHERE id = 1")
    in_log(line)
    (late,) = read(spark, line, "public.orders", net=True, start=middle)
    assert late["unchanged"] == ["note"]
    assert late["after"]["note"] is None
    line.database.execute("TRUNCATE orders", "INSERT INTO orders VALUES (7, 'n', 1, NULL)")
    in_log(line)
    assert [row["op"] for row in read(spark, line, "public.orders", net=True)] == ["t", "c"]


def test_columns_that_only_an_older_version_has_are_kept(
    spark: SparkSession, line: PipelineUnderTest
) -> None:
    line.database.execute(
        "INSERT INTO orders VALUES (1, 'ada', 1, 'old')",
        "ALTER TABLE orders DROP note",
        "ALTER TABLE orders ADD place point",
        "INSERT INTO orders VALUES (2, 'bob', 2, '(1,2)')",
    )
    in_log(line)
    old, new = read(spark, line, "public.orders")
    assert (old["after"]["note"], old["after"]["place"]) == ("old", None)
    assert (new["after"]["note"], new["after"]["place"]) == (None, "(1,2)")


def test_no_row_of_a_range_that_lost_records_is_returned(
    spark: SparkSession, line: PipelineUnderTest
) -> None:
    line.database.execute(
        "INSERT INTO orders SELECT g, 'c', g, '' FROM generate_series(1, 99) g",
        "INSERT INTO days VALUES ('2026-01-02', 1)",
    )
    in_log(line)
    topic = names.data_topic(line.config.prefix, "public", "orders")
    client = topics.admin(line.config)
    for done in client.delete_records([TopicPartition(topic, 0, 5)]).values():
        done.result(timeout=30)
    with pytest.raises(Exception, match=r"holds \d+ events .*: 0 to 4 are deleted"):
        read(spark, line, "public.orders")
    assert len(read(spark, line, "public.days")) == 1, "other tables can be read"


def test_a_range_whose_last_frontier_is_missing_is_not_returned(line: PipelineUnderTest) -> None:
    """A topic that was created again has other offsets: here, those of transactions' markers."""
    for number in range(3):
        line.database.execute(f"INSERT INTO days VALUES (date '2026-01-01' + {number}, 1)")
        in_log(line)
    asked, _ = wanted({"config": str(line.config_file)})
    start = frontiers.find(line.config, frontiers.BEGINNING)
    topic = names.frontier_topic(line.config.prefix)
    offsets = [each.offset() or 0 for each in reader.read_if_there(line.config, topic)]
    markers = sorted(set(range(offsets[-1])) - set(offsets))
    for missing in (markers[0], markers[-1]):
        with closing(Planner(asked, start)) as planner:
            expected = rf"no frontier at offset {missing}, .* after seq \d+ end"
            with pytest.raises(GapError, match=expected):
                planner.batch(1_000, missing + 1)
    with closing(Planner(asked, start)) as planner:
        assert planner.batch(1_000, offsets[0] + 1).cuts[-1].place == offsets[0] + 1


def test_a_checkpoint_of_another_log_is_refused(line: PipelineUnderTest) -> None:
    """Its seq may be a frontier of this log, too: the events up to there would be missing."""
    offsets = list[dict[str, Any]]()
    for number in range(2):
        line.database.execute(f"INSERT INTO days VALUES (date '2026-02-01' + {number}, 1)")
        in_log(line)
        found = frontiers.find(line.config, frontiers.LATEST)
        fields = {"place": found.place, "epoch": found.epoch, "lsn": str(found.lsn)}
        offsets.append({**fields, "seq": found.seq})
    start, end = offsets
    asked, _ = wanted({"config": str(line.config_file)})
    with closing_stream(asked) as stream:
        assert stream.partitions(start, end)
    for other in ({"lsn": "0/1"}, {"epoch": start["epoch"] + 1}):
        with (
            closing_stream(asked) as stream,
            pytest.raises(GapError, match="the stream's checkpoint is at") as refused,
        ):
            stream.partitions({**start, **other}, end)
        assert "it read another log" in refused.value.hint


@contextmanager
def closing_stream(asked: SourceOptions) -> Iterator[StreamReader]:
    stream = StreamReader(asked, StructType(), lambda _, error: error)
    try:
        yield stream
    finally:
        stream.stop()


@pytest.mark.long("other positions that it lacks", sample=["seq"])
@pytest.mark.parametrize(
    ("how", "says"),
    [
        pytest.param({"end": "yesterday"}, "names no position", id="text"),
        pytest.param({"start": 1_000_000_000}, "is no frontier", id="seq"),
        pytest.param({"start": LSN(1)}, "no frontier up to", id="lsn"),
        pytest.param({"end": "2026-01-01T00:00:00"}, "names no position", id="time"),
    ],
)
def test_a_position_that_the_log_lacks_is_refused_with_what_there_is(
    spark: SparkSession, line: PipelineUnderTest, how: dict[str, Any], says: str
) -> None:
    line.database.execute("INSERT INTO orders VALUES (1, 'ada', 1, '')")
    in_log(line)
    with pytest.raises(Exception, match=says):
        read(spark, line, "public.orders", **how)
    with pytest.raises(Exception, match=r"has no table public\.none"):
        read(spark, line, "public.none")


class Batches:
    """A store of a stream's batches, which notes each batch's frontier."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []
        self.fail_at = -1

    def take(self, frame: DataFrame, number: int) -> None:
        found = [(row.seq, row.frontier) for row in frame.orderBy("seq").collect()]
        if number == self.fail_at:
            raise RuntimeError("killed")
        self.rows += found


def test_a_stream_continues_from_its_checkpoint_and_from_a_frontier(
    spark: SparkSession, line: PipelineUnderTest, tmp_path: Path
) -> None:
    def run(store: Batches, start: str | int, checkpoint: str) -> None:
        frame = lockstep.follow_changes(spark, line.config_file, ["public.orders"], start=start)
        query = (
            frame.writeStream.foreachBatch(store.take)
            .option("checkpointLocation", str(tmp_path / checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    def insert(first: int) -> None:
        line.database.execute(
            f"INSERT INTO orders SELECT g, 'c', g, '' FROM generate_series({first}, {first + 9}) g"
        )
        in_log(line)

    insert(1)
    store = Batches()
    run(store, "beginning", "one")
    assert len(store.rows) == 10
    insert(20)
    store.fail_at = 1
    with pytest.raises(Exception, match="killed"):
        run(store, "beginning", "one")
    insert(40)
    store.fail_at = -1
    run(store, "beginning", "one")
    seqs = [seq for seq, _ in store.rows]
    assert seqs == sorted(set(seqs))
    assert len(seqs) == 30
    frontier = store.rows[9][1]
    again = Batches()
    run(again, frontier, "two")
    assert [seq for seq, _ in again.rows] == seqs[10:]


def test_frontiers_are_found_by_every_kind_of_position(line: PipelineUnderTest) -> None:
    for number in range(100):
        line.database.execute(f"INSERT INTO days VALUES (date '2026-01-01' + {number}, 1)")
        if number % 4 == 0:
            in_log(line)  # a frontier more, however large batches are
    in_log(line)
    records = line.frontiers()
    assert len(records) > 20
    for record in records[:: max(1, len(records) // 17)]:
        by_seq = frontiers.find(line.config, record.seq)
        assert by_seq.seq == record.seq
        assert by_seq.lsn >= record.lsn  # a later one may have a new LSN and nothing else
        by_lsn = frontiers.find(line.config, record.lsn)
        assert by_lsn.lsn == record.lsn
        assert by_lsn.seq >= record.seq
    newest = frontiers.find(line.config, "latest")
    assert newest.seq >= records[-1].seq
    ends = {(t, n): end for r in records for t, n, end, _ in r.partitions}
    found = frontiers.find(line.config, records[-1].seq).end_of
    data = names.data_topic(line.config.prefix, "public", "days")
    assert {k: v for k, v in found.items() if k[0] == data} == {
        k: v for k, v in ends.items() if k[0] == data
    }
