"""Digests over random batches, hand-overs, failed commits and crashes close, and find any change.

The log is a model: only what it holds survives a crash. A Kafka transaction commits completely or
not at all. The reader gets the records in other pieces than the writer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cdc.events import LSN
from cdc.log import digests
from cdc.log.batch import Batch
from cdc.log.digests import ChunkHash
from cdc.log.frontiers import FrontierCounts
from cdc.log.partitions import Partition
from cdc.log.records import FrontierRecord, ResumePosition
from cdc.snapshot.initial.records import RangeRecord
from cdc.snapshot.initial.topic import InitialLog, digests_of
from cdc.verify.digests import DigestDifference, FrontierChain, PartitionCheck
from tests.property.stream import position

DATA, DEAD = "p.a.t", "p.cdc.dead"
PARTITIONS = 3


class Stored(NamedTuple):
    offset: int
    key: bytes | None
    value: bytes | None


class Log:
    """What committed."""

    def __init__(self) -> None:
        self.resume: ResumePosition = position()
        self.records: dict[Partition, list[Stored]] = {}
        self.ends: dict[Partition, int] = {}
        self.frontiers: list[FrontierRecord] = []


class Writer:
    """The daemon's part: the batch, and the sessions that end with a crash or a failed commit."""

    def __init__(self, chance: Random) -> None:
        self.chance, self.log = chance, Log()
        self.start()

    def start(self) -> None:
        """Start a session from what the log holds."""
        resume = self.log.resume
        self.batch, self.written = Batch(digests=True), dict[Partition, list[Stored]]()
        self.seq, self.lsn = resume.seq, int(resume.end_lsn)
        pending = [(topic, number) for topic, number, _ in resume.pending]
        ends = {each: self.log.ends[each] for each in pending}
        self.frontiers = FrontierCounts("p", 1, resume, ends)

    def write(self) -> None:
        """Put the events of a part of a source transaction into the batch."""
        for _ in range(self.chance.randrange(12)):
            self.seq += 1
            queue = self.batch.topic(DATA, PARTITIONS)[self.chance.randrange(PARTITIONS)]
            key = self.chance.choice([None, b"", b"k%d" % self.chance.randrange(4)])
            text = b'{"source":{"seq":%d},"after":"%s"}' % (self.seq, b"x" * self.seq)
            queue.append({"key": key, "value": text})
            if key is not None and self.chance.random() < 0.3:
                queue.append({"key": key, "value": None})
                queue.others += 1
            if self.chance.random() < 0.1:
                parts = [(b'{"id":"1-%d","chunk":%d}' % (self.seq, n), b"part") for n in range(3)]
                self.batch.letters.append((self.batch.topic(DEAD, 1)[0], parts))
            if self.chance.random() < 0.2:
                self.hand_over()

    def hand_over(self) -> None:
        for queue in self.batch.waiting():
            found = self.written.setdefault((queue.topic, queue.number), [])
            found += [Stored(0, each["key"], each["value"]) for each in queue.take()]
        self.batch.handed_over()
        for queue, key, value in self.batch.send_letters():
            self.written.setdefault((queue.topic, queue.number), []).append(Stored(0, key, value))

    def commit(self) -> None:
        """End the batch, as `Pipeline.commit_batch`."""
        self.hand_over()
        idle = not self.written and self.chance.random() < 0.5
        self.lsn += 1
        frontier = None
        if self.chance.random() < 0.6:
            frontier = self.frontiers.take(LSN(self.lsn) if idle else None)
        chunks, counts = self.batch.digests(), self.batch.close()
        is_open = bool(self.written) and self.chance.random() < 0.4
        resume = replace(
            position(end_lsn=self.lsn, is_open=is_open, seq=self.seq),
            **self.frontiers.add(counts, chunks, self.seq)._asdict(),
        )
        if self.chance.random() < 0.2:  # an aborted transaction leaves offsets, and nothing else
            for place, records in self.written.items():
                self.log.ends[place] = self.log.ends.get(place, 0) + len(records) + 1
            self.start()
            return
        ends = {}
        for place, records in self.written.items():
            first = self.log.ends.get(place, 0)
            self.log.records.setdefault(place, []).extend(
                each._replace(offset=first + at) for at, each in enumerate(records)
            )
            ends[place] = first + len(records)
            self.log.ends[place] = ends[place] + 1
        self.written = {}
        self.log.resume = resume
        if frontier:
            self.log.frontiers.append(frontier)
        if self.chance.random() < 0.2:
            self.start()
        else:
            self.frontiers.acknowledged(resume, ends)


def written(seed: int) -> tuple[Random, Log]:
    chance = Random(seed)
    writer = Writer(chance)
    for _ in range(chance.randrange(1, 25)):
        writer.write()
        writer.commit()
    return chance, writer.log


def differences(chance: Random, log: Log | Snapshot) -> Iterator[tuple[int, DigestDifference]]:
    """Yield what a reader finds, with the index of the frontier."""
    chain, at = FrontierChain("", 0), dict[Partition, int]()
    for index, record in enumerate(log.frontiers):
        yield from ((index, each) for each in chain.add(record))
        for number in range(len(record.partitions)):
            check = PartitionCheck(record, number)
            low = at.get(check.partition, 0)
            at[check.partition] = check.end
            held = log.records.get(check.partition, [])
            records = [each for each in held if low <= each.offset < check.end]
            while records:
                many = chance.randrange(1, len(records) + 1)
                piece, records = records[:many], records[many:]
                check.add([each.key for each in piece], [each.value for each in piece])
            if found := check.finish():
                yield index, found


seeds = st.integers(0, 2**32 - 1)


@given(seeds)
def test_every_record_between_two_frontiers_is_in_a_digest_and_no_aborted_one(seed: int) -> None:
    chance, log = written(seed)
    assert not list(differences(chance, log))
    assert all(record.digests is not None for record in log.frontiers)


@given(seeds)
def test_any_changed_dropped_or_swapped_record_is_found_in_its_partition(seed: int) -> None:
    chance, log = written(seed)
    covered = {
        (topic, number): end for each in log.frontiers for topic, number, end, _ in each.partitions
    }
    places = [
        (place, at)
        for place, records in log.records.items()
        for at, each in enumerate(records)
        if each.offset < covered.get(place, 0)
    ]
    if not places:
        return
    place, at = chance.choice(places)
    records, record = log.records[place], log.records[place][at]
    match chance.choice(["bit", "drop", "swap", "null"]):
        case "drop":
            del records[at]
        case "swap" if at and records[at - 1][1:] != record[1:]:
            other = records[at - 1]
            records[at] = other._replace(offset=record.offset)
            records[at - 1] = record._replace(offset=other.offset)
        case "null" if record.key is not None:
            records[at] = record._replace(key=None)
        case _:
            text = bytearray(record.value or b"\0")
            text[chance.randrange(len(text))] ^= 1 << chance.randrange(8)
            records[at] = record._replace(value=bytes(text))
    found = [each for _, each in differences(chance, log)]
    assert [(each.topic, each.partition) for each in found][:1] == [place]


@given(seeds)
def test_any_altered_or_missing_frontier_record_is_found(seed: int) -> None:
    chance, log = written(seed)
    if len(log.frontiers) < 2:
        return
    at = chance.randrange(len(log.frontiers) - 1)
    record = log.frontiers[at]
    match chance.choice(["drop", "lsn", "time", "partitions"]):
        case "lsn":
            log.frontiers[at] = replace(record, lsn=LSN(record.lsn + 1))
        case "time":
            log.frontiers[at] = replace(record, committed_at_us=record.committed_at_us + 1)
        case "partitions" if record.partitions:
            log.frontiers[at] = replace(record, partitions=record.partitions[1:])
        case _:
            del log.frontiers[at]
    found = [index for index, each in differences(chance, log)]
    assert found, record
    assert found[0] == at


@given(st.lists(st.tuples(st.none() | st.binary(), st.none() | st.binary())), seeds)
def test_a_chunk_is_the_same_however_its_records_are_handed_over(
    records: list[tuple[bytes | None, bytes | None]], seed: int
) -> None:
    chance = Random(seed)
    one, other = ChunkHash(), ChunkHash()
    one.add([{"key": key, "value": value} for key, value in records])
    left = records
    while left:
        many = chance.randrange(1, len(left) + 1)
        other.add_columns([key for key, _ in left[:many]], [value for _, value in left[:many]])
        left = left[many:]
    assert one.digest() == other.digest()


class Snapshot:
    """Ranges of an initial snapshot, and deletes, of producers that write at the same time."""

    def __init__(self, chance: Random) -> None:
        known, self.records = InitialLog(), dict[Partition, list[Stored]]()
        seq, waiting = chance.randrange(1, 50), list[tuple[Partition, list[Stored]]]()
        for number in range(chance.randrange(1, 8)):
            batch, capacity = Batch(digests=True), chance.choice([10, 10, 25, 1 << 40])
            used = chance.randrange(1, 10)
            for at in range(used):
                queue = batch.topic(DATA, PARTITIONS)[chance.randrange(PARTITIONS)]
                key = b"k%d" % (seq + at)
                queue.append({"key": key, "value": b'{"source":{"seq":%d}}' % (seq + at)})
                if chance.random() < 0.2:
                    queue.append({"key": key, "value": None})
                    queue.others += 1
            for queue in batch.waiting():
                written = [Stored(0, each["key"], each["value"]) for each in queue.take()]
                waiting.append(((queue.topic, queue.number), written))
            hashed = digests_of(batch)
            ends = tuple((*place, events) for place, events in batch.close().items())
            known.ranges.append(
                RangeRecord(
                    generation=1, table=0, number=number, rows=used, bytes=0, ends=ends,
                    seconds=0.0, first_seq=seq, seqs=capacity, digests=hashed,
                )
            )  # fmt: skip
            seq += capacity
        while waiting:  # a piece of one producer's, then of another's
            place, left = waiting[chance.randrange(len(waiting))]
            many = chance.randrange(1, len(left) + 1)
            while many < len(left) and left[many].value is None:
                many += 1
            held = self.records.setdefault(place, [])
            held += [each._replace(offset=len(held) + at) for at, each in enumerate(left[:many])]
            del left[:many]
            waiting = [each for each in waiting if each[1]]
        chance.shuffle(known.ranges)
        hashed_all = known.digests
        assert hashed_all is not None
        places = sorted(self.records)
        events = {each: sum(r.value is not None for r in self.records[each]) for each in places}
        assert events == dict(sorted(known.events.items()))
        frontier = FrontierRecord(
            pipeline="p",
            epoch=1,
            lsn=LSN(5),
            seq=seq,
            committed_at_us=0,
            partitions=tuple((*each, len(self.records[each]), events[each]) for each in places),
            holes=seq - sum(events.values()),
            blocks=known.blocks,
            digests=tuple(hashed_all[each] for each in places),
        )
        self.frontiers = [digests.sealed(frontier, "")]


@given(seeds)
def test_every_row_of_a_snapshot_is_in_a_digest_however_producers_mix(seed: int) -> None:
    chance = Random(seed)
    snapshot = Snapshot(chance)
    assert not list(differences(chance, snapshot))
    place = chance.choice(list(snapshot.records))
    held = snapshot.records[place]
    at = chance.randrange(len(held))
    match chance.choice(["bit", "drop", "swap", "seq"]):
        case "drop":
            del held[at]
        case "swap" if at and _seq(held[at]) != _seq(held[at - 1]):
            # Of different ranges the order is not stated: each producer's is.
            [frontier] = snapshot.frontiers
            blocks = [_block(frontier, _seq(each)) for each in held[at - 1 : at + 1]]
            if blocks[0] != blocks[1] or None in (held[at].value, held[at - 1].value):
                return
            held[at - 1], held[at] = held[at], held[at - 1]
        case "seq":
            held[at] = held[at]._replace(value=b'{"source":{"seq":%d}}' % (1 << 50))
        case _:
            text = bytearray(held[at].value or b"\0")
            text[chance.randrange(len(text))] ^= 1 << chance.randrange(8)
            held[at] = held[at]._replace(value=bytes(text))
    found = [each for _, each in differences(chance, snapshot)]
    assert [(each.topic, each.partition) for each in found] == [place]


def _seq(record: Stored) -> int:
    return int((record.key or b"")[1:])


def _block(frontier: FrontierRecord, seq: int) -> int:
    starts = [first + at * seqs for first, seqs, count in frontier.blocks for at in range(count)]
    return bisect_right(starts, seq)
