"""Fold slices and write what they hold to files of a base, as its commit names them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from cdc import failpoints
from lockstep.jobs.archiving.writing import write
from lockstep.jobs.compacting import layout, runs
from lockstep.jobs.compacting.older import OlderEvents
from lockstep.jobs.compacting.past import newest_rows
from lockstep.jobs.compacting.slices import PastTables

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from lockstep.jobs.compacting.slices import Past, Slice
    from lockstep.sinks.delta.actions import Action, Files


def written(past: Past, files: Files, parts: Iterable[Slice]) -> list[Action]:
    """Fold slices and write them; return the actions that add the files."""
    assert past.merging is not None, "a compaction folds them"
    tables = PastTables(past)
    older = OlderEvents(tables)
    actions: list[Action] = []
    for part in parts:
        rows = newest_rows(past, tables, older, part)
        for its in _by_unit(rows, past.merging.partly):
            actions.append(write_file(files, its, past.merging.run))
            failpoints.reach("compact_file")
    return actions


def _by_unit(rows: pa.Table, units: Mapping[str, str]) -> Iterator[pa.Table]:
    """Yield the rows of each unit, so that a file joins no units; others become one."""
    found: dict[str, list[str]] = {}
    for topic in pc.unique(rows["topic"]).to_pylist():
        found.setdefault(units.get(topic, ""), []).append(topic)
    if len(found) == 1:  # as it is in all large tables: nothing is copied
        yield rows
        return
    for topics in found.values():
        yield rows.filter(pc.is_in(rows["topic"], value_set=pa.array(topics, pa.string())))


def write_file(files: Files, rows: pa.Table, run: int) -> Action:
    """Write one file of a base; return the action that adds it."""
    action = write(files, rows, schema=layout.SCHEMA)
    action["add"]["tags"] |= runs.tags(layout.counted(rows), run)
    return action
