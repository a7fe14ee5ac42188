"""A database of encoding SQL_ASCII, which accepts any bytes: text that is not UTF-8."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from cdc.config.value_options import Values
from cdc.errors import ConfigError
from tests.fixtures.servers import Database
from tests.integration.test_values import Capture


@pytest.fixture
def ascii_dsn(database: Database) -> Iterator[str]:
    """Give the DSN of a database that accepts any bytes."""
    name = f"{database.name}_ascii"
    with database.connect() as connection:
        connection.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C'").format(
                sql.Identifier(name)
            )
        )
    dsn = psycopg.conninfo.make_conninfo(database.dsn, dbname=name)
    yield dsn
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            b"SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            b" WHERE database = current_database()"
        )
    with database.connect() as connection:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def write(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True, client_encoding="SQL_ASCII") as connection:
        connection.execute(b"CREATE TABLE t (id int PRIMARY KEY, v text, a text[], n numeric)")
        connection.execute(b"INSERT INTO t VALUES (1, E'Zo\\303\\253', ARRAY['x'], 1.50)")
        connection.execute(b"INSERT INTO t VALUES (2, E'\\377\"', ARRAY[E'\\377,', 'y', NULL], 2)")


def test_text_that_is_not_utf8_is_its_bytes_where_the_configuration_says_so(
    ascii_dsn: str,
) -> None:
    capture = Capture(ascii_dsn, Values(invalid_text_handling_mode="base64"))
    write(ascii_dsn)
    first, second = (event["after"] for event in capture.events())
    capture.close()
    assert first == {"id": 1, "v": "Zoë", "a": ["x"], "n": "1.50"}
    reported = [{"base64": base64.b64encode(data).decode()} for data in (b'\xff"', b"\xff,")]
    assert second == {"id": 2, "v": reported[0], "a": [reported[1], "y", None], "n": "2"}


def test_without_the_option_it_stops_and_names_the_option(ascii_dsn: str) -> None:
    capture = Capture(ascii_dsn)
    write(ascii_dsn)
    with pytest.raises(ConfigError) as raised:
        capture.events()
    capture.close()
    assert "values.invalid.text.handling.mode" in raised.value.hint
    assert "base64" in raised.value.hint
