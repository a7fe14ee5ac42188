"""A row's versions in its topic, the newest first, without an archive: searched from the end.

A key is in one partition, which the daemon's partitioner names; truncates are in partition 0, which
is read too. Both are read backwards in chunks, each from its beginning to its end, until the time
is up. What is read is compared and dropped, so memory holds a chunk's hits and what the client
fetches ahead. The answer names how far back it is complete, and where a further search continues.

Columns that an event does not carry, because Postgres did not send them or the event was too large
for its topic, are named as unknown, if no older version that was found has them.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from cdc.encode.partition import partition_of
from cdc.errors import ConfigError
from cdc.events import LSN, row_key
from cdc.log import names, reader
from cdc.log.consumer import LogConsumer
from cdc.log.partitions import Range
from cdc.log.row_keys import log_keys, one_table
from cdc.log.row_versions import RowEvent, RowSource, iso, version_fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cdc.config import Config
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


class _Source(RowSource, kw_only=True):
    dead: _Dead | None = None


class _Event(RowEvent, kw_only=True):
    source: _Source


_decode: Final = msgspec.json.Decoder(_Event).decode


class Hits:
    """The newest events of a row in a part of a partition, bounded."""

    def __init__(self) -> None:
        self.kept: deque[tuple[int, bytes]] = deque()  # by offset
        self._bytes = 0
        self.is_full = False  # older ones were dropped

    def add(self, offset: int, value: bytes) -> None:
        """Take the next event, in the partition's order."""
        self.kept.append((offset, value))
        self._bytes += len(value)
        while len(self.kept) > 1 and (len(self.kept) > MOST_HITS or self._bytes > _MOST_BYTES):
            self._bytes -= len(self.kept.popleft()[1])
            self.is_full = True


class _Side(NamedTuple):
    """How far a partition was searched: from offset `start` on, whose event was at `lsn`."""

    start: int
    lsn: LSN = LSN(0)
    ts_us: int = 0


class KeySearch:
    """One search; `run` it once. Blocks, so it runs in a thread."""

    def __init__(self, config: Config, table: str, key: str, before: str = "") -> None:
        """`before` is what an earlier answer has as `before`: the search continues there."""
        self._config, self._table, self._key = config, table, key
        self._before = _places(before)
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
        with closing(LogConsumer(config, skip_deleted=True)) as consumer:
            held = self._held(consumer, places)
            sides = {each: _Side(there.end) for each, there in held.items()}
            found = self._search(consumer, keys, held, sides)
        answer = self._answer(found, held, sides)
        # Of events between the newest of a key, compaction leaves none.
        answer["searched"]["compacted"] = resume is not None and topic in resume[0].cleanup
        return answer

    def _held(self, consumer: LogConsumer, places: set[Partition]) -> dict[Partition, Range]:
        """Return what is to be searched of each partition."""
        held = consumer.look_up(places)
        if not self._before:
            return held
        return {
            each: Range(there.start, max(there.start, min(there.end, self._before.get(each[1], 0))))
            for each, there in held.items()
        }

    def _search(
        self,
        consumer: LogConsumer,
        keys: set[bytes],
        held: Mapping[Partition, Range],
        sides: dict[Partition, _Side],
    ) -> list[bytes]:
        """Return the events found, and note in `sides` how far back they are all."""
        found = list[bytes]()
        many, until = FIRST, time.monotonic() + SECONDS
        while True:
            wanted = {
                each: Range(max(held[each].start, side.start - many), side.start)
                for each, side in sides.items()
                if side.start > held[each].start
            }
            if not wanted:
                return found
            began, was_read = time.monotonic(), self._read
            hits = self._chunk(consumer, keys, wanted, sides)
            found += [value for each in hits.values() for _, value in each.kept]
            if any(each.is_full for each in hits.values()):
                return found
            took = max(time.monotonic() - began, 0.001)
            rate = max(self._read - was_read, 1) / len(wanted) / took
            fits = int(rate * (until - time.monotonic()) / 2)
            many = min(many * _GROWTH, _MOST, fits)
            if many < _LEAST:
                return found

    def _chunk(
        self,
        consumer: LogConsumer,
        keys: set[bytes],
        wanted: dict[Partition, Range],
        sides: dict[Partition, _Side],
    ) -> dict[Partition, Hits]:
        """Return what a range of each partition has of the row, and move its side back."""
        hits = {each: Hits() for each in wanted}
        first: dict[Partition, bytes] = {}
        for partition, messages in consumer.pieces(wanted):
            self._read += len(messages)
            for message in messages:
                key, value, offset = message.key(), message.value(), message.offset()
                if value is None or offset is None:
                    continue  # a tombstone follows its delete
                first.setdefault(partition, value)
                if key in keys or (partition[1] == 0 and row_key(key) is None):
                    hits[partition].add(offset, value)
        for each, span in wanted.items():
            place = sides[each]
            if (value := first.get(each)) is not None:
                source = _decode(value).source
                place = _Side(span.start, LSN.parse(source.commit_lsn), source.ts_us)
            start = hits[each].kept[0][0] if hits[each].is_full else span.start
            sides[each] = place._replace(start=start)
        return hits

    def _answer(
        self,
        found: list[bytes],
        held: Mapping[Partition, Range],
        sides: Mapping[Partition, _Side],
    ) -> dict[str, Any]:
        left = {each: side for each, side in sides.items() if side.start > held[each].start}
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
