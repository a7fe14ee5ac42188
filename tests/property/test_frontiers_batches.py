"""Frontier records over random batches, failed commits and crashes match the log exactly.

The log is a model: per partition its records' offsets, with the gaps that transaction markers take.
A Kafka transaction commits completely or not at all; only the log survives a crash.
"""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from cdc.events import LSN
from cdc.log.frontiers import FrontierCounts
from cdc.log.partitions import Partition
from cdc.log.records import FrontierRecord, ResumePosition
from tests.property.stream import position

PLACES: list[Partition] = [("p.a.t", 0), ("p.a.t", 1), ("p.a.u", 0)]


class Log:
    """The broker's state: what committed, and where each partition ends."""

    def __init__(self) -> None:
        self.resume: ResumePosition = position()
        self.ends = dict.fromkeys(PLACES, 0)
        self.events = dict.fromkeys(PLACES, 0)
        self.frontiers: list[FrontierRecord] = []
        self.complete: list[tuple[LSN, dict[Partition, int]]] = [
            (self.resume.end_lsn, dict(self.events))
        ]

    def commit(
        self, resume: ResumePosition, events: dict[Partition, int], frontier: FrontierRecord | None
    ) -> dict[Partition, int]:
        """Apply a complete Kafka transaction; return the ends of its partitions."""
        self.resume = resume
        ends = {}
        for place, count in events.items():
            self.ends[place] += count
            self.events[place] += count
            ends[place] = self.ends[place]
            self.ends[place] += 1  # the transaction's marker
        if frontier:
            self.frontiers.append(frontier)
        if not resume.open:
            self.complete.append((resume.end_lsn, dict(self.events)))
        return ends


def check(log: Log) -> None:
    """Each frontier has the number of events since the previous one, and the end offsets."""
    seen, at = dict.fromkeys(PLACES, 0), dict.fromkeys(PLACES, 0)
    for frontier in log.frontiers:
        for topic, number, end, events in frontier.partitions:
            place = (topic, number)
            assert end > at[place]
            at[place] = end
            seen[place] += events
        # Exactly the events of a moment at which no source transaction was cut.
        assert any(lsn <= frontier.lsn and counts == seen for lsn, counts in log.complete)
    pending = {(topic, number): events for topic, number, events in log.resume.pending}
    assert log.events == {place: seen[place] + pending.get(place, 0) for place in PLACES}


@given(st.integers(0, 2**32 - 1), st.integers(1, 25))
def test_frontiers_count_every_event_once_and_lie_on_boundaries(seed: int, steps: int) -> None:
    chance, log = Random(seed), Log()
    frontiers = FrontierCounts("p", 1, log.resume, {})
    seq, lsn, schema = 0, int(log.resume.end_lsn), log.resume
    for _ in range(steps):
        if chance.random() < 0.2:  # a crash, in or between transactions
            pending = [(topic, number) for topic, number, _ in log.resume.pending]
            ends = {place: log.ends[place] for place in pending}
            frontiers = FrontierCounts("p", 1, log.resume, ends)
            seq = log.resume.seq
        events = (
            {place: chance.randint(1, 5) for place in PLACES if chance.random() < 0.5}
            if chance.random() < 0.8
            else {}
        )
        lsn += chance.randint(1, 9)
        was_open = log.resume.open
        idle = not events and not was_open and chance.random() < 0.5
        frontier = frontiers.take(LSN(lsn) if idle else None)
        assert frontier is None or not was_open
        is_open = bool(events) and chance.random() < 0.3
        seq += sum(events.values())
        schema = position(
            end_lsn=schema.end_lsn if is_open else lsn,
            is_open=is_open,
            seq=seq,
            pending=frontiers.add(events, dict.fromkeys(events, bytes(32)), seq).pending,
        )
        if chance.random() < 0.2:  # the commit fails: its session ends, and the log has none of it
            pending = [(topic, number) for topic, number, _ in log.resume.pending]
            frontiers = FrontierCounts(
                "p", 1, log.resume, {place: log.ends[place] for place in pending}
            )
            seq = log.resume.seq
            continue
        ends = log.commit(schema, events, frontier)
        if chance.random() < 0.1:
            ends = dict.fromkeys(ends, -1)  # acknowledged without an offset
        frontiers.acknowledged(log.resume, ends)
        assert not frontiers.regressed
        check(log)
    # The next frontier covers what none covers yet.
    if not log.resume.open:
        pending = [(topic, number) for topic, number, _ in log.resume.pending]
        ends = {place: log.ends[place] for place in pending}
        last = FrontierCounts("p", 1, log.resume, ends).take()
        assert (last is not None) == bool(pending)
        log.commit(position(end_lsn=lsn, seq=seq), {}, last)
        check(log)
