"""Fold slices and write what they hold to files of a base, as its commit names them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pyarrow.compute as pc

from cdc import failpoints
from lockstep.jobs.archiving.writing import write
from lockstep.jobs.compacting import layout
from lockstep.jobs.compacting.older import OlderEvents
from lockstep.jobs.compacting.past import newest_rows
from lockstep.jobs.compacting.slices import Tables

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa

    from lockstep.jobs.compacting.layout import TableCount
    from lockstep.jobs.compacting.slices import Past, Slice
    from lockstep.sinks.delta.actions import Action, Files

_TOPICS: Final = "lockstep.topics"  # the tag of a file's tables


def written(
    past: Past, files: Files, parts: Iterable[Slice]
) -> tuple[list[TableCount], list[Action]]:
    """Fold slices and write them; return what they hold, and the actions that add the files."""
    tables = Tables(past)
    older = OlderEvents(tables)
    counts: list[TableCount] = []
    actions: list[Action] = []
    for part in parts:
        rows = newest_rows(past, tables, older, part)
        counts += layout.counted(rows)
        if len(rows):
            actions.append(write_file(files, rows))
            failpoints.reach("compact_file")
    return counts, actions


def write_file(files: Files, rows: pa.Table) -> Action:
    """Write one file of a base; return the action that adds it."""
    action = write(files, rows, schema=layout.SCHEMA)
    topics = sorted(pc.unique(rows["topic"]).to_pylist())
    action["add"]["tags"][_TOPICS] = json.dumps(topics)
    return action


def topics_of(add: dict[str, Any]) -> set[str]:
    """Return the tables that a file has rows of."""
    return set(json.loads(dict(add["tags"])[_TOPICS]))
