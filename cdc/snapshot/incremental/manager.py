"""Incremental snapshots: tables read again, chunk by chunk, while the stream continues.

The loop's side: commands arrive with the stream (`hear`) and are obeyed where it is proven who
wrote them (`cdc.daemon.verifier`). Chunks are read on a worker of their own (`turn`). A chunk's rows are
published as changes of the transaction that wrote its high watermark (`_pay`), in the same Kafka
transaction as the snapshot's record (`take`). `cdc.snapshot.incremental.visibility` decides which rows are
still valid by then.

A session reads again what an earlier one did not finish: it ignores the watermarks of other
sessions. An error in one snapshot ends that one, is recorded in its record, and never stops the
stream.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import struct
import time
import uuid
from collections import deque
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from cdc.decode import messages
from cdc.encode import ddl
from cdc.encode.logical_messages import OURS
from cdc.encode.unreadable import unreadable
from cdc.errors import CDCError, Policy
from cdc.events import LSN
from cdc.log import names, records
from cdc.sequence.state import Wanted
from cdc.snapshot.incremental import commands
from cdc.snapshot.incremental import redaction as withholding
from cdc.snapshot.incremental.change_recorder import TableWatch
from cdc.snapshot.incremental.fetcher import Fetcher
from cdc.snapshot.incremental.governor import Governor
from cdc.snapshot.incremental.job import MOST_AGAIN, MOST_ERRORS, Flight, Job
from cdc.snapshot.incremental.publishing import alike, last_key, publish, relation
from cdc.snapshot.incremental.reconcile import Settling
from cdc.snapshot.incremental.records import KEPT, LiveRecord, live_key
from cdc.snapshot.incremental.visibility import Snapshot, Window, row_values, still_unseen, unseen
from cdc.source import conditions
from cdc.source.authority import DDL_PURPOSE, SIGNAL_PURPOSE
from cdc.source.chunks import CONDITION_HINT

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.daemon.verifier import Verifier
    from cdc.encode.routes import Table
    from cdc.runtime.background import Worker
    from cdc.sequence.sequencer import Sequencer
    from cdc.snapshot.incremental.records import Key, State
    from cdc.snapshot.incremental.topic import Known

log = logging.getLogger("cdc.snapshot.incremental")

Record = tuple[str, bytes, bytes | None]

# A chunk must fit in one batch, far below the batch's size.
_BATCH_SHARE: Final = 4
# Transactions decoded and not known to be visible; above this number waiting starts again.
_MOST_DECODED: Final = 200_000
_RECONNECT_SECONDS: Final = 1.0
# A chunk takes a fraction of a second.
_SLOW_SECONDS: Final = 10.0


class Live:
    """The incremental snapshots of one session."""

    def __init__(
        self,
        config: Config,
        worker: Worker,
        sequencer: Sequencer,
        verifier: Verifier,
        given: dict[str, LiveRecord],
    ) -> None:
        """Start with none; `adopt` takes over those in the log.

        `given` outlives the session: the keys and conditions of snapshots that must not be in the
        log.
        """
        self._config, self._worker, self._sequencer = config, worker, sequencer
        self._verifier, self._given = verifier, given
        self._session, self._key = uuid.uuid4().hex[:12], secrets.token_bytes(32)
        self._jobs: dict[str, Job] = {}
        self._turns: deque[str] = deque()
        self._watches: dict[int, TableWatch] = {}
        self._flights: dict[tuple[str, int], Flight] = {}
        self._reading: Flight | None = None
        self._number = 0
        self._fetcher = Fetcher(config, self._session, self._key)
        self._governor = Governor()
        self._records: list[Record] = []
        self._settling: Settling | None = None  # None: no snapshot runs, nothing is recorded
        self._not_before = 0.0
        sequencer.hear, sequencer.admit = self.hear, verifier.admit

    def adopt(self, known: Known) -> None:
        """Continue the snapshots that are unfinished in the log."""
        self._verifier.adopt(known.commands)
        for found in known.snapshots:
            record = withholding.restored(found, self._given.get(found.id))
            job = self._jobs[found.id] = Job(record or found)
            # What an older version or configuration left in the log is written again without it.
            job.withhold(withholding.before_publishing(self._config, job.record))
            if found.active and record is None:
                job.to("failed", withholding.GIVE_AGAIN)
                log.warning("a live snapshot can't go on", extra={"fields": job.record.told})
            elif found.active:
                log.info("going on with a live snapshot", extra={"fields": job.record.told})
        for number in self._given.keys() - {r.id for r in known.snapshots if r.active}:
            del self._given[number]
        self._see_to_it()

    def progress(self) -> list[LiveRecord]:
        """Return the record of every snapshot that is not over."""
        return [job.record for job in list(self._jobs.values()) if job.record.active]

    def known(self) -> list[LiveRecord]:
        """Return every snapshot that the log keeps, including those that are over."""
        return [job.record for job in list(self._jobs.values())]

    @property
    def waiting(self) -> bool:
        """Whether there are records for the next Kafka transaction."""
        return (
            bool(self._records)
            or self._verifier.waiting
            or any(job.dirty for job in self._jobs.values())
        )

    def take(self) -> list[Record]:
        """Return the records for the next Kafka transaction, once."""
        taken, self._records = [*self._verifier.take(), *self._records], []
        topic, pipeline = names.snapshot_topic(self._config.prefix), self._config.pipeline
        for job in self._jobs.values():
            if job.dirty:
                key = live_key(pipeline, job.record.id)
                taken.append((topic, key, records.encode(job.take())))
        over = [number for number, job in self._jobs.items() if not job.record.active]
        for number in over[:-KEPT]:
            del self._jobs[number]
            self._given.pop(number, None)
            taken.append((topic, live_key(pipeline, number), None))
        return taken

    def close(self) -> None:
        """Close the connection, whatever it waits for."""
        self._fetcher.cancel()
        self._worker.submit(self._fetcher.close)

    def turn(self, committed_lsn: int) -> None:
        """Read the next chunk when it is due; costs nothing while no snapshot runs."""
        if self._settling is None and self._reading is None:
            return
        self._governor.committed(committed_lsn, time.monotonic())
        if self._reading is not None:
            if not (self._reading.done and self._reading.done.done()):
                self._notice_slow(self._reading)
                return
            flight, self._reading = self._reading, None
            self._came(flight)
        if len(self._sequencer.decoded or ()) > _MOST_DECODED:
            self._start_recording()
            for job in self._running():
                job.redo("so many transactions committed that it waits anew")
        if time.monotonic() >= self._not_before and self._settled():
            self._read_next()

    @staticmethod
    def _notice_slow(flight: Flight) -> None:
        """Note that a chunk is slow: it waits for a lock, or the source does not answer."""
        job = flight.job
        if job.record.failing_since_us is None and flight.age_seconds > _SLOW_SECONDS:
            job.waits(
                f"a chunk has not been read for {_SLOW_SECONDS:.0f} s: it may wait for a lock"
            )

    def _read_next(self) -> None:
        """Start reading the next chunk, taking the snapshots in turn."""
        if self._governor.full(len(self._flights), time.monotonic()):
            return
        for _ in range(len(self._turns)):
            self._turns.rotate(-1)
            if (job := self._jobs[self._turns[0]]).runnable:
                self._read(job)
                return
            if job.over:  # the last rows to be read again were deleted
                self._end(job, "done")
                return

    def _settled(self) -> bool:
        if (settling := self._settling) is None:
            return False
        try:
            over = settling.turn(self._worker, self._fetcher, self._sequencer.decoded or {})
        except CDCError as error:
            self._erred(error, self._running())
            return False
        for job in () if over else self._running():
            if settling.why != job.record.why:
                job.waits(settling.why)
        return over

    def _read(self, job: Job) -> None:
        record = job.record
        selection = self._config.selection.of((record.schema, record.table))
        share = self._config.batch.max_events // _BATCH_SHARE
        most_rows = max(1, min(share, self._governor.rows))
        self._number += 1
        flight = Flight(job, self._number, job.next(selection.key, most_rows))
        job.flights.append(flight)
        self._flights[record.id, flight.number] = self._reading = flight
        flight.done = self._worker.submit(lambda: self._fetcher.fetch(flight))

    def _came(self, flight: Flight) -> None:
        """Handle a chunk that was read, or the error that prevented it."""
        assert flight.done is not None
        job = flight.job
        try:
            flight.done.result()
        except CDCError as error:
            self._forget(flight)
            if error.policy is Policy.BACKOFF:
                self._erred(error, [job])
            elif not flight.void:
                self._fail(job, error.what, error.hint)
            return
        chunk = flight.chunk
        assert chunk is not None
        if flight.estimate is not None:
            job.change(replace(job.record, estimate=flight.estimate))
        try:
            job.was_read(flight, chunk, last_key(chunk))
        except UnicodeDecodeError:
            self._forget(flight)
            self._fail(job, f"a key of {job.record.name} is no text", "see values.invalid.text")

    def _erred(self, error: CDCError, jobs: list[Job]) -> None:
        """Retry these snapshots after a delay; end those that have failed too often."""
        self._disconnect(error)
        for job in jobs:
            if not job.erred(error.what):
                what = f"{MOST_ERRORS} errors in a row, the last: {error.what}"
                self._fail(job, what, error.hint)

    def _disconnect(self, error: CDCError) -> None:
        log.warning("live snapshots wait", extra={"fields": {"error": error.what}})
        self._worker.submit(self._fetcher.disconnect)
        self._not_before = time.monotonic() + _RECONNECT_SECONDS

    # -- what arrives with the stream --------------------------------------------------------------

    def hear(self, message: messages.LogicalMessage, lsn: int) -> messages.Relation | Wanted | None:
        """Handle one of our own messages; may request something that must be done first."""
        match message.prefix:
            case commands.MARK:
                return self._mark(message, lsn)
            case commands.COMMAND:
                if (body := self._verifier.command(message, self._sequencer)) is not None:
                    self._command(commands.COMMAND, body, message)
            case commands.SIGNAL:
                return self._by_trigger(SIGNAL_PURPOSE, message)
            case ddl.PREFIX:
                return self._by_trigger(DDL_PURPOSE, message)
            case prefix if prefix != OURS:  # what separates a DDL record from the next change
                self._verifier.refuse("other", "a reserved prefix", message)
        return None

    def _by_trigger(self, purpose: str, message: messages.LogicalMessage) -> Wanted | None:
        def judge() -> None:
            body = self._verifier.by_trigger(purpose, message, self._sequencer)
            if body is None:
                return
            if purpose == DDL_PURPOSE:
                self._ddl(message, body)
            else:
                self._command(commands.SIGNAL, body, message)

        def ask() -> None:
            self._verifier.read_keys()
            judge()

        if self._verifier.may_be_proven(purpose, message, self._sequencer):
            return Wanted(ask)
        judge()
        return None

    def _ddl(self, message: messages.LogicalMessage, body: bytes) -> None:
        at = self._sequencer
        record = ddl.record(
            self._config.prefix, body, lsn=message.lsn, commit_lsn=at.transaction_lsn,
            ordinal=at.ordinal, seq=at.seq, committed_at_us=at.committed_at_us, tx_id=at.xid,
        )  # fmt: skip
        if record is None:
            self._verifier.refuse("ddl", "not readable", message)
        else:
            self._records.append(record)

    def _command(self, prefix: str, body: bytes, message: messages.LogicalMessage) -> None:
        try:
            for command in commands.commands(prefix, body):
                self._obey(command)
        except commands.CommandError as error:
            self._verifier.refuse("command", "not readable", message, quiet=True)
            fields = {"prefix": prefix, "lsn": str(message.lsn), "error": str(error)}
            log.warning("a command that can't be read is left alone", extra={"fields": fields})
        self._see_to_it()

    def _obey(self, command: commands.Command) -> None:
        if command.do == "start":
            for of in command.tables:
                self._begin(command, of)
            return
        for job in self._jobs.values():
            record = job.record
            meant = command.id in (None, record.id) and (
                not command.tables or commands.Of(record.schema, record.table) in command.tables
            )
            if (
                meant
                and record.state == "failed"
                and (command.do, command.id)
                == (
                    "stop",
                    record.id,
                )
            ):
                job.to("stopped", f"acknowledged: {record.why}")
            if not meant or not record.active:
                continue
            if command.do == "stop":
                self._end(job, "stopped", "by command")
            elif record.state != ("paused" if command.do == "pause" else "running"):
                job.to("paused" if command.do == "pause" else "running")
                log.info("live snapshot", extra={"fields": job.record.told})

    def _begin(self, command: commands.Command, of: commands.Of) -> None:
        number = command.id or f"{self._sequencer.transaction_lsn}"
        if len(command.tables) > 1:
            number = f"{number}-{command.tables.index(of) + 1}"
        if number in self._jobs:
            return  # the same command, read again
        job = Job.begun(self._config.pipeline, number, command, of)
        job.withhold(withholding.before_publishing(self._config, job.record))
        self._jobs[number] = job
        if withholding.logged(job.record, job.withheld).withheld:
            self._given[number] = job.record
        try:
            conditions.parse(command.where or "true")
        except conditions.ConditionError as error:
            self._fail(job, f"the condition can't be read: {error}", CONDITION_HINT)
            return
        log.info("live snapshot begins", extra={"fields": job.record.told})

    def _mark(self, message: messages.LogicalMessage, lsn: int) -> messages.Relation | None:
        mark = commands.mark(message.content)
        if mark is None or mark.session != self._session:
            return None  # another session's, or another pipeline's
        if not hmac.compare_digest(mark.signed(self._key).mac.encode(), mark.mac.encode()):
            self._verifier.refuse("watermark", "wrong signature", message)
            return None
        flight = self._flights.get((mark.snapshot, mark.chunk))
        if flight is None:
            return None
        if mark.low:
            # The first one counts: after a copy of it the window would be too short.
            if flight.window is None:
                self._open(flight, mark.relation_id)
            return None
        self._forget(flight)
        return None if flight.void else self._high(flight, lsn)

    def _open(self, flight: Flight, relation_id: int) -> None:
        flight.relation_id = relation_id
        if not flight.job.record.relation_id:
            flight.job.change(replace(flight.job.record, relation_id=relation_id))
        flight.window = Window(self._sequencer.transaction_lsn)
        if table := self._sequencer.table(relation_id):
            flight.schema_id = table.encoder.schema.schema_id
        watch = self._watches.get(relation_id)
        if watch is None:
            watch = TableWatch(self._sequencer, relation_id, self._moved)
            self._watches[relation_id] = watch
        watch.windows.append(flight.window)
        self._sequencer.watch(relation_id, watch)

    def _forget(self, flight: Flight) -> None:
        """Close the flight's window, and ignore the flight from here on."""
        self._flights.pop((flight.job.record.id, flight.number), None)
        watch = self._watches.get(flight.relation_id)
        if watch and flight.window in watch.windows:
            watch.windows.remove(flight.window)
            self._sequencer.watch(flight.relation_id, watch)

    def _high(self, flight: Flight, lsn: int) -> messages.Relation | None:
        """Check a chunk at its high watermark; a valid one is published with the commit."""
        job, chunk, window = flight.job, flight.chunk, flight.window
        assert chunk is not None, "a high mark is written behind its chunk"
        assert window is not None, "a high mark is written behind its low one"
        sequencer = self._sequencer
        snapshot, decoded = Snapshot.parse(chunk.snapshot), sequencer.decoded or {}
        late = unseen(decoded, snapshot, window.low_lsn)
        sequencer.decoded = still_unseen(decoded, snapshot)
        table = sequencer.table(flight.relation_id)
        version = table.encoder.schema if table else None
        if late:
            job.redo(
                f"waits for transaction {late[0]}: its commit is in the log and not visible yet, as"
                " while it waits for a synchronous standby"
            )
        elif window.overflown:
            job.redo("too much changed while a chunk was read")
        elif version is not None and alike(version, chunk):
            self._owe(flight, lsn)
        elif version is not None and flight.schema_id != version.schema_id:
            job.redo("the table was changed while a chunk was read")
        else:
            sequencer.types.update(chunk.described.types)
            self._owe(flight, lsn)
            return relation(chunk)
        return None

    def _owe(self, flight: Flight, lsn: int) -> None:
        self._sequencer.owed = lambda: self._pay(flight, lsn)

    def _pay(self, flight: Flight, lsn: int) -> None:
        """Publish a chunk's rows with the transaction that commits."""
        job, chunk = flight.job, flight.chunk
        table = self._sequencer.table(flight.relation_id)
        assert chunk is not None
        assert table is not None, "the table was described at the high mark"
        version = table.encoder.schema
        if set(version.key) != set(chunk.key):
            self._fail(
                job,
                f"the key of {job.record.name} is {', '.join(version.key)} in the stream, and"
                f" {', '.join(chunk.key)} in the catalog",
                "run it again after the table's next change",
            )
            return
        named = (chunk.described.schema, chunk.described.name)
        if named != (job.record.schema, job.record.table) or job.key not in (None, chunk.key):
            job.change(replace(job.record, schema=named[0], table=named[1]))
            job.key = chunk.key
            job.redo(
                "the table was renamed, or its key is another: from the start", from_the_start=True
            )
            return
        job.key = chunk.key
        job.withhold(withholding.of_published(self._config, chunk, job.record.where))
        job.flights.remove(flight)
        try:
            rows = sum(1 for _ in publish(self._sequencer, table, flight, lsn))
        except (CDCError, struct.error, IndexError, TypeError, ValueError, OverflowError) as error:
            # The stream continues: the rows that were published of the chunk are rows like any
            # others.
            found = _unreadable(table, flight, error)
            self._fail(job, f"{found.what} (at LSN {LSN(lsn)})", found.hint)
            return
        job.is_published(flight, rows, last_key(chunk))
        at = self._sequencer.transaction_lsn
        self._governor.sent(at, flight.marked_at, len(chunk.rows), chunk.bytes)
        if job.over:
            self._end(job, "done")

    def _moved(self, relation_id: int, old: Key | None, new: Key | None) -> None:
        """Note that a row left a key, or took one without its TOAST values."""
        for job in self._running():
            if job.record.relation_id != relation_id:
                continue
            if not job.moved(old, new) or () in job.again:
                self._fail(
                    job,
                    f"more than {MOST_AGAIN} rows of {job.record.name} took another key while it"
                    " was read, or keys that are no text",
                    "run it again when that is over",
                )

    def _running(self) -> list[Job]:
        return [job for job in self._jobs.values() if job.record.active]

    def _fail(self, job: Job, what: str, hint: str) -> None:
        log.warning("live snapshot failed", extra={"fields": {**job.record.told, "hint": hint}})
        self._end(job, "failed", f"{what}; {hint}")

    def _end(self, job: Job, state: State, why: str | None = None) -> None:
        job.drop_flights()
        job.to(state, why)
        log.info("live snapshot ends", extra={"fields": job.record.told})
        self._see_to_it()

    def _see_to_it(self) -> None:
        """Record and watch while a snapshot runs; stop when none does."""
        running = self._running()
        self._turns = deque(job.record.id for job in running)
        tables = {job.record.relation_id for job in running}
        for relation_id, watch in list(self._watches.items()):
            if relation_id not in tables and not watch.windows:
                del self._watches[relation_id]
                self._sequencer.watch(relation_id, None)
        for relation_id in tables - {0} - self._watches.keys():
            watch = TableWatch(self._sequencer, relation_id, self._moved)
            self._watches[relation_id] = watch
            self._sequencer.watch(relation_id, watch)
        if running and self._settling is None:
            self._start_recording()
        elif not running:
            self._sequencer.decoded = self._settling = None

    def _start_recording(self) -> None:
        sequencer = self._sequencer
        sequencer.decoded = {}
        if sequencer.in_transaction and sequencer.xid is not None:
            sequencer.decoded[sequencer.xid] = sequencer.transaction_lsn
        self._settling = Settling()


def _unreadable(table: Table, flight: Flight, error: Exception) -> CDCError:
    """Return the error of a chunk with a row that can't be encoded: its table and column."""
    if isinstance(error, CDCError):
        return error
    encoder = table.encoder
    rows = flight.chunk.rows if flight.chunk else []
    columns = len(encoder.schema.columns)
    texts = (row_values(row, 2, columns) for row in rows)
    bad = next((each for each in texts if encoder.at_fault(each) is not None), [])
    return unreadable(encoder, bad, error)
