"""Publications as the catalogs have them: options, tables, column lists, row filters.

One type for every reader: `cdc setup` compares it with its plan, and the daemon with what the log
pins of it (`Publication.pinned`). Nothing here waits for a table's lock (`cdc.source.members`,
`cdc.source.row_filters`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from cdc.errors import GapError, UnavailableError
from cdc.log.records import OPERATIONS, PinnedPublication, PublicationOptions
from cdc.source import members, publication_note, tables
from cdc.source.connection import translated
from cdc.source.members import SCHEMAS_SINCE
from cdc.source.publication_note import PublicationNote
from cdc.source.row_filters import TREE_HASH

if TYPE_CHECKING:
    from cdc.source.connection import Connection

_Value = TypeVar("_Value")
# A reading takes milliseconds: tools that add tables one by one do not disturb 20 in a row.
_READS: Final = 20


class PublicationEntry(NamedTuple):
    """A table that the publication names: a row of `pg_publication_rel`."""

    membership: int  # the row's oid
    schema: str
    table: str
    name: str  # quoted where SQL needs it
    columns: tuple[str, ...] | None = None  # its column list
    attnums: tuple[int, ...] | None = None  # the same by number
    row_filter: str | None = None  # a hash of its row filter, `#` first


class PublishedTable(NamedTuple):
    """A table whose changes are sent under its name: by name, by schema or by FOR ALL TABLES."""

    schema: str
    table: str
    name: str  # quoted where SQL needs it
    membership: int  # of its entry, or the one that this continues; 0 where it has no entry


class Publication(NamedTuple):
    """A publication and the tables that it names and publishes."""

    name: str
    oid: int
    owner: str
    operations: frozenset[str]  # of insert, update, delete, truncate
    via_root: bool
    generated: str  # which generated columns it publishes without a column list: none, stored
    all_tables: bool
    version: int  # of its row in the catalog: another after each change of its options
    note: PublicationNote
    entries: dict[int, PublicationEntry]  # by the table's oid
    schemas: dict[str, int]  # published as a schema, and its oid in pg_publication_namespace
    published: dict[int, PublishedTable]  # by the table's oid

    @property
    def first_version(self) -> int:
        """Return the version that this one continues."""
        return self.note.versions.get(self.version, self.version)

    def first_membership(self, entry: PublicationEntry) -> int:
        """Return the membership that the entry continues, or its own."""
        return self.note.continues.get(entry.membership, entry.membership)

    @property
    def names(self) -> dict[int, tuple[str, str]]:
        """Return schema and name of each table that it names or publishes, by oid."""
        every: dict[int, PublicationEntry | PublishedTable] = {**self.entries, **self.published}
        return {oid: (each.schema, each.table) for oid, each in every.items()}

    @property
    def unpublished_operations(self) -> list[str]:
        """Return the operations that it does not publish."""
        return [each for each in OPERATIONS if each not in self.operations]

    @property
    def pinned(self) -> PinnedPublication:
        """Return what the resume record pins of it."""
        options = PublicationOptions(
            self.first_version,
            self.owner,
            tuple(each for each in OPERATIONS if each in self.operations),
            self.via_root,
            self.generated,
            self.all_tables,
            self.schemas,
        )
        return PinnedPublication(
            self.name,
            self.oid,
            {each.name: each.membership for each in self.published.values()},
            tuple(sorted(self.note.removed)),
            options,
            {
                each.name: (each.attnums, each.row_filter)
                for each in self.entries.values()
                if each.attnums is not None or each.row_filter is not None
            },
            {each.name: oid for oid, each in self.published.items()},
        )


class PublicationVersion(NamedTuple):
    """What a change of the publication changes, in one row for any number of tables.

    Tables that are created, dropped or moved change it only where the publication names them.
    """

    oid: int
    row_version: int
    comment: str | None  # with our note
    entries: int  # how many tables it names
    sum_of_memberships: int | None
    schemas: list[int] | None  # the memberships of schemas


# The row is read as JSON, so that what a major lacks is simply absent.
_PUBLICATION: Final = """
SELECT p.oid::bigint, pg_get_userbyid(p.pubowner)::text, to_jsonb(p), p.xmin::text::bigint,
       coalesce(obj_description(p.oid, 'pg_publication'), '')
FROM pg_publication p WHERE p.pubname = %s
"""
# Every table that is named or published: a partitioned table may be named and published through its
# partitions, a table of a published schema is not named.
_TABLES: Final = """
SELECT c.oid::bigint, n.nspname::text, c.relname::text, format('%%I.%%I', n.nspname, c.relname),
       m.relid IS NOT NULL, r.oid::bigint, {restriction}
FROM lockstep_members m
FULL JOIN (SELECT * FROM pg_publication_rel WHERE prpubid = %(oid)s) r ON r.prrelid = m.relid
JOIN pg_class c ON c.oid = coalesce(m.relid, r.prrelid)
JOIN pg_namespace n ON n.oid = c.relnamespace
ORDER BY n.nspname::text, c.relname::text
"""
_RESTRICTION: Final = """
       CASE WHEN r.prattrs IS NOT NULL THEN ARRAY(
           SELECT a.attname::text FROM pg_attribute a
           WHERE a.attrelid = r.prrelid AND a.attnum = ANY(r.prattrs::int2[]) ORDER BY a.attnum)
       END,
       r.prattrs::int2[], """
_SCHEMAS: Final = """
SELECT n.nspname::text, p.oid::bigint
FROM pg_publication_namespace p JOIN pg_namespace n ON n.oid = p.pnnspid WHERE p.pnpubid = %s
"""
_VERSION: Final = """
SELECT p.oid::bigint, p.xmin::text::bigint, obj_description(p.oid, 'pg_publication'),
       (SELECT count(*) FROM pg_publication_rel r WHERE r.prpubid = p.oid),
       (SELECT sum(r.oid::bigint) FROM pg_publication_rel r WHERE r.prpubid = p.oid),
       {schemas}
FROM pg_publication p WHERE p.pubname = %s
"""
_VERSION_OF_SCHEMAS: Final = """
       (SELECT array_agg(s.oid::bigint ORDER BY s.oid) FROM pg_publication_namespace s
        WHERE s.pnpubid = p.oid)
"""


def read_publication(connection: Connection, name: str) -> Publication | None:
    server_version = connection.info.server_version
    has_schemas = server_version >= SCHEMAS_SINCE
    schemas: list[tuple[str, int]] = []
    restriction = _RESTRICTION + TREE_HASH if has_schemas else "NULL, NULL, NULL"
    query = members.members_clause(server_version) + _TABLES.format(restriction=restriction)
    with translated(f"reading the publication {name}"):
        row = connection.execute(_PUBLICATION, (name,)).fetchone()
        if row is None:
            return None
        oid, owner, fields, version, comment = row
        rows = connection.execute(query.encode(), {"publication": name, "oid": oid}).fetchall()
        if has_schemas:
            schemas = connection.execute(_SCHEMAS, (oid,)).fetchall()
    note = publication_note.parse(comment)
    entries, published = {}, {}
    for table, schema, relation, quoted, is_published, membership, columns, attnums, hashed in rows:
        if membership is not None:
            entries[table] = PublicationEntry(
                membership,
                schema,
                relation,
                quoted,
                None if columns is None else tuple(columns),
                None if attnums is None else tuple(attnums),
                hashed,
            )
        if is_published:
            first = note.continues.get(membership, membership or 0)
            published[table] = PublishedTable(schema, relation, quoted, first)
    return Publication(
        name=name,
        oid=oid,
        owner=owner,
        operations=frozenset(each for each in OPERATIONS if fields[f"pub{each}"]),
        via_root=bool(fields.get("pubviaroot")),
        generated="stored" if fields.get("pubgencols") == "s" else "none",
        all_tables=bool(fields["puballtables"]),
        version=version,
        note=note,
        entries=entries,
        schemas=dict(schemas),
        published=published,
    )


def read_publication_version(connection: Connection, name: str) -> PublicationVersion:
    """Return a value that changes with each change of the publication, at the cost of one row.

    Raises GapError where there is no publication.
    """
    return _found(_version(connection, name), name)


def read_pinned(connection: Connection, name: str) -> PinnedPublication:
    """Return what the log pins of the publication; GapError where it does not exist."""
    return _found(_read_unchanged(connection, name), name).pinned


def read_pinned_with_tables(
    connection: Connection, name: str, known: PinnedPublication
) -> tuple[PinnedPublication, frozenset[str]]:
    """Return what to pin now, and which tables of `known` exist under any name, by the names there.

    They were one table throughout, so one that is dropped and created again meanwhile is not taken
    for one that has left the publication. Raises GapError where there is no publication.
    """
    publication, existing = read_publication_with_tables(connection, name, known)
    return _found(publication, name).pinned, existing


def read_publication_with_tables(
    connection: Connection, name: str, known: PinnedPublication
) -> tuple[Publication | None, frozenset[str]]:
    """Return the publication, None where it does not exist, and the tables likewise."""
    # Each query has a snapshot of its own, so the tables are read before and after.
    before = tables.tables_by_oid(connection, known.tables, known.relations)
    publication = _read_unchanged(connection, name)
    throughout = before & tables.tables_by_oid(connection, known.tables, known.relations)
    return publication, frozenset(table for table, _ in throughout)


def _found(value: _Value | None, name: str) -> _Value:
    if value is None:
        raise GapError(
            f'the publication "{name}" does not exist',
            hint="`cdc setup` creates it; changes made while it was missing are not streamed, so if"
            " it existed before, re-snapshot its tables",
        )
    return value


def _version(connection: Connection, name: str) -> PublicationVersion | None:
    schemas = connection.info.server_version >= SCHEMAS_SINCE
    query = _VERSION.format(schemas=_VERSION_OF_SCHEMAS if schemas else "NULL")
    with translated(f"looking at the publication {name}"):
        row = connection.execute(query.encode(), (name,)).fetchone()
    return None if row is None else PublicationVersion(*row)


def _read_unchanged(connection: Connection, name: str) -> Publication | None:
    """Return the publication as read between two equal versions of it."""
    version = _version(connection, name)
    for _ in range(_READS):
        publication = read_publication(connection, name)
        before, version = version, _version(connection, name)
        if before == version:
            return publication
    raise UnavailableError(
        f'the publication "{name}" changed {_READS} times while it was read',
        hint="wait until its changes have ended",
    )
