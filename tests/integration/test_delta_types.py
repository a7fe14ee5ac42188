"""Every type's values from a real server into a mirror's Arrow batches and back, without loss."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from msgspec.structs import replace
from psycopg import sql
from pyspark.sql.pandas.types import to_arrow_schema

from cdc.config import Config, Log, Source
from cdc.config.keyring import KeyringConfig
from cdc.encode.masks import ColumnMask
from cdc.errors import ConfigError, RewrittenError
from cdc.events import LSN
from cdc.keyring import file
from cdc.keyring.opening import ciphers_of
from cdc.log.records import SchemaRecord
from cdc.snapshot.initial.records import SnapshotTable
from cdc.source.connection import connect
from cdc.source.described import DescribedTable, describe_tables
from lockstep.jobs.copying.data_source import CopiedTable, Ranges, SnapshotReader, spark_schema
from lockstep.sinks.delta import layout as delta_layout
from lockstep.sinks.delta.types import DeltaType, TypeKind
from tests.fixtures.decoded import Decoded
from tests.fixtures.servers import Database
from tests.integration.test_values_types import fill
from tests.integration.value_table import VALUES

TAKEN_AT = 1_700_000_000_123_456


class Mirror:
    """A table as the data source returns it, read in this process without Spark."""

    def __init__(
        self, decoded: Decoded, database: Database, versions: list[SchemaRecord] | None = None
    ) -> None:
        """`versions` describe what the slot held before, if that was already read."""
        self.config = Config(
            pipeline="decoded",
            source=Source(dsn=database.dsn),
            log=Log(bootstrap_servers="localhost:1"),
        )
        self.decoded = decoded
        self.exporting = connect(self.config)
        self.exporting.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        row = self.exporting.execute("SELECT pg_export_snapshot()").fetchone()
        assert row is not None
        self.snapshot = str(row[0])
        self.tables = {t.name: t for t in describe_tables(self.exporting, "decoded")}
        self.versions = {each.table: each for each in versions or decoded.schemas()}

    def table(self, name: str, pages_per_range: int = 1) -> CopiedTable:
        """Return the table as a plan has it, divided into ranges."""
        reported, version = self.tables[name], self.versions[name]
        planned = _planned(reported, version, pages_per_range)
        ranges = tuple(planned.ranges(0))
        return CopiedTable(version, {0: planned}, ranges, self.snapshot, 2, 0x16E9058, TAKEN_AT)

    def read(self, table: CopiedTable, masks: list[ColumnMask | None] | None = None) -> pa.Table:
        """Return all rows."""
        hidden = masks or [None] * len(table.version.columns)
        schema = spark_schema(self.config, table.version, hidden)
        reader = SnapshotReader(self.config, table, hidden, schema)
        batches = [
            batch
            for partition in reader.partitions()
            if isinstance(partition, Ranges)
            for batch in reader.read(partition)
        ]
        return pa.Table.from_batches(batches, to_arrow_schema(schema, timezone="UTC"))


def _planned(
    reported: DescribedTable, version: SchemaRecord, pages_per_range: int
) -> SnapshotTable:
    [heap] = reported.heaps
    names = tuple(column.name for column in reported.columns)
    return SnapshotTable(
        schema_id=version.schema_id,
        partitions=1,
        relation_id=reported.oid,
        relation=heap.quoted,
        filenode=heap.filenode,
        outputs=reported.outputs,
        columns=names,
        attnums=tuple(heap.attnums[name] for name in names),
        kind="direct",
        pages=heap.bytes // 8192,
        pages_per_range=pages_per_range,
        rows_per_page=291,
        first_seq=1000,
    )


@pytest.fixture
def mirror(decoded: Decoded, database: Database) -> Iterator[Callable[[], Mirror]]:
    """Return a function that makes the mirror once the test has written its rows."""
    with ExitStack() as closing:

        def make() -> Mirror:
            made = Mirror(decoded, database)
            closing.callback(made.exporting.close)
            return made

        yield make


def text_of(value: Any, kind: pa.DataType, comma: str = ",") -> str | None:  # noqa: ANN401 - any type's
    """Return an Arrow value as text that Postgres reads as the same value."""
    if value is None:
        return None
    if isinstance(value, list):
        element = kind.value_type
        parts = [text_of(each, element) for each in value]
        quoted = [
            "NULL" if part is None else '"' + part.replace("\\", r"\\").replace('"', r"\"") + '"'
            for part in parts
        ]
        return "{" + comma.join(quoted) + "}"
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    if isinstance(value, datetime | date):
        return value.isoformat()
    return format(value, "f") if isinstance(value, Decimal) else str(value)


def test_every_value_of_every_built_in_type_comes_back(
    decoded: Decoded, mirror: Callable[[], Mirror]
) -> None:
    decoded.sql.execute('CREATE SCHEMA other CREATE TABLE "odd.Table" (id int)')
    decoded.sql.execute("CREATE TYPE other.\"Odd\" AS ENUM ('x')")
    tables = {f"t{i}": kind for i, kind in enumerate(VALUES)}
    for table, kind in tables.items():
        fill(decoded, f"public.{table}", kind, VALUES[kind])
    source = mirror()
    for name, kind in tables.items():
        rows = source.read(source.table(name))
        types = {field.name: field.type for field in rows.schema}
        wanted = decoded.sql.execute(
            sql.SQL("SELECT id, {}, {} FROM {} ORDER BY id").format(
                *(_written(sql.Identifier(each)) for each in ("v", "a")),
                sql.Identifier("public", name),
            )
        ).fetchall()
        found = sorted(rows.to_pylist(), key=lambda row: int(row["id"]))
        assert [row["id"] for row in found] == [row[0] for row in wanted]
        for column, declared, truths in (
            ("v", kind, [row[1] for row in wanted]),
            ("a", f"{kind}[]", [row[2] for row in wanted]),
        ):
            exact = [dict(row[delta_layout.EXACT] or ()) for row in found]
            values = [row[column] for row in found]
            for value, odd in zip(values, exact, strict=True):
                assert (column in odd) <= (value is None)
            comma = ";" if kind == "box" else ","
            texts = [
                odd.get(column) or text_of(value, types[column], comma)
                for value, odd in zip(values, exact, strict=True)
            ]
            read = [
                _written(sql.SQL("{}::{}").format(sql.Literal(text), sql.SQL(declared)))
                for text in texts
            ]
            back = decoded.sql.execute(
                sql.SQL("SELECT {}").format(sql.SQL(", ").join(read))
            ).fetchone()
            assert list(back or ()) == truths, (declared, values, exact)


def _written(value: sql.Composable) -> sql.Composable:
    return sql.SQL("CASE WHEN {0} IS NULL THEN NULL ELSE format('%s', {0}) END").format(value)


def test_types_are_natural_if_values_are_exact_and_text_otherwise(
    decoded: Decoded, mirror: Callable[[], Mirror]
) -> None:
    decoded.write("CREATE DOMAIN public.amount AS numeric(10,2)")
    decoded.write("CREATE TYPE public.mood AS ENUM ('a', 'b')")
    decoded.write(
        "CREATE TABLE n (i int PRIMARY KEY, n numeric(10,2), w numeric(39,1), u numeric,"
        " z numeric(3,-2), s numeric(2,4), d date, t timestamptz, l timestamp, m money,"
        " a public.amount, e public.mood, j jsonb, q uuid, r int4range, x numeric(4,1)[],"
        ' "b B" text)'
    )
    decoded.write(
        "INSERT INTO n VALUES (1, 'NaN', 1.5, 1.50, 12345, 0.0012, 'infinity', '0044-03-15 BC',"
        " '9999-12-31 23:59:59.999999', -1234.11, 1.1, 'b', '{}', NULL, '[1,3)', '{1.5,NULL}',"
        " 'x'),"
        " (2, 1.1, 2, 'NaN', 100, 0.0012, '0001-01-01', '0001-01-01 00:00Z', 'infinity', 0, 1.10,"
        " 'a', '[]', gen_random_uuid(), 'empty', '{1.5,NaN}', NULL)"
    )
    source = mirror()
    rows = source.read(source.table("n"))
    kinds = {field.name: str(field.type) for field in rows.schema}
    assert kinds == {
        "i": "int32", "n": "decimal128(10, 2)", "w": "string", "u": "string",
        "z": "decimal128(5, 0)", "s": "decimal128(4, 4)", "d": "date32[day]",
        "t": "timestamp[us, tz=UTC]", "l": "timestamp[us]", "m": "decimal128(19, 2)",
        "a": "string", "e": "string", "j": "string", "q": "string", "r": "string",
        "x": "list<element: decimal128(4, 1)>", "b B": "string", "_seq": "int64",
        "_commit_lsn": "int64", "_committed_at": "timestamp[us, tz=UTC]",
        "_exact": "map<string, string>",
    }  # fmt: skip
    first, second = rows.to_pylist()
    assert dict(first["_exact"]) == {
        "n": "NaN", "d": "infinity", "t": "0044-03-15 00:00:00+00 BC",
    }  # fmt: skip
    assert dict(second["_exact"]) == {"l": "infinity", "x": "{1.5,NaN}"}
    assert (first["n"], first["d"], first["t"], first["q"]) == (None, None, None, None)
    assert first["l"] == datetime(9999, 12, 31, 23, 59, 59, 999999)  # noqa: DTZ001 - it has none
    assert (first["m"], first["z"]) == (Decimal("-1234.11"), Decimal(12300))
    assert (first["s"], first["x"]) == (Decimal("0.0012"), [Decimal("1.5"), None])
    assert first["u"] == "1.50"
    assert (second["d"], second["u"]) == (date(1, 1, 1), "NaN")
    assert second["t"] == datetime(1, 1, 1, tzinfo=UTC)
    # Without fraction digits: the same units, with the decimal point in another place.
    yen = replace(source.config, values=replace(source.config.values, money_fraction_digits=0))
    source.config = yen
    assert source.read(source.table("n")).column("m").to_pylist()[0] == Decimal(-123411)


def test_each_row_has_its_place_and_masks_hide_here_too(
    decoded: Decoded, mirror: Callable[[], Mirror], tmp_path: Path
) -> None:
    decoded.write("CREATE TABLE m (id int PRIMARY KEY, a text, b text, c int, d text, e int)")
    decoded.write(
        "INSERT INTO m SELECT i, 'secret' || i, 'x' || repeat('y', 500), i, NULL, nullif(i, 1)"
        " FROM generate_series(1, 200) i"
    )
    source = mirror()
    table = source.table("m", pages_per_range=3)
    assert len(table.ranges) > 3
    file.create(tmp_path / "keys.sqlite")
    keyring = KeyringConfig(path=str(tmp_path / "keys.sqlite"))
    source.config = replace(source.config, keyring=keyring)
    decoded.write("INSERT INTO m VALUES (999, 'later', '', 0, '')")
    decoded.write("DELETE FROM m WHERE id = 1")
    masks = [
        None,
        ColumnMask("hmac:x", "hmac", "k" * 16),
        ColumnMask("truncate:2", "truncate", 2),
        ColumnMask("null", "null"),
        ColumnMask("fixed", "fixed", 7),
        ColumnMask("encrypt:user:id", "encrypt", "user:id", ("user", "id")),
    ]
    rows = source.read(table, masks)
    assert sorted(rows["id"].to_pylist()) == list(range(1, 201))
    first = next(row for row in rows.to_pylist() if row["id"] == 1)
    assert first["a"] == hmac.digest(b"k" * 16, b"secret1", "sha256").hex()
    assert (first["b"], first["c"], first["d"], first["e"]) == ("xy", None, 7, None)
    ciphers = ciphers_of(source.config)
    assert ciphers is not None
    # As the stream encrypts it.
    encrypt = ciphers.encryptor("user")
    for row in rows.to_pylist():
        text = f"{row['id']}".encode()
        assert row["id"] == 1 or encrypt(text, text) == f'"{row["e"]}"'.encode()
    assert set(rows[delta_layout.COMMIT_LSN].to_pylist()) == {0x16E9058}
    seqs = rows[delta_layout.SEQ].to_pylist()
    assert len(set(seqs)) == 200
    blocks = {each.first_seq: each.capacity for each in table.ranges}
    for seq in seqs:
        start = max(first for first in blocks if first <= seq)
        assert seq < start + blocks[start]
    decoded.write("ALTER TABLE m ALTER c TYPE bigint")
    with pytest.raises(RewrittenError, match="rewritten"):
        source.read(table, masks)


def test_columns_that_differ_only_in_case_are_refused() -> None:
    text = DeltaType("string", TypeKind.TEXT)
    with pytest.raises(ConfigError, match="treats as one: id"):
        delta_layout.schema([("id", text), ("ID", text)], "public.t")
    with pytest.raises(ConfigError, match="treats as one: _seq"):
        delta_layout.schema([("_seq", text)], "public.t")
    assert delta_layout.properties(["a", "b c"]) == {"delta.columnMapping.mode": "name"}
    assert delta_layout.properties(["a", "Ä_1"]) == {}
    facts = {"generation": 1, "frontier": str(LSN(7))}
    assert delta_layout.facts(delta_layout.metadata(**facts)) == facts
    assert delta_layout.facts("written by hand") == {}
