"""Incremental snapshots: tables read again, chunk by chunk, while the stream continues.

The loop's side. Commands and watermarks arrive with the stream (`on_message`); each chunk goes
through the states of `cdc.snapshot.incremental.chunk_state`, whose effects are carried out here.
Chunks are read by the fetcher (`tick`). A chunk's rows are published as changes of the transaction
that wrote its high watermark (`on_commit`), in the same Kafka transaction as the snapshot's record
(`take`).

A session reads again what an earlier one did not finish: it ignores the watermarks of other
sessions. An error in one snapshot ends that one, is recorded in its record, and never stops the
stream.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from cdc.decode.pg_snapshot import PgSnapshot
from cdc.errors import CDCError, Policy
from cdc.events import LSN
from cdc.log import names
from cdc.log.completeness import Completeness
from cdc.log.records import Replacement
from cdc.snapshot.incremental import chunk_rows, redaction
from cdc.snapshot.incremental import chunk_state as states
from cdc.snapshot.incremental.change_recorder import ChangeRecorders
from cdc.snapshot.incremental.governor import Governor
from cdc.snapshot.incremental.job import MAX_ERRORS, MAX_PENDING_KEYS, ChunkSizes, Job
from cdc.snapshot.incremental.messages import MessageRouter
from cdc.snapshot.incremental.records import (
    IncrementalRecord,
    TableName,
    forgettable,
    incremental_key,
)
from cdc.snapshot.incremental.topic import emptied_topic, incremental_record, replacement_record
from cdc.snapshot.incremental.visibility import VisibilityBarrier
from cdc.source import conditions
from cdc.source.chunks import CONDITION_HINT, AbsentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.config import Config
    from cdc.decode.messages import LogicalMessage, Relation
    from cdc.encode.routes import TableRoute
    from cdc.sequence.sequencer import Sequencer
    from cdc.sequence.state import Wanted
    from cdc.snapshot.incremental.commands import Command
    from cdc.snapshot.incremental.fetcher import Clock, Fetcher
    from cdc.snapshot.incremental.job import JobChunk
    from cdc.snapshot.incremental.records import Key, SnapshotState
    from cdc.snapshot.incremental.topic import IncrementalLog
    from cdc.snapshot.incremental.verifier import Verifier
    from cdc.snapshot.incremental.watermarks import Watermark
    from cdc.source.chunks import Chunk
    from cdc.source.column_changes import ColumnChange

log = logging.getLogger("cdc.snapshot.incremental")

Record = tuple[str, bytes, bytes | None]

# A chunk must fit in one batch, far below the batch's size.
_BATCH_SHARE: Final = 4
# Transactions decoded and not known to be visible; above this number the recording starts again.
_MAX_DECODED: Final = 200_000
_RECONNECT_SECONDS: Final = 1.0
_FULL: Final = (
    "run it again when some are over: `cdc snapshot list` shows them, `cdc snapshot stop` ends all"
)
# A chunk takes a fraction of a second.
_SLOW_SECONDS: Final = 10.0


class IncrementalSnapshots:
    """The incremental snapshots of one session."""

    def __init__(  # noqa: PLR0913 - what it joins
        self,
        config: Config,
        fetcher: Fetcher,
        sequencer: Sequencer,
        verifier: Verifier,
        unlogged: dict[str, IncrementalRecord],
        *,
        on_columns: Callable[[ColumnChange], None] = lambda _: None,
        clock: Clock = time,
        sizes: ChunkSizes = ChunkSizes(),  # noqa: B008 - immutable
        governor: Governor | None = None,
    ) -> None:
        """Start with none; `adopt` takes over those in the log.

        `unlogged` outlives the session: the keys and conditions of snapshots that must not be in
        the log. `on_columns` is called, where it may block, for a table whose columns have changed.
        Tests give the other arguments.
        """
        self._config, self._sequencer = config, sequencer
        self._verifier, self._unlogged = verifier, unlogged
        self._clock, self._sizes = clock, sizes
        self._governor = governor or Governor()
        self._fetcher = fetcher
        self._messages = MessageRouter(
            config, sequencer, verifier, fetcher.signer,
            self._on_watermark, self._on_commands, on_columns,
        )  # fmt: skip
        self._jobs: dict[str, Job] = {}
        self._completeness = Completeness()
        self._replaced: list[Record] = []  # for the log, with the records of the snapshots
        self._turns: deque[str] = deque()
        self._recorders = ChangeRecorders(sequencer, self._key_changed)
        # Those whose high watermark has not arrived, discarded ones too.
        self._chunks: dict[tuple[str, int], JobChunk] = {}
        self._reading: JobChunk | None = None
        self._committing: JobChunk | None = None  # at its high watermark
        self._last_number = 0
        self._barrier: VisibilityBarrier | None = None  # None: no snapshot runs
        self._not_before = 0.0  # monotonic
        sequencer.observer = self

    def adopt(self, logged: IncrementalLog, completeness: Completeness) -> None:
        """Continue the snapshots that are unfinished in the log.

        Those that replace a topic are added to `completeness` when they are done.
        """
        self._completeness = completeness
        self._verifier.adopt(logged.commands)
        for found in logged.snapshots:
            record = redaction.restored(found, self._unlogged.get(found.id))
            job = self._jobs[found.id] = Job(record or found, self._clock, self._sizes)
            # What an older version or configuration left in the log is written again without it.
            job.withhold(redaction.before_publishing(self._config, job.record))
            if found.active and record is None:
                job.enter("failed", redaction.GIVE_AGAIN)
                _log(job, "an incremental snapshot can't continue", logging.WARNING)
            elif found.active:
                _log(job, "incremental snapshot continues")
        for number in self._unlogged.keys() - {r.id for r in logged.snapshots if r.active}:
            del self._unlogged[number]
        self._update_observed()

    def progress(self) -> list[IncrementalRecord]:
        """Return the record of every snapshot that is not over."""
        return [record for record in self.known() if record.active]

    def known(self) -> list[IncrementalRecord]:
        """Return every snapshot that the log keeps, including those that are over."""
        return [job.record for job in list(self._jobs.values())]

    @property
    def waiting(self) -> bool:
        """Whether there are records for the next Kafka transaction."""
        return self._messages.waiting or any(job.dirty for job in self._jobs.values())

    def take(self) -> list[Record]:
        """Return the records for the next Kafka transaction, once."""
        taken, self._replaced = [*self._messages.take(), *self._replaced], []
        topic, pipeline = names.snapshot_topic(self._config.prefix), self._config.pipeline
        changed = [job for job in self._jobs.values() if job.dirty]
        taken += (incremental_record(self._config, job.take()) for job in changed)
        if changed:
            for number in forgettable(self.known(), self._clock.time_ns() // 1_000):
                del self._jobs[number]
                self._unlogged.pop(number, None)
                taken.append((topic, incremental_key(pipeline, number), None))
        return taken

    def close(self) -> None:
        """Close the connection, whatever it waits for."""
        self._fetcher.close()

    # -- reading -----------------------------------------------------------------------------------

    def tick(self, committed_lsn: int) -> None:
        """Read the next chunk when it is due; costs nothing while no snapshot runs."""
        if self._barrier is None and self._reading is None:
            return
        self._governor.committed(committed_lsn, self._clock.monotonic())
        if self._reading is not None and not self._take_rows(self._reading):
            return
        if self._barrier is not None and len(self._barrier.decoded) > _MAX_DECODED:
            self._start_recording()
            for job in self._running():
                self._retry(job, "waits again because too many transactions committed")
        if self._clock.monotonic() >= self._not_before and self._all_visible():
            self._read_next()

    def _take_rows(self, chunk: JobChunk) -> bool:
        """Whether the fetcher is done with a chunk, which gets its rows, or its error."""
        try:
            if not self._fetcher.finished():
                self._note_slow(chunk)
                return False
        except CDCError as error:
            self._reading = None
            self._fetch_failed(chunk, error)
            return True
        self._reading = None
        job = chunk.job
        if chunk.estimate is not None:
            job.change(replace(job.record, estimate=chunk.estimate))
        self._advance(chunk, states.RowsRead(chunk.rows))
        return True

    def _note_slow(self, chunk: JobChunk) -> None:
        """Note that a chunk is slow: it waits for a lock, or the source does not answer.

        Other snapshots wait with it: there is one connection to read by.
        """
        if self._clock.monotonic() - chunk.requested_at <= _SLOW_SECONDS:
            return
        for job in self._running():
            if job.record.state == "running" and job.record.failing_since_us is None:
                of = "" if job is chunk.job else f" of {chunk.job.record.name}"
                slow = f"has not been read for {_SLOW_SECONDS:.0f} s: it may wait for a lock"
                job.wait(f"a chunk{of} {slow}")

    def _fetch_failed(self, chunk: JobChunk, error: CDCError) -> None:
        self._chunks.pop((chunk.job.record.id, chunk.number), None)
        is_discarded = isinstance(chunk.state, states.Discarded)
        self._advance(chunk, states.Dropped())
        if error.policy is Policy.BACKOFF:
            self._count_error(error, [chunk.job])
        elif not is_discarded and not self._may_be_there(chunk.job, error):
            self._fail(chunk.job, error.what, error.hint)

    def _may_be_there(self, job: Job, error: CDCError) -> bool:
        """Whether a table that was not found may be published by what the lookup did not see.

        The command is decoded before its transaction is visible to others, and so are those before
        it. So a table is absent only once the lookup has seen every transaction that was decoded
        when it was first not found; until then it is looked up again.
        """
        if not isinstance(error, AbsentError):
            return False
        snapshot = PgSnapshot.parse(error.snapshot)
        if job.unseen is None:
            job.unseen = frozenset(self._barrier.decoded if self._barrier else ())
        job.unseen = frozenset(xid for xid in job.unseen if not snapshot.sees(xid))
        if job.unseen:
            self._retry(
                job,
                f"{error.what} yet: waits for transaction {min(job.unseen)}, which has committed"
                " and is not visible to other sessions; it may wait for a synchronous standby",
            )
        return bool(job.unseen)

    def _all_visible(self) -> bool:
        """Whether a SELECT sees everything that the log holds; polls the source until it does."""
        if (barrier := self._barrier) is None:
            return False
        try:
            self._fetcher.poll(barrier)
        except CDCError as error:
            self._count_error(error, self._running())
            return False
        for job in () if barrier.passed else self._running():
            if barrier.why != job.record.why:
                job.wait(barrier.why)
        return barrier.passed

    def _read_next(self) -> None:
        """Start reading the next chunk, taking the snapshots in turn."""
        if self._governor.full(len(self._chunks), self._clock.monotonic()):
            return
        for _ in range(len(self._turns)):
            self._turns.rotate(-1)
            if (job := self._jobs[self._turns[0]]).runnable:
                self._request(job)
                return
            if job.over:  # the last rows to be read again were deleted
                self._end(job, "done")
                return

    def _request(self, job: Job) -> None:
        record = job.record
        selection = self._config.selection.of((record.schema, record.table))
        share = self._config.batch.max_events // _BATCH_SHARE
        most_rows = max(1, min(share, self._governor.rows))
        self._last_number += 1
        chunk = job.request(self._last_number, selection.key, most_rows)
        self._chunks[record.id, chunk.number] = self._reading = chunk
        self._fetcher.start(chunk)

    # -- what the stream shows ---------------------------------------------------------------------

    def on_begin(self, commit_lsn: int, xid: int | None) -> None:
        """Record the transaction while a snapshot runs."""
        if self._barrier is not None and xid is not None:
            self._barrier.decoded[xid] = commit_lsn

    def on_change(self, relation_id: int, payload: bytes) -> None:
        self._recorders[relation_id].change(payload)

    def on_truncate(self, relation_id: int) -> None:
        self._recorders[relation_id].truncate()

    def on_message(self, message: LogicalMessage, lsn: int) -> Relation | Wanted | None:
        return self._messages.route(message, lsn)

    def verified(self, message: LogicalMessage) -> LogicalMessage | None:
        return self._verifier.admit(message)

    def on_commit(self) -> None:
        """Publish the chunk whose high watermark the transaction wrote."""
        if self._committing is None:
            return
        chunk, self._committing = self._committing, None
        job, table = chunk.job, self._table(chunk.rows)
        name = TableName(job.record.schema, job.record.table)
        self._advance(chunk, states.Committing(table.encoder.schema, name, job.key))

    def _on_watermark(self, watermark: Watermark, lsn: int) -> Relation | None:
        """Pass a watermark to its chunk; may return the table as it must be described first."""
        at = watermark.snapshot, watermark.chunk
        if (chunk := self._chunks.get(at)) is None:
            return None
        table = self._sequencer.table(watermark.relation_id)
        version = table.encoder.schema if table else None
        if watermark.low:
            schema_id = version.schema_id if version else None
            commit_lsn = self._sequencer.transaction_lsn
            self._advance(chunk, states.LowReached(commit_lsn, watermark.relation_id, schema_id))
            return None
        del self._chunks[at]
        self._advance(chunk, states.RowsRead(chunk.rows))  # unless the fetcher's end was noted
        if isinstance(chunk.state, states.Discarded):
            return None
        barrier = self._barrier
        assert barrier is not None, "a snapshot runs: this one"
        decoded = barrier.decoded
        barrier.drop_visible(PgSnapshot.parse(chunk.rows.snapshot))
        return self._advance(chunk, states.HighReached(lsn, decoded, version))

    def _table(self, rows: Chunk) -> TableRoute:
        table = self._sequencer.table(rows.described.oid)
        assert table is not None, "the table was described at the high watermark"
        return table

    # -- effects -----------------------------------------------------------------------------------

    def _advance(self, chunk: JobChunk, event: states.Event) -> Relation | None:
        """Move a chunk to its next state; may return the table as it must be described first."""
        chunk.state, effects = states.advance(chunk.state, event)
        relation = None
        for effect in effects:
            relation = self._perform(chunk, effect) or relation
        return relation

    def _perform(  # noqa: C901 - one case per effect
        self, chunk: JobChunk, effect: states.Effect
    ) -> Relation | None:
        job = chunk.job
        match effect:
            case states.RecordChanges(relation_id, changes):
                if not job.record.relation_id:
                    job.change(replace(job.record, relation_id=relation_id))
                self._recorders.start(relation_id, changes)
            case states.StopRecording(relation_id, changes):
                self._recorders.stop(relation_id, changes)
            case states.ReadOn(rows):
                try:
                    job.rows_read(chunk, rows, chunk_rows.last_key(rows))
                except UnicodeDecodeError:
                    self._fail(job, f"a key of {job.record.name} is no text", "values.invalid.text")
            case states.AwaitCommit(describe):
                self._committing = chunk
                if describe is not None:
                    self._sequencer.types.update(describe.described.types)
                    return describe.described.relation
            case states.Publish():
                self._publish(chunk, effect)
            case states.Retry(why):
                self._retry(job, why)
            case states.Restart(table, key, why):
                job.continue_as(table)
                job.key = key
                self._retry(job, why, from_the_start=True)
            case states.Fail(what, hint):
                self._fail(job, what, hint)
        return None

    def _publish(self, chunk: JobChunk, rows: states.Publish) -> None:
        """Publish a chunk's rows with the transaction that commits."""
        job, read = chunk.job, rows.chunk
        job.key = read.key
        job.withhold(redaction.of_published(self._config, read, job.record.where))
        job.chunks.remove(chunk)
        try:
            count = chunk_rows.publish(
                self._sequencer, self._table(read), rows, empty_first=chunk.empties_table
            )
        except CDCError as error:
            # The stream continues: the rows that were published of the chunk are rows like any
            # others.
            self._fail(job, f"{error.what} (at LSN {LSN(rows.lsn)})", error.hint)
            return
        at = self._sequencer.transaction_lsn
        job.published(chunk, read, count, self._table(read).encoder.schema.schema_id, LSN(at))
        if chunk.empties_table:
            # What others have published so far is in the topic no more: they do not replace it.
            for other in self._running():
                if other is not job:
                    other.replaced_by(job.record)
        self._governor.sent(at, chunk.high_at, len(read.rows), read.bytes)
        if job.over:
            self._end(job, "done")

    def _drop_chunks(self, job: Job) -> None:
        for chunk in list(job.chunks):
            self._advance(chunk, states.Dropped())
        job.drop_chunks()

    def _retry(self, job: Job, why: str, *, from_the_start: bool = False) -> None:
        self._drop_chunks(job)
        job.retry(why, from_the_start=from_the_start)

    def _count_error(self, error: CDCError, jobs: list[Job]) -> None:
        """Retry these snapshots after a delay; end those that have failed too often."""
        log.warning("incremental snapshots wait", extra={"fields": {"error": error.what}})
        self._fetcher.disconnect()
        self._not_before = self._clock.monotonic() + _RECONNECT_SECONDS
        for job in jobs:
            if not job.record.active:
                continue
            self._drop_chunks(job)
            if not job.count_error(error.what):
                what = f"{MAX_ERRORS} errors in a row, the last: {error.what}"
                self._fail(job, what, error.hint)

    def _key_changed(self, relation_id: int, old: Key | None, new: Key | None) -> None:
        """Note that a row left a key, or took one without its TOAST values."""
        for job in self._running():
            if job.record.relation_id != relation_id:
                continue
            if not job.key_changed(old, new) or () in job.pending_keys:
                self._fail(
                    job,
                    f"more than {MAX_PENDING_KEYS} rows of {job.record.name} took another key while"
                    " it was read, or keys that are no text",
                    "run it again when that is over",
                )

    def _fail(self, job: Job, what: str, hint: str) -> None:
        fields = {**job.record.summary, "hint": hint}
        log.warning("incremental snapshot failed", extra={"fields": fields})
        self._end(job, "failed", f"{what}; {hint}")

    def _end(self, job: Job, state: SnapshotState, why: str | None = None) -> None:
        self._drop_chunks(job)
        job.enter(state, why)
        if self._reading is not None and self._reading.job is job:
            self._fetcher.cancel()  # what it waits for, others wait for, too
        if state == "done" and job.record.emptied_under:
            self._note_replaced(job.record)
        elif job.record.left_empty:
            self._completeness.empty(emptied_topic(job.record))
        _log(job, "incremental snapshot ended")
        self._update_observed()

    def _note_replaced(self, record: IncrementalRecord) -> None:
        """Write down that the topic holds the table: its record is not kept as long."""
        replacement = Replacement(
            pipeline=record.pipeline,
            schema=record.schema,
            table=record.table,
            schema_id=record.emptied_under,
            snapshot=record.id,
            at_us=record.at_us,
        )
        self._completeness.replace(replacement)
        for job in self._jobs.values():
            if job.record.left_empty:
                job.replaced_by(record)
        self._replaced.append(replacement_record(self._config, replacement))

    # -- commands ----------------------------------------------------------------------------------

    def _on_commands(self, commands: list[Command], most: int) -> None:
        for command in commands:
            if command.do == "start":
                for table in command.tables:
                    self._start(command, table, most)
            else:
                for job in self._jobs.values():
                    self._control(job, command)
        self._update_observed()

    def _control(self, job: Job, command: Command) -> None:
        """Pause, resume or stop a snapshot, if the command means it."""
        record = job.record
        table = TableName(record.schema, record.table)
        if command.id not in (None, record.id) or (command.tables and table not in command.tables):
            return
        if record.state == "failed" and (command.do, command.id) == ("stop", record.id):
            job.enter("stopped", f"acknowledged: {record.why}")
        if not record.active:
            return
        wanted: SnapshotState = "paused" if command.do == "pause" else "running"
        if command.do == "stop":
            self._end(job, "stopped", "by command")
        elif record.state != wanted:
            job.enter(wanted)
            _log(job, f"incremental snapshot {wanted}")

    def _start(self, command: Command, table: TableName, most: int) -> None:
        """Start a snapshot; where `most` are active it fails instead."""
        number = command.id or f"{self._sequencer.transaction_lsn}"
        if len(command.tables) > 1:
            number = f"{number}-{command.tables.index(table) + 1}"
        if number in self._jobs:
            return  # the same command, read again
        job = Job.start(self._config.pipeline, number, command, table, self._clock, self._sizes)
        job.withhold(redaction.before_publishing(self._config, job.record))
        active = len(self._running())
        self._jobs[number] = job
        if active >= most:
            self._fail(job, f"{active:,} incremental snapshots are active: no more start", _FULL)
            return
        if redaction.logged(job.record, job.withheld).withheld:
            self._unlogged[number] = job.record
        try:
            conditions.parse(command.where or "true")
        except conditions.ConditionError as error:
            self._fail(job, f"the condition can't be read: {error}", CONDITION_HINT)
            return
        _log(job, "incremental snapshot started")

    # -- recording ---------------------------------------------------------------------------------

    def _running(self) -> list[Job]:
        return [job for job in self._jobs.values() if job.record.active]

    def _update_observed(self) -> None:
        """Observe the tables of the snapshots that run, and no others."""
        running = self._running()
        self._turns = deque(job.record.id for job in running)
        self._recorders.keep({job.record.relation_id for job in running} - {0})
        if not running:
            self._barrier = None
        elif self._barrier is None:
            self._start_recording()

    def _start_recording(self) -> None:
        self._barrier, sequencer = VisibilityBarrier(), self._sequencer
        if sequencer.in_transaction and sequencer.xid is not None:
            self.on_begin(sequencer.transaction_lsn, sequencer.xid)


def _log(job: Job, what: str, level: int = logging.INFO) -> None:
    log.log(level, what, extra={"fields": job.record.summary})
