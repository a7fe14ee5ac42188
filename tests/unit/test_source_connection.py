"""What a server's refusal means is decided by its words, where libpq gives no SQLSTATE."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from cdc.config import Config, Log, Source
from cdc.errors import (
    CDCError,
    ConfigError,
    GapError,
    PermissionDeniedError,
    UnavailableError,
)
from cdc.source.connection import connect, translate

_AT = 'connection failed: connection to server at "127.0.0.1", port 5432 failed: '


@pytest.mark.parametrize(
    ("text", "kind", "hint"),
    [
        (f'{_AT}FATAL:  password authentication failed for user "me"', PermissionDeniedError, ""),
        (f'{_AT}FATAL:  no pg_hba.conf entry for host "x"', PermissionDeniedError, ""),
        (f'{_AT}FATAL:  role "me" does not exist', PermissionDeniedError, ""),
        (
            f"{_AT}FATAL:  permission denied to start WAL sender",
            PermissionDeniedError,
            "REPLICATION",
        ),
        (f"{_AT}SSL error: sslv3 alert certificate expired", PermissionDeniedError, ""),
        (f"{_AT}SSL error: certificate verify failed", PermissionDeniedError, ""),
        (
            f'{_AT}FATAL:  certificate authentication failed for user "me"',
            PermissionDeniedError,
            "",
        ),
        (f'{_AT}FATAL:  database "shop" does not exist', GapError, "renamed"),
        (f"{_AT}FATAL:  sorry, too many clients already", UnavailableError, "max_connections"),
        (
            f"{_AT}FATAL:  number of requested standby connections exceeds max_wal_senders",
            UnavailableError,
            "max_wal_senders",
        ),
        (f"{_AT}FATAL:  the database system is starting up", UnavailableError, ""),
        (f"{_AT}FATAL:  the database system is shutting down", UnavailableError, ""),
        (f"{_AT}Connection refused", UnavailableError, ""),
        (f"{_AT}FATAL:  unsupported startup parameter: replication", ConfigError, "PgBouncer"),
        (
            f"{_AT}FATAL:  unsupported startup parameter in options: TimeZone",
            ConfigError,
            "PgBouncer",
        ),
        (f"{_AT}FATAL:  no such database: shop", GapError, "source.dsn"),
    ],
)
def test_a_refusal_without_a_state_is_told_by_its_words(
    text: str, kind: type[CDCError], hint: str
) -> None:
    error = translate(psycopg.OperationalError(text), "connecting")
    assert type(error) is kind
    assert hint in error.hint


def test_a_password_file_that_is_being_rotated_is_a_refusal_not_a_crash(tmp_path: Path) -> None:
    """It may be away for a moment: as for a wrong password, the daemon tries again seldom."""
    config = Config(
        pipeline="a",
        source=Source(dsn="host=nowhere.invalid", password_file=str(tmp_path / "gone")),
        log=Log(bootstrap_servers="x:1"),
    )
    with pytest.raises(PermissionDeniedError, match="cannot read source"):
        connect(config)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (psycopg.errors.AdminShutdown, UnavailableError),
        (psycopg.errors.CrashShutdown, UnavailableError),
        (psycopg.errors.TooManyConnections, UnavailableError),
        (psycopg.errors.QueryCanceled, UnavailableError),
        (psycopg.errors.InsufficientPrivilege, PermissionDeniedError),
        (psycopg.errors.UndefinedObject, GapError),
        (psycopg.errors.UndefinedFile, GapError),
        (psycopg.errors.ObjectNotInPrerequisiteState, GapError),
        (psycopg.errors.SyntaxError, ConfigError),
    ],
)
def test_a_state_says_what_may_be_done(error: type[psycopg.Error], kind: type[CDCError]) -> None:
    assert type(translate(error("said so"), "asking")) is kind
