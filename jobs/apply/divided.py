"""A large cut's events: read once by executors, counted, and divided by key.

The events of a table that have a key are divided among buckets by a hash of it, each small enough
to be reduced in memory. A task keeps some megabytes of events, packs those of each bucket into one
piece of bytes, and continues: so Spark shuffles few pieces (`jobs.spark.shuffle`) where it would
shuffle millions of rows. When all tasks have ended their counts are known, and nothing has been
written yet; the buckets are read by later jobs.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from contextlib import closing
from functools import partial
from itertools import groupby
from math import ceil
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from zlib import crc32

import msgspec
import pyarrow as pa

from cdc.events import row_key
from cdc.log.ranges import RangeReader
from lockstep.jobs.cuts.reduce import parsed
from lockstep.jobs.cuts.task_ranges import by_task
from lockstep.jobs.spark.garbage import collect_seldom
from lockstep.jobs.spark.shuffle import shuffled

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pyspark import SparkContext
    from pyspark.core.rdd import RDD

    from cdc.config import Config
    from cdc.log.partitions import OffsetRange, Partition
    from lockstep.jobs.cuts.reduce import Events
    from lockstep.jobs.spark.shuffle import Pieces

# Events of a bucket, where a table has few; one that has many gets the most buckets, of more.
BUCKET_EVENTS: Final = 20_000
_MOST_BUCKETS: Final = 4_000
# A bucket above is not reduced in memory: values are large, or most events are of one key.
BUCKET_BYTES: Final = 48 << 20
# Events that a reading task keeps.
_KEPT_BYTES: Final = 16 << 20

# Of a piece: its bucket, and its size when it is decompressed.
_HEAD: Final = struct.Struct("!qq")


class _Message(Protocol):
    def key(self) -> bytes | None: ...

    def value(self) -> bytes | None: ...


class PartCount(msgspec.Struct):
    """What a partition's events are."""

    events: int = 0
    size: int = 0  # in bytes
    first: bytes = b""
    last: bytes = b""
    loose: bool = False  # some have no key
    old: bool = False  # rows without a key are updated or deleted
    dead: bool = False  # one points to a dead letter
    moved: bool = False  # a row has another key, and columns that were not sent
    truncated: int | None = None  # the seq of the last truncate


class _TaskCount(msgspec.Struct):
    parts: list[tuple[tuple[str, int], PartCount]]
    buckets: dict[int, tuple[int, int]]  # events and bytes of each


class Buckets(NamedTuple):
    """A table's buckets: so many numbers from the first on."""

    first: int
    number: int


_NO_BUCKETS: Final = Buckets(0, 0)


class Divided(NamedTuple):
    """A cut's events in executors, and their counts."""

    parts: Mapping[Partition, PartCount]
    tables: Mapping[str, Buckets]  # by topic
    buckets: Mapping[int, tuple[int, int]]  # events and bytes of each that has any
    pieces: RDD[bytes] | None  # None without events

    def is_in_memory(self, topic: str) -> bool:
        """Return whether a topic's events are divided, and each bucket fits into memory."""
        if topic not in self.tables:
            return False
        return all(size <= BUCKET_BYTES for _, size in self._of(topic))

    def events(self, topic: str) -> int:
        """Return how many events of a topic are divided."""
        return sum(events for events, _ in self._of(topic))

    def _of(self, topic: str) -> list[tuple[int, int]]:
        first, count = self.tables[topic]
        return [self.buckets.get(each, (0, 0)) for each in range(first, first + count)]


def divided(
    context: SparkContext,
    config: Config,
    parts: Mapping[Partition, tuple[OffsetRange, int]],
    topics: Iterable[str],
) -> Divided:
    """Read the ranges, each given with about how many events it has; divide the topics' ones.

    `config` must not refer to files: tasks may run where these are missing.
    """
    if not parts:
        return Divided({}, {}, {}, None)
    tables, number = {}, 0
    for topic in topics:
        events = sum(many for (name, _), (_, many) in parts.items() if name == topic)
        tables[topic] = Buckets(number, max(1, min(ceil(events / BUCKET_EVENTS), _MOST_BUCKETS)))
        number += tables[topic].number
    tasks = by_task(parts)
    numbers = context.parallelize(range(len(tasks)), len(tasks))
    # After the buckets there is a partition with the counts.
    pieces = shuffled(numbers, partial(_read, config, tasks, tables, number), number + 1)
    found = dict[Any, PartCount]()
    buckets = dict[int, tuple[int, int]]()
    for text in context.runJob(pieces, list, [number]):
        count = _decode_count(text[_HEAD.size :])
        found |= dict(count.parts)
        for bucket, (events, size) in count.buckets.items():
            others = buckets.get(bucket, (0, 0))
            buckets[bucket] = others[0] + events, others[1] + size
    return Divided(found, tables, buckets, pieces)


# -- in executors ----------------------------------------------------------------------------------


def events_of(
    pieces: Iterable[bytes], tables: Mapping[str, Buckets]
) -> Iterator[tuple[str, Iterator[list[Events]]]]:
    """Yield each of the topics that a task has buckets of, with the events of each bucket."""
    topics = {
        first + at: topic for topic, (first, number) in tables.items() for at in range(number)
    }
    mine = (piece for piece in pieces if _bucket_of(piece) in topics)
    for topic, some in groupby(mine, lambda piece: topics[_bucket_of(piece)]):
        yield topic, (list(map(_unpacked, each)) for _, each in groupby(some, _bucket_of))


def _bucket_of(piece: bytes) -> int:
    bucket: int = _HEAD.unpack_from(piece)[0]
    return bucket


def _read(
    config: Config,
    tasks: list[dict[Partition, OffsetRange]],
    tables: Mapping[str, Buckets],
    counts: int,
    task: int,
    _: object,
) -> Pieces:
    """Read a task's partitions: yield events by bucket, and at the end what was counted."""
    collect_seldom()
    found = {place: PartCount() for place in tasks[task]}
    reading = DividedReading(tables)
    with closing(RangeReader(config)) as log:
        for place, messages in log.pieces(tasks[task]):
            reading.add(place[0], messages, found[place])
            if reading.bytes >= _KEPT_BYTES:
                yield from reading.take()
    yield from reading.take()
    yield counts, _HEAD.pack(counts, 0) + _encode(_TaskCount([*found.items()], reading.sizes))


class DividedReading:
    """Counts events, and keeps those that have a bucket."""

    def __init__(self, tables: Mapping[str, Buckets]) -> None:
        self._tables = tables
        self._kept = defaultdict[int, tuple[list[bytes | None], list[bytes]]](lambda: ([], []))
        self.bytes = 0  # that are kept
        self.sizes: dict[int, tuple[int, int]] = {}

    def add(self, topic: str, messages: Sequence[_Message], count: PartCount) -> None:
        """Add a partition's next messages."""
        values = [message.value() for message in messages]
        events = [value for value in values if value is not None]
        if not events:
            return
        _note(events, count)
        first, number = self._tables.get(topic, _NO_BUCKETS)
        for message, value in zip(messages, values, strict=True):
            if value is None:
                continue
            key = row_key(message.key())
            if key is None:
                _note_loose(value, count)
            elif number:
                kept = self._kept[first + crc32(key) % number]
                kept[0].append(key)
                kept[1].append(value)
                self.bytes += len(value)

    def take(self) -> Pieces:
        """Yield the events that are kept, and keep them no longer."""
        for bucket, events in self._kept.items():
            many, size = self.sizes.get(bucket, (0, 0))
            _, values = events
            self.sizes[bucket] = many + len(values), size + sum(map(len, values))
            yield bucket, _packed(bucket, events)
        self._kept.clear()
        self.bytes = 0


def _note(events: list[bytes], count: PartCount) -> None:
    count.first, count.last = count.first or events[0], events[-1]
    count.events += len(events)
    # Matched as the encoder writes them: text inside a row has its quotes escaped.
    text = b"\n".join(events)
    count.size += len(text) + 1 - len(events)
    count.dead = count.dead or b'"dead":{"id":' in text
    if not count.moved and b'"unchanged":[' in text:
        count.moved = any(b'"unchanged":[' in each and b'"op":"c"' in each for each in events)


def _note_loose(value: bytes, count: PartCount) -> None:
    event = parsed(value)
    count.loose = True
    if event.op == "t":
        count.truncated = max(count.truncated or 0, event.source.seq)
    count.old = count.old or event.op in {"u", "d"}


def _packed(bucket: int, events: Events) -> bytes:
    text = _encode(events)
    return _HEAD.pack(bucket, len(text)) + bytes(pa.compress(text, "lz4", asbytes=True))


def _unpacked(piece: bytes) -> Events:
    _, size = _HEAD.unpack_from(piece)
    return _decode(pa.decompress(memoryview(piece)[_HEAD.size :], size, "lz4"))


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(tuple[list[bytes | None], list[bytes]]).decode
_decode_count: Final = msgspec.msgpack.Decoder(_TaskCount).decode
