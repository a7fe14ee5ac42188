"""The rows that differ between two versions of a table, by the commits between them.

Each file that a commit names has a first and a last set of rows: those at the earlier version, or
at its creation, and those at the later version, or at its removal. A file that was created from
changes had no rows before, and one that changes removed has none afterwards; but a commit that only
rearranges rows (`dataChange` false, as OPTIMIZE) changes neither. The rows in only one of a file's
two sets differ, unless an equal row of the other set is in another file, which cancels one of them:
a row that is new, was then moved and then copied is in two last sets and one first set. So only
changed rows are read, and the cost follows the changes, however large the table is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from lockstep.sinks.delta import altering, lake, log, stored_files
from lockstep.sinks.delta.stored_files import StoredFiles

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from deltalake import DeltaTable
    from pyarrow.fs import PyFileSystem

    from lockstep.sinks.delta.stored_files import RowGroup


class _AlteredError(Exception):
    """A commit changes the values of rows that keep their seqs."""


@dataclass(slots=True)
class _File:
    """A file that a commit names, between its creation and its removal.

    Its rows are all but those in the deletion vector; None: it has none.
    """

    path: str
    first: Mapping[str, Any] | None
    last: Mapping[str, Any] | None


class TableDifference(NamedTuple):
    """Rows of the earlier version and rows of the later one; one of them cancels an equal one."""

    before: pa.Table
    after: pa.Table


def between(
    before: DeltaTable,
    after: DeltaTable,
    columns: Sequence[str],
    files: StoredFiles | None = None,
) -> TableDifference | None:
    """Return columns of the rows that differ; None if the commits do not show them.

    `files` may have some of these columns.

    They do not if the log or a file between the two versions was deleted, or if what is in a file
    is not what readers see: the schema has changed, or columns are mapped or are in no file. Nor
    if rows were changed as DDL has changed the table's, since these keep their seqs.
    """
    about = after.metadata()
    if (
        before.metadata().id != about.id
        or before.schema() != after.schema()
        or not stored_files.can_read(after)
    ):
        return None
    stored = files or StoredFiles(0)
    there = [field.name for field in after.schema().fields if field.name in set(columns)]
    schema = lake.arrow_schema(after, there)
    sides: tuple[list[pa.Table], list[pa.Table]] = ([schema.empty_table()], [schema.empty_table()])
    try:
        for file in _files(log.files(after), before.version(), after.version()):
            for side, rows in zip(sides, _rows(stored, after, file), strict=True):
                if rows is not None:
                    side.extend(_read(stored.groups(after, file.path), rows, schema))
    except (FileNotFoundError, _AlteredError):
        return None
    return TableDifference(*map(pa.concat_tables, sides))


def _files(storage: PyFileSystem, first: int, last: int) -> list[_File]:
    """Return the files that the commits after version `first` name.

    Raises FileNotFoundError, or _AlteredError where a commit is that of an alteration.
    """
    open_, done = dict[str, _File](), list[_File]()
    for version in range(first + 1, last + 1):
        with storage.open_input_file(f"_delta_log/{version:020d}.json") as commit:
            actions = [json.loads(line) for line in commit.read().splitlines() if line.strip()]
        if any(altering.is_ours(each["txn"]["appId"]) for each in actions if "txn" in each):
            raise _AlteredError
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


def _rows(
    stored: StoredFiles, table: DeltaTable, file: _File
) -> tuple[_Positions | None, _Positions | None]:
    """Return the rows in the first set only and those in the last only; None if there are none."""
    if file.first == file.last:
        return None, None
    first, last = (
        None if vector is None else stored.numbers(table, file.path, vector)
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


def _read(groups: Iterable[RowGroup], rows: _Positions, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield rows of a file; columns that it lacks are NULL."""
    for group in groups:
        end = group.first + group.rows
        numbers = rows.numbers.filter(
            pc.and_(pc.greater_equal(rows.numbers, group.first), pc.less(rows.numbers, end))
        )
        if rows.others or len(numbers):
            numbers = pc.subtract(numbers, group.first)
            if rows.others:
                every = pa.arange(0, group.rows)
                numbers = every.filter(pc.invert(pc.is_in(every, value_set=numbers)))
            yield group.take(schema, numbers)
