"""One schedule: a history, a daemon that dies and restarts, and what the log must hold.

`World` is the only place that knows how the product's modules fit together: it puts the simulated
edges where the real ones are imported, and runs the `Pipeline` as `cdc.daemon.process` does.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final, cast

from cdc.config import Config
from cdc.daemon.pipeline import Pipeline
from cdc.daemon.process import Daemon
from cdc.errors import CDCError, Policy, RereadError, StoppedError
from cdc.events import LSN
from cdc.log import names, records
from cdc.log.publisher import PRODUCERS
from cdc.log.topics import internal_topics
from cdc.snapshot.initial import due, handover
from cdc.snapshot.initial import topic as snapshot_topic
from cdc.snapshot.initial.records import SnapshotPlan, SnapshotState
from cdc.source.timelines import System
from tests.property.histories import TABLES, History
from tests.property.stream import EPOCH, PARTITIONS
from tests.simulation.broker import Broker
from tests.simulation.lookups import Lookups
from tests.simulation.scheduler import Clock, Crash, Future, Scheduler, Worker
from tests.simulation.slot import Slot

# A schedule that has not reached its end by then never will.
_SESSIONS: Final = 60
_TURNS: Final = 20_000
_SYSTEM: Final = System("7", 1)
# Long enough for everything that waits for a time: an idle slot advances every ten seconds.
_TURN_SECONDS: Final = 0.4


class StuckError(AssertionError):
    """The daemon does not reach its end state, though there are no more faults."""


class Nothing:
    """Takes every call and returns nothing: for objects that are only notified."""

    def __getattr__(self, _name: str) -> Any:  # noqa: ANN401 - stands for any method
        return _ignore

    def keep(self) -> None:
        """Stand in for a method that closes what is used again."""


def _ignore(*_: object, **__: object) -> None:
    return None


class World:
    """The complete state of one seed's schedule."""

    current: World

    def __init__(self, config: Config, history: History, seed: int, budget: int = 12) -> None:
        self.config = config
        self.scheduler = Scheduler(seed, budget)
        self.streams = self.scheduler.chance.random() < 0.5
        self.broker = Broker()
        self.lookups = Lookups(self.broker, self.scheduler, self._topics())
        self.slot = Slot(history, self.scheduler)
        self.pipeline: Pipeline | None = None
        self.worker = Worker(self.scheduler)
        self.producer_workers = [Worker(self.scheduler) for _ in range(PRODUCERS)]
        self.snapshots = Worker(self.scheduler)
        self.daemon: Any = SimpleNamespace(
            config=config, worker=self.worker, snapshots=self.snapshots,
            producer_workers=self.producer_workers,
            stopping=False, reread=False, patience=1, followed=lambda: False,
            stop_asked_at=0.0, to=lambda *_: None, metrics=Nothing(), health=Nothing(),
            transaction_seconds=60, given_snapshots={}, transaction_took=lambda _: None,
        )  # fmt: skip
        self.sessions = self.turns = 0
        self.clock = Clock(self.scheduler)
        self._write_first()

    def _topics(self) -> frozenset[str]:
        own = (each.name for each in internal_topics(self.config))
        data = (names.data_topic(self.config.prefix, t.namespace, t.name) for t in TABLES)
        return frozenset((*own, *data))

    def _write_first(self) -> None:
        """Do what `cdc setup` does to the log; in half of the schedules a snapshot is due."""
        self.due = self.scheduler.chance.random() < 0.5
        publication = records.PinnedPublication(name="p", oid=1, tables={})
        topics = [
            names.data_topic(self.config.prefix, table.namespace, table.name) for table in TABLES
        ]
        identity = records.ResumeIdentity(
            pipeline=self.config.pipeline, epoch=EPOCH, system_identifier="7", timeline=1,
            database="shop_db", slot=self.config.slot, publication=publication,
            partitions=dict.fromkeys(topics, PARTITIONS),
            snapshot=self.scheduler.chance.choice(("", "due")) if self.due else "none",
        )  # fmt: skip
        position = records.ResumePosition(
            end_lsn=LSN(0x100), commit_lsn=LSN(0), ordinal=0, open=False, seq=0,
            committed_at_us=0, schema_id=0, owner="setup", at_us=0,
        )  # fmt: skip
        topic = names.resume_topic(self.config.prefix)
        for kind, part in (("identity", identity), ("position", position)):
            key = records.resume_key(self.config.pipeline, kind)
            self.broker.append("setup", (topic, 0), key, records.encode(part))
        if self.due:
            for topic, key, value in self._unfinished():
                self.broker.append("setup", (topic, 0), key, value)
        self.broker.commit("setup")

    def _unfinished(self) -> list[snapshot_topic.Record]:
        """Return the records of a snapshot without rows that lacks only its hand-over."""
        self.plan = SnapshotPlan(
            pipeline=self.config.pipeline, generation=1, token="token", epoch=EPOCH,
            database="shop_db", publication=records.PinnedPublication(name="p", oid=1, tables={}),
            snapshot="s", lsn=LSN(0x100), taken_at_us=0, tasks=1, first_seq=1, next_seq=1,
        )  # fmt: skip
        state = SnapshotState(
            pipeline=self.config.pipeline, stage="running", generation=1, token="token"
        )
        written = snapshot_topic.plan_records(self.config, self.plan)
        return [*written, snapshot_topic.state_record(self.config, state)]

    def _take(self) -> None:
        """Do what `initial.session.take` does if a snapshot lacks only its hand-over."""
        state = due.state(self.config)
        if state is not None and state.stage != "done":
            handover.write(self.config, self.plan, "token")

    # -- what the product reads from the log -------------------------------------------------------

    def read(self, topic: str) -> dict[bytes, bytes]:
        """Return the newest value of each key, as a read_committed reader sees them."""
        found = self.broker.committed.get((topic, 0), [])
        return {record.key or b"": record.value or b"" for record in found}

    def resume(self) -> tuple[records.ResumeIdentity, records.ResumePosition]:
        topic, pipeline = names.resume_topic(self.config.prefix), self.config.pipeline
        newest = self.read(topic)
        return (
            records.decode(
                records.ResumeIdentity, newest[records.resume_key(pipeline, "identity")], topic
            ),
            records.decode(
                records.ResumePosition, newest[records.resume_key(pipeline, "position")], topic
            ),
        )

    def schemas(self) -> list[records.SchemaRecord]:
        topic = names.schema_topic(self.config.prefix)
        found = [records.decode(records.SchemaRecord, v, topic) for v in self.read(topic).values()]
        return sorted(found, key=lambda record: record.schema_id)

    def proven(
        self, identity: records.ResumeIdentity, position: records.ResumePosition
    ) -> records.ResumeIdentity:
        assert self.slot.confirmed <= position.end_lsn, "the slot is ahead of the log"
        return identity

    # -- running -----------------------------------------------------------------------------------

    def turn(self, seconds: float) -> None:
        """Advance time while the loop waits: the source commits, threads run, the process dies."""
        scheduler = self.scheduler
        self.turns += 1
        if self.turns > _TURNS:
            raise StuckError(f"after {_TURNS} turns the log is at {self.resume()[1]}")
        if scheduler.happens("crash while waiting"):
            raise Crash
        scheduler.now += min(seconds, _TURN_SECONDS)
        if self.broker.late and scheduler.happens("late request comes"):
            self.broker.commit(self.broker.late)
        if scheduler.happens("source commits"):
            self.slot.goes_on()
        for worker in scheduler.chance.sample([self.worker, *self.producer_workers], 1 + PRODUCERS):
            if not worker.idle and scheduler.happens("worker runs"):
                worker.run_one()
        if self._at_rest() and not self.daemon.stopping:
            self.daemon.stopping = True
            self.daemon.stop_asked_at = self.clock.monotonic()

    def _at_rest(self) -> bool:
        history, slot, pipeline = self.slot.history, self.slot, self.pipeline
        if slot.committed < len(history) or pipeline is None or not pipeline.streaming:
            return False
        resting = not pipeline.producers.in_flight and not pipeline.frontiers.due
        return resting and slot.confirmed >= history[-1].end_lsn

    def run(self) -> None:
        """Run sessions until the log holds the full history and the daemon has stopped."""
        World.current = self
        while not self.daemon.stopping:
            self.sessions += 1
            if self.sessions > _SESSIONS:
                raise StuckError(f"after {_SESSIONS} sessions the log is at {self.resume()[1]}")
            self._session()

    def _session(self) -> None:
        try:
            self._take()
        except CDCError as error:
            if error.policy is Policy.HALT:
                raise
            return
        self.pipeline = pipeline = Pipeline(self.config, cast("Daemon", self.daemon))
        try:
            pipeline.start()
            pipeline.run()
        except StoppedError:
            pass  # asked to stop while it reread what the log already holds
        except Crash:
            self.daemon.stopping = False
            self._leave_open(pipeline)
            for worker in (self.worker, *self.producer_workers):
                worker.restart()  # a session that only fails leaves its threads running
            return  # the process dies: what was open stays open
        except CDCError as error:
            if error.policy is Policy.HALT:
                raise
            self.daemon.stopping = False
            self.daemon.reread = isinstance(error, RereadError)
        pipeline.close()

    def _leave_open(self, pipeline: Pipeline) -> None:
        """Let the commit request, which may be the last thing sent, arrive later or never."""
        if not pipeline.streaming or not pipeline.producers.in_flight:
            return
        batch = pipeline.producers.in_flight[0]
        flushed, ended = cast("Future", batch.flushed), cast("Future", batch.ended)
        if flushed.over and not ended.over and self.scheduler.happens("commit is late"):
            self.broker.late = cast("Any", batch.publisher).producer.writer
