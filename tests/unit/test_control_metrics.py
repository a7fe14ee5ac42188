"""Metrics are plain attributes until they are read, and describe what they measure."""

from __future__ import annotations

import re
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cdc.log.batch import BatchContents
from cdc.log.trace import STAGES, Moments
from cdc.operate.health import HealthState
from cdc.operate.metrics import Metrics
from tests.property.stream import position


def samples(metrics: Metrics) -> dict[str, float]:
    return {
        sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


def test_attributes_come_out_as_samples() -> None:
    metrics = Metrics(now=lambda: 50.0)
    metrics.wal_end_lsn, metrics.published_lsn = 300, 100
    metrics.feedback_at = 47.5
    metrics.state = HealthState.STREAMING
    metrics.events += 5
    metrics.reconnected("UnavailableError")
    metrics.reconnected("UnavailableError")
    metrics.commit_seconds.observe(0.01)
    found = samples(metrics)
    assert found["lockstep_lag_bytes"] == 200
    assert found["lockstep_feedback_age_seconds"] == 2.5
    assert found["lockstep_state[streaming]"] == 1
    assert found["lockstep_state[halted]"] == 0
    assert found["lockstep_events_total"] == 5
    assert found["lockstep_reconnects_total[UnavailableError]"] == 2
    assert found["lockstep_kafka_commit_seconds_count"] == 1
    assert found["process_resident_memory_bytes"] > 0


def test_the_stages_of_a_batch_are_histograms_that_add_up_to_all_of_it() -> None:
    metrics = Metrics()
    moments = Moments(received=10.0, handed_over=10.001)
    moments.acknowledged, moments.in_turn = 10.004, 10.004
    moments.answered, moments.confirmed = 10.1, 20.1
    metrics.committed(position(seq=5), BatchContents(5, 100, None), moments)
    found = samples(metrics)
    seconds = [found[f"lockstep_batch_stage_seconds_sum[{stage}]"] for stage in STAGES]
    assert seconds == pytest.approx([0.001, 0.003, 0, 0.096, 10])
    assert [found[f"lockstep_batch_stage_seconds_count[{stage}]"] for stage in STAGES] == [1] * 5
    assert found["lockstep_batch_stage_seconds_bucket[0.002][acknowledge]"] == 0
    assert found["lockstep_batch_stage_seconds_bucket[0.004][acknowledge]"] == 1
    assert found["lockstep_kafka_commit_seconds_sum"] == pytest.approx(10.099)


def test_a_clock_that_was_set_back_makes_no_negative_lag() -> None:
    metrics, ahead_us = Metrics(), int((time.time() + 3_600) * 1e6)
    metrics.committed(
        position(seq=5, end_lsn=200, committed_at_us=ahead_us),
        BatchContents(5, 100, None),
        Moments(received=0.0, handed_over=0.0),
    )
    metrics.wal_end_lsn = 100
    found = samples(metrics)
    assert found["lockstep_lag_seconds"] == 0
    assert found["lockstep_lag_bytes"] == 0


def test_a_log_that_takes_nothing_lags_more_and_more() -> None:
    """As while Kafka is away: the newest commit that it has was on time."""
    clock = [100.0]
    metrics = Metrics(now=lambda: clock[0])

    def noted(wal_end: int) -> float:
        metrics.note_stream(
            wal_end=wal_end, received=0, confirmed=0, feedback_at=0, pending_events=0,
            pending_bytes=0,
        )  # fmt: skip
        return samples(metrics)["lockstep_lag_seconds"]

    def publish(end: int) -> None:
        at_us = int(time.time() * 1e6)
        made = position(seq=end, end_lsn=end, committed_at_us=at_us)
        metrics.committed(made, BatchContents(1, 1, None), Moments(received=0.0, handed_over=0.0))

    publish(200)
    assert noted(200) == 0
    clock[0] += 600
    assert noted(200) == 0, "an idle log lags"
    # Between two records of an idle daemon.
    clock[0] += 12
    assert noted(300) < 1
    clock[0] += 78
    assert noted(300) == 90
    clock[0] += 1
    assert samples(metrics)["lockstep_lag_seconds"] == 91, "the loop waits for Kafka"
    publish(250)
    assert noted(300) < 1, "it advances"
    publish(300)
    assert noted(300) == 0


def test_a_daemon_that_became_a_standby_shows_what_a_new_standby_does() -> None:
    """Otherwise its last values would age for ever, and alert for nothing."""
    clock = [100.0]
    streamed, new = Metrics(now=lambda: clock[0]), Metrics(now=lambda: clock[0])
    made = position(seq=5, end_lsn=200, committed_at_us=0)
    streamed.committed(made, BatchContents(1, 1, 150), Moments(received=0.0, handed_over=0.0))
    streamed.note_stream(
        wal_end=300, received=250, confirmed=100, feedback_at=100.0, pending_events=3,
        pending_bytes=30,
    )  # fmt: skip
    streamed.source_checked(1, None, [])
    streamed.wrong_policies, streamed.compaction_held = {"t": "delete"}, ["lake"]
    assert gauges(streamed) != gauges(new)
    streamed.be_standby()
    clock[0] += 3_600
    assert gauges(streamed) == gauges(new)
    assert (streamed.wrong_policies, streamed.compaction_held) == ({}, [])
    assert samples(streamed)["lockstep_events_total"] == 1, "counters stay"


def gauges(metrics: Metrics) -> dict[str, float]:
    """Return the gauges of the pipeline."""
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if family.type == "gauge" and family.name.startswith("lockstep_")
        if not family.name.endswith("_created")
    }


def test_what_is_unknown_is_absent() -> None:
    assert "lockstep_feedback_age_seconds" not in samples(Metrics())


def test_pipelines_in_one_process_do_not_meet() -> None:
    one, other = Metrics(), Metrics()
    one.events = 1
    assert samples(other)["lockstep_events_total"] == 0


def test_names_are_ours_and_end_in_their_unit() -> None:
    families = [
        family.name
        for family in text_string_to_metric_families(Metrics().text().decode())
        if not family.name.startswith(("python_", "process_"))
    ]
    unit = re.compile(
        r"lockstep_\w*(_lsn|_bytes|_seconds|_events|_transactions|_reconnects|_created)"
    )
    unitless = {"lockstep_seq", "lockstep_state", "lockstep_events", "lockstep_bytes"}
    unitless |= {f"lockstep_incremental_snapshot{name}" for name in ("s", "_rows", "_errors")}
    unitless |= {"lockstep_refused_messages", "lockstep_pipeline"}
    unitless |= {"lockstep_reconnects", "lockstep_timeline", "lockstep_unknown_type_columns"}
    unitless |= {f"lockstep_follower_{name}" for name in ("state", "seq", "generation", "batches")}
    unitless |= {"lockstep_follower_events_per_second", "lockstep_follower_errors"}
    assert families
    assert not [name for name in families if not unit.fullmatch(name) and name not in unitless]


@pytest.mark.parametrize("reason", ["UnavailableError", "FencedError"])
def test_reconnects_are_counted_by_a_fixed_word(reason: str) -> None:
    metrics = Metrics()
    metrics.reconnected(reason)
    assert metrics.reconnects == {reason: 1}
