"""Adapt a mirror's columns to its table's versions.

A new column is added. A column that the source dropped stays, with its last values, and NULL in
every row written since: readers do not break, and no statement in the source deletes data. A
renamed column is a new one, because the log does not show renames; but Delta treats `name` and
`Name` as the same column, so that one keeps its values. If a column gets another type or spelling,
the table is rewritten, each value converted from its text to the new type (`sinks.delta.retype`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4

import pyarrow as pa
from deltalake import CommitProperties, Field, Schema

from cdc.errors import ConfigError
from lockstep.sinks.delta import actions, features, lake, layout
from lockstep.sinks.delta.lake import CommitInfo
from lockstep.sinks.delta.layout import EXACT
from lockstep.sinks.delta.retype import retyped
from lockstep.sinks.delta.rows import exact_map

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from deltalake import DeltaTable

    from lockstep.sinks.delta.actions import Action
    from lockstep.sinks.delta.settings import Applier

_MAPPED: Final = "delta.columnMapping.mode"
_FEATURE: Final = "columnMapping"
_MAX_ID: Final = "delta.columnMapping.maxColumnId"
_ID: Final = "delta.columnMapping.id"
_PHYSICAL: Final = "delta.columnMapping.physicalName"
# The property with the key columns of the stored rows: a list of names, as JSON.
_KEY: Final = "lockstep.key"
# The values in existing rows of our columns that are added later.
_BEFORE: Final = {layout.CURRENT: True, layout.DELETED: False}


class AlteringWriter(NamedTuple):
    """Who alters a table, and by what."""

    facts: Mapping[str, object]
    storage: Mapping[str, str]
    large: Applier | None  # for a table that only delta-spark may write


def follow(table: DeltaTable, wanted: dict[str, Any], name: str, by: AlteringWriter) -> bool:
    """Give the table the `wanted` schema's columns; return whether anything changed."""
    stored = {field["name"]: field for field in json.loads(table.schema().to_json())["fields"]}
    fields = {field["name"]: field for field in wanted["fields"]}
    spelled = {each.casefold(): each for each in fields}
    held = {spelled.get(each.casefold(), each): field for each, field in stored.items()}
    new = [each for each in fields if each not in held]
    other = [
        each
        for each in fields
        if each in held and (each not in stored or held[each]["type"] != fields[each]["type"])
    ]
    if not new and not other:
        return False
    every = {each: field["type"] for each, field in (held | fields).items()}
    schema = layout.struct(every.items(), name)
    is_mapped = lake.is_mapped(table)
    is_sparks = features.needs_spark(table)
    properties = lake.unmoved(by.facts)
    with lake.translated(table.table_uri):
        if other or _BEFORE.keys() & set(new):
            if is_mapped or is_sparks:
                raise ConfigError(
                    f"{name}: columns {', '.join(other or new)} have another type or case, and"
                    " delta-rs can't rewrite a table with mapped columns (names with spaces and the"
                    " like) or with features that only delta-spark writes",
                    hint=f"move {table.table_uri} away and `cdc rebuild` the follower",
                )
            _rewrite(table, schema, properties)
        elif is_sparks:
            spark = spark_of(table, by.large)
            spark.alter(table, by.facts, columns=[fields[each] for each in new])
        elif is_mapped:
            _add_mapped(table, [fields[each] for each in new], by)
        else:
            added = [Field.from_json(json.dumps(fields[each])) for each in new]
            table.alter.add_columns(added, commit_properties=properties)
    return True


def key_of(table: DeltaTable) -> tuple[str, ...] | None:
    """Return the key with which the rows were written; None if it is not recorded."""
    stored = table.metadata().configuration.get(_KEY)
    return None if stored is None else tuple(json.loads(stored))


def keep_key(table: DeltaTable, key: tuple[str, ...] | None, by: AlteringWriter) -> None:
    """Record in the table the key of its rows."""
    if key is not None and key_of(table) != key:
        set_properties(table, {_KEY: json.dumps(key)}, by)


def set_properties(table: DeltaTable, properties: Mapping[str, str], by: AlteringWriter) -> None:
    """Set properties of the table, by its writer.

    By our own commit if we may: delta-rs' commit requires features that readers may not support.
    """
    if features.needs_spark(table, changes_rows=False):
        spark_of(table, by.large).alter(table, by.facts, properties=properties)
        return
    schema = json.loads(table.schema().to_json())
    about = table.metadata().configuration | dict(properties)
    _commit(table, actions.described(table, schema, about), "SET TBLPROPERTIES", by)


def spark_of(table: DeltaTable, large: Applier | None) -> Applier:
    """Return the writer of a table that only delta-spark may write."""
    if large is None:
        raise features.refusal(table.table_uri, *features.found(table).sparks)
    return large


def map_columns(table: DeltaTable, by: AlteringWriter) -> None:
    """Declare the column mapping of a new table; delta-rs maps columns but does not declare it."""
    protocol, about = table.protocol(), table.metadata().configuration
    if about.get(_MAPPED, "none") == "none" or _FEATURE in (protocol.reader_features or ()):
        return
    _commit(table, actions.with_feature(table, _FEATURE), "ADD FEATURE", by)


def _add_mapped(table: DeltaTable, new: list[dict[str, Any]], by: AlteringWriter) -> None:
    """Add columns with separate names in the files, which delta-rs does not support."""
    schema = json.loads(table.schema().to_json())
    first = max(int(field["metadata"].get(_ID, 0)) for field in schema["fields"]) + 1
    for place, field in enumerate(new, first):
        field["metadata"] = {_ID: place, _PHYSICAL: f"col-{uuid4()}"}
    schema["fields"] += new
    about = table.metadata().configuration | {_MAX_ID: str(first + len(new) - 1)}
    _commit(table, actions.described(table, schema, about), "ADD COLUMNS", by)


def _commit(table: DeltaTable, action: Action, operation: str, by: AlteringWriter) -> None:
    files = actions.Files(table.table_uri, by.storage)
    actions.commit(files, table, [action], operation, CommitInfo("", None, by.facts))


def _rewrite(table: DeltaTable, schema: dict[str, Any], properties: CommitProperties) -> None:
    """Rewrite all rows, in one commit."""
    target = lake.plain(pa.schema(Schema.from_json(json.dumps(schema)).to_arrow()))

    def parts() -> Iterator[pa.RecordBatch]:
        for part in lake.streamed(table):
            yield from under(part, target).to_batches()

    lake.rewrite(table, target, parts(), properties)


def under(rows: pa.Table, target: pa.Schema) -> pa.Table:
    """Return stored rows converted to another schema."""
    many = rows.num_rows
    stored = rows[EXACT].combine_chunks()
    odd: list[tuple[str, pa.Array]] = []
    made = {}
    names = {name.casefold(): name for name in rows.column_names}
    for field in target:
        if field.name == EXACT:
            continue
        name = names.get(field.name.casefold())
        if name is None:
            before = _BEFORE.get(field.name)
            made[field.name] = pa.repeat(pa.scalar(before, field.type), many)
            continue
        values = rows[name].combine_chunks()
        text = pa.nulls(many, pa.string())
        if stored.null_count < many:
            text = lake.looked_up(stored, name)
        if values.type != field.type:
            values, text = retyped(values, text, field.type)
        made[field.name] = values
        if text.null_count < many:
            odd.append((field.name, text))
    made[EXACT] = exact_map(odd, many)
    return pa.Table.from_arrays([made[field.name] for field in target], schema=target)
