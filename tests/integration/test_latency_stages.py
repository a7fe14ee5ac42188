"""The stages of a latency add up to it, by change and by batch, in a real run."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import latency_stages
from benchmarks.arrivals import Arrivals
from cdc.log.trace import STAGES
from tests.fixtures.daemon import NewPipeline, wait_until

if TYPE_CHECKING:
    from pathlib import Path

_ROWS = 400
_TABLE = "CREATE TABLE bench (id int PRIMARY KEY, name text)"


class Run:
    """A traced run: its trace, its /metrics, and the changes as a reader saw them."""

    def __init__(self, new_pipeline: NewPipeline, folder: Path) -> None:
        line = new_pipeline(_TABLE, source={"canary_seconds": 0})
        trace = folder / "trace.json"
        daemon = line.start(program=("benchmarks.traced_daemon", str(trace))).wait_ready()
        arrivals = Arrivals(line.bootstrap, f"{line.config.prefix}.public.bench", [0, 1, 2])
        from_us = time.time_ns() // 1_000
        try:
            with line.database.connect() as connection:
                for number in range(1, _ROWS + 1):
                    connection.execute("INSERT INTO bench VALUES (%s, 'Ada')", (number,))
            arrivals.collect_all(_ROWS)
        finally:
            arrivals.close()
        self.journeys = arrivals.journeys(from_us, time.time_ns() // 1_000)
        # The last of a batch's metrics that are set: the others have counted the batch then.
        wait_until(lambda: daemon.metric("lockstep_seq") == _ROWS, "not all is confirmed")
        text = daemon.get("/metrics")[1].decode()
        self.metrics = {
            sample.name + "".join(sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert daemon.term() == 0
        self.trace: dict[str, Any] = json.loads(trace.read_text())


@pytest.fixture
def run(pipeline: NewPipeline, tmp_path: Path) -> Run:
    return Run(pipeline, tmp_path)


def test_the_stages_of_every_change_and_of_every_batch_add_up(run: Run) -> None:
    changes = latency_stages.staged(run.journeys, run.trace)
    assert len(changes) == _ROWS
    for change in changes:
        assert sum(change.stages_us) == change.latency_us
        # The daemon's own clock is monotonic; it agrees only closely with the clocks at both ends.
        assert min(change.stages_us[1:-1]) >= 0
    for batch in run.trace["batches"]:
        assert all(before <= after for before, after in pairwise(batch["moments_us"]))
    assert sum(batch["events"] for batch in run.trace["batches"]) == _ROWS
    table = latency_stages.table(changes)
    assert list(table) == list(latency_stages.STAGES)
    mean_ms = sum(change.latency_us for change in changes) / len(changes) / 1_000
    assert sum(stage["mean_ms"] for stage in table.values()) == pytest.approx(mean_ms, abs=0.01)
    # The extra time of the slow changes is divided among the stages completely.
    shares = [stage["of_what_slow_take_more"] for stage in table.values()]
    assert sum(shares) == pytest.approx(1, abs=0.01)
    # The metrics' stages are those of the batches that had ended when the metrics were read.
    traced = dict.fromkeys(STAGES, 0.0)
    ended = int(run.metrics["lockstep_kafka_transactions_total"])
    for batch in run.trace["batches"][:ended]:
        for stage, (began_us, ended_us) in zip(STAGES, pairwise(batch["moments_us"]), strict=True):
            traced[stage] += (ended_us - began_us) / 1e6
    for stage, seconds in traced.items():
        shown = run.metrics[f"lockstep_batch_stage_seconds_sum{stage}"]
        assert shown == pytest.approx(seconds, abs=0.001), stage
