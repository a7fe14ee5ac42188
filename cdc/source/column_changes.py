"""Find tables whose columns have changed, although no row of theirs has, and announce them.

The stream describes a table only before its next row. So the catalog is compared with the table
versions in the log, and a table that differs is named in a signed logical message of ours: where
the stream has it, the daemon describes the table again (`cdc.sequence.table_versions`). The message
has a fingerprint of the table's catalog rows, each with the transaction that wrote it. If the
daemon still finds the same, they were the same at the message too.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec

from cdc.encode.alterations import rewritten_columns
from cdc.source import authority
from cdc.source.connection import translated
from cdc.source.lookups import look_up

if TYPE_CHECKING:
    from collections.abc import Collection

    from cdc.config import Config
    from cdc.log.records import SchemaRecord
    from cdc.source.connection import Connection
    from cdc.source.lookups import Lookup

PREFIX: Final = "lockstep.columns"
PURPOSE: Final = "columns"

# One row for all tables, and then one for each: cheap while nothing changes.
_EVERY: Final = """
SELECT count(*), coalesce(sum(hashint8(a.xmin::text::bigint # (a.attrelid::bigint << 32))), 0)
FROM pg_attribute a WHERE a.attrelid = ANY(%s::oid[]) AND a.attnum > 0
"""
_EACH: Final = """
SELECT a.attrelid::bigint, n.nspname::text || '.' || c.relname::text || '.' || c.relfilenode::text,
       md5(string_agg(concat_ws(':', a.attnum, a.xmin, a.attname, a.atttypid, a.atttypmod), ','
                      ORDER BY a.attnum))
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE a.attrelid = ANY(%s::oid[]) AND a.attnum > 0 GROUP BY 1, 2
"""
_SYSTEM: Final = "SELECT system_identifier::text FROM pg_catalog.pg_control_system()"
_SEND: Final = "SELECT pg_logical_emit_message(true, %s, %s)"


class ColumnChange(msgspec.Struct, frozen=True):
    """A table, and its catalog rows when it was announced."""

    relation_id: int
    fingerprint: str


decode: Final = msgspec.json.Decoder(ColumnChange).decode


def fingerprints(connection: Connection, relations: Collection[int]) -> dict[int, str]:
    """Return what identifies the columns of each table, and the transactions that made them so."""
    with translated(f"comparing the columns of {len(relations)} tables"):
        rows = connection.execute(_EACH, (list(relations),)).fetchall()
    return {relation: f"{name}:{columns}" for relation, name, columns in rows}


class ColumnWatch:
    """Announces each changed table once. For one thread."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._every: tuple[object, ...] | None = None
        self._announced: dict[int, str] = {}

    def announce(self, connection: Connection, versions: list[SchemaRecord]) -> None:
        """Compare the newest versions of the tables with the catalog. Blocks."""
        known = {each.relation_id: each for each in versions}
        with translated("comparing the columns of the tables"):
            every = connection.execute(_EVERY, (list(known),)).fetchone()
        if (every, len(known)) == self._every:
            return
        # Before the comparison: a change while it runs gives another fingerprint.
        now = fingerprints(connection, known)
        today = look_up(connection, self._config.publication, known)
        changed = [
            ColumnChange(relation, fingerprint)
            for relation, fingerprint in now.items()
            if self._announced.get(relation) != fingerprint
            and _differs(known[relation], today[relation])
        ]
        for change in changed:
            self._send(connection, change)
            self._announced[change.relation_id] = change.fingerprint
        self._every = (every, len(known))

    def _send(self, connection: Connection, change: ColumnChange) -> None:
        config = self._config
        with translated("announcing changed columns"):
            row = connection.execute(_SYSTEM).fetchone()
            assert row is not None
            content = authority.sign(
                authority.canary_secret(config),
                PURPOSE,
                authority.Scope(config.pipeline, row[0]),
                time.time_ns() // 1_000,
                msgspec.json.encode(change),
            )
            connection.execute(_SEND, (PREFIX, content.decode()))


def _differs(version: SchemaRecord, today: Lookup) -> bool:
    """Return whether the table has other columns than its newest version, or other values."""
    published, stored = today.published, today.facts.stored
    columns = tuple((c.name, c.type_id, c.type_modifier) for c in version.columns)
    if columns != published.columns:
        return bool(published.columns)
    numbers = [column.attnum for column in version.columns]
    if None not in numbers and numbers != list(published.attnums):
        return True
    return stored is not None and bool(rewritten_columns(version, stored.storage, stored.rewritten))
