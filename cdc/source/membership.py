"""The publication's tables as the catalogs have them, and how `cdc setup` changes them.

The daemon identifies a table's membership by the oid of its row in `pg_publication_rel`: another
oid means that the table was out of the publication for a while, which is a gap. A changed column
list or row filter also makes a new row, though the table was never out: in Postgres this takes a
drop and an add, in one transaction. So that transaction also leaves a note, as a line of the
publication's comment: which membership each new one continues. A manual change of the publication
leaves no note, and the gap is found.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
from psycopg import errors, sql

from cdc.errors import ConfigError, PermissionDeniedError
from cdc.log.records import OPERATIONS
from cdc.source import publication_members
from cdc.source.connection import translated
from cdc.source.publication_members import SCHEMAS_SINCE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from cdc.publication.plan import Member, Plan

_MARK = "lockstep: "
_OPERATIONS = ", ".join(OPERATIONS)


class Note(NamedTuple):
    """What `cdc setup` left in the publication's comment."""

    first: dict[int, int]  # by membership, the one that it continues
    # By each membership that it narrowed, the row filter as the configuration writes it, or "".
    where: dict[int, str]
    # Memberships that were ended on purpose: changes that are missing since then are not a gap.
    removed: frozenset[int] = frozenset()
    # By a version of the publication's row, the one that it continues: options that were changed.
    versions: dict[int, int] = {}  # noqa: RUF012 - never written


class Entry(NamedTuple):
    """A table that the publication names."""

    membership: int
    name: str  # quoted where SQL needs it
    columns: tuple[str, ...] | None
    filtered: bool

    @property
    def narrowed(self) -> bool:
        return self.filtered or self.columns is not None


class State(NamedTuple):
    """A publication as it is."""

    oid: int
    operations: frozenset[str]
    via_root: bool
    generated: bool
    all_tables: bool
    entries: dict[int, Entry]  # by the table's oid
    schemas: dict[str, int]  # published as a schema, and its oid in pg_publication_namespace
    published: dict[int, int]  # by the oid of each published table, its first membership
    note: Note
    version: int = 0  # of its row: another after each change of its options

    @property
    def first_version(self) -> int:
        """The version that this one continues."""
        return self.note.versions.get(self.version, self.version)


class Change(NamedTuple):
    """What differs between a publication and its plan."""

    add: list[Member]
    replace: list[Member]  # whose column list or row filter changes
    drop: list[Entry]
    add_schemas: list[str]
    drop_schemas: list[str]
    options: dict[str, str]
    by_hand: list[Entry]  # narrowed by hand; left unchanged

    def __bool__(self) -> bool:
        return any(self[:-1])


# --- reading ---

# Rows are read as JSON, so that what a major lacks is simply absent.
_PUBLICATION = """
SELECT oid::bigint, to_jsonb(p), xmin::text::bigint,
       coalesce(obj_description(oid, 'pg_publication'), '')
FROM pg_publication p WHERE pubname = %s
"""
_ENTRIES = """
SELECT r.prrelid::bigint, r.oid::bigint, format('%%I.%%I', n.nspname, c.relname),
       CASE WHEN jsonb_typeof(to_jsonb(r)->'prattrs') = 'array' THEN
           ARRAY(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = r.prrelid
                 AND to_jsonb(r)->'prattrs' @> to_jsonb(a.attnum::int) ORDER BY a.attnum) END,
       to_jsonb(r)->>'prqual' IS NOT NULL
FROM pg_publication_rel r JOIN pg_class c ON c.oid = r.prrelid
JOIN pg_namespace n ON n.oid = c.relnamespace WHERE r.prpubid = %s
"""
_SCHEMAS = """
SELECT n.nspname::text, p.oid::bigint
FROM pg_publication_namespace p JOIN pg_namespace n ON n.oid = p.pnnspid
WHERE p.pnpubid = %s
"""
_PUBLISHED = """
SELECT t.relid::bigint, coalesce(r.oid, 0)::bigint
FROM lockstep_members t
LEFT JOIN pg_publication_rel r ON r.prpubid = %(oid)s AND r.prrelid = t.relid
"""


def state(connection: psycopg.Connection, name: str) -> State | None:
    """Return the publication `name` as it is, or None."""
    with translated(f"reading the publication {name}"):
        row = connection.execute(_PUBLICATION, (name,)).fetchone()
        if row is None:
            return None
        oid, fields, version, comment = row
        entries = connection.execute(_ENTRIES, (oid,)).fetchall()
        schemas: list[tuple[str, int]] = []
        if connection.info.server_version >= SCHEMAS_SINCE:
            schemas = connection.execute(_SCHEMAS, (oid,)).fetchall()
        query = publication_members.members(connection.info.server_version) + _PUBLISHED
        found = connection.execute(query.encode(), {"publication": name, "oid": oid}).fetchall()
        published: dict[int, int] = dict(found)
        note = read_note(comment)
    return State(
        oid,
        frozenset(each for each in _OPERATIONS.split(", ") if fields[f"pub{each}"]),
        bool(fields.get("pubviaroot")),
        fields.get("pubgencols") == "s",
        bool(fields["puballtables"]),
        {
            table: Entry(member, quoted, None if listed is None else tuple(listed), filtered)
            for table, member, quoted, listed, filtered in entries
        },
        dict(schemas),
        {table: note.first.get(member, member) for table, member in published.items()},
        note,
        version,
    )


def read_note(comment: str) -> Note:
    """Return the note in a comment; an empty one where there is none that can be read."""
    for line in comment.splitlines():
        if line.startswith(_MARK):
            try:
                told: dict[str, dict[str, Any]] = json.loads(line.removeprefix(_MARK))
                first = {int(new): int(old) for new, old in told["continues"].items()}
                where = {int(at): str(text) for at, text in told["where"].items()}
                removed = frozenset(map(int, told.get("removed", ())))
                versions = {int(new): int(old) for new, old in told.get("versions", {}).items()}
                return Note(first, where, removed, versions)
            except (ValueError, KeyError, TypeError, AttributeError):
                break
    return Note({}, {})


# --- comparing ---


def difference(wanted: Plan, actual: State, excluded: Collection[int]) -> Change:
    """Return the change from `actual` to `wanted`; `excluded` are tables to be removed."""
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
            and (entry.membership not in actual.note.where)
        ):
            # The configuration does not mention the table: nothing asks to publish what is left
            # out.
            by_hand.append(entry)
        else:
            replace.append(member)
    options = {}
    if actual.via_root != wanted.via_root:
        options["publish_via_partition_root"] = "true" if wanted.via_root else "false"
    if actual.generated != wanted.generated:
        options["publish_generated_columns"] = "stored" if wanted.generated else "none"
    # A schema stays published as a schema only where the plan has it so, or does not know it.
    ours = {member.table.schema for member in wanted.members} | wanted.listed.keys()
    return Change(
        add,
        replace,
        [entry for table, entry in actual.entries.items() if table in excluded],
        sorted(wanted.schemas - actual.schemas.keys()),
        sorted((actual.schemas.keys() - wanted.schemas) & ours),
        options,
        by_hand,
    )


def _same(member: Member, entry: Entry, note: Note) -> bool:
    columns = None if member.columns is None else set(member.columns)
    if columns != (None if entry.columns is None else set(entry.columns)):
        return False
    if member.where is None:
        return not entry.filtered
    # Postgres stores a filter in its own spelling, so ours is in the note.
    return entry.filtered and note.where.get(entry.membership) == member.where


# --- changing ---


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


def alterations(name: str, change: Change) -> Iterator[sql.Composed]:
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
        yield head + sql.SQL("DROP TABLE {}").format(sql.SQL(", ").join(doomed))
    if change.add or change.replace:
        yield head + sql.SQL("ADD TABLE {}").format(_tables(change.replace + change.add))
    if change.add_schemas:
        yield head + sql.SQL("ADD TABLES IN SCHEMA {}").format(_schemas(change.add_schemas))


def _tables(members: list[Member]) -> sql.Composed:
    return sql.SQL(", ").join(map(_table, members))


def _table(member: Member) -> sql.Composed:
    parts: list[sql.Composable] = [sql.Identifier(member.table.schema, member.table.name)]
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


def create(connection: psycopg.Connection, name: str, wanted: Plan) -> None:
    """Create the publication; raise PermissionDeniedError with the SQL for an owner to run."""
    _run(connection, name, [creation(name, wanted)], wanted, None)


def alter(
    connection: psycopg.Connection, name: str, change: Change, wanted: Plan, before: State,
    removed: frozenset[int] = frozenset(),
) -> None:  # fmt: skip
    """Change the publication in one transaction, with a note of what each membership continues.

    `removed` are memberships that end on purpose, so that the daemon continues without them.
    """
    schemas = frozenset(before.schemas[schema] for schema in change.drop_schemas)
    _run(connection, name, list(alterations(name, change)), wanted, before, removed | schemas)


def _run(
    connection: psycopg.Connection,
    name: str,
    statements: list[sql.Composed],
    wanted: Plan,
    before: State | None,
    removed: frozenset[int] = frozenset(),
) -> None:
    try:
        with connection.transaction():
            for statement in statements:
                connection.execute(statement, binary=True)  # one statement: it may hold a filter
            _leave_note(connection, name, wanted, before, removed)
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
                hint="correct source.tables and tables in the configuration; `cdc doctor` tells"
                " more",
            ) from error
        with translated(f"creating or changing the publication {name}"):
            raise error from None


def _leave_note(
    connection: psycopg.Connection, name: str, wanted: Plan, before: State | None,
    removed: frozenset[int],
) -> None:  # fmt: skip
    now = state(connection, name)
    assert now is not None
    ours = {
        m.table.oid: m.where or ""
        for m in wanted.members
        if m.where is not None or m.columns is not None
    }
    known = before.published if before else {}
    continues, where, versions = {}, {}, {}
    for table, entry in now.entries.items():
        old = known.get(table)
        if old is not None and old != entry.membership:
            continues[entry.membership] = old
        if table in ours:
            where[entry.membership] = ours[table]
    if before and before.first_version != now.version:
        versions[now.version] = before.first_version
    removed |= now.note.removed
    if Note(continues, where, removed, versions) == now.note:
        return
    comment = connection.execute("SELECT obj_description(%s, 'pg_publication')", (now.oid,))
    text = (comment.fetchone() or [None])[0] or ""
    kept = [line for line in text.splitlines() if not line.startswith(_MARK)]
    if continues or where or removed or versions:
        note = {"continues": continues, "where": where, "removed": sorted(removed)}
        kept.append(_MARK + json.dumps(note | ({"versions": versions} if versions else {})))
    connection.execute(
        sql.SQL("COMMENT ON PUBLICATION {} IS {}").format(
            sql.Identifier(name), sql.Literal("\n".join(kept) or None)
        )
    )
