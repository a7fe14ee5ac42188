"""Alert rules and a dashboard, from the table of metrics. Pure.

`python -m scripts.reference` writes them into compose/ and docs/METRICS.md, and `cdc metrics`
prints them. A rule names metrics of `metric_table` only.

https://prometheus.io/docs/prometheus/latest/configuration/alerting_rules/
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cdc.operate.metric_table import EVERY

if TYPE_CHECKING:
    from collections.abc import Iterable

# Also where others run: a pipeline that was there within six hours, and is there no more.
_DOWN: Final = (
    "absent(lockstep_state) or (group by (pipeline) (max_over_time(lockstep_pipeline[6h]))"
    " unless group by (pipeline) (lockstep_pipeline))"
)
_NAME: Final = re.compile(r"lockstep_[a-z_]+")


class Alert(NamedTuple):
    name: str
    expr: str
    lasts: str  # how long it must hold
    severity: str  # page: now; ticket: today
    summary: str
    what_to_do: str


ALERTS: Final = (
    Alert(
        "LockstepDown", _DOWN, "2m", "page",
        "no daemon of a pipeline answers: it does not run, or has ended with an error that needs a"
        " person. Of one that was removed for good it ends after six hours",
        "cdc run; `cdc status` shows why it ended",
    ),
    Alert(
        "LockstepFailed", 'lockstep_verdict{level="failed"} == 1', "2m", "page",
        "the verdict of `cdc status` is failed", "cdc status names each cause and its remedy",
    ),
    Alert(
        "LockstepSlotLostSoon", "lockstep_slot_lost_in_seconds < 14400", "5m", "page",
        "the slot would be lost within 4 hours if it stopped moving now, at the present rate of"
        " WAL. Absent without max_slot_wal_keep_size: watch the disk then, and set a limit",
        "cdc doctor names what holds it back; raise max_slot_wal_keep_size",
    ),
    Alert(
        "LockstepSlotUnreserved", 'lockstep_slot_wal_status{wal_status="unreserved"} == 1',
        "0m", "page", "the slot is lost at the next checkpoint",
        "cdc run; raise max_slot_wal_keep_size, which needs no restart",
    ),
    Alert(
        "LockstepSlotStalled", "lockstep_slot_stalled_seconds > 900", "0m", "ticket",
        "a transaction holds the slot back, or the daemon does not keep up", "cdc doctor",
    ),
    Alert(
        "LockstepLongTransaction",
        "lockstep_oldest_transaction_seconds > 900 or lockstep_oldest_prepared_seconds > 900",
        "0m", "ticket",
        "a transaction is open for long and keeps WAL, also one of another database",
        "cdc doctor has its pid and the SQL that ends it",
    ),
    Alert(
        "LockstepLag", "lockstep_lag_seconds > 60", "2m", "page",
        "the log lags; choose the lag that followers may have", "cdc status",
    ),
    Alert(
        "LockstepSourceNotChecked", "lockstep_source_check_age_seconds > 60", "1m", "ticket",
        "the check of the source's catalog does not run", "see the daemon's log",
    ),
    Alert(
        "LockstepCanaryLate", "lockstep_follower_canary_age_seconds > 120", "2m", "page",
        "a follower has applied no canary: the complete path, daemon included. Choose the lag that"
        " it may have plus source.canary_seconds", "cdc status",
    ),
    Alert(
        "LockstepFollowerLag",
        "lockstep_follower_lag_seconds > 60 and deriv(lockstep_follower_lag_seconds[10m]) > 0",
        "5m", "ticket", "a follower lags, and more and more: it does not keep up",
        "cdc status; see its job's log",
    ),
    Alert(
        "LockstepFollowerNotRunning",
        'lockstep_follower_state{state=~"halted|not_running"} == 1', "1m", "page",
        "a follower has halted or does not run", "cdc status; cdc follow --followers NAME",
    ),
    Alert(
        "LockstepStoreRebuilt", "changes(lockstep_follower_generation[15m]) > 0", "0m", "ticket",
        "a follower's store was built again, which `cdc rebuild` alone should cause",
        "see its job's log for what was lost",
    ),
    Alert(
        "LockstepWebhookNotRunning",
        'lockstep_webhook_state{state=~"new|gap|halted|not_running"} == 1', "1m", "page",
        "a webhook does not run, has halted, or cannot go on without a decision",
        "cdc webhook status names the command that follows",
    ),
    Alert(
        "LockstepWebhookStalled", "lockstep_webhook_stalled_seconds > 180", "0m", "page",
        "for 3 minutes a webhook has delivered nothing, or started again after errors",
        "cdc webhook status names the error; else see the receiver's log",
    ),
    Alert(
        "LockstepWebhookUndelivered", "lockstep_webhook_undelivered > 0", "0m", "ticket",
        "a webhook has given up events", "cdc webhook undelivered NAME; then send or discard",
    ),
    Alert(
        "LockstepTopicIncomplete", "lockstep_incomplete_topics > 0", "1m", "ticket",
        "the topic of a captured table lacks changes: stores may differ from the table at every"
        " frontier", "cdc status names the tables; cdc snapshot TABLE --replace",
    ),
    Alert(
        "LockstepPromotion", "changes(lockstep_timeline[15m]) > 0", "0m", "ticket",
        "a promotion was followed", "see docs/OPERATIONS.md, Failover, for what to do afterwards",
    ),
    # The series starts with the first refusal, which `increase` does not count.
    Alert(
        "LockstepRefusedMessages",
        "increase(lockstep_refused_messages_total[15m]) > 0 or (lockstep_refused_messages_total"
        " unless lockstep_refused_messages_total offset 15m)", "0m", "ticket",
        "messages claim to be the pipeline's and are not",
        "see docs/SECURITY.md, Messages in the stream",
    ),
)  # fmt: skip

_STAGES: Final = "sum by (stage, le) (rate(lockstep_batch_stage_seconds_bucket[5m]))"
# Title, unit as Grafana names it, and expressions with their legends.
_PANELS: Final[tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...]] = (
    ("Verdict", "none", (("lockstep_verdict == 1", "{{level}}"),)),
    ("State", "none", (("lockstep_state == 1", "{{state}}"),)),
    ("Events published", "ops", (("rate(lockstep_events_total[1m])", "events/s"),)),
    ("Bytes published", "Bps", (("rate(lockstep_bytes_total[1m])", "bytes/s"),)),
    ("Lag of the log", "s", (("lockstep_lag_seconds", "log"),)),
    ("Lag of the log in WAL", "bytes", (("lockstep_lag_bytes", "log"),)),
    ("Lag of followers", "s", (("lockstep_follower_lag_seconds", "{{follower}}"),)),
    ("Canary", "s", (("lockstep_follower_canary_age_seconds", "{{follower}}"),)),
    ("Events applied", "ops", (("rate(lockstep_follower_events_total[1m])", "{{follower}}"),)),
    (
        "Webhooks", "s",
        (
            ("lockstep_webhook_lag_seconds", "{{webhook}}: lag"),
            ("lockstep_webhook_stalled_seconds", "{{webhook}}: nothing delivered"),
        ),
    ),
    (
        "Webhooks' keys and events", "none",
        (
            ("lockstep_webhook_failing", "{{webhook}}: refused keys"),
            ("lockstep_webhook_undelivered", "{{webhook}}: given up"),
        ),
    ),
    (
        "Kafka commits", "s",
        tuple(
            (f"histogram_quantile({q}, rate(lockstep_kafka_commit_seconds_bucket[5m]))", f"p{n}")
            for q, n in ((0.5, 50), (0.99, 99))
        ),
    ),
    (
        "Stages of a batch, p99", "s",
        ((f"histogram_quantile(0.99, {_STAGES})", "{{stage}}"),),
    ),
    (
        "WAL kept for the slot", "bytes",
        (
            ("lockstep_slot_retained_bytes", "kept"),
            ("lockstep_slot_safe_bytes", "left until it is lost"),
        ),
    ),
    ("Slot lost in", "s", (("lockstep_slot_lost_in_seconds", "at the present rate"),)),
    (
        "Oldest transaction", "s",
        (
            ("lockstep_oldest_transaction_seconds", "open"),
            ("lockstep_oldest_prepared_seconds", "prepared"),
        ),
    ),
    ("Reconnects", "none", (("increase(lockstep_reconnects_total[5m])", "{{reason}}"),)),
    ("Memory", "bytes", (("process_resident_memory_bytes", "{{instance}}"),)),
)  # fmt: skip
MADE: Final = "Made by `python -m scripts.reference`: change cdc/operate/alerts.py, not this file."


def unknown(expr: str) -> list[str]:
    """Return the names in an expression that no sample of ours has."""
    known = {name + end for name, each in EVERY.items() for end in each.suffixes}
    return [name for name in _NAME.findall(expr) if name not in known]


def rules() -> str:
    """Return the alert rules as a file of Prometheus; strings in YAML are written as in JSON."""
    lines = [f"# {MADE}", "groups:", "  - name: lockstep", "    rules:"]
    for each in ALERTS:
        lines += [
            f"      - alert: {each.name}",
            f"        expr: {_text(each.expr)}",
            f"        for: {each.lasts}",
            f"        labels: {{severity: {each.severity}}}",
            "        annotations:",
            f"          summary: {_text(each.summary)}",
            f"          runbook: {_text(each.what_to_do)}",
        ]
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def dashboard() -> str:
    """Return a dashboard for Grafana; its variable chooses among the Prometheus data sources."""
    # Not `__inputs`: Grafana asks for those in an import only, not where a file provisions it.
    source = {"name": "DS", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    found: dict[str, Any] = {
        "templating": {"list": [source]},
        "title": "Lockstep",
        "uid": "lockstep",
        "description": MADE,
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "panels": [_panel(number, *each) for number, each in enumerate(_PANELS)],
    }
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def _panel(number: int, title: str, unit: str, targets: Iterable[tuple[str, str]]) -> Any:  # noqa: ANN401 - JSON
    source = {"type": "prometheus", "uid": "${DS}"}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(65 + at), "datasource": source, "expr": expr, "legendFormat": legend}
            for at, (expr, legend) in enumerate(targets)
        ],
    }
