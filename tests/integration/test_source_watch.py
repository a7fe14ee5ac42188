"""Polling finds what the stream does not report: without any traffic, within seconds."""

from __future__ import annotations

import psycopg
import pytest

from tests.fixtures.alerting import scraped
from tests.fixtures.converge import converge
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until

_TABLES = (
    "CREATE TABLE users (id int PRIMARY KEY, n int)",
    "CREATE TABLE orders (id int PRIMARY KEY, n int)",
)
_CONFIG = 78
# A poll every five seconds, on a busy machine.
_LOOK_SECONDS = 90.0


@pytest.fixture
def line(pipeline: NewPipeline) -> PipelineUnderTest:
    """A pipeline with an idle daemon."""
    line = pipeline(*_TABLES)
    line.never_time_out()
    line.start().wait_ready()
    return line


def test_a_table_that_leaves_the_publication_is_a_gap_without_any_write(
    line: PipelineUnderTest,
) -> None:
    line.database.execute(f"ALTER PUBLICATION {line.config.publication} DROP TABLE orders")
    line.ends(line.daemon, _CONFIG, "no longer has public.orders", seconds=_LOOK_SECONDS)


def test_a_dropped_publication_is_a_gap_without_any_write(line: PipelineUnderTest) -> None:
    line.database.execute(f"DROP PUBLICATION {line.config.publication}")
    line.ends(line.daemon, _CONFIG, "does not exist", seconds=_LOOK_SECONDS)


def test_a_recreated_publication_is_a_gap_without_any_write(line: PipelineUnderTest) -> None:
    name = line.config.publication
    line.database.execute(
        f"DROP PUBLICATION {name}", f"CREATE PUBLICATION {name} FOR TABLE users, orders"
    )
    line.ends(line.daemon, _CONFIG, "dropped and created again", seconds=_LOOK_SECONDS)


def test_a_new_table_is_held_on_to_before_its_first_row(line: PipelineUnderTest) -> None:
    """So that its removal is a gap too."""
    name = line.config.publication
    line.database.execute(
        "CREATE TABLE more (id int PRIMARY KEY)", f"ALTER PUBLICATION {name} ADD TABLE more"
    )
    wait_until(lambda: "public.more" in line.resume()[0].publication.tables, "it is not noted")
    line.database.execute(f"ALTER PUBLICATION {name} DROP TABLE more")
    line.ends(line.daemon, _CONFIG, "no longer has public.more", seconds=_LOOK_SECONDS)


def test_the_slots_share_of_the_disk_is_measured(line: PipelineUnderTest) -> None:
    daemon = line.daemon
    wait_until(lambda: daemon.metric("lockstep_slot_retained_bytes") > 0, "not measured")
    assert daemon.metric("lockstep_slot_wal_status") == 1
    assert daemon.metric("lockstep_timeline") == 1
    line.database.execute("INSERT INTO users SELECT i, 1 FROM generate_series(1, 50000) i")

    def predicted() -> bool:
        """Whether one look has a rate and what follows from it; the next may find no more WAL."""
        found = scraped(daemon.get("/metrics")[1])
        rate = found.get("lockstep_wal_bytes_per_second{}", 0.0)
        lost_in = found.get("lockstep_slot_lost_in_seconds{}", 0.0)
        return lost_in > 0 and 0 < rate < found["lockstep_slot_safe_bytes{}"]

    wait_until(predicted, "no forecast", _LOOK_SECONDS)


def test_transactions_that_hold_the_slot_back_are_reported(line: PipelineUnderTest) -> None:
    """Open ones and prepared ones, also of other databases: their age is a metric."""
    daemon = line.daemon
    with psycopg.connect(line.database.dsn) as slow:
        slow.execute("INSERT INTO users VALUES (1, 1)")
        wait_until(lambda: daemon.metric("lockstep_oldest_transaction_seconds") > 3, "not seen")
    wait_until(lambda: daemon.metric("lockstep_oldest_transaction_seconds") < 3, "still seen")
    assert daemon.metric("lockstep_oldest_prepared_seconds") == 0
    wait_until(lambda: daemon.health().get("warnings") == [], "something is wrong")
    converge(line.config)


def test_a_source_check_that_fails_costs_only_its_result(line: PipelineUnderTest) -> None:
    """Its connection is ended again and again; the stream continues on its own."""
    daemon = line.daemon
    looking = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
        " WHERE datname = current_database() AND backend_type = 'client backend'"
        # Its last query compares the columns with those of the last check.
        " AND application_name LIKE 'lockstep%%' AND query ~ 'hashint8'"
    )
    wait_until(lambda: line.query(looking)[0], "it does not look")

    def reported() -> bool:
        """End it again: the warning lasts until a look succeeds."""
        line.query(looking)
        return bool(daemon.health().get("warnings"))

    wait_until(reported, "not reported", _LOOK_SECONDS)
    line.database.execute("INSERT INTO users VALUES (1, 1)")
    wait_until(lambda: line.resume()[1].seq == 1, "the row does not arrive")
    wait_until(lambda: daemon.health().get("warnings") == [], "it looks no more", _LOOK_SECONDS)
    assert daemon.metric("lockstep_reconnects_total") == 0
