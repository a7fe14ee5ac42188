"""The initial snapshot, from the first connection to the hand-over. Read this first.

1. Export a snapshot by a temporary slot, whose name is the lock: one coordinator at a time.
2. Start a generation: record it in the log, fence the writers of older ones, plan.
3. Run the copying of the ranges; each is recorded with its rows.
4. Delete the rows that older generations had and this one does not have.
5. Hand over: the resume record moves to the snapshot's consistent point, and the state is `done`,
   in one Kafka transaction. The daemon streams from there.

The log is the only state, as for the stream. The exported snapshot lives with this process: when
the process ends, or Postgres does, missing ranges can no longer be read as of that moment, and a
new generation starts. Once no range is missing the snapshot is not needed, and the next process
finishes that generation.

Nothing is written without fencing: `init_transactions` first, then the state is read, and what it
does not allow is not done.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from cdc import failpoints
from cdc.errors import ConfigError, GapError, RewrittenError, StoppedError
from cdc.log import reader
from cdc.log.publisher import WRITERS, Publisher, fence
from cdc.snapshot.initial import due, generation_plan, handover, range_copy, topic
from cdc.snapshot.initial.export import Exporting, prove
from cdc.snapshot.initial.host import Background
from cdc.snapshot.initial.leftovers import LeftoverDeletes
from cdc.snapshot.initial.records import SnapshotState
from cdc.source.connection import connect
from cdc.source.export import raise_if_export_running

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.snapshot.initial.due import Resume
    from cdc.snapshot.initial.host import HostProcess
    from cdc.snapshot.initial.range_copy import StartRunner
    from cdc.snapshot.initial.records import SnapshotPlan
    from cdc.source.export import Export

log = logging.getLogger("cdc.snapshot")

# The coordinator's writer; task k's is `snapshot.k`.
WRITER: Final = "snapshot"
# How long to wait for a call that was running at a stop.
_REST_SECONDS: Final = 5.0
_STOPPED: Final = (
    "its ranges in the log are of a moment that ends with this process: unless none is missing, the"
    " next start copies a new generation, whose rows replace them"
)
# How often tables may be rewritten during the snapshot before it fails: each time everything is
# copied again.
_REWRITES: Final = 5
_REWRITTEN_SECONDS: Final = 0.5  # more of a pause after each


def take(config: Config, host: HostProcess, runner: StartRunner | None = None) -> str | None:
    """Take the initial snapshot where one is due; return when streaming may start.

    Returns its stage in the log, `done`; None where the log has no record of one.

    `runner` copies instead of the runner that the configuration names. Raises SlotBusyError while
    another process takes it, ConfigError when tables are rewritten under it repeatedly,
    StoppedError when the host is to stop, and the errors on which the daemon restarts. Finished
    ranges are kept as long as the exported snapshot lives.
    """
    background = Background(host)
    try:
        return _take(config, host, background, runner)
    finally:
        # A daemon gets here in each session, a standby about every second: nothing may be left.
        background.close()


def _take(
    config: Config, host: HostProcess, background: Background, runner: StartRunner | None
) -> str | None:
    state = background(lambda: due.state(config))
    rewrites = 0
    while state is not None and state.stage != "done":
        try:
            _Coordinator(config, host, background, runner).run()
        except StoppedError:
            log.warning(
                "stopped in the middle of the initial snapshot",
                extra={"fields": {"hint": _STOPPED}},
            )
            raise
        except RewrittenError as error:
            rewrites += 1
            if rewrites >= _REWRITES:
                raise ConfigError(
                    f"{error.what}, and it was the {rewrites}th time in a row that the snapshot"
                    " could not be taken for such a reason",
                    hint="let nobody truncate, rewrite or alter tables until it is taken, and start"
                    " again; or give the table `snapshot: none` under `tables`: once the daemon"
                    " streams, `cdc snapshot TABLE` reads it while it changes, truncates and all",
                ) from error
            log.warning("starting a new generation", extra={"fields": {"reason": error.what}})
            background.pause(_REWRITTEN_SECONDS * rewrites)
        state = background(lambda: due.state(config))
    return state.stage if state is not None else None


class _Coordinator:
    """One attempt: with one exported snapshot."""

    def __init__(
        self, config: Config, host: HostProcess, background: Background, runner: StartRunner | None
    ) -> None:
        self._config, self._host, self._background, self._runner = config, host, background, runner
        self._token = uuid.uuid4().hex
        self._publisher = Publisher(config, WRITER)

    def run(self) -> None:
        """Take the complete snapshot; or finish a generation that has all its ranges."""
        with ExitStack() as closing:
            try:
                self._run(closing)
            except StoppedError:
                if not self._background.has_ended(_REST_SECONDS):
                    closing.pop_all()  # a connection must not be closed while a call uses it
                raise

    def _run(self, closing: ExitStack) -> None:
        config, background = self._config, self._background
        background(lambda: raise_if_export_running(config))
        self._host.snapshotting("checking the source")
        primary = closing.enter_context(background(lambda: connect(config)))
        resume = background(lambda: _resume(config))
        due.expect_open(resume)
        system = background(lambda: prove(config, primary, resume))
        exporting = Exporting(config, self._host, background, primary)
        export = closing.enter_context(exporting.lock())
        exporting.create(export, system, resume[1])
        failpoints.reach("after_export")
        known = self._begin()
        if known is None:
            return
        plan = self._unfinished(known)
        if plan is None:
            plan = self._plan(export, known, resume)
            failpoints.reach("after_plan")
            monitor = range_copy.ExportMonitor(config, export, primary)
            closing.callback(monitor.close)
            range_copy.copy(config, plan, self._host, background, monitor, self._runner)
        self._delete_leftovers(plan)
        failpoints.reach("before_handover")
        self._hand_over(plan)
        failpoints.reach("after_handover")

    def _begin(self) -> topic.InitialLog | None:
        """Fence older coordinators and return the log's state; None where all is done."""
        config = self._config
        self._host.snapshotting("fencing older writers")
        self._background(self._publisher.open)
        known = self._background(lambda: topic.read(config))
        if known.state is None or known.state.stage == "done":
            return None
        return known

    def _unfinished(self, known: topic.InitialLog) -> SnapshotPlan | None:
        """Take over a generation that has every range, or return None."""
        plan, state = known.plan, known.state
        assert state is not None
        if plan is None:
            return None
        if sum(part == "rows" for part, _, _ in known.done(plan)) < sum(1 for _ in plan.ranges()):
            return None
        log.info("finishing the snapshot", extra={"fields": {"generation": plan.generation}})
        plan = replace(plan, token=self._token)
        state = replace(state, token=self._token, **_author())
        self._write_state(state, plan)
        self._fence(state, 0)
        return plan

    def _plan(self, export: Export, known: topic.InitialLog, resume: Resume) -> SnapshotPlan:
        """Start a generation: after this, no task of an older one writes."""
        config, old = self._config, known.state
        assert old is not None
        if old.generation:
            lost = {"generation": old.generation, "snapshot": export.snapshot}
            log.warning("the exported snapshot was lost: a new generation", extra={"fields": lost})
        tasks = max(old.tasks, config.snapshot.max_parallel)
        state = replace(
            old, stage="planning", generation=old.generation + 1, token=self._token, tasks=tasks,
            **_author(),
        )  # fmt: skip
        self._write_state(state)
        known = self._fence(state, old.tasks)
        planned = self._background(
            lambda: generation_plan.plan(config, export, state, known, resume)
        )
        running = replace(state, stage="running", next_seq=planned.plan.next_seq, **_author())
        self._background(lambda: generation_plan.write(config, self._publisher, running, planned))
        log.info(
            "copying",
            extra={
                "fields": {
                    "generation": planned.plan.generation,
                    "lsn": planned.plan.lsn,
                    "tables": len(planned.plan.schemas),
                    "ranges": sum(1 for _ in planned.plan.ranges()),
                    "bytes": sum(table.bytes for table in planned.plan.tables),
                }
            },
        )
        return planned.plan

    def _fence(self, state: SnapshotState, tasks: int) -> topic.InitialLog:
        """Fence all earlier writers; return what the log holds then.

        Raises FencedError where its state is not `state`: another process has handed over
        meanwhile, or taken over. From here on no process that read an older state can: neither a
        task nor a hand-over. A hand-over that was being committed while `state` was written is
        before it in the topic: the resume record shows that one.
        """
        config = self._config
        self._background(lambda: fence_tasks(config, tasks))
        due.expect_open(self._background(lambda: _resume(config)))
        known = self._background(lambda: topic.read(config))
        handover.check_mine(known.state, state.stage, self._token)
        return known

    def _delete_leftovers(self, plan: SnapshotPlan) -> None:
        """Delete the keys that only older generations have."""
        config = self._config
        if not plan.stale:
            return
        self._host.snapshotting("looking for rows that were deleted since an older generation")
        known = self._background(lambda: topic.read(config))
        done = known.done(plan)
        for index in range(len(plan.stale)):
            deleting = LeftoverDeletes(config, plan, index, self._publisher)
            before = [
                r for (part, at, _), r in sorted(done.items()) if (part, at) == ("gone", index)
            ]
            records = deleting.run(before)
            while (record := self._background(lambda: next(records, None))) is not None:  # noqa: B023 - called at once
                fields = {"table": plan.stale[index].topic, "rows": record.rows}
                log.info("deleted leftover rows", extra={"fields": fields})

    def _hand_over(self, plan: SnapshotPlan) -> None:
        config = self._config
        self._host.snapshotting("handing over to the stream")
        known = self._background(lambda: topic.read(config))
        handover.check_mine(known.state, "running", self._token)
        state = self._background(lambda: handover.write(config, plan, self._token))
        fields = {"generation": state.generation, "rows": state.rows, "lsn": plan.lsn}
        log.info("the snapshot is done", extra={"fields": fields})

    def _write_state(self, state: SnapshotState, plan: SnapshotPlan | None = None) -> None:
        def write() -> None:
            self._publisher.begin()
            records = topic.plan_records(self._config, plan) if plan else []
            for record in (topic.state_record(self._config, state), *records):
                self._publisher.add(*record)
            self._publisher.commit()

        self._background(write)


def _author() -> dict[str, object]:
    return {
        "owner": f"{socket.gethostname()}:{os.getpid()}",
        "at_us": time.time_ns() // 1_000,
    }


def _resume(config: Config) -> Resume:
    resume = reader.read_resume(config)
    if resume is None:
        raise GapError(
            f'there is no resume record of pipeline "{config.pipeline}"',
            hint="run `cdc setup`; where the pipeline has run before, its log was lost",
        )
    return resume


def fence_tasks(config: Config, tasks: int) -> None:
    """Abort the open transactions of older tasks, and of older hand-overs by the daemon."""
    fence(config, (*(f"{WRITER}.{number}" for number in range(tasks)), *WRITERS))
