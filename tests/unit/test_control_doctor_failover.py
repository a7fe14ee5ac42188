"""What a promotion would find missing is reported before, with the SQL that fixes it."""

from __future__ import annotations

from typing import Any

import pytest

from cdc.config import Config, Log, Source
from cdc.errors import UnavailableError
from cdc.operate.doctor.failover import FailoverFacts, SourceHost, check_failover
from cdc.operate.findings import Severity
from cdc.source.connection import hosts
from cdc.source.slots import StandbySlot
from tests.unit.test_control_doctor import CONFIG, SERVER, SLOT

STANDBY = StandbySlot("the_standby", exists=True, active=True, named=True)
OURS = SLOT._replace(failover=True)
COPY = OURS._replace(synced=True)
SETTINGS = {
    "sync_replication_slots": "on",
    "hot_standby_feedback": "on",
    "primary_slot_name": "the_standby",
    "primary_conninfo": "host=primary dbname=shop",
}


def host(slot: Any = COPY, **settings: str) -> SourceHost:  # noqa: ANN401 - a slot or none
    """Return a standby with this slot, and these settings changed."""
    server = SERVER._replace(in_recovery=True, settings=SERVER.settings | SETTINGS | settings)
    return SourceHost("two:5432", server, slot)


def facts(*others: SourceHost, slot: Any = OURS, **changes: Any) -> FailoverFacts:  # noqa: ANN401 - fields of a tuple
    primary = SourceHost("one:5432", SERVER, slot)
    made = FailoverFacts(SERVER, slot, [STANDBY], [primary, *others] if others else [])
    return made._replace(**changes)


def test_a_slot_that_every_standby_has_is_ok() -> None:
    findings = list(check_failover(CONFIG, facts(host())))
    assert {each.severity for each in findings} == {Severity.OK}
    assert [each.check for each in findings] == ["failover", "standby two:5432"]


@pytest.mark.parametrize("alone", [facts(standbys=[]), facts(slot=None)])
def test_without_standby_or_slot_nothing_is_reported(alone: FailoverFacts) -> None:
    assert list(check_failover(CONFIG, alone)) == []


@pytest.mark.parametrize(
    ("given", "check", "severity", "words"),
    [
        (facts(server=SERVER._replace(version=160001)), "failover", "note", "upgrade to Postgres"),
        (facts(slot=SLOT), "failover", "warning", "cdc slot alter --failover"),
        (
            facts(standbys=[STANDBY._replace(named=False)]),
            "synchronized_standby_slots",
            "warning",
            "ALTER SYSTEM SET synchronized_standby_slots = 'the_standby';",
        ),
        (facts(standbys=[STANDBY._replace(active=False)]), "standby", "warning", "bring that"),
        (facts(host(COPY._replace(temporary=True))), "standby two:5432", "note", "it is, once"),
        (facts(host(SLOT)), "standby two:5432", "warning", "pg_drop_replication_slot"),
        (facts(host(None)), "standby two:5432", "warning", "wait a minute"),
        (
            facts(host(None, sync_replication_slots="off", hot_standby_feedback="off")),
            "standby two:5432",
            "warning",
            "ALTER SYSTEM SET sync_replication_slots = on; ALTER SYSTEM SET hot_standby_feedback",
        ),
        (facts(host(None, primary_slot_name="")), "standby two:5432", "warning", "primary_slot"),
        (
            facts(host(None, primary_conninfo="host=primary")),
            "standby two:5432",
            "warning",
            "dbname",
        ),
        (
            facts(
                SourceHost("two:5432", None, None, UnavailableError("no answer", hint="start it"))
            ),
            "standby two:5432",
            "warning",
            "start it",
        ),
    ],
)
def test_what_a_promotion_would_lack_is_reported(
    given: FailoverFacts, check: str, severity: str, words: str
) -> None:
    found = [each for each in check_failover(CONFIG, given) if each.check == check]
    assert [each.severity for each in found] == [Severity(severity)]
    assert words in found[0].fix


def of(dsn: str) -> Config:
    return Config(pipeline="a", source=Source(dsn=dsn), log=Log(bootstrap_servers="x:1"))


def test_each_host_of_a_dsn_is_asked_alone() -> None:
    found = hosts(of("host=one,two port=1,2 dbname=shop target_session_attrs=read-write"))
    assert list(found) == ["one:1", "two:2"]
    assert set(found["two:2"].source.dsn.split()) == {"host=two", "port=2", "dbname=shop"}
    found = hosts(of("postgresql://me@one,two/shop"))
    assert list(found) == ["one:5432", "two:5432"]


@pytest.mark.parametrize("dsn", ["host=one dbname=shop", "dbname=shop", "postgresql://one/shop"])
def test_with_one_host_no_other_is_asked(dsn: str) -> None:
    assert hosts(of(dsn)) == {}
