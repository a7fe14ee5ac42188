"""The decoder and its tables against the available server."""

from __future__ import annotations

import pytest

from cdc.decode.types import BY_OID, TYPE_NAMES, TYPES
from tests.fixtures.servers import Database
from tests.golden.record import record
from tests.golden.scenario import SCENARIOS, Scenario


def test_built_in_types_are_the_servers(database: Database) -> None:
    with database.connect() as connection:
        rows = connection.execute("SELECT oid::int, typname FROM pg_type WHERE oid < 10000")
        assert dict(rows.fetchall()) == TYPE_NAMES


def test_the_rows_of_built_in_types_are_the_servers(database: Database) -> None:
    aliases = {alias: row.oid for row in TYPES for alias in row.aliases}
    with database.connect() as connection:
        found = connection.execute(
            "SELECT oid::int, typarray::int, typdelim, typlen, typmodin::oid <> 0 FROM pg_type"
            " WHERE oid = ANY(%s)",
            [list(BY_OID)],
        ).fetchall()
        named = connection.execute(
            "SELECT alias, alias::regtype::oid::int FROM unnest(%s::text[]) alias", [list(aliases)]
        ).fetchall()
    assert dict(named) == aliases
    assert len(found) == len(BY_OID)
    for oid, array, delimiter, size, has_modifier in found:
        row = BY_OID[oid]
        fixed = array if array < 10_000 else 0  # those of catalogs have other oids in each major
        assert (row.array, row.delimiter) == (fixed, delimiter), row.name
        assert not row.size or row.size == size, row.name
        assert has_modifier or not row.is_limited, row.name


# Prepared transactions must be enabled at a server's start; only the recordings cover them.
@pytest.mark.pg(">= 15")
@pytest.mark.parametrize(
    "scenario",
    [one for one in SCENARIOS if one.min_major <= 15 and not one.two_phase],
    ids=lambda one: one.name,
)
def test_the_server_sends_what_the_recordings_hold(database: Database, scenario: Scenario) -> None:
    assert len(record(database.dsn, scenario)) == len(scenario.steps)
