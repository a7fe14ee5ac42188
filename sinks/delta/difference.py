"""The rows that differ between two versions of a table, by the commits between them.

Each file that a commit names has a first and a last set of rows: those at the earlier version, or
at its creation, and those at the later version, or at its removal. A file that was created from
changes had no rows before, and one that changes removed has none afterwards; but a commit that only
rearranges rows (`dataChange` false, as OPTIMIZE) changes neither. The rows in only one of a file's
two sets differ, unless an equal row is in another file: so only changed rows are read, and the cost
follows the changes, however large the table is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lockstep.sinks.delta import lake, log, roaring

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deltalake import DeltaTable
    from pyarrow.fs import PyFileSystem


@dataclass(slots=True)
class _File:
    """A file that a commit names, between its creation and its removal.

    Its rows are all but those in the deletion vector; None: it has none.
    """

    path: str
    first: Mapping[str, Any] | None
    last: Mapping[str, Any] | None


class Difference(NamedTuple):
    """Rows of the earlier version and rows of the later one; equal ones may be in both."""

    before: pa.Table
    after: pa.Table


def between(before: DeltaTable, after: DeltaTable, columns: Sequence[str]) -> Difference | None:
    """Return columns of the rows that differ; None if the commits do not show them.

    They do not if the log or a file between the two versions was deleted, or if what is in a file
    is not what readers see: the schema has changed, or columns are mapped or are in no file.
    """
    about = after.metadata()
    if (
        before.metadata().id != about.id
        or before.schema() != after.schema()
        or about.partition_columns
        or lake.is_mapped(after)
    ):
        return None
    storage = log.files(after)
    there = [field.name for field in after.schema().fields if field.name in set(columns)]
    schema = lake.arrow_schema(after, there)
    sides: tuple[list[pa.Table], list[pa.Table]] = ([schema.empty_table()], [schema.empty_table()])
    try:
        for file in _files(storage, before.version(), after.version()):
            for side, rows in zip(sides, _rows(storage, file), strict=True):
                if rows is not None:
                    side.append(_read(storage, file.path, rows, schema))
    except FileNotFoundError:
        return None
    return Difference(*map(pa.concat_tables, sides))


def _files(storage: PyFileSystem, first: int, last: int) -> list[_File]:
    """Return the files that the commits after version `first` name; raise FileNotFoundError."""
    open_, done = dict[str, _File](), list[_File]()
    for version in range(first + 1, last + 1):
        with storage.open_input_file(f"_delta_log/{version:020d}.json") as commit:
            actions = [json.loads(line) for line in commit.read().splitlines() if line.strip()]
        added = {each["add"]["path"]: each["add"] for each in actions if "add" in each}
        removed = {each["remove"]["path"]: each["remove"] for each in actions if "remove" in each}
        for path, remove in removed.items():
            file = open_.pop(path, None) or _File(path, _vector(remove), _vector(remove))
            if path in added:
                file.last = _vector(added[path])
                open_[path] = file
                continue
            if remove["dataChange"]:
                file.last = None
            done.append(file)
        for path, add in added.items():
            if path not in removed:
                began = None if add["dataChange"] else _vector(add)
                open_.setdefault(path, _File(path, began, None)).last = _vector(add)
    return done + list(open_.values())


def _vector(action: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = action.get("deletionVector") or {}
    return found


class _Positions(NamedTuple):
    """Some rows of a file: those with these numbers, or all others."""

    numbers: pa.Array
    others: bool


def _rows(storage: PyFileSystem, file: _File) -> tuple[_Positions | None, _Positions | None]:
    """Return the rows in the first set only and those in the last only; None if there are none."""
    if file.first == file.last:
        return None, None
    first, last = (
        None if vector is None else roaring.deleted_rows(storage, vector)
        for vector in (file.first, file.last)
    )
    if first is None or last is None:
        return (
            None if first is None else _Positions(first, others=True),
            None if last is None else _Positions(last, others=True),
        )
    deleted = last.filter(pc.invert(pc.is_in(last, value_set=first)))
    back = first.filter(pc.invert(pc.is_in(first, value_set=last)))
    return (
        _Positions(deleted, others=False) if len(deleted) else None,
        _Positions(back, others=False) if len(back) else None,
    )


def _read(storage: PyFileSystem, path: str, rows: _Positions, schema: pa.Schema) -> pa.Table:
    """Return rows of a file; columns that it lacks are NULL."""
    parts = [schema.empty_table()]
    with (
        storage.open_input_file(unquote(path)) as data,
        pq.ParquetFile(data, coerce_int96_timestamp_unit="us") as file,
    ):
        names, begin = set(file.schema_arrow.names), 0
        columns = [name for name in schema.names if name in names]
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            numbers = rows.numbers.filter(
                pc.and_(pc.greater_equal(rows.numbers, begin), pc.less(rows.numbers, begin + count))
            )
            if rows.others or len(numbers):
                numbers = pc.subtract(numbers, begin)
                found = lake.under(file.read_row_group(group, columns=columns), schema)
                if rows.others:
                    every = pa.arange(0, count)
                    numbers = every.filter(pc.invert(pc.is_in(every, value_set=numbers)))
                parts.append(found.take(numbers))
            begin += count
    return pa.concat_tables(parts)
