"""The key of an event: the configuration's, or the primary key at that time, and never null."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.fixtures.converge import converge
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.witness import Record, data_records

ITEMS = "CREATE TABLE items (id int PRIMARY KEY, tenant int NOT NULL, sku text NOT NULL, n int)"
KEY: dict[str, Any] = {"public.items": {"key": ["tenant", "sku"]}}


def records(line: PipelineUnderTest, events: int) -> list[Record]:
    """Return the records of this many events by seq, each tombstone after its delete."""

    def found() -> list[Record]:
        return data_records(line)

    wait_until(lambda: sum(r.value is not None for r in found()) >= events, "the log lacks events")
    in_order: list[tuple[int, int, Record]] = []
    seq = 0
    for record in sorted(found(), key=lambda r: (r.topic, r.partition, r.offset)):
        seq = record.event["source"]["seq"] if record.value is not None else seq
        in_order.append((seq, record.value is None, record))
    return [record for _, _, record in sorted(in_order, key=lambda each: each[:2])]


def keys(line: PipelineUnderTest, events: int) -> list[Any]:
    return [r.key and orjson.loads(r.key) for r in records(line, events)]


def test_a_custom_key_holds_its_columns_in_its_order(pipeline: NewPipeline) -> None:
    """Also on a delete, though the columns are not part of the primary key."""
    line = pipeline(ITEMS, "ALTER TABLE items REPLICA IDENTITY FULL", tables=KEY)
    line.start().wait_ready()
    line.database.execute(
        "INSERT INTO items VALUES (1, 7, 'a', 0)",
        "UPDATE items SET n = 1",
        "UPDATE items SET id = 2",
        "UPDATE items SET sku = 'b'",
        "DELETE FROM items",
    )
    found = records(line, 6)
    assert [r.value and r.event["op"] for r in found] == ["c", "u", "u", "d", None, "c", "d", None]
    assert [r.key for r in found] == [b'{"tenant":7,"sku":"a"}'] * 5 + [
        b'{"tenant":7,"sku":"b"}'
    ] * 3


@pytest.mark.long("the other identities", sample=["FULL"])
@pytest.mark.parametrize("identity", ["DEFAULT", "FULL", "NOTHING"])
def test_what_an_index_only_includes_is_in_no_key(pipeline: NewPipeline, identity: str) -> None:
    line = pipeline(
        "CREATE TABLE held (id int, note text, PRIMARY KEY (id) INCLUDE (note))",
        f"ALTER TABLE held REPLICA IDENTITY {identity}",
    )
    line.start().wait_ready()
    line.database.execute("INSERT INTO held VALUES (1, 'a')")
    assert keys(line, 1) == [{"id": 1}]
    converge(line.config)


def test_a_custom_key_is_covered_by_an_index_as_well(pipeline: NewPipeline) -> None:
    line = pipeline(
        ITEMS,
        "CREATE UNIQUE INDEX by_sku ON items (sku, tenant)",
        "ALTER TABLE items REPLICA IDENTITY USING INDEX by_sku",
        tables=KEY,
    )
    line.start().wait_ready()
    line.database.execute("INSERT INTO items VALUES (1, 7, 'a', 0)", "DELETE FROM items")
    assert {r.key for r in records(line, 2)} == {b'{"tenant":7,"sku":"a"}'}


def test_a_key_that_a_delete_would_lack_is_an_error_and_never_null(pipeline: NewPipeline) -> None:
    line = pipeline(ITEMS, "ALTER TABLE items REPLICA IDENTITY FULL", tables=KEY)
    line.start().wait_ready()
    line.database.execute("INSERT INTO items VALUES (1, 7, 'a', 0)")
    records(line, 1)
    line.database.execute("ALTER TABLE items REPLICA IDENTITY DEFAULT", "DELETE FROM items")
    line.ends(line.daemon, 78, "has tenant, sku, which Postgres does not send", "REPLICA IDENTITY")
    assert len(data_records(line)) == 1


def test_a_key_of_inserts_only_needs_no_identity(pipeline: NewPipeline) -> None:
    line = pipeline(
        "CREATE TABLE hits (at int, path text)", tables={"public.hits": {"key": ["path"]}}
    )
    line.start().wait_ready()
    line.database.execute("INSERT INTO hits VALUES (1, '/')")
    assert keys(line, 1) == [{"path": "/"}]


@pytest.mark.long("tests/unit/test_relations.py has the rule")
@pytest.mark.parametrize("identity", ["FULL", "NOTHING"])
def test_a_lagging_reader_keeps_the_key_of_that_time(pipeline: NewPipeline, identity: str) -> None:
    """The primary key changes while no daemon reads: the catalog is newer than the stream."""
    line = pipeline(ITEMS, f"ALTER TABLE items REPLICA IDENTITY {identity}")
    line.start().wait_ready()
    line.database.execute("INSERT INTO items VALUES (1, 7, 'a', 0)")
    assert keys(line, 1) == [{"id": 1}]
    assert line.daemon.term() == 0
    line.database.execute(
        "INSERT INTO items VALUES (2, 7, 'b', 0)",
        "ALTER TABLE items DROP CONSTRAINT items_pkey, ADD PRIMARY KEY (sku), ADD COLUMN x int",
        "INSERT INTO items VALUES (3, 7, 'c', 0)",
    )
    line.start().wait_ready()
    assert keys(line, 3) == [{"id": 1}, {"id": 2}, {"sku": "c"}]


def test_each_row_has_the_key_of_its_time_where_the_stream_marks_it(pipeline: NewPipeline) -> None:
    line = pipeline(ITEMS)
    line.database.execute(
        "INSERT INTO items VALUES (1, 7, 'a', 0)",
        "ALTER TABLE items DROP CONSTRAINT items_pkey, ADD PRIMARY KEY (tenant, sku)",
        "INSERT INTO items VALUES (2, 7, 'b', 0)",
        "ALTER TABLE items DROP CONSTRAINT items_pkey, ADD PRIMARY KEY (id)",
        "INSERT INTO items VALUES (3, 7, 'c', 0)",
    )
    line.start().wait_ready()
    assert keys(line, 3) == [{"id": 1}, {"tenant": 7, "sku": "b"}, {"id": 3}]
