"""One table has every metric; alert rules and the dashboard use nothing else."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cdc.events import LSN
from cdc.log.follower_reports import FollowerRecord
from cdc.log.frontier_tail import Unapplied
from cdc.log.group_records import WebhookReport
from cdc.log.group_states import GroupState
from cdc.operate import alerts
from cdc.operate.findings import Cause, Level
from cdc.operate.followers import FollowerStatus
from cdc.operate.metric_table import EVERY
from cdc.operate.metrics import Metrics
from cdc.operate.retention import Retention
from cdc.operate.verdict import Verdict
from cdc.operate.webhooks import WebhookStatus
from cdc.snapshot.incremental.records import IncrementalRecord
from cdc.snapshot.initial.progress import Report
from cdc.source.slots import Slot
from tests.fixtures.tiers import need_program


def filled() -> Metrics:
    """Return the metrics of a daemon that has everything to report."""
    metrics = Metrics()
    metrics.feedback_at = 0.0
    record = FollowerRecord(
        pipeline="p", follower="cache", store="redis", generation=1, state="following", epoch=1,
        lsn=LSN(1), seq=1, committed_at_us=0, place=1, owner="o", canary_at_us=1,
        at_us=time.time_ns() // 1_000,
    )  # fmt: skip
    status = FollowerStatus("cache", record, LSN(2), Unapplied(None))
    metrics.followers = lambda: [status]
    hook = WebhookReport(
        pipeline="p", webhook="hook", owner="o", state="delivering", since_us=1, moved_at_us=1,
        at_us=time.time_ns() // 1_000,
    )  # fmt: skip
    delivering = WebhookStatus("hook", GroupState("webhook.hook", 1, {}, {}), 0, (hook,))
    metrics.webhooks = lambda: [delivering]
    cause = Cause(Level.FAILED, "slot", "what", "remedy")
    metrics.verdict = lambda: Verdict(Level.FAILED, "failed", (cause,))
    slot = Slot("s", "pgoutput", "d", 1, LSN(1), LSN(1), "reserved", 9, None, False, 9)  # noqa: FBT003
    metrics.source_checked(1, Retention(slot, 1.0), [])
    metrics.snapshot = Report(1, 1, 1, 1.0, 1, 1, 1.0, 1.0, 1.0, 1.0, ())
    running = IncrementalRecord(pipeline="p", id="1", schema="s", table="t", state="running")
    metrics.incremental_snapshots = lambda: [running]
    metrics.reconnected("UnavailableError")
    metrics.refusals.refuse("cdc.canary", "no signature", "0/1")
    return metrics


def test_the_table_has_exactly_what_a_daemon_exports() -> None:
    exported = {
        family.name: family
        for family in text_string_to_metric_families(filled().text().decode())
        if not family.name.startswith(("python_", "process_")) and family.samples
    }
    # The library exports when each of its histograms was created.
    created = {name for name in exported if name.endswith("_created")}
    assert set(exported) - created == set(EVERY)
    for name, info in EVERY.items():
        family = exported[name]
        assert (family.type, family.documentation) == (info.kind, info.meaning), name
        for sample in family.samples:
            assert sample.name.removeprefix(name) in info.suffixes, sample.name
            assert set(sample.labels) - {"le"} == set(info.labels), sample.name


@pytest.mark.parametrize("alert", alerts.ALERTS, ids=lambda each: each.name)
def test_a_rule_names_metrics_that_exist_and_says_what_to_do(alert: alerts.Alert) -> None:
    assert "lockstep_" in alert.expr
    assert alerts.unknown(alert.expr) == []
    assert alert.summary
    assert alert.what_to_do
    assert alert.severity in {"page", "ticket"}


def test_a_name_that_is_no_metric_is_found() -> None:
    assert alerts.unknown("lockstep_lag_seconds > lockstep_no_such_metric") == [
        "lockstep_no_such_metric"
    ]
    assert alerts.unknown("lockstep_events > 1") == ["lockstep_events"]  # without its _total


def test_each_panel_shows_metrics_that_exist() -> None:
    board = json.loads(alerts.dashboard())
    assert board["panels"]
    [variable] = board["templating"]["list"]
    assert "__inputs" not in board, "a provisioned dashboard has none"
    for panel in board["panels"]:
        assert panel["datasource"]["uid"] == f"${{{variable['name']}}}"
        for target in panel["targets"]:
            assert alerts.unknown(target["expr"]) == [], panel["title"]
            assert "lockstep_" in target["expr"] or "process_" in target["expr"]


def test_the_rules_are_yaml_with_the_expressions_of_the_table() -> None:
    [group] = yaml.safe_load(alerts.rules())["groups"]
    found = {each["alert"]: each["expr"] for each in group["rules"]}
    assert found == {each.name: each.expr for each in alerts.ALERTS}


# For each alert a series that must fire it, and one that must not: values at each minute.
_SERIES = {
    "LockstepDown": ("other_metric", "1+0x40", 'lockstep_state{state="streaming"}', "1+0x40"),
    "LockstepFailed": ('lockstep_verdict{level="failed"}', "1+0x40", None, "0+0x40"),
    "LockstepSlotLostSoon": ("lockstep_slot_lost_in_seconds", "60+0x40", None, "20000+0x40"),
    "LockstepSlotUnreserved": (
        *('lockstep_slot_wal_status{wal_status="unreserved"}', "1+0x40", None, "0+0x40"),
    ),
    "LockstepSlotStalled": ("lockstep_slot_stalled_seconds", "901+0x40", None, "60+0x40"),
    "LockstepLongTransaction": ("lockstep_oldest_prepared_seconds", "901+0x40", None, "9+0x40"),
    "LockstepLag": ("lockstep_lag_seconds", "61+0x40", None, "59+0x40"),
    "LockstepSourceNotChecked": (
        *("lockstep_source_check_age_seconds", "90+0x40", None, "30+0x40"),
    ),
    "LockstepCanaryLate": ("lockstep_follower_canary_age_seconds", "121+0x40", None, "9+0x40"),
    # One that lags and catches up is left alone.
    "LockstepFollowerLag": ("lockstep_follower_lag_seconds", "61+9x40", None, "900-9x40"),
    "LockstepFollowerNotRunning": (
        *('lockstep_follower_state{state="not_running"}', "1+0x40", None, "0+0x40"),
    ),
    "LockstepStoreRebuilt": ("lockstep_follower_generation", "1+0x25 2+0x15", None, "1+0x40"),
    "LockstepWebhookNotRunning": (
        *('lockstep_webhook_state{state="gap"}', "1+0x40"),
        *('lockstep_webhook_state{state="delivering"}', "1+0x40"),
    ),
    "LockstepWebhookStalled": ("lockstep_webhook_stalled_seconds", "181+0x40", None, "59+0x40"),
    "LockstepWebhookUndelivered": ("lockstep_webhook_undelivered", "1+0x40", None, "0+0x40"),
    "LockstepTopicIncomplete": ("lockstep_incomplete_topics", "1+0x40", None, "0+0x40"),
    "LockstepPromotion": ("lockstep_timeline", "1+0x25 2+0x15", None, "1+0x40"),
    "LockstepRefusedMessages": (
        *("lockstep_refused_messages_total", "0+0x25 5+0x15", None, "3+0x40"),
    ),
}


# One pipeline ends while another goes on.
_ONE_OF_TWO = {
    'lockstep_pipeline{pipeline="a"}': "1+0x20",
    'lockstep_pipeline{pipeline="b"}': "1+0x40",
    'lockstep_state{state="streaming"}': "1+0x40",
}


def test_each_rule_has_a_series_that_fires_it() -> None:
    assert set(_SERIES) == {each.name for each in alerts.ALERTS}


def test_each_rule_fires_when_it_should_and_not_otherwise(tmp_path: Path) -> None:
    """By Prometheus' own tool."""
    need_program("promtool")
    (tmp_path / "rules.yaml").write_text(alerts.rules(), "utf-8")
    tests = []
    cases = [("LockstepDown", _ONE_OF_TWO, 1)]
    for name, (bad, values, good, otherwise) in _SERIES.items():
        cases += [(name, {bad: values}, 1), (name, {good or bad: otherwise}, 0)]
    for name, series, fires in cases:
        query = f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)'
        sample = [{"labels": "{}", "value": fires}]
        tests.append(
            {
                "interval": "1m",
                "input_series": [{"series": k, "values": v} for k, v in series.items()],
                "promql_expr_test": [{"expr": query, "eval_time": "30m", "exp_samples": sample}],
            }
        )
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests}), "utf-8")
    for command in (["check", "rules", "rules.yaml"], ["test", "rules", "test.yaml"]):
        done = subprocess.run(
            ["promtool", *command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
