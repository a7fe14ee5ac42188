"""What tasks write of a large cut: files with complete statistics, and one commit of them."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from cdc.errors import ConfigError
from lockstep.conformance.store import CLICKS, USERS, applied, apply, change, key, row
from lockstep.jobs.apply import buckets as executors
from lockstep.jobs.apply import keyless
from lockstep.jobs.apply.cut_events import TableShare
from lockstep.jobs.cuts.reduce import Bounds
from lockstep.jobs.reading_as_of import read_as_of
from lockstep.sinks.contract import Change, Changes, Column
from lockstep.sinks.delta import buckets, keyless_buckets, log
from lockstep.sinks.delta.lake import ConflictError
from lockstep.sinks.delta.settings import DeltaSettings
from lockstep.sinks.delta.sink import DeltaSink
from lockstep.sinks.delta.targets import Piece

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MIRROR = "public.users"
HALVES = (range(1, 51), range(51, 101))


def opened(path: Path, **settings: Any) -> DeltaSink:  # noqa: ANN401 - any setting
    sink = DeltaSink(DeltaSettings("shop", "mirror", "shop", str(path), **settings))
    sink.open()
    return sink


def write(
    sink: DeltaSink, seq: int, *tasks: Sequence[Change], truncated: int | None = None
) -> None:
    """Write a cut of users by tasks, up to its commit."""
    sink.begin(seq, [USERS])
    target = sink.target([USERS], seq, truncated)
    assert target is not None
    found = [
        piece for each in tasks for piece in buckets.written(target, [Changes((USERS,), each)])
    ]
    found.sort(key=lambda piece: (piece.place, piece.path))
    marked = buckets.marked({target.place: target}, found)
    sink.stage(target, [json.loads(action) for _, action in marked])


def filled(path: Path) -> DeltaSink:
    """Return a sink whose mirror has rows 1 to 100, in a file of each task."""
    sink = opened(path)
    rows = [[change(USERS, n, row(USERS, n, n), n, op="c") for n in half] for half in HALVES]
    write(sink, 100, *rows)
    sink.commit(applied(100))
    return sink


def stats(path: Path) -> list[dict[str, Any]]:
    """Return the files' statistics, by the least id."""
    added = log.added(DeltaTable(path / MIRROR)).values()
    found = [json.loads(each["stats"]) for each in added]
    return sorted(found, key=lambda each: each["minValues"]["id"])


def test_statistics_stay_complete_where_rows_are_marked(tmp_path: Path) -> None:
    """Rows of a file that two tasks replace are in one deletion vector."""
    sink = filled(tmp_path)
    first, second = stats(tmp_path)
    changed = [change(USERS, 200 + n, row(USERS, 200 + n, n), n) for n in (3, 4)]
    deleted = [change(USERS, 210 + n, None, n) for n in (5, 50)]
    write(sink, 300, changed, deleted)
    sink.commit(applied(300))
    by_rows = sorted(stats(tmp_path), key=lambda each: each["numRecords"])
    new, marked, same = by_rows
    assert marked == first | {"tightBounds": False}
    assert same == second
    assert (new["numRecords"], new["minValues"]["id"], new["maxValues"]["id"]) == (2, 3, 4)
    assert new["nullCount"]["id"] == 0
    (vector,) = log.vectors(DeltaTable(tmp_path / MIRROR)).values()
    assert vector["cardinality"] == 4
    rows = {key: seq for key, seq, _ in sink.contents(USERS)}
    assert len(rows) == 98
    assert rows[key(USERS, 3)] == 203
    assert key(USERS, 5) not in rows


def test_a_file_without_remaining_rows_is_removed(tmp_path: Path) -> None:
    sink = filled(tmp_path)
    write(sink, 300, [change(USERS, 200 + n, None, n) for n in HALVES[0]])
    sink.commit(applied(300))
    assert [each["minValues"]["id"] for each in stats(tmp_path)] == [51]
    assert log.vectors(DeltaTable(tmp_path / MIRROR)) == {}


def test_a_truncate_removes_every_file_in_the_same_commit(tmp_path: Path) -> None:
    sink = filled(tmp_path)
    before = DeltaTable(tmp_path / MIRROR).version()
    write(sink, 300, [change(USERS, 250, row(USERS, 250, 7), 7, op="c")], truncated=240)
    assert len(list(sink.contents(USERS))) == 100
    sink.commit(applied(300))
    assert DeltaTable(tmp_path / MIRROR).version() == before + 1
    assert [key for key, *_ in sink.contents(USERS)] == [key(USERS, 7)]


def test_files_are_not_committed_onto_another_version(tmp_path: Path) -> None:
    """Their positions are those of the version that the tasks read."""
    sink = filled(tmp_path)
    write(sink, 300, [change(USERS, 203, None, 3)])
    table = DeltaTable(tmp_path / MIRROR)
    write_deltalake(table, pa.schema(table.schema()).empty_table(), mode="append")
    sink.rows(USERS, [key(USERS, 1)])  # it sees the new version
    with pytest.raises(ConflictError, match="has changed since"):
        sink.commit(applied(300))
    sink = opened(tmp_path)
    write(sink, 300, [change(USERS, 203, None, 3)])
    sink.commit(applied(300))
    assert len(list(sink.contents(USERS))) == 99


@pytest.mark.parametrize("kind", ["part-*.parquet", "deletion_vector_*.bin"])
def test_files_on_another_machine_are_not_committed(tmp_path: Path, kind: str) -> None:
    sink = filled(tmp_path)
    before = set((tmp_path / MIRROR).iterdir())
    write(sink, 300, [change(USERS, 203, row(USERS, 203, 3), 3)])
    (new,) = {*(tmp_path / MIRROR).glob(kind)} - before
    new.unlink()
    with pytest.raises(ConfigError, match="does not find the files that tasks wrote"):
        sink.commit(applied(300))


@pytest.mark.parametrize(
    "settings",
    [
        {"soft": True},
        {"applier": "delta-rs"},
        {"partition": {MIRROR: ["active"]}},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_tasks_do_not_write_is_for_the_driver(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    sink = opened(tmp_path, **settings)
    sink.begin(9, [USERS])
    assert sink.target([USERS], 9, None) is None
    other = USERS._replace(schema_id=7, key=("name",))
    assert sink.target([USERS, other], 9, None) is None


def test_tasks_write_a_history_if_its_truncates_are_known(tmp_path: Path) -> None:
    """Of a row with two keys in the log, as one of 0 and -0 has, one task needs both."""
    prices = USERS._replace(
        table="prices",
        topic="shop.public.prices",
        key=("at",),
        columns=(Column("at", "float8", 701, -1, nullable=False),),
    )
    sink = opened(tmp_path, history=frozenset({MIRROR, prices.name}))
    sink.begin(9, [USERS, prices])
    target = sink.target([USERS], 9, None)
    assert target is not None
    assert target.is_history
    assert not target.keys_vary
    assert sink.target([USERS], 9, 8) is None
    truncate = Change(None, 8, None, USERS.schema_id, 1, 1, op="t")
    ended = sink.target([USERS], 9, 8, [truncate])
    assert ended is not None
    assert not ended.replaces
    target = sink.target([prices], 9, None)
    assert target is not None
    assert target.keys_vary


def test_of_equal_rows_without_a_key_a_delete_takes_one(tmp_path: Path) -> None:
    """That no earlier one has taken."""
    sink = opened(tmp_path)
    click = orjson.dumps({"id": 1, "name": "c"})
    apply(sink, 3, Changes((CLICKS,), [clicked(seq, click, None) for seq in (1, 2, 3)]))
    for seq, left in ((4, 2), (5, 1), (6, 0), (7, 0)):
        sink.begin(seq, [CLICKS])
        target = sink.target([CLICKS], seq, None)
        assert target is not None
        deleted = Changes((CLICKS,), [clicked(seq, None, click)])
        halves = keyless_buckets.halves(target, deleted, {})
        share = TableShare(target, {CLICKS.schema_id: CLICKS}, None, 0)
        ((wanted, is_taken),) = keyless.resolved(share, halves)
        assert is_taken
        stored = [
            row
            for path in target.files
            for rows in keyless_buckets.hashed(target, path)
            for row in rows.to_pylist()
            if row.pop("id") == wanted.data
        ]
        pieces = [Piece(**row) for row in stored[: wanted.rows]]
        marked = buckets.marked({target.place: target}, pieces)
        sink.stage(target, [json.loads(action) for _, action in marked])
        sink.commit(applied(seq))
        assert len(list(sink.contents(CLICKS))) == left


def clicked(seq: int, new: bytes | None, old: bytes | None) -> Change:
    """Return a change of a row without a key."""
    op = "c" if old is None else "d"
    return Change(None, seq, new, CLICKS.schema_id, seq, seq, before=old, op=op)


def test_spark_reads_what_tasks_wrote(spark: SparkSession, tmp_path: Path) -> None:
    """And what small cuts wrote after them."""
    sink = filled(tmp_path)
    write(sink, 300, [change(USERS, 200 + n, None, n) for n in range(1, 90, 2)])
    sink.commit(applied(300))
    apply(sink, 400, Changes((USERS,), [change(USERS, 400, row(USERS, 400, 2), 2)]))
    read = read_as_of(spark, str(tmp_path), [MIRROR]).tables[MIRROR].select("id", "_seq").collect()
    expected = {n: n for n in range(1, 101) if n % 2 == 0 or n > 89} | {2: 400}
    assert dict(map(tuple, read)) == expected


def test_executors_complete_events_from_their_dead_letters(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The job as a follower runs it, with one event in the log and one that points to a letter."""
    large = row(USERS, 302, 7, body="z" * 100_000)
    event = changed(302, large)
    letter = zlib.compress(event)
    about = {"id": "L1", "reason": "size", "chunks": 1, "bytes": len(event)}
    about |= {"sha256": hashlib.sha256(event).hexdigest(), "columns": ["body"]}
    head = about | {"format": 1, "topic": USERS.topic, "key": None, "schema": "public"}
    head |= {
        "table": "users",
        "op": "u",
        "epoch": 1,
        "seq": 302,
        "commit_lsn": "0/16E",
        "ordinal": 1,
    }
    head |= {"committed_at_us": 1}
    pointing = changed(302, {"id": 7, "name": "n302"}, dead=about)
    events = spark.createDataFrame(
        [
            (USERS.topic, bytearray(key(USERS, 7)), bytearray(pointing)),
            (USERS.topic, bytearray(key(USERS, 6)), bytearray(changed(301, row(USERS, 301, 6)))),
        ],
        "topic string, key binary, value binary",
    )
    letters = spark.createDataFrame(
        [
            (n, bytearray(orjson.dumps({"id": "L1", "chunk": n})), bytearray(value))
            for n, value in enumerate((orjson.dumps(head), letter))
        ],
        "offset long, key binary, value binary",
    )
    sink = filled(tmp_path)
    sink.begin(400, [USERS])
    target = sink.target([USERS], 400, None)
    assert target is not None
    share = TableShare(target, {1: USERS}, None, 0)
    shares = {USERS.topic: share}
    found = executors.write(events, shares, Bounds(300, 400), letters)
    sink.stage(target, found[USERS.topic])
    sink.commit(applied(400))
    rows = {key: orjson.loads(text) for key, _, text in sink.contents(USERS)}
    assert len(rows) == 100
    assert rows[key(USERS, 7)] == large
    assert rows[key(USERS, 6)]["name"] == "n301"


def changed(seq: int, after: dict[str, Any], **more: object) -> bytes:
    """Return an update's event."""
    source = {"seq": seq, "commit_lsn": "0/16E", "ordinal": 1, "schema_id": 1, "ts_us": 1, **more}
    return orjson.dumps({"op": "u", "before": None, "after": after, "source": source})
