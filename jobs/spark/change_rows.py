"""Change events as rows of Spark: their schema, and Arrow batches of it.

The rows of one table are structs with the types of its mirror (docs/DELTA.md, "Types"); of several
tables they are JSON, as in the log. A column that only an older version of the table had comes
after those of the newest. Values that a column's type cannot hold are in the struct's `_exact`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from cdc.errors import ConfigError
from lockstep.jobs.cuts.reduce import lsn_of
from lockstep.sinks.delta import layout
from lockstep.sinks.delta.columns import ColumnReader, wanted
from lockstep.sinks.delta.retype import retyped
from lockstep.sinks.delta.rows import exact_map
from lockstep.sinks.delta.types import TypeKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockstep.jobs.cuts.changes import ChangeEvent
    from lockstep.sinks.contract import Version
    from lockstep.sinks.delta.types import DeltaType

_NEVER_ODD: Final = {TypeKind.SAME, TypeKind.TEXT}
_TEXTS: Final = {"type": "array", "elementType": "string", "containsNull": True}


def schema(tables: Mapping[str, Sequence[Version]]) -> StructType:
    """Return the schema of the changes of tables, given each table's versions, oldest first."""
    key: object = "string"
    row: object = "string"
    if len(tables) == 1:
        ((name, versions),) = tables.items()
        columns = _columns(versions)
        keys = [(each, columns[each]) for each in versions[-1].key]
        key = _struct(keys, name, odd=any(kind.kind not in _NEVER_ODD for _, kind in keys))
        row = _struct(list(columns.items()), name)
    fields = {
        "table": "string",
        "op": "string",
        "key": key,
        "before": row,
        "after": row,
        "unchanged": _TEXTS,
        "seq": "long",
        "commit_lsn": "long",
        "committed_at": "timestamp",
        "transaction": "long",
        "ordinal": "long",
        "origin": "string",
        "schema_id": "long",
        "frontier": "long",
    }
    return StructType.fromJson(layout.struct(fields.items(), "of changes"))


def _columns(versions: Sequence[Version]) -> dict[str, DeltaType]:
    found: dict[str, DeltaType] = {}
    spelled: set[str] = set()
    for version in reversed(versions):
        for name, kind in wanted(version):
            if name.casefold() not in spelled:
                found[name] = kind
                spelled.add(name.casefold())
    return found


def _struct(columns: list[tuple[str, DeltaType]], table: str, *, odd: bool = True) -> object:
    fields: list[tuple[str, object]] = [(name, kind.json) for name, kind in columns]
    if not fields:
        return "string"  # the key of a table without a key
    return layout.struct(
        [*fields, *([(layout.EXACT, layout.OURS[layout.EXACT])] if odd else [])], table
    )


class BatchWriter:
    """Converts events to batches of a schema. Keeps what it learns of a version's values."""

    def __init__(self, schema: StructType, versions: Mapping[int, Version], frontier: int) -> None:
        """`frontier` is the seq at the end of the rows' batch."""
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._versions, self._frontier = versions, frontier
        self._readers: dict[tuple[int, str], ColumnReader] = {}

    def batch(self, table: str, events: Sequence[ChangeEvent]) -> pa.RecordBatch:
        """Return the events of one table as rows, in the same order."""
        sources = [each.source for each in events]
        ids = [source.schema_id for source in sources]
        made = {
            "table": [table] * len(events),
            "op": [each.op for each in events],
            "unchanged": [list(source.unchanged) for source in sources],
            "seq": [source.seq for source in sources],
            "commit_lsn": [lsn_of(source.commit_lsn) for source in sources],
            "committed_at": [source.ts_us for source in sources],
            "transaction": [source.transaction for source in sources],
            "ordinal": [source.ordinal for source in sources],
            "origin": [source.origin for source in sources],
            "schema_id": ids,
            "frontier": [self._frontier] * len(events),
        }
        rows = {
            "key": [each.key for each in events],
            "before": [each.before for each in events],
            "after": [each.after for each in events],
        }
        arrays = [
            self._rows(field, rows[field.name], ids)
            if field.name in rows
            else pa.array(made[field.name], field.type)
            for field in self._schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _rows(self, field: pa.Field, rows: list[bytes | None], ids: list[int]) -> pa.Array:
        """Return JSON rows as the field's structs, or as text."""
        if not pa.types.is_struct(field.type):
            return pa.array([None if row is None else row.decode() for row in rows], field.type)
        groups: dict[int, list[int]] = {}
        for at, (row, schema_id) in enumerate(zip(rows, ids, strict=True)):
            if row is not None:
                groups.setdefault(schema_id, []).append(at)
        parts = [pa.array([], field.type)]
        places: list[int | None] = [None] * len(rows)
        total = 0
        for schema_id, group in groups.items():
            parts.append(self._structs(field, schema_id, [rows[at] or b"" for at in group]))
            for number, at in enumerate(group, total):
                places[at] = number
            total += len(group)
        return pa.concat_arrays(parts).take(pa.array(places, pa.int64()))

    def _structs(self, field: pa.Field, schema_id: int, rows: list[bytes]) -> pa.Array:
        """Return rows of one table version as structs."""
        version = self._versions[schema_id]
        fields = {each.name.casefold(): each for each in field.type}
        lacking = [each.name for each in version.columns if each.name.casefold() not in fields]
        if lacking and field.name != "key":
            raise ConfigError(
                f"{version.name} has a column {lacking[0]} now, which the rows do not have",
                hint="start the query again: the schema is read when it starts",
            )
        # The key's JSON has its columns only.
        here = [each for each in version.columns if each.name.casefold() in fields]
        reader = self._readers.setdefault(
            (schema_id, field.name), ColumnReader(version._replace(columns=tuple(here)))
        )
        found = reader.columns(rows, dict(wanted(version)), {})
        arrays: dict[str, pa.Array] = {}
        odd: list[tuple[str, pa.Array]] = []
        for name, read in found.items():
            target = fields[name.casefold()]
            same = read[0].type == target.type
            values, texts = read if same else retyped(*read, target.type)
            arrays[target.name] = values
            if texts is not None and texts.null_count < len(rows):
                odd.append((target.name, texts))
        made = [self._column(each, arrays, odd, len(rows)) for each in field.type]
        return pa.StructArray.from_arrays(made, fields=list(field.type))

    @staticmethod
    def _column(
        field: pa.Field, arrays: dict[str, pa.Array], odd: list[tuple[str, pa.Array]], rows: int
    ) -> pa.Array:
        if field.name != layout.EXACT:
            return arrays[field.name] if field.name in arrays else pa.nulls(rows, field.type)
        return exact_map(odd, rows).cast(field.type)
