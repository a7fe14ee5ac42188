"""Frontiers in the archive: where a base is made, and where a reader of the past ends.

A cut ends at a frontier, and may have others inside. From a base on, the ends of all partitions are
those that the cut records after it state; inside the last cut, its frontier records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdc.events import LSN
from cdc.log import names, records
from lockstep.jobs.archiving import layout as archived
from lockstep.jobs.archiving.rows import archive_topic
from lockstep.jobs.cuts.frontiers import not_above
from lockstep.sinks.contract import Applied
from lockstep.sinks.delta import lake

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from deltalake import DeltaTable

    from cdc.config import Config
    from cdc.log.partitions import Partition
    from cdc.log.records import FrontierRecord
    from lockstep.jobs.archiving.layout import CutRecord
    from lockstep.jobs.compacting.layout import BaseRecord
    from lockstep.jobs.cuts.frontiers import Position


class ArchivedFrontier(NamedTuple):
    """A frontier that the archive holds. Its records are those of cuts up to `cut`, and its seq."""

    applied: Applied
    chain: str
    cut: int
    records: Mapping[str, int]  # how many records each topic has after the base, at least


class _Frontier(NamedTuple):
    lsn: LSN
    seq: int
    committed_at_us: int


def newest(
    config: Config, table: DeltaTable, base: BaseRecord | None, wanted: Position | None = None
) -> ArchivedFrontier | None:
    """Return the newest frontier not above `wanted` and not below `base`; None if there is none.

    None, too, if the archive does not have the base's cut: the base can't be continued with it.
    """
    cuts = _cut_records(config, table, base.cut if base else 0)
    if base is not None:
        if not cuts or not _is_end(cuts[0], base):
            return None
        cuts = cuts[1:]
    fits = not_above(wanted) if wanted is not None else lambda _: True
    ends: dict[Partition, int] = dict(base.applied.end_of) if base else {}
    counts: dict[str, int] = {}
    last: CutRecord | None = None
    partial: CutRecord | None = None
    for record in cuts:
        if not fits(_Frontier(LSN.parse(record.lsn), record.seq, record.committed_at_us)):
            partial = record
            break
        last = record
        for span in record.spans:
            ends[span.topic, span.partition] = span.end
            counts[span.topic] = counts.get(span.topic, 0) + span.records
    found = None
    if last is not None:
        found = ArchivedFrontier(last.applied(by_topic(ends)), last.chain, last.number, counts)
    elif base is not None and fits(_Frontier(base.applied.lsn, base.seq, base.committed_at_us)):
        found = ArchivedFrontier(base.applied, base.chain, base.cut, counts)
    if partial is None or wanted is None:
        return found
    return _inside(config, table, partial, ends, counts, wanted) or found


def first(config: Config, table: DeltaTable) -> FrontierRecord | None:
    """Return the log's first frontier, which the first cut has; None if there is no cut."""
    return next(_records_of(config, table, 1), (None, 0))[0]


def _records_of(
    config: Config, table: DeltaTable, cut: int
) -> Iterator[tuple[FrontierRecord, int]]:
    """Yield the frontiers of a cut, each with its offset."""
    topic = names.frontier_topic(config.prefix)
    where = f"topic = {quoted(topic)} AND cut = {cut}"
    rows = lake.read(table, ["offset", "value"], where).sort_by("offset").to_pylist()
    for row in rows:
        record = records.decode(records.FrontierRecord, row["value"] or b"", topic)
        if record.pipeline == config.pipeline:
            yield record, row["offset"]


def _inside(
    config: Config,
    table: DeltaTable,
    cut: CutRecord,
    ends: dict[Partition, int],
    counts: dict[str, int],
    wanted: Position,
) -> ArchivedFrontier | None:
    """Return the newest frontier inside a cut that is not above `wanted`."""
    fits, topic, found = not_above(wanted), names.frontier_topic(config.prefix), None
    for record, offset in _records_of(config, table, cut.number):
        if not fits(record):
            break
        for name, number, end, _ in record.partitions:
            ends[name, number] = end
        place = offset + 1
        ends[topic, 0] = place
        found = record, place
    if found is None:
        return None
    record, place = found
    for span in cut.spans:
        counts[span.topic] = counts.get(span.topic, 0) + span.records
    applied = Applied(
        config.pipeline, 1, record.epoch, record.lsn, record.seq, record.committed_at_us, place,
        by_topic(ends),
    )  # fmt: skip
    return ArchivedFrontier(applied, record.chain, cut.number, counts)


def _is_end(cut: CutRecord, base: BaseRecord) -> bool:
    """Return whether a base was made at the end of that cut.

    The number alone does not identify it: an archive whose log was restored gives it to another.
    """
    return (cut.number, cut.lsn, cut.seq, cut.chain) == (base.cut, base.lsn, base.seq, base.chain)


def _cut_records(config: Config, table: DeltaTable, first: int) -> list[CutRecord]:
    """Return the records of the cuts from one on, in their order."""
    where = f"topic = {quoted(archive_topic(config.prefix))} AND cut >= {first}"
    values = lake.read(table, ["value"], where)["value"].to_pylist()
    return sorted(map(archived.decode, values), key=lambda record: record.number)


def by_topic(ends: Mapping[Partition, int]) -> dict[str, tuple[int, ...]]:
    """Return partitions' ends as a frontier has them."""
    found: dict[str, list[int]] = {}
    for (topic, number), end in sorted(ends.items()):
        known = found.setdefault(topic, [])
        known.extend([0] * (number + 1 - len(known)))
        known[number] = end
    return {topic: tuple(each) for topic, each in found.items()}


def quoted(text: str) -> str:
    """Return a text as delta-rs' SQL has it."""
    return "'" + text.replace("'", "''") + "'"
