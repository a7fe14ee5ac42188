"""Which relations are refused: those that show a hidden column, and those whose key does not hold.

Pure. Each function returns, or raises a ConfigError that names the relation, the columns, and what
to write in the configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.encode.masks import column_mask, subject_column
from cdc.errors import ConfigError
from cdc.publication import column_identity

if TYPE_CHECKING:
    from collections.abc import Collection

    from cdc.config import TableSelection
    from cdc.decode.messages import Relation
    from cdc.log.records import ColumnNumbers, SchemaRecord
    from cdc.publication.column_identity import ExposedColumn
    from cdc.sequence.relation_request import RelationRequest


def key_holds(request: RelationRequest, record: SchemaRecord) -> None:
    """Raise ConfigError if the key would not distinguish this relation's rows, or be unknown."""
    labels = {column.name: column.mask for column in record.columns}
    missing = [name for name in record.key if name not in labels]
    if missing:
        raise ConfigError(
            f"the key of {request.name} is to be {', '.join(record.key)}, but at {request.from_lsn}"
            f" the table has no column {', '.join(missing)}",
            hint=f'correct tables."{request.name}".key; a column that was added later can be in the'
            " key of a new log only",
        )
    # Without a marked column Postgres refuses updates and deletes: inserts carry every column.
    unsent = [name for name in record.key if request.marked and name not in request.marked]
    if unsent:
        raise ConfigError(
            f"the key of {request.name} has {', '.join(unsent)}, which Postgres does not send with"
            f" updates and deletes: its replica identity is {', '.join(request.marked)}",
            hint="ALTER TABLE … REPLICA IDENTITY FULL, or USING INDEX of a unique index that has"
            f' the key\'s columns; or take another tables."{request.name}".key',
        )
    masks = {name: labels[name] for name in record.key}
    alike = [name for name, mask in masks.items() if mask and not mask.startswith("hmac:")]
    if alike:
        raise ConfigError(
            f"{', '.join(alike)} is in the key of {request.name}, and its mask"
            f" {masks[alike[0]]} would make rows alike",
            hint="a key's column takes the mask hmac, or none",
        )


def subjects_are_sent(request: RelationRequest, record: SchemaRecord) -> None:
    """Raise ConfigError where a column is encrypted by the key of what is not in every row."""
    for column in record.columns:
        mask = column_mask(request.selection, column.name)
        if mask is None or mask.subject is None:
            continue
        try:
            subject_column(record.columns, column.name, mask)
        except ConfigError as error:
            raise ConfigError(f"{request.name}: {error}", hint=error.hint) from None


def nothing_revealed(
    request: RelationRequest, record: SchemaRecord, before: SchemaRecord | None, *, numbered: bool
) -> None:
    """Raise ConfigError if what was hidden so far would be shown under another name."""
    selection, columns = request.selection, set(request.columns)
    if before is None:
        # The catalog may be newer than the stream: a column that either of them has is valid.
        missing = sorted(selection.hidden - columns - request.facts.nullable.keys())
        if missing:
            raise _revealed(request, missing, "but the table has none of that name")
        return
    hidden = {column.name for column in before.columns if column.mask is not None}
    known = {column.name for column in before.columns}
    shown = {c.name for c in record.columns if c.mask is None and selection.mask(c.name) is None}
    if hidden & shown:
        raise _revealed(request, sorted(hidden & shown), "and no longer names them")
    missing = sorted(hidden - columns)
    by_number = numbered and all(c.attnum for c in before.columns if c.mask is not None)
    if missing and shown - known and not by_number:
        new = ", ".join(sorted(shown - known))
        raise _revealed(
            request, missing, f"but that column is missing, and {new} is new and may be the same"
        )


def named_columns_exist(
    request: RelationRequest, versions: list[SchemaRecord], known: list[ColumnNumbers]
) -> None:
    """Raise ConfigError if the table's configuration hides a column that never existed."""
    ever = {*request.columns, *request.facts.nullable}
    ever |= {column.name for version in versions for column in version.columns}
    ever |= {column.name for numbers in known for column in numbers.columns}
    ever |= {name for numbers in known for name in numbers.hidden.values()}
    if never := sorted(request.selection.hidden - ever):
        raise _revealed(request, never, "but the table has none of that name")


def nothing_exposed(
    request: RelationRequest,
    exposed: list[ExposedColumn],
    today: ColumnNumbers,
    hidden: dict[int, str],
    *,
    unnumbered: bool,
) -> None:
    """Raise ConfigError if a hidden column is shown, may be, or is computed from.

    `today` are the columns' numbers in the catalog; `unnumbered`: the log hid columns by name only.
    """
    if exposed:
        raise _computed(request, exposed, today, hidden) or _shown(
            request, exposed, dropped=not today.columns, unnumbered=unnumbered
        )


def undecided_columns(
    relation: Relation, selection: TableSelection, known: Collection[str]
) -> list[str]:
    """Return the columns that are not `known`, and that the configuration shows without `keep`."""
    return [
        column.name
        for column in relation.columns
        if column.name not in known
        and selection.mask(column.name) is None
        and selection.captures(column.name)
    ]


def may_be_hidden(relation: Relation, columns: list[str], *, dropped: bool) -> ConfigError:
    """Return the error for columns that the table which the relation was a part of may hide."""
    name = f"{relation.namespace}.{relation.name}"
    now = "was dropped since" if dropped else "is not published now"
    return ConfigError(
        f"{name} may have been a partition, and it {now}: so it is not known which of its columns"
        f" the configuration hides as those of its table: {', '.join(columns)}",
        hint=f'tables."{name}": mask: {{"*": null}} hides them all; `keep` after it, as in'
        ' {"*": null, id: keep}, shows what may be shown, and the key\'s columns take `keep` or'
        " hmac. Then only `cdc run`, and take it out again afterwards",
    )


def _computed(
    request: RelationRequest,
    revealed: list[ExposedColumn],
    today: ColumnNumbers,
    hidden: dict[int, str],
) -> ConfigError | None:
    """Return the error for columns that are computed from hidden ones; None if none of them is."""
    found = {
        each.name: column_identity.computed_from_hidden(today, hidden, each.attnum)
        for each in revealed
        if each.name == each.hidden_as
    }
    shown = {name: origins for name, origins in found.items() if origins}
    if not shown:
        return None
    columns = "; ".join(f"{name} is computed from {', '.join(of)}" for name, of in shown.items())
    return ConfigError(
        f"{request.name} at {request.from_lsn} would show values of a hidden column: {columns}",
        hint=f'hide {", ".join(shown)} too: tables."{request.name}".mask, or exclude; `keep` there'
        " shows what may be shown; source.generated_columns: none captures no generated column",
    )


def _shown(
    request: RelationRequest, revealed: list[ExposedColumn], *, dropped: bool, unnumbered: bool
) -> ConfigError:
    """Return the error for hidden columns that have, or may have, names that are shown."""
    same = sorted({each.name for each in revealed if each.certain and each.name == each.hidden_as})
    if same:
        how = "and no longer names them, or hides what they are generated from"
        return _revealed(request, same, how)
    columns = [
        f"{each.hidden_as} (column {each.attnum}) {'is' if each.certain else 'may be'} {each.name}"
        for each in revealed
    ]
    names = sorted({each.name for each in revealed})
    if dropped:
        why = "the table was dropped since, and with it what shows which column is which"
    elif all(each.certain for each in revealed):
        why = "the name has passed to another column"
    else:
        why = "columns were dropped and added since, so its name does not show which it is"
    first = "run `cdc setup`, which records each hidden column's number; or " if unnumbered else ""
    return ConfigError(
        f"{request.name} at {request.from_lsn} would show a hidden column: {', '.join(columns)};"
        f" {why}",
        hint=f'{first}hide {", ".join(names)} too: tables."{request.name}".mask. Once `cdc run` has'
        " passed this change, `keep` there shows what may be shown; where no column has such a name"
        " any more, `cdc setup` refuses it: only `cdc run`, and take it out again afterwards",
    )


def _revealed(request: RelationRequest, columns: list[str], how: str) -> ConfigError:
    return ConfigError(
        f"{request.name}: the configuration hid {', '.join(columns)} so far, {how}",
        hint=f'name table and column as they are called now: tables."{request.name}".mask; there'
        " `keep` names the columns that may be shown from here on",
    )
