"""Change a mirror's rows as DDL has changed the table's: names of columns, and values of new ones.

One commit rewrites the table, with the seq of the alteration as a Delta transaction of its own app:
so it is done once, although another copy may repeat it. The rows keep their seqs. A column that
takes the name of one that the source dropped replaces it. Deleted rows that stay, and former
versions of a row, get the names but no values: the column did not exist then.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import Schema

from cdc.errors import ConfigError
from lockstep.sinks.contract import Change, Changes
from lockstep.sinks.delta import features, lake, layout
from lockstep.sinks.delta.columns import wanted
from lockstep.sinks.delta.rows import batch, exact_map

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltalake import DeltaTable

    from lockstep.sinks.contract import Altered
    from lockstep.sinks.delta.lake import CommitInfo

_NULL = b"null"
_ALTERED = "/altered"


def app(of: str) -> str:
    """Return the name of the Delta transactions that alter the tables of an app."""
    return f"{of}{_ALTERED}"


def is_ours(app: str) -> bool:
    """Return whether it is an app of these transactions."""
    return app.endswith(_ALTERED)


def alter(table: DeltaTable, altered: Altered, commit: CommitInfo, name: str) -> None:
    """Rewrite the table, unless it has nothing that changes."""
    plan = _Plan(table, altered, name)
    if not plan.changes:
        return
    _refuse(table, plan, name)
    with lake.translated(table.table_uri):
        lake.rewrite(table, plan.target, plan.parts(table), commit.properties)


def _refuse(table: DeltaTable, plan: _Plan, name: str) -> None:
    """Raise ConfigError for a table that can't be rewritten in this way."""
    about = table.metadata()
    why = ""
    # Complete files are replaced, of which readers of the change feed need no change files.
    if features.needs_spark(table, changes_rows=False):
        only = ", ".join(features.found(table).sparks)
        why = f"only delta-spark writes its mirror, which has {only}"
    elif lake.is_mapped(table):
        why = "delta-rs can't rewrite a table with mapped columns (names with spaces and the like)"
    elif plan.moved.keys() & set(about.partition_columns):
        why = "it is partitioned by a column that has another name now"
    if why:
        raise ConfigError(
            f"{name} has other columns now, and {why}",
            hint=f"move {table.table_uri} away and `cdc rebuild` the follower",
        )


class _Plan:
    """The columns that a mirror is to have, and from where."""

    def __init__(self, table: DeltaTable, altered: Altered, name: str) -> None:
        fields = json.loads(table.schema().to_json())["fields"]
        stored = {field["name"].casefold(): field["name"] for field in fields}
        # By the stored name, the present one of each column that has another.
        self.moved = {
            stored[was.casefold()]: new
            for new, was in altered.sources.items()
            if new != was and was.casefold() in stored
        }
        kinds = dict(wanted(altered.version))
        # A mirror may lack a column without values, which is added with the next rows.
        lacked = {
            new: _NULL for new, was in altered.sources.items() if was.casefold() not in stored
        }
        added = {new: json for new, json in (altered.missing | lacked).items() if new in kinds}
        taken = {each.casefold() for each in (*self.moved.values(), *added)}
        kept = [f for f in fields if f["name"] in self.moved or f["name"].casefold() not in taken]
        values = any(value != _NULL for value in added.values())
        self.changes = bool(self.moved) or values or len(kept) < len(fields)
        if not self.changes:
            return
        named: list[tuple[str, Any]] = [
            (self.moved.get(field["name"], field["name"]), field["type"]) for field in kept
        ]
        named += [(new, kinds[new].json) for new in added]
        schema = layout.struct(named, name)
        self.target = lake.plain(pa.schema(Schema.from_json(json.dumps(schema)).to_arrow()))
        self._sources = {self.moved.get(f["name"], f["name"]): f["name"] for f in kept}
        self._values = self._read(altered, added)

    def _read(self, altered: Altered, added: dict[str, bytes]) -> pa.Table:
        """Return a row with the values of the new columns."""
        row = msgspec.json.encode({name: msgspec.Raw(value) for name, value in added.items()})
        change = Change(None, 0, row, altered.version.schema_id, 0, 0)
        # The mirror may lack others: a column without values is added with the next rows.
        columns = tuple(each for each in altered.version.columns if each.name in added)
        version = altered.version._replace(columns=columns)
        return batch(Changes((version,), [change]), self.target, {}).rows

    def parts(self, table: DeltaTable) -> Iterator[pa.RecordBatch]:
        for part in lake.streamed(table):
            yield from self._part(part).to_batches()

    def _part(self, rows: pa.Table) -> pa.Table:
        many, stored = rows.num_rows, rows[layout.EXACT].combine_chunks()
        alive = _alive(rows)
        texts = self._values[layout.EXACT].combine_chunks()
        odd: list[tuple[str, pa.Array]] = []
        made = {}
        for field in self.target:
            if field.name == layout.EXACT:
                continue
            source = self._sources.get(field.name)
            if source is not None:
                made[field.name] = rows[source].combine_chunks()
                text = lake.looked_up(stored, source)
            else:
                value = self._values[field.name][0]
                made[field.name] = pc.if_else(alive, value, pa.scalar(None, field.type))
                exact = lake.looked_up(texts, field.name)[0]
                text = pc.if_else(alive, exact, pa.scalar(None, pa.string()))
            if text.null_count < many:
                odd.append((field.name, text))
        made[layout.EXACT] = exact_map(odd, many)
        return pa.Table.from_arrays([made[f.name] for f in self.target], schema=self.target)


def _alive(rows: pa.Table) -> pa.Array:
    """Return which rows the source has."""
    if layout.CURRENT in rows.column_names:
        return pc.fill_null(rows[layout.CURRENT].combine_chunks(), fill_value=False)
    if layout.DELETED in rows.column_names:
        deleted = rows[layout.DELETED].combine_chunks()
        return pc.invert(pc.fill_null(deleted, fill_value=False))
    return pa.repeat(pa.scalar(value=True), rows.num_rows)
