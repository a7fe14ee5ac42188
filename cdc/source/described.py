"""Published tables as the catalogs have them at one snapshot.

The contents of their relation messages, and where their rows are stored. Read inside a transaction
that is pinned to the snapshot (`cdc.source.pinned`), so that everything belongs to one moment. Two
things are always current, as Postgres has them in its caches: a heap's current filenode, which
differs from the catalog's where the table was rewritten since, and its size, which only grows.

https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html (Relation)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from psycopg import sql

from cdc.decode import messages
from cdc.source.column_types import FIRST_OF_USERS, base_value
from cdc.source.connection import translated
from cdc.source.lookups import Lookup, look_up
from cdc.source.members import read_members
from cdc.source.partition_trees import TREES
from cdc.source.tables import read_columns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.source.connection import Connection
    from cdc.source.lookups import SentTable, TableFacts

# Postgres sends type messages only for types above the built-in ones (FirstGenbkiObjectId).
_FIRST_SENT: Final = 10_000


class SentColumn(NamedTuple):
    name: str
    type_id: int
    type_modifier: int
    key: bool  # of the replica identity
    attnum: int = 0


class Heap(NamedTuple):
    """A relation that holds rows: the table itself, or one of its partitions."""

    oid: int
    schema: str
    name: str
    kind: str  # relkind: r table, f foreign
    persistence: str
    access_method: str
    filenode: int  # at the snapshot
    filenode_now: int | None  # None: dropped since
    bytes: int
    rows: int  # by the last ANALYZE
    attnums: dict[str, int]

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def quoted(self) -> str:
        return sql.Identifier(self.schema, self.name).as_string()


class DescribedTable(NamedTuple):
    oid: int
    schema: str
    name: str
    replica_identity: str
    columns: tuple[SentColumn, ...]
    types: dict[int, str]  # names of those that are not built in, as the stream sends them
    outputs: tuple[str, ...]  # an expression per column: its text as pgoutput writes it
    facts: TableFacts
    published: SentTable
    heaps: tuple[Heap, ...]

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def relation(self) -> messages.Relation:
        """The message with which the stream would describe the table."""
        return messages.Relation(
            self.oid,
            "" if self.schema == "pg_catalog" else self.schema,
            self.name,
            messages.ReplicaIdentity(self.replica_identity),
            tuple(
                messages.RelationColumn(
                    each.key, each.name, each.type_id, each.type_modifier, each.attnum
                )
                for each in self.columns
            ),
        )


class Moment(NamedTuple):
    """When the catalogs are read, and the page size of this server."""

    now_us: int
    block_size: int


def moment(connection: Connection) -> Moment:
    """Return it, by the server's own clock, which commit times use too."""
    with translated("reading the server's time"):
        row = connection.execute(
            "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,"
            " current_setting('block_size')::int"
        ).fetchone()
    assert row is not None
    return Moment(*row)


_HEAPS: Final = f"""
{TREES}
SELECT c.oid::bigint, n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence::text,
       coalesce(m.amname::text, ''), c.relfilenode::bigint, pg_relation_filenode(c.oid)::bigint,
       coalesce(pg_relation_size(c.oid), 0)::bigint, greatest(c.reltuples, 0)::bigint,
       (SELECT jsonb_object_agg(a.attname, a.attnum) FROM pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)
FROM tree t JOIN pg_class c ON c.oid = t.oid JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_am m ON m.oid = c.relam
WHERE t.relkind <> 'p' ORDER BY 2, 3
"""  # noqa: S608 - our own rules
# A domain is described, and written, as its base type, at any depth.
_TYPES: Final = """
WITH RECURSIVE base(oid, at) AS (
    SELECT oid, oid FROM pg_type WHERE oid = ANY(%s::oid[])
    UNION ALL
    SELECT b.oid, t.typbasetype FROM base b JOIN pg_type t ON t.oid = b.at WHERE t.typtype = 'd')
SELECT b.oid::bigint, t.oid::bigint, n.nspname::text, t.typname::text, b.oid <> b.at,
       f.nspname::text, p.proname::text, s.proname::text
FROM base b JOIN pg_type t ON t.oid = b.at JOIN pg_namespace n ON n.oid = t.typnamespace
JOIN pg_proc p ON p.oid = t.typoutput JOIN pg_namespace f ON f.oid = p.pronamespace
LEFT JOIN pg_proc s ON s.oid = t.typsend
WHERE t.typtype <> 'd'
"""


# By the binary send functions: types that are text, and types written as text is.
_TEXT: Final = {"textsend", "varcharsend"}
_AS_TEXT: Final = {"bpcharsend", "namesend", "json_send"}


class _Type(NamedTuple):
    base: int
    schema: str
    name: str
    is_domain: bool
    output_schema: str
    output: str
    send: str | None

    @property
    def sent_name(self) -> str:
        """Its name as the stream's type message gives it (`cdc.sequence.sequencer`)."""
        if self.schema == "pg_catalog":
            return self.name
        schema = f'"{self.schema}"' if "." in self.schema else self.schema
        return f"{schema}.{self.name}"

    def text_of(self, column: str) -> str:
        """Return the SQL of a column's text: by the same function that pgoutput calls.

        A cast to text differs for some types: booleans, char(n), inet. Where a type is text in
        binary too, no function is called. No type of a user is named or cast, because its owner may
        rename it, and create casts: they would run with our rights.
        """
        value = sql.Identifier(column).as_string()
        if self.base >= FIRST_OF_USERS:
            return self._text_of_users(base_value(value, is_domain=self.is_domain))
        if self.is_domain:
            value += f"::{sql.Identifier(self.schema, self.name).as_string()}"
        if self.send in _TEXT:
            return f"{value}::pg_catalog.text"
        if self.send in _AS_TEXT:
            return value
        output = sql.Identifier(self.output_schema, self.output).as_string()
        return f"pg_catalog.textin({output}({value}))"

    def _text_of_users(self, value: str) -> str:
        if self.output_schema == "pg_catalog":  # that of any enum, range, array or row
            output = sql.Identifier(self.output_schema, self.output).as_string()
            return f"pg_catalog.textin({output}({value}))"
        # The function is that of the type's row, whatever has its name meanwhile.
        is_null = f"{value} IS NOT DISTINCT FROM NULL"
        return f"CASE WHEN {is_null} THEN NULL ELSE pg_catalog.concat({value}) END"


def describe_tables(connection: Connection, publication: str) -> Iterator[DescribedTable]:
    """Yield every table of the publication, in a transaction that is `pinned`."""
    members = read_members(connection, publication)
    found = look_up(connection, publication, [each.oid for each in members])
    for oid, schema, name, identity, *_ in members:
        yield describe_table(connection, publication, oid, schema, name, identity, found[oid])


def describe_table(
    connection: Connection, publication: str, oid: int, schema: str, name: str, identity: str,
    known: Lookup | None = None, *, heaps: bool = True,
) -> DescribedTable:  # fmt: skip
    """Return one table of the publication; `identity` is its relreplident.

    With `heaps`, reading their sizes waits for sessions that hold the table exclusively.
    """
    facts, published = known or look_up(connection, publication, [oid])[oid]
    with translated(f"reading the catalog on {schema}.{name}"):
        columns = read_columns(connection, [oid]).get(oid, [])
        marked = {column.name for column in columns if column.in_identity}
        found = connection.execute(_HEAPS, ([oid],)).fetchall() if heaps else []
        wanted = [type_id for _, type_id, _ in published.columns]
        types = {
            type_id: _Type(*fields)
            for type_id, *fields in connection.execute(_TYPES, (wanted,)).fetchall()
        }
    return DescribedTable(
        oid=oid,
        schema=schema,
        name=name,
        replica_identity=identity,
        columns=tuple(
            SentColumn(column, type_id, modifier, column in marked, attnum)
            for (column, type_id, modifier), attnum in zip(
                published.columns, published.attnums, strict=True
            )
        ),
        types={k: t.sent_name for k, t in types.items() if k >= _FIRST_SENT},
        outputs=tuple(types[type_id].text_of(column) for column, type_id, _ in published.columns),
        facts=facts,
        published=published,
        heaps=tuple(Heap(*row) for row in found),
    )
