"""A server's refusal is classified by its words, where libpq gives no SQLSTATE."""

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
def test_a_refusal_without_a_state_is_recognized_by_its_words(
    text: str, kind: type[CDCError], hint: str
) -> None:
    error = translate(psycopg.OperationalError(text), "connecting")
    assert type(error) is kind
    assert hint in error.hint


# By SQLSTATE, a word that the hint must have, and one that belongs to another state's hint.
HINTS = [
    ("28P01", "password", "GRANT"),
    ("28000", "pg_hba.conf", "password"),
    ("42501", "privilege", "password"),
    ("0LP01", "privilege", "password"),
    ("3D000", "database named by source.dsn", "privilege"),
    ("08006", "host and port", "privilege"),
    ("08001", "host and port", "privilege"),
    ("57P01", "starting, stopping", "host and port"),
    ("57P03", "starting, stopping", "host and port"),
    ("57014", "statement_timeout", "host and port"),
    ("53300", "max_connections", "disk"),
    ("53400", "max_replication_slots", "disk"),
    ("53100", "disk", "host and port"),
    ("53200", "memory", "host and port"),
    ("40P01", "trying again", "host and port"),
    ("40001", "trying again", "host and port"),
    ("58030", "within the server", "host and port"),
    ("XX000", "within the server", "host and port"),
    ("25006", "primary", "privilege"),
    ("55006", "another daemon", "privilege"),
    ("42704", "cdc setup", "privilege"),
]


@pytest.mark.parametrize(("state", "word", "other"), HINTS)
def test_each_sqlstate_has_an_answer_of_its_own(state: str, word: str, other: str) -> None:
    error = type("Refused", (psycopg.Error,), {"sqlstate": state})("x")
    hint = translate(error, "asking").hint
    assert word in hint
    assert other not in hint


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('FATAL:  password authentication failed for user "me"', "did not accept the password"),
        ("fe_sendauth: no password supplied", "did not accept the password"),
        ('FATAL:  no pg_hba.conf entry for host "x", user "me"', "add a line"),
        ('FATAL:  pg_hba.conf rejects connection for host "x"', "add a line"),
        ('FATAL:  role "me" does not exist', "CREATE ROLE"),
        ('FATAL:  role "me" is not permitted to log in', "may log in"),
        ("SSL error: certificate verify failed", "sslrootcert"),
        ("FATAL:  the database system is starting up", "starting"),
        ("Connection refused", "host and port"),
        ("[Errno -2] failed to resolve host 'nosuch': Name or service not known", "host and port"),
    ],
)
def test_a_refused_connection_is_answered_for_its_reason(text: str, word: str) -> None:
    assert word in translate(psycopg.OperationalError(_AT + text), "connecting").hint


def test_a_password_file_that_is_being_rotated_is_a_refusal_not_a_crash(tmp_path: Path) -> None:
    """It may be missing for a moment: as after a wrong password, the daemon retries rarely."""
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
    assert type(translate(error("no more"), "asking")) is kind
