"""Cuts follow each other without gaps and within limits; a record that does not fit is an error."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from cdc.errors import GapError
from cdc.events import LSN
from cdc.log.records import FrontierRecord
from lockstep.jobs.cuts.cutting import Cut, Cutter, Limits
from lockstep.sinks.contract import Applied

NEW = Applied("shop", 1, 0, LSN(0), 0, 0, 0, {})
MANY = 1_000_000


def frontiers(chance: Random, count: int) -> list[FrontierRecord]:
    """Return frontiers of two topics that grow; the first one is a snapshot's, with holes."""
    records, ends, seq = [], {("a", 0): 0, ("a", 1): 0, ("b", 0): 0}, 0
    for number in range(count):
        moved = chance.sample(sorted(ends), chance.randint(0, 3))
        counts = {place: chance.randint(0, 9) for place in moved}
        holes = 5 if number == 0 else 0
        seq += sum(counts.values()) + holes
        for place, events in counts.items():
            ends[place] += events + 1
        parts = tuple((*place, ends[place], counts[place]) for place in moved)
        records.append(
            FrontierRecord(
                pipeline="shop",
                epoch=1,
                lsn=LSN(1_000 + number),
                seq=seq,
                committed_at_us=number,
                partitions=parts,
                holes=holes,
            )
        )
    return records


def cuts(cutter: Cutter, now: float = 0.0) -> list[Cut]:
    found = []
    while (cut := cutter.take(now)) is not None:
        found.append(cut)
    return found


def followed(record: FrontierRecord) -> int:
    """Return how many events of the followed topic it counts."""
    return sum(events for topic, _, _, events in record.partitions if topic == "a")


@pytest.mark.parametrize("seed", range(20))
def test_cuts_follow_each_other_whatever_the_limit(seed: int) -> None:
    """Each starts where the previous one ended, in every partition; none is larger than it must."""
    chance = Random(seed)
    records = frontiers(chance, 30)
    most = chance.choice((1, 7, 40, MANY))
    cutter = Cutter(NEW, lambda topic: topic == "a", Limits(most, MANY << 10))
    found: list[Cut] = []
    cut_off = 0
    for offset, record in enumerate(records):
        cutter.add(record, 2 * offset)
        assert cutter.has_enough == (sum(map(followed, records[: offset + 1])) - cut_off > most)
        if chance.random() < 0.3:
            found += cuts(cutter)
            cut_off = sum(cut.events for cut in found)
    found += cuts(cutter)
    assert (found[0].above, found[-1].seq, found[-1].place) == (0, records[-1].seq, 59)
    ends = {0: 0, 1: 0}
    for before, cut in pairwise([None, *found]):
        assert cut is not None
        assert before is None or cut.above == before.seq
        for topic, number, start, end, _ in cut.parts:
            assert (topic, start) == ("a", ends[number])
            ends[number] = end
        within = [followed(each) for each in records if cut.above < each.seq <= cut.seq]
        assert cut.events == sum(within)
        assert cut.events <= most or len(list(filter(None, within))) == 1
    assert sum(cut.events for cut in found) == sum(map(followed, records))
    # Another follower that is at one of these frontiers continues with the next.
    at = chance.choice(found)
    resumed = NEW._replace(epoch=at.epoch, lsn=at.lsn, seq=at.seq, place=at.place)
    again = Cutter(resumed, lambda topic: topic == "a", Limits(MANY, MANY << 10))
    for offset, record in enumerate(records):
        if 2 * offset >= at.place:
            again.add(record, 2 * offset)
    assert [cut.seq for cut in cuts(again)] == ([] if at is found[-1] else [records[-1].seq])


def test_a_torn_cut_is_cut_again_to_the_same_end() -> None:
    """Regardless of the limits; and not before its end is in the log."""
    records = frontiers(Random(1), 12)
    reached = records[7].seq
    cutter = Cutter(NEW, lambda _: True, Limits(1, 1), reached)
    for offset, record in enumerate(records[:6]):
        cutter.add(record, offset)
        assert not cutter.has_enough
    assert cutter.take(0.0) is None
    for offset, record in enumerate(records[6:], 6):
        cutter.add(record, offset)
    first = cutter.take(0.0)
    assert first is not None
    assert (first.above, first.seq) == (0, reached)


def test_waiting_records_are_bounded_even_with_few_events() -> None:
    """Records of topics that are not followed, while cuts are held back: the log keeps them too."""
    cutter = Cutter(NEW, lambda _: False, Limits(MANY, MANY << 10, events_per_second=1))
    come = 0
    while not cutter.has_enough:
        record = FrontierRecord(
            pipeline="shop", epoch=1, lsn=LSN(1 + come), seq=0, committed_at_us=0, partitions=()
        )
        cutter.add(record, come)
        come += 1
    assert come == 10_000
    assert cutter.take(0.0) is not None
    assert not cutter.has_enough


def test_events_a_second_are_bounded_on_average() -> None:
    cutter = Cutter(NEW, lambda _: True, Limits(10, MANY << 10, events_per_second=10))
    for offset, record in enumerate(frontiers(Random(2), 20)):
        cutter.add(record, offset)
    now, events = 0.0, 0
    while cutter.waiting:
        for cut in cuts(cutter, now):
            events += cut.events
        now += 0.1
    assert events / now < 11


@pytest.mark.parametrize("fault", ["lost", "counted", "back"])
def test_a_record_that_does_not_follow_is_a_gap(fault: str) -> None:
    records = frontiers(Random(4), 4)
    if fault == "lost":
        records.pop(1)
    elif fault == "counted":
        parts = [(*part[:3], part[3] + 1) for part in records[2].partitions]
        records[2] = FrontierRecord(
            **{**{f: getattr(records[2], f) for f in records[2].__struct_fields__},
               "partitions": tuple(parts)}
        )  # fmt: skip
    else:
        records.append(records[0])
    cutter = Cutter(NEW, lambda _: True, Limits(MANY, MANY << 10))
    last = {"lost": 1, "counted": 2, "back": 4}[fault]
    for offset, record in enumerate(records[:last]):
        cutter.add(record, offset)
    with pytest.raises(GapError, match="does not follow"):
        cutter.add(records[last], last)
