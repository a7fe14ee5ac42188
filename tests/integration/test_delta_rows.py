"""The log's rows as a mirror's Arrow rows: exactly the values that direct mode writes."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from cdc.config.value_options import Values
from cdc.log.records import SchemaRecord
from lockstep.sinks.contract import Change, Changes, Column, Version
from lockstep.sinks.delta.columns import ColumnReader, arrow_type, wanted
from lockstep.sinks.delta.json import rows as as_json
from lockstep.sinks.delta.layout import OURS
from lockstep.sinks.delta.rows import EXACT_TYPE, batch
from tests.fixtures.decoded import Decoded
from tests.fixtures.servers import Database
from tests.integration.test_delta_types import Mirror
from tests.integration.test_values_types import fill
from tests.integration.value_table import VALUES
from tests.property.stream import Session, position

# Each choice of each option once, except irreversible intervals (`numeric`).
OPTIONS = (
    Values(),
    Values(
        decimal_handling_mode="precise",
        time_precision_mode="microseconds",
        binary_handling_mode="hex",
        interval_handling_mode="string",
        bigint_handling_mode="string",
    ),
    Values(
        decimal_handling_mode="double",
        time_precision_mode="isostring",
        binary_handling_mode="base64-url-safe",
    ),
)
# These change only times.
TIMES = (
    Values(time_precision_mode="nanoseconds"),
    Values(time_precision_mode="connect"),
    Values(time_precision_mode="adaptive_time_microseconds"),
)
MODIFIED = {
    "numeric(10,2)": ("12.50", "NaN", "-99999999.99"),
    "numeric(3,-2)": ("12345",),
    "numeric(2,4)": ("0.0012",),
    "numeric(39,1)": ("1.5", "-12345678901234567890123456789012345678.9"),
    "time(2)": ("03:04:05.12", "24:00:00"),
    "timestamp(3)": ("2026-01-02 03:04:05.123", "infinity"),
    "timestamp(0)": ("0001-01-01", "9999-12-31 23:59:59", "0044-03-15 BC"),
}


def version_of(record: SchemaRecord, values: Values) -> Version:
    return Version(
        record.schema_id,
        record.schema,
        record.table,
        record.topic,
        tuple(record.key),
        tuple(
            Column(each.name, each.type, each.type_id, each.type_modifier, each.nullable, each.mask)
            for each in record.columns
        ),
        msgspec.to_builtins(values),
    )


def streamed(
    frames: list[bytes], values: Values
) -> tuple[list[SchemaRecord], dict[str, list[bytes]]]:
    """Return the table versions, and by table the exact bytes of `after` in the log."""
    session = Session(position(), {}, values=values)
    session.feed(frames)
    found: dict[str, list[bytes]] = {}
    for each in session.waiting():
        if each.value:
            event = msgspec.json.decode(each.value, type=dict[str, msgspec.Raw])
            table = msgspec.json.decode(event["source"])["table"]
            found.setdefault(table, []).append(bytes(event["after"]))
    return session.new_versions, found


def plain(table: pa.Table) -> list[dict[str, Any]]:
    """Return the rows by `id`, without our columns except `_exact`."""
    rows = table.drop_columns([name for name in OURS if name != "_exact"]).to_pylist()
    for row in rows:
        row["_exact"] = sorted(row["_exact"] or ())
    return sorted(rows, key=lambda row: int(row["id"]))


def read(version: Version, rows: list[bytes], reader: ColumnReader) -> pa.Table:
    columns = [(name, arrow_type(kind)) for name, kind in wanted(version)]
    ours = [
        ("_seq", pa.int64()),
        ("_commit_lsn", pa.int64()),
        ("_committed_at", pa.timestamp("us", "UTC")),
        ("_exact", EXACT_TYPE),
    ]
    changes = [
        Change(b"{}", seq, row, version.schema_id, 1, seq) for seq, row in enumerate(rows, 1)
    ]
    found = batch(
        Changes((version,), changes), pa.schema(columns + ours), {version.schema_id: reader}
    )
    return found.rows


@pytest.fixture
def tables(decoded: Decoded) -> dict[str, str]:
    """Fill a table for each type."""
    decoded.sql.execute('CREATE SCHEMA other CREATE TABLE "odd.Table" (id int)')
    decoded.sql.execute("CREATE TYPE other.\"Odd\" AS ENUM ('x')")
    every = VALUES | MODIFIED
    named = {f"t{i}": kind for i, kind in enumerate(every)}
    for table, kind in named.items():
        fill(decoded, f"public.{table}", kind, every[kind])
    return named


def test_a_row_of_the_log_is_what_direct_mode_makes_of_it(
    decoded: Decoded, database: Database, tables: dict[str, str]
) -> None:
    """For every type and its arrays, under every option; also converted to JSON and back."""
    frames = decoded.frames()
    versions, _ = streamed(frames, Values())
    direct = Mirror(decoded, database, versions)
    with closing(direct.exporting):
        complete = {name: direct.read(direct.table(name)) for name in tables}
    for values in OPTIONS + TIMES:
        _, rows = streamed(frames, values)
        timed = [name for name, kind in tables.items() if "time" in kind or "date" in kind]
        for name in timed if values in TIMES else tables:
            kind = tables[name]
            reported = complete[name]
            version = version_of(direct.versions[name], values)
            found = read(version, rows[name], ColumnReader(version))
            assert found.schema.equals(reported.schema), (kind, values)
            assert repr(plain(found)) == repr(plain(reported)), (kind, values)
            again = [row for _, row in as_json(found, version)]
            assert repr(plain(read(version, again, ColumnReader(version)))) == repr(plain(found)), (
                kind,
                values,
            )
