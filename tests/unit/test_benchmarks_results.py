"""The result's line: every field that readers compare, and nothing that names this machine."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import __main__ as command
from benchmarks import daemon, debezium, peer_files, result, rows
from benchmarks.options import Options

FIELDS = [
    *("name", "unit", "value", "limit", "floor", "peer", "of_floor", "of_peer"),
    *("cpu_s_per_million", "peak_rss_mb", "machine", "versions", "commit", "at"),
]


def built(**changed: float | str | None) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": "drain-inserts",
        "unit": "rows/s",
        "value": 150_000.4,
        "limit": 300_000.0,
        "floor": 120_000.0,
        "peer": 50_000.0,
        "cpu_s_per_million": 4.567,
        "peak_rss_mb": 78.44,
        "versions": {"postgres": "17.11"},
        "details": {"rows": 1_000_000},
    }
    return result.build(**(fields | changed))


def test_a_result_has_the_line_s_fields_first() -> None:
    shown = built()
    assert list(shown)[: len(FIELDS)] == FIELDS
    assert shown["rows"] == 1_000_000
    assert (shown["value"], shown["of_floor"], shown["of_peer"]) == (150_000, 1.25, 3.0)
    assert (shown["cpu_s_per_million"], shown["peak_rss_mb"]) == (4.57, 78.4)


def test_without_a_peer_its_fields_are_null() -> None:
    shown = built(peer=None)
    assert shown["peer"] is None
    assert shown["of_peer"] is None


def test_a_result_is_one_line_and_one_file(tmp_path: Path) -> None:
    shown = built()
    result.keep(shown, tmp_path / "results")
    assert "\n" not in result.line(shown)
    kept = (tmp_path / "results" / "drain-inserts.json").read_text()
    assert json.loads(kept) == json.loads(result.line(shown))


def test_a_result_names_neither_the_host_nor_a_path() -> None:
    line = result.line(built())
    assert socket.gethostname() not in line
    assert str(Path.home()) not in line


def test_kept_results_name_no_path() -> None:
    for kept in result.RESULTS.glob("*.json"):
        text = kept.read_text()
        assert "/tmp/" not in text  # noqa: S108 - looked for, not used
        assert "/home/" not in text
        if not kept.name.startswith("against-"):
            assert list(json.loads(text))[: len(FIELDS)] == FIELDS


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """Return what the workloads were asked to run, with a workload that runs nothing."""
    given: list[Options] = []

    def workload(options: Options) -> dict[str, Any]:
        given.append(options)
        return built(name="latency")

    known = {"latency": command.Benchmark(workload, minutes=1, minutes_alone=1)}
    monkeypatch.setattr(command, "BENCHMARKS", known)
    return given


def test_only_the_pinned_workload_is_kept(
    asked: list[Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[object] = []
    monkeypatch.setattr(result, "keep", kept.append)
    runner = CliRunner()
    assert runner.invoke(command.main, ["latency", "--seconds", "1"]).exit_code == 0
    assert not kept
    done = runner.invoke(command.main, [])
    assert json.loads(done.stdout.splitlines()[-1])["name"] == "latency"
    assert len(kept) == 1
    assert [options.seconds for options in asked] == [1.0, 60.0]


@pytest.mark.parametrize(
    ("arguments", "environment", "peer"),
    [([], {}, True), (["--no-peer"], {}, False), ([], {"PEER": "0"}, False)],
)
def test_the_peer_can_be_left_out(
    arguments: list[str],
    environment: dict[str, str],
    peer: bool,  # noqa: FBT001 - a parameter
    asked: list[Options],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(result, "keep", lambda _: None)
    done = CliRunner(env=environment).invoke(command.main, [*arguments])
    assert done.exit_code == 0, done.output
    assert [options.peer for options in asked] == [peer]


def test_an_unknown_workload_names_those_there_are() -> None:
    done = CliRunner().invoke(command.main, ["drain-nothing"])
    assert done.exit_code == 2
    assert all(name in done.output for name in command.BENCHMARKS)


def test_rows_that_do_not_fill_transactions_are_refused() -> None:
    done = CliRunner().invoke(command.main, ["drain-inserts", "--rows", "150"])
    assert done.exit_code == 2
    assert "transactions of 100" in done.output


def test_what_all_of_them_take_is_reported_and_bearable() -> None:
    assert "latency" in command.estimate(("latency",), peer=True)
    assert sum(each.minutes for each in command.BENCHMARKS.values()) <= 330


def test_a_row_s_values_carry_no_percent_sign() -> None:
    """If the id is a parameter, a percent sign would be read as the start of a placeholder."""
    assert "%" not in rows.VALUES


def test_every_artifact_of_the_peer_is_locked() -> None:
    names = {each.name for each in peer_files.lock()["debezium"]}
    assert {"debezium-connector-postgres", "debezium-api", "postgresql"} <= names
    assert {"connect-runtime", "connect-json"} <= {
        each.name for each in peer_files.lock()["connect"]
    }
    assert all(len(each.sha256) == 64 for each in peer_files.lock()["connect"])


def test_the_peer_s_settings_are_recorded() -> None:
    peer = peer_files.Peer(java="java", class_path="", plugins="")
    assert debezium.fast(peer).settings["poll.interval.ms"] == 10
    assert debezium.best(peer).settings["producer.compression.type"] == "lz4"
    assert set(debezium.default(peer).settings) == {"heap", "partitions"}
    assert daemon.Daemon().settings == {"log.partitions": 4}
