"""The decoder and its tables against the available server."""

from __future__ import annotations

import pytest

from cdc.decode.types import TYPE_NAMES
from tests.fixtures.servers import Database
from tests.golden.record import record
from tests.golden.scenario import SCENARIOS, Scenario


def test_built_in_types_are_the_servers(database: Database) -> None:
    with database.connect() as connection:
        rows = connection.execute("SELECT oid::int, typname FROM pg_type WHERE oid < 10000")
        assert dict(rows.fetchall()) == TYPE_NAMES


# Prepared transactions must be enabled at a server's start; only the recordings cover them.
@pytest.mark.pg(">= 15")
@pytest.mark.parametrize(
    "scenario",
    [one for one in SCENARIOS if one.min_major <= 15 and not one.two_phase],
    ids=lambda one: one.name,
)
def test_the_server_sends_what_the_recordings_hold(database: Database, scenario: Scenario) -> None:
    assert len(record(database.dsn, scenario)) == len(scenario.steps)
