"""A row's versions in its topic, the newest first, without an archive: searched from the end.

A key is in one partition, which the daemon's partitioner names; truncates are in partition 0, which
is searched too. Where the topic is indexed (`key_indexer`), only those blocks are read that the
index names; elsewhere the partition is, backwards in chunks, each from its beginning to its end,
until the time is up. What is read is compared and dropped, so memory holds the hits of a chunk and
what the client fetches ahead. The answer names how far back it is complete, and where a further
search continues.

Columns that an event does not carry, because Postgres did not send them or the event was too large
for its topic, are named as unknown, if no older version that was found has them.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from cdc.console.key_index import hashed, runs_below
from cdc.encode.partition import partition_of
from cdc.errors import ConfigError
from cdc.events import LSN, row_key
from cdc.log import names, reader
from cdc.log.consumer import LogConsumer
from cdc.log.partitions import OffsetRange
from cdc.log.row_keys import log_keys, one_table
from cdc.log.row_versions import RowEvent, VersionSource, iso, version_fields

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cdc.config import Config
    from cdc.console.key_index import PartitionIndex
    from cdc.console.key_indexer import KeyIndexer
    from cdc.log.partitions import Partition

# Of one search, from when the topic's ends are known.
SECONDS: Final = 0.6
# Offsets of a chunk in each partition: the first shows how fast reading is, as rows have any size;
# later ones take at most half of the time that is left.
FIRST: Final = 500
_MOST: Final = 100_000
_GROWTH: Final = 8
_LEAST: Final = 100
# Of one answer and partition; a row with more is shown in several.
MOST_HITS: Final = 200
_MOST_BYTES: Final = 4 << 20


class _Dead(msgspec.Struct):
    columns: tuple[str, ...] = ()


class _Source(VersionSource, kw_only=True):
    dead: _Dead | None = None


class _Event(RowEvent, kw_only=True):
    source: _Source


_decode: Final = msgspec.json.Decoder(_Event).decode


class FoundEvents:
    """The newest events of a row in a part of a partition, bounded."""

    def __init__(self) -> None:
        self.kept: deque[tuple[int, bytes]] = deque()  # by offset
        self._bytes = 0
        self.is_full = False  # older ones were dropped

    def add(self, offset: int, value: bytes) -> None:
        """Take the next event, in the partition's order."""
        self.kept.append((offset, value))
        self._bytes += len(value)
        self._drop()

    def add_older(self, older: FoundEvents) -> None:
        """Take the hits of the part before."""
        self.kept.extendleft(reversed(older.kept))
        self._bytes += older._bytes
        self.is_full |= older.is_full
        self._drop()

    def _drop(self) -> None:
        while len(self.kept) > 1 and (len(self.kept) > MOST_HITS or self._bytes > _MOST_BYTES):
            self._bytes -= len(self.kept.popleft()[1])
            self.is_full = True


class _Step(NamedTuple):
    """What a search does next in a partition; of an empty range nothing is read."""

    span: OffsetRange
    is_indexed: bool  # the index has named it


class _Side:
    """How far a partition was searched: from offset `start` on, whose event was at `lsn`."""

    def __init__(self, held: OffsetRange, steps: Iterator[_Step]) -> None:
        self.start = held.end
        self.lsn, self.ts_us = LSN(0), 0
        self.is_scanned = False  # what is read next is not indexed
        self._first = held.start
        self._steps = steps
        self._step: _Step | None = None

    @property
    def is_done(self) -> bool:
        return self.start <= self._first

    def next(self, many: int) -> OffsetRange:
        """Return what to read next, of what is not indexed at most so many offsets."""
        if self._step is None:
            self._step = next(self._steps)
        (first, end), is_indexed = self._step
        self.is_scanned = not is_indexed
        return self._step.span if is_indexed else OffsetRange(max(first, end - many), end)

    def advance(self, read: OffsetRange, start: int, oldest: bytes | None) -> None:
        """Note that a range was searched from an offset in it on, and the oldest event there."""
        assert self._step is not None
        self.start = start
        if oldest is not None:
            source = _decode(oldest).source
            self.lsn, self.ts_us = LSN.parse(source.commit_lsn), source.ts_us
        left = OffsetRange(self._step.span.start, read.start)
        self._step = None if left.start >= left.end else self._step._replace(span=left)


def _steps(
    held: OffsetRange, index: PartitionIndex | None, hashes: frozenset[int]
) -> Iterator[_Step]:
    """Yield how a partition is searched, from its end: what the index names, and what it lacks."""
    end = held.end  # of what is not indexed
    for run in runs_below(held.end, held.start):
        start = max(run, held.start)
        found = index.find(run, hashes) if index is not None else None
        upto = min(found.upto, end) if found is not None else start
        if found is None or upto <= start:
            continue
        if upto < end:
            yield _Step(OffsetRange(upto, end), is_indexed=False)
        for block in reversed(found.blocks):
            span = OffsetRange(max(block.start, start), min(block.end, upto))
            if span.start < span.end:
                yield _Step(span, is_indexed=True)
        yield _Step(OffsetRange(start, start), is_indexed=True)
        end = start
    if held.start < end:
        yield _Step(OffsetRange(held.start, end), is_indexed=False)


class KeySearch:
    """One search; `run` it once. Blocks, so it runs in a thread."""

    def __init__(
        self,
        config: Config,
        table: str,
        key: str,
        before: str = "",
        indexer: KeyIndexer | None = None,
    ) -> None:
        """`before` is what an earlier answer has as `before`: the search continues there.

        Without an indexer, or where it has not indexed the topic, the topic is read.
        """
        self._config, self._table, self._key = config, table, key
        self._before = _places(before)
        self._indexer = indexer
        self._read = 0

    def run(self) -> dict[str, Any]:
        """Return the versions found, oldest first, and how far back they are complete.

        Raises ConfigError where the table or the key is none of the log's, UnavailableError if the
        brokers do not answer.
        """
        config = self._config
        keys = log_keys(self._table, self._key, reader.read_schemas(config))
        topic = names.data_topic(config.prefix, *one_table(self._table))
        resume = reader.read_resume(config)
        count = resume[0].partitions.get(topic) if resume else None
        if count is None:
            raise ConfigError(
                f"the log has no topic of {self._table}", hint="`cdc table list` lists the tables"
            )
        places = {(topic, partition_of(each, count)) for each in keys} | {(topic, 0)}
        with closing(LogConsumer(config, skip_deleted=True, fetches_little=True)) as consumer:
            answer = self.search(consumer, keys, topic, places)
        # Of events between the newest of a key, compaction leaves none.
        answer["searched"]["compacted"] = resume is not None and topic in resume[0].cleanup
        answer["searched"]["index_error"] = self._indexer.error if self._indexer else ""
        return answer

    def search(
        self, consumer: LogConsumer, keys: set[bytes], topic: str, places: set[Partition]
    ) -> dict[str, Any]:
        """Return what partitions of a topic have of the keys, and of truncates."""
        there = consumer.look_up(places)
        until = time.monotonic() + SECONDS
        indexes = self._indexes(consumer, topic, there)
        sides = {
            each: _Side(span, _steps(span, indexes.get(each), _hashes(keys, each)))
            for each, span in self._held(there).items()
        }
        found = self._search(consumer, keys, sides, until)
        answer = self._answer(found, sides)
        answer["searched"]["indexed"] = self._indexed(there, indexes)
        return answer

    def _indexes(
        self, consumer: LogConsumer, topic: str, there: Mapping[Partition, OffsetRange]
    ) -> dict[Partition, PartitionIndex]:
        """Return the indexes of those partitions that have one of the log as it is."""
        index = self._indexer.asked(topic) if self._indexer is not None else None
        return index.verified(consumer, there) if index is not None else {}

    def _indexed(
        self, there: Mapping[Partition, OffsetRange], indexes: Mapping[Partition, PartitionIndex]
    ) -> int | None:
        """Return how much of the partitions is indexed, in percent; None without an indexer."""
        if self._indexer is None:
            return None
        has = sum(index.indexed(there[each]) for each, index in indexes.items())
        of = sum(each.end - each.start for each in there.values())
        return 100 * has // of if of else 100

    def _held(self, there: dict[Partition, OffsetRange]) -> dict[Partition, OffsetRange]:
        """Return what is to be searched of each partition."""
        if not self._before:
            return there
        return {
            each: OffsetRange(
                span.start, max(span.start, min(span.end, self._before.get(each[1], 0)))
            )
            for each, span in there.items()
        }

    def _search(
        self,
        consumer: LogConsumer,
        keys: set[bytes],
        sides: Mapping[Partition, _Side],
        until: float,
    ) -> list[bytes]:
        """Return the events found, and note in `sides` how far back they are all."""
        hits = {each: FoundEvents() for each in sides}
        many = FIRST
        while wanted := {each: side.next(many) for each, side in sides.items() if not side.is_done}:
            began, was_read = time.monotonic(), self._read
            scanned = sum(sides[each].is_scanned for each in wanted)
            self._chunk(consumer, keys, wanted, sides, hits)
            left = until - time.monotonic()
            if scanned:
                took = max(time.monotonic() - began, 0.001)
                rate = max(self._read - was_read, 1) / scanned / took
                many = min(many * _GROWTH, _MOST, int(rate * left / 2))
            if any(each.is_full for each in hits.values()) or left <= 0 or many < _LEAST:
                break
        return [value for each in hits.values() for _, value in each.kept]

    def _chunk(
        self,
        consumer: LogConsumer,
        keys: set[bytes],
        wanted: dict[Partition, OffsetRange],
        sides: Mapping[Partition, _Side],
        hits: Mapping[Partition, FoundEvents],
    ) -> None:
        """Take what a range of each partition has of the row, and move its side back."""
        found = {each: FoundEvents() for each in wanted}
        first: dict[Partition, bytes] = {}
        spans = {each: span for each, span in wanted.items() if span.start < span.end}
        for partition, messages in consumer.pieces(spans) if spans else ():
            self._read += len(messages)
            for message in messages:
                key, value, offset = message.key(), message.value(), message.offset()
                if value is None or offset is None:
                    continue  # a tombstone follows its delete
                first.setdefault(partition, value)
                if key in keys or (partition[1] == 0 and row_key(key) is None):
                    found[partition].add(offset, value)
        for each, span in wanted.items():
            kept = hits[each]
            kept.add_older(found[each])
            # Of what was dropped, only a further search shows that it is there.
            start, oldest = kept.kept[0] if kept.is_full else (span.start, first.get(each))
            sides[each].advance(span, start, oldest)

    def _answer(self, found: list[bytes], sides: Mapping[Partition, _Side]) -> dict[str, Any]:
        left = {each: side for each, side in sides.items() if not side.is_done}
        back = max(left.values(), key=lambda side: side.lsn, default=None)
        listed = versions(found, is_first=not left)
        return {
            "count": len(listed),
            "versions": listed,
            "searched": {
                "events": self._read,
                "complete": not left,
                "lsn": str(back.lsn) if back and back.lsn else None,
                "at": iso(back.ts_us) if back and back.lsn else None,
                # Of partitions that are read to their beginning, nothing is left.
                "before": ",".join(
                    f"{each[1]}:{side.start}" for each, side in sorted(left.items())
                ),
            },
        }


def _hashes(keys: set[bytes], partition: Partition) -> frozenset[int]:
    """Return what the index of a partition is asked for: the keys, and truncates in the first."""
    return frozenset(map(hashed, [*keys, None] if partition[1] == 0 else keys))


def versions(found: list[bytes], *, is_first: bool) -> list[dict[str, Any]]:
    """Return events of a row as versions, in the order of seq, in the form of `cdc history`.

    A truncate is one only while there is a row, or may be one: `is_first` if there are no older
    events.
    """
    listed = list[dict[str, Any]]()
    known: dict[str, Any] | None = None
    is_deleted = is_first
    for event in sorted(map(_decode, found), key=lambda each: each.source.seq):
        source = event.source
        if event.op == "t" and is_deleted:
            continue
        # The values of a dead letter are others than before: only its own record has them.
        version = version_fields(event, known, source.dead.columns if source.dead else ())
        # Of what was not sent an older version has the value; of the others a dead letter.
        lists = {"unknown": list(version["unknown"]), "unsent": list(source.unchanged)}
        listed.append(version | lists | {"author": None, "held_by": "topic"})
        known = version["after"]
        is_deleted = known is None
    return listed


def _places(text: str) -> dict[int, int]:
    """Return the offset before which each partition is still to be searched."""
    try:
        pairs = (each.split(":") for each in text.split(",") if each)
        return {int(number): int(offset) for number, offset in pairs}
    except ValueError:
        raise ConfigError(
            "the place where the search is to continue is none", hint="search again from the end"
        ) from None
