"""The verdict from inside the daemon: what `/healthz`, `/readyz` and `/metrics` show.

Queries no server: everything was read by the loop, the watch of the source and the watch of the
followers, each of which runs every few seconds.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cdc.operate.health import State
from cdc.operate.verdict import Facts, Initial, Reader, verdict

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.operate.health import Health, Report
    from cdc.operate.metrics import Metrics
    from cdc.operate.verdict import Verdict


def reader(report: Report) -> Reader:
    """Return the daemon's own part of the facts."""
    return Reader(
        state=report.state.value,
        ready=report.ready,
        reason=report.reason,
        since_seconds=report.since_seconds,
        failures=report.failures,
        failing_seconds=report.failing_seconds,
        error=report.error,
        warnings=report.warnings,
    )


def judge_inside(config: Config, health: Health, metrics: Metrics) -> Verdict:
    """Return the verdict on the pipeline of this process."""
    report = health.report()
    initial = Initial(metrics.initial_stage, wanted=config.snapshot.mode == "initial")
    if report.state is not State.STREAMING:
        # It has not read the log yet, or is copying: its state and reason are all that is known.
        copying = report.state is State.SNAPSHOTTING
        initial = Initial("running" if copying else "done", wanted=True, described=report.reason)
    return verdict(
        config,
        Facts(
            inside=True,
            daemon=reader(report),
            initial=initial,
            live=tuple(metrics.live_known()),
            followers=tuple(metrics.followers()),
            now_us=time.time_ns() // 1_000,
        ),
    )
