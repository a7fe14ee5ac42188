"""Make a generation's plan from what the snapshot shows, and write it to the log.

The table versions are made here as the daemon makes them from relation messages, so that it finds
them at the first change and makes no others. Topics are created where they are missing. Plan, table
versions, state and the truncates of keyless tables go into the log in one Kafka transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdc.events import TRUNCATE_KEY
from cdc.log import cleanup, digests, names, reader, topics
from cdc.log import records as log_records
from cdc.log.batch import Batch
from cdc.publication.column_identity import hides_something
from cdc.sequence.relations import Relations
from cdc.snapshot.initial import topic
from cdc.snapshot.initial.leftovers import truncate_event
from cdc.snapshot.initial.plan import Seqs, cut, keyless, stale_partitions, version
from cdc.snapshot.initial.records import RangeRecord, SnapshotPlan, SnapshotTable
from cdc.source.described import DescribedTable, describe_tables, moment
from cdc.source.lookups import look_up_column_numbers
from cdc.source.pinned import connect_for_rows, pinned
from cdc.source.publications import read_pinned

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.log.publisher import Publisher
    from cdc.log.records import ResumeIdentity, ResumePosition, SchemaRecord
    from cdc.snapshot.initial.records import SnapshotState
    from cdc.source.connection import Connection
    from cdc.source.export import Export


class Planned(NamedTuple):
    """A plan, and what goes into the log with it."""

    plan: SnapshotPlan
    versions: list[SchemaRecord]  # the new ones
    truncated: list[tuple[SchemaRecord, int]]  # with the seq of each


def plan(
    config: Config,
    export: Export,
    state: SnapshotState,
    known: topic.InitialLog,
    resume: tuple[ResumeIdentity, ResumePosition],
) -> Planned:
    """Return the plan of the state's generation. Blocks."""
    with connect_for_rows(config) as sql, pinned(sql, export.snapshot):
        shown, publication = moment(sql), read_pinned(sql, config.publication)
        described = _numbered(config, sql, list(describe_tables(sql, config.publication)))
    identity, position = resume
    schema_topic = reader.read_schema_topic(config)
    schemas = schema_topic.versions()
    newest_id = max([position.schema_id, *(schema.schema_id for schema in schemas)])
    relations = Relations(config.prefix, schemas, newest_id, schema_topic.column_numbers())
    found = [(table, *version(config, relations, table, export.lsn)) for table in described]
    versions = [schema for _, schema, new in found if new]
    partitions = _partitions(config, identity, [schema for _, schema, _ in found])
    first_seq = max(position.seq + 1, state.next_seq)
    seqs = Seqs(first_seq)
    older, every = known.events, [*schemas, *versions]
    truncated = [(schema, seqs.take(1)) for schema in keyless(older, every)]
    tables: list[SnapshotTable] = []
    # The small ones first: a table that is truncated every minute is small, and is then copied
    # soon.
    for table, schema, _ in sorted(found, key=lambda each: sum(h.bytes for h in each[0].heaps)):
        tables += cut(config, table, schema, partitions[schema.topic], shown.block_size, seqs)
    deleted = stale_partitions(older, every, seqs)
    used = {t.schema_id for t in tables} | {g.schema_id for g in deleted}
    return Planned(
        SnapshotPlan(
            pipeline=config.pipeline,
            generation=state.generation,
            token=state.token,
            epoch=identity.epoch,
            database=identity.database,
            publication=publication,
            snapshot=export.snapshot,
            lsn=export.lsn,
            taken_at_us=shown.now_us,
            tasks=config.snapshot.max_parallel,
            first_seq=first_seq,
            next_seq=seqs.next,
            stale=tuple(deleted),
            tables=tuple(tables),
            schemas={each.schema_id: each for each in every if each.schema_id in used},
        ),
        versions,
        truncated,
    )


def write(config: Config, publisher: Publisher, state: SnapshotState, planned: Planned) -> None:
    """Write the plan, and all that belongs to it, to the log. Blocks."""
    plan, batch = planned.plan, Batch()
    records: list[topic.Record] = [topic.state_record(config, state)]
    records += topic.plan_records(config, plan)
    for schema in planned.versions:
        schema_key = log_records.schema_key(schema.schema_id)
        records.append((names.schema_topic(config.prefix), schema_key, log_records.encode(schema)))
    for number, (schema, seq) in enumerate(planned.truncated):
        event = truncate_event(config, plan, schema, seq)
        key = TRUNCATE_KEY if cleanup.is_compacted(config, schema) else None
        batch.topic(schema.topic, 1)[0].append({"key": key, "value": event})
        done = RangeRecord(
            generation=plan.generation, part="truncate", table=number, number=0, rows=1, bytes=0,
            ends=((schema.topic, 0, 1),), seconds=0.0, first_seq=seq, seqs=1,
            digests=(digests.of_record(key, event),),
        )  # fmt: skip
        records.append(topic.range_record(config, done))
    publisher.begin()
    publisher.produce(batch)
    for record in records:
        publisher.add(*record)
    publisher.commit()


def _numbered(
    config: Config, sql: Connection, tables: list[DescribedTable]
) -> list[DescribedTable]:
    """Return the tables with their columns' numbers, where they may hide a column."""
    hiding = [
        table.oid
        for table in tables
        if hides_something(
            config.selection.of((table.schema, table.name), *table.published.ancestors)
        )
    ]
    numbers = look_up_column_numbers(sql, config.publication, hiding) if hiding else {}
    return [
        table._replace(facts=table.facts._replace(numbers=numbers.get(table.oid)))
        for table in tables
    ]


def _partitions(
    config: Config, identity: ResumeIdentity, schemas: list[SchemaRecord]
) -> dict[str, int]:
    """Return the partition count of each topic; create those that are missing."""
    cleanup.expect_keys(config, schemas)
    wanted = [topics.data_topic(config, schema.schema, schema.table) for schema in schemas]
    described_ = topics.ensure(topics.admin(config), config, wanted)
    counts = {name: found.partitions for name, found in described_.items()}
    return counts | {name: n for name, n in identity.partitions.items() if name in counts}
