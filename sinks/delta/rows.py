"""A table's changes as Arrow, with exactly its mirror's columns and types.

Values of an older table version are read by that version, and then converted to the newest
version's type (`sinks.delta.retype`).

Pure.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from cdc.errors import InvariantError
from lockstep.sinks.delta import layout
from lockstep.sinks.delta.columns import ColumnReader, wanted
from lockstep.sinks.delta.retype import retyped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockstep.sinks.contract import Applied, Change, Changes, Version
    from lockstep.sinks.delta.columns import Values

EXACT_TYPE: Final = pa.map_(pa.string(), pa.field("value", pa.string(), nullable=False))


class ChangeBatch(NamedTuple):
    """Changes of one table in their original order.

    `rows` has the mirror's columns; for a deleted key only the key's columns count. `unchanged`
    marks, by column, the rows that keep the stored value.
    """

    rows: pa.Table
    deleted: pa.BooleanArray
    unchanged: Mapping[str, pa.BooleanArray]


def only(batch: ChangeBatch, rows: pa.BooleanArray) -> ChangeBatch:
    """Return some of the rows."""
    return ChangeBatch(
        batch.rows.filter(rows),
        batch.deleted.filter(rows),
        {name: where.filter(rows) for name, where in batch.unchanged.items()},
    )


def batch(changes: Changes, schema: pa.Schema, readers: dict[int, ColumnReader]) -> ChangeBatch:
    """Return the changes with the columns of a mirror's `schema`, in their order."""
    versions = {version.schema_id: version for version in changes.versions}
    groups: dict[int, list[Change]] = {}
    for change in changes.changes:
        groups.setdefault(change.schema_id, []).append(change)
    parts = []
    for schema_id, group in groups.items():
        version = versions[schema_id]
        reader = readers.setdefault(schema_id, ColumnReader(version))
        parts.append(_part(group, version, reader, schema))
    if len(parts) == 1:
        return parts[0]
    if not parts:
        none = pa.array([], pa.bool_())
        return ChangeBatch(schema.empty_table(), none, {})
    complete = joined(parts)
    return taken(complete, pc.sort_indices(complete.rows[layout.SEQ]))


def joined(parts: Sequence[ChangeBatch]) -> ChangeBatch:
    """Return parts as one, in their order."""
    names = {name for part in parts for name in part.unchanged}
    return ChangeBatch(
        pa.concat_tables([part.rows for part in parts]),
        pa.concat_arrays([part.deleted for part in parts]),
        {
            name: pa.concat_arrays(
                [part.unchanged.get(name) or _none(part.rows.num_rows) for part in parts]
            )
            for name in names
        },
    )


def taken(batch: ChangeBatch, rows: pa.Array) -> ChangeBatch:
    """Return the rows at these indexes."""
    return ChangeBatch(
        batch.rows.take(rows),
        batch.deleted.take(rows),
        {name: where.take(rows) for name, where in batch.unchanged.items()},
    )


def _none(rows: int) -> pa.BooleanArray:
    return pa.repeat(pa.scalar(value=False), rows)


def _part(
    group: list[Change], version: Version, reader: ColumnReader, schema: pa.Schema
) -> ChangeBatch:
    types = dict(wanted(version, group))
    skip: dict[str, set[int]] = {}
    for row, change in enumerate(group):
        for name in change.unchanged:
            skip.setdefault(name, set()).add(row)
    found = reader.columns([_json(change, version) for change in group], types, skip)
    many = len(group)
    # An older version may spell a column differently; in Delta it is the same one.
    at = {name.casefold(): name for name in schema.names}
    unchanged = {
        at[name.casefold()]: pa.array([row in rows for row in range(many)])
        for name, rows in skip.items()
    }
    made: dict[str, pa.Array] = _ours(group)
    exact: list[tuple[str, pa.Array]] = []
    for name_read, read in found.items():
        name = at[name_read.casefold()]
        made[name], odd = _stored(read, unchanged.get(name), schema.field(name).type)
        if odd is not None and odd.null_count < many:
            exact.append((name, odd))
    deleted = pa.array([change.row is None for change in group])
    made[layout.EXACT] = exact_map(exact, many)
    made[layout.DELETED] = deleted
    columns = [
        made[field.name] if field.name in made else pa.nulls(many, field.type) for field in schema
    ]
    return ChangeBatch(pa.Table.from_arrays(columns, schema=schema), deleted, unchanged)


def arranged(rows: pa.Table, schema: pa.Schema, at: Applied) -> pa.Table:
    """Return new rows, which a frontier has, with the columns of a mirror's `schema`.

    `rows` have the types that `columns.arrow_type` gives their columns.
    """
    many, names = rows.num_rows, {name.casefold(): name for name in schema.names}
    made: dict[str, pa.Array] = {
        layout.SEQ: pa.repeat(at.seq, many),
        layout.COMMIT_LSN: pa.repeat(int(at.lsn), many),
        layout.COMMITTED_AT: _instants(pa.repeat(at.committed_at_us, many)),
    }
    exact: list[tuple[str, pa.Array]] = []
    for given in rows.column_names:
        name = names[given.casefold()]
        values = pa.concat_arrays(rows[given].chunks) if many else pa.nulls(0, rows[given].type)
        made[name], odd = _stored((values, None), None, schema.field(name).type)
        if odd is not None and odd.null_count < many:
            exact.append((name, odd))
    made[layout.EXACT] = exact_map(exact, many)
    columns = [
        made[field.name] if field.name in made else pa.nulls(many, field.type) for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _stored(read: Values, unchanged: pa.BooleanArray | None, kind: pa.DataType) -> Values:
    """Return a column's values in the mirror's type, with none where they were not sent."""
    values, odd = read
    if unchanged is not None:
        nothing = pa.scalar(None, values.type)
        values = pc.if_else(unchanged, nothing, values)
        odd = odd and pc.if_else(unchanged, pa.scalar(None, pa.string()), odd)
    return (values, odd) if values.type == kind else retyped(values, odd, kind)


def _json(change: Change, version: Version) -> bytes:
    """Return the row; for a deleted key its known columns, which are at least the key."""
    text = change.row or change.before or change.key
    if text is None:
        raise InvariantError(f"a change of {version.name} with neither row, old row nor key")
    return text


def _ours(group: list[Change]) -> dict[str, pa.Array]:
    at = array("q", [change.committed_at_us for change in group])
    return {
        layout.SEQ: _longs(array("q", [change.seq for change in group])),
        layout.COMMIT_LSN: _longs(array("q", [change.commit_lsn for change in group])),
        layout.COMMITTED_AT: _instants(_longs(at)),
    }


def _instants(micros: pa.Array) -> pa.Array:
    return micros.cast(pa.timestamp("us")).cast(pa.timestamp("us", "UTC"))


def _longs(values: array[int]) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(values)])


def exact_map(odd: list[tuple[str, pa.Array]], rows: int) -> pa.Array:
    """Return the map of values that do not fit, by column; NULL for rows in which all fit."""
    if not odd:
        return pa.nulls(rows, EXACT_TYPE)
    maps: list[list[tuple[str, str]] | None] = [None] * rows
    for name, text in odd:
        for row in pc.indices_nonzero(pc.is_valid(text)).to_pylist():
            maps[row] = [*(maps[row] or []), (name, text[row].as_py())]
    return pa.array(maps, EXACT_TYPE)
