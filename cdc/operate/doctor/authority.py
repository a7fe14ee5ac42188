"""The doctor's checks: who may command the pipeline, and passwords on unencrypted connections.

Pure functions from facts and the configuration to findings; `examine` gathers the facts.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from cdc.config import meaning
from cdc.errors import CDCError
from cdc.keyring.opening import need_ciphers
from cdc.operate.findings import Finding, error, note, ok, warning
from cdc.operate.readable import listed
from cdc.source import rights
from cdc.source.rights import DsnFacts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cdc.config import Config
    from cdc.source.connection import Connection
    from cdc.source.rights import Rights

# The port after a name, an IPv4 address or an IPv6 address in brackets.
_PORT = re.compile(r"(?<=[^:]):\d+$|(?<=\]):\d+$")
# Each text of these encodings has a form in UTF-8. Others have codes without one.
_ALL_IN_UTF8 = {"UTF8", "LATIN1"}
# The libpq modes that are always encrypted; `prefer` and `allow` may fall back to plain text.
_ENCRYPTED = {"require", "verify-ca", "verify-full"}


def examine(connection: Connection, config: Config) -> Iterator[Finding]:
    yield from check_secret(config)
    yield from check_keyring(config)
    yield from check_connections(config)
    yield from check_rights(rights.read(connection), config.values.invalid_text_handling_mode)


def check_secret(config: Config) -> Iterator[Finding]:
    if config.control.secret:
        yield ok("control_secret", "commands to the daemon are signed with control.secret")
    else:
        what = (
            "control.secret is not set: the daemon obeys no `cdc snapshot` and no `cdc table add`"
        )
        yield note("control_secret", what, "control.secret: (openssl rand -hex 32)")


def check_keyring(config: Config) -> Iterator[Finding]:
    """Find out whether the keys of encrypted columns can be used here."""
    if not config.keyring.is_there:
        return
    try:
        counts = need_ciphers(config).keyring.counts()
    except CDCError as failure:
        yield error("keyring", failure.what, failure.hint)
    else:
        yield ok("keyring", f"{counts.keys:,} subjects have a key, {counts.forgotten:,} had one")


def check_rights(found: Rights, invalid_text: str = "fail") -> Iterator[Finding]:
    if found.replication:
        others = listed(found.replication)
        what = f"may read all WAL, and so every row, in addition to {found.role}: {others}"
        yield note("replication_roles", what)
    if found.emit_is_public:
        yield _emit_message(found, invalid_text)
    for table, readers in found.key_readers.items():
        who = listed(readers)
        what = f"lockstep.{table} may be read by {who}, who can therefore sign as its trigger"
        yield warning("trigger_keys", what, f"REVOKE ALL ON lockstep.{table} FROM {who};")
    if found.signal_writers:
        what = f"may command the daemon by lockstep.signal: {listed(found.signal_writers)}"
        yield note("signal_writers", what)


def _emit_message(found: Rights, invalid_text: str) -> Finding:
    any_bytes = found.encoding == "SQL_ASCII" and invalid_text == "base64"
    if found.encoding in _ALL_IN_UTF8 or any_bytes:
        what = "every role may write logical messages: harmless, since what is ours is signed"
        return note("emit_message", what)
    what = (
        f"every role may write logical messages, and a text of {found.encoding} that has no form in"
        " UTF-8 can't be sent: one in a message's prefix halts the daemon for good"
    )
    if found.encoding == "SQL_ASCII":
        return warning("emit_message", what, "values.invalid.text.handling.mode: base64")
    return warning(
        "emit_message",
        what,
        f"revoke EXECUTE on pg_logical_emit_message from PUBLIC, and grant it to {found.role}:"
        " docs/SECURITY.md has the SQL",
    )


def check_connections(config: Config) -> list[Finding]:
    """Return a warning for each password that another host gets over a plain connection."""
    return [*_postgres(config), *_kafka(config), *_stores(config)] or [
        ok("plain_password", "no password goes to another host unencrypted")
    ]


def _unencrypted(setting: str, host: str, fix: str) -> Iterator[Finding]:
    if not is_loopback(host):
        what = f"{setting}: a password goes to {host} unencrypted"
        yield warning("plain_password", what, fix)


def _postgres(config: Config) -> Iterator[Finding]:
    for setting, dsn in (("source.dsn", config.source.dsn), ("snapshot.dsn", config.snapshot.dsn)):
        if dsn:
            given = rights.dsn_facts(dsn)
            from_file = config.source.password_file is not None
            yield from _libpq(setting, given._replace(has_password=given.has_password or from_file))


def _libpq(setting: str, given: DsnFacts) -> Iterator[Finding]:
    if given.has_password and given.sslmode not in _ENCRYPTED:
        for host in given.hosts:
            yield from _unencrypted(setting, host, "sslmode=verify-full, with sslrootcert, in it")


def _kafka(config: Config) -> Iterator[Finding]:
    yield from _brokers("log.kafka", config.log.bootstrap_servers, config.log.kafka)
    for name, follower in config.followers.items():
        if (topic := follower.topic) is not None:
            at, log = f"followers.{name}.topic.kafka", config.log
            if topic.bootstrap_servers:
                yield from _brokers(at, topic.bootstrap_servers, topic.kafka)
            elif topic.kafka:
                yield from _brokers(at, log.bootstrap_servers, log.kafka | topic.kafka)


def _brokers(setting: str, servers: str, given: Mapping[str, object]) -> Iterator[Finding]:
    settings = {name.lower(): str(value).lower() for name, value in given.items()}
    if settings.get("security.protocol") == "sasl_plaintext":
        for server in servers.split(","):
            host = server.strip().rpartition(":")[0].strip("[]")
            yield from _unencrypted(setting, host, "security.protocol: sasl_ssl")


def _stores(config: Config) -> Iterator[Finding]:
    for name, follower in config.followers.items():
        if (redis := follower.redis) is not None:
            url = urlsplit(redis.url)
            if url.scheme == "redis" and (url.password or "password" in parse_qs(url.query)):
                fix = "a URL that begins with rediss://"
                yield from _unencrypted(f"followers.{name}.redis.url", url.hostname or "", fix)
        if (store := follower.opensearch) is not None:
            url = urlsplit(store.url)
            if url.scheme == "http" and (url.password or store.password):
                fix = "a URL that begins with https://"
                yield from _unencrypted(f"followers.{name}.opensearch.url", url.hostname or "", fix)
        if (sql := follower.sql) is not None and not sql.url.startswith("sqlite"):
            yield from _libpq(f"followers.{name}.sql.url", _url_facts(sql.url))


def _url_facts(url: str) -> DsnFacts:
    """Return what a URL shows that SQLAlchemy hands to libpq: its query outranks the rest.

    There `host` may be given several times, each with a port.
    """
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    given = query.get("hostaddr") or query.get("host") or [parts.hostname or ""]
    hosts = [_PORT.sub("", each).strip("[]") for one in given for each in one.split(",")]
    has_password = bool(parts.password) or "password" in query
    return DsnFacts(hosts, query.get("sslmode", ["prefer"])[-1], has_password)


def is_loopback(host: str) -> bool:
    """Return whether the host is this machine: a socket, localhost, 127.0.0.0/8, ::1."""
    return not host or host.startswith(("/", "@")) or meaning.is_loopback(host)
