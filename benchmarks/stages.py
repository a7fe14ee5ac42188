"""The row path's stages, each timed alone on recorded frames, in CPU microseconds per row.

CPU time of this thread, the best of several passes, so that other load on the machine does not
count. Where a stage is a function called for each row, the same loop without the call is timed too
and subtracted.
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from benchmarks import kinds
from benchmarks.recording import PARTITIONS
from cdc.encode.partition import SIZES, murmur2
from cdc.log.batch import Batch
from cdc.log.publisher import PRODUCERS, Publisher

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.recording import Recording, Row
    from cdc.config import Config
    from cdc.encode.encoder import New

_PASSES: Final = 3
_OP: Final = b"c"
# A transaction's fields in an event, as long as real ones.
_TX: Final = (
    b'"ts_ms":1767323045123,"ts_us":1767323045123456,"ts_ns":1767323045123456000,"txId":771,'
    b'"epoch":1,"commit_lsn":"0/16E9058"'
)
_TIMES: Final = b'"ts_ms":1767323045123,"ts_us":1767323045123456,"ts_ns":1767323045123456000'
# Events in one Kafka transaction, as in the daemon's default.
_BATCH_EVENTS: Final = 50_000
_COMMITS: Final = 300


class Handed(NamedTuple):
    """The cost of handing events to the producer and of sending them."""

    hand_over_us: float  # the calling thread's
    send_us: float  # of the producer's own threads: compression, protocol, socket


class CommitCycle(NamedTuple):
    """A Kafka transaction of one event, from its start to the end of its commit."""

    p50_ms: float
    p99_ms: float
    acknowledged_p50_ms: float  # from the start until the broker has acknowledged the records
    cpu_us: float


def feed(recording: Recording, topic: str) -> float:
    """Time all of `Sequencer.feed`: frames, transactions, encoding, partition, batch."""

    def once() -> float:
        batch = Batch()
        sequencer = recording.sequencer(batch)
        spent = 0.0
        for chunk in recording.chunks:
            began = time.thread_time()
            recording.feed(sequencer, batch, chunk, topic)
            spent += time.thread_time() - began
            for partition in batch.waiting():
                partition.take()
        return spent

    return _best(once) / recording.count * 1e6


def encode(new: New, rows: list[Row]) -> float:
    """Time an encoder over a table's rows."""

    def call() -> float:
        began = time.thread_time()
        for chunk, first_column, stop, lsn in rows:
            new(chunk, first_column, stop, lsn, _OP, 1, 1, _TX, _TIMES)
        return time.thread_time() - began

    def nothing() -> float:
        began = time.thread_time()
        for _chunk, _first_column, _stop, _lsn in rows:
            pass
        return time.thread_time() - began

    return (_best(call) - _best(nothing)) / len(rows) * 1e6


def columns(recording: Recording) -> dict[str, float]:
    """Return nanoseconds per value of each kind: rows with many values minus rows with none."""
    bare = encode(recording.encoder(kinds.BARE).new, recording.rows[kinds.BARE])
    found = {}
    for kind, _, _ in kinds.KINDS:
        table = kinds.table(kind)
        total = encode(recording.encoder(table).new, recording.rows[table])
        found[kind] = (total - bare) / kinds.COLUMNS * 1e3
    return found


def partition(new: New, rows: list[Row]) -> float:
    """Time the choice of the partition, as the sequencer makes it, over the rows' keys."""
    keys = [new(*row, _OP, 1, 1, _TX, _TIMES)[0] or b"" for row in rows]

    def murmur() -> float:
        began = time.thread_time()
        for key in keys:
            murmur2(None, key, SIZES[len(key)], PARTITIONS, None, None)
        return time.thread_time() - began

    def nothing() -> float:
        began = time.thread_time()
        for _ in keys:
            pass
        return time.thread_time() - began

    return (_best(murmur) - _best(nothing)) / len(keys) * 1e6


def hand_over(recording: Recording, config: Config, topic: str) -> Handed:
    """Time `Publisher.produce` and the producer's threads, with a real broker."""
    publisher = Publisher(config)
    publisher.open()
    batch = Batch()
    sequencer = recording.sequencer(batch)
    produced = 0.0
    began, began_all = time.thread_time(), time.process_time()
    for chunk in recording.chunks:
        recording.feed(sequencer, batch, chunk, topic)
        before = time.thread_time()
        publisher.produce(batch)
        produced += time.thread_time() - before
        if sequencer.events >= _BATCH_EVENTS:
            publisher.flush()
            publisher.commit()
            batch.close()
            sequencer.start_batch()
    publisher.flush()
    if publisher.started:
        publisher.commit()
    others = (time.process_time() - began_all) - (time.thread_time() - began)
    count = recording.count
    return Handed(produced / count * 1e6, others / count * 1e6)


def commit_cycle(config: Config, topic: str) -> CommitCycle:
    """Time Kafka transactions of one event, one after another, on alternating producers."""
    publishers = [Publisher(config, name) for name in range(PRODUCERS)]
    for publisher in publishers:
        publisher.open()
    batch = Batch()
    places = batch.topic(topic, PARTITIONS)
    total, acknowledged = [], []
    cpu = time.process_time()
    for turn in range(_COMMITS):
        publisher = publishers[turn % PRODUCERS]
        places[turn % PARTITIONS].append({"key": b'{"id":1}', "value": _TX * 4})
        began = time.perf_counter()
        publisher.produce(batch)
        publisher.flush()
        acknowledged.append(time.perf_counter() - began)
        publisher.commit()
        total.append(time.perf_counter() - began)
        batch.close()
    cpu = time.process_time() - cpu
    total.sort()
    acknowledged.sort()
    return CommitCycle(
        p50_ms=total[len(total) // 2] * 1e3,
        p99_ms=total[int(len(total) * 0.99)] * 1e3,
        acknowledged_p50_ms=acknowledged[len(acknowledged) // 2] * 1e3,
        cpu_us=cpu / _COMMITS * 1e6,
    )


def _best(once: Callable[[], float]) -> float:
    # Collect before timing, so that the garbage collector does not scan the benchmark's own data.
    gc.collect()
    gc.freeze()
    return min(once() for _ in range(_PASSES))
