"""`cdc status` and `/healthz` on real servers: neither reports all well while something loops."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from cdc.cli.main import run
from cdc.errors import Exit
from cdc.events import LSN
from cdc.log.publisher import Publisher
from cdc.operate import followers
from cdc.snapshot.initial import topic
from cdc.snapshot.initial.records import SnapshotState
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.integration.test_incremental_snapshot import begin, found, say
from tests.integration.test_wait import FOLLOWERS, FakeFollower

_TABLE = "CREATE TABLE t (id int PRIMARY KEY)"
# Ends the session that reads for a snapshot: an error that a retry may not meet.
_KILL = (
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
    " WHERE datname = current_database() AND wait_event_type = 'Lock'"
    " AND (position('reltuples' IN query) > 0 OR position('LOCK TABLE' IN query) > 0"
    " OR position('pg_current_snapshot' IN query) > 0) AND pid <> pg_backend_pid()"
)


def status(line: PipelineUnderTest, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    capsys.readouterr()
    code = run(["status", "-c", str(line.config_file), "--json"])
    return code, json.loads(capsys.readouterr().out)


def healthz(line: PipelineUnderTest) -> tuple[int, Any]:
    code, body = line.daemon.get("/healthz")
    return code, json.loads(body or b"{}")


def test_an_incremental_snapshot_that_loops_on_an_error_is_not_ok(
    pipeline: NewPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    line = pipeline(_TABLE, "INSERT INTO t SELECT generate_series(1, 10)")
    line.start().wait_ready()
    wait_until(lambda: status(line, capsys)[1]["ok"], "it is not well to begin with")

    def well() -> bool:
        code, found = healthz(line)
        sentence = str(found.pop("sentence", ""))
        return (code, found) == (200, {"level": "ok", "causes": []}) and "the log lags" in sentence

    wait_until(well, "the daemon reports something else")
    with line.database.connect() as connection, connection.transaction():
        connection.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        number = begin(line, "public.t")
        _errors_are_reported(line, number, capsys)
    wait_until(lambda: (found(line, number) or _NONE).state == "done", "it is not read")
    record = found(line, number)
    assert record is not None
    assert (record.errors, record.failing_since_us) == (0, None)
    wait_until(lambda: status(line, capsys)[1]["ok"], "what has passed is not over")


def _errors_are_reported(
    line: PipelineUnderTest, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def erred() -> bool:
        line.query(_KILL)
        return bool((found(line, number) or _NONE).errors >= 2)

    wait_until(erred, "no errors are counted")
    _, reported = status(line, capsys)
    assert not reported["ok"]
    [cause] = [
        each for each in reported["verdict"]["causes"] if each["about"] == "incremental_snapshot"
    ]
    assert f"the snapshot {number} of public.t has read nothing" in cause["what"]
    assert "errors in a row): " in cause["what"]
    assert cause["since_seconds"] > 0

    def agree() -> bool:
        """Whether both say the same; it grows worse with time."""
        level = status(line, capsys)[1]["verdict"]["level"]
        return bool(healthz(line)[1].get("level") == level != "ok")

    wait_until(agree, "/healthz shows something else")
    assert line.daemon.metric("lockstep_incremental_snapshot_errors") >= 2


_NONE: Any = type("None_", (), {"errors": 0, "state": ""})


def test_a_snapshot_that_has_failed_is_not_ok_until_it_is_acknowledged(
    pipeline: NewPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    line = pipeline(_TABLE, "INSERT INTO t SELECT generate_series(1, 10)")
    line.start().wait_ready()
    failed = begin(line, "public.missing")
    wait_until(lambda: (found(line, failed) or _NONE).state == "failed", "it does not fail")
    assert status(line, capsys)[0] == Exit.FAILED
    wait_until(lambda: healthz(line)[0] == 503, "/healthz does not show it")
    # A snapshot is not the stream.
    wait_until(lambda: line.daemon.health()["status"] == 200, "it is not ready")
    assert run(["snapshot", "stop", "-c", str(line.config_file)]) == Exit.CONFIG
    assert f"failed: {failed}; `cdc snapshot stop ID`" in capsys.readouterr().err
    say(line, do="stop", id=failed)
    wait_until(lambda: status(line, capsys)[1]["ok"], "it is not acknowledged")


def test_a_due_snapshot_that_was_skipped_is_never_ok(
    pipeline: NewPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    line = pipeline(_TABLE)
    line.start().wait_ready()
    wait_until(lambda: status(line, capsys)[1]["ok"], "it is not well to begin with")
    wanted = line.write("wanted.yaml", snapshot__mode="initial")
    capsys.readouterr()
    assert run(["status", "-c", str(wanted), "--json"]) == Exit.FAILED
    assert "it was skipped" in json.loads(capsys.readouterr().out)["verdict"]["sentence"]
    publisher = Publisher(line.config, "test")
    publisher.open()
    state = SnapshotState(pipeline=line.config.pipeline, stage="due")
    publisher.add(*topic.state_record(line.config, state))
    publisher.flush()
    publisher.commit()
    code, reported = status(line, capsys)
    assert code == Exit.FAILED
    assert "the initial snapshot is due" in reported["verdict"]["sentence"]


@pytest.mark.long("the other lag", sample=["1000"])
@pytest.mark.parametrize("ago", [0, 1_000])
def test_a_follower_that_reports_progress_without_any_is_not_ok(
    ago: int,
    pipeline: NewPipeline,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The frontier is the same in every report, each of which claims that it just applied some."""
    line = pipeline(_TABLE, followers=FOLLOWERS, source={"canary_seconds": 0})
    line.start().wait_ready()
    line.database.execute("INSERT INTO t VALUES (1)")
    wait_until(line.frontiers, "no frontier comes")
    monkeypatch.setattr(followers, "LATE_SECONDS", 0.2)
    monkeypatch.setattr(followers, "STALLED_SECONDS", 1.0)
    follower = FakeFollower(line.config)
    began_us = time.time_ns() // 1_000 - 1_000_000_000

    def stalled() -> bool:
        """Report again, as a job does; return whether the verdict is what it should be."""
        now_us = time.time_ns() // 1_000
        follower.report(
            lsn=LSN(1), seq=0, place=0, state="following", began_at_us=began_us,
            moved_at_us=now_us - ago, canary_at_us=now_us,
        )  # fmt: skip
        code, reported = status(line, capsys)
        sentence = reported["verdict"]["sentence"]
        return code == Exit.FAILED and "cache has applied nothing for" in sentence

    wait_until(stalled, "it is called well")
    # It moves: late, and reported so, but not failed.
    follower.report(
        lsn=LSN(2), seq=0, place=0, state="following", began_at_us=began_us,
        moved_at_us=time.time_ns() // 1_000, canary_at_us=time.time_ns() // 1_000,
    )  # fmt: skip
    assert status(line, capsys)[1]["verdict"]["level"] != "ok"


def test_no_line_of_status_is_wrapped_when_it_is_piped(
    pipeline: NewPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    line = pipeline(_TABLE, followers=FOLLOWERS)
    run(["status", "-c", str(line.config_file)])
    out = capsys.readouterr().out.splitlines()
    assert any(text.startswith("✗ no daemon reads from the slot") for text in out)
    assert any(text.startswith("✗ cache has never run") for text in out)
    labels = [text for text in out if not text.startswith((" ", "✗", "!", "✓"))]
    assert len({text.split()[0] for text in labels}) == len(labels)
