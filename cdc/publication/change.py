"""Change the publication to what its plan describes, as `cdc setup` and `cdc table` do.

Each change is one transaction, which also writes a note into the publication's comment
(`cdc.source.publication_note`): so the daemon continues, as it would not after a manual change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import psycopg
from psycopg import errors, sql

from cdc.errors import ConfigError, PermissionDeniedError
from cdc.log.records import OPERATIONS
from cdc.source import publication_note
from cdc.source.abilities import PublicationRefusal
from cdc.source.connection import translate
from cdc.source.publication_note import PublicationNote
from cdc.source.publications import read_publication

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Selection
    from cdc.publication.plan import Plan, PlannedTable
    from cdc.source.connection import Connection
    from cdc.source.publications import Publication, PublicationEntry

_OPERATIONS: Final = ", ".join(OPERATIONS)
# An application's DDL may hold a lock on a table; which is unrelated to privileges.
_LOCK_TIMEOUT: Final = "SET LOCAL lock_timeout = '3s'"


class PublicationChange(NamedTuple):
    """What differs between a publication and its plan."""

    add: list[PlannedTable]
    replace: list[PlannedTable]  # whose column list or row filter changes
    drop: list[PublicationEntry]
    add_schemas: list[str]
    drop_schemas: list[str]
    options: dict[str, str]
    by_hand: list[PublicationEntry]  # restricted by hand; left unchanged

    def __bool__(self) -> bool:
        return any(self[:-1])


NO_CHANGE: Final = PublicationChange([], [], [], [], [], {}, [])


def difference(wanted: Plan, actual: Publication, selection: Selection) -> PublicationChange:
    """Return the change from `actual` to `wanted`; what `selection` excludes is to be removed."""
    add, replace, by_hand = [], [], []
    for member in wanted.members:
        entry = actual.entries.get(member.table.oid)
        if entry is None:
            if member.table.schema not in wanted.schemas and not actual.all_tables:
                add.append(member)
        elif _same(member, entry, actual.note):
            continue
        elif (
            member.columns is None
            and member.where is None
            and (entry.membership not in actual.note.filters)
        ):
            # The configuration does not mention the table: nothing asks to publish what is left
            # out.
            by_hand.append(entry)
        else:
            replace.append(member)
    options = {}
    if actual.via_root != wanted.via_root:
        options["publish_via_partition_root"] = "true" if wanted.via_root else "false"
    generated = "stored" if wanted.generated else "none"
    if actual.generated != generated:
        options["publish_generated_columns"] = generated
    # A schema stays published as a schema only where the plan has it so, or does not know it.
    ours = {member.table.schema for member in wanted.members} | wanted.refused_schemas.keys()
    return PublicationChange(
        add,
        replace,
        [each for each in actual.entries.values() if selection.excludes(each.schema, each.table)],
        sorted(wanted.schemas - actual.schemas.keys()),
        sorted((actual.schemas.keys() - wanted.schemas) & ours),
        options,
        by_hand,
    )


def _same(member: PlannedTable, entry: PublicationEntry, note: PublicationNote) -> bool:
    columns = None if member.columns is None else set(member.columns)
    if columns != (None if entry.columns is None else set(entry.columns)):
        return False
    if member.where is None:
        return entry.row_filter is None
    # Postgres stores a filter in its own spelling, so ours is in the note.
    return entry.row_filter is not None and note.filters.get(entry.membership) == member.where


def creation(name: str, wanted: Plan) -> sql.Composed:
    """Return the statement that creates the publication."""
    options = {
        "publish": _OPERATIONS,
        "publish_via_partition_root": "true" if wanted.via_root else "false",
    }
    if wanted.generated:
        options["publish_generated_columns"] = "stored"
    listed = [each for each in wanted.members if each.table.schema not in wanted.schemas]
    objects = []
    if listed:
        objects.append(sql.SQL("TABLE {}").format(_tables(listed)))
    if wanted.schemas:
        objects.append(sql.SQL("TABLES IN SCHEMA {}").format(_schemas(sorted(wanted.schemas))))
    return sql.SQL("CREATE PUBLICATION {} FOR {} WITH ({})").format(
        sql.Identifier(name), sql.SQL(", ").join(objects), _options(options)
    )


def alterations(name: str, change: PublicationChange) -> Iterator[sql.Composed]:
    """Yield the statements that make the change; run them in one transaction."""
    head = sql.SQL("ALTER PUBLICATION {} ").format(sql.Identifier(name))
    if change.options:
        yield head + sql.SQL("SET ({})").format(_options(change.options))
    if change.drop_schemas:
        # Before any column list: Postgres has no publication with both.
        yield head + sql.SQL("DROP TABLES IN SCHEMA {}").format(_schemas(change.drop_schemas))
    doomed: list[sql.Composable] = [sql.SQL(entry.name) for entry in change.drop]  # quoted
    doomed += [sql.Identifier(m.table.schema, m.table.name) for m in change.replace]
    if doomed:
        only = (sql.SQL("ONLY {}").format(each) for each in doomed)
        yield head + sql.SQL("DROP TABLE {}").format(sql.SQL(", ").join(only))
    if change.add or change.replace:
        yield head + sql.SQL("ADD TABLE {}").format(_tables(change.replace + change.add))
    if change.add_schemas:
        yield head + sql.SQL("ADD TABLES IN SCHEMA {}").format(_schemas(change.add_schemas))


def _tables(members: list[PlannedTable]) -> sql.Composed:
    return sql.SQL(", ").join(map(_table, members))


def _table(member: PlannedTable) -> sql.Composed:
    """Return a member without the tables that inherit from it, which have settings of their own."""
    name = sql.Identifier(member.table.schema, member.table.name)
    parts: list[sql.Composable] = [sql.SQL("ONLY {}").format(name)]
    if member.columns is not None:
        names = sql.SQL(", ").join(map(sql.Identifier, member.columns))
        parts.append(sql.SQL("({})").format(names))
    if member.where is not None:
        # SQL from the configuration, as Postgres accepts it.
        parts.append(sql.SQL("WHERE (" + member.where + ")"))
    return sql.SQL(" ").join(parts)


def _schemas(names: list[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, names))


def _options(options: dict[str, str]) -> sql.Composed:
    each = (sql.SQL("{} = {}").format(sql.SQL(k), sql.Literal(v)) for k, v in options.items())
    return sql.SQL(", ").join(each)


def create(connection: Connection, name: str, wanted: Plan) -> None:
    """Create the publication; raise PermissionDeniedError with the SQL for an owner to run."""
    _run(connection, name, [creation(name, wanted)], wanted, None)


def alter(
    connection: Connection, name: str, change: PublicationChange, wanted: Plan, before: Publication,
    removed: frozenset[int] = frozenset(),
) -> None:  # fmt: skip
    """Change the publication in one transaction, with a note of what each membership continues.

    `removed` are memberships that end on purpose, so that the daemon continues without them.
    """
    schemas = frozenset(before.schemas[schema] for schema in change.drop_schemas)
    _run(connection, name, list(alterations(name, change)), wanted, before, removed | schemas)


def _run(
    connection: Connection,
    name: str,
    statements: list[sql.Composed],
    wanted: Plan,
    before: Publication | None,
    removed: frozenset[int] = frozenset(),
) -> None:
    try:
        with connection.transaction():
            for statement in statements:
                connection.execute(statement, binary=True)  # one statement: it may hold a filter
            _write_note(connection, name, wanted, before, removed)
    except errors.InsufficientPrivilege as error:
        foreign = [str(m.table) for m in wanted.members if not m.table.owned]
        why = f"; our role does not own {', '.join(foreign)}" if foreign else ""
        text = ";\n    ".join(each.as_string(connection) for each in statements)
        raise PermissionDeniedError(
            f"cannot create or change the publication {name}: {error.diag.message_primary}{why}",
            hint="it takes CREATE on the database and every table's owner; as an owner or a "
            f"superuser run:\n    {text};\n  then `cdc setup` again; to change a table's columns or"
            " row filter, run `cdc setup` itself as that role: done by hand it is a gap",
        ) from error
    except psycopg.Error as error:
        if error.sqlstate and error.sqlstate[:2] in {"42", "0A", "22", "55"}:
            raise ConfigError(
                f"Postgres refuses the publication {name}: {error.diag.message_primary}"
                + (f" ({error.diag.message_detail})" if error.diag.message_detail else ""),
                hint="correct source.tables and tables in the configuration; `cdc doctor` shows"
                " more",
            ) from error
        raise translate(error, f"creating or changing the publication {name}") from error


def _write_note(
    connection: Connection, name: str, wanted: Plan, before: Publication | None,
    removed: frozenset[int],
) -> None:  # fmt: skip
    """Note what each membership and version continues, unless the note says so already."""
    now = read_publication(connection, name)
    assert now is not None
    filters = {
        m.table.oid: m.where or ""
        for m in wanted.members
        if m.where is not None or m.columns is not None
    }
    known = before.published if before else {}
    note = PublicationNote(
        continues={
            entry.membership: known[table].membership
            for table, entry in now.entries.items()
            if table in known and known[table].membership != entry.membership
        },
        filters={
            entry.membership: filters[table]
            for table, entry in now.entries.items()
            if table in filters
        },
        removed=removed | now.note.removed,
        versions=(
            {now.version: before.first_version}
            if before and before.first_version != now.version
            else {}
        ),
    )
    if note == now.note:
        return
    comment = connection.execute(
        "SELECT coalesce(obj_description(%s, 'pg_publication'), '')", (now.oid,)
    ).fetchone()
    assert comment is not None, "a SELECT without FROM gives a row"
    text = publication_note.comment_with(comment[0], note)
    connection.execute(
        sql.SQL("COMMENT ON PUBLICATION {} IS {}").format(
            sql.Identifier(name), sql.Literal(text or None)
        )
    )


def refusal(
    connection: Connection,
    name: str,
    wanted: Plan,
    actual: Publication | None,
    selection: Selection,
) -> PublicationRefusal | None:
    """Return how Postgres refuses to create or change the publication, or None. Rolled back."""
    if actual is None:
        statements = [creation(name, wanted)]
    else:
        statements = list(alterations(name, difference(wanted, actual, selection)))
    if not statements:
        return None
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(_LOCK_TIMEOUT)
            _run(connection, name, statements, wanted, actual)
    except (PermissionDeniedError, ConfigError) as error:
        if isinstance(error.__cause__, errors.LockNotAvailable):
            return None
        return PublicationRefusal(
            error, " ".join(f"{each.as_string(connection)};" for each in statements)
        )
    return None
