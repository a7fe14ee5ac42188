"""Postgres selects the same rows by a condition as given and by its parsed, rewritten form."""

from __future__ import annotations

from cdc.source.conditions import parse
from tests.fixtures.servers import Database

_TABLE = (
    (
        'CREATE TABLE t (id int PRIMARY KEY, n numeric, "Big" bigint, name text, at timestamptz,'
        ' day date, yes bool, "od""d one" varchar(9))'
    ),
    (
        "INSERT INTO t SELECT i, i / 4.0, i * 10000000000, CASE WHEN i % 5 > 0 THEN 'n' || i END,"
        " '2020-01-01 00:00+00'::timestamptz + i * interval '7 hours', DATE '2020-01-01' + i,"
        " CASE i % 3 WHEN 0 THEN true WHEN 1 THEN false END, chr(64 + i) "
        "FROM generate_series(1, 60) i"
    ),
    r"INSERT INTO t VALUES (100, 'NaN', NULL, 'it''s 100\% \x', 'infinity', NULL, NULL, '')",
    "INSERT INTO t VALUES (101, NULL, -9, 'Ünïcode', NULL, '-infinity', true, 'a''b')",
)
_CONDITIONS = (
    "id = 7", "7 = id", "id <> 7", "id != 7", "id < 5 OR id >= 59", "NOT id < 50",
    "id > 5 AND id < 9 OR id = 20", "id = 20 OR id > 5 AND id < 9", "NOT (id > 5 AND yes)",
    "not id = 1 and not yes", "yes", "NOT yes", "yes = true", "yes IS NOT TRUE", "yes IS UNKNOWN",
    "name IS NULL", "name IS NOT NULL AND n > 3.5", "n = 2.25", "n > 'NaN'::numeric - 1",
    "n * 4 = id",
    "id IN (1, 2, 3)", "id NOT IN (1, 2, 3)", "name IN ('n1', NULL)", "name NOT IN ('n1', NULL)",
    "id BETWEEN 3 AND 5", "id NOT BETWEEN 3 AND 100", "id between 1 + 1 and 2 * 4 and yes",
    "name LIKE 'n1%'", "name NOT LIKE '%1'", "name ILIKE 'N_'", r"name LIKE '%\%%'",
    r"name = 'it''s 100\% \x'", "name = 'Ünïcode'", "name > 'n5'", "name = ''", "name < name",
    "at >= '2020-01-05'", "at < TIMESTAMPTZ '2020-01-03 12:00+02'", "at = 'infinity'",
    "at > now() - interval '10 years'", "day = DATE '2020-01-08'", "day > '2020-01-08'::date + 3",
    "day <= CURRENT_DATE", "at - interval '1 day' < '2020-01-02'",
    '"Big" = 70000000000', '"Big" > 99999999999', '"od""d one" = \'C\'', '"od""d one" = \'\'',
    "id % 7 = 3", "id - 2 - 1 = 4", "100 / id / 2 = 5", "-id < -58", "- id % 7 = -3",
    "id = '7'::int", "id = -(-7)", "id + 1 = 8 OR (id) = (9)", "n IS DISTINCT FROM 1",
    "yes IS NOT DISTINCT FROM NULL",
    "true", "NULL", "id = 1e1", "id = .5 * 4", "ID = 3", "Id = 3",
)  # fmt: skip


def test_it_chooses_the_rows_that_postgres_chooses(database: Database) -> None:
    with database.connect() as connection:
        for statement in _TABLE:
            connection.execute(statement.encode())
        query = "SELECT array_agg(id ORDER BY id) FROM public.t WHERE "
        for condition in _CONDITIONS:
            expected = connection.execute((query + f"({condition})").encode()).fetchone()
            connection.execute("SET search_path = pg_catalog")
            for setting in ("on", "off"):
                connection.execute(f"SET standard_conforming_strings = {setting}".encode())
                found = connection.execute((query + parse(condition).sql).encode()).fetchone()
                assert found == expected, condition
            connection.execute("RESET ALL")
