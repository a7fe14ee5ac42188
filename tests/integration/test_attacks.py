"""Attacks by a list on what listens and on what sends: console, streams of tables, webhooks."""

from __future__ import annotations

import logging
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cdc.config.webhooks import Webhook
from cdc.deliver import sender as sender_module
from cdc.deliver.sender import MOST_ANSWER_BYTES, DeliveryResult, Sender
from tests.fixtures.console import ConsoleUnderTest
from tests.fixtures.hostile_receiver import (
    ATTACK_SECONDS,
    Behaviour,
    HostileReceiver,
    floods,
    reads_slowly,
    sends,
    trickles,
)

_SECRET = "whsec_" + "QUJD" * 10
_TOKEN = "0123456789abcdef0123456789abcdef"
_OK = b"HTTP/1.1 200 OK\r\n"
_EMPTY = b"content-length: 0\r\n\r\n"
_TIMED_OUT = "no answer within 1 s"
_LONG = 8 << 20  # more than the sockets' buffers hold


def sender(
    host: str, port: int, scheme: str = "http", allow: str = "127.0.0.1/32", seconds: float = 5.0
) -> Sender:
    given = {
        "url": f"{scheme}://{host}:{port}/hook",
        "secrets": [_SECRET],
        "tables": ["public.t"],
        "allow": [allow],
        "timeout_seconds": seconds,
    }
    return Sender(msgspec.convert(given, Webhook))


def sent(found: Sender, body: bytes = b"{}") -> DeliveryResult:
    """Send a message; return what came of it, which must be long before the attack ends."""
    began = time.monotonic()
    answer = found.send("shop-1-1", body)
    assert time.monotonic() - began < ATTACK_SECONDS / 2, "a receiver holds a connection"
    return answer


# --- webhooks: a receiver attacks the sender ---

_HOSTILE = {
    "trickles its status": (trickles(b"HTTP/1.1 200 ", b"O"), _TIMED_OUT),
    "trickles its headers": (trickles(_OK + b"x-slow: ", b"x"), _TIMED_OUT),
    "sends one header line without end": (floods(_OK + b"x: ", b"y" * 9_000), "are longer than"),
    "sends headers without end": (floods(_OK, b"x: y\r\n"), "no connection"),
    "continues without end": (
        floods(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        f"longer than {MOST_ANSWER_BYTES:,} bytes",
    ),
    "closes at once": (lambda *_: None, "no connection"),
    "answers no HTTP": (sends(b"\x00" * 100 + b"\r\n\r\n"), "no connection"),
    "refuses, and trickles its body": (
        trickles(b"HTTP/1.1 400 No\r\ncontent-length: 9999\r\n\r\n", b"x"),
        "HTTP 400",
    ),
}


@pytest.mark.parametrize("attack", _HOSTILE)
def test_a_hostile_receiver_holds_no_connection(attack: str) -> None:
    behaviour, why = _HOSTILE[attack]
    with HostileReceiver(behaviour) as hostile:
        seconds = 1.0 if why == _TIMED_OUT else 5.0
        with closing(sender("127.0.0.1", hostile.port, seconds=seconds)) as found:
            answer = sent(found)
        assert not answer.delivered
        assert why in answer.why


@pytest.mark.parametrize(
    "behaviour",
    [
        trickles(_OK + b"content-length: 99999999\r\n\r\n", b"x"),
        trickles(_OK + b"transfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        floods(_OK + b"transfer-encoding: chunked\r\n\r\n", b"400\r\n" + b"x" * 1_024 + b"\r\n"),
        floods(_OK + b"connection: close\r\n\r\n", b"x" * 9_000),
    ],
    ids=["trickled", "trickled in chunks", "chunks without end", "bytes without end"],
)
def test_a_body_without_end_is_cut_off_and_its_status_counts(behaviour: Behaviour) -> None:
    with (
        HostileReceiver(behaviour) as hostile,
        closing(sender("127.0.0.1", hostile.port, seconds=2.0)) as found,
    ):
        for times in (1, 2):
            assert sent(found).delivered
            assert hostile.connections == times, "a connection with a rest in it is used again"


def test_a_receiver_that_reads_slowly_holds_no_connection() -> None:
    with (
        HostileReceiver(reads_slowly) as hostile,
        closing(sender("127.0.0.1", hostile.port, seconds=1.0)) as found,
    ):
        assert sent(found, b"x" * _LONG).why == _TIMED_OUT


@pytest.mark.parametrize("behaviour", [trickles(_OK + b"x-slow: ", b"x"), reads_slowly])
def test_the_same_limits_hold_by_tls(
    behaviour: Behaviour, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = certified(tmp_path, monkeypatch)
    with (
        HostileReceiver(sends(_OK + _EMPTY), tls=server) as willing,
        closing(sender("localhost", willing.port, "https", "127.0.0.0/8")) as found,
    ):
        assert sent(found).delivered, "the certificate is trusted"
    with (
        HostileReceiver(behaviour, tls=server) as hostile,
        closing(sender("localhost", hostile.port, "https", "127.0.0.0/8", 1.0)) as found,
    ):
        assert sent(found, b"x" * _LONG).why == _TIMED_OUT


def certified(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """Return a server's TLS for localhost, which this process trusts."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )  # fmt: skip
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    found.load_cert_chain(certificate, key)
    return found


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_to_an_internal_address_is_not_followed(status: int) -> None:
    with HostileReceiver(sends(_OK + _EMPTY), "127.0.0.2") as internal:
        place = f"location: http://127.0.0.2:{internal.port}/latest/meta-data\r\n".encode()
        redirects = f"HTTP/1.1 {status} Elsewhere\r\n".encode() + place + _EMPTY
        with (
            HostileReceiver(sends(redirects)) as public,
            closing(sender("127.0.0.1", public.port)) as found,
        ):
            assert sent(found) == DeliveryResult(delivered=False, why=f"HTTP {status}")
        assert (public.connections, internal.connections) == (1, 0)


def test_a_name_that_is_rebound_between_check_and_connection_reaches_only_what_was_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """127.0.0.1 is allowed; from the second answer on, DNS has 127.0.0.2, which is not."""
    asked, look_up = [0], socket.getaddrinfo

    def rebinding(host: Any, *given: Any, **named: Any) -> Any:  # noqa: ANN401 - as it is
        if host != "rebound.example":
            return look_up(host, *given, **named)
        asked[0] += 1
        return look_up("127.0.0.1" if asked[0] == 1 else "127.0.0.2", *given, **named)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    # Each request looks the name up, once.
    monkeypatch.setattr(sender_module, "RESOLVED_SECONDS", 0.0)
    with (
        HostileReceiver(sends(_OK + _EMPTY)) as checked,
        HostileReceiver(sends(_OK + _EMPTY), "127.0.0.2", checked.port) as internal,
        closing(sender("rebound.example", checked.port)) as found,
    ):
        assert sent(found).delivered
        assert (checked.connections, internal.connections, asked) == (1, 0, [1])
        # The new answer is judged before anything is connected to.
        refused = sent(found)
        assert "rebound.example has only addresses that" in refused.why
        assert not refused.delivered
        assert (checked.connections, internal.connections, asked) == (1, 0, [2])


@pytest.mark.parametrize("attack", _HOSTILE)
def test_neither_secret_nor_answer_is_in_a_senders_log(
    attack: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    behaviour, _ = _HOSTILE[attack]
    with (
        HostileReceiver(behaviour) as hostile,
        closing(sender("127.0.0.1", hostile.port, seconds=1.0)) as found,
    ):
        logging.getLogger("cdc.test").info("%s", sent(found))
    assert "QUJD" not in caplog.text
    assert "webhook-signature" not in caplog.text
    assert "v1," not in caplog.text
    assert "x-slow" not in caplog.text


# --- console and streams: a client attacks the server ---

_SURFACES = ("/", "/api/status", "/api/tail", "/api/act", "/stream/public.t")
_HEAD = {"host": "localhost", "authorization": f"Bearer {_TOKEN}"}
_REFUSED = range(400, 500)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleUnderTest]:
    """A console with a token and actions; no request of an attack reaches its servers."""
    folder = tmp_path_factory.mktemp("attacked")
    config, token = folder / "lockstep.yaml", folder / "token"
    config.write_text(
        "pipeline: attacked\nsource: {dsn: host=127.0.0.1 port=9 dbname=none}\n"
        "log: {bootstrap_servers: '127.0.0.1:9'}\n"
    )
    token.write_text(_TOKEN)
    found = ConsoleUnderTest(config, folder / "log", "--token-file", str(token), "--allow-actions")
    try:
        yield found
    finally:
        assert found.close() == 0
        assert _TOKEN[:12] not in found.log, "the token is in the log"
        assert "evil" not in found.log, "a request is in the log"
        assert "Traceback" not in found.log


def request(path: str, method: str = "", more: bytes = b"", **changed: str) -> bytes:
    """Return the bytes of a request that the console would answer, but for what is changed."""
    method = method or ("POST" if path == "/api/act" else "GET")
    head = dict(_HEAD)
    if path == "/api/act":
        head |= {"origin": "http://localhost", "x-lockstep-console": "1"}
        head |= {"content-type": "application/json"}
    head |= {name.replace("_", "-"): value for name, value in changed.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
    return "\r\n".join([*lines, "", ""]).encode() + more


def answered(shown: ConsoleUnderTest, given: bytes) -> tuple[int, bytes]:
    """Return status and first bytes of an answer; 0 if the connection is closed without one."""
    assert shown.port is not None
    with socket.create_connection(("127.0.0.1", shown.port), timeout=60) as client:
        with suppress(ConnectionError):
            client.sendall(given)
        found = b""
        with suppress(ConnectionError):
            while len(found) < 1_000 and (part := client.recv(1_000)):
                found += part
                if b"\r\n\r\n" in found:
                    break
    return int(found.split()[1]) if found else 0, found


_REQUESTS: dict[str, dict[str, Any]] = {
    "a foreign name (DNS rebinding)": {"host": "evil.example"},
    "a page of another origin": {"origin": "http://evil.example"},
    "a header of 20 kB": {"x_evil": "evil" * 5_000},
    "many headers": {f"x_evil_{number}": "y" * 20 for number in range(2_000)},
    "a body and its length in two ways": {"content_length": "4, 5"},
    "a negative length": {"content_length": "-1"},
}


@pytest.mark.parametrize("surface", _SURFACES)
@pytest.mark.parametrize("attack", _REQUESTS)
def test_a_hostile_request_is_refused(surface: str, attack: str, shown: ConsoleUnderTest) -> None:
    status, answer = answered(shown, request(surface, **_REQUESTS[attack]))
    assert status in _REFUSED
    assert b"evil" not in answer
    assert shown.ask("/")[0] == 200


@pytest.mark.parametrize("surface", _SURFACES[1:])
def test_data_and_actions_need_the_token(surface: str, shown: ConsoleUnderTest) -> None:
    for given in ("", "Bearer", f"Bearer {_TOKEN[:-1]}", f"Basic {_TOKEN}", "Bearer evil"):
        assert answered(shown, request(surface, authorization=given))[0] == 401, given


# Paths below /stream/ are names of tables, which test_push has: the log is asked for them.
@pytest.mark.parametrize("surface", _SURFACES[:-1])
@pytest.mark.parametrize(
    "way", ["../../../etc/passwd", "%2e%2e/%2e%2e/etc/passwd", "..%2f..%2fetc%2fpasswd", "..\\evil"]
)
def test_a_path_leads_to_no_other_file(surface: str, way: str, shown: ConsoleUnderTest) -> None:
    path = f"{surface.rstrip('/')}/{way}"
    status, answer = answered(shown, request(path, "GET"))
    assert status in _REFUSED
    assert b"root:" not in answer


def test_a_path_that_is_too_long_is_refused(shown: ConsoleUnderTest) -> None:
    assert answered(shown, request("/" + "evil/" * 20_000))[0] in _REFUSED


@pytest.mark.parametrize(
    "body",
    [
        {"content_length": "9999999999", "more": b"x" * 9_000},
        {"transfer_encoding": "chunked", "more": b"2400\r\n" + b"x" * 0x2400 + b"\r\n"},
    ],
    ids=["by its length", "in chunks"],
)
def test_a_body_that_is_too_long_is_not_waited_for(
    body: dict[str, Any], shown: ConsoleUnderTest
) -> None:
    assert answered(shown, request("/api/act", **body))[0] == 400


def test_clients_that_send_slowly_are_closed(shown: ConsoleUnderTest) -> None:
    """Headers, and the body of what has one; on every surface at the same time."""
    heads = [request(each)[:-2] + b"x-slow: " for each in _SURFACES]
    bodies = [request(each, content_length="5000") for each in _SURFACES]
    bodies.append(request("/api/act", transfer_encoding="chunked"))
    bodies.append(request("/api/act", content_length="5000", expect="100-continue"))
    assert shown.port is not None
    with ExitStack() as stack:
        slow = dict[socket.socket, bytes]()
        for given in heads + bodies:
            place = ("127.0.0.1", shown.port)
            client = stack.enter_context(socket.create_connection(place, timeout=60))
            client.sendall(given)
            slow[client] = given
        ends = time.monotonic() + 40
        while slow:
            assert time.monotonic() < ends, f"{len(slow)} are served for ever: {[*slow.values()]}"
            time.sleep(0.5)
            for client in list(slow):
                try:
                    client.sendall(b"1\r\nx\r\n" if b"chunked" in slow[client] else b"x")
                except ConnectionError:
                    del slow[client]
    assert shown.ask("/")[0] == 200
