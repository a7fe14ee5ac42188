"""The snapshot's records in the log: how they are read and written.

Reading is cheap for a daemon: when a snapshot is done its plan and ranges are deleted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from cdc.log import digests, names, reader
from cdc.log.consumer import LogConsumer
from cdc.log.records import decode, decode_key, encode
from cdc.snapshot.incremental.records import key
from cdc.snapshot.incremental.topic import entries
from cdc.snapshot.initial.records import RangeRecord, SnapshotPlan, SnapshotState, SnapshotTable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdc.config import Config
    from cdc.log.batch import Batch
    from cdc.snapshot.incremental.topic import SnapshotEntry

Record = tuple[str, bytes, bytes | None]  # topic, key, value


class InitialLog(msgspec.Struct):
    """What the log holds of the initial snapshot."""

    state: SnapshotState | None = None
    plan: SnapshotPlan | None = None  # of the state's generation, while it runs
    ranges: list[RangeRecord] = []  # of every generation
    keys: list[bytes] = []  # of all its records but the state

    def done(self, plan: SnapshotPlan) -> dict[tuple[str, int, int], RangeRecord]:
        """Return the records of what is in the log of the plan, by part, table and number."""
        return {
            (each.part, each.table, each.number): each
            for each in self.ranges
            if each.generation == plan.generation
        }

    @property
    def events(self) -> dict[tuple[str, int], int]:
        """How many events of all generations each topic partition holds."""
        counts: dict[tuple[str, int], int] = {}
        for each in self.ranges:
            for topic, partition, events in each.ends:
                counts[topic, partition] = counts.get((topic, partition), 0) + events
        return counts

    @property
    def blocks(self) -> tuple[tuple[int, int, int], ...]:
        """The seqs of each Kafka transaction of all generations: those of equal size together."""
        runs: list[tuple[int, int, int]] = []
        for each in self._by_seq():
            if runs:
                first, seqs, count = runs[-1]
                if seqs == each.seqs and first + seqs * count == each.first_seq:
                    runs[-1] = (first, seqs, count + 1)
                    continue
            runs.append((each.first_seq, each.seqs, 1))
        return tuple(runs)

    @property
    def digests(self) -> dict[tuple[str, int], str] | None:
        """The digest of each topic partition; None where an older version has written a range."""
        if any(len(each.digests) != len(each.ends) for each in self.ranges):
            return None
        found: dict[tuple[str, int], bytes] = {}
        for each in self._by_seq():
            for (topic, partition, _), chunk in zip(each.ends, each.digests, strict=True):
                before = found.get((topic, partition), digests.START)
                found[topic, partition] = digests.fold(before, digests.decoded(chunk))
        return {place: digests.encoded(digest) for place, digest in found.items()}

    def _by_seq(self) -> list[RangeRecord]:
        return sorted(self.ranges, key=lambda each: each.first_seq)


def digests_of(batch: Batch) -> tuple[str, ...]:
    """Return the digests of what a batch has, in the order in which `close` returns it."""
    return tuple(map(digests.encoded, batch.digests().values()))


def read(config: Config) -> InitialLog:
    """Return what the log holds now; nothing where there is no such topic."""
    topic = names.snapshot_topic(config.prefix)
    known = InitialLog()
    plans: dict[int, SnapshotPlan] = {}
    tables: dict[int, dict[int, SnapshotTable]] = {}
    for entry, at, value in entries(config):
        match at.get("part"):
            case "state":
                known.state = decode(SnapshotState, value, topic)
                continue
            case "plan":
                plans[at["generation"]] = decode(SnapshotPlan, value, topic)
            case "table":
                table = decode(SnapshotTable, value, topic)
                tables.setdefault(at["generation"], {})[at["table"]] = table
            case "range":
                known.ranges.append(decode(RangeRecord, value, topic))
            case _:
                continue  # of an incremental snapshot
        known.keys.append(entry)
    if known.state is not None and known.state.stage == "running":
        generation = known.state.generation
        known.plan = _complete(config, plans[generation], tables.get(generation, {}))
    return known


def read_state(config: Config) -> SnapshotState | None:
    """Return the state of the initial snapshot; None of a pipeline that has none."""
    return state_in(config, entries(config))


def state_in(config: Config, found: Iterable[SnapshotEntry]) -> SnapshotState | None:
    """Return the state among entries of the snapshots' topic; None where there is none."""
    topic = names.snapshot_topic(config.prefix)
    states = (each.value for each in found if each.fields.get("part") == "state")
    return next((decode(SnapshotState, value, topic) for value in states), None)


def state_record(config: Config, state: SnapshotState) -> Record:
    """Return topic, key and value of the state."""
    return names.snapshot_topic(config.prefix), key(config.pipeline, "state"), encode(state)


def plan_records(config: Config, plan: SnapshotPlan) -> list[Record]:
    """Return the records of a plan, without its table versions."""
    topic, generation = names.snapshot_topic(config.prefix), plan.generation
    head = encode(replace(plan, tables=(), schemas={}))
    written: list[Record] = [(topic, key(config.pipeline, "plan", generation=generation), head)]
    for number, table in enumerate(plan.tables):
        at = key(config.pipeline, "table", generation=generation, table=number)
        written.append((topic, at, encode(table)))
    return written


def range_record(config: Config, record: RangeRecord) -> Record:
    """Return topic, key and value of a finished range."""
    generation, table, number = record.generation, record.table, record.number
    fields = {"generation": generation, "of": record.part, "table": table, "number": number}
    at = key(config.pipeline, "range", **fields)
    return names.snapshot_topic(config.prefix), at, encode(record)


def _complete(config: Config, head: SnapshotPlan, tables: dict[int, SnapshotTable]) -> SnapshotPlan:
    wanted = {each.schema_id for each in tables.values()} | {g.schema_id for g in head.stale}
    schemas = {s.schema_id: s for s in reader.read_schemas(config) if s.schema_id in wanted}
    ordered = tuple(tables[number] for number in sorted(tables))
    return replace(head, tables=ordered, schemas=schemas)


class RangeTail:
    """Reads the ranges of a generation as they are recorded, starting at the end of the topic."""

    def __init__(self, config: Config, generation: int) -> None:
        self._topic = names.snapshot_topic(config.prefix)
        self._generation = generation
        self._consumer = LogConsumer(config)
        self._consumer.assign(reader.end_offsets(config, [(self._topic, 0)]))

    def take(self) -> list[RangeRecord]:
        """Return those that have arrived, without waiting."""
        found = []
        for message in self._consumer.arrivals(0):
            at = decode_key(message.key(), self._topic)
            value = message.value()
            if value and at.get("part") == "range" and at.get("generation") == self._generation:
                found.append(decode(RangeRecord, value, self._topic))
        return found

    def close(self) -> None:
        self._consumer.close()
