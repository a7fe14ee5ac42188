"""Chunks of a published table, read in its key's order while the stream continues.

A chunk is one short transaction. Its table is locked first, as a SELECT locks it, and only then the
snapshot is taken: what rewrites a table (TRUNCATE, many ALTER TABLE) leaves an older snapshot with
an empty one, and a chunk without rows would be taken for the table's end. Everything else is read
under that snapshot, the catalogs too.

The server orders and compares the keys, by the rules of the types and columns. Here a key is the
text that Postgres wrote, and is sent back unchanged. Watermarks are written by transactions that do
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
from cdc.source import conditions, described, one_statement, publication_members
from cdc.source.connection import connect, translated

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.source.described import Described

Key = tuple[str, ...]

_SESSION: Final = (
    "SET synchronous_commit = local",  # a watermark need not be on a standby
    "SET row_security = off",  # a policy that hides rows is an error
    "SET statement_timeout = 0",
    "SET jit = off",
    "SET max_parallel_workers_per_gather = 0",
)
CONDITION_HINT: Final = (
    "compare columns with literals: =, <, IN, BETWEEN, LIKE, IS NULL, joined by AND, OR, NOT;"
    " docs/OPERATIONS.md has the grammar"
)
# A row's columns as text, from the server's point of view; after the header's 19 bytes.
_HEADER_SIZE: Final = 19
_TRAILER: Final = b"\xff\xff"
# Errors that a retry may avoid: the table was just renamed, or dropped.
_MOVED: Final = (errors.UndefinedTable, errors.InvalidSchemaName)


class Asked(NamedTuple):
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

    described: Described
    key: tuple[str, ...]
    snapshot: str  # pg_current_snapshot()
    rows: list[bytes]
    to: Key | None  # the greatest key in the table, where it was not known
    ended: bool  # there is no row after the last one
    bytes: int
    seconds: float


class InProgress(NamedTuple):
    """The transactions that have not ended, and which of them may have been decoded."""

    snapshot: str
    committing: frozenset[int]  # xids whose commit waits for a standby
    hidden: bool  # whether a commit may be waiting that can't be seen


class Reader:
    """One connection for watermarks and chunks. Every call blocks."""

    def __init__(self, config: Config) -> None:
        self._publication = config.publication
        self._config = config
        self._sql = connect(config)
        self._known: dict[int, tuple[object, Described, bool]] = {}
        with translated("beginning a session for live snapshots"):
            for setting in _SESSION:
                self._sql.execute(setting.encode())

    def cancel(self) -> None:
        """End what it waits for. Safe from another thread, unlike everything else."""
        with suppress(psycopg.Error):
            self._sql.cancel_safe(timeout=1.0)

    def _among_members(self, query: str) -> bytes:
        """Return a query on the publication's members that waits for none of their locks."""
        return (publication_members.members(self._sql.info.server_version) + query).encode()

    def close(self) -> None:
        """End the session."""
        self._sql.close()

    def mark(self, prefix: str, content: bytes) -> None:
        """Write a logical message in a transaction of its own."""
        with translated("writing a mark"):
            self._sql.execute(
                "SELECT pg_logical_emit_message(true, %s, %s::bytea)", (prefix, content)
            )

    def find(self, schema: str, table: str) -> tuple[int, int]:
        """Return the oid of a published table and an estimate of its rows; ConfigError if none."""
        with translated(f"looking up {schema}.{table}"):
            row = self._sql.execute(
                self._among_members(_FIND),
                {"schema": schema, "table": table, "publication": self._publication},
            ).fetchone()
        if row is None or not row[2]:
            is_there = row is not None
            raise ConfigError(
                f"{schema}.{table} {'is not published' if is_there else 'does not exist'}",
                hint="`cdc table list` tells what is captured; a partitioned table is one table or"
                " its partitions, as source.partitions says; `cdc table add` adds one",
            )
        return int(row[0]), int(row[1])

    def in_progress(self) -> InProgress:
        """Return the open transactions."""
        with translated("reading the open transactions"):
            row = self._sql.execute(_IN_PROGRESS).fetchone()
        assert row is not None
        snapshot, committing, hidden = row
        return InProgress(snapshot, frozenset(int(xid) for xid in committing or () if xid), hidden)

    def read(self, asked: Asked) -> Chunk:
        """Return a chunk; ConfigError where the table can't be read that way."""
        began_at = time.monotonic()
        with translated("reading rows for a snapshot"):
            for _ in range(3):
                row = self._sql.execute(_NAME, (asked.relation_id,)).fetchone()
                if row is None:
                    break
                name = sql.Identifier(*row)
                self._sql.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                try:
                    self._sql.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(name))
                    return self._read(asked, name, row, began_at)
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
            hint="nothing is to be done; a table of its name is another table",
        )

    def _read(
        self, asked: Asked, name: sql.Identifier, named: tuple[str, str], began_at: float
    ) -> Chunk:
        relation_id = asked.relation_id
        fingerprint = self._sql.execute(
            self._among_members(_FINGERPRINT),
            {"oid": relation_id, "publication": self._publication},
        ).fetchone()
        assert fingerprint is not None
        snapshot, oid, kind, identity, published, *_ = fingerprint
        if oid is None:
            raise errors.UndefinedTable  # the name belongs to another table now
        if not published:
            raise ConfigError(
                f"{'.'.join(named)} has left the publication while it was read for a snapshot",
                hint="put it back with `cdc table add`, which reads it again",
            )
        table = self._describe(relation_id, (*named, identity), fingerprint[2:])
        key = key_of(table, asked.key)
        self._check_key(table, key)
        source = sql.SQL("{}{}").format(sql.SQL("" if kind == "p" else "ONLY "), name)
        to = asked.to
        if to is None and not asked.keys and asked.rows:
            to = self._greatest(table, key, source)
            if to is None:
                return Chunk(table, key, snapshot, [], None, True, 0, _since(began_at))  # noqa: FBT003 - an empty table
        query = self._query(table, key, source, asked._replace(to=to))
        rows, size = self._copy(query, asked.bytes)
        ended = size < asked.bytes and len(rows) < asked.rows
        return Chunk(table, key, snapshot, rows, to, ended, size, _since(began_at))

    def _describe(
        self, relation_id: int, named: tuple[str, str, str], fingerprint: object
    ) -> Described:
        known = self._known.get(relation_id)
        if known is None or known[0] != fingerprint:
            table = described.table(self._sql, self._publication, relation_id, *named)
            known = self._known[relation_id] = fingerprint, table, False
        return known[1]

    def _check_key(self, table: Described, key: tuple[str, ...]) -> None:
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
                hint="rows would be skipped or read for ever: a key for a live snapshot takes a"
                " unique index over columns that are NOT NULL",
            )
        self._known[table.oid] = fingerprint, table, True

    def _greatest(self, table: Described, key: tuple[str, ...], source: sql.Composed) -> Key | None:
        outputs = [sql.SQL(_output(table, name)) for name in key]
        order = sql.SQL(", ").join(sql.SQL("{} DESC").format(sql.Identifier(name)) for name in key)
        query = sql.SQL("SELECT {} FROM {} ORDER BY {} LIMIT 1").format(
            sql.SQL(", ").join(outputs), source, order
        )
        row = self._sql.execute(query).fetchone()
        return tuple(row) if row else None

    def _query(
        self, table: Described, key: tuple[str, ...], source: sql.Composed, asked: Asked
    ) -> str:
        types: dict[str, str] = dict(self._sql.execute(_CASTS, (table.oid, list(key))).fetchall())
        names = sql.SQL(", ").join(map(sql.Identifier, key))
        wanted: list[sql.Composable] = []
        if not asked.rows:
            wanted.append(sql.SQL("false"))
        if asked.keys:
            listed = (_row(each, key, types) for each in asked.keys)
            wanted.append(sql.SQL("({}) IN ({})").format(names, sql.SQL(", ").join(listed)))
        if asked.after is not None:
            wanted.append(sql.SQL("({}) > {}").format(names, _row(asked.after, key, types)))
        if asked.to is not None:
            wanted.append(sql.SQL("({}) <= {}").format(names, _row(asked.to, key, types)))
        # The publication's filter in Postgres' own text, and the request's condition in ours.
        filters = (table.published.where, self._condition(table, asked.where))
        wanted += [sql.SQL("({})").format(sql.SQL(each)) for each in filters if each]
        return (
            sql.SQL(
                "COPY (SELECT {} FROM {} WHERE {} ORDER BY {} LIMIT {}) TO STDOUT (FORMAT binary)"
            )
            .format(
                sql.SQL(", ").join(map(sql.SQL, table.outputs)),
                source,
                sql.SQL(" AND ").join(wanted),
                names,
                sql.Literal(asked.rows),
            )
            .as_string(self._sql)
        )

    def _condition(self, table: Described, where: str | None) -> str | None:
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
        return condition.sql

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


def key_of(table: Described, configured: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the key's columns as `cdc.sequence.relations` takes them, of the current table."""
    if configured is not None:
        return configured
    primary = table.facts.primary_key
    marked = tuple(column.name for column in table.columns if column.key)
    if table.replica_identity in ("d", "i") and set(primary) != set(marked):
        return marked
    return primary


def _output(table: Described, name: str) -> str:
    names = [column.name for column in table.columns]
    return table.outputs[names.index(name)]


def _row(values: Key, key: tuple[str, ...], types: dict[str, str]) -> sql.Composed:
    if len(values) != len(key):
        raise ConfigError(
            f"a key of {len(values)} values where the table's has {len(key)}",
            hint=f"the key's columns are {', '.join(key)}: --keys takes a list of lists of them",
        )
    casts = (
        sql.SQL("{}::{}").format(sql.Literal(value), sql.SQL(types[name]))
        for name, value in zip(key, values, strict=True)
    )
    return sql.SQL("({})").format(sql.SQL(", ").join(casts))


def _since(began_at: float) -> float:
    return time.monotonic() - began_at


_FIND: Final = """
SELECT c.oid::bigint, greatest(c.reltuples, 0)::bigint, t.relid IS NOT NULL
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN lockstep_members t ON t.relid = c.oid
WHERE n.nspname = %(schema)s AND c.relname = %(table)s AND c.relkind IN ('r', 'p')
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
_UNIQUE: Final = """
SELECT FROM pg_index i WHERE i.indisunique AND i.indpred IS NULL AND i.indexprs IS NULL
AND (SELECT array_agg(a.attname::text) FROM unnest(i.indkey::int2[]) WITH ORDINALITY k(attnum, n)
     JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
     WHERE k.n <= i.indnkeyatts) <@ %s::text[]
AND i.indrelid = %s LIMIT 1
"""
# With their modifiers, since `character` alone is one character.
_CASTS: Final = """
SELECT attname::text, format_type(atttypid, atttypmod) FROM pg_attribute
WHERE attrelid = %s AND attname = ANY(%s)
"""
# Only members of pg_read_all_stats see what other roles' sessions wait for; COMMIT PREPARED has no
# xid of its own.
_IN_PROGRESS: Final = """
SELECT pg_current_snapshot()::text,
       (SELECT array_agg(backend_xid::text) FROM pg_stat_activity WHERE wait_event = 'SyncRep'),
       EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND backend_xid IS NULL)
       OR current_setting('synchronous_standby_names') <> ''
           AND NOT pg_has_role('pg_read_all_stats', 'USAGE')
"""
