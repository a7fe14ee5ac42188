"""drain-wide: rows of 30 columns of mixed types, in transactions of 100.

What a mature application's table looks like; a few of the columns are NULL in some rows, and two in
most rows. A drain of narrow rows measures the cost of a row; this one measures the cost of values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import rows as bench
from benchmarks.contents import EachIdOnce
from benchmarks.workload import Clock

if TYPE_CHECKING:
    from typing import Final

    import psycopg

TABLE: Final = "wide"

# Column, type, and the value of row {i}.
COLUMNS: Final = (
    ("id", "bigint PRIMARY KEY", "{i}"),
    ("shop", "smallint", "mod({i}, 100)::smallint"),
    ("customer", "int", "mod({i} * 7919, 1000003)::int"),
    ("parent", "bigint", "CASE WHEN mod({i}, 4) = 0 THEN {i} / 4 END"),
    ("quantity", "int", "1 + mod({i}, 12)::int"),
    ("price", "numeric(12,2)", "(mod({i}, 1000000) / 100.0)::numeric(12,2)"),
    ("tax", "numeric(5,4)", "(mod({i}, 2500) / 10000.0)::numeric(5,4)"),
    ("total", "numeric", "{i} * 1.19"),
    ("name", "text", "'Name of row ' || {i}"),
    (
        "note",
        "text",
        "CASE WHEN mod({i}, 10) = 0 THEN 'note: \"call back\" ' || md5({i}::text) END",
    ),
    ("description", "text", "md5({i}::text) || md5(({i} + 1)::text)"),
    ("status", "varchar(16)", "(ARRAY['new', 'paid', 'sent', 'returned'])[1 + mod({i}, 4)]"),
    ("code", "varchar(20)", "'C-' || lpad({i}::text, 10, '0')"),
    ("country", "char(2)", "(ARRAY['DE', 'FR', 'IT'])[1 + mod({i}, 3)]"),
    ("email", "varchar(200)", "'user' || mod({i}, 50000) || '@example.com'"),
    ("created_at", "timestamptz", "clock_timestamp()"),
    ("updated_at", "timestamptz", "clock_timestamp() + interval '1 second'"),
    ("deleted_at", "timestamptz", "CASE WHEN mod({i}, 20) = 0 THEN clock_timestamp() END"),
    ("seen_at", "timestamp", "timestamp '2026-01-01' + {i} * interval '1 second'"),
    ("booked_at", "timestamp(3)", "timestamp '2026-01-01' + {i} * interval '1.5 seconds'"),
    ("due", "date", "date '2026-01-01' + mod({i}, 365)::int"),
    ("opens", "time", "time '08:00' + mod({i}, 600) * interval '1 minute'"),
    ("active", "bool", "mod({i}, 3) > 0"),
    ("hidden", "bool", "CASE WHEN mod({i}, 2) = 0 THEN false END"),
    ("token", "uuid", "md5({i}::text)::uuid"),
    ("trace", "uuid", "CASE WHEN mod({i}, 2) = 0 THEN md5({i}::text)::uuid END"),
    (
        "attributes",
        "jsonb",
        "jsonb_build_object('colour', 'blue', 'size', mod({i}, 50), 'tags', '[1, 2, 3]'::jsonb)",
    ),
    ("score", "float8", "{i} / 7.0::float8"),
    ("hash", "bytea", "decode(md5({i}::text), 'hex')"),
    ("labels", "text[]", "ARRAY['a' || mod({i}, 10), 'b c', 'd']"),
)
VALUES: Final = ", ".join(value for _, _, value in COLUMNS)


class Wide:
    """Many columns of many types."""

    name = "drain-wide"
    tables = (TABLE,)
    rows = 300_000
    clock = Clock.FIRST_RECORD
    in_progress = False

    def create(self, connection: psycopg.Connection, rows: int) -> None:  # noqa: ARG002 - empty
        columns = ", ".join(f"{name} {kind}" for name, kind, _ in COLUMNS)
        connection.execute(f"CREATE TABLE {TABLE} ({columns})".encode())

    def load(self, connection: psycopg.Connection, rows: int) -> None:
        bench.insert_singly(connection, TABLE, VALUES, rows)

    def contents(self, connection: psycopg.Connection, rows: int) -> dict[str, EachIdOnce]:  # noqa: ARG002
        return {TABLE: EachIdOnce(TABLE, rows)}
