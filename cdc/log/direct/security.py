"""How a connection is secured, by the same settings that librdkafka takes, or why it can't be.

If a setting for connecting to brokers is not known here, librdkafka writes every Kafka transaction.
Settings of its own queues and timers have no effect here.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

_MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_PROTOCOLS: Final = ("plaintext", "ssl", "sasl_plaintext", "sasl_ssl")
_KNOWN: Final = frozenset(
    (
        *("security.protocol", "socket.timeout.ms", "client.id"),
        *("ssl.ca.location", "ssl.certificate.location", "ssl.key.location", "ssl.key.password"),
        *("enable.ssl.certificate.verification", "ssl.endpoint.identification.algorithm"),
        *("sasl.mechanism", "sasl.mechanisms", "sasl.username", "sasl.password"),
    )
)
# Settings of how a broker is reached or what is sent, which must not be ignored.
_CONNECTING: Final = ("ssl.", "sasl.", "enable.s", "security.", "socket.", "broker.")
_ALSO_CONNECTING: Final = frozenset(("client.dns.lookup", "acks", "api.version.request"))
# Without effect on requests that are sent in one piece and awaited.
_HARMLESS: Final = frozenset(
    (
        *("socket.nagle.disable", "socket.keepalive.enable", "socket.max.fails"),
        *("socket.send.buffer.bytes", "socket.receive.buffer.bytes", "broker.address.ttl"),
        "socket.connection.setup.timeout.ms",
    )
)


class Unsupported(Exception):  # noqa: N818 - no error: librdkafka does it
    """Why brokers can't be written to directly."""


class Login(NamedTuple):
    """Our SASL credentials."""

    mechanism: str
    username: str
    password: str

    def __repr__(self) -> str:
        """Return it without the password."""
        return f"Login({self.mechanism}, {self.username})"


class Security(NamedTuple):
    """What every connection starts with."""

    tls: ssl.SSLContext | None
    login: Login | None


def of(settings: Mapping[str, str | int | float | bool]) -> Security:
    """Return what librdkafka's settings ask for; raise Unsupported if we can't do it."""
    given = {name: str(value).strip() for name, value in settings.items()}
    for name in given.keys() - _KNOWN - _HARMLESS:
        if name.startswith(_CONNECTING) or name in _ALSO_CONNECTING:
            raise Unsupported(f"log.kafka has {name}, which only librdkafka knows")
    protocol = given.get("security.protocol", "plaintext").lower()
    if protocol not in _PROTOCOLS:
        raise Unsupported(f"log.kafka has security.protocol {protocol}")
    tls = _tls(given) if protocol.endswith("ssl") else None
    return Security(tls, _login(given) if protocol.startswith("sasl") else None)


def _tls(given: Mapping[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=given.get("ssl.ca.location"))
        if certificate := given.get("ssl.certificate.location"):
            password = given.get("ssl.key.password")
            # Without a password OpenSSL would ask for one at the terminal.
            context.load_cert_chain(
                certificate, given.get("ssl.key.location"), lambda: password or ""
            )
    except OSError as error:  # ssl.SSLError is one
        raise Unsupported(f"the certificates can't be read: {type(error).__name__}") from error
    match given.get("ssl.endpoint.identification.algorithm", "https").lower():
        case "https":
            pass
        case "none":
            context.check_hostname = False
        case other:
            raise Unsupported(f"log.kafka has ssl.endpoint.identification.algorithm {other}")
    if given.get("enable.ssl.certificate.verification", "true").lower() in ("false", "0", "f"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _login(given: Mapping[str, str]) -> Login:
    mechanism = given.get("sasl.mechanism", given.get("sasl.mechanisms", "GSSAPI")).upper()
    if mechanism not in _MECHANISMS:
        raise Unsupported(f"log.kafka has sasl.mechanism {mechanism}")
    username, password = given.get("sasl.username", ""), given.get("sasl.password", "")
    # SCRAM normalizes other characters by Unicode tables, which is not implemented here.
    if mechanism != "PLAIN" and not (username + password).isascii():
        raise Unsupported("sasl.username or sasl.password is not ASCII")
    return Login(mechanism, username, password)
