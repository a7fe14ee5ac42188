"""The state of the source, as facts: server, slot, publication, tables. Read only.

For people and for checks: `cdc setup`, `cdc doctor`, `cdc status`. The daemon's own queries are in
`catalog`. Rows of catalogs that differ between majors are read as JSON, so that one query works for
14 to 18 and a column that a major lacks is simply absent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from psycopg import sql

from cdc.events import LSN
from cdc.log.records import OPERATIONS, Sends
from cdc.log.records import Publication as PinnedPublication
from cdc.source import publication_members
from cdc.source.connection import translated
from cdc.source.membership import read_note
from cdc.source.publication_members import SCHEMAS_SINCE

if TYPE_CHECKING:
    import psycopg

    from cdc.config import Selection

# Counting a large table takes minutes; above this many rows the statistics' estimate is used.
COUNT_LIMIT = 10_000


class Server(NamedTuple):
    """The server, our role in it, and the slots and senders in use."""

    version: int  # 170011 is 17.11
    version_text: str
    in_recovery: bool
    system_identifier: str
    timeline: int
    wal_lsn: LSN  # where the WAL ends
    database: str
    role: str
    superuser: bool
    may_replicate: bool
    may_create: bool  # publications in this database
    settings: dict[str, str]  # in each setting's own unit
    slots_in_use: int
    senders_in_use: int

    @property
    def major(self) -> int:
        return self.version // 10_000


class Slot(NamedTuple):
    """A logical replication slot; what its major does not report is None."""

    name: str
    plugin: str | None
    database: str | None
    active_pid: int | None
    restart_lsn: LSN | None
    confirmed_flush_lsn: LSN | None
    wal_status: str | None  # reserved, extended, unreserved, lost
    safe_wal_bytes: int | None  # may still be written before the slot is in danger
    invalidation_reason: str | None
    two_phase: bool
    retained_bytes: int | None  # WAL that the server keeps for it
    failover: bool = False  # to be copied to standbys (17+)
    synced: bool = False  # itself a copy of the primary's slot (17+)
    temporary: bool = False  # a synced slot is, until it has caught up
    inactive_seconds: float | None = None  # since it was last read from (17+)


class StandbySlot(NamedTuple):
    """A physical slot, usually a standby's."""

    name: str
    exists: bool
    active: bool
    named: bool  # in synchronized_standby_slots: failover slots' walsenders wait for it


class Publication(NamedTuple):
    """A publication and the tables that it publishes."""

    name: str
    oid: int
    owner: str
    operations: frozenset[str]  # of insert, update, delete, truncate
    via_root: bool
    all_tables: bool
    members: dict[str, bool]  # schema.table: whether it has a row filter or a column list
    memberships: dict[str, int]  # by the table's name as the resume record has it, the oid of each
    removed: frozenset[int] = frozenset()  # memberships that `cdc setup` ended
    version: int = 0  # of its row in the catalog, or the one that this continues
    generated: str = "none"  # which generated columns it publishes without a column list
    schemas: dict[str, int] = {}  # noqa: RUF012 - never written
    # By the table's name as the resume record has it: column list by attnum, and row filter.
    narrowed: dict[str, tuple[tuple[int, ...] | None, str | None]] = {}  # noqa: RUF012 - as above

    @property
    def pinned(self) -> PinnedPublication:
        """Return what the resume record pins of it."""
        return PinnedPublication(
            self.name,
            self.oid,
            self.memberships,
            tuple(sorted(self.removed)),
            Sends(
                self.version,
                self.owner,
                tuple(each for each in OPERATIONS if each in self.operations),
                self.via_root,
                self.generated,
                self.all_tables,
                self.schemas,
            ),
            self.narrowed,
        )


class Table(NamedTuple):
    """A table that is or may be published."""

    oid: int
    schema: str
    name: str
    kind: str  # relkind: r table, p partitioned, v view, m materialized view, f foreign
    persistence: str  # p permanent, u unlogged, t temporary
    replica_identity: str  # d default, f full, i index, n nothing
    has_primary_key: bool
    has_identity_index: bool
    owner: str
    owned: bool  # by our role, or a role it is a member of
    may_select: bool
    row_security: bool
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
    def identifies_rows(self) -> bool:
        """Return whether updates and deletes can be published (else Postgres refuses them)."""
        return (
            self.replica_identity == "f"
            or (self.replica_identity == "d" and self.has_primary_key)
            or (self.replica_identity == "i" and self.has_identity_index)
        )


class Holder(NamedTuple):
    """A transaction that holds back the slot: a session's, or a prepared one."""

    pid: int | None
    prepared: str | None
    age_seconds: float


_SERVER = """
SELECT current_setting('server_version_num')::int, current_setting('server_version'),
       pg_is_in_recovery(), (SELECT system_identifier::text FROM pg_control_system()),
       -- Of a primary the one it writes: the last checkpoint may be older than a promotion.
       CASE WHEN pg_is_in_recovery() THEN (SELECT timeline_id FROM pg_control_checkpoint())
            ELSE ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int END,
       (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
             ELSE pg_current_wal_lsn() END)::text,
       current_database(), current_user::text, r.rolsuper, r.rolreplication OR r.rolsuper,
       has_database_privilege(current_database(), 'CREATE'),
       (SELECT jsonb_object_agg(name, setting) FROM pg_settings WHERE name = ANY(%s)),
       (SELECT count(*) FROM pg_replication_slots),
       (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'walsender')
FROM pg_roles r WHERE r.rolname = current_user
"""
_SETTINGS = [
    "wal_level",
    "max_replication_slots",
    "max_wal_senders",
    "max_slot_wal_keep_size",
    "wal_sender_timeout",
    "idle_replication_slot_timeout",
    "wal_segment_size",
    "synchronized_standby_slots",
    "sync_replication_slots",
    "hot_standby_feedback",
    "primary_slot_name",
    "primary_conninfo",  # of the role's reach only where it may read all settings
]


def server(connection: psycopg.Connection) -> Server:
    """Return the server's facts."""
    with translated("asking the server about itself"):
        row = connection.execute(_SERVER, (_SETTINGS,)).fetchone()
    assert row is not None
    fields: list[Any] = list(row)
    fields[5] = LSN.parse(fields[5] or "0/0")
    return Server(*fields)


def setting_bytes(connection: psycopg.Connection, name: str) -> int | None:
    """Return a setting that is counted in megabytes, in bytes; None where it limits nothing."""
    with translated(f"reading the setting {name}"):
        row = connection.execute(
            "SELECT setting::bigint FROM pg_settings WHERE name = %s", (name,)
        ).fetchone()
    return row[0] << 20 if row is not None and row[0] >= 0 else None


_SLOTS = """
SELECT to_jsonb(s), pg_wal_lsn_diff(
    CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END,
    s.restart_lsn)::bigint,
    extract(epoch FROM clock_timestamp() - (to_jsonb(s) ->> 'inactive_since')::timestamptz)::float8
FROM pg_replication_slots s WHERE slot_type = 'logical' AND (%s::text IS NULL OR slot_name = %s)
ORDER BY slot_name
"""


def slots(connection: psycopg.Connection, name: str | None = None) -> list[Slot]:
    """Return all logical slots of the server, or the one of that name."""
    with translated("reading the replication slots"):
        rows = connection.execute(_SLOTS, (name, name)).fetchall()
    return [_slot(*row) for row in rows]


def slot(connection: psycopg.Connection, name: str) -> Slot | None:
    """Return the slot `name`, or None."""
    return next(iter(slots(connection, name)), None)


def _slot(fields: dict[str, Any], retained: int | None, inactive: float | None) -> Slot:
    def lsn(name: str) -> LSN | None:
        return None if fields.get(name) is None else LSN.parse(fields[name])

    return Slot(
        name=fields["slot_name"],
        plugin=fields["plugin"],
        database=fields["database"],
        active_pid=fields["active_pid"],
        restart_lsn=lsn("restart_lsn"),
        confirmed_flush_lsn=lsn("confirmed_flush_lsn"),
        wal_status=fields.get("wal_status"),
        safe_wal_bytes=fields.get("safe_wal_size"),
        invalidation_reason=fields.get("invalidation_reason"),
        two_phase=bool(fields.get("two_phase")),
        retained_bytes=retained,
        failover=bool(fields.get("failover")),
        synced=bool(fields.get("synced")),
        temporary=bool(fields["temporary"]),
        inactive_seconds=inactive,
    )


def standby_slots(connection: psycopg.Connection, server: Server) -> list[StandbySlot]:
    """Return the physical slots, and missing ones that `synchronized_standby_slots` names."""
    setting = server.settings.get("synchronized_standby_slots", "").replace('"', "").split(",")
    named = {each.strip() for each in setting if each.strip()}
    with translated("reading the standbys' slots"):
        rows = connection.execute(
            "SELECT slot_name::text, active FROM pg_replication_slots"
            " WHERE slot_type = 'physical' ORDER BY 1"
        ).fetchall()
    found = [StandbySlot(name, True, active, name in named) for name, active in rows]  # noqa: FBT003 - it exists
    missing = sorted(named - {each.name for each in found})
    return [*found, *(StandbySlot(name, False, False, True) for name in missing)]  # noqa: FBT003 - it does not


_PUBLICATION = """
SELECT to_jsonb(p), p.oid::bigint, pg_get_userbyid(p.pubowner)::text, p.xmin::text::bigint,
       coalesce(obj_description(p.oid, 'pg_publication'), '')
FROM pg_publication p WHERE p.pubname = %s
"""
# What is published, whether named one by one, by schema or by FOR ALL TABLES.
_MEMBERS = """
SELECT n.nspname::text, c.relname::text, format('%%I.%%I', n.nspname, c.relname),
       coalesce(r.oid, 0)::bigint
FROM lockstep_members t
JOIN pg_class c ON c.oid = t.relid JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_publication_rel r ON r.prpubid = %(oid)s AND r.prrelid = c.oid
ORDER BY 1, 2
"""
_NARROWED = """
SELECT format('%%I.%%I', n.nspname, c.relname), r.prattrs::int2[], pg_get_expr(r.prqual, r.prrelid)
FROM pg_publication_rel r JOIN pg_class c ON c.oid = r.prrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE r.prpubid = %s AND (r.prattrs IS NOT NULL OR r.prqual IS NOT NULL)
"""
_SCHEMAS = """
SELECT n.nspname::text, p.oid::bigint FROM pg_publication_namespace p
JOIN pg_namespace n ON n.oid = p.pnnspid WHERE p.pnpubid = %s
"""
# Everything that a change of the publication changes: the version of its row, its comment with our
# note, and the oids by which tables and schemas belong to it. One row for any number of tables.
_MARK = """
SELECT p.oid::bigint, p.xmin::text::bigint, obj_description(p.oid, 'pg_publication'),
       (SELECT count(*) FROM pg_publication_rel r WHERE r.prpubid = p.oid),
       (SELECT sum(r.oid::bigint) FROM pg_publication_rel r WHERE r.prpubid = p.oid),
       {schemas}
FROM pg_publication p WHERE p.pubname = %s
"""
_MARK_OF_SCHEMAS = """
       (SELECT array_agg(s.oid::bigint ORDER BY s.oid) FROM pg_publication_namespace s
        WHERE s.pnpubid = p.oid)
"""

Mark = tuple[Any, ...]


def publication_mark(connection: psycopg.Connection, name: str) -> Mark | None:
    """Return a value that changes with each change of the publication; None where it is missing.

    Tables that are created, dropped or moved change it only where the publication names them.
    """
    schemas = connection.info.server_version >= SCHEMAS_SINCE
    query = _MARK.format(schemas=_MARK_OF_SCHEMAS if schemas else "NULL")
    with translated(f"looking at the publication {name}"):
        return connection.execute(query.encode(), (name,)).fetchone()


def named_members(mark: Mark) -> int:
    """Return how many tables the publication names one by one."""
    return int(mark[3])


def publication(connection: psycopg.Connection, name: str) -> Publication | None:
    """Return the publication `name` with its members, or None."""
    narrowed: list[tuple[str, list[int] | None, str | None]] = []
    schemas: list[tuple[str, int]] = []
    major = connection.info.server_version
    with translated(f"reading the publication {name}"):
        row = connection.execute(_PUBLICATION, (name,)).fetchone()
        if row is None:
            return None
        fields, oid, owner, version, comment = row
        query = publication_members.members(major) + _MEMBERS
        members = connection.execute(query.encode(), {"publication": name, "oid": oid}).fetchall()
        if major >= SCHEMAS_SINCE:
            narrowed = connection.execute(_NARROWED, (oid,)).fetchall()
            schemas = connection.execute(_SCHEMAS, (oid,)).fetchall()
    note = read_note(str(comment))
    lists = {
        table: (None if columns is None else tuple(columns), where)
        for table, columns, where in narrowed
    }
    return Publication(
        name=name,
        oid=oid,
        owner=owner,
        operations=frozenset(each for each in OPERATIONS if fields[f"pub{each}"]),
        via_root=bool(fields.get("pubviaroot")),
        all_tables=bool(fields["puballtables"]),
        members={f"{schema}.{table}": quoted in lists for schema, table, quoted, _ in members},
        memberships={quoted: _first(note.first, its) for *_, quoted, its in members},
        removed=note.removed,
        version=_first(note.versions, version),
        generated="stored" if fields.get("pubgencols") == "s" else "none",
        schemas=dict(schemas),
        narrowed=lists,
    )


def _first(continued: dict[int, int], one: int) -> int:
    return continued.get(one, one)


_TABLES = """
SELECT c.oid::bigint, n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence::text,
       c.relreplident::text,
       EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary AND i.indisvalid),
       EXISTS (SELECT FROM pg_index i
               WHERE i.indrelid = c.oid AND i.indisreplident AND i.indisvalid),
       pg_get_userbyid(c.relowner)::text, pg_has_role(c.relowner, 'USAGE'),
       has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT'),
       c.relrowsecurity, greatest(c.reltuples, 0)::bigint, format('%%I.%%I', n.nspname, c.relname)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f')
      AND CASE WHEN %s::text[] IS NULL
               THEN n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
               ELSE n.nspname = ANY(%s) END
      -- Partitions are published through their root.
      AND NOT c.relispartition
ORDER BY 2, 3
"""


def tables(connection: psycopg.Connection, selection: Selection) -> list[Table]:
    """Return every relation that is captured by name, publishable or not, partitions by root."""
    with translated("reading the catalog"):
        rows = connection.execute(_TABLES, (selection.schemas, selection.schemas)).fetchall()
    found = [Table(*row) for row in rows]
    return [each for each in found if selection.takes(each.schema, each.name)]


def count_rows(connection: psycopg.Connection, table: Table) -> tuple[int, bool]:
    """Return the number of rows, and whether it is exact; beyond COUNT_LIMIT it is an estimate."""
    name = sql.Identifier(table.schema, table.name)
    query = sql.SQL("SELECT count(*) FROM (SELECT FROM {} LIMIT {}) AS sample").format(
        name, sql.Literal(COUNT_LIMIT + 1)
    )
    with translated(f"counting the rows of {table}"):
        row = connection.execute(query).fetchone()
    assert row is not None
    count = int(row[0])
    return (count, True) if count <= COUNT_LIMIT else (max(count, table.estimated_rows), False)


# Sessions of other roles show their times only to superusers and members of pg_monitor.
_HOLDERS = """
SELECT pid, NULL, extract(epoch FROM clock_timestamp() - xact_start)::float8
FROM pg_stat_activity
WHERE xact_start IS NOT NULL AND pid <> pg_backend_pid() AND backend_xid IS NOT NULL
UNION ALL
SELECT NULL, gid, extract(epoch FROM clock_timestamp() - prepared)::float8 FROM pg_prepared_xacts
ORDER BY 3 DESC LIMIT 20
"""


def holders(connection: psycopg.Connection) -> list[Holder]:
    """Return the writing transactions that are open or prepared, oldest first."""
    with translated("reading the open transactions"):
        return [Holder(*row) for row in connection.execute(_HOLDERS).fetchall()]
