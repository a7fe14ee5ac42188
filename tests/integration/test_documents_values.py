"""Values inside documents come from typed mirrors and have the bytes of the log's events."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

import msgspec
import pyarrow as pa
import pytest

from cdc.config.value_options import Values
from cdc.log.records import SchemaRecord
from lockstep.jobs.documents.rows import NodeRows
from lockstep.sinks.contract import Column, Version
from lockstep.sinks.documents import DocumentNode
from lockstep.sinks.floats import text4, text8
from tests.fixtures.decoded import Decoded
from tests.fixtures.servers import Database
from tests.integration.test_delta_types import Mirror
from tests.integration.test_values_types import OPTIONS, fill
from tests.integration.value_table import VALUES
from tests.property.stream import Session, position


class Event(msgspec.Struct):
    """The fields of an event that matter here: its row's bytes, and its table."""

    after: msgspec.Raw
    source: dict[str, object]


def rows(frames: list[bytes], values: Values) -> dict[str, list[bytes]]:
    """Return the rows of the events, by table, in order."""
    session = Session(position(), {}, values=values)
    session.feed(frames)
    found: dict[str, list[bytes]] = {}
    for each in session.waiting():
        event = msgspec.json.decode(each.value or b"{}", type=Event)
        found.setdefault(str(event.source["table"]), []).append(bytes(event.after))
    return found


def version(record: SchemaRecord, values: Values) -> Version:
    columns = tuple(
        Column(each.name, each.type, each.type_id, each.type_modifier, each.nullable, each.mask)
        for each in record.columns
    )
    options = msgspec.to_builtins(values)
    return Version(1, record.schema, record.table, record.topic, record.key, columns, options)


def written(table: pa.Table, read: Version) -> Iterator[bytes]:
    """Yield the mirror's rows as a document of all columns would contain them."""
    names = tuple(column.name for column in read.columns)
    reader = NodeRows(DocumentNode("x", read.name, ("id",), names), read)
    for batch in table.select(reader.columns).to_batches():
        for row in reader.read(batch):
            yield b"{%b}" % row.members


@pytest.mark.long("half a minute; test_values_types has the log's under every option")
def test_a_mirrors_values_have_the_bytes_of_the_logs_under_every_option(
    decoded: Decoded, database: Database
) -> None:
    decoded.sql.execute('CREATE SCHEMA other CREATE TABLE "odd.Table" (id int)')
    decoded.sql.execute("CREATE TYPE other.\"Odd\" AS ENUM ('x')")
    tables = {f"t{i}": kind for i, kind in enumerate(VALUES)}
    for table, kind in tables.items():
        fill(decoded, f"public.{table}", kind, VALUES[kind])
    frames = decoded.frames()
    session = Session(position(), {}, values=Values())
    session.feed(frames)
    source = Mirror(decoded, database, session.new_versions)
    events = [(values, rows(frames, values)) for values in OPTIONS]
    for name, kind in tables.items():
        held = source.read(source.table(name))
        for values, wanted in events:
            found = list(written(held, version(source.versions[name], values)))
            assert sorted(found) == sorted(wanted[name]), (kind, values)
    source.exporting.close()


def test_floats_are_written_as_postgres_writes_them(database: Database) -> None:
    """Digits exactly between two values are never used; of two equally near, the even one is."""
    chosen = random.Random(1)
    doubles = [struct.unpack("<d", chosen.randbytes(8))[0] for _ in range(2000)]
    doubles += [2.0**power for power in range(-1074, 1024, 3)]
    doubles += [18014398509482008.0 + 4 * i for i in range(-500, 500)]
    doubles += [1e15, 1e14, 1e-4, 1e-5, 0.0, -0.0, 5e-324, 1.7976931348623157e308, 0.1]
    singles = [struct.unpack("<f", chosen.randbytes(4))[0] for _ in range(2000)]
    singles += [2.0**power for power in range(-149, 128)]
    singles += [float(2**24 + 2 * i) for i in range(500)] + [1e5, 1e6, -170530.625, -0.0]
    with database.connect() as connection:
        for kind, numbers, text in (("float8", doubles, text8), ("float4", singles, text4)):
            query = f"SELECT unnest(%s::{kind}[])::text"
            wanted = [row[0] for row in connection.execute(query.encode(), [numbers])]
            assert [text(number).decode() for number in numbers] == wanted
