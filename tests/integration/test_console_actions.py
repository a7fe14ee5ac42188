"""What a viewer may do: the commands that the page shows, nothing that another page asks for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import redis

from cdc.deliver import undelivered, webhooks
from cdc.log import names
from cdc.log.follower_reports import read
from cdc.log.group_records import UndeliveredRecord
from tests.fixtures.console import ConsoleUnderTest
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.followed import alongside, reach
from tests.fixtures.receiver import Receiver
from tests.integration.test_incremental_snapshot import begin, found, wait_state
from tests.integration.test_verdict_store import run_of
from tests.integration.test_webhooks import SECRET, hooked

_TABLE = "CREATE TABLE t (id int PRIMARY KEY)"
_SNAPSHOT = "cdc snapshot start public.t"
_LONG = 300.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What ends with the test."""
    with ExitStack() as found:
        yield found


def console(
    line: PipelineUnderTest, stack: ExitStack, log: Path, *options: str
) -> ConsoleUnderTest:
    file = line.write("console.yaml", http__listen=f"127.0.0.1:{line.daemon.port}")
    found = ConsoleUnderTest(file, log, *options)
    stack.callback(found.close)
    return found


def runs(shown: ConsoleUnderTest) -> list[dict[str, Any]]:
    return list(shown.get("/api/status")[1]["actions"])


def given_up(line: PipelineUnderTest, group: str, number: int) -> str:
    """Note in the log that a group gave up an event; return its id."""
    topic = names.data_topic(line.config.prefix, "public", "t")
    record = UndeliveredRecord(
        pipeline=line.config.pipeline, group=group, id=f"{line.config.pipeline}-1-{number}",
        topic=topic, partition=0, offset=number, why="HTTP 400 <b>no</b>", attempts=3,
        at_us=time.time_ns() // 1_000,
    )  # fmt: skip
    undelivered.write(line.config, record)
    return record.id


def test_a_viewer_runs_the_command_that_is_shown_and_it_is_recorded(
    pipeline: NewPipeline, stack: ExitStack, tmp_path: Path
) -> None:
    line = pipeline(_TABLE, "INSERT INTO t VALUES (1), (2)")
    line.start().wait_ready()
    line.database.execute("INSERT INTO t VALUES (3)")
    wait_until(line.frontiers, "the log has no frontier")
    shown = console(line, stack, tmp_path / "console.log", "--allow-actions")
    status, found = shown.act("snapshot", "public.t", command=_SNAPSHOT)
    assert (status, found) == (202, {"number": 1})
    wait_until(lambda: runs(shown)[0]["exit_code"] is not None, "it does not end")
    [run] = runs(shown)
    assert (run["exit_code"], run["command"], run["by"]) == (0, _SNAPSHOT, "127.0.0.1")
    assert "asked for public.t" in run["output"]
    wait_until(lambda: line.frontiers()[-1].seq >= 4, "the rows are not read")
    chosen, other = (
        given_up(line, f"{kind}.mail", at) for at, kind in ((1, "queue"), (2, "webhook"))
    )
    wait_until(lambda: shown.get("/api/dead")[1]["undecided"] == 2, "they are not shown")
    command = f"cdc queue discard --yes mail {chosen}"
    assert shown.act("discard", "queue.mail", chosen, command)[0] == 202
    wait_until(lambda: shown.get("/api/dead")[1]["undecided"] == 1, "it is not decided")
    letters = {each["id"]: each for each in shown.get("/api/dead")[1]["events"]}
    assert letters[other]["state"] == "undelivered"
    assert letters[chosen]["state"] == "discarded"
    assert letters[chosen]["decided_by"].endswith("by the console, 127.0.0.1")
    assert shown.get("/api/large")[1] == {"events": []}
    # The command ends after its record is in the log.
    wait_until(lambda: shown.log.count("an action has ended") == 2, "it does not end")
    assert shown.log.count("an action starts") == 2
    # What another page, an older page, or somebody who guesses would send.
    for headers in (
        {"origin": ""},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"x_lockstep_console": ""},
        {"content_type": "text/plain"},
        {"content_type": "application/x-www-form-urlencoded"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "none"},
    ):
        assert shown.act("snapshot", "public.t", command=_SNAPSHOT, **headers)[0] == 403, headers
    for wrong in (
        ("snapshot", "public.t", "", "cdc snapshot start public.u"),
        ("snapshot", "--initial", "", "cdc snapshot start --initial"),
        ("teardown", "", "", "cdc teardown"),
        ("rebuild", "nosuch", "", "cdc rebuild nosuch"),
        ("stop", "", "; reboot", "cdc snapshot stop '; reboot'"),
        ("snapshot", "x" * 9_000, "", "x"),
    ):
        assert shown.act(*wrong)[0] == 400, wrong
    assert shown.ask("/api/act")[0] == 403
    assert len(runs(shown)) == 2


def acted(shown: ConsoleUnderTest, *asked: str) -> dict[str, Any]:
    """Run an action to its end; return the command's run, which the console lists and logs."""
    status, answer = shown.act(*asked)
    assert status == 202, answer

    def run() -> dict[str, Any]:
        return next(each for each in runs(shown) if each["number"] == answer["number"])

    wait_until(lambda: run()["exit_code"] is not None, f"{asked[-1]} does not end", _LONG)
    ended = run()
    assert (ended["exit_code"], ended["command"], ended["by"]) == (0, asked[-1], "127.0.0.1"), ended
    assert (
        shown.log.count(f'"event": "an action starts", "fields": {{"command": "{asked[-1]}"') == 1
    )
    return ended


def test_a_viewer_pauses_resumes_and_stops_a_snapshot(
    pipeline: NewPipeline, stack: ExitStack, tmp_path: Path
) -> None:
    line = pipeline(_TABLE, "INSERT INTO t VALUES (1), (2)")
    line.start().wait_ready()
    shown = console(line, stack, tmp_path / "console.log", "--allow-actions")
    with line.database.connect() as connection, connection.transaction():
        # So that it is still running when it is paused.
        connection.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        number = begin(line, "public.t")
        wait_until(lambda: found(line, number), "it does not start")
        for action, state in (("pause", "paused"), ("resume", "running"), ("stop", "stopped")):
            acted(shown, action, "", number, f"cdc snapshot {action} {number}")
            assert wait_state(line, number, state).rows == 0
    line.database.execute("INSERT INTO t VALUES (3)")
    wait_until(lambda: line.frontiers() and line.frontiers()[-1].seq >= 1, "the log is stalled")
    assert wait_state(line, number, "stopped").rows == 0


def test_a_viewer_sends_an_event_again_that_a_webhook_gave_up(
    pipeline: NewPipeline, stack: ExitStack, tmp_path: Path
) -> None:
    refusing = True
    receiver = stack.enter_context(Receiver(SECRET, lambda _: 400 if refusing else 204))
    line = hooked(pipeline, receiver, attempts=1)
    line.database.execute("INSERT INTO t VALUES (1, 1)")
    with closing(webhooks.WebhookRun(line.config, "hook")) as hook:
        hook.run(lambda: hook.counts.given_up == 2)
    first, second = undelivered.read(line.config, "webhook.hook")
    shown = console(line, stack, tmp_path / "console.log", "--allow-actions")
    command = f"cdc webhook send hook {first.id}"
    assert shown.act("send", "hook", first.id, command)[0] == 202
    wait_until(lambda: runs(shown)[0]["exit_code"] is not None, "it does not end")
    assert runs(shown)[0]["exit_code"] == 1, "the receiver still refuses it"
    assert [each.state for each in undelivered.read(line.config, "webhook.hook")] == (
        ["undelivered"] * 2
    )
    refusing = False
    sent = acted(shown, "send", "hook", second.id, f"cdc webhook send hook {second.id}")
    assert second.id in sent["output"]
    assert [each["id"] for each in receiver.delivered] == [second.id]
    decided = {each.id: each for each in undelivered.read(line.config, "webhook.hook")}
    assert (decided[first.id].state, decided[second.id].state) == ("undelivered", "sent again")
    assert decided[second.id].decided_by.endswith("by the console, 127.0.0.1")
    letters = {each["id"]: each["state"] for each in shown.get("/api/dead")[1]["events"]}
    assert letters == {first.id: "undelivered", second.id: "sent again"}


@pytest.mark.long("a Spark job of its own")
def test_a_viewer_builds_a_followers_store_again(
    pipeline: NewPipeline,
    stack: ExitStack,
    tmp_path: Path,
    redis_url: str,
    redis_client: redis.Redis,
) -> None:
    followers = {"cache": {"redis": {"url": redis_url}}}
    line = pipeline(_TABLE, followers=followers, source={"canary_seconds": 0})
    line.start().wait_ready()
    line.database.execute("INSERT INTO t VALUES (1), (2), (3)")
    wait_until(line.frontiers, "the log has no frontier")
    run = run_of(line, "cache")
    with alongside({"cache": run}):
        reach(line.frontiers()[-1].lsn, [run])
    before = read(line.config)["cache"]
    [lost, *others] = sorted(redis_client.scan_iter(f"{line.config.prefix}:public.t:*"))
    assert len(others) == 2
    redis_client.delete(lost)
    shown = console(line, stack, tmp_path / "console.log", "--allow-actions")
    acted(shown, "rebuild", "cache", "", "cdc rebuild cache")
    rebuilt = read(line.config)["cache"]
    assert (before.generation, rebuilt.generation) == (1, 2)
    assert rebuilt.lsn >= before.lsn
    with alongside({"cache": run_of(line, "cache")}):
        wait_until(lambda: redis_client.exists(lost), "the row that was lost is not there again")


@pytest.mark.long("two more consoles")
def test_a_console_changes_nothing_unless_it_was_started_for_that(
    pipeline: NewPipeline, stack: ExitStack, tmp_path: Path
) -> None:
    line = pipeline(_TABLE)
    line.start().wait_ready()
    shown = console(line, stack, tmp_path / "read-only.log")
    status, found = shown.act("snapshot", "public.t", command=_SNAPSHOT)
    assert (status, "read-only" in found["error"]) == (403, True)
    assert shown.get("/api/status")[1]["actions"] is None
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef\n", "utf-8")
    log = tmp_path / "token.log"
    guarded = console(line, stack, log, "--allow-actions", "--token-file", str(token))
    assert guarded.act("snapshot", "public.t", command=_SNAPSHOT)[0] == 401
    right = f"Bearer {token.read_text('utf-8').strip()}"
    # It waits for a daemon that reads its request: the command ends with the console.
    wait = guarded.act("pause", command="cdc snapshot pause", authorization=right)
    assert wait[0] == 202
    began = time.monotonic()
    assert guarded.close() == 0
    assert time.monotonic() - began < 60, "it waited for the command"
    assert "0123456789" not in guarded.log
