"""The issuer's keys: found, renewed and withdrawn; and an issuer that attacks the console."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from cdc.config.oidc import Oidc
from cdc.console import issuer
from cdc.console.issuer import (
    FRESH_SECONDS,
    KEPT_SECONDS,
    LEAST_SECONDS,
    MOST_BYTES,
    MOST_WAITING,
    Issuer,
    fetch,
)
from cdc.console.tokens import TokenError
from cdc.errors import UnavailableError
from tests.fixtures.hostile_receiver import HostileReceiver
from tests.fixtures.issuer import AUDIENCE, DISCOVERY, KEYS, TestIssuer
from tests.integration.test_attacks import certified


@pytest.fixture
def made_by() -> Iterator[TestIssuer]:
    with TestIssuer() as found:
        yield found


class Clock:
    """Time passes when a test says so."""

    seconds = 1_000.0

    def __call__(self) -> float:
        return self.seconds


def oidc(made_by: TestIssuer, **more: Any) -> Oidc:  # noqa: ANN401 - fields
    return Oidc(**{"issuer": made_by.url, "audience": AUDIENCE} | more)


async def name_of(found: Issuer, token: str) -> str:
    """Return the viewer's name, or why there is none."""
    try:
        return (await found.viewer([f"Bearer {token}"])).name
    except TokenError as error:
        return str(error)
    except UnavailableError as error:
        return error.what


def test_keys_are_found_by_the_issuers_description_and_read_once(made_by: TestIssuer) -> None:
    async def run() -> None:
        found = Issuer(oidc(made_by))
        names = await asyncio.gather(*(name_of(found, made_by.token()) for _ in range(50)))
        # Few wait for the first reading; nobody is let in without it.
        assert names.count("ann@example.com") >= MOST_WAITING
        assert set(names) <= {"ann@example.com", "the issuer's keys are not known"}
        for _ in range(50):
            assert await name_of(found, made_by.token()) == "ann@example.com"

    asyncio.run(run())
    assert made_by.requests == {DISCOVERY: 1, KEYS: 1}


def test_tokens_with_invented_keys_cause_one_reading_each_ten_seconds(made_by: TestIssuer) -> None:
    clock = Clock()

    async def run() -> None:
        found = Issuer(oidc(made_by), clock)
        assert await name_of(found, made_by.token()) == "ann@example.com"
        kid, key = next(iter(made_by.keys.items()))
        for round_ in range(3):
            clock.seconds += LEAST_SECONDS
            for number in range(100):
                made_by.keys = {f"invented {round_} {number}": key}
                token = made_by.token()
                made_by.keys = {kid: key}
                assert "no such key" in await name_of(found, token)
                assert await name_of(found, made_by.token()) == "ann@example.com"
            assert made_by.requests[KEYS] == 2 + round_

    asyncio.run(run())


def test_a_key_is_renewed_at_once_and_a_withdrawn_one_is_refused(made_by: TestIssuer) -> None:
    clock = Clock()

    async def run() -> None:
        found = Issuer(oidc(made_by), clock)
        old = made_by.token()
        assert await name_of(found, old) == "ann@example.com"
        made_by.rotate("second")
        clock.seconds += LEAST_SECONDS
        assert await name_of(found, made_by.token()) == "ann@example.com"
        assert "no such key" in await name_of(found, old)
        # Nobody shows the next one: the key that was withdrawn is refused after an hour.
        old = made_by.token()
        made_by.rotate("third")
        clock.seconds += FRESH_SECONDS
        assert await name_of(found, old) == "ann@example.com"
        clock.seconds += 1
        assert "no such key" in await name_of(found, old)

    asyncio.run(run())


def test_an_issuer_that_is_away_keeps_nobody_out_for_a_day(made_by: TestIssuer) -> None:
    clock = Clock()

    async def run() -> None:
        found = Issuer(oidc(made_by), clock)
        assert await name_of(found, made_by.token()) == "ann@example.com"
        made_by.behaviours[DISCOVERY] = lambda handler: handler.send_error(503)
        asked = made_by.requests[DISCOVERY]
        clock.seconds += KEPT_SECONDS
        assert await name_of(found, made_by.token()) == "ann@example.com"
        clock.seconds += LEAST_SECONDS
        assert await name_of(found, made_by.token()) == "the issuer's keys are not known"
        assert await name_of(found, made_by.token()) == "the issuer's keys are not known"
        assert made_by.requests[DISCOVERY] <= asked + 2
        del made_by.behaviours[DISCOVERY]
        clock.seconds += LEAST_SECONDS
        assert await name_of(found, made_by.token()) == "ann@example.com"

    asyncio.run(run())


def test_keys_in_a_file_are_read_again_when_they_change(
    made_by: TestIssuer, tmp_path: Path
) -> None:
    clock, file = Clock(), tmp_path / "keys.json"

    async def run() -> None:
        file.write_text(json.dumps(made_by.answer(KEYS)), "utf-8")
        found = Issuer(oidc(made_by, issuer="cdc.example.com", keys=str(file)), clock)
        assert await name_of(found, made_by.token(iss="cdc.example.com")) == "ann@example.com"
        made_by.rotate("second")
        file.write_text(json.dumps(made_by.answer(KEYS)), "utf-8")
        clock.seconds += LEAST_SECONDS
        assert await name_of(found, made_by.token(iss="cdc.example.com")) == "ann@example.com"
        assert "another issuer" in await name_of(found, made_by.token())

    asyncio.run(run())
    assert not made_by.requests


@pytest.mark.parametrize(
    "description",
    [
        {"issuer": "https://evil.example"},
        {"jwks_uri": None},
        {"jwks_uri": ["https://evil.example"]},
        {"jwks_uri": "http://keys.example.com/keys"},
        {"jwks_uri": "file:///etc/passwd"},
        {"jwks_uri": "http://me:pw@127.0.0.1/keys"},
        {"jwks_uri": "https://a b/"},
    ],
    ids=str,
)
def test_a_description_that_is_not_the_issuers_names_no_keys(
    description: dict[str, Any], made_by: TestIssuer
) -> None:
    made_by.description = description
    reason = asyncio.run(name_of(Issuer(oidc(made_by)), made_by.token()))
    assert reason == "the issuer's keys are not known"
    assert made_by.requests == {DISCOVERY: 1}


# --- the issuer, or who answers in its place, attacks ---


def hangs(handler: BaseHTTPRequestHandler) -> None:
    handler.server.over.wait(60)  # type: ignore[attr-defined]


def trickles(handler: BaseHTTPRequestHandler) -> None:
    """Send a header now and then, for ever."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    while not handler.server.over.wait(0.05):  # type: ignore[attr-defined]
        handler.wfile.write(b"x-a: b\r\n")


def trickles_a_body(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
    while not handler.server.over.wait(0.05):  # type: ignore[attr-defined]
        handler.wfile.write(b" ")


def floods(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while not handler.server.over.is_set():  # type: ignore[attr-defined]
        handler.wfile.write(b" " * 65_536)


def floods_with_headers(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nx-a: ")
    while not handler.server.over.is_set():  # type: ignore[attr-defined]
        handler.wfile.write(b"a" * 65_536)


def informs(handler: BaseHTTPRequestHandler) -> None:
    while not handler.server.over.is_set():  # type: ignore[attr-defined]
        handler.wfile.write(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 1_000)


def sends(answer: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    def behave(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(answer)

    return behave


_HOSTILE = {
    "no answer": (hangs, "no complete answer"),
    "headers without an end": (trickles, "no complete answer"),
    "a body that comes slowly": (trickles_a_body, "no complete answer"),
    "a body without an end": (floods, "more than 256 kB"),
    "a header without an end": (floods_with_headers, "does not speak HTTP"),
    "hints without an end": (informs, "does not speak HTTP"),
    "no HTTP": (sends(b"SSH-2.0-OpenSSH\r\n\r\n"), "does not speak HTTP"),
    "nothing": (sends(b""), "does not speak HTTP"),
    "less than it says": (sends(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}"), "speak HTTP"),
    "an error": (sends(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n"), "HTTP 500"),
}


@pytest.mark.parametrize("attack", _HOSTILE)
def test_a_hostile_answer_is_cut_off(
    attack: str, made_by: TestIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    behaviour, why = _HOSTILE[attack]
    monkeypatch.setattr(issuer, "MOST_SECONDS", 1.0 if why == "no complete answer" else 25.0)
    made_by.behaviours[KEYS] = behaviour
    began = time.monotonic()
    with pytest.raises(UnavailableError) as caught:
        asyncio.run(fetch(made_by.url + KEYS))
    assert why in caught.value.what
    assert time.monotonic() - began < 30


def test_an_answer_may_follow_hints(made_by: TestIssuer) -> None:
    hint = b"HTTP/1.1 103 Early Hints\r\nlink: </keys>\r\n\r\n"
    made_by.behaviours[KEYS] = sends(2 * hint + b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
    assert asyncio.run(fetch(made_by.url + KEYS)) == b"{}"


def test_requests_are_answered_while_the_issuer_hangs(
    made_by: TestIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known keys stay usable, and of requests with invented ones few wait."""
    monkeypatch.setattr(issuer, "LEAST_SECONDS", 0.0)
    clock = Clock()

    async def run() -> None:
        found = Issuer(oidc(made_by), clock)
        token = made_by.token()
        assert await name_of(found, token) == "ann@example.com"
        made_by.behaviours[KEYS] = hangs
        kid, key = next(iter(made_by.keys.items()))
        made_by.keys = {"invented": key}
        other = made_by.token()
        made_by.keys = {kid: key}
        waiting = [asyncio.create_task(name_of(found, other)) for _ in range(200)]
        async with asyncio.timeout(60):
            while made_by.requests[KEYS] < 2:  # noqa: ASYNC110 - counted by another thread
                await asyncio.sleep(0.01)
            assert await name_of(found, token) == "ann@example.com"
            assert sum(each.done() for each in waiting) == 200 - MOST_WAITING
            assert all("no such key" in each for each in await asyncio.gather(*waiting))
        assert made_by.requests[KEYS] == 2

    asyncio.run(run())


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("path", [DISCOVERY, KEYS])
def test_a_redirect_is_not_followed(status: int, path: str, made_by: TestIssuer) -> None:
    with TestIssuer() as internal:

        def redirects(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(status)
            handler.send_header("location", internal.url + path)
            handler.send_header("content-length", "0")
            handler.end_headers()

        made_by.behaviours[path] = redirects
        reason = asyncio.run(name_of(Issuer(oidc(made_by)), made_by.token()))
        assert reason == "the issuer's keys are not known"
        assert made_by.requests[path] == 1
        assert not internal.requests


def test_keys_come_by_tls_from_who_has_the_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b'{"keys": []}' + b" " * 50_000
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)

    def behave(connection: Any, _: object) -> None:  # noqa: ANN401 - a socket
        connection.recv(65_536)
        connection.sendall(answer)

    server = certified(tmp_path, monkeypatch)
    with HostileReceiver(behave, tls=server) as found:
        assert asyncio.run(fetch(f"https://localhost:{found.port}/keys")) == body
        with pytest.raises(UnavailableError, match="certificate"):
            asyncio.run(fetch(f"https://127.0.0.1:{found.port}/keys"))
        monkeypatch.delenv("SSL_CERT_FILE")
        with pytest.raises(UnavailableError, match="certificate"):
            asyncio.run(fetch(f"https://localhost:{found.port}/keys"))
    with pytest.raises(UnavailableError):
        asyncio.run(fetch(f"https://localhost:{found.port}/keys"))
    assert len(body) < MOST_BYTES
