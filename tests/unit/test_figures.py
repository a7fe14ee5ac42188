"""Figures on the pages are those that the kept results have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
FIGURES = (ROOT / "benchmarks" / "README.md").read_text("utf-8").partition("## The figures")[2]


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    return found


def row(start: str) -> str:
    """Return the line of the table of figures that starts so."""
    return next(line for line in FIGURES.splitlines() if line.startswith(f"| {start}"))


def test_the_readmes_drain_is_the_kept_one() -> None:
    found = re.search(r"([\d.]+) . Debezium's best settings at draining", README)
    assert found is not None
    assert float(found[1]) == round(result("drain-inserts")["of_peer"], 1)


@pytest.mark.parametrize(
    ("copies", "of_peer", "of_peer_p99"),
    [
        ("two copies or more", "of_peer", "of_peer_p99"),
        ("one, the default", "librdkafka_of_peer", "librdkafka_of_peer_p99"),
    ],
)
def test_the_readmes_latencies_include_the_kept_ones(
    copies: str, of_peer: str, of_peer_p99: str
) -> None:
    before = README.partition(copies)[0]
    numbers = [float(each) for each in re.findall(r"(\d\.\d)\b", before)[-4:]]
    kept = result("latency")
    for name, (low, high) in ((of_peer, numbers[:2]), (of_peer_p99, numbers[2:])):
        assert low <= round(kept[name], 1) <= high, name


@pytest.mark.parametrize(
    ("start", "name", "figure"),
    [
        ("drain a backlog", "drain-inserts", "of_peer"),
        ("drain pgbench's mix", "drain-tpcb", "of_peer"),
        ("initial snapshot", "snapshot-log", "of_peer"),
        ("Redis", "follow-redis", "of_floor"),
        ("OpenSearch", "follow-search", "of_floor"),
        ("Delta, 5 M rows", "follow-delta", "of_peer"),
        ("one transaction of 2 M", "follow-delta-large", "of_small"),
        ("one transaction of 2 M", "follow-delta-large", "of_one_worker"),
        ("100 changes of a history", "follow-history", "growth"),
        ("100 changes of a history", "follow-keyless", "growth"),
        ("100 changes of documents", "follow-documents", "growth"),
        ("archive of 10 M", "archive", "of_one_worker"),
        ("archive of 10 M", "archive", "bytes_of_log"),
        ("Delta follower of 1 M", "rebuild", "of_full_archive"),
        ("Delta follower of 1 M", "rebuild", "of_snapshot"),
        ("TPC-H", "view-tpch", "of_full"),
        ("0.1 % of 10 M", "view-refresh", "of_full"),
        ("0.1 % of 10 M", "view-refresh", "growth"),
        ("a view of 10 M", "view-backfill", "of_one_worker"),
        ("home timelines", "view-timeline", "of_full"),
    ],
)
def test_a_rows_ratio_is_the_kept_one(start: str, name: str, figure: str) -> None:
    """Or is in the range of the row's, where it was measured more than once."""
    kept = result(name)[figure]
    line = row(start)
    ranges = [
        (float(low), float(high)) for low, high in re.findall(r"(\d\.\d+) to (\d\.\d+)", line)
    ]
    single = re.findall(r"\d\.\d+", line)
    assert any(round(kept, len(each.partition(".")[2])) == float(each) for each in single) or any(
        low <= kept <= high for low, high in ranges
    ), f"{name} has {figure} {kept}"
