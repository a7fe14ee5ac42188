"""Connections to Postgres, and what their errors mean.

Every connection pins the settings that change how values are written as text, so that no settings
of the role, the database or this process's environment affect an event. libpq sends PGTZ and
PGDATESTYLE after `options`, so they override it: the settings are set again once the session has
started, and the values that the server then reports are checked. No timeout of the role or the
database ends a session either: `options` has precedence over theirs. Errors are classified by
SQLSTATE: what may pass by itself is `UnavailableError`, what a person must fix is not.

https://www.postgresql.org/docs/current/errcodes-appendix.html
"""

from __future__ import annotations

import os
import socket
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import psycopg
from msgspec.structs import replace
from psycopg import conninfo
from psycopg.rows import TupleRow

from cdc.errors import (
    CDCError,
    ConfigError,
    GapError,
    PermissionDeniedError,
    SlotBusyError,
    UnavailableError,
    unquoted,
)
from cdc.runtime.waiting import after, slow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from cdc.config import Config

    Connection = psycopg.Connection[TupleRow]

# docs/EVENTS.md states these to users: an event's bytes depend on them.
SESSION: Final = {
    "client_encoding": "UTF8",
    "TimeZone": "UTC",
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "lc_monetary": "C",
    # Names inside values (regclass and similar types) are written by these.
    "search_path": "pg_catalog",
    "quote_all_identifiers": "off",
    # Defines the meaning of a literal in our statements.
    "standard_conforming_strings": "on",
}
# A session that waits, for a commit or for its next query, does so on purpose.
_TIMEOUTS: Final = dict.fromkeys(
    (
        "statement_timeout",
        "lock_timeout",
        "idle_in_transaction_session_timeout",
        "idle_session_timeout",
    ),
    "0",
)
# A dead peer is found within about half a minute instead of the kernel's two hours.
_NETWORK: Final = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
# The catalogs answer in milliseconds, thousands of tables in seconds; our lookups wait for no lock,
# but for a row filter's, for half a minute (`cdc.source.row_filters`).
LOOKUP_SECONDS: Final = 60.0
# Not a SQLSTATE: no server sends it.
_POOLER: Final = "POOLER"
# Causes of 28000 that need different fixes.
_NO_HBA: Final = "28000 pg_hba"
_NO_ROLE: Final = "28000 role"
_CERTIFICATE: Final = "28000 certificate"
# A refused connection has no SQLSTATE in libpq, only the server's text after `FATAL:`.
_REFUSALS: Final = {
    # What a pooler answers to a replication connection, or to settings that it does not support.
    "unsupported startup parameter": _POOLER,
    "unsupported pkt type": _POOLER,
    "no such database": "3D000",  # PgBouncer, for a name that is not configured there
    "remaining connection slots are reserved": "53300",
    "sorry, too many clients": "53300",
    "too many connections for": "53300",
    "number of requested standby connections": "53300",
    "all replication slots are in use": "53400",
    "password authentication failed": "28P01",
    "no password supplied": "28P01",
    "permission denied": "42501",
    "must be superuser or replication role": "42501",
    "no pg_hba.conf entry": _NO_HBA,
    "pg_hba.conf rejects": _NO_HBA,
    "role ": _NO_ROLE,  # does not exist, or is not permitted to log in
    "database ": "3D000",  # does not exist
    "the database system is": "57P03",  # starting up, shutting down, in recovery mode
    "terminating connection": "57P01",
}
_LOST_CONNECTION: Final = "08006"
_DENIED: Final = "42501"
_POLICY: Final = (
    "what a policy hides would be missing, so nothing is read: ALTER ROLE … BYPASSRLS, or make"
    " the role the table's owner; or leave the table out of the snapshot (`snapshot: none`)"
)

# Data exceptions and violated constraints: their text may quote a value of a row.
_OF_VALUES: Final = ("22", "23")

_ANSWERS: Final[tuple[tuple[tuple[str, ...], type[CDCError], str], ...]] = (
    (("55006",), SlotBusyError, "another daemon holds the slot; this one waits its turn"),
    (
        ("42704",),
        GapError,
        (
            "run `cdc setup` on a new pipeline; an old one has lost what changed since, so"
            " `cdc teardown --topics`, `cdc setup` and a snapshot start over"
        ),
    ),
    (("55000",), GapError, "`cdc slot show` shows the slot's state"),
    (("58P01",), GapError, "the WAL that the slot needs was removed; `cdc slot show` shows more"),
    (
        ("3D",),
        GapError,
        (
            "the database named by source.dsn does not exist: it was dropped or renamed; name it in"
            " source.dsn as it is called, and `cdc doctor` compares it with the log"
        ),
    ),
    (
        (_POOLER,),
        ConfigError,
        (
            "source.dsn leads to a connection pooler, such as PgBouncer, that passes no replication"
            " connection: name Postgres itself there"
        ),
    ),
    (
        ("53300",),
        UnavailableError,
        (
            "Postgres has no connection free; the daemon tries again. Raise max_connections, or"
            " max_wal_senders where it says so (then restart Postgres), or end what is not needed"
        ),
    ),
    (
        ("28P01",),
        PermissionDeniedError,
        (
            "the server did not accept the password, or got none: correct it where it is taken from"
            " (source.password_file, the DSN itself, PGPASSWORD or ~/.pgpass)"
        ),
    ),
    (
        (_NO_HBA,),
        PermissionDeniedError,
        (
            "pg_hba.conf lets nobody in this way: add a line for this database, role and address"
            " (`host DATABASE ROLE ADDRESS scram-sha-256`), then SELECT pg_reload_conf(); where the"
            " message says `no encryption`, the server may want sslmode=require in source.dsn"
        ),
    ),
    (
        (_NO_ROLE,),
        PermissionDeniedError,
        (
            "name a role in source.dsn that exists and may log in, or, as a superuser: CREATE ROLE"
            " … LOGIN REPLICATION PASSWORD '…'"
        ),
    ),
    (
        (_CERTIFICATE,),
        PermissionDeniedError,
        "see sslcert, sslkey, sslrootcert and sslmode in source.dsn, and when they expire",
    ),
    (
        ("28",),
        PermissionDeniedError,
        "the server does not accept who we are: see source.dsn, and pg_hba.conf on the server",
    ),
    (
        ("42501", "0LP01"),
        PermissionDeniedError,
        "the role lacks a privilege, REPLICATION or SELECT as a rule: `cdc doctor` prints the SQL",
    ),
    (
        ("25006",),
        ConfigError,
        (
            "the server is read-only, usually a standby: name the primary in source.dsn (libpq:"
            " target_session_attrs=read-write)"
        ),
    ),
    (
        ("08",),
        UnavailableError,
        "see that Postgres runs, and that host and port of source.dsn are reached from here",
    ),
    (
        ("57014",),
        UnavailableError,
        "somebody cancelled the statement, or it took longer than statement_timeout allows",
    ),
    (
        ("57",),
        UnavailableError,
        "Postgres is starting, stopping, or an operator ended the connection: try again",
    ),
    (
        ("53400",),
        UnavailableError,
        (
            "a limit of the server is reached, such as max_replication_slots: drop what nobody uses"
            " (`cdc slot show --all`), or raise it and restart Postgres"
        ),
    ),
    (
        ("53",),
        UnavailableError,
        "the server is out of disk or memory: its log shows more",
    ),
    (("40",), UnavailableError, "it met another transaction; trying again is enough"),
    (("58", "XX"), UnavailableError, "an error within the server: its log shows more"),
    (
        ("22021",),
        ConfigError,
        (
            "a database of encoding SQL_ASCII takes any bytes, and some are not UTF-8: set"
            " values.invalid.text.handling.mode to base64, and such texts go into the log as their"
            " bytes; nothing was confirmed, so nothing is lost"
        ),
    ),
    (
        ("22P05",),
        ConfigError,
        (
            "a row, or a logical message's prefix, has a text without a form in UTF-8, so Postgres"
            " can send neither it nor what came later: correct the rows, then start over with a new"
            " slot (docs/OPERATIONS.md); docs/SECURITY.md says how to keep roles from writing such"
            " texts"
        ),
    ),
    (("",), ConfigError, "`cdc doctor` compares server and configuration"),
)


def connect(config: Config, *, replication: bool = False) -> Connection:
    """Return a connection with our session settings; in autocommit mode.

    With `replication` it connects to a walsender in the pipeline's database.
    """
    return _connect(config, psycopg.Connection, {"replication": "database"} if replication else {})


def connect_for_lookups(config: Config) -> Connection:
    """Return a connection likewise, for queries on the catalogs.

    One that is not answered within `LOOKUP_SECONDS` raises UnavailableError and ends the
    connection. Without that a server that is frozen, while its kernel or a proxy lives and
    acknowledges keepalives, would be waited for forever.
    """
    return _connect(config, _LookupConnection, {})


class _LookupConnection(psycopg.Connection[TupleRow]):
    def execute(self, *args: Any, **options: Any) -> psycopg.Cursor[TupleRow]:  # noqa: ANN401 - as psycopg's
        with within(self, LOOKUP_SECONDS):
            return super().execute(*args, **options)


def _connect(config: Config, of_type: type[Connection], kind: dict[str, str]) -> Connection:
    pinned = ((name, value.replace(" ", r"\ ")) for name, value in (SESSION | _TIMEOUTS).items())
    options = " ".join(f"-c {name}={value}" for name, value in pinned)
    given: dict[str, Any] = conninfo.conninfo_to_dict(config.source.dsn)
    application = str(given.get("application_name") or f"lockstep {config.pipeline}")
    password = {"password": _password(config)} if config.source.password_file else {}
    settings: dict[str, Any] = {**_NETWORK, **given, **password, **kind}
    settings["options"] = f"{given.get('options') or ''} {options}".strip()
    settings["application_name"] = application
    place = (
        f"{given.get('host', 'local socket')}:{given.get('port', 5432)}/{given.get('dbname', '')}"
    )
    with slow(f"Postgres at {place}"), translated(f"connecting to Postgres ({place})"):
        connection = of_type.connect(**settings, autocommit=True)
        try:
            answer = connection.execute(PIN.encode()).fetchone()
            expect_pinned(tuple(map(str, answer or ())))
        except BaseException:
            connection.close()
            raise
    return connection


def within(connection: Connection, seconds: float) -> AbstractContextManager[None]:
    """End the connection if the block takes longer, so that what waits for an answer fails.

    A server that is frozen, or a host that is, ends nothing by its own timeouts.
    """
    return after(seconds, lambda: end(connection))


def end(connection: Connection) -> None:
    """End the connection, and what waits on it. Safe from another thread; it is closed later."""
    with (
        suppress(OSError, psycopg.Error),  # it is closed already
        socket.socket(fileno=os.dup(connection.fileno())) as same,
    ):
        same.shutdown(socket.SHUT_RDWR)


# Not in `options`: a server before 17 would refuse the connection.
_NO_TRANSACTION_TIMEOUT: Final = (
    "(SELECT pg_catalog.set_config(name, '0', false) FROM pg_catalog.pg_settings"
    " WHERE name = 'transaction_timeout')"
)
# Set and read back in one statement, and so in one round trip; a walsender accepts it too.
PIN: Final = "SELECT {}, {}".format(
    ", ".join(
        f"pg_catalog.set_config('{name}', '{value}', false)" for name, value in SESSION.items()
    ),
    _NO_TRANSACTION_TIMEOUT,
)


def expect_pinned(answer: tuple[str, ...]) -> None:
    """Raise ConfigError unless `answer`, what `PIN` returned, starts with what was set."""
    for (name, wanted), got in zip(SESSION.items(), answer, strict=False):
        if got != wanted:
            raise ConfigError(
                f"the session's {name} is {got!r} right after it was set to {wanted!r}: values"
                " would be written in another form than the log promises",
                hint="something between here and Postgres, or a hook in it, changes the settings of"
                " sessions: connect to Postgres itself by source.dsn, and remove the hook",
            )


def _password(config: Config) -> str | None:
    """Return the password; PermissionDeniedError where its file is missing, as in a rotation."""
    try:
        return config.password
    except ConfigError as error:
        raise PermissionDeniedError(error.what, hint=error.hint) from error


def hosts(config: Config) -> dict[str, Config]:
    """Return a configuration for each host that source.dsn names, primary or not, by `host:port`.

    With one host there is nothing to distinguish, and none is returned.
    """
    given = conninfo.conninfo_to_dict(config.source.dsn)
    names = str(given.pop("host", None) or "").split(",")
    ports = str(given.pop("port", None) or "5432").split(",")
    given.pop("target_session_attrs", None)
    addresses = str(given.pop("hostaddr", None) or "").split(",")
    if len(names) < 2:  # noqa: PLR2004 - one is no choice
        return {}
    found = {}
    for number, name in enumerate(names):
        port = (ports[number] if len(ports) > 1 else ports[0]) or "5432"
        own: dict[str, Any] = {**given, "host": name, "port": port}
        if len(addresses) > 1:
            own["hostaddr"] = addresses[number]
        source = replace(config.source, dsn=conninfo.make_conninfo(**own))
        found[f"{name}:{port}"] = replace(config, source=source)
    return found


def take_any_text(connection: Connection, config: Config, *, local: bool = False) -> None:
    """Allow text that is not UTF-8, where the configuration has a form for it.

    Only a database of encoding SQL_ASCII holds any. No text is converted there: the server only
    refuses to send what is not valid for the client. From then on psycopg returns all text as
    bytes, if `local` until the end of the transaction.
    """
    any_bytes = connection.info.parameter_status("server_encoding") == "SQL_ASCII"
    if any_bytes and config.values.invalid_text_handling_mode == "base64":
        with translated("setting client_encoding"):
            connection.execute(
                b"SET LOCAL client_encoding TO 'SQL_ASCII'"
                if local
                else b"SET client_encoding TO 'SQL_ASCII'"
            )


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raise psycopg's errors as ours; `doing` describes what was tried, on what."""
    try:
        yield
    except psycopg.Error as error:
        raise translate(error, doing) from error


def translate(error: psycopg.Error, doing: str) -> CDCError:
    """Return our error for `error`, with a hint of what may be done about it."""
    text = str(error).strip().split("\n")[0] or type(error).__name__
    state = error.sqlstate or _state_of(text)
    if state.startswith(_OF_VALUES):
        text = unquoted(text)
    kind, hint = next((kind, hint) for states, kind, hint in _ANSWERS if state.startswith(states))
    if state == _DENIED and "row-level security" in text:
        hint = _POLICY
    return kind(f"{doing}: {text}", hint=hint)


def _state_of(text: str) -> str:
    output = text.partition("FATAL:")[2].strip()
    if "certificate" in text:  # expired, not trusted, or missing: of either side
        return _CERTIFICATE
    if "no password supplied" in text:  # libpq's own text, before the server can refuse
        return "28P01"
    states = (state for start, state in _REFUSALS.items() if output.startswith(start))
    return next(states, _LOST_CONNECTION)
