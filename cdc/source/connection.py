"""Connections to Postgres, and what their errors mean.

Every connection pins the settings that change how values are written as text, so that neither the
role's nor the database's settings reach an event. Errors are classified by SQLSTATE: what may pass
by itself is `UnavailableError`, what a person must mend is not.

https://www.postgresql.org/docs/current/errcodes-appendix.html
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import conninfo

from cdc.errors import CDCError, GapError, PermissionDeniedError, SlotBusyError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from psycopg.rows import TupleRow

    from cdc.config import Config

# docs/EVENTS.md states these to users: an event's bytes depend on them.
_SESSION: Final = {
    "client_encoding": "UTF8",
    "TimeZone": "UTC",
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "lc_monetary": "C",
}
# A dead peer is found within about half a minute instead of the kernel's two hours.
_NETWORK: Final = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
# SQLSTATEs and classes a person must mend: authorization, invalid role, privileges.
_DENIED: Final = ("28", "42501", "0LP01")


def connect(config: Config, *, replication: bool = False) -> psycopg.Connection[TupleRow]:
    """Return a connection with our session settings; in autocommit mode.

    With `replication` it speaks to a walsender of the pipeline's database.
    """
    pinned = ((name, value.replace(" ", r"\ ")) for name, value in _SESSION.items())
    options = " ".join(f"-c {name}={value}" for name, value in pinned)
    kind = {"replication": "database"} if replication else {}
    given: dict[str, Any] = conninfo.conninfo_to_dict(config.source.dsn)
    application = str(given.get("application_name") or f"lockstep {config.pipeline}")
    password = {}
    if config.source.password_file:  # read anew each time, so that it may be rotated
        password["password"] = Path(config.source.password_file).read_text("utf-8").strip()
    settings: dict[str, Any] = {**_NETWORK, **given, **password, **kind}
    settings["options"] = f"{given.get('options') or ''} {options}".strip()
    settings["application_name"] = application
    with translated(f"connecting to Postgres ({_place(given)})"):
        return psycopg.connect(**settings, autocommit=True)


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raise psycopg's errors as ours; `doing` says what was tried, on what."""
    try:
        yield
    except psycopg.Error as error:
        raise translate(error, doing) from error


def translate(error: psycopg.Error, doing: str) -> CDCError:
    """Return the error of ours that says what may be done about `error`."""
    state = error.sqlstate or ""
    text = str(error).strip().split("\n")[0] or type(error).__name__
    what = f"{doing}: {text}"
    if state == "55006":
        return SlotBusyError(what, hint="another daemon holds the slot; this one waits its turn")
    if state == "42704":
        return GapError(
            what,
            hint="on a new pipeline run `cdc setup`; where it has run before, changes made since"
            " are gone from the stream: `cdc teardown --topics`, `cdc setup` and a snapshot",
        )
    if state == "55000":
        return GapError(what, hint="`cdc slot show` tells the slot's state and what it means")
    if state.startswith(_DENIED) or "password authentication failed" in text:
        return PermissionDeniedError(
            what, hint="give the role LOGIN, REPLICATION and SELECT; `cdc doctor` prints the SQL"
        )
    if state.startswith("3D"):
        return GapError(what, hint="the database named by source.dsn does not exist")
    return UnavailableError(what, hint="see that Postgres runs and source.dsn reaches it")


def _place(given: dict[str, Any]) -> str:
    return (
        f"{given.get('host', 'local socket')}:{given.get('port', 5432)}/{given.get('dbname', '')}"
    )
