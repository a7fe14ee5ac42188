"""Run the copying of a plan's ranges, monitor the source meanwhile, and report progress.

A runner may be killed at any moment: ranges that are in the log stay there, and the others are
assigned again, as long as the exported snapshot lives. Two things are watched: that this snapshot
lives, and that the pipeline's slot is not lost.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from cdc.errors import (
    CDCError,
    ConfigError,
    GapError,
    InvariantError,
    Policy,
    RewrittenError,
    SnapshotLostError,
)
from cdc.snapshot.initial import topic
from cdc.snapshot.initial.handover import check_mine
from cdc.snapshot.initial.local_runner import LocalRunner
from cdc.snapshot.initial.progress import SnapshotProgress
from cdc.snapshot.initial.spark_runner import SparkRunner, installed
from cdc.source.pinned import connect_for_rows
from cdc.source.server import setting_bytes
from cdc.source.slots import read_slot

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.config import Config
    from cdc.snapshot.initial.host import Background, HostProcess
    from cdc.snapshot.initial.records import SnapshotPlan
    from cdc.source.connection import Connection
    from cdc.source.export import Export

log = logging.getLogger("cdc.snapshot")

# Below, Spark's start would take longer than copying.
_SPARK_BYTES: Final = 256 << 20
# How often source and slot are checked, and how often progress is logged.
_CHECK_SECONDS: Final = 5.0
_TURN_SECONDS: Final = 0.2
# Consecutive starts that complete no range.
_MAX_FRUITLESS_STARTS: Final = 6
_PAUSE_SECONDS: Final = 2.0
# The share of max_slot_wal_keep_size that must be left: below it the snapshot stops, before
# Postgres invalidates the slot.
_LEAST_SHARE: Final = 0.1


class Runner(Protocol):
    """What copies: it starts when it is created."""

    def turn(self, seconds: float, progress: SnapshotProgress) -> bool:
        """Process reports for `seconds` at most; return whether all have ended well."""

    def stop(self) -> None:
        """End it; open Kafka transactions are aborted."""


class ExportMonitor:
    """Checks that the exported snapshot and the pipeline's slot still exist."""

    def __init__(self, config: Config, export: Export, primary: Connection) -> None:
        self._config, self._export, self._primary = config, export, primary
        self._reading = connect_for_rows(config)

    def check(self) -> None:
        """Raise SnapshotLostError or GapError where continuing is useless. Blocks."""
        if not self._export.alive(self._reading):
            raise SnapshotLostError("the connection that exported the snapshot was closed")
        slot = read_slot(self._primary, self._config.slot)
        if slot is None or slot.loss:
            why = slot.loss if slot else "it was dropped"
            raise GapError(
                f"the slot {self._config.slot} was lost while the snapshot was taken: {why}",
                hint="raise max_slot_wal_keep_size and idle_replication_slot_timeout; then start"
                " over: `cdc teardown --topics`, `cdc setup`",
            )
        limit = setting_bytes(self._primary, "max_slot_wal_keep_size")
        safe = slot.safe_wal_bytes
        near = safe is not None and limit is not None and safe < _LEAST_SHARE * limit
        if near or slot.is_nearly_lost:
            raise ConfigError(
                f"the slot {slot.name} keeps WAL for the snapshot and nears"
                f" max_slot_wal_keep_size: {max(0, safe or 0) >> 20} MB are left",
                hint="raise max_slot_wal_keep_size (ALTER SYSTEM SET …; SELECT pg_reload_conf();),"
                " or have the snapshot take less time: snapshot.max_parallel, no pace, a quieter"
                " hour; then `cdc run` again",
            )

    def close(self) -> None:
        self._reading.close()


# Starts a runner for some of the plan's tasks.
StartRunner: TypeAlias = "Callable[[SnapshotPlan, HostProcess, list[int]], Runner]"


def choose(config: Config, plan: SnapshotPlan) -> StartRunner:
    """Return the runner that the configuration names."""
    runner = config.snapshot.runner
    direct = any(table.kind == "direct" for table in plan.tables)
    if runner == "auto":
        large = sum(table.bytes for table in plan.tables) >= _SPARK_BYTES
        runner = "spark" if direct or (large and installed()) else "local"
    if runner == "local":
        if direct:
            raise ConfigError(
                "tables are to be copied directly into Delta Lake, which takes Spark",
                hint="snapshot.runner: spark; or take `snapshot: direct` out of `tables`",
            )
        return lambda plan, _, tasks: LocalRunner(config, plan, tasks)
    if not installed():
        raise ConfigError(
            "snapshot.runner is spark, and pyspark is not installed",
            hint="install lockstep-cdc[spark]; or snapshot.runner: local",
        )
    return lambda plan, host, _: SparkRunner(config, plan, host.config_file)


def copy(
    config: Config,
    plan: SnapshotPlan,
    host: HostProcess,
    background: Background,
    monitor: ExportMonitor,
    runner: StartRunner | None = None,
) -> None:
    """Return when every range is in the log. Raises what ends the generation."""
    start = runner or choose(config, plan)
    progress = SnapshotProgress(plan, time.monotonic())
    fruitless, found = 0, -1
    while True:
        known = background(lambda: topic.read(config))
        check_mine(known.state, "running", plan.token)
        progress.restart(known.ranges)
        if progress.complete:
            host.snapshotting("every range is copied", progress.report(time.monotonic()))
            return
        done = len(known.done(plan))
        fruitless, found = (0, done) if done > found else (fruitless + 1, found)
        if fruitless >= _MAX_FRUITLESS_STARTS:
            raise InvariantError(f"{fruitless} starts of the snapshot's tasks brought no range")
        background.pause(_PAUSE_SECONDS if fruitless else 0.0)
        running = start(plan, host, _left(plan, known))
        try:
            _follow(running, progress, host, background, monitor)
        except CDCError as error:
            _raise_if_final(error, background, monitor, fruitless)
            log.warning("copying again", extra={"fields": {"reason": error.what}})
        finally:
            running.stop()


def _follow(
    runner: Runner,
    progress: SnapshotProgress,
    host: HostProcess,
    background: Background,
    monitor: ExportMonitor,
) -> None:
    """Return when the runner has ended; raise what ended it, or what ends the generation."""
    checked_at = logged_at = time.monotonic()
    ended = False
    while not ended:
        ended = runner.turn(_TURN_SECONDS, progress)
        background.check()
        now = time.monotonic()
        report = progress.report(now)
        host.snapshotting(report.words(), report)
        if now - logged_at >= _CHECK_SECONDS:
            logged_at = now
            log.info("copying", extra={"fields": report.brief()})
        if now - checked_at >= _CHECK_SECONDS:
            checked_at = now
            background(monitor.check)


def _raise_if_final(
    error: CDCError, background: Background, monitor: ExportMonitor, fruitless: int
) -> None:
    """Return where copying may continue with what is left; raise where it may not."""
    if isinstance(error, RewrittenError) or error.policy is not Policy.BACKOFF:
        raise error
    background(monitor.check)
    if fruitless + 1 >= _MAX_FRUITLESS_STARTS:
        raise error
    if isinstance(error, SnapshotLostError) and fruitless:
        # It exists, but a task that was given its name does not find it.
        raise ConfigError(
            f"{error.what}; its connection lives: tasks reach another server than the coordinator",
            hint="source.dsn or snapshot.dsn leads to a load balancer, or names several hosts: name"
            " one server there",
        ) from error


def _left(plan: SnapshotPlan, known: topic.InitialLog) -> list[int]:
    """Return the tasks that have ranges left."""
    done = known.done(plan)
    ranges = enumerate(plan.ranges())
    return sorted({n % plan.tasks for n, r in ranges if ("rows", r.table, r.number) not in done})
