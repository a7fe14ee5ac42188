"""Tables that are or may be published, as the catalogs have them: columns, partitions, names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from psycopg import errors, sql

from cdc.source import indexes
from cdc.source.connection import translated
from cdc.source.partition_trees import TREES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from cdc.config import Selection
    from cdc.source.connection import Connection

# Counting a large table takes minutes; above this many rows the statistics' estimate is used.
COUNT_LIMIT: Final = 10_000
_VIEWS: Final = {"v": "a view", "m": "a materialized view", "f": "a foreign table"}
_NOT_LOGGED: Final = {"u": "an unlogged table", "t": "a temporary table"}


class SourceTable(NamedTuple):
    oid: int
    schema: str
    name: str
    kind: str  # relkind: r table, p partitioned, v view, m materialized view, f foreign
    persistence: str  # p permanent, u unlogged, t temporary
    replica_identity: str  # d default, f full, i index, n nothing
    has_primary_key: bool  # that can be its replica identity
    identifies_rows: bool  # else Postgres refuses updates and deletes once it is published
    owner: str
    owned: bool  # by our role, or a role it is a member of
    may_select: bool
    estimated_rows: int
    catalog_name: str  # quoted where SQL needs it, as the resume record has it

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def quoted(self) -> str:
        return sql.Identifier(self.schema, self.name).as_string()

    @property
    def publishable(self) -> bool:
        return self.kind in ("r", "p") and self.persistence == "p"

    @property
    def description(self) -> str:
        """Return in words what kind of relation it is."""
        return _VIEWS.get(self.kind) or _NOT_LOGGED.get(self.persistence) or "a table"


class TableColumn(NamedTuple):
    """A column as the catalog has it today."""

    name: str
    generated: str  # empty, s stored, v virtual
    in_identity: bool  # sent with updates and deletes
    in_primary_key: bool
    type_id: int


class Partition(NamedTuple):
    """A partition that holds rows."""

    oid: int
    schema: str
    name: str
    identifies_rows: bool  # whether its updates and deletes can be published

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"


_TABLES: Final = f"""
SELECT c.oid::bigint, n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence::text,
       c.relreplident::text,
       EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND {indexes.PRIMARY_KEY}),
       {indexes.IDENTIFIES_ROWS},
       pg_get_userbyid(c.relowner)::text, pg_has_role(c.relowner, 'USAGE'),
       has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT'),
       greatest(c.reltuples, 0)::bigint, format('%%I.%%I', n.nspname, c.relname)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f')
      AND CASE WHEN %s::text[] IS NULL
               THEN n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
               ELSE n.nspname = ANY(%s) END
      -- Partitions are published through their root.
      AND NOT c.relispartition
ORDER BY 2, 3
"""  # noqa: S608 - our own rules


def read_tables(connection: Connection, selection: Selection) -> list[SourceTable]:
    """Return every relation that is captured by name, publishable or not, partitions by root."""
    with translated("reading the catalog"):
        rows = connection.execute(_TABLES, (selection.schemas, selection.schemas)).fetchall()
    found = [SourceTable(*row) for row in rows]
    return [each for each in found if selection.includes(each.schema, each.name)]


def count_rows(connection: Connection, table: SourceTable) -> tuple[int, bool]:
    """Return the number of rows, and whether it is exact; beyond COUNT_LIMIT it is an estimate.

    So it is where a policy applies to our role: its expressions would run with our rights.
    """
    name = sql.Identifier(table.schema, table.name)
    query = sql.SQL("SELECT count(*) FROM (SELECT FROM {} LIMIT {}) AS sample").format(
        name, sql.Literal(COUNT_LIMIT + 1)
    )
    with translated(f"counting the rows of {table}"):
        try:
            with connection.transaction():
                connection.execute("SET LOCAL row_security = off")
                row = connection.execute(query).fetchone()
        except errors.InsufficientPrivilege:
            if not table.may_select:
                raise
            return max(table.estimated_rows, 1), False
    assert row is not None
    count = int(row[0])
    return (count, True) if count <= COUNT_LIMIT else (max(count, table.estimated_rows), False)


_COLUMNS: Final = f"""
SELECT a.attrelid::bigint, a.attname::text, a.attgenerated::text,
       c.relreplident = 'f' OR EXISTS (
           SELECT FROM pg_index i WHERE i.indrelid = c.oid
           AND a.attnum = ANY({indexes.COLUMNS}) AND {indexes.REPLICA_IDENTITY}),
       EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary
               AND a.attnum = ANY({indexes.COLUMNS})),
       a.atttypid::bigint
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
WHERE a.attrelid = ANY(%s) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attrelid, a.attnum
"""  # noqa: S608 - our own rules


def read_columns(connection: Connection, tables: Iterable[int]) -> dict[int, list[TableColumn]]:
    """Return the columns of each table, by its oid."""
    with translated("reading the columns"):
        rows = connection.execute(_COLUMNS, (list(tables),)).fetchall()
    found: dict[int, list[TableColumn]] = {}
    for table, *fields in rows:
        found.setdefault(table, []).append(TableColumn(*fields))
    return found


_PARTITIONS: Final = f"""
{TREES}
SELECT c.oid::bigint, n.nspname::text, c.relname::text, {indexes.IDENTIFIES_ROWS}
FROM tree t JOIN pg_class c ON c.oid = t.oid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE t.relispartition AND t.relkind = 'r' ORDER BY 2, 3
"""  # noqa: S608 - our own rules


def read_partitions(connection: Connection, tables: Iterable[int]) -> list[Partition]:
    """Return the leaf partitions of these tables."""
    with translated("reading the partitions"):
        rows = connection.execute(_PARTITIONS, (list(tables),)).fetchall()
    return [Partition(*row) for row in rows]


def tables_by_oid(
    connection: Connection, tables: Collection[str], relations: Mapping[str, int] | None = None
) -> set[tuple[str, int]]:
    """Return the `schema.table` names that name an existing table, with its oid.

    And those of `relations`, a name and its table's oid, whose table exists under any name.
    """
    known = relations or {}
    with translated("looking up tables"):
        found = connection.execute(
            "SELECT format('%%I.%%I', n.nspname, c.relname), c.oid::bigint FROM pg_class c"
            " JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE (format('%%I.%%I', n.nspname, c.relname) = ANY(%s) OR c.oid = ANY(%s))"
            " AND c.relkind IN ('r', 'p')",
            (list(tables), list(known.values())),
        ).fetchall()
    named = {(name, oid) for name, oid in found if name in tables}
    there = {oid for _, oid in found}
    return named | {(name, oid) for name, oid in known.items() if oid in there}
