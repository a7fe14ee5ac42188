"""`status`, /readyz and metrics report followers' positions, also while their jobs are down."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from cdc.cli.main import run
from cdc.errors import Exit
from cdc.events import LSN
from cdc.log import names, reader, topics
from cdc.log.follower_reports import SILENT_SECONDS
from cdc.operate import followers
from cdc.operate.doctor.run import examine
from cdc.operate.findings import Severity
from lockstep.jobs.apply.running import FollowerRun
from lockstep.sinks.contract import Applied
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.integration.test_wait import FOLLOWERS, FakeFollower


@pytest.fixture
def line(pipeline: NewPipeline) -> PipelineUnderTest:
    """A pipeline whose daemon runs, with an event in the log."""
    tables = "CREATE TABLE t (id int PRIMARY KEY)"
    line = pipeline(tables, followers=FOLLOWERS, source={"canary_seconds": 0})
    line.start().wait_ready()
    line.database.execute("INSERT INTO t VALUES (1)")
    wait_until(line.frontiers, "no frontier comes")
    return line


@pytest.fixture
def follower(line: PipelineUnderTest) -> FakeFollower:
    return FakeFollower(line.config)


def end_of_frontiers(line: PipelineUnderTest) -> int:
    place = names.frontier_topic(line.config.prefix), 0
    return reader.end_offsets(line.config, [place])[place]


def status(line: PipelineUnderTest, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    code = run(["status", "-c", str(line.config_file), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_status_shows_what_a_follower_lacks_and_since_when(
    line: PipelineUnderTest, follower: FakeFollower, capsys: pytest.CaptureFixture[str]
) -> None:
    code, reported = status(line, capsys)
    assert code == Exit.FAILED
    assert [each["state"] for each in reported["followers"]] == ["new"]
    assert reported["problems"][0]["what"] == "cache has never run"
    frontier = line.frontiers()[-1]
    follower.report(lsn=LSN(frontier.lsn - 100), seq=0, place=0, state="catching_up")
    code, reported = status(line, capsys)
    assert (code, reported["problems"]) == (Exit.OK, [])
    (cache,) = reported["followers"]
    assert cache["state"] == "catching_up"
    assert cache["lag_bytes"] >= 100
    assert cache["lag_seconds"] > 0
    assert cache["lsn"].startswith("0/")
    now_us = time.time_ns() // 1_000
    place = end_of_frontiers(line)
    # A keepalive may move the frontier meanwhile, some seconds after the last one did.
    follower.report(
        lsn=frontier.lsn, place=place + 1_000, canary_at_us=now_us, what="redis is slow"
    )
    code, reported = status(line, capsys)
    assert (code, reported["problems"]) == (Exit.OK, [])
    (cache,) = reported["followers"]
    assert cache["lag_seconds"] == 0
    assert 0 <= cache["canary_age_seconds"] < 600
    assert any("cache is following: redis is slow" in each for each in reported["warnings"])
    run(["status", "-c", str(line.config_file)])
    out = capsys.readouterr().out
    assert f"following; holds all up to {frontier.lsn}, seq 0; lags by" in out
    assert "; canary " in out
    assert "every store" not in out
    follower.report(lsn=frontier.lsn, place=place + 1_000, canary_at_us=now_us, moved_at_us=now_us)
    run(["status", "-c", str(line.config_file)])
    assert "✓ every store lags the log by at most 1 s" in capsys.readouterr().out


def test_a_job_that_stalls_at_its_first_batch_is_not_ok(
    line: PipelineUnderTest, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the job runs and reports."""
    monkeypatch.setattr(followers, "LATE_SECONDS", 0.2)
    monkeypatch.setattr(followers, "STALLED_SECONDS", 0.4)

    def session(run: FollowerRun) -> None:
        run.opened_at(Applied.beginning(line.config.pipeline, 1))
        run.to("catching_up")
        run.stopping.wait()

    job = FollowerRun(line.config, "cache", "redis", session)
    thread = threading.Thread(target=job.run)
    thread.start()
    try:
        wait_until(
            lambda: [
                each
                for each in status(line, capsys)[1]["problems"]
                if "cache has applied nothing for" in each["what"]
            ],
            "it is not reported",
        )
        assert run(["status", "-c", str(line.config_file)]) == Exit.FAILED
        assert "every store" not in capsys.readouterr().out
        reported = {each.what: each for each in examine(line.config) if each.check == "follower"}
        assert [each.severity for each in reported.values()] == [Severity.ERROR]
    finally:
        job.stop()
        thread.join()


def test_status_shows_which_follower_has_halted_or_does_not_run(
    line: PipelineUnderTest, follower: FakeFollower, capsys: pytest.CaptureFixture[str]
) -> None:
    far = end_of_frontiers(line) + 1_000
    follower.report(state="halted", place=far, what="a gap in t", hint="cdc rebuild cache")
    code, reported = status(line, capsys)
    assert code == Exit.CONFIG
    assert reported["problems"] == [
        {"what": "cache has halted: a gap in t", "hint": "cdc rebuild cache", "exit_code": 78}
    ]
    follower.report(state="stopped", place=far)
    code, reported = status(line, capsys)
    assert (code, reported["followers"][0]["state"]) == (Exit.FAILED, "stopped")
    old_us = time.time_ns() // 1_000 - int(SILENT_SECONDS + 9) * 1_000_000
    follower.report(place=far, at_us=old_us)
    code, reported = status(line, capsys)
    assert (code, reported["followers"][0]["state"]) == (Exit.FAILED, "not_running")
    assert reported["problems"][0]["hint"] == "cdc follow --followers cache"
    # Retention deletes what the follower has not applied.
    place = names.frontier_topic(line.config.prefix), 0
    client = topics.admin(line.config)
    client.delete_records([TopicPartition(*place, end_of_frontiers(line))])[
        TopicPartition(*place)
    ].result(60)
    line.database.execute("INSERT INTO t VALUES (2)")
    wait_until(line.frontiers, "no frontier comes")
    follower.report(place=0)
    code, reported = status(line, capsys)
    assert code == Exit.CONFIG
    assert reported["problems"][0]["what"] == "the log no longer holds what cache has not applied"


def test_the_daemon_shows_its_followers_and_stays_ready(
    line: PipelineUnderTest, follower: FakeFollower
) -> None:
    daemon = line.daemon

    def shown() -> tuple[int, list[str]]:
        reported = daemon.health()
        return reported["status"], [each["state"] for each in reported.get("followers", ())]

    wait_until(lambda: shown() == (200, ["new"]), "none is shown")
    text = ""

    def waiting() -> bool:
        """Report again, as a job does; return whether the daemon shows it."""
        nonlocal text
        now_us = time.time_ns() // 1_000
        follower.report(seq=7, place=0, events=5, errors=2, canary_at_us=now_us, state="waiting")
        text = daemon.get("/metrics")[1].decode()
        state = 'lockstep_follower_state{follower="cache",state="waiting"} 1.0'
        return state in text and shown() == (200, ["waiting"])

    wait_until(waiting, "the report is not shown")
    assert daemon.metric("lockstep_follower_seq") == 7
    assert 'lockstep_follower_state{follower="cache",state="following"} 0.0' in text
    assert 'lockstep_follower_events_total{follower="cache"} 5.0' in text
    assert 'lockstep_follower_errors_total{follower="cache"} 2.0' in text
    for name in ("lag_bytes", "lag_seconds", "canary_age_seconds"):
        assert daemon.metric(f"lockstep_follower_{name}") > 0


@pytest.mark.long("the findings have unit tests")
def test_the_doctor_shows_what_followers_lack(
    line: PipelineUnderTest, follower: FakeFollower
) -> None:
    line.daemon.term()
    found = {each.check: each for each in examine(line.config)}
    assert found["followers"].severity is Severity.OK
    assert (found["follower"].severity, found["follower"].what) == (
        Severity.NOTE,
        "cache has never run",
    )
    line.database.execute("CREATE TABLE keyless (a text)")
    follower.report(what="redis is slow", place=end_of_frontiers(line))
    found = {each.check: each for each in examine(line.config)}
    assert "public.keyless" in found["followers_key"].what
    assert found["followers_key"].severity is Severity.ERROR
    client, topic = topics.admin(line.config), names.followers_topic(line.config.prefix)
    topics.delete(client, [topic])
    wait_until(lambda: not topics.describe(client, [topic]), "the topic stays")
    missing = [each for each in examine(line.config) if topic in each.what]
    assert [each.fix for each in missing] == ["cdc setup"]
