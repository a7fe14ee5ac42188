"""Tokens: the LSN up to which a database was written, as a text that applications can pass on.

`0/16B3748@7431…/shop`: the LSN, and of which database. LSNs of two servers are not comparable, so a
token names its database, and is refused for another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self
from urllib.parse import quote, unquote

from psycopg.rows import tuple_row

from cdc.errors import ConfigError
from cdc.events import LSN
from cdc.source.connection import translated

if TYPE_CHECKING:
    import psycopg

# Inside a transaction that has written, its own writes are not committed yet.
_TAKE: Final = b"""
SELECT pg_catalog.pg_current_wal_insert_lsn()::text,
       pg_catalog.current_setting('wal_block_size')::int,
       pg_catalog.pg_size_bytes(pg_catalog.current_setting('wal_segment_size')),
       (SELECT system_identifier::text FROM pg_catalog.pg_control_system()),
       pg_catalog.current_database(),
       pg_catalog.pg_current_xact_id_if_assigned() IS NOT NULL
"""
# The sizes of a WAL page header, and of a segment's first page header (xlog_internal.h).
_PAGE_HEADER: Final = 24
_SEGMENT_HEADER: Final = 40


class Token(NamedTuple):
    """Everything that had been committed in `database` when its WAL ended at `lsn`."""

    lsn: LSN
    system_identifier: str
    database: str

    def __str__(self) -> str:
        return f"{self.lsn}@{self.system_identifier}/{quote(self.database, safe='')}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the token in `text`; raise ConfigError where it is none."""
        lsn, _, whose = text.partition("@")
        system, slash, database = whose.partition("/")
        is_complete = system.isdecimal() and slash and database
        try:
            return cls(LSN.parse(lsn if is_complete else ""), system, unquote(database))
        except ValueError as error:
            raise ConfigError(
                f"not a token: {text!r}",
                hint="a token is what `cdc token` and lockstep.Client.token give; an LSN alone is"
                " for --lsn",
            ) from error


def take(connection: psycopg.Connection[Any]) -> Token:
    """Return the token of all that is committed; call it on the connection that has committed.

    Raises ConfigError within a transaction that has written: what it wrote is not committed yet.
    """
    with translated("reading where the WAL ends"):
        if connection.autocommit:
            row = _ask(connection)
        else:
            with connection.transaction():
                row = _ask(connection)
    lsn, page, segment, system, database, writing = row
    if writing:
        raise ConfigError(
            "a token was asked for within a transaction that has written",
            hint="commit first: before that, the position of the commit is unknown",
        )
    return Token(written(LSN.parse(lsn), page, segment), system, database)


def written(inserting: LSN, page_bytes: int, segment_bytes: int) -> LSN:
    """Return where the newest record ends, when the next one goes to `inserting`.

    Where the next record starts a page, `inserting` is after the page's header: the newest record
    ends before that page, and so does the frontier that covers it.
    """
    header = _PAGE_HEADER
    if inserting % segment_bytes == _SEGMENT_HEADER:
        header = _SEGMENT_HEADER
    elif inserting % page_bytes != _PAGE_HEADER:
        header = 0
    return LSN(inserting - header)


def _ask(connection: psycopg.Connection[Any]) -> tuple[Any, ...]:
    with connection.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(_TAKE).fetchone()
    assert row is not None
    return row
