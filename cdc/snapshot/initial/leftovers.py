"""Delete what an older generation put into the log and this one does not have.

An initial snapshot that starts again reads the tables at a later moment. Rows may have been deleted
by then, and no change in the stream reports that, since the stream starts after it. So every key of
a topic partition whose newest event is an older generation's row, and that has no row in this
generation, is deleted here: `op` d and a tombstone, with seqs after all rows. Where the topic got
more partitions between the two, this generation's row of a key is in another partition: that
partition is searched before the key counts as deleted.

Keys are read in slices of their hashes, one pass over the partition each, so that memory is bounded
for any number of keys. Run again after a crash, this does what is left: deletes that it has already
written are events like others.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final

import msgspec

from cdc import failpoints
from cdc.encode.compiler import FunctionText
from cdc.encode.partition import partition_of
from cdc.log import reader
from cdc.log.batch import Batch
from cdc.snapshot.initial import topic
from cdc.snapshot.initial.records import RangeRecord
from cdc.snapshot.initial.rows import transaction

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config
    from cdc.log.publisher import Publisher
    from cdc.log.records import SchemaRecord
    from cdc.snapshot.initial.records import SnapshotPlan, StalePartition

# How many keys are held at a time: some hundred bytes each.
_KEYS: Final = 1_000_000
# How many deletes a Kafka transaction has at most: it may stay open for a minute.
DELETES: Final = 50_000


class _Source(msgspec.Struct):
    seq: int


class _Event(msgspec.Struct):
    op: str
    source: _Source


_decode: Final = msgspec.json.Decoder(_Event).decode


class LeftoverDeletes:
    """The deletes of one topic partition; `index` is its index in `plan.stale`."""

    def __init__(
        self, config: Config, plan: SnapshotPlan, index: int, publisher: Publisher
    ) -> None:
        """Delete by `publisher`, which is open."""
        self._config, self._plan, self._index = config, plan, index
        self._publisher = publisher
        self._stale: StalePartition = plan.stale[index]
        self._event = event_format_of(
            config, plan, plan.schemas[self._stale.schema_id], b"%b", b"d"
        )

    def run(self, done: list[RangeRecord]) -> Iterator[RangeRecord]:
        """Write what is missing; yield the record of each Kafka transaction. Blocks.

        `done` are the records that the log already has.
        """
        number, written = len(done), sum(each.rows for each in done)
        for keys in self._batches():
            yield self._delete(keys, number, self._stale.first_seq + written)
            number, written = number + 1, written + len(keys)

    def _batches(self) -> Iterator[list[bytes]]:
        passes = -(-self._stale.events // _KEYS)
        for turn in range(passes):
            keys = self.left(passes, turn)
            for at in range(0, len(keys), DELETES):
                yield keys[at : at + DELETES]

    def left(self, passes: int, turn: int) -> list[bytes]:
        """Return the keys of one slice that are to be deleted, in the log's order."""
        old: dict[bytes, None] = {}
        now: set[bytes] = set()
        place = self._stale.topic, self._stale.partition
        for key, value in reader.read_partition(self._config, *place):
            if key is None or value is None or zlib.crc32(key) % passes != turn:
                continue
            event = _decode(value)
            if event.op == "d":
                old.pop(key, None)
            elif event.source.seq >= self._plan.first_seq:
                now.add(key)
            else:
                old[key] = None
        left = [key for key in old if key not in now]
        there = self._elsewhere(left)
        return [key for key in left if key not in there]

    def _elsewhere(self, keys: list[bytes]) -> set[bytes]:
        """Return those of the keys that have a row of this generation in another partition."""
        topic_, number = self._stale.topic, self._stale.partition
        topics = ((self._plan.schemas[each.schema_id].topic, each) for each in self._plan.tables)
        count = next((each.partitions for name, each in topics if name == topic_), 0)
        wanted: dict[int, set[bytes]] = {}
        for key in keys if count else ():
            if (home := partition_of(key, count)) != number:
                wanted.setdefault(home, set()).add(key)
        found: set[bytes] = set()
        for home, mine in wanted.items():
            for read, value in reader.read_partition(self._config, topic_, home):
                if read is None or read not in mine or value is None:
                    continue
                event = _decode(value)
                if event.op != "d" and event.source.seq >= self._plan.first_seq:
                    found.add(read)
        return found

    def _delete(self, keys: list[bytes], number: int, seq: int) -> RangeRecord:
        place = self._stale
        batch = Batch(digests=True)
        partition = batch.topic(place.topic, place.partition + 1)[place.partition]
        for at, key in enumerate(keys):
            # The key's own bytes are its columns in JSON: as the old row of a DEFAULT identity.
            partition.append({"key": key, "value": self._event % (key, 0, seq + at)})
            partition.append({"key": key, "value": None})
        partition.others = len(keys)
        self._publisher.produce(batch)
        hashed, counts = topic.digests_of(batch), batch.close()
        record = RangeRecord(
            generation=self._plan.generation,
            part="gone",
            table=self._index,
            number=number,
            rows=len(keys),
            bytes=0,
            ends=tuple((*at, events) for at, events in counts.items()),
            seconds=0.0,
            first_seq=seq,
            seqs=len(keys),
            digests=hashed,
        )
        self._publisher.add(*topic.range_record(self._config, record))
        self._publisher.commit()
        failpoints.reach("after_leftovers")
        return record


def truncate_event(config: Config, plan: SnapshotPlan, schema: SchemaRecord, seq: int) -> bytes:
    """Return the truncate that removes an older generation's rows of a keyless table."""
    return event_format_of(config, plan, schema, b"null", b"t") % (0, seq)


def event_format_of(
    config: Config, plan: SnapshotPlan, schema: SchemaRecord, before: bytes, op: bytes
) -> bytes:
    """Return an event's format that takes ordinal and seq, after `before` where that is open."""
    tx, times = transaction(plan.epoch, plan.lsn, plan.taken_at_us)
    source = FunctionText(schema, plan.database, config.prefix)
    return source.event_format(
        before, b"null", op, unchanged=b"", snapshot="true", tx=tx, lsn=b"%d" % plan.lsn,
        times=times,
    )  # fmt: skip
