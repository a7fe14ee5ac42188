"""Chunks of a published table, read in its key's order while the stream continues.

A chunk is one short transaction. Its table is locked first, as a SELECT locks it, and only then the
snapshot is taken: what rewrites a table (TRUNCATE, many ALTER TABLE) leaves an older snapshot with
an empty one, and a chunk without rows would be taken for the table's end. Everything else is read
under that snapshot, the catalogs too.

The server orders and compares the keys, by the rules of the types and columns. Here a key is the
text that Postgres wrote, and is sent back unchanged. No comparison runs what the owner of a type
wrote (`cdc.source.column_types`). Watermarks are written by transactions that do
not wait for a standby, on the same connection.
"""

from __future__ import annotations

import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import psycopg
from psycopg import errors, sql

from cdc.encode.masks import column_mask
from cdc.errors import ConfigError
from cdc.source import conditions, described, indexes, one_statement
from cdc.source.column_types import KeyColumn, read_column_types
from cdc.source.connection import connect, end, translated
from cdc.source.members import members_clause

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.source.column_types import ColumnType
    from cdc.source.described import DescribedTable

Key = tuple[str, ...]

_SESSION: Final = (
    "SET synchronous_commit = local",  # a watermark need not be on a standby
    "SET row_security = off",  # a policy that hides rows is an error
    "SET jit = off",
    "SET max_parallel_workers_per_gather = 0",
)
CONDITION_HINT: Final = (
    "compare columns with literals: =, <, IN, BETWEEN, LIKE, IS NULL, joined by AND, OR, NOT;"
    " docs/OPERATIONS.md has the grammar"
)
COMPARED_HINT: Final = "compare other columns, or list the keys of the rows with --keys"
# The alias of the table that is read: unqualified, a key's column could be a column of the output.
_ROW: Final = "lockstep_row"
# A row's columns as text, from the server's point of view; after the header's 19 bytes.
_HEADER_SIZE: Final = 19
_TRAILER: Final = b"\xff\xff"
# Errors that a retry may avoid: the table was just renamed, or dropped.
_MOVED: Final = (errors.UndefinedTable, errors.InvalidSchemaName)


class ChunkRequest(NamedTuple):
    """A chunk: rows after `after` up to `to`, or those that `keys` names."""

    relation_id: int
    key: tuple[str, ...] | None  # the configuration's
    where: str | None
    after: Key | None
    to: Key | None
    keys: tuple[Key, ...]
    rows: int  # at most
    bytes: int  # approximate: the chunk ends after the row that exceeds it


class Chunk(NamedTuple):
    """What was read: rows as a binary COPY writes them, each with its column count."""

    described: DescribedTable
    key: tuple[str, ...]
    snapshot: str  # pg_current_snapshot()
    rows: list[bytes]
    to: Key | None  # the greatest key in the table, where it was not known
    ended: bool  # there is no row after the last one
    bytes: int
    seconds: float


class AbsentError(ConfigError):
    """A table is not published, as far as `snapshot`, of pg_current_snapshot(), shows."""

    def __init__(self, what: str, snapshot: str, *, hint: str) -> None:
        super().__init__(what, hint=hint)
        self.snapshot = snapshot


class InProgress(NamedTuple):
    """The transactions that have not ended, and which of them may have been decoded."""

    snapshot: str
    committing: frozenset[int]  # xids whose commit waits for a standby
    hidden: bool  # whether a commit may be waiting that can't be seen


class ChunkReader:
    """One connection for watermarks and chunks. Every call blocks."""

    def __init__(self, config: Config) -> None:
        self._publication = config.publication
        self._config = config
        self._sql = connect(config)
        self._known: dict[int, tuple[object, DescribedTable, bool]] = {}
        with translated("starting a session for incremental snapshots"):
            for setting in _SESSION:
                self._sql.execute(setting.encode())

    def cancel(self) -> None:
        """End what it waits for. Safe from another thread, unlike everything else."""
        with suppress(psycopg.Error):
            self._sql.cancel_safe(timeout=1.0)

    def end(self) -> None:
        """End the connection, and with it what waits for an answer. Safe from another thread."""
        end(self._sql)

    def _among_members(self, query: str) -> bytes:
        """Return a query on the publication's members that waits for none of their locks."""
        return (members_clause(self._sql.info.server_version) + query).encode()

    def close(self) -> None:
        self._sql.close()

    def write_message(self, prefix: str, content: bytes) -> None:
        """Write a logical message in a transaction of its own."""
        with translated("writing a watermark"):
            self._sql.execute(
                "SELECT pg_logical_emit_message(true, %s, %s::bytea)", (prefix, content)
            )

    def find(self, schema: str, table: str) -> tuple[int, int]:
        """Return the oid of a published table and an estimate of its rows; AbsentError if none."""
        with translated(f"looking up {schema}.{table}"):
            row = self._sql.execute(
                self._among_members(_FIND),
                {"schema": schema, "table": table, "publication": self._publication},
            ).fetchone()
        assert row is not None
        snapshot, oid, estimate, is_published = row
        if not is_published:
            raise AbsentError(
                f"{schema}.{table} {'does not exist' if oid is None else 'is not published'}",
                snapshot,
                hint="`cdc table list` shows what is captured; a partitioned table is one table or"
                " its partitions, as source.partitions says; `cdc table add` adds one",
            )
        return int(oid), int(estimate)

    def in_progress(self) -> InProgress:
        """Return the open transactions."""
        with translated("reading the open transactions"):
            row = self._sql.execute(_IN_PROGRESS).fetchone()
        assert row is not None
        snapshot, committing, hidden = row
        return InProgress(snapshot, frozenset(int(xid) for xid in committing or () if xid), hidden)

    def read(self, request: ChunkRequest) -> Chunk:
        """Return a chunk; ConfigError where the table can't be read that way."""
        began_at = time.monotonic()
        with translated("reading rows for a snapshot"):
            for _ in range(3):
                row = self._sql.execute(_NAME, (request.relation_id,)).fetchone()
                if row is None:
                    break
                name = sql.Identifier(*row)
                self._sql.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                try:
                    self._sql.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(name))
                    return self._read(request, name, row, began_at)
                except _MOVED:
                    continue
                except psycopg.DataError as error:
                    # Its text may quote a row.
                    raise ConfigError(
                        f"a condition or a key cannot be computed (SQLSTATE {error.sqlstate})",
                        hint="correct --where or --keys: some value does not fit",
                    ) from None
                finally:
                    if not self._sql.closed:
                        self._sql.execute("ROLLBACK")
        raise ConfigError(
            "the table was dropped while it was read for a snapshot",
            hint="nothing has to be done; a table of its name is another table",
        )

    def _read(
        self, request: ChunkRequest, name: sql.Identifier, named: tuple[str, str], began_at: float
    ) -> Chunk:
        relation_id = request.relation_id
        fingerprint = self._sql.execute(
            self._among_members(_FINGERPRINT),
            {"oid": relation_id, "publication": self._publication},
        ).fetchone()
        assert fingerprint is not None
        snapshot, oid, kind, identity, published, *_ = fingerprint
        if oid is None:
            raise errors.UndefinedTable  # the name belongs to another table now
        if not published:
            raise AbsentError(
                f"{'.'.join(named)} has left the publication while it was read for a snapshot",
                snapshot,
                hint="put it back with `cdc table add`, which reads it again",
            )
        table = self._describe(relation_id, (*named, identity), fingerprint[2:])
        names = key_of(table, request.key)
        self._check_key(table, names)
        # Read for each chunk: who owns a type may change it at any time.
        types = read_column_types(self._sql, relation_id)
        key = tuple(KeyColumn(each, types[each]) for each in names)
        _check_order(table, key)
        source = sql.SQL("{}{} AS {}").format(
            sql.SQL("" if kind == "p" else "ONLY "), name, sql.Identifier(_ROW)
        )
        to = request.to
        if to is None and not request.keys and request.rows:
            to = self._greatest(table, key, source)
            if to is None:
                return Chunk(table, names, snapshot, [], None, True, 0, _since(began_at))  # noqa: FBT003 - an empty table
        where = self._condition(table, request.where, types)
        query = self._query(table, key, source, request._replace(to=to, where=where))
        rows, size = self._copy(query, request.bytes)
        ended = size < request.bytes and len(rows) < request.rows
        return Chunk(table, names, snapshot, rows, to, ended, size, _since(began_at))

    def _describe(
        self, relation_id: int, named: tuple[str, str, str], fingerprint: object
    ) -> DescribedTable:
        known = self._known.get(relation_id)
        if known is None or known[0] != fingerprint:
            table = described.describe_table(self._sql, self._publication, relation_id, *named)
            known = self._known[relation_id] = fingerprint, table, False
        return known[1]

    def _check_key(self, table: DescribedTable, key: tuple[str, ...]) -> None:
        """Raise ConfigError where the key is not unique."""
        fingerprint, _, good = self._known[table.oid]
        if good:
            return
        columns = [column.name for column in table.columns]
        if not key or not set(key) <= set(columns):
            raise ConfigError(
                f"{table} has no key, so it can't be read in parts while it changes",
                hint=f'give it a primary key, or name a unique one in tables."{table}".key; a new'
                " pipeline's initial snapshot reads tables without a key too",
            )
        row = self._sql.execute(_UNIQUE, (list(key), table.oid)).fetchone()
        nullable = [name for name in key if table.facts.nullable.get(name, True)]
        if nullable or row is None:
            raise ConfigError(
                f"the key {', '.join(key)} of {table} "
                + (f"may be null in {', '.join(nullable)}" if nullable else "has no unique index"),
                hint="rows would be skipped or read for ever: a key for an incremental snapshot"
                " needs a unique index over columns that are NOT NULL",
            )
        self._known[table.oid] = fingerprint, table, True

    def _greatest(
        self, table: DescribedTable, key: tuple[KeyColumn, ...], source: sql.Composed
    ) -> Key | None:
        outputs = [sql.SQL(_output(table, each.name)) for each in key]
        order = sql.SQL(", ").join(sql.SQL("{} DESC").format(each) for each in _values(key))
        query = sql.SQL("SELECT {} FROM {} ORDER BY {} LIMIT 1").format(
            sql.SQL(", ").join(outputs), source, order
        )
        row = self._sql.execute(query).fetchone()
        return tuple(row) if row else None

    def _query(
        self,
        table: DescribedTable,
        key: tuple[KeyColumn, ...],
        source: sql.Composed,
        request: ChunkRequest,
    ) -> str:
        """Return the COPY of a chunk; the request's condition is SQL that we wrote."""
        values = sql.SQL(", ").join(_values(key))
        wanted: list[sql.Composable] = []
        if not request.rows:
            wanted.append(sql.SQL("false"))
        if request.keys:
            listed = sql.SQL(", ").join(_row(each, key) for each in request.keys)
            wanted.append(sql.SQL("({}) IN ({})").format(values, listed))
        if request.after is not None:
            wanted.append(sql.SQL("({}) > {}").format(values, _row(request.after, key)))
        if request.to is not None:
            wanted.append(sql.SQL("({}) <= {}").format(values, _row(request.to, key)))
        # The publication's filter in Postgres' own text; it has no types or functions of users.
        filters = (table.published.where, request.where)
        wanted += [sql.SQL("({})").format(sql.SQL(each)) for each in filters if each]
        return (
            sql.SQL(
                "COPY (SELECT {} FROM {} WHERE {} ORDER BY {} LIMIT {}) TO STDOUT (FORMAT binary)"
            )
            .format(
                sql.SQL(", ").join(map(sql.SQL, table.outputs)),
                source,
                sql.SQL(" AND ").join(wanted),
                values,
                sql.Literal(request.rows),
            )
            .as_string(self._sql)
        )

    def _condition(
        self, table: DescribedTable, where: str | None, types: dict[str, ColumnType]
    ) -> str | None:
        """Return the SQL of a condition; ConfigError where it is not one of captured columns."""
        if where is None:
            return None
        try:
            condition = conditions.parse(where)
        except conditions.ConditionError as error:
            raise ConfigError(
                f"the condition can't be read: {error}", hint=CONDITION_HINT
            ) from None
        selection = self._config.selection.of(
            (table.schema, table.name), *table.published.ancestors
        )
        # A column that is masked in every event must not be revealed by which rows are selected.
        known = {each.name for each in table.columns if column_mask(selection, each.name) is None}
        if condition.columns - known:
            raise ConfigError(
                f"the condition names a column that {table} does not have, or that is excluded or"
                " masked",
                hint="compare captured columns only, as they are spelled in Postgres",
            )
        try:
            return conditions.parse(where, types).sql
        except conditions.ConditionError as error:
            raise ConfigError(
                f"the condition can't be used for {table}: {error}", hint=COMPARED_HINT
            ) from None

    def _copy(self, query: str, limit: int) -> tuple[list[bytes], int]:
        rows: list[bytes] = []
        size, skip = 0, _HEADER_SIZE
        with closing(one_statement.copy(self._sql, query.encode())) as copied:
            for data in copied:
                row, skip = data[skip:], 0
                if not row or row[:2] == _TRAILER:
                    continue
                rows.append(row)
                size += len(row)
                if size >= limit:
                    break
        return rows, size


def key_of(table: DescribedTable, configured: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the key's columns as `cdc.sequence.relations` takes them, of the current table."""
    if configured is not None:
        return configured
    primary = table.facts.primary_key
    marked = tuple(column.name for column in table.columns if column.key)
    if table.replica_identity in ("d", "i") and set(primary) != set(marked):
        return marked
    return primary


def _output(table: DescribedTable, name: str) -> str:
    names = [column.name for column in table.columns]
    return table.outputs[names.index(name)]


def _check_order(table: DescribedTable, key: tuple[KeyColumn, ...]) -> None:
    """Raise ConfigError where positions in the key's order can't be compared."""
    for column in key:
        if not column.can_be_ordered:
            raise ConfigError(
                f"the key's column {column.name} of {table} has the type {column.type.name}, whose"
                " values are not compared, because that may run what the type's owner wrote",
                hint=f'name another unique key in tables."{table}".key; the initial snapshot of a'
                " new pipeline reads the table by its pages",
            )


def _values(key: tuple[KeyColumn, ...]) -> list[sql.SQL]:
    return [sql.SQL(each.value(_ROW)) for each in key]


def _row(values: Key, key: tuple[KeyColumn, ...]) -> sql.Composed:
    if len(values) != len(key):
        names = ", ".join(each.name for each in key)
        raise ConfigError(
            f"a key of {len(values)} values where the table's has {len(key)}",
            hint=f"the key's columns are {names}: --keys takes a list of lists of them",
        )
    literals = (
        sql.SQL(column.literal(_ROW, value)) for value, column in zip(values, key, strict=True)
    )
    return sql.SQL("({})").format(sql.SQL(", ").join(literals))


def _since(began_at: float) -> float:
    return time.monotonic() - began_at


_FIND: Final = """
SELECT pg_current_snapshot()::text, found.* FROM (SELECT) AS always LEFT JOIN (
    SELECT c.oid::bigint, greatest(c.reltuples, 0)::bigint, t.relid IS NOT NULL
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN lockstep_members t ON t.relid = c.oid
    WHERE n.nspname = %(schema)s AND c.relname = %(table)s AND c.relkind IN ('r', 'p')
) AS found ON true
"""
_NAME: Final = """
SELECT n.nspname::text, c.relname::text FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %s
"""
# The snapshot, and everything that changes with the table's description: by the rows' xmin.
_FINGERPRINT: Final = """
SELECT pg_current_snapshot()::text, c.oid::bigint, c.relkind::text, c.relreplident::text,
       c.oid IN (SELECT relid FROM lockstep_members),
       n.nspname::text, c.relname::text, p.xmin::text,
       (SELECT array_agg(r.xmin::text ORDER BY r.oid) FROM pg_publication_rel r
        WHERE r.prpubid = p.oid AND r.prrelid = c.oid),
       (SELECT array_agg(a.xmin::text ORDER BY a.attnum) FROM pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum > 0),
       (SELECT array_agg(i.xmin::text ORDER BY i.indexrelid) FROM pg_index i
        WHERE i.indrelid = c.oid)
FROM pg_publication p
LEFT JOIN pg_class c ON c.oid = %(oid)s LEFT JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE p.pubname = %(publication)s
"""
_UNIQUE: Final = f"""
SELECT FROM pg_index i WHERE {indexes.UNIQUE}
AND (SELECT array_agg(a.attname::text) FROM pg_attribute a
     WHERE a.attrelid = i.indrelid AND a.attnum = ANY({indexes.COLUMNS})) <@ %s::text[]
AND i.indrelid = %s LIMIT 1
"""  # noqa: S608 - our own rules
# Only members of pg_read_all_stats see what other roles' sessions wait for; COMMIT PREPARED has no
# xid of its own.
_IN_PROGRESS: Final = """
SELECT pg_current_snapshot()::text,
       (SELECT array_agg(backend_xid::text) FROM pg_stat_activity WHERE wait_event = 'SyncRep'),
       EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND backend_xid IS NULL)
       OR current_setting('synchronous_standby_names') <> ''
           AND NOT pg_has_role('pg_read_all_stats', 'USAGE')
"""
