"""Hidden keys: an incremental snapshot's records, across sessions, have none of their values."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from cdc.cli.main import run
from cdc.operate.commands import snapshots
from cdc.snapshot.incremental import topic as live_topic
from cdc.source.connection import connect
from cdc.source.members import read_members
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.witness import data_records
from tests.integration.test_masks import everything

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.snapshot.incremental.records import IncrementalRecord

KEY = "a key of the tests' own"
USERS = "CREATE TABLE users (email text PRIMARY KEY, name text, plain int)"
MASKED = {"public.users": {"mask": {"email": {"hmac": KEY}, "name": None}}}
NAME_MASKED: dict[str, Any] = {"public.users": {"mask": {"name": None}}}
ROWS = 3_000
GIVEN = (("ada1@x.org",), ("ada2@x.org",))


def filled(pipeline: NewPipeline, tables: dict[str, Any] = MASKED) -> PipelineUnderTest:
    """Return a pipeline whose rows are older than its log."""
    return pipeline(
        USERS,
        "INSERT INTO users SELECT 'ada' || i || '@x.org', 'secret' || i, i"
        f" FROM generate_series(1, {ROWS}) i",
        tables=tables,
    )


def snapshot(line: PipelineUnderTest, *more: str) -> None:
    assert run(["snapshot", "public.users", *more, "-c", str(line.config_file)]) == 0


def ask(line: PipelineUnderTest, **asked: Any) -> None:  # noqa: ANN401 - as `snapshots.request` takes it
    """Ask for a snapshot as `cdc snapshot` does, but without its checks."""
    with connect(line.config) as connection:
        chosen = read_members(connection, line.config.publication)
        snapshots.request(connection, line.config, chosen, **asked)


@contextmanager
def unread(line: PipelineUnderTest) -> Iterator[None]:
    """Ask for given keys, and prevent any row from being read until the end."""
    with connect(line.config) as connection:
        # Before the lock, because the query for the tables' sizes waits for it.
        chosen = read_members(connection, line.config.publication)
        with line.database.connect() as holding, holding.transaction():
            holding.execute("LOCK TABLE users IN ACCESS EXCLUSIVE MODE")
            snapshots.request(connection, line.config, chosen, keys=GIVEN)
            assert reaches(line, "running").withheld
            yield


def record(line: PipelineUnderTest) -> IncrementalRecord | None:
    return next(reversed(live_topic.read(line.config)), None)


def reaches(line: PipelineUnderTest, state: str) -> IncrementalRecord:
    def reached() -> bool:
        known = record(line)
        return known is not None and known.state == state

    wait_until(reached, f"no snapshot is {state}")
    known = record(line)
    assert known is not None
    return known


def shows_nothing(line: PipelineUnderTest) -> None:
    reported = everything(line)
    assert b"@x.org" not in reported
    assert b"secret" not in reported


def test_given_keys_are_in_no_topic(pipeline: NewPipeline) -> None:
    line = filled(pipeline)
    line.start().wait_ready()
    snapshot(line, "--keys", '["ada1@x.org", "ada2@x.org"]')
    assert reaches(line, "done").rows == len(GIVEN)
    shows_nothing(line)


def test_another_process_asks_for_given_keys_again(pipeline: NewPipeline) -> None:
    line = filled(pipeline)
    line.start().wait_ready()
    with unread(line):
        assert line.daemon.term() == 0
    line.start().wait_ready()
    failed = reaches(line, "failed")
    assert failed.why is not None
    assert "run the same `cdc snapshot` again" in failed.why
    shows_nothing(line)
    assert not data_records(line)
    snapshot(line, "--keys", '["ada1@x.org"]')
    assert reaches(line, "done").rows == 1
    shows_nothing(line)


def test_the_next_session_of_a_process_knows_the_given_keys(pipeline: NewPipeline) -> None:
    line = filled(pipeline)
    line.start().wait_ready()
    with unread(line):
        line.query("SELECT pg_terminate_backend(%s)", line.slot("active_pid"))
        # From Postgres 16 on, the next session waits for the lock itself, to read the publication.
        wait_until(lambda: "starting over" in line.daemon.log, "the session does not end")
    assert reaches(line, "done").rows == len(GIVEN)
    assert "incremental snapshot continues" in line.daemon.log
    shows_nothing(line)


@pytest.mark.parametrize("where", ["email = 'ada1@x.org'", "lower(email) = 'ada1@x.org'"])
def test_a_condition_on_a_hidden_column_is_in_no_topic(pipeline: NewPipeline, where: str) -> None:
    """It is refused, and not recorded either."""
    line = filled(pipeline)
    line.start().wait_ready()
    ask(line, where=where)
    assert reaches(line, "failed").where is None
    assert not data_records(line)
    shows_nothing(line)


@pytest.mark.parametrize("times", [1, 3])
def test_a_table_is_read_from_the_start_without_a_key_in_the_log(
    pipeline: NewPipeline, times: int
) -> None:
    """Killed before the first chunk is read, or before a later one."""
    line = filled(pipeline)
    line.start(f"before_low:{times}").wait_ready()
    snapshot(line)
    line.daemon.wait_exit()
    shows_nothing(line)
    line.start().wait_ready()
    line.database.execute("UPDATE users SET email = 'y' || email WHERE plain % 5 = 0")
    assert reaches(line, "done").rows >= ROWS - ROWS // 5
    shows_nothing(line)


def test_a_clear_condition_goes_on_after_a_restart(pipeline: NewPipeline) -> None:
    line = filled(pipeline, NAME_MASKED)
    line.start("before_low:2").wait_ready()
    snapshot(line, "--where", "plain > 10")
    line.daemon.wait_exit()
    known = record(line)
    assert known is None or (known.where == "plain > 10" and not known.withheld)
    line.start().wait_ready()
    done = reaches(line, "done")
    assert done.where == "plain > 10"
    assert not done.withheld
    assert done.rows >= ROWS - 10
    assert b"secret" not in everything(line)
