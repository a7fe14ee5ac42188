"""What must be true of the log at every moment, whatever went wrong.

At each commit that a reader can see: the events are the stream up to some point, dense in seq, and
the resume record committed with them names that point. At each confirmation: its LSN is in a
committed resume record. At each frontier record: exactly the counted events are below its offsets,
and it is between two source transactions. In the end: exactly the records that a daemon without any
fault would have written, in the same partitions, in the same order.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.events import LSN
from cdc.log import names, records
from tests.property.histories import KEYS, History
from tests.property.stream import Session, position
from tests.simulation.walsender import RelationsById, complete

if TYPE_CHECKING:
    from tests.simulation.broker import Broker, Place, Transaction
    from tests.simulation.slot import Slot

_SEQ: Final = re.compile(rb'"seq":(\d+)\}')

Records = dict["Place", list[tuple[bytes | None, bytes | None]]]


class Expected(NamedTuple):
    """The log of a daemon without any fault."""

    records: Records
    seqs: tuple[int, ...]  # after each source transaction


@lru_cache(maxsize=64)
def expected(history: History) -> Expected:
    session = Session(position(), KEYS)
    found: Records = defaultdict(list)
    seqs = []
    relations: RelationsById = {}
    for transaction in history:
        session.feed(list(complete(transaction, relations)))
        seqs.append(session.sequencer.seq)
    for record in session.waiting():
        found[record.topic, record.partition].append((record.key, record.value))
    return Expected(dict(found), tuple(seqs))


def seq_of(value: bytes) -> int:
    found = _SEQ.search(value)
    assert found is not None, "an event has a seq"
    return int(found[1])


@dataclass
class Oracle:
    """Watches one broker and one slot."""

    history: History
    broker: Broker
    slot: Slot
    prefix: str
    seq: int = 0
    due: bool = False  # whether the initial snapshot must be handed over first
    resume: records.ResumePosition | None = None
    frontier: records.FrontierRecord | None = None
    ends: dict[Place, int] = field(default_factory=dict)  # of the newest frontier

    def __post_init__(self) -> None:
        self.broker.watch = self.committed
        self.slot.watch = self.confirmed
        self._own = f"{self.prefix}.cdc."

    def _is_data(self, topic: str) -> bool:
        return not topic.startswith(self._own) or topic == names.messages_topic(self.prefix)

    def confirmed(self, lsn: LSN) -> None:
        """Check a confirmation before Postgres acts on it."""
        held = self.resume.end_lsn if self.resume else LSN(0x100)
        assert lsn <= held, f"confirmed {lsn}, though the log only holds {held}"

    def committed(self, transaction: Transaction) -> None:
        """Check what a reader sees once this is committed."""
        seqs = sorted(
            seq_of(record.value)
            for (topic, _), written in transaction.written.items()
            if self._is_data(topic)
            for record in written
            if record.value is not None
        )
        assert seqs == list(range(self.seq + 1, self.seq + len(seqs) + 1)), (
            f"after seq {self.seq} seqs {seqs} become visible"
        )
        self.seq += len(seqs)
        topic = names.snapshot_topic(self.prefix)
        for record in transaction.written.get((topic, 0), []):
            if record.value and b'"stage":' in record.value:
                self.due = b'"stage":"done"' not in record.value
        assert not (seqs and self.due), "changes are visible, and the initial snapshot is not"
        topic = names.resume_topic(self.prefix)
        (*_, newest) = transaction.written[topic, 0]
        self._resumes(records.decode(records.ResumePosition, newest.value or b"", topic))
        topic = names.frontier_topic(self.prefix)
        for record in transaction.written.get((topic, 0), []):
            self._frontier(records.decode(records.FrontierRecord, record.value or b"", topic))

    def _resumes(self, position: records.ResumePosition) -> None:
        assert position.seq == self.seq, f"resume says {position.seq}, seq {self.seq} is visible"
        assert self.resume is None or position.end_lsn >= self.resume.end_lsn
        assert self.resume is None or position.seq >= self.resume.seq
        self.resume = position

    def _frontier(self, frontier: records.FrontierRecord) -> None:
        before = self.frontier.seq if self.frontier else 0
        counted = 0
        for topic, number, end, events in frontier.partitions:
            place = (topic, number)
            low = self.ends.get(place, 0)
            state = sum(
                low <= record.offset < end and record.value is not None
                for record in self.broker.committed.get(place, [])
            )
            assert state == events, f"{events} events counted of {place}, {state} are there"
            self.ends[place] = end
            counted += events
        assert counted == frontier.seq - before
        assert self._between_transactions(frontier), "a frontier within a source transaction"
        self.frontier = frontier

    def _between_transactions(self, frontier: records.FrontierRecord) -> bool:
        """Return whether everything up to its LSN is counted, and nothing after it."""
        seqs = expected(self.history).seqs
        complete = [
            index for index, each in enumerate(self.history) if each.end_lsn <= frontier.lsn
        ]
        return frontier.seq == (seqs[complete[-1]] if complete else 0)

    def finish(self, *, offsets_reported: bool, proven: bool) -> None:
        """Check the final state; a frontier waits until every offset is reported.

        A session that is stopped before the replay is `proven` confirms nothing.
        """
        want = expected(self.history)
        found: Records = {
            place: [(record.key, record.value) for record in written]
            for place, written in self.broker.committed.items()
            if self._is_data(place[0])
        }
        assert found == want.records
        assert self.resume is not None
        assert self.resume.seq == (want.seqs[-1] if want.seqs else 0)
        assert not self.resume.open
        if offsets_reported:
            assert self.resume.pending == (), "events without a frontier at the end"
            assert (self.frontier.seq if self.frontier else 0) == self.resume.seq
        assert self.slot.confirmed == self.resume.end_lsn or not proven
