"""Every value of every type, from Postgres' own bytes through the log's forms into OpenSearch."""

from __future__ import annotations

from typing import Any

import msgspec

from cdc.config.value_options import Values
from lockstep.conformance.store import apply
from lockstep.jobs.cuts.schemas import version
from lockstep.sinks.contract import Change, Changes, Column, Version
from tests.fixtures.decoded import Decoded
from tests.fixtures.store_opensearch import OpenSearchStore
from tests.integration.test_values_types import OPTIONS, fill
from tests.integration.value_table import VALUES
from tests.property.stream import Session, position

# The options that change what a field has to hold.
CHOICES = tuple(OPTIONS[n] for n in (0, 1, 2, 4, 5, 7, 8))

Raws = dict[str, msgspec.Raw]


class _Event(msgspec.Struct):
    after: Raws | None


def wide(frames: list[bytes], options: Values, schema_id: int) -> tuple[Version, list[bytes]]:
    """Return one table with each table's columns side by side, and rows of their values."""
    session = Session(position(), {}, values=options)
    session.feed(frames)
    columns, rows = [Column("id", "int4", 23, -1, nullable=False)], list[Raws]()
    at: dict[str, int] = {}
    for each in map(version, session.new_versions):
        columns += [c._replace(name=f"{each.table}_{c.name}") for c in each.columns[1:]]
        values = each.values
    for event in session.waiting():
        row = msgspec.json.decode(event.value or b"null", type=_Event).after
        assert row is not None
        table = event.topic.rpartition(".")[2]
        at[table] = at.get(table, 0) + 1
        if len(rows) < at[table]:
            rows.append({"id": msgspec.Raw(b"%d" % len(rows))})
        for name in ("v", "a"):
            rows[at[table] - 1][f"{table}_{name}"] = row[name]
    made = Version(schema_id, "public", f"w{schema_id}", "x", ("id",), tuple(columns), values)
    return made, [msgspec.json.encode(row) for row in rows]


def test_every_value_of_every_type_is_in_its_document_and_none_is_refused(
    decoded: Decoded, opensearch_store: OpenSearchStore
) -> None:
    """Byte for byte under every option, and searchable by value."""
    decoded.sql.execute('CREATE SCHEMA other CREATE TABLE "odd.Table" (id int)')
    decoded.sql.execute("CREATE TYPE other.\"Odd\" AS ENUM ('x')")
    decoded.sql.execute("CREATE TYPE other.mood AS ENUM ('glad', 'so, so')")
    decoded.sql.execute("CREATE TYPE other.pair AS (a int, b text)")
    decoded.sql.execute("CREATE DOMAIN other.small AS numeric(5,2)")
    values = VALUES | {
        "other.mood": ("glad", "so, so"),
        "other.pair": ('(1,"a,b")',),
        "other.small": ("1.50",),
    }
    tables = {kind: f"t{i}" for i, kind in enumerate(values)}
    for kind, table in tables.items():
        fill(decoded, f"public.{table}", kind, values[kind])
    frames = decoded.frames()
    for number, options in enumerate(CHOICES, 1):
        made, rows = wide(frames, options, number)
        sink = opensearch_store.sink()
        sink.open()
        changes = [
            Change(b'{"id":%d}' % at, 100 * number + at, row, number, 1, 1)
            for at, row in enumerate(rows)
        ]
        assert apply(sink, 100 * number + 99, Changes((made,), changes)) == len(rows)
        sink.close()
        assert opensearch_store.letters() == {}
        found = opensearch_store.sources(made.name)
        assert found == {str(at): row for at, row in enumerate(rows)}
        if number == 1:
            _search(opensearch_store, made, rows, tables)


def _search(
    store: OpenSearchStore, made: Version, rows: list[bytes], tables: dict[str, str]
) -> None:
    """Find values in their natural type, and exactly."""

    def found(kind: str, query: dict[str, Any], field: str = "", which: str = "v") -> list[Any]:
        name = f"{tables[kind]}_{which}"
        ((how, what),) = query.items()
        hits = store.hits(made.name, {how: {f"{name}{field}": what}})
        return sorted((hit["_source"][name] for hit in hits.values()), key=str)

    assert found("bigint", {"term": 9007199254740993}) == [9007199254740993]
    assert found("double precision", {"range": {"gt": 50, "lt": 200}}) == [100.0]
    assert found("double precision", {"term": "NaN"}, ".exact") == ["NaN"]
    assert found("numeric", {"range": {"gt": 10, "lt": 11}}) == ["10.1111"]
    assert found("numeric", {"term": "12300"}, ".exact") == ["12300"]
    assert found("numeric(6,4)", {"range": {"gte": "22.22", "lte": "22.22"}}) == ["22.2200"]
    assert found("numeric(6,4)", {"term": "NaN"}, ".exact") == ["NaN"]
    assert found("date", {"range": {"lt": -1000}}) == [-141438, -719162]
    assert found("date", {"term": "0044-03-15 BC"}, ".exact") == ["0044-03-15 BC"]
    [early, late] = [found("timestamp(0)", {"range": r}) for r in ({"lt": "2000"}, {"gt": "2000"})]
    assert (early, late) == ([], [1478267491000])
    day = {"range": {"gte": "2026-01-02", "lt": "2026-01-03"}}
    assert found("timestamptz", day) == ["2026-01-02T03:04:05.123456Z"]
    assert found("timestamptz", {"term": "infinity"}, ".exact") == ["infinity"]
    assert found("boolean", {"term": True}) == [True]
    assert found("text", {"match": "break"}) == ["line\nbreak\t\x01\x7f"]
    assert found("text", {"term": "null"}, ".exact") == ["null"]
    assert found("inet", {"term": "192.168.0.0/16"}) == ["192.168.0.1"]
    assert found("inet", {"term": "192.168.0.1/24"}, ".exact") == ["192.168.0.1/24"]
    assert found("uuid", {"prefix": "a0eebc99"}) == ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"]
    assert found("other.mood", {"term": "so, so"}) == ["so, so"]
    assert found("int4range", {"term": "[1,5)"}) == ["[1,5)"]
    assert len(rows) > 10
