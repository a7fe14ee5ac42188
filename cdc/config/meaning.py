"""Refuse values of the right type that Postgres, Kafka or Lockstep could not work with.

One function per field; each gets a value of the right type, and yields complaints.
"""

from __future__ import annotations

import ipaddress
import math
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cdc.config.oidc import KINDS
from cdc.config.patterns import parse_table_pattern
from cdc.config.secrecy import (
    LOGIN,
    MISREAD,
    has_login,
    has_password,
    is_misread,
    without_passwords,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

# A secret of this many characters can't be guessed, written in hex or as words.
MIN_SECRET = 32
# Exactly-once depends on these: Lockstep sets them, and the file may not.
OWNED_KAFKA_SETTINGS = frozenset(
    {
        "acks",
        "bootstrap.servers",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "enable.idempotence",
        "enable.partition.eof",
        "group.id",
        "isolation.level",
        "message.send.max.retries",
        "metadata.broker.list",
        "partitioner",
        "request.required.acks",
        "retries",
        "transactional.id",
    }
)

# Names, and what else they can't be.
_NAMES = {
    ("pipeline",): ("[a-z0-9_]{1,54}", "name a pipeline; expected 1 to 54 of a-z 0-9 _"),
    ("source", "slot"): ("[a-z0-9_]{1,63}", "name a slot; expected 1 to 63 of a-z 0-9 _"),
    ("log", "prefix"): (
        "[A-Za-z0-9_-]{1,100}",
        "start a topic's name; expected 1 to 100 of A-Z a-z 0-9 _ -",
    ),
}
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
_MAX_PORT = 65_535
_MAX_IDENTIFIER_BYTES = 63


def complaints(at: tuple[str, ...], value: Any, siblings: Mapping[str, Any]) -> Iterator[str]:  # noqa: ANN401 - any field's
    """Yield what is wrong with `value` as the field `at`; `siblings` are its section's fields."""
    if at[:-1] == ("log", "kafka"):
        if at[-1] in OWNED_KAFKA_SETTINGS:
            yield "is set by Lockstep: exactly-once depends on it; remove it"
    elif value is not None and at in _NAMES:
        pattern, purpose = _NAMES[at]
        if not re.fullmatch(pattern, value):
            yield f"{value!r} cannot {purpose}"
    elif value is not None and at in _CHECKS:
        yield from _CHECKS[at](value, siblings)


def _dsn(dsn: str, _: Mapping[str, Any]) -> Iterator[str]:
    dsn = dsn.strip()
    if not dsn.startswith(("postgresql://", "postgres://")) and "=" not in dsn:
        yield "neither a URL (postgresql://user@host:port/db) nor keywords (host=… dbname=… user=…)"
    elif is_misread(dsn):
        yield MISREAD
    elif re.search(r"\breplication\s*=", dsn):
        yield "must not set `replication`: Lockstep does, where it streams"
    else:
        from cdc.config.dsn import is_readable  # noqa: PLC0415 - loads libpq, for this field only

        if not is_readable(dsn):
            yield (
                "libpq cannot read it; expected postgresql://user@host:port/db?name=value or "
                "name=value pairs, with quotes around values that hold spaces"
            )


def _publication(name: str, _: Mapping[str, Any]) -> Iterator[str]:
    if not 0 < len(name.encode()) <= _MAX_IDENTIFIER_BYTES or "\0" in name:
        yield f"{name!r} cannot name a publication; expected 1 to 63 bytes"


def _tables(patterns: tuple[str, ...], _: Mapping[str, Any]) -> Iterator[str]:
    for text in patterns:
        try:
            pattern = parse_table_pattern(text)
        except ValueError:
            yield (
                f"{text!r} names no table; expected schema.table or schema.*, with "
                'double quotes around a name that holds dots or spaces: public."odd.name"'
            )
        else:
            if pattern.schema.exact in ("pg_catalog", "information_schema"):
                yield f"{text!r}: Postgres does not publish its catalogs"


def _password_file(name: str, siblings: Mapping[str, Any]) -> Iterator[str]:
    if has_password(siblings.get("dsn") or ""):
        yield "the dsn has a password already; keep one of them"
    try:
        Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        yield f"cannot read {name}: {why}"


def _delta_path(path: str, _: Mapping[str, Any]) -> Iterator[str]:
    if has_login(path):
        yield LOGIN


def bootstrap_servers(servers: str, _: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Yield what is wrong with a list of brokers."""
    for server in servers.split(","):
        yield from _host_port(server.strip(), least=1)


def _retention_hours(hours: float, _: Mapping[str, Any]) -> Iterator[str]:
    if hours == 0 or not math.isfinite(hours):
        yield f"{hours}: 0 would delete events at once; negative keeps them for ever"


def _compaction_lag_hours(hours: float, siblings: Mapping[str, Any]) -> Iterator[str]:
    kept = siblings.get("retention_hours")
    if not math.isfinite(hours):
        yield f"{hours}: expected a number of hours"
    elif siblings.get("cleanup") == "both" and kept is not None and 0 < kept <= hours:
        yield f"{hours}: nothing would be compacted before retention_hours ({kept}) deletes it"


def _listen(listen: str, _: Mapping[str, Any]) -> Iterator[str]:
    if listen:
        yield from _host_port(listen, least=0)


def _console_listen(listen: str, siblings: Mapping[str, Any]) -> Iterator[str]:
    yield from _listen(listen, siblings)
    host = listen.rpartition(":")[0].strip("[]")
    oidc = siblings.get("oidc")
    is_guarded = siblings.get("token_file") is not None or (oidc and oidc.issuer)
    if host and not is_loopback(host) and not is_guarded:
        yield (
            f"other machines reach {host!r}: set console.token_file or console.oidc.issuer, or "
            "listen on 127.0.0.1"
        )


def oidc_issuer(issuer: str, siblings: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with an issuer of tokens; `siblings` are the section's fields."""
    if siblings.get("audience") is None:
        yield "set audience, too: else a token for another application of this issuer would do"
    if siblings.get("keys") is None and not is_private_url(issuer):
        yield f"{issuer!r} is no https URL, so its keys cannot be found: set keys"


def oidc_keys(keys: str, _: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with where an issuer's keys are."""
    if is_url(keys) and not is_private_url(keys):
        yield f"{without_passwords(keys)!r}: expected a file, or an https URL without a login"


def oidc_people(people: tuple[str, ...], _: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a list of people."""
    for each in people:
        kind, name = each.partition(":")[::2]
        if kind not in KINDS or not name.strip():
            yield f"{each!r} names nobody; expected email:…, group:… or sub:…"


def is_url(text: str) -> bool:
    """Return whether this is a URL, and no file."""
    return "://" in text


def is_private_url(text: str) -> bool:
    """Return whether nobody between here and a URL's host can change its answer.

    So it is `https`, or on this machine. One with a login is not: it would be shown.
    """
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return False
    is_written = text.isascii() and text.isprintable() and " " not in text
    if not host or not is_written or "@" in parts.netloc:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host))


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address; a name may become any."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _host_port(text: str, *, least: int) -> Iterator[str]:
    """Yield what is wrong with `text` as `host:port`; `least` is the lowest port."""
    match = _HOST_PORT.fullmatch(text)
    if match is None:
        shown = without_passwords(text)
        yield f"{shown!r} is no address; expected host:port, such as localhost:9092"
    elif not least <= int(match[2]) <= _MAX_PORT:
        yield f"{text!r}: a port is a number from {least} to {_MAX_PORT}"


def _secret(secret: str, _: Mapping[str, Any]) -> Iterator[str]:
    if len(secret) < MIN_SECRET:
        yield f"shorter than {MIN_SECRET} characters; `openssl rand -hex 32` makes a good one"


_CHECKS: dict[tuple[str, ...], Callable[[Any, Mapping[str, Any]], Iterator[str]]] = {
    ("source", "dsn"): _dsn,
    ("source", "publication"): _publication,
    ("source", "tables"): _tables,
    ("source", "exclude"): _tables,
    ("source", "password_file"): _password_file,
    ("snapshot", "dsn"): _dsn,
    ("delta", "path"): _delta_path,
    ("log", "bootstrap_servers"): bootstrap_servers,
    ("log", "retention_hours"): _retention_hours,
    ("log", "compaction_lag_hours"): _compaction_lag_hours,
    ("http", "listen"): _listen,
    ("console", "index"): _tables,
    ("console", "listen"): _console_listen,
    ("console", "oidc", "issuer"): oidc_issuer,
    ("console", "oidc", "keys"): oidc_keys,
    ("console", "oidc", "viewers"): oidc_people,
    ("console", "oidc", "actors"): oidc_people,
    ("control", "secret"): _secret,
}
