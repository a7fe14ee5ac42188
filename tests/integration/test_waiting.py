"""Commands that wait report for what, and end with an exit code that shows why."""

from __future__ import annotations

import json
import time

import pytest

from cdc.cli.main import run
from cdc.cli.options import print_waiting
from cdc.errors import Exit, UnavailableError
from cdc.operate.commands import snapshots
from cdc.snapshot.incremental import topic as live_topic
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.integration.test_incremental_snapshot import begin
from tests.integration.test_wait import FOLLOWERS, FakeFollower

_TABLE = "CREATE TABLE t (id int PRIMARY KEY)"
_ROWS = "INSERT INTO t SELECT generate_series(1, 10)"


class Clock:
    """Advances when somebody sleeps, and only then."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


@pytest.fixture
def line(pipeline: NewPipeline) -> PipelineUnderTest:
    return pipeline(_TABLE, _ROWS, followers=FOLLOWERS)


def test_a_snapshot_that_no_daemon_can_read_is_reported_at_once_and_ends_in_time(
    line: PipelineUnderTest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = ["-c", str(line.config_file)]
    with monkeypatch.context() as patched:
        patched.setattr(snapshots, "time", Clock())
        code = run(["snapshot", "public.t", "--wait", "--timeout", "35s", *config])
    err = capsys.readouterr().err
    assert code == Exit.UNAVAILABLE
    lines = err.splitlines()
    assert "no daemon reads the slot" in lines[0]
    assert sum("has not started; no daemon reads the slot" in each for each in lines) >= 2
    assert "not over after" in err
    assert "what to do: cdc run" in err
    # The request was sent all the same, and the next daemon reads it.
    line.start().wait_ready()
    assert run(["snapshot", "public.t", "--wait", "--timeout", "2m", "--json", *config]) == Exit.OK
    assert json.loads(capsys.readouterr().out)[0]["state"] == "done"


@pytest.mark.long("waits for a timeout")
def test_a_snapshot_that_takes_longer_ends_the_wait_as_temporary(
    line: PipelineUnderTest,
) -> None:
    line.start().wait_ready()
    with line.database.connect() as connection, connection.transaction():
        connection.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        number = begin(line, "public.t")
        with pytest.raises(snapshots.NotOverError, match="not over after") as raised:
            snapshots.wait(line.config, [number], timeout=4.0)
        assert raised.value.exit_code == Exit.TEMPORARY
        # While the lock is held, the snapshot is not well, and reports what it may wait for.
        wait_until(lambda: waits(line, number), "the lock is not reported")
    wait_until(lambda: live_topic.read(line.config)[0].state == "done", "it is not read")


@pytest.mark.slow
def test_a_chunk_that_waits_for_a_lock_is_given_up_with_its_snapshot(
    pipeline: NewPipeline,
) -> None:
    """Other snapshots wait with it, and say so."""
    line = pipeline(_TABLE, _ROWS, "CREATE TABLE other (id int PRIMARY KEY)")
    line.start().wait_ready()
    with line.database.connect() as connection, connection.transaction():
        connection.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        locked = begin(line, "public.t")
        wait_until(lambda: waits(line, locked), "the lock is not reported")
        other = begin(line, "public.other")
        wait_until(lambda: waits(line, other), "what the other one waits for is not reported")
        snapshots.control(line.config, "stop", locked)
        found = {each.id: each for each in snapshots.wait(line.config, [locked, other])}
    assert {number: each.state for number, each in found.items()} == {
        locked: "stopped",
        other: "done",
    }


def waits(line: PipelineUnderTest, number: str) -> bool:
    found = next(each for each in live_topic.read(line.config) if each.id == number)
    return found.failing_since_us is not None and "a lock" in (found.why or "")


def test_a_table_is_added_and_read_before_the_command_returns(
    pipeline: NewPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    line = pipeline(_TABLE, source={"tables": ["public.*"]})
    line.start().wait_ready()
    line.database.execute("CREATE TABLE u (id int PRIMARY KEY)", "INSERT INTO u VALUES (1)")
    config = ["-c", str(line.config_file)]
    add = ["table", "add", "public.u", *config]
    assert run([*add, "--timeout", "3s"]) == Exit.USAGE
    assert run([*add, "--wait", "--timeout", "2m"]) == Exit.OK
    assert "of public.u is done" in capsys.readouterr().err


class Patient:
    """A clock that starts once the wait has reported: connecting may take long."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._began = time.monotonic()
        self._reported_at: float | None = None

        def reports(what: str) -> None:
            print_waiting(what)
            self._reported_at = self._reported_at or time.monotonic()

        patch.setattr("cdc.cli.wait.print_waiting", reports)
        patch.setattr("cdc.cli.wait.time", self)
        patch.setattr("cdc.cli.wait.REPORT_SECONDS", 0.5)
        # The brokers answer, however busy they are.
        patch.setattr("cdc.client.ASK_SECONDS", 30.0)
        patch.setattr("cdc.client.CONNECT_SECONDS", 60.0)

    def monotonic(self) -> float:
        passed = time.monotonic() - self._reported_at if self._reported_at else 0.0
        return self._began + passed


def test_a_wait_for_followers_reports_that_no_daemon_runs(
    line: PipelineUnderTest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Patient(monkeypatch)
    FakeFollower(line.config).apply(1)
    began = time.monotonic()
    code = run(["wait", "--for", "cache", "--timeout", "5s", "-c", str(line.config_file)])
    assert time.monotonic() - began >= 5
    err = capsys.readouterr().err
    assert code == Exit.UNAVAILABLE
    assert f"· no daemon reads the slot {line.config.slot}; cache is" in err
    assert "what to do: cdc run: no daemon reads the slot" in err


def test_a_wait_outlasts_brokers_that_do_not_answer_for_a_moment(
    line: PipelineUnderTest, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[object]()

    def wait(*given: object) -> dict[str, object]:
        calls.append(given)
        if len(calls) == 1:
            raise UnavailableError("the brokers do not answer", hint="try again")
        return {}

    monkeypatch.setattr("cdc.client.Client.wait", wait)
    config = str(line.config_file)
    assert run(["wait", "--for", "cache", "--timeout", "60s", "-c", config]) == Exit.OK
    assert len(calls) == 2
    assert "the brokers do not answer" in capsys.readouterr().err


def test_a_wait_during_the_initial_snapshot_does_not_miss_a_daemon(
    pipeline: NewPipeline,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Patient(monkeypatch)
    line = pipeline(
        "CREATE TABLE t (id int PRIMARY KEY)",
        followers=FOLLOWERS,
        snapshot={"mode": "initial"},
    )
    FakeFollower(line.config).apply(1)
    code = run(["wait", "--for", "cache", "--timeout", "10s", "-c", str(line.config_file)])
    err = capsys.readouterr().err
    assert code == Exit.TEMPORARY
    assert "· the initial snapshot is not finished, and nothing is streamed before; cache is" in err
    assert "no daemon reads" not in err
