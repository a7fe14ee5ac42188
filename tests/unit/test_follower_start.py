"""What a restarted follower loads and waits for before its first cut, and what it prints of it."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdc.config import Config, Log, Source
from cdc.log import absence, topics
from cdc.log.follower_reports import Readings
from cdc.log.partitions import OffsetRange
from cdc.runtime.uptime import started_at
from lockstep.jobs.apply.reporting import start, start_line
from lockstep.jobs.apply.running import FollowerRun

ROOT = Path(__file__).parents[2]
CONFIG = Config(pipeline="shop", source=Source(dsn=""), log=Log(bootstrap_servers=""))

_STARTED = """
import sys
from pathlib import Path
from cdc.config import load
from lockstep.jobs import follow
from lockstep.jobs.following_stores import run_of, start_of
config = load(Path(sys.argv[1]))
names = list(config.followers)
spark = start_of(config, names)
print(*[run_of(spark, config, name).name for name in names])
print(*sorted(sys.modules))
"""
# What only large cuts, views, documents, rebuilds and archives need. Spark alone takes a second.
_LATER = (
    *("pyspark", "py4j", "pandas", "sqlglot", "boto3"),
    *(f"lockstep.jobs.{room}" for room in ("archiving", "compacting", "documents", "generations")),
    *("lockstep.jobs.views", "lockstep.jobs.spark.session", "lockstep.jobs.apply.large"),
)


def test_followers_of_tables_import_nothing_before_their_first_cut_that_only_others_use(
    tmp_path: Path,
) -> None:
    file = tmp_path / "lockstep.yaml"
    file.write_text(
        "pipeline: shop\n"
        "source: {dsn: postgresql://localhost/none}\n"
        "log: {bootstrap_servers: 'localhost:9'}\n"
        "followers:\n"
        "  cache: {redis: {url: redis://localhost}}\n"
        "  search: {opensearch: {url: http://localhost}}\n"
        f"  mirror: {{delta: {{path: {tmp_path}/lake}}}}\n",
        "utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-c", _STARTED, str(file)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    names, modules = done.stdout.splitlines()
    assert names == "cache search mirror"
    loaded = set(modules.split())
    assert {"redis", "opensearchpy", "deltalake"} <= loaded, "each store has its client"
    early = {each for each in loaded for name in _LATER if f"{each}.".startswith(f"{name}.")}
    assert not early


class Brokers:
    """An admin client, and what it was asked, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        monkeypatch.setattr(topics, "admin", lambda _: self)

    def describe_cluster(self, **_: float) -> Future[object]:
        self.asked.append("cluster")
        return _answered(None)

    def list_offsets(self, wanted: dict[Any, object], **_: object) -> dict[Any, Future[object]]:
        self.asked.append("offsets")
        return dict.fromkeys(wanted, _answered(SimpleNamespace(offset=7)))


def _answered(value: object) -> Future[object]:
    future: Future[object] = Future()
    future.set_result(value)
    return future


def test_a_new_client_is_connected_before_it_looks_up_who_leads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a connection librdkafka asks for leaders again only after three seconds."""
    brokers = Brokers(monkeypatch)
    assert absence.spans(CONFIG, [("t", 0)]) == {("t", 0): OffsetRange(7, 7)}
    assert brokers.asked == ["cluster", "offsets", "offsets"]


def test_reports_are_read_from_an_offset_that_was_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that looks the beginning up before it is connected waits half a second."""
    brokers, started = Brokers(monkeypatch), list[dict[Any, int]]()

    class Consumer:
        positions: dict[Any, int] = {}  # noqa: RUF012 - as the real one's, of one reader

        def look_up(self, partitions: list[Any]) -> dict[Any, OffsetRange]:
            return dict.fromkeys(partitions, OffsetRange(7, 7))

        def assign(self, starts: dict[Any, int]) -> None:
            started.append(starts)
            self.positions |= starts

    monkeypatch.setattr("cdc.log.topic_readings.LogConsumer", lambda *_, **__: Consumer())
    readings = Readings(CONFIG)
    assert readings.refresh() == readings.refresh() == {}
    assert brokers.asked == ["cluster", "offsets", "offsets"], "connected once"
    assert [list(each.values()) for each in started] == [[7]], "one consumer, with an offset"


def test_a_process_started_before_its_imports_and_before_it_was_replaced() -> None:
    code = (
        "import time; from cdc.runtime import uptime; print(time.monotonic() - uptime.started_at())"
    )
    began = time.monotonic()
    done = subprocess.run(
        ["sh", "-c", 'sleep 0.3; exec "$0" -c "$1"', sys.executable, code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    if sys.platform == "linux":
        assert 0.29 <= float(done.stdout) <= time.monotonic() - began + 0.02
    assert started_at() < began


def test_a_followers_start_is_printed_in_its_parts_once_it_has_caught_up() -> None:
    run = FollowerRun(CONFIG, "cache", "redis", lambda _: None)
    began = started_at()
    run.progress.reached |= {"started": began + 1.04, "opened": began + 1.66}
    assert start(run) is None, "it has not caught up"
    run.progress.reached["caught up"] = began + 2.56
    took = start(run)
    assert took == {"imports": 1.0, "opening": 0.6, "catching_up": 0.9}
    line = "cache: caught up 2.5 s after the start: imports 1.0, opening 0.6, catching up 0.9"
    assert start_line(run, took) == line
    run.progress.reach("caught up")
    assert start(run) == took, "only the first time counts"


def test_a_standbys_start_is_when_it_took_over(monkeypatch: pytest.MonkeyPatch) -> None:
    Brokers(monkeypatch)
    run = FollowerRun(CONFIG, "cache", "redis", lambda _: None, standby_seconds=8.0)
    run.progress.reached |= {"started": 5_000.0, "opened": 5_000.5, "caught up": 5_001.5}
    took = start(run)
    assert took == {"imports": 0.0, "opening": 0.5, "catching_up": 1.0}
    assert start_line(run, took).startswith("cache: caught up 1.5 s after it took over: ")
