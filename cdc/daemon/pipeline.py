"""The daemon: the loop that carries changes from the slot into the log. Read this first.

One iteration: receive frames, sequence and encode them, hand them to the producer, and when a batch
is due commit it with its resume record; when a commit has ended, confirm to Postgres. Everything
that may block runs on a worker, so that the loop always answers Postgres in time: while one Kafka
transaction commits, the next one is already being sent (`cdc.log.producer_pool`).

The start order is the guarantee (docs/GUARANTEES.md): take the slot, fence older writers, read the
resume record, prove that slot and log fit together, stream. Any error ends the session; the next
one starts from the resume record, which is the only state.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

from cdc import failpoints
from cdc.daemon import timing as pace
from cdc.daemon.verifier import Verifier
from cdc.errors import CDCError, GapError, Policy, StoppedError
from cdc.log import frontiers as frontier_records
from cdc.log import names, reader, records, resume, topics, trace
from cdc.log.batch import Batch
from cdc.log.frontiers import Frontiers
from cdc.log.producer_pool import Lanes
from cdc.log.topic_monitor import LogWatch
from cdc.operate.health import State
from cdc.operate.metrics import Cut
from cdc.operate.source_monitor import Watch
from cdc.publication import continuity
from cdc.sequence.intake import Intake
from cdc.sequence.relations import Relations
from cdc.sequence.replay import Replay
from cdc.sequence.table_versions import Tables
from cdc.snapshot.incremental import topic as live_topic
from cdc.snapshot.incremental.manager import Live
from cdc.snapshot.initial import due
from cdc.source import catalog, signing_keys
from cdc.source.connection import connect
from cdc.source.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.config import Config
    from cdc.daemon.process import Daemon
    from cdc.decode import messages
    from cdc.events import LSN
    from cdc.source.timelines import System

log = logging.getLogger("cdc.daemon.pipeline")
T = TypeVar("T")


class Pipeline:
    """One session: from taking the slot to the first error, or to the stop."""

    def __init__(self, config: Config, daemon: Daemon) -> None:
        """Connect; call `start` and `run` next, and `close` in any case."""
        self.config = config
        self.daemon = daemon
        self.worker = daemon.worker
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self.batch = Batch()
        self.streaming = False
        self.cut_at = self.batch_began_at = self.moved_at = time.monotonic()
        self.frontier_at = 0.0
        self._closing = ExitStack()
        self.stream = Stream(
            config, self.worker.wake_fd, whole=daemon.reread, patience=daemon.patience
        )
        self._closing.callback(self.stream.close)

    # -- the start, in the order that makes it safe ------------------------------------------------

    def start(self) -> None:
        """Take the slot, fence older writers, read the resume record, prove that both fit."""
        config, stream = self.config, self.stream
        system = stream.identify()
        self._take_slot(system)
        failpoints.reach("after_slot")
        self.lanes = Lanes(config, self.daemon.lanes, self.daemon.transaction_seconds)
        self._closing.callback(self.lanes.abandon)
        self.admin = topics.admin(config)
        self.daemon.to(State.STARTING, "fencing older writers and reading the resume record")
        if stale := self.aside(lambda: reader.read_resume(config)):
            # Before anything is fenced: a stray daemon with another slot must not stop this log's.
            continuity.same_writer(config, stale[0])
        self.aside(self.lanes.open)
        failpoints.reach("after_fence")
        resumed = self.aside(lambda: reader.read_resume(config))
        resume.expect_not_older(stale, resumed)
        if resumed is None:
            raise GapError(
                f'there is no resume record of pipeline "{config.pipeline}" in'
                f" {names.resume_topic(config.prefix)}",
                hint="run `cdc setup`; where the pipeline has run before, its log was lost",
            )
        identity, position = resumed
        self.aside(lambda: due.expect_done(config, identity))
        self.sql = self.aside(lambda: connect(config))
        # On the worker, after any call that a failing session has abandoned: closing earlier would
        # make libpq free memory that the call still reads.
        self._closing.callback(self.worker.submit, self.sql.close)
        with reader.unless_overtaken(config, position):
            published = identity.publication.tables
            source = self.aside(lambda: catalog.source(self.sql, config, published))
            found = continuity.Found(system, source)
            proven = continuity.check(config, identity, position, found)
        self.log_watch = LogWatch(config, self.admin, self.daemon.metrics)
        self.aside(lambda: self.log_watch.begin(identity, position))
        replay = Replay(position, continuity.begins_at(found), config.source.origin)
        self._begin_at(identity, position, replay)
        self.tables.adopt(self.log_watch.pin(proven))
        daemon, publication = self.daemon, self.tables.publication
        self.watch = Watch(config, publication, daemon.health, daemon.metrics, daemon.followed)
        self._closing.callback(self.watch.close)

    def _take_slot(self, system: System) -> None:
        try:
            self.stream.start()
        except CDCError as error:
            if error.policy is Policy.HALT:
                self._prove_source(system)
            raise

    def _prove_source(self, system: System) -> None:
        """Raise why the slot is not available, as exactly as log and catalog show it, or return."""
        config = self.config
        if resumed := self.aside(lambda: reader.read_resume(config)):
            identity, position = resumed
            with connect(config) as sql:
                source = catalog.source(sql, config, identity.publication.tables)
            continuity.same_source(config, identity, position, system, source)

    def _begin_at(
        self, identity: records.ResumeIdentity, position: records.ResumePosition, replay: Replay
    ) -> None:
        config, self.replay = self.config, replay
        pending = [(topic, number) for topic, number, _ in position.pending]
        ends = self.aside(lambda: reader.written_ends(config, pending))
        schemas = self.aside(lambda: reader.read_schemas(config))
        numbers = self.aside(lambda: reader.read_column_numbers(config))
        self.position = self.written = position  # committed, and handed to a producer
        relations = Relations(config.prefix, schemas, position.schema_id, numbers)
        self.tables = Tables(config, self.sql, self.admin, self.batch, relations, identity)
        self.frontiers = Frontiers(config.pipeline, identity.epoch, position, ends)
        self.intake = Intake(
            config, self.stream, self.tables, identity, position, self._describe, self._full,
            self.aside, replay,
        )  # fmt: skip
        self._closing.callback(self.intake.close)
        self.sequencer = self.intake.sequencer
        verifier = Verifier(
            config,
            identity.system_identifier,
            self.daemon.metrics.refusals,
            lambda: self.aside(lambda: signing_keys.read(self.sql)),
        )
        self.live = Live(
            config, self.daemon.snapshots, self.sequencer, verifier, self.daemon.given_snapshots
        )
        self._closing.callback(self.live.close)
        self.daemon.metrics.live = self.live.progress
        self.daemon.metrics.live_known = self.live.known
        self.live.adopt(self.aside(lambda: live_topic.load(config, self.admin)))
        self._confirm()
        self.streaming = True
        self.daemon.to(State.STREAMING, f"streaming from {position.end_lsn}, seq {position.seq}")

    @property
    def proven(self) -> bool:
        """Whether log and Postgres were found to have the same history."""
        return self.streaming and self.replay.proven

    # -- the loop ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Carry changes until asked to stop; then finish what was read and return."""
        while not self.daemon.stopping:
            received = self._receive()
            self._settle()
            self._publish(idle=received < pace.BACKLOG_BYTES)
            self._look_after()
            self.live.turn(self.position.end_lsn)
            self.watch.turn(self.tables.publication, self.tables.note)
            self.log_watch.turn(self.tables.identity, self.frontiers)
            self._wait(received)
        self._finish()

    def _receive(self) -> int:
        """Sequence what is next; return how many bytes it was."""
        if self._ahead():
            return 0
        events = self.sequencer.events
        began_at = time.monotonic()
        taken = self.intake.take()
        if taken:
            failpoints.reach("after_sequence")
            self.moved_at = time.monotonic()
            if not events:
                self.batch_began_at = began_at
            if trace.tracer:
                trace.tracer.received(self.sequencer.seq, began_at, self.moved_at)
        return taken

    def _describe(self, relation: messages.Relation) -> None:
        """Make the relation's rows encodable."""
        sequencer, tables, upcoming = self.sequencer, self.tables, self.intake.upcoming
        table = self.aside(
            lambda: tables.describe(
                relation,
                sequencer.types,
                sequencer.transaction_lsn,
                replaying=sequencer.replaying,
                upcoming=upcoming,
                xid=sequencer.xid,
            )
        )
        sequencer.describe(relation.relation_id, table)
        self.daemon.metrics.unknown_type_columns = tables.unknown_type_columns

    def _full(self) -> None:
        """Publish a batch of full size, although more has arrived."""
        self._settle()
        self._publish(idle=False)

    def _ahead(self) -> bool:
        """Whether so much is waiting after the batch being sent that reading must wait too."""
        # A thin batch's cost depends on its partitions, so more of it is gathered.
        share = 1 if self.batch.thin else pace.AHEAD
        return not self.lanes.free and self._full_at(share)

    def _publish(self, *, idle: bool) -> None:
        """Hand what waits to the producer, and commit when the batch is due."""
        if not self.lanes.free:
            return
        sequencer = self.sequencer
        if sequencer.events:
            due = self._due(idle=idle)
            # A small batch is handed over at once: a partition that joins its transaction later is
            # one more round trip to the coordinator. A large one is sent while it arrives.
            if due or self.batch.worth_sending:
                self._begin(due=due)
                failpoints.reach("after_begin")
                self._hand_over()
                failpoints.reach("after_produce")
            if due:
                self._cut()
        elif idle and not sequencer.in_transaction and not self.lanes.in_flight:
            self._rest()

    def _begin(self, *, due: bool) -> None:
        """Begin a Kafka transaction; a batch that is due grows no further."""
        small = due and not self.batch.letters
        self.lanes.begin(self.batch.bytes if small else self.config.batch.max_bytes)

    def _hand_over(self) -> None:
        """Hand the batch's messages to the producer; return when it has all of them."""
        batch = self.batch
        self.lanes.current.produce(batch)
        if not batch.letters:
            return
        publisher = self.lanes.large
        # A letter may take minutes: the loop answers Postgres meanwhile.
        began_at = time.monotonic()
        try:
            self.aside(lambda: publisher.send_letters(batch))
        finally:
            self.daemon.transaction_took(time.monotonic() - began_at)

    def _due(self, *, idle: bool) -> bool:
        """Whether the batch should end here."""
        sequencer, batch, limits = self.sequencer, self.batch, self.config.batch
        full = self._full_at(1)
        age_seconds = time.monotonic() - self.batch_began_at
        aged = age_seconds * 1_000 >= limits.max_wait_ms
        # A transaction larger than a batch, or slower to arrive than Kafka keeps one open, is
        # split; any other is read to its end, so that the batch ends on a boundary, with a
        # frontier.
        over = (
            sequencer.events >= 2 * limits.max_events
            or batch.bytes >= 2 * limits.max_bytes
            or age_seconds >= pace.OPEN_SECONDS
        )
        return over or (not sequencer.place.open and (idle or full or aged))

    def _full_at(self, share: int) -> bool:
        """Whether the batch has reached this share of its size; a thin one may be twice as large.

        Any batch may reach twice its size while an open source transaction keeps it from ending.
        """
        limits = self.config.batch
        times = 2 if self.batch.thin else 1
        return (
            self.sequencer.events * share >= times * limits.max_events
            or self.batch.bytes * share >= times * limits.max_bytes
        )

    def _rest(self) -> None:
        """With nothing in flight: write a frontier that is due, and advance an idle slot."""
        if not self.replay.proven and self.stream.keepalive_lsn >= self.replay.end_lsn:
            # Only here is everything sequenced that was sent before that keepalive.
            self.replay.reached()
            self._confirm()
        if self.position.open:
            # Only its own end closes a transaction that was split: a keepalive inside it does not.
            if not self.sequencer.place.open:
                self._cut()
            return
        now = time.monotonic()
        # Everything up to the keepalive's WAL end was sent, and none of it is waiting here.
        reached = max(self.stream.keepalive_lsn, self.sequencer.end_lsn)
        idle = reached > self.position.end_lsn and (
            self.stream.reply_requested or now - self.cut_at >= pace.IDLE_SECONDS
        )
        if idle:
            # What a changed publication leaves out is in no frame: check it before the log claims
            # to hold everything up to there.
            self.aside(self.tables.look)
            self.sequencer.reach(reached)
            self._cut(reached)
        elif self.live.waiting:
            self._cut()
        elif self.frontiers.due and now - self.moved_at >= pace.FRONTIER_SECONDS:
            failpoints.reach("before_frontier")
            self._cut()
        self.stream.reply_requested = False

    def _cut(self, idle_lsn: LSN | None = None) -> None:
        """Close the batch with its records and start the commit."""
        config, sequencer = self.config, self.sequencer
        self._begin(due=True)
        publisher = self.lanes.current
        frontier = None
        now = time.monotonic()
        if not sequencer.events or now - self.frontier_at >= pace.FRONTIER_EVERY_SECONDS:
            frontier = self.frontiers.take(idle_lsn)
        if frontier:
            self.frontier_at = now
            publisher.add(*frontier_records.record(config, frontier))
        for record in (*self.tables.take(), *self.live.take()):
            publisher.add(*record)
        lsn, dead_letters = frontier.lsn if frontier else None, self.tables.dead.take()
        size, counts = self.batch.bytes, self.batch.close()
        direct = publisher is not self.lanes.large
        cut = Cut(sequencer.events, size, lsn, dead_letters, len(counts), direct)
        position = records.ResumePosition(
            end_lsn=sequencer.end_lsn,
            **sequencer.place._asdict(),
            seq=sequencer.seq,
            committed_at_us=sequencer.committed_at_us,
            schema_id=self.tables.schema_id,
            pending=self.frontiers.add(counts),
            xid=sequencer.place_xid,
            origin=config.source.origin,
            owner=self.owner,
            at_us=time.time_ns() // 1_000,
        )
        self.written = resume.forward(self.written, position)
        publisher.add(*resume.record(config, position))
        failpoints.reach("before_commit")
        sequencer.cut()
        self.cut_at = time.monotonic()
        self.lanes.commit(position, cut, self.batch_began_at if cut.events else self.cut_at)

    def _settle(self) -> None:
        """Poll for acknowledged batches and for commits that have ended; confirm the latter."""
        for batch in self.lanes.acknowledged():
            # Any later batch commits after this one, so its records may refer to this one's.
            self.frontiers.acknowledged(batch.position, batch.publisher.take_ends())
        for batch in self.lanes.committed():
            failpoints.reach("after_commit")
            self.position = batch.position
            failpoints.reach("before_confirm")
            # Only now: confirming before the commit would lose what a crash leaves uncommitted.
            self._confirm()
            failpoints.reach("after_confirm")
            self.moved_at = batch.moments.confirmed = time.monotonic()
            self.daemon.metrics.committed(batch.position, batch.cut, batch.moments)
            if trace.tracer:
                trace.tracer.committed(batch.position.seq, batch.cut, batch.moments)

    def _confirm(self) -> None:
        """Confirm to Postgres what the log holds, once both are proven to have the same history."""
        if self.replay.proven:
            self.stream.confirm(self.position.end_lsn)

    def _look_after(self) -> None:
        """Keep Postgres, health and metrics up to date; cheap enough for every iteration."""
        self.stream.tick()
        at = self.position
        wal_end = max(self.stream.received_lsn, self.stream.keepalive_lsn)
        self.daemon.health.progress(wal_end, at.end_lsn, at.seq, self.lanes.waiting_seconds)
        self.daemon.metrics.turn(
            wal_end=wal_end,
            received=self.stream.received_lsn,
            confirmed=self.stream.confirmed_lsn,
            feedback_at=self.stream.feedback_at,
            pending_events=self.sequencer.events,
            pending_bytes=self.batch.bytes,
        )

    def _wait(self, received: int) -> None:
        """Sleep until there is something to do."""
        self.worker.drain()
        if self.lanes.settling:
            return
        ahead = self._ahead()
        if self.intake.reading_back and not ahead:
            return
        if received >= pace.BACKLOG_BYTES and not ahead:
            time.sleep(pace.LAZY_SECONDS)
        elif not self.lanes.free:
            # Nothing can be sent before the batch is acknowledged, so no row wakes the loop.
            self.stream.wait(pace.TURN_SECONDS if ahead else pace.GATHER_SECONDS, for_frames=False)
        elif self.sequencer.events:
            self.stream.wait(pace.LAZY_SECONDS, for_frames=False)
        else:
            due = self.frontiers.due
            self.stream.wait(pace.FRONTIER_SECONDS if due else pace.TURN_SECONDS, for_frames=True)

    def _finish(self) -> None:
        """Commit and confirm what was read, and write the last frontier, in the grace period."""
        began_at = time.monotonic()
        self.intake.end()
        while time.monotonic() < began_at + pace.STOP_SECONDS:
            self._settle()
            sequencer, inside = self.sequencer, self._inside(began_at + pace.STOP_READING_SECONDS)
            if inside:
                self.intake.take()
            elif not self.lanes.in_flight:
                if sequencer.events or (self.position.open and not sequencer.place.open):
                    self._begin(due=True)
                    self._hand_over()
                    self._cut()
                elif self.frontiers.due:
                    self._cut()
                else:
                    break
            self._look_after()
            seconds = 0.0 if inside and self.intake.reading_back else pace.TURN_SECONDS
            self.stream.wait(seconds, for_frames=inside)
            self.worker.drain()
        else:
            log.warning("stopped with a commit in flight: the next start will tell its outcome")

    def _inside(self, deadline: float) -> bool:
        """Whether to read on to the transaction's end, for a frontier; a large one is split."""
        limits, sequencer = self.config.batch, self.sequencer
        fits = sequencer.events < limits.max_events and self.batch.bytes < limits.max_bytes
        unfinished = sequencer.in_transaction and sequencer.place.open
        return unfinished and fits and time.monotonic() < deadline

    # -- the worker --------------------------------------------------------------------------------

    def aside(self, call: Callable[[], T]) -> T:
        """Run a blocking call on the worker and return its result; meanwhile answer Postgres."""
        future = self.worker.submit(call)
        while not future.done():
            if self.streaming:
                self._look_after()
            else:
                self.stream.tick()
                self.daemon.health.beat()
            self.stream.wait(pace.TURN_SECONDS, for_frames=False)
            self.worker.drain()
            grace = pace.STOP_SECONDS if self.streaming else 0.0
            if self.daemon.stopping and time.monotonic() > self.daemon.stop_asked_at + grace:
                raise StoppedError
        return future.result()

    def close(self) -> None:
        """Release the slot and the producer; what it has not committed is replayed."""
        self._closing.close()
