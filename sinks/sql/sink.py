"""The SQL sink: typed tables, and the frontier in a table, written in one transaction a cut.

A reader's transaction sees complete cuts only. The frontier's row is locked while a cut is
written, and a change at or below the stored frontier has been applied: so a repeated or late cut
has no effect, deletes need no tombstones, and two copies wait for each other. Constraints are
checked when a cut ends, so foreign keys hold whatever the order of its changes.

A store has one generation: `sinks.contract.Generations` is optional.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from secrets import token_hex
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import sqlalchemy as sa

from cdc.errors import CDCError, ConfigError, InvariantError, StoreLostError
from lockstep.sinks.contract import Applied, StoreState, expect_alone, expect_key, expect_keyed
from lockstep.sinks.sql.database import Database
from lockstep.sinks.sql.loading import TableLoader
from lockstep.sinks.sql.tables import SQLTables, decode_tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lockstep.sinks.contract import Altered, Changes, Version

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SCHEMA: Final = "public"  # of our own table in Postgres, where the follower has no `schema`


class SqlSettings(NamedTuple):
    """The configuration of a follower in a database."""

    url: str
    follower: str
    schema: str | None = None


class SqlSink:
    """One follower's tables in one database."""

    complete_rows = False
    parallel = False

    def __init__(self, settings: SqlSettings) -> None:
        self._url = settings.url
        self._database = Database(settings.url)
        if settings.schema and not self._database.is_postgres:
            raise ConfigError("SQLite has no schemas", hint="leave out `sql.schema`")
        self._follower = settings.follower
        self._schema = settings.schema or (_SCHEMA if self._database.is_postgres else "")
        self._frontiers = sa.Table(
            "lockstep_frontiers",
            sa.MetaData(schema=self._schema or None),
            sa.Column("follower", sa.Text, primary_key=True),
            sa.Column("committed_at", sa.DateTime(timezone=True)),
            *(sa.Column(name, sa.BigInteger) for name in ("seq", "generation", "reached")),
            *(sa.Column(name, sa.Text) for name in ("lsn", "token", "applied", "tables")),
        )
        self._mine = self._frontiers.c.follower == self._follower
        self._row = sa.select(self._frontiers).where(self._mine)
        self._tables = SQLTables(self._database, settings.schema or "")
        self._token = ""
        self._versions: Sequence[Version] = ()  # of the cut
        self._cut: sa.Connection | None = None
        self._floor = 0  # the stored frontier's seq

    def current(self) -> int | None:
        with self._database.transaction() as connection:
            if not sa.inspect(connection).has_table(self._frontiers.name, self._schema or None):
                return None
            found = connection.execute(self._row).first()
        return int(found.generation) if found else None

    def open(self) -> StoreState | None:
        self._roll_back()
        with self._database.transaction() as connection:
            self._create(connection)
            found = connection.execute(self._row).first()
            if found is None and self._tables.known:
                raise StoreLostError(f"the row in {self._frontiers.name} is missing")
            if found is None:
                self._start(connection, 1)
                return None
            self._token = found.token
            applied, reached = self._locked(connection)
            if missing := self._tables.missing(connection):
                raise StoreLostError(f"{missing[0]} is missing in the database")
        return StoreState(applied, reached) if reached else None

    def start_over(self, generation: int) -> None:
        self._roll_back()
        with self._database.transaction() as connection:
            self._create(connection)
            found = connection.execute(self._row).first()
            if found is not None:
                self._token = found.token
                self._locked(connection)
            self._tables.clear(connection)
            connection.execute(sa.delete(self._frontiers).where(self._mine))
            self._start(connection, generation)

    def histories(self) -> frozenset[str]:
        return frozenset()

    def begin(self, reached: int, versions: Sequence[Version], above: int | None = None) -> None:
        self._roll_back()
        expect_keyed(versions, "a row of a table is found by its key")
        self._versions = versions
        with self._database.transaction() as connection:
            applied, started = self._locked(connection)
            if above is not None:
                expect_alone(above, reached, applied=applied.seq, started=started)
            self._set(connection, reached=max(reached, started))

    def write(self, changes: Changes) -> int:
        cut = self._started_cut()
        if changes.truncated is not None:
            self._tables.truncate(cut, changes.version, changes.truncated)
        new = [each for each in changes.changes if each.seq > self._floor]
        if not new and self._tables.has(changes.version):
            return 0
        of = new[0].schema_id if new else changes.version.schema_id
        key = next(v.key for v in changes.versions if v.schema_id == of)
        stored = self._tables.key_of_rows(cut, changes.version)
        expect_key(changes._replace(truncated=None), stored, self._floor)
        self._adapt(cut, changes.versions, key)
        for version in changes.versions:
            mine = [each for each in new if each.schema_id == version.schema_id]
            self._tables.write(cut, version, mine)
        return len(new)

    def loader(self, version: Version) -> TableLoader | None:
        if not self._database.is_postgres:
            return None
        return TableLoader(self._url, self._schema, self._follower, version)

    def take(self, loader: TableLoader, seq: int) -> int:
        cut, version = self._started_cut(), loader.version
        if seq <= self._floor:
            return 0
        self._adapt(cut, (version,), version.key)
        return loader.move(cut, self._tables)

    def _adapt(self, cut: sa.Connection, versions: Sequence[Version], key: tuple[str, ...]) -> None:
        """Give a table the columns of these versions, and of all that the cut has of it.

        Postgres may refuse to change a table after the first rows of the transaction.
        """
        known = [each for each in self._versions if each.name == versions[-1].name]
        known = [each for each in known if each not in versions]
        self._tables.adapt(cut, [*known, *versions], key)

    def alter(self, altered: Altered) -> None:
        cut, version = self._started_cut(), altered.version
        # No later row is of the versions before.
        self._versions = [*(v for v in self._versions if v.name != version.name), version]
        if altered.seq > self._floor:
            self._tables.alter(cut, altered)

    def commit(self, applied: Applied) -> None:
        cut = self._started_cut()
        before, reached = self._locked(cut, tables=False)
        if (applied.seq, applied.lsn) >= (before.seq, before.lsn):
            self._set(
                cut,
                seq=applied.seq,
                lsn=str(applied.lsn),
                committed_at=_EPOCH + timedelta(microseconds=applied.committed_at_us),
                generation=applied.generation,
                reached=max(reached, applied.seq),
                applied=_text(applied.fields),
                tables=_text(self._tables.known),
            )
        cut.commit()
        self._roll_back()

    def rows(self, version: Version, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        if self._cut is not None:
            return self._tables.rows(self._cut, version, keys)
        with self._database.transaction() as connection:
            return self._tables.rows(connection, version, keys)

    def contents(self, version: Version) -> Iterator[tuple[bytes, int, bytes]]:
        with self._database.transaction() as connection:
            yield from self._tables.contents(connection, version)

    def close(self) -> None:
        self._roll_back()
        self._database.close()

    # --- the frontier's row ---

    def _create(self, connection: sa.Connection) -> None:
        self._database.create_alone(connection)
        self._tables.create_schema(connection, self._schema)
        self._frontiers.create(connection, checkfirst=True)

    def _start(self, connection: sa.Connection, generation: int) -> None:
        self._token, tables = token_hex(8), _text(self._tables.known)
        row = {"follower": self._follower, "generation": generation, "token": self._token}
        connection.execute(sa.insert(self._frontiers).values(**row, reached=0, tables=tables))

    def _locked(self, connection: sa.Connection, *, tables: bool = True) -> tuple[Applied, int]:
        """Lock the row until the transaction ends; return the frontier and `reached`."""
        found = connection.execute(self._row.with_for_update()).first()
        if found is None or found.token != self._token:
            raise StoreLostError("another generation, or another store, is in its place")
        if tables:
            self._tables.known = decode_tables(found.tables)
        nothing = Applied.beginning("", found.generation)
        applied = (
            Applied.from_fields(msgspec.json.decode(found.applied)) if found.applied else nothing
        )
        return applied, found.reached

    def _set(self, connection: sa.Connection, **values: object) -> None:
        connection.execute(sa.update(self._frontiers).where(self._mine).values(**values))

    def _started_cut(self) -> sa.Connection:
        """Return the cut's transaction, in which the frontier's row is locked."""
        if not self._token:
            raise InvariantError("a SQL sink is used that was not opened")
        if self._cut is None:
            self._cut = self._database.connect()
            self._floor = self._locked(self._cut)[0].seq
        return self._cut

    def _roll_back(self) -> None:
        if self._cut is not None:
            cut, self._cut = self._cut, None
            with suppress(CDCError):  # the connection is lost, and the transaction with it
                cut.close()


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
