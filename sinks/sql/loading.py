"""Rows that executors load into a table of their own, which a cut then takes in one statement.

A cut is one transaction, and so of one process: many can't write to it. The table has the
follower's types and key, so a task that is repeated loads each row once. It has a name of its own,
because another copy may load another state meanwhile. The cut that takes one drops all that were
made for the same rows: of builds that were killed, and of copies that this cut overtakes.

In Postgres only: SQLite's file has one writer, and may be on another machine.
"""

from __future__ import annotations

from hashlib import blake2b
from secrets import token_hex
from typing import TYPE_CHECKING, Final

from cdc.errors import OvertakenError, StoreLostError
from lockstep.sinks.sql.database import Database
from lockstep.sinks.sql.tables import SQLTables

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from lockstep.sinks.contract import Changes, Version

_PREFIX: Final = "_lockstep_load_"


class TableLoader:
    """Loads all rows of a table (`sinks.contract.Loader`)."""

    def __init__(self, url: str, schema: str, follower: str, version: Version) -> None:
        """Create an empty table for the rows, in a schema that exists.

        One that the cut creates is locked until its commit.
        """
        rows = blake2b(f"{follower} {version.name}".encode(), digest_size=8).hexdigest()
        self.version, self._prefix = version, f"{_PREFIX}{rows}_"
        self._loaded = version._replace(table=f"{self._prefix}{token_hex(8)}")
        self._database = Database(url)
        self._tables = SQLTables(self._database, schema)
        with self._database.transaction() as connection:
            self._tables.adapt(connection, [self._loaded], version.key)
        self.close()

    def write(self, changes: Changes) -> int:
        """Load rows; return how many. Raises OvertakenError if another copy has built the table."""
        try:
            with self._database.transaction() as connection:
                self._expect_table(connection)
                self._tables.write(connection, self._loaded, changes.changes)
        except StoreLostError as error:
            raise self._overtaken from error
        return len(changes.changes)

    def move(self, cut: Connection, tables: SQLTables) -> int:
        """Move the rows to the follower's table, with the cut; return how many were new to it."""
        self._expect_table(cut)
        moved = tables.take(cut, self.version, self._tables.place(self._loaded))
        for each in self._tables.named(cut, self._loaded, self._prefix):
            cut.exec_driver_sql(f"DROP TABLE {each}")
        return moved

    def close(self) -> None:
        self._database.close()

    def _expect_table(self, connection: Connection) -> None:
        if not self._database.columns(connection, self._tables.place(self._loaded)):
            raise self._overtaken

    @property
    def _overtaken(self) -> OvertakenError:
        return OvertakenError(f"another copy of the follower has built {self.version.name}")
