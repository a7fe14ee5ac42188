"""The daemon: the loop that carries changes from the slot into the log. Read this first.

One iteration: receive frames, sequence and encode them, hand them to the producer, and when a batch
is due commit it with its resume record; when a commit has ended, confirm to Postgres. Everything
that may block runs on a worker, so that the loop always answers Postgres in time: while one Kafka
transaction commits, the next one is already being sent (`cdc.log.producer_pool`).

The order of the start is the guarantee (`cdc.daemon.takeover`). Any error ends the session; the
next one starts from the resume record, which is the only state.
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
from cdc.daemon import timing
from cdc.daemon.takeover import take_over
from cdc.errors import StoppedError
from cdc.log import cleanup, names, reader, records, resume, topics, trace
from cdc.log import frontiers as frontier_records
from cdc.log.batch import Batch, BatchContents
from cdc.log.frontiers import FrontierCounts
from cdc.operate.compaction import CompactionHold
from cdc.operate.health import HealthState
from cdc.operate.source_monitor import SourceMonitor
from cdc.sequence.intake import Intake
from cdc.sequence.relations import Relations
from cdc.sequence.replay import SessionReplay
from cdc.sequence.table_versions import TableVersions
from cdc.snapshot.incremental import topic as incremental_topic
from cdc.snapshot.incremental.fetcher import Fetcher
from cdc.snapshot.incremental.manager import IncrementalSnapshots
from cdc.snapshot.incremental.verifier import Verifier
from cdc.source import signing_keys
from cdc.source.chunks import ChunkReader
from cdc.source.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.config import Config
    from cdc.daemon.process_state import ProcessState
    from cdc.events import LSN

log = logging.getLogger("cdc.daemon.pipeline")
T = TypeVar("T")


class Pipeline:
    """One session: from taking the slot to the first error, or to the stop."""

    def __init__(self, config: Config, process: ProcessState) -> None:
        """Connect; call `start` and `run` next, and `close` in any case."""
        self.config = config
        self.process = process
        self.worker = process.worker
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self.batch = Batch(digests=True)
        self.schema_topic = names.schema_topic(config.prefix)
        self.streaming = False
        self.batch_ended_at = self.batch_began_at = self.moved_at = time.monotonic()
        self.frontier_at = 0.0
        self._closing = ExitStack()
        self.stream = Stream(
            config, self.worker.wake_fd, committed_only=process.reread, patience=process.patience
        )
        self._closing.callback(self.stream.close)

    # -- the start ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Take over slot and log, and prepare to stream from the resume record."""
        config, process = self.config, self.process
        taken = take_over(process, self.stream, self.run_blocking, self._closing)
        self.producers, self.topic_monitor = taken.producers, taken.topic_monitor
        self.sql, self.admin = taken.sql, taken.admin
        replay = SessionReplay(taken.position, taken.start_lsn, config.source.origin)
        self._prepare_stream(taken.identity, taken.position, replay)
        self.tables.adopt(self.run_blocking(lambda: self._clean_up(taken.proven)))
        if topics.compacts(config):
            tables = self.tables
            hold = CompactionHold(
                config, lambda: cleanup.compacted(tables.identity), process.metrics
            )
            process.metrics.monitors["compaction"] = hold
            self._closing.callback(process.metrics.monitors.pop, "compaction")
            self._closing.callback(hold.close)
        self.source_monitor = SourceMonitor(
            config,
            self.tables.identity.publication,
            process.health,
            process.metrics,
            self.completeness,
            process.followed,
        )
        self._closing.callback(self.source_monitor.close)

    def _clean_up(self, proven: records.ResumeIdentity) -> records.ResumeIdentity:
        """Give the topics the configured cleanup.policy; return the identity that states it."""
        identity, versions = self.topic_monitor.pin(proven), self.completeness.newest_versions()
        return cleanup.give(self.config, self.admin, identity, identity.partitions, versions)

    def _prepare_stream(
        self,
        identity: records.ResumeIdentity,
        position: records.ResumePosition,
        replay: SessionReplay,
    ) -> None:
        config, self.replay = self.config, replay
        pending = [(topic, number) for topic, number, _ in position.pending]
        ends = self.run_blocking(lambda: reader.written_ends(config, pending))
        schema_topic = self.run_blocking(lambda: reader.read_schema_topic(config))
        schemas, numbers = schema_topic.versions(), schema_topic.column_numbers()
        self.position = self.written = position  # committed, and handed to a producer
        relations = Relations(config.prefix, schemas, position.schema_id, numbers)
        logged = self.run_blocking(lambda: incremental_topic.load(config, self.admin))
        self.completeness = incremental_topic.completeness(schemas, logged)
        self.tables = TableVersions(
            config, self.sql, self.admin, self.batch, relations, identity, self.completeness
        )
        self.run_blocking(self.tables.limit_messages)
        self.frontiers = FrontierCounts(config.pipeline, identity.epoch, position, ends)
        self.frontiers.state_found(schema_topic)
        self.intake = Intake(
            config, self.stream, self.tables, identity, position, self._full, self.run_blocking,
            replay,
        )  # fmt: skip
        self._closing.callback(self.intake.close)
        self.sequencer = self.intake.sequencer
        verifier = Verifier(
            config,
            identity.system_identifier,
            self.process.metrics.refusals,
            lambda: self.run_blocking(lambda: signing_keys.read(self.sql)),
        )
        self.incremental = IncrementalSnapshots(
            config,
            Fetcher(self.process.snapshots, lambda: ChunkReader(config)),
            self.sequencer,
            verifier,
            self.process.given_snapshots,
            on_columns=self.intake.describe_changed,
        )
        self._closing.callback(self.incremental.close)
        self.process.metrics.incremental_snapshots = self.incremental.progress
        self.process.metrics.all_incremental_snapshots = self.incremental.known
        self.incremental.adopt(logged, self.completeness)
        self._confirm()
        self.streaming = True
        self.process.to(
            HealthState.STREAMING, f"streaming from {position.end_lsn}, seq {position.seq}"
        )

    @property
    def proven(self) -> bool:
        """Whether log and Postgres were found to have the same history."""
        return self.streaming and self.replay.proven

    # -- the loop ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Carry changes until asked to stop; then finish what was read and return."""
        while not self.process.stopping:
            received = self._receive()
            self.poll_commits()
            self._publish(idle=received < timing.BACKLOG_BYTES)
            self._tick()
            self.incremental.tick(self.position.end_lsn)
            self.source_monitor.poll(self.tables.identity.publication, self.tables.pin_publication)
            self.topic_monitor.poll(self.tables.identity, self.frontiers)
            self._wait(received)
        self._finish()

    def _receive(self) -> int:
        """Sequence what is next; return how many bytes it was."""
        if self._reading_must_wait():
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

    def _full(self) -> None:
        """Publish a batch of full size, although more has arrived."""
        self.poll_commits()
        self._publish(idle=False)

    def _reading_must_wait(self) -> bool:
        """Whether so much is waiting after the batch being sent that reading must wait too."""
        # A thin batch's cost depends on its partitions, so more of it is gathered.
        share = 1 if self.batch.thin else timing.AHEAD
        return not self.producers.free and self._full_at(share)

    def _publish(self, *, idle: bool) -> None:
        """Hand what waits to the producer, and commit when the batch is due."""
        if not self.producers.free:
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
                self.commit_batch()
        elif idle and not sequencer.in_transaction and not self.producers.in_flight:
            self._when_idle()

    def _begin(self, *, due: bool) -> None:
        """Begin a Kafka transaction; a batch that is due grows no further."""
        self.producers.begin(self.batch if due and not self.batch.letters else None)

    def _hand_over(self) -> None:
        """Hand the batch's messages to the producer; return when it has all of them."""
        batch = self.batch
        self.producers.current.produce(batch)
        if not batch.letters:
            return
        publisher = self.producers.large
        # A letter may take minutes: the loop answers Postgres meanwhile.
        began_at = time.monotonic()
        try:
            self.run_blocking(lambda: publisher.send_letters(batch))
        finally:
            self.process.transaction_took(time.monotonic() - began_at)

    def _due(self, *, idle: bool) -> bool:
        """Whether the batch should end here."""
        sequencer, batch, limits = self.sequencer, self.batch, self.config.batch
        full = self._full_at(1)
        age_seconds = time.monotonic() - self.batch_began_at
        aged = age_seconds * 1_000 >= limits.max_wait_ms
        lingered = age_seconds * 1_000 >= limits.linger_ms
        # A transaction larger than a batch, or slower to arrive than Kafka keeps one open, is
        # split; any other is read to its end, so that the batch ends on a boundary, with a
        # frontier.
        over = (
            sequencer.events >= 2 * limits.max_events
            or batch.bytes >= 2 * limits.max_bytes
            or age_seconds >= timing.OPEN_SECONDS
        )
        return over or (not sequencer.last_change.open and ((idle and lingered) or full or aged))

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

    def _when_idle(self) -> None:
        """With nothing in flight: write a frontier that is due, and advance an idle slot."""
        if not self.replay.proven and self.stream.keepalive_lsn >= self.replay.end_lsn:
            # Only here is everything sequenced that was sent before that keepalive.
            self.replay.reached()
            self._confirm()
        if self.position.open:
            # Only its own end closes a transaction that was split: a keepalive inside it does not.
            if not self.sequencer.last_change.open:
                self.commit_batch()
            return
        now = time.monotonic()
        # Everything up to the keepalive's WAL end was sent, and none of it is waiting here.
        reached = max(self.stream.keepalive_lsn, self.sequencer.end_lsn)
        idle = reached > self.position.end_lsn and (
            self.stream.reply_requested or now - self.batch_ended_at >= timing.IDLE_SECONDS
        )
        if idle:
            # What a changed publication leaves out is in no frame: check it before the log claims
            # to hold everything up to there.
            self.run_blocking(self.tables.check_publication)
            self.sequencer.reach(reached)
            self.commit_batch(reached)
        elif self.incremental.waiting:
            self.commit_batch()
        elif self.frontiers.due and now - self.moved_at >= timing.FRONTIER_SECONDS:
            failpoints.reach("before_frontier")
            self.commit_batch()
        self.stream.reply_requested = False

    def commit_batch(self, idle_lsn: LSN | None = None) -> None:
        """Close the batch with its records and start the commit."""
        config, sequencer = self.config, self.sequencer
        self._begin(due=True)
        publisher = self.producers.current
        frontier = None
        now = time.monotonic()
        if not sequencer.events or now - self.frontier_at >= timing.FRONTIER_EVERY_SECONDS:
            frontier = self.frontiers.take(idle_lsn)
        if frontier:
            self.frontier_at = now
            publisher.add(*frontier_records.record(config, frontier))
        for topic, key, value in (*self.tables.take(), *self.incremental.take()):
            publisher.add(topic, key, value)
            if topic == self.schema_topic:
                self.frontiers.state(key, value)
        lsn, dead_letters = frontier.lsn if frontier else None, self.tables.dead.take()
        size, chunks, counts = self.batch.bytes, self.batch.digests(), self.batch.close()
        direct = publisher is not self.producers.large
        contents = BatchContents(sequencer.events, size, lsn, dead_letters, len(counts), direct)
        position = records.ResumePosition(
            end_lsn=sequencer.end_lsn,
            **sequencer.last_change._asdict(),
            seq=sequencer.seq,
            committed_at_us=sequencer.committed_at_us,
            schema_id=self.tables.schema_id,
            **self.frontiers.add(counts, chunks, sequencer.seq)._asdict(),
            origin=config.source.origin,
            owner=self.owner,
            at_us=time.time_ns() // 1_000,
        )
        self.written = resume.forward(self.written, position)
        publisher.add(*resume.record(config, position))
        failpoints.reach("before_commit")
        sequencer.start_batch()
        self.batch_ended_at = time.monotonic()
        self.producers.commit(
            position, contents, self.batch_began_at if contents.events else self.batch_ended_at
        )

    def poll_commits(self) -> None:
        """Poll for acknowledged batches and for commits that have ended; confirm the latter."""
        for batch in self.producers.acknowledged():
            # Any later batch commits after this one, so its records may refer to this one's.
            self.frontiers.acknowledged(batch.position, batch.publisher.take_ends())
        for batch in self.producers.committed():
            failpoints.reach("after_commit")
            self.position = batch.position
            failpoints.reach("before_confirm")
            # Only now: confirming before the commit would lose what a crash leaves uncommitted.
            self._confirm()
            failpoints.reach("after_confirm")
            self.moved_at = batch.moments.confirmed = time.monotonic()
            self.process.metrics.committed(batch.position, batch.contents, batch.moments)
            if trace.tracer:
                trace.tracer.committed(batch.position.seq, batch.contents, batch.moments)

    def _confirm(self) -> None:
        """Confirm to Postgres what the log holds, once both are proven to have the same history."""
        if self.replay.proven:
            self.stream.confirm(self.position.end_lsn)

    def _tick(self) -> None:
        """Keep Postgres, health and metrics up to date; cheap enough for every iteration."""
        self.stream.tick()
        at = self.position
        wal_end = max(self.stream.received_lsn, self.stream.keepalive_lsn)
        self.process.health.progress(wal_end, at.end_lsn, at.seq, self.producers.waiting_seconds)
        self.process.metrics.note_stream(
            wal_end=wal_end,
            received=self.stream.received_lsn,
            confirmed=self.stream.confirmed_lsn,
            feedback_at=self.stream.feedback_at,
            pending_events=self.sequencer.events,
            pending_bytes=self.batch.bytes,
        )
        self.process.metrics.unknown_type_columns = self.tables.unknown_type_columns

    def _wait(self, received: int) -> None:
        """Sleep until there is something to do."""
        self.worker.drain()
        if self.producers.has_results:
            return
        must_wait = self._reading_must_wait()
        if self.intake.reading_back and not must_wait:
            return
        if received >= timing.BACKLOG_BYTES and not must_wait:
            time.sleep(timing.LAZY_SECONDS)
        elif not self.producers.free:
            # Nothing can be sent before the batch is acknowledged, so no row wakes the loop.
            self.stream.wait(
                timing.TURN_SECONDS if must_wait else timing.GATHER_SECONDS, for_frames=False
            )
        elif self.sequencer.events:
            lingers = self.config.batch.linger_ms and not self.sequencer.last_change.open
            seconds = timing.GATHER_SECONDS if lingers else timing.LAZY_SECONDS
            self.stream.wait(seconds, for_frames=False)
        else:
            due = self.frontiers.due
            self.stream.wait(
                timing.FRONTIER_SECONDS if due else timing.TURN_SECONDS, for_frames=True
            )

    def _finish(self) -> None:
        """Commit and confirm what was read, and write the last frontier, in the grace period."""
        began_at = time.monotonic()
        self.intake.end()
        sequencer = self.sequencer
        while time.monotonic() < began_at + timing.STOP_SECONDS:
            self.poll_commits()
            finishing = self._finishing_transaction(began_at + timing.STOP_READING_SECONDS)
            if finishing:
                self.intake.take()
            elif not self.producers.in_flight:
                if sequencer.events or (self.position.open and not sequencer.last_change.open):
                    self._begin(due=True)
                    self._hand_over()
                    self.commit_batch()
                elif self.frontiers.due:
                    self.commit_batch()
                else:
                    break
            self._tick()
            seconds = 0.0 if finishing and self.intake.reading_back else timing.TURN_SECONDS
            self.stream.wait(seconds, for_frames=finishing)
            self.worker.drain()
        else:
            log.warning("stopped with a commit in flight: the next start finds its outcome")

    def _finishing_transaction(self, deadline: float) -> bool:
        """Whether to read on to the transaction's end, for a frontier; a large one is split."""
        limits, sequencer = self.config.batch, self.sequencer
        fits = sequencer.events < limits.max_events and self.batch.bytes < limits.max_bytes
        unfinished = sequencer.in_transaction and sequencer.last_change.open
        return unfinished and fits and time.monotonic() < deadline

    # -- the worker --------------------------------------------------------------------------------

    def run_blocking(self, call: Callable[[], T]) -> T:
        """Run a blocking call on the worker and return its result; meanwhile answer Postgres."""
        future = self.worker.submit(call)
        while not future.done():
            if self.streaming:
                self._tick()
            else:
                self.stream.tick()
                self.process.health.beat()
            self.stream.wait(timing.TURN_SECONDS, for_frames=False)
            self.worker.drain()
            grace = timing.STOP_SECONDS if self.streaming else 0.0
            if self.process.stopping and time.monotonic() > self.process.stop_asked_at + grace:
                raise StoppedError
        return future.result()

    def close(self) -> None:
        """Release the slot and the producer; what it has not committed is replayed."""
        self._closing.close()
