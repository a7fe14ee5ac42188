"""The verdict by the daemon itself: what `/healthz`, `/readyz` and `/metrics` show.

Queries no server: everything was read by the loop and by the monitors of the source, of followers
and of webhooks, each of which runs every few seconds.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cdc.operate.health import Health, HealthState
from cdc.operate.verdict import DaemonReport, PipelineFacts, Verdict, verdict

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.operate.metrics import Metrics


def daemon_verdict(config: Config, health: Health, metrics: Metrics) -> Verdict:
    report = health.report()
    stage = metrics.initial_stage
    if report.state is not HealthState.STREAMING:
        # It has not read the log yet, or is copying: its state and reason are all that is known.
        stage = "running" if report.state is HealthState.SNAPSHOTTING else "done"
    return verdict(
        config,
        PipelineFacts(
            by_daemon=True,
            daemon=DaemonReport.of(
                report.body()
                | {
                    "wrong_policies": metrics.wrong_policies,
                    "compaction_held": metrics.compaction_held,
                    "unread": metrics.unread(),
                    "lag_seconds": max(0.0, metrics.lag_seconds),
                }
            ),
            initial_stage=stage,
            incremental_snapshots=tuple(metrics.all_incremental_snapshots()),
            incomplete_topics=tuple(metrics.incomplete_topics),
            followers=tuple(metrics.followers()),
            webhooks=tuple(metrics.webhooks()),
            now_us=time.time_ns() // 1_000,
        ),
    )
