"""The snapshot's records in the log: how they are read and written.

Reading is cheap for a daemon: when a snapshot is done its plan and ranges are deleted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from cdc.log import names, reader
from cdc.log import records as log_records
from cdc.snapshot.initial import records
from cdc.snapshot.initial.records import Plan, PlannedTable, RangeRecord, SnapshotState

if TYPE_CHECKING:
    from cdc.config import Config

Record = tuple[str, bytes, bytes | None]  # topic, key, value


@dataclass(slots=True)
class Known:
    """What the log holds of the initial snapshot."""

    state: SnapshotState | None = None
    plan: Plan | None = None  # of the state's generation, while it runs
    ranges: list[RangeRecord] = field(default_factory=list)  # of every generation
    keys: list[bytes] = field(default_factory=list)  # of all its records but the state

    def done(self, plan: Plan) -> dict[tuple[str, int, int], RangeRecord]:
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


def read(config: Config) -> Known:
    """Return what the log holds now; nothing where there is no such topic."""
    topic = names.snapshot_topic(config.prefix)
    newest: dict[bytes, bytes] = {}
    for message in reader.read_if_there(config, topic):
        newest[message.key() or b""] = message.value() or b""
    known = Known()
    plans: dict[int, Plan] = {}
    tables: dict[int, dict[int, PlannedTable]] = {}
    for key, value in newest.items():
        at: dict[str, Any] = msgspec.json.decode(key)
        if not value or at.get("pipeline") != config.pipeline:
            continue
        match at.get("part"):
            case "state":
                known.state = log_records.decode(SnapshotState, value, topic)
                continue
            case "plan":
                plans[at["generation"]] = log_records.decode(Plan, value, topic)
            case "table":
                table = log_records.decode(PlannedTable, value, topic)
                tables.setdefault(at["generation"], {})[at["table"]] = table
            case "range":
                known.ranges.append(log_records.decode(RangeRecord, value, topic))
            case _:
                continue  # of an incremental snapshot
        known.keys.append(key)
    if known.state is not None and known.state.stage == "running":
        generation = known.state.generation
        known.plan = _whole(config, plans[generation], tables.get(generation, {}))
    return known


def read_state(config: Config) -> SnapshotState | None:
    """Return the state of the initial snapshot; None of a pipeline that has none."""
    return read(config).state


def state_record(config: Config, state: SnapshotState) -> Record:
    """Return topic, key and value of the state."""
    key = records.state_key(config.pipeline)
    return names.snapshot_topic(config.prefix), key, log_records.encode(state)


def plan_records(config: Config, plan: Plan) -> list[Record]:
    """Return the records of a plan, without its table versions."""
    topic, pipeline = names.snapshot_topic(config.prefix), config.pipeline
    head = log_records.encode(replace(plan, tables=(), schemas={}))
    written: list[Record] = [(topic, records.plan_key(pipeline, plan.generation), head)]
    for number, table in enumerate(plan.tables):
        key = records.table_key(pipeline, plan.generation, number)
        written.append((topic, key, log_records.encode(table)))
    return written


def range_record(config: Config, record: RangeRecord) -> Record:
    """Return topic, key and value of a finished range."""
    key = records.range_key(config.pipeline, record)
    return names.snapshot_topic(config.prefix), key, log_records.encode(record)


def forgotten(config: Config, known: Known) -> list[Record]:
    """Return the tombstones that delete all but the state, once the snapshot is done."""
    topic = names.snapshot_topic(config.prefix)
    return [(topic, key, None) for key in known.keys]


def _whole(config: Config, head: Plan, tables: dict[int, PlannedTable]) -> Plan:
    wanted = {each.schema_id for each in tables.values()} | {g.schema_id for g in head.gone}
    schemas = {s.schema_id: s for s in reader.read_schemas(config) if s.schema_id in wanted}
    ordered = tuple(tables[number] for number in sorted(tables))
    return replace(head, tables=ordered, schemas=schemas)


class Following:
    """Reads the ranges of a generation as they are recorded, starting at the end of the topic."""

    def __init__(self, config: Config, generation: int) -> None:
        self._topic = names.snapshot_topic(config.prefix)
        self._generation = generation
        self._client = reader.consumer(config)
        end = reader.end_offsets(config, [(self._topic, 0)])[self._topic, 0]
        reader.assign(self._client, self._topic, 0, end)

    def take(self) -> list[RangeRecord]:
        """Return those that have arrived, without waiting."""
        found = []
        for message in reader.waiting(self._client):
            at: dict[str, Any] = msgspec.json.decode(message.key() or b"{}")
            value = message.value()
            if value and at.get("part") == "range" and at.get("generation") == self._generation:
                found.append(log_records.decode(RangeRecord, value, self._topic))
        return found

    def close(self) -> None:
        """Close the client."""
        self._client.close()
