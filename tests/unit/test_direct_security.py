"""What librdkafka's settings require of a connection, and what only librdkafka can do."""

from __future__ import annotations

import base64
import ssl
from pathlib import Path

import certifi
import pytest

from cdc.log.direct import sasl, security
from cdc.log.direct.brokers import addresses
from cdc.log.direct.requests import Broker
from cdc.log.direct.security import Login, Unsupported


def test_without_settings_a_connection_is_plain() -> None:
    assert security.of({}) == (None, None)


def test_settings_of_queues_and_timers_are_passed_over() -> None:
    assert security.of({"linger.ms": 5, "compression.type": "zstd", "debug": "all"}) == (None, None)


@pytest.mark.parametrize(
    "settings",
    [
        {"security.protocol": "sasl_plaintext"},  # GSSAPI unless another is named
        {"security.protocol": "sasl_ssl", "sasl.mechanism": "OAUTHBEARER"},
        {"ssl.keystore.location": "/x"},
        {"ssl.cipher.suites": "ALL"},
        {"sasl.kerberos.keytab": "/x"},
        {"enable.sasl.oauthbearer.unsecure.jwt": True},
        {"broker.address.family": "v6"},
        {"client.dns.lookup": "resolve_canonical_bootstrap_servers_only"},
        {"security.protocol": "other"},
        {"security.protocol": "ssl", "ssl.ca.location": "/nowhere"},
        {"security.protocol": "ssl", "ssl.endpoint.identification.algorithm": "other"},
    ],
)
def test_what_only_librdkafka_knows_is_left_to_it(settings: dict[str, str]) -> None:
    with pytest.raises(Unsupported):
        security.of(settings)


def test_a_server_is_verified_unless_the_settings_turn_it_off() -> None:
    settings = {"security.protocol": "SSL", "ssl.ca.location": certifi.where()}
    tls = security.of(settings).tls
    assert tls is not None
    assert (tls.verify_mode, tls.check_hostname) == (ssl.CERT_REQUIRED, True)
    tls = security.of({**settings, "ssl.endpoint.identification.algorithm": "none"}).tls
    assert tls is not None
    assert (tls.verify_mode, tls.check_hostname) == (ssl.CERT_REQUIRED, False)
    tls = security.of({**settings, "enable.ssl.certificate.verification": False}).tls
    assert tls is not None
    assert tls.verify_mode == ssl.CERT_NONE


def test_a_refused_key_does_not_reveal_its_password(tmp_path: Path) -> None:
    broken = tmp_path / "key.pem"
    broken.write_text("no key")
    with pytest.raises(Unsupported) as refused:
        security.of(
            {
                "security.protocol": "ssl",
                "ssl.certificate.location": str(broken),
                "ssl.key.password": "secret",
            }
        )
    assert "secret" not in str(refused.value)


def test_a_login_is_shown_without_its_password() -> None:
    assert "secret" not in repr(Login("PLAIN", "me", "secret"))


def test_plain_sends_name_and_password_at_once() -> None:
    talk = sasl.conversation(Login("PLAIN", "tim", "tanstaaftanstaaf"))
    assert next(talk) == b"\0tim\0tanstaaftanstaaf"
    with pytest.raises(StopIteration):
        talk.send(b"")


# RFC 7677, section 3
_RFC = Login("SCRAM-SHA-256", "user", "pencil")
_NONCE = "rOprNGfwEbeRWgbNEkqO"
_CHALLENGE = (
    b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
)
_PROOF = (
    b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
    b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
)
_VERIFIER = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def test_scram_sends_what_the_rfc_s_example_sends() -> None:
    talk = sasl.conversation(_RFC, _NONCE)
    assert next(talk) == b"n,,n=user,r=" + _NONCE.encode()
    assert talk.send(_CHALLENGE) == _PROOF
    with pytest.raises(StopIteration):
        talk.send(_VERIFIER)


@pytest.mark.parametrize(
    "challenge",
    [
        b"",
        b"\xff",
        b"e=other-error",
        _CHALLENGE.replace(b"r=rOpr", b"r=xOpr"),
        _CHALLENGE.replace(b"i=4096", b"i=1"),
        _CHALLENGE.replace(b"i=4096", b"i=999999999999"),
        _CHALLENGE.replace(b"s=W2", b"s=!!"),
    ],
)
def test_a_challenge_that_is_none_ends_the_login(challenge: bytes) -> None:
    talk = sasl.conversation(_RFC, _NONCE)
    next(talk)
    with pytest.raises(sasl.RefusedError):
        talk.send(challenge)


@pytest.mark.parametrize(
    "last", [b"", b"e=invalid-proof", b"v=!", b"v=" + base64.b64encode(bytes(32))]
)
def test_a_broker_that_does_not_know_the_password_is_not_trusted(last: bytes) -> None:
    talk = sasl.conversation(_RFC, _NONCE)
    next(talk)
    talk.send(_CHALLENGE)
    with pytest.raises(sasl.RefusedError):
        talk.send(last)


def test_bootstrap_servers_are_read_as_librdkafka_reads_them() -> None:
    assert addresses("a:1, b ,[::1]:3,SSL://c:4,") == [
        Broker("a", 1),
        Broker("b", 9092),
        Broker("::1", 3),
        Broker("c", 4),
    ]
