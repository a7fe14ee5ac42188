"""One table per kind of column, to measure the cost of a value of each.

Each has an id and eight columns of its kind; one more table has only the id. The difference between
their rows is the cost of eight values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from benchmarks import backlog
from benchmarks import rows as bench

if TYPE_CHECKING:
    import psycopg

COLUMNS: Final = 8
BARE: Final = "bare"

# Kind, type, and a value of row {i}.
KINDS: Final = (
    ("null", "text", "NULL"),
    ("int", "int", "mod({i} * 7919, 1000003)::int"),
    ("bigint", "bigint", "{i} * 1000003"),
    ("bool", "bool", "mod({i}, 3) > 0"),
    ("float8", "float8", "{i} / 7.0::float8"),
    ("numeric", "numeric(12,2)", "(mod({i}, 1000000) / 100.0)::numeric(12,2)"),
    ("text of 10", "text", "'row ' || lpad({i}::text, 6, '0')"),
    ("text of 100", "text", "left(repeat(md5({i}::text), 4), 100)"),
    ("varchar", "varchar(20)", "'C-' || lpad({i}::text, 8, '0')"),
    ("uuid", "uuid", "md5({i}::text)::uuid"),
    ("date", "date", "date '2026-01-01' + mod({i}, 365)::int"),
    ("timestamp", "timestamp", "timestamp '2026-01-01' + {i} * interval '1.001 seconds'"),
    ("timestamptz", "timestamptz", "clock_timestamp()"),
    ("jsonb", "jsonb", "jsonb_build_object('colour', 'blue', 'size', mod({i}, 50))"),
    ("bytea of 16", "bytea", "decode(md5({i}::text), 'hex')"),
    ("text[] of 3", "text[]", "ARRAY['a' || mod({i}, 10), 'b c', 'd']"),
)

_APART: Final = """
    DO $$
    BEGIN
        FOR i IN 1..{rows} LOOP
            INSERT INTO {table} VALUES (i + 2000000);
            COMMIT;
        END LOOP;
    END $$"""


def table(kind: str) -> str:
    """Return the table of a kind."""
    return "kind_" + "".join(character if character.isalnum() else "_" for character in kind)


TABLES: Final = (BARE, *(table(kind) for kind, _, _ in KINDS))


def create(connection: psycopg.Connection) -> None:
    """Create the tables, and make them the publication's only tables."""
    connection.execute(f"CREATE TABLE {BARE} (id bigint PRIMARY KEY)".encode())
    for kind, sql_type, _ in KINDS:
        columns = ", ".join(f"c{number} {sql_type}" for number in range(COLUMNS))
        statement = f"CREATE TABLE {table(kind)} (id bigint PRIMARY KEY, {columns})"
        connection.execute(statement.encode())
    connection.execute(f"DROP PUBLICATION {backlog.PUBLICATION}".encode())
    backlog.publish(connection, TABLES)


def load(connection: psycopg.Connection, rows: int) -> None:
    """Insert `rows` rows into every table, one transaction per table."""
    bench.insert_at_once(connection, BARE, "{i}", rows)
    for kind, _, value in KINDS:
        values = ", ".join(["{i}", *[value] * COLUMNS])
        bench.insert_at_once(connection, table(kind), values, rows)


def load_apart(connection: psycopg.Connection, rows: int) -> None:
    """Insert `rows` rows into the bare table, one transaction per row."""
    connection.execute(_APART.format(rows=rows, table=BARE).encode())
