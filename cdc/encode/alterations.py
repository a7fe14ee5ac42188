"""How a table version changes the rows that are older than it, which get no event. Pure.

Postgres changes what a table shows without a row in the stream: a column that is added with a
constant default shows it in every row (`attmissingval`), a renamed column keeps its number and its
values, and a name that is dropped and added again is another column. `compare` derives from two
versions of a table what each column's older values are; `altered` does it to one row. Columns are
the same if their numbers are; if those are not proven, if their names are.

Where the versions can't show it, the values are stale: the table was rewritten, by a USING or for a
column's default, a type was changed to one that writes values in another way, or it is not proven
which column is which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from cdc.config.value_options import Values
from cdc.decode.types import BY_OID, ValueKind, numeric_size
from cdc.encode.values import NUMBER, QUOTED, TEXT, form
from cdc.log.records import Alteration, ColumnAlteration

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from cdc.log.records import SchemaColumn, SchemaRecord

V = TypeVar("V")

_EXACT: Final = {ValueKind.INTEGER, ValueKind.UUID}  # with one text a value
NOT_PROVEN: Final = "columns were dropped and added, and which is which is not proven"
# Longer ones stay out of the log: a message must fit into its topic.
MOST_MISSING: Final = 100_000


def compare(
    before: SchemaRecord, after: SchemaRecord, unknown: Collection[int] = ()
) -> Alteration | None:
    """Return what the version `after` does to older rows; None if it changes no column.

    `unknown` are the numbers of those columns whose missing value could not be read.
    """
    sources = _sources(before, after)
    described = [(c.name, c.type_id, c.type_modifier) for c in before.columns]
    same = [s.name if s else None for s in sources] == [c.name for c in before.columns]
    if same and described == [(c.name, c.type_id, c.type_modifier) for c in after.columns]:
        return None
    columns, doubts = [], [stale(before, after)]
    options = before.values or Values(), after.values or Values()
    rewritten = bool(before.storage and after.storage) and before.storage != after.storage
    for column, source in zip(after.columns, sources, strict=True):
        if source is None:
            doubts.append(_unknown_value(before, after, column, unknown))
            columns.append(ColumnAlteration(column.name, missing=column.missing))
            continue
        how = None
        if _keeps_text(source, column, rewritten=rewritten):
            how = _conversion(form(source, options[0]), form(column, options[1]))
        if how is None:
            doubts.append(f"column {column.name} was {source.type} and is {column.type}")
        columns.append(ColumnAlteration(column.name, was=source.name, as_text=how == "text"))
    if _is_doubtful(before, after, sources):
        doubts.append(NOT_PROVEN)
    return Alteration(
        schema_id=after.schema_id,
        previous=before.schema_id,
        schema=after.schema,
        table=after.table,
        topic=after.topic,
        columns=tuple(columns),
        stale="; ".join(dict.fromkeys(filter(None, doubts))),
    )


def stale(before: SchemaRecord, after: SchemaRecord) -> str:
    """Say which columns a USING wrote again without giving them another type; empty: none."""
    was = {column.attnum: column for column in before.columns}
    rewritten = {c.attnum: c.rewritten_by for c in after.columns if c.attnum and c.rewritten_by}
    found = rewritten_columns(before, after.storage, rewritten)
    retyped = {
        c.attnum for c in after.columns if c.attnum in was and _type(c) != _type(was[c.attnum])
    }
    if retyped:
        # The rewrite was theirs. It also changes columns that older rows lacked a value of.
        found -= retyped | {c.attnum for c in before.columns if c.missing is not None}
    names = [column.name for column in after.columns if column.attnum in found]
    return f"the table was rewritten when column {', '.join(names)} was changed" if names else ""


def rewritten_columns(
    before: SchemaRecord, storage: str, rewritten: Mapping[int, int]
) -> set[int | None]:
    """Return the numbers of those columns of `before` that a later transaction has rewritten.

    `rewritten` has the newest such transaction of a column, if there is one, and `storage` is where
    the table's rows are since.
    """
    if not before.storage or before.storage == storage:
        return set()
    return {
        column.attnum
        for column in before.columns
        if column.attnum is not None
        and rewritten.get(column.attnum, column.rewritten_by) != column.rewritten_by
    }


def _type(column: SchemaColumn) -> tuple[int, int]:
    return column.type_id, column.type_modifier


def altered(
    alteration: Alteration,
    row: Mapping[str, V],
    null: V,
    value: Callable[[str], V],
    as_text: Callable[[V], V],
) -> dict[str, V]:
    """Return an older row as the version's; a value that the row lacks is still unknown.

    `value` gives the value that a JSON text stands for, `as_text` the text of a number.
    """
    new: dict[str, V] = {}
    for column in alteration.columns:
        if column.was is None:
            new[column.name] = null if column.missing is None else value(column.missing)
        elif column.was in row:
            old = row[column.was]
            new[column.name] = as_text(old) if column.as_text else old
    return new


def _sources(before: SchemaRecord, after: SchemaRecord) -> list[SchemaColumn | None]:
    """Return for each column the one that it was before; None: it is new."""
    by_name = {column.name: column for column in before.columns}
    by_number = {c.attnum: c for c in before.columns if c.attnum is not None}
    if len(by_number) == len(before.columns) and _is_numbered(after):
        return [by_number.get(column.attnum or 0) for column in after.columns]
    return [by_name.get(column.name) for column in after.columns]


def _is_numbered(version: SchemaRecord) -> bool:
    return all(column.attnum is not None for column in version.columns)


def _is_doubtful(
    before: SchemaRecord, after: SchemaRecord, sources: list[SchemaColumn | None]
) -> bool:
    """Whether columns are matched by names alone, and one may have been renamed."""
    if _is_numbered(before) and _is_numbered(after):
        return False
    names = {source.name for source in sources if source}
    return None in sources and any(column.name not in names for column in before.columns)


def _unknown_value(
    before: SchemaRecord, after: SchemaRecord, column: SchemaColumn, unknown: Collection[int]
) -> str:
    """Return why it is not known what older rows have in a new column; empty: it is known."""
    name = column.name
    if column.missing is not None:
        return ""
    if column.attnum is None or column.attnum in unknown:
        return f"the value of column {name} in older rows is not known"
    if column.attnum <= before.attributes:
        return f"column {name} has values that were not published before"
    if before.storage and before.storage != after.storage:
        return f"the table was rewritten when column {name} was added"
    return ""


def _conversion(old: str, new: str) -> str | None:
    """Return how JSON of one form becomes the other's: as it is, or as `text`; None: neither."""
    if old == new or {old, new} <= {QUOTED, TEXT}:
        return ""
    return "text" if (old, new) == (NUMBER, TEXT) else None


def _keeps_text(old: SchemaColumn, new: SchemaColumn, *, rewritten: bool) -> bool:
    """Return whether every value of one type has the same text in the other.

    What Postgres changes without a rewrite keeps it: if the table was rewritten, a USING may have
    made other values. Integers are always rewritten, and are taken to keep theirs.
    """
    if old.type_id == new.type_id:
        return old.type_modifier == new.type_modifier or (_is_wider(old, new) and not rewritten)
    was, now = BY_OID.get(old.type_id), BY_OID.get(new.type_id)
    if was is None or now is None:
        return False
    if was.kind is now.kind is ValueKind.TEXT:
        return _is_wider(old, new) and not rewritten
    if was.kind is now.kind is ValueKind.INTEGER:
        return was.size < now.size
    return now.kind is ValueKind.TEXT and new.type_modifier == -1 and was.kind in _EXACT


def _is_wider(old: SchemaColumn, new: SchemaColumn) -> bool:
    """Return whether the new type's limit leaves every value of the old one as it is."""
    row = BY_OID.get(new.type_id)
    if row is None:
        return False
    if new.type_modifier == -1:
        return row.is_limited or row.kind in {ValueKind.TEXT, ValueKind.NUMERIC}
    if old.type_modifier == -1:
        return False
    was, now = numeric_size(old.type_modifier), numeric_size(new.type_modifier)
    if row.kind is ValueKind.NUMERIC and was and now:
        return was.scale == now.scale and was.precision <= now.precision
    return row.is_limited and old.type_modifier <= new.type_modifier
