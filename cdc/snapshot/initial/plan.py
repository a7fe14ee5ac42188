"""Divide what is published into ranges, each with the seqs of its rows.

Pure. A heap is divided by pages: a page holds a limited number of rows, so each range has a block
of seqs that is known before anything is read, and no two ranges share a seq. A relation that is no
heap is copied as one range. What an older generation put into the log and this one may not have
comes last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cdc.errors import ConfigError, RewrittenError
from cdc.sequence.relation_request import RelationRequest
from cdc.snapshot.initial.records import UNKNOWN_CAPACITY, SnapshotTable, StalePartition

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdc.config import Config
    from cdc.events import LSN
    from cdc.log.records import SchemaRecord
    from cdc.sequence.relations import Relations
    from cdc.source.described import DescribedTable, Heap

# A page's header takes 24 bytes; a row takes at least its header, aligned, and its line pointer.
_PAGE_HEADER: Final = 24
_LEAST_ROW: Final = 28


class Seqs:
    """Allocates consecutive blocks of seqs."""

    def __init__(self, first: int) -> None:
        self.next = first

    def take(self, capacity: int) -> int:
        """Return the first seq of a block."""
        first, self.next = self.next, self.next + capacity
        return first


def version(
    config: Config, relations: Relations, table: DescribedTable, lsn: LSN
) -> tuple[SchemaRecord, bool]:
    """Return the version that the daemon will find at the first change, and whether it is new."""
    selection = config.selection.of((table.schema, table.name), *table.published.ancestors)
    request = RelationRequest(
        table.relation, table.facts, table.types, lsn, table.published, selection, config.values
    )
    return relations.version(request, replaying=False)


def cut(
    config: Config,
    table: DescribedTable,
    schema: SchemaRecord,
    partitions: int,
    block_size: int,
    seqs: Seqs,
) -> list[SnapshotTable]:
    """Return the relations to copy for a published table; none where it has no pages.

    `block_size` is that of the server's pages.

    Raises RewrittenError where one was rewritten or dropped since the snapshot, and ConfigError
    where one holds rows whose changes no stream carries.
    """
    rows_per_page = (block_size - _PAGE_HEADER) // _LEAST_ROW  # MaxHeapTuplesPerPage
    pages_per_range = max(1, config.snapshot.range_bytes // block_size)
    planned = []
    for heap in table.heaps:
        own = (heap.schema, heap.name)  # a partition may have a section of its own
        chosen = config.selection.of(own, (table.schema, table.name), *table.published.ancestors)
        if chosen.snapshot == "none":
            continue
        _check(table, heap)
        is_heap = heap.access_method == "heap"
        count = heap.bytes // block_size
        if chosen.snapshot == "direct":
            count = max(1, count)  # an empty table's copy is to be emptied too
        if is_heap and not count:
            continue
        capacity = count * rows_per_page if is_heap else UNKNOWN_CAPACITY
        names = tuple(column.name for column in table.columns)
        planned.append(
            SnapshotTable(
                schema_id=schema.schema_id,
                partitions=partitions,
                relation_id=heap.oid,
                relation=heap.quoted,
                filenode=heap.filenode,
                outputs=table.outputs,
                columns=names,
                attnums=tuple(heap.attnums[name] for name in names),
                where=_both(table.published.where, chosen.snapshot_where),
                kind="direct" if chosen.snapshot == "direct" else "log",
                pages=count if is_heap else None,
                pages_per_range=pages_per_range if is_heap else 0,
                rows_per_page=rows_per_page if is_heap else 0,
                first_seq=seqs.take(capacity),
                rows=heap.rows,
                bytes=heap.bytes,
            )
        )
    return planned


def stale_partitions(
    events: dict[tuple[str, int], int], every: Iterable[SchemaRecord], seqs: Seqs
) -> list[StalePartition]:
    """Return the topic partitions that hold keyed rows of older generations.

    `events` counts those; where `every`, oldest first, has several versions of a topic, the last is
    used.
    """
    every = list(every)
    schemas = {schema.topic: schema for schema in every}
    cleared = {schema.topic for schema in keyless(events, every)}
    return [
        StalePartition(
            schema_id=schemas[topic].schema_id,
            topic=topic,
            partition=partition,
            events=count,
            first_seq=seqs.take(count),
        )
        for (topic, partition), count in sorted(events.items())
        if count and topic in schemas and topic not in cleared
    ]


def keyless(
    events: dict[tuple[str, int], int], every: Iterable[SchemaRecord]
) -> list[SchemaRecord]:
    """Return the newest version of each table of which older generations may have keyless rows."""
    versions: dict[str, list[SchemaRecord]] = {}
    for schema in every:
        versions.setdefault(schema.topic, []).append(schema)
    topics = sorted({topic for (topic, _), count in events.items() if count})
    return [
        versions[topic][-1]
        for topic in topics
        if any(not schema.key for schema in versions.get(topic, ()))
    ]


def _check(table: DescribedTable, heap: Heap) -> None:
    if heap.kind != "r" or heap.persistence != "p":
        kind = "a foreign table" if heap.kind == "f" else "not logged"
        raise ConfigError(
            f"{heap}, a partition of {table}, is {kind}: its changes are in no stream, so its rows"
            " would be in the log for ever",
            hint=f'detach it; or tables."{heap}".snapshot: none',
        )
    if heap.filenode != heap.filenode_now:
        what = "dropped" if heap.filenode_now is None else "rewritten"
        raise RewrittenError(f"{heap} was {what} since the snapshot was taken")


def _both(one: str | None, other: str | None) -> str | None:
    if one is None or other is None:
        return one or other
    return f"({one}) AND ({other})"
