"""A mirror's columns follow its table's versions.

A new column is added. One that the source no longer has stays, with what it last held, and NULL in
every row written since: readers do not break, and nothing is deleted by a statement in the source.
A renamed column is a new one, since the log tells no other way. A column of another type takes it,
and the table is written anew, each value as the new type reads its text (`sinks.delta_retype`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import pyarrow as pa
from deltalake import CommitProperties, Field, Schema, write_deltalake

from sinks import delta_lake, delta_layout
from sinks.delta_layout import EXACT
from sinks.delta_retype import retyped
from sinks.delta_rows import exact_map

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from deltalake import DeltaTable

_MAPPED: Final = "delta.columnMapping.mode"
_MAX_ID: Final = "delta.columnMapping.maxColumnId"
_ID: Final = "delta.columnMapping.id"
_PHYSICAL: Final = "delta.columnMapping.physicalName"
# What stands in rows that are there already, in columns of ours that come later.
_BEFORE: Final = {delta_layout.CURRENT: True, delta_layout.DELETED: False}


def follow(
    table: DeltaTable, wanted: dict[str, Any], name: str, facts: Mapping[str, object]
) -> bool:
    """Let the table have the `wanted` schema's columns; return whether anything changed."""
    stored = {field["name"]: field for field in json.loads(table.schema().to_json())["fields"]}
    fields = {field["name"]: field for field in wanted["fields"]}
    new = [each for each in fields if each not in stored]
    other = [
        each for each in fields if each in stored and stored[each]["type"] != fields[each]["type"]
    ]
    if not new and not other:
        return False
    whole = {each: field["type"] for each, field in (stored | fields).items()}
    schema = delta_layout.struct(whole.items(), name)
    said = CommitProperties(custom_metadata={"userMetadata": delta_layout.metadata(**facts)})
    with delta_lake.translated(table.table_uri):
        if other or _BEFORE.keys() & set(new):
            _rewrite(table, schema, said)
        else:
            _add(table, [fields[each] for each in new], list(stored.values()), said)
    return True


def _add(
    table: DeltaTable,
    new: list[dict[str, Any]],
    stored: list[dict[str, Any]],
    said: CommitProperties,
) -> None:
    """Add columns, a matter of metadata alone."""
    if table.metadata().configuration.get(_MAPPED, "none") != "none":
        # What is written here stands under a name of its own in the files.
        first = max(int(field["metadata"].get(_ID, 0)) for field in stored) + 1
        for place, field in enumerate(new, first):
            field["metadata"] = {_ID: place, _PHYSICAL: f"col-{uuid4()}"}
        table.alter.set_table_properties(
            {_MAX_ID: str(first + len(new) - 1)},
            raise_if_not_exists=False,
            commit_properties=said,
        )
    table.alter.add_columns(
        [Field.from_json(json.dumps(field)) for field in new], commit_properties=said
    )


def _rewrite(table: DeltaTable, schema: dict[str, Any], said: CommitProperties) -> None:
    """Write all rows anew, in one commit."""
    target = delta_lake.plain(pa.schema(Schema.from_json(json.dumps(schema)).to_arrow()))

    def parts() -> Iterator[pa.RecordBatch]:
        for part in delta_lake.streamed(table):
            yield from under(part, target).to_batches()

    write_deltalake(
        table,
        pa.RecordBatchReader.from_batches(target, parts()),
        mode="overwrite",
        schema_mode="overwrite",
        commit_properties=said,
    )


def under(rows: pa.Table, target: pa.Schema) -> pa.Table:
    """Return stored rows under another schema."""
    many = rows.num_rows
    stored = rows[EXACT].combine_chunks()
    odd: list[tuple[str, pa.Array]] = []
    made = {}
    for field in target:
        if field.name == EXACT:
            continue
        if field.name not in rows.column_names:
            before = _BEFORE.get(field.name)
            made[field.name] = pa.repeat(pa.scalar(before, field.type), many)
            continue
        values = rows[field.name].combine_chunks()
        text = pa.nulls(many, pa.string())
        if stored.null_count < many:
            text = delta_lake.looked_up(stored, field.name)
        if values.type != field.type:
            values, text = retyped(values, text, field.type)
        made[field.name] = values
        if text.null_count < many:
            odd.append((field.name, text))
    made[EXACT] = exact_map(odd, many)
    return pa.Table.from_arrays([made[field.name] for field in target], schema=target)
