"""Which roles of the database hold rights that concern the pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from psycopg import conninfo, sql

from cdc.source.connection import translated
from cdc.source.signing_keys import TABLES

if TYPE_CHECKING:
    from cdc.source.connection import Connection

# Superusers may do everything, and are left out.
_REPLICATION: Final = """
SELECT rolname::text FROM pg_catalog.pg_roles
WHERE rolreplication AND NOT rolsuper AND rolname <> current_user ORDER BY 1
"""
_EMIT: Final = """
SELECT bool_or(a.grantee = 0) FROM pg_catalog.pg_proc p
CROSS JOIN aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
WHERE p.proname = 'pg_logical_emit_message' AND p.pronamespace = 'pg_catalog'::regnamespace
  AND a.privilege_type = 'EXECUTE'
"""
# By grant, the owner and our own role left out; PUBLIC is 0.
_GRANTED: Final = """
SELECT c.relname::text, coalesce(r.rolname::text, 'PUBLIC') FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
CROSS JOIN aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) a
LEFT JOIN pg_catalog.pg_roles r ON r.oid = a.grantee
WHERE n.nspname = 'lockstep' AND c.relname = ANY (%s) AND a.privilege_type = ANY (%s)
  AND a.grantee <> c.relowner AND coalesce(r.rolname <> current_user, true)
GROUP BY 1, 2 ORDER BY 1, 2
"""


class Rights(NamedTuple):
    """Which roles may do what: their names as SQL writes them."""

    role: str  # ours, as it is
    replication: list[str]
    emit_is_public: bool
    signal_writers: list[str]
    key_readers: dict[str, list[str]]  # by table
    encoding: str = "UTF8"  # the database's


class DsnFacts(NamedTuple):
    """What a connection string shows of its safety."""

    hosts: list[str]
    sslmode: str
    has_password: bool


def quoted_role(name: str) -> str:
    """Return the name of a role, or PUBLIC, as SQL writes it."""
    return name if name == "PUBLIC" else sql.Identifier(name).as_string()


def read(connection: Connection) -> Rights:
    """Return which roles may do what, by catalogs that every role may read."""
    with translated("reading who may do what"):
        replication = connection.execute(_REPLICATION).fetchall()
        emit = connection.execute(_EMIT).fetchone()
        writers = connection.execute(_GRANTED, (["signal"], ["INSERT"])).fetchall()
        readers = connection.execute(_GRANTED, (list(TABLES.values()), ["SELECT"])).fetchall()
    by_table: dict[str, list[str]] = {}
    for table, role in readers:
        by_table.setdefault(table, []).append(quoted_role(role))
    return Rights(
        role=connection.info.user,
        replication=[quoted_role(row[0]) for row in replication],
        emit_is_public=bool(emit and emit[0]),
        signal_writers=[quoted_role(row[1]) for row in writers],
        key_readers=by_table,
        encoding=connection.info.parameter_status("server_encoding") or "",
    )


def dsn_facts(dsn: str) -> DsnFacts:
    given = conninfo.conninfo_to_dict(dsn)
    hosts = str(given.get("hostaddr") or given.get("host") or "").split(",")
    return DsnFacts(hosts, str(given.get("sslmode") or "prefer"), bool(given.get("password")))
