"""`cdc console` on real servers: what it shows is what `cdc status` and the log have."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cdc.cli.main import run
from cdc.events import LSN
from cdc.log import acknowledged, names, records
from cdc.snapshot.incremental.records import IncrementalRecord, incremental_key
from tests.fixtures.console import ConsoleUnderTest
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.integration.test_wait import FOLLOWERS, FakeFollower

_TABLES = (
    'CREATE TABLE "<img src=x onerror=alert(1)>" (id int PRIMARY KEY, name text, card text)',
    "CREATE TABLE t (id int PRIMARY KEY, note text, card text)",
)
_MASKS = {"public.t": {"mask": {"card": {"fixed": "hidden"}}}}
_EVIL = "public.<img src=x onerror=alert(1)>"

NewConsole = Callable[..., ConsoleUnderTest]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What ends with the test."""
    with ExitStack() as found:
        yield found


@pytest.fixture
def console(tmp_path: Path, stack: ExitStack) -> NewConsole:
    """Start consoles that end with the test."""

    def start(line: PipelineUnderTest, *options: str, **changed: str) -> ConsoleUnderTest:
        file = line.write("console.yaml", http__listen=_daemon(line), **changed)
        found = ConsoleUnderTest(file, tmp_path / "console.log", *options)
        stack.callback(found.close)
        return found

    return start


def status(line: PipelineUnderTest, capsys: pytest.CaptureFixture[str]) -> Any:  # noqa: ANN401 - JSON
    capsys.readouterr()
    run(["status", "-c", str(line.write("console.yaml", http__listen=_daemon(line))), "--json"])
    return json.loads(capsys.readouterr().out)


def _daemon(line: PipelineUnderTest) -> str:
    return f"127.0.0.1:{line.daemon.port}"


def test_the_console_shows_the_status_the_tables_and_each_committed_row(
    pipeline: NewPipeline,
    console: NewConsole,
    stack: ExitStack,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = pipeline(*_TABLES, followers=FOLLOWERS, tables=_MASKS, source={"canary_seconds": 0})
    line.start().wait_ready()
    shown = console(line)
    wait_until(lambda: shown.verdict() == status(line, capsys)["verdict"], "two verdicts")
    # A follower that never ran: its frontier cannot advance.
    wait_until(lambda: shown.verdict()["level"] == "failed", "it is seen to be well")
    follower = FakeFollower(line.config)

    def well() -> bool:
        # Again and again, as a job does: a report of 20 seconds ago means one that does not run.
        now_us = time.time_ns() // 1_000
        follower.report(lsn=LSN(1), seq=0, place=0, state="following", began_at_us=now_us)
        return bool(shown.verdict()["level"] == "ok")

    wait_until(well, "it is not seen to be well")
    events = stack.enter_context(closing(shown.stream("/api/tail")))
    assert next(events)[0] == "rate"
    line.database.execute("INSERT INTO t VALUES (1, '<b>first</b>', '4111')")
    changes = (data for kind, data in events if kind == "change")
    first = next(changes)
    assert (first["table"], first["op"], first["key"]) == ("public.t", "c", {"id": 1})
    assert first["after"] == {"id": 1, "note": "<b>first</b>", "card": "hidden"}
    line.database.execute(f"INSERT INTO \"{_EVIL[7:]}\" VALUES (7, 'x', '4111')")
    assert next(changes)["table"] == _EVIL
    wait_until(lambda: _counts(shown, _EVIL) == [(1, 1)], "the table is not shown with its event")
    filtered = stack.enter_context(closing(shown.stream("/api/tail?table=public.t&ops=d")))
    assert next(filtered)[0] == "rate"
    line.database.execute("INSERT INTO t VALUES (2)")
    line.database.execute("DELETE FROM t WHERE id = 2")
    assert next(data for kind, data in filtered if kind == "change")["key"] == {"id": 2}
    _, explained = shown.get("/api/explain?table=public.t&key=1")
    assert explained["versions"][0]["after"] == first["after"]  # masked, too


def _counts(shown: ConsoleUnderTest, name: str) -> list[tuple[int, int]]:
    """Return how many versions and events are shown of a table.

    A measurement may have a table's version before the feed has its first event: no changes yet.
    """
    found = [each for each in shown.get("/api/tables")[1]["tables"] if each["name"] == name]
    return [(each["versions"], (each["changes"] or {"events": 0})["events"]) for each in found]


def test_a_table_shows_how_far_its_snapshot_is(pipeline: NewPipeline, console: NewConsole) -> None:
    line = pipeline(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 20000) i",
        "CREATE TABLE later (id int PRIMARY KEY)",
        # Of minutes, if nothing stops it.
        snapshot={
            "mode": "initial",
            "runner": "local",
            "max_parallel": 1,
            "range_bytes": 65_536,
            "rows_per_second": 100,
        },
    )
    line.start()
    wait_until(lambda: line.daemon.health().get("snapshot"), "no snapshot runs")
    shown = console(line)

    def progress(name: str) -> dict[str, Any]:
        found = {each["name"]: each for each in shown.get("/api/tables")[1]["tables"]}
        return (found.get(name) or {}).get("snapshot") or {}

    wait_until(lambda: 0 < (progress("public.t").get("percent") or 0) < 100, "no progress")
    initial = progress("public.t")
    assert (initial["kind"], initial["state"]) == ("initial", "running")
    assert 0 < initial["rows"] < 20_000
    assert progress("public.later")["kind"] == "initial"
    line.daemon.kill()
    # The daemon does not answer any more: what the log has of it.
    wait_until(lambda: progress("public.t").get("percent", 0) is None, "it is still copied")
    line.start(config_file=line.write("fast.yaml", snapshot={"mode": "initial"})).wait_ready()
    wait_until(lambda: not progress("public.t"), "it is never done")
    assert line.daemon.term() == 0
    running = IncrementalRecord(
        pipeline=line.config.pipeline, id="1", schema="public", table="t", state="running",
        rows=5_000, estimate=20_000,
    )  # fmt: skip
    for record, percent in (
        (running, 25.0),
        (replace(running, rows=30_000), 99.0),  # the estimate was too low
        (replace(running, where="id < 9"), None),
        (replace(running, estimate=None), None),
    ):
        written = incremental_key(line.config.pipeline, "1"), records.encode(record)
        acknowledged.write(line.config, names.snapshot_topic(line.config.prefix), [written])
        seen = {"kind": "incremental", "rows": record.rows, "percent": percent}
        wait_until(lambda: seen.items() <= progress("public.t").items(), f"not {seen}")  # noqa: B023
    assert not progress("public.later")


def test_a_daemon_that_was_killed_is_not_well_in_the_console_either(
    pipeline: NewPipeline, console: NewConsole
) -> None:
    line = pipeline(*_TABLES)
    line.start().wait_ready()
    shown = console(line)
    wait_until(lambda: shown.verdict()["level"] == "ok", "it is not well to begin with")
    line.daemon.kill()
    wait_until(lambda: shown.verdict()["level"] == "failed", "nobody notices")


@pytest.mark.parametrize(
    ("setting", "value", "name", "left"),
    [
        ("source__dsn", "host=127.0.0.1 port=9 dbname=none", "Postgres", "resume"),
        ("log__bootstrap_servers", "127.0.0.1:9", "Kafka", "source"),
    ],
)
def test_a_server_that_does_not_answer_is_named_and_the_other_is_shown(
    setting: str, value: str, name: str, left: str, pipeline: NewPipeline, console: NewConsole
) -> None:
    line = pipeline(*_TABLES)
    line.start().wait_ready()
    shown = console(line, **{setting: value})

    def seen() -> bool:
        """Whether one measurement has both: what does not answer, and what the other has."""
        measured = shown.get("/api/status")[1]["measured"]
        if measured is None:
            return False
        status = measured["status"]
        causes = [each for each in status["verdict"]["causes"] if each["about"] == "server"]
        named = [each for each in causes if name in each["what"]]
        failed = status["verdict"]["level"] == "failed"
        return failed and len(named) == len(causes) == 1 and status[left] is not None

    wait_until(seen, "it is not seen")
    assert shown.ask("/api/tables")[0] == shown.ask("/api/chart")[0] == 200


def closed(connection: socket.socket) -> bool:
    """Return whether the server closes the connection without an answer."""
    try:
        return connection.recv(1_000) == b""
    except ConnectionResetError:
        return True


def test_a_client_that_sends_slowly_or_too_much_keeps_nobody_out(
    pipeline: NewPipeline, console: NewConsole
) -> None:
    line = pipeline(*_TABLES)
    line.start().wait_ready()
    shown = console(line)
    assert shown.port is not None
    with ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection(("127.0.0.1", shown.port), timeout=60))
            for _ in range(150)
        ]
        began = time.monotonic()
        for each in slow:
            with suppress(ConnectionError):
                each.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow:")
        assert shown.ask("/")[0] == 200
        for each in slow[:50]:
            assert closed(each)  # at once: with more than a hundred the oldest leave
        others = select.select(slow[50:], [], [], 0)[0]
        assert not others or time.monotonic() - began >= 8
        for each in slow:
            assert closed(each)
    assert shown.ask("/", x_large="x" * 20_000)[0] == 431
    assert shown.ask("/../../etc/passwd")[0] == 404
    assert shown.ask("/api/status", method="POST")[0] == 405
    assert shown.ask("/")[0] == 200


def test_a_token_is_required_and_appears_in_no_log(
    pipeline: NewPipeline, console: NewConsole, tmp_path: Path
) -> None:
    line = pipeline(*_TABLES)
    line.start().wait_ready()
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef\n", "utf-8")
    shown = console(line, "--token-file", str(token))
    assert shown.ask("/")[0] == 200
    assert shown.get("/api/status")[0] == 401
    assert shown.get("/api/status", authorization="Bearer 0123456789abcdef")[0] == 401
    right = f"Bearer {token.read_text('utf-8').strip()}"
    assert shown.get("/api/status", authorization=right)[0] == 200
    assert shown.ask("/api/status", host="evil.example", authorization=right)[0] == 421
    assert shown.close() == 0
    assert "0123456789" not in shown.log
