"""One run of the model: a seed, a number of steps, a pipeline, and the check of everything."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Final

from cdc.events import LSN
from cdc.log import topics
from cdc.log.offsets import OffsetsQuestion
from cdc.verify.frontiers import Findings, PartitionSeqs, TransactionEnds, check_cuts
from tests.fixtures.daemon import PipelineUnderTest, wait_until
from tests.fixtures.witness import records_of
from tests.stateful import account, folding
from tests.stateful.source import Source

# On average, one step in this many is about the daemon, and one in this many takes a snapshot.
_DAEMON_STEPS: Final = 40
_SNAPSHOT_STEPS: Final = 25
_CATCH_UP_SECONDS: Final = 240.0


class Run:
    """Runs `steps` operations while the daemon is started and ended; then `check`."""

    def __init__(self, pipeline: PipelineUnderTest, seed: int) -> None:
        self._pipeline = pipeline
        self._chance = Random(seed)
        self._slot = f"account_{pipeline.database.name}"
        self._source = Source(pipeline.database.dsn, self._chance)
        self._snapshots: list[folding.Snapshot] = []
        self.done: Counter[str] = Counter()

    def close(self) -> None:
        """Close the connections to the database."""
        self._source.close()

    def begin(self) -> None:
        """Set the pipeline up; Postgres' own account starts at the same point."""
        self._pipeline.set_up()
        self._pipeline.query(
            "SELECT pg_create_logical_replication_slot(%s, 'test_decoding')::text", self._slot
        )
        self._pipeline.start()

    def write(self, steps: int) -> None:
        for _ in range(steps):
            self._source.step()
            if self._chance.random() < 1 / _DAEMON_STEPS:
                self._meddle()
            if self._chance.random() < 1 / _SNAPSHOT_STEPS:
                self._snapshot()
        self.done.update(self._source.done)
        self._source.rest()
        # Then a published commit is the newest WAL: nothing must wait for an idle slot.
        self._pipeline.database.execute("INSERT INTO app.marker VALUES (1, 1, 1)")
        self._look()

    def _snapshot(self) -> None:
        self._source.rest()
        self._look()

    def _look(self) -> None:
        with self._pipeline.database.connect() as connection:
            self._snapshots.append(folding.snapshot(connection))

    def _meddle(self) -> None:
        """Start the daemon, or end it in one of two ways."""
        daemon = self._pipeline.daemon
        code = daemon.process.poll()
        if code is not None:
            self._pipeline.start()
            self.done["daemon started"] += 1
        elif self._chance.random() < 0.7:
            daemon.kill()
            self.done["daemon killed"] += 1
        elif daemon.state == "streaming":
            assert daemon.term() == 0
            self.done["daemon stopped"] += 1

    def check(self) -> int:
        """Compare the log with everything; return the number of events."""
        pipeline = self._pipeline
        if pipeline.daemon.process.poll() is not None:
            pipeline.start()
        end = self._snapshots[-1].lsn
        wait_until(lambda: self._reached(end), f"the log does not reach {end}", _CATCH_UP_SECONDS)
        wait_until(self._quiesced, "a transaction stays open", _CATCH_UP_SECONDS)
        found = account.events(pipeline)
        wanted, changes = account.reported(pipeline, self._slot), account.logged(found)
        assert not account.differences(wanted, changes)
        # The check itself: one change fewer, and two exchanged, do not pass.
        half = len(changes) // 2
        assert account.differences(wanted, changes[:half] + changes[half + 1 :])
        assert account.differences(wanted, [changes[-1], *changes[1:-1], changes[0]])
        self._fold(found)
        self._frontiers(found)
        return len(found)

    def _reached(self, end: LSN) -> bool:
        code = self._pipeline.daemon.process.poll()
        assert code is None, f"the daemon ended by itself with {code}"
        position = self._pipeline.resume()[1]
        return position.end_lsn >= end and not position.pending

    def _quiesced(self) -> bool:
        """Whether everything committed is visible: partitions become visible at different times."""
        config = self._pipeline.config
        admin = topics.admin(config)
        existing = topics.existing(admin, config.prefix)
        spans = OffsetsQuestion(admin, existing).answer().spans
        reported = len(spans) == sum(existing.values())
        return reported and all(span.stable == span.end for span in spans.values())

    def _fold(self, found: list[dict[str, object]]) -> None:
        """Compare the rows that the events produce with every snapshot, each at its LSN."""
        folded, at = folding.Folded(self._pipeline), 0
        for snapshot in self._snapshots:
            while at < len(found) and _commit_lsn(found[at]) < snapshot.lsn:
                folded.take(found[at])
                at += 1
            differences = folded.differences(snapshot)
            assert not differences, differences
        assert all(map(account.alters, found[at:])), "events from after the last snapshot"

    def _frontiers(self, found: list[dict[str, object]]) -> None:
        """Count the records between any two frontiers."""
        pipeline = self._pipeline
        partitions: dict[tuple[str, int], PartitionSeqs] = {}
        seqs = {_place(event): _seq(event) for event in found}
        own = f"{pipeline.config.prefix}.cdc."
        for record in records_of(
            pipeline, lambda topic: pipeline.is_data(topic) or topic == f"{own}messages"
        ):
            if record.value is not None:
                place = (record.topic, record.partition)
                seq = record.event["source"]["seq"]
                partitions.setdefault(place, PartitionSeqs()).add(record.offset, seq)
        ends = TransactionEnds()
        for event, later in zip(found, [*found[1:], None], strict=True):
            if later is None or _place(later)[0] != _place(event)[0]:
                ends.add(_seq(event), 1, _commit_lsn(event))
        assert seqs
        findings = Findings()
        frontiers = [each.frontier() for each in pipeline.frontiers()]
        check_cuts(findings, frontiers, partitions, ends, newest=len(found))
        assert not findings.sentences(), findings.sentences()


def _commit_lsn(event: dict[str, object]) -> LSN:
    source = event["source"]
    assert isinstance(source, dict)
    return LSN.parse(source["commit_lsn"])


def _seq(event: dict[str, object]) -> int:
    source = event["source"]
    assert isinstance(source, dict)
    return int(source["seq"])


def _place(event: dict[str, object]) -> tuple[LSN, int]:
    return _commit_lsn(event), _seq(event)
