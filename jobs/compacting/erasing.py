"""Erase records from bases: the newest gets a successor without them, and older ones go.

The successor has the same frontier; its counts and digests are those of the rows that are left, as
the fold of the erased archive has them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from cdc import failpoints
from lockstep.jobs.archiving.erasing import TRIES, delete_replaced
from lockstep.jobs.compacting import layout
from lockstep.jobs.compacting.bases import bases_of
from lockstep.jobs.compacting.runs import BaseFile
from lockstep.jobs.compacting.writing import write_file
from lockstep.sinks.delta import lake
from lockstep.sinks.delta.lake import ConflictError

if TYPE_CHECKING:
    from cdc.config import Config
    from lockstep.jobs.archiving.erasing import Place
    from lockstep.jobs.compacting.bases import Bases
    from lockstep.jobs.compacting.layout import BaseRecord, TableCount
    from lockstep.sinks.delta.actions import Action


def erase(config: Config, erased: set[Place]) -> list[str]:
    """Erase the records at these places; return files that can't be read, as `delete_replaced`."""
    bases = bases_of(config)
    if not bases.find():
        return []
    for _ in range(TRIES):
        try:
            if bases.newest() is None:  # the first one may be made of the archive as it was
                bases.outdate()
                return delete_replaced(bases, erased)
            _replace(bases, erased)
            failpoints.reach("erase_base")
            bases.find()
            bases.forget_versions(lambda: _commit(bases, [], (), set(bases.added())))
        except (ConflictError, FileNotFoundError):  # another erasure has deleted a listed file
            bases.find()
            continue
        return delete_replaced(bases, erased)
    raise lake.busy(bases.path)


def _replace(bases: Bases, erased: set[Place]) -> None:
    """Make a base without the records, unless the newest has none of them."""
    topics = {topic for topic, *_ in erased}
    kept: set[str] = set()
    actions: list[Action] = []
    removed: list[TableCount] = []
    for path, add in bases.added().items():
        file = BaseFile.of(add)
        rows = _rows(bases, path) if topics & file.topics else None
        mask = rows and _mask(rows, erased)
        if rows is None or mask is None or not mask.true_count:
            kept.add(path)
            continue
        removed += layout.counted(rows.filter(mask))
        left = rows.filter(pa.array([not each for each in mask.to_pylist()]))
        if len(left):
            actions.append(write_file(bases.files, left, file.run))
    if removed:
        _commit(bases, actions, removed, kept)


def _rows(bases: Bases, path: str) -> pa.Table:
    data = pa.BufferReader(bases.files.read(path))
    return pq.read_table(data, page_checksum_verification=True).cast(layout.SCHEMA)


def _mask(rows: pa.Table, erased: set[Place]) -> pa.BooleanArray:
    places = zip(
        *(rows[name].to_pylist() for name in ("topic", "partition", "offset")), strict=True
    )
    return pa.array([place in erased for place in places], pa.bool_())


def _commit(
    bases: Bases, actions: list[Action], removed: list[TableCount] | tuple[()], kept: set[str]
) -> None:
    base = bases.newest()
    assert base is not None, "the caller has found one"
    bases.commit(_successor(bases, base, removed), actions, kept)


def _successor(bases: Bases, base: BaseRecord, removed: list[TableCount] | tuple[()]) -> BaseRecord:
    return replace(
        base,
        number=bases.table.version() + 1,
        tables=layout.without(base.tables, removed),
        previous=layout.digest(base),
        made_at_us=time.time_ns() // 1_000,
    )
