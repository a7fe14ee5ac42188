"""A console whose viewers are known by tokens of an issuer, as a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization

from tests.fixtures.commands import environment
from tests.fixtures.console import ConsoleUnderTest
from tests.fixtures.daemon import NewPipeline, wait_until
from tests.fixtures.issuer import AUDIENCE, KEYS, TestIssuer, jwk_of, rsa_key
from tests.integration.test_console_actions import given_up

_CONFIG = (
    "pipeline: named\nsource: {dsn: host=127.0.0.1 port=9 dbname=none}\n"
    "log: {bootstrap_servers: '127.0.0.1:9'}\n"
)
_ACTOR = {"email": "eve@example.com", "groups": ["eng", "oncall"]}
_PAUSE = "cdc snapshot pause"
_SURFACES = ("/api/status", "/api/tail", "/api/act", "/api/explain", "/stream/public.t")
_TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def made_by() -> Iterator[TestIssuer]:
    with TestIssuer() as found:
        yield found


def options(made_by: TestIssuer, *more: str) -> tuple[str, ...]:
    return ("--oidc-issuer", made_by.url, "--oidc-audience", AUDIENCE, *more)


def started(folder: Path, *options: str) -> ConsoleUnderTest:
    """Start a console whose servers are away."""
    config = folder / "lockstep.yaml"
    config.write_text(_CONFIG)
    return ConsoleUnderTest(config, folder / "log", *options)


@pytest.fixture(scope="module")
def shown(
    tmp_path_factory: pytest.TempPathFactory, made_by: TestIssuer
) -> Iterator[ConsoleUnderTest]:
    """A console with actions, for the group eng; oncall may act."""
    lists = ("--viewer", "group:eng", "--allow-actions", "--actor", "group:oncall")
    found = started(tmp_path_factory.mktemp("named"), *options(made_by, *lists))
    try:
        yield found
    finally:
        assert found.close() == 0
        assert "eyJ" not in found.log, "a token is in the log"
        assert "Traceback" not in found.log


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def error_of(answer: tuple[int, Any]) -> str:
    return str(answer[1]["error"])


def test_a_viewer_is_known_by_the_proxys_token(
    shown: ConsoleUnderTest, made_by: TestIssuer
) -> None:
    assert shown.ask("/")[0] == 200
    status, found = shown.get("/api/status", **bearer(made_by.token()))
    assert (status, found["viewer"], found["may_act"]) == (200, "ann@example.com", False)
    assert found["actions"] == []
    _, found = shown.get("/api/status", **bearer(made_by.token(**_ACTOR)))
    assert (found["viewer"], found["may_act"]) == ("eve@example.com", True)
    assert shown.get("/api/status", **bearer(made_by.token(aud=["other", AUDIENCE])))[0] == 200


def test_who_may_not_act_gets_403_and_who_may_is_recorded_by_name(
    shown: ConsoleUnderTest, made_by: TestIssuer
) -> None:
    refused = shown.act("pause", command=_PAUSE, **bearer(made_by.token()))
    assert refused[0] == 403
    assert "console.oidc.actors" in error_of(refused)
    for changed in ({"groups": ["eng"]}, {"email": "oncall@example.com"}, {"sub": "group:oncall"}):
        assert shown.act("pause", command=_PAUSE, **bearer(made_by.token(**changed)))[0] == 403
    assert "an action starts" not in shown.log
    actor = bearer(made_by.token(**_ACTOR))
    # The token is no excuse for a page of another site.
    for foreign in ({"origin": "http://evil.example"}, {"x_lockstep_console": ""}):
        assert shown.act("pause", command=_PAUSE, **actor | foreign)[0] == 403
    assert shown.act("pause", command=_PAUSE, **actor)[0] == 202
    [run] = shown.get("/api/status", **actor)[1]["actions"]
    assert run["by"] == "eve@example.com, 127.0.0.1"
    wait_until(lambda: "an action starts" in shown.log, "it is not logged")
    assert '"by": "eve@example.com, 127.0.0.1"' in shown.log


def test_who_is_not_on_the_list_sees_nothing(shown: ConsoleUnderTest, made_by: TestIssuer) -> None:
    stranger = bearer(made_by.token(email="mallory@example.com", groups=["sales"]))
    for path in _SURFACES:
        if path == "/api/act":
            assert shown.act("pause", command=_PAUSE, **stranger)[0] == 403
        else:
            status, found = shown.get(path, **stranger)
            assert status == 403
            assert "console.oidc.viewers" in found["error"]
            assert "mallory" not in str(found)


def attacks(made_by: TestIssuer) -> dict[str, str]:
    """Return what a client without a valid token might send as one."""
    kid, key = next(iter(made_by.keys.items()))
    other = rsa_key()
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    claims = made_by.claims(**_ACTOR)
    head, body, signature = made_by.token(**_ACTOR).split(".")
    unsigned = jwt.encode(claims, "", "none", {"kid": kid})
    named = {"kid": kid, "jwk": jwk_of(other, kid), "jku": made_by.url + KEYS}
    return {
        "a name": "eve@example.com",
        "nothing": "",
        "alg none": unsigned,
        "alg none with a signature": unsigned + signature,
        "no signature": f"{head}.{body}.",
        "HS256 by the public key": _hs256(claims, public, kid),
        "a key of its own": jwt.encode(claims, other, "RS256", named),
        "another issuer": made_by.token(**_ACTOR, iss="https://evil.example"),
        "another audience": made_by.token(**_ACTOR, aud="other"),
        "expired": made_by.token(**_ACTOR, exp=int(time.time()) - 120),
        "not valid yet": made_by.token(**_ACTOR, nbf=int(time.time()) + 600),
        "without an end": made_by.token(**_ACTOR, exp=None),
        "without a kid": jwt.encode(claims, key, "RS256"),
        "oversized": made_by.token(**_ACTOR, more="x" * 10_000),
        "two tokens": f"{made_by.token(**_ACTOR)}, Bearer {made_by.token(**_ACTOR)}",
    }


def _hs256(claims: dict[str, Any], secret: bytes, kid: str) -> str:
    """Sign with what the library refuses as a secret."""
    algorithm = jwt.get_algorithm_by_name("HS256")
    text = b".".join(jwt.encode(claims, "x" * 32, "HS256", {"kid": kid}).encode().split(b".")[:2])
    return (text + b"." + jwt.utils.base64url_encode(algorithm.sign(text, secret))).decode()


def test_forged_and_foreign_tokens_are_refused_everywhere(
    shown: ConsoleUnderTest, made_by: TestIssuer
) -> None:
    assert shown.get("/api/status", **bearer(made_by.token(**_ACTOR)))[0] == 200
    for attack, token in attacks(made_by).items():
        for path in _SURFACES:
            if path == "/api/act":
                status, answer = shown.act("pause", command=_PAUSE, **bearer(token))
            else:
                status, answer = shown.get(path, **bearer(token))
            assert status == 401, (attack, path)
            assert answer["by_proxy"]
            assert not token or token not in str(answer)
            assert "eve" not in str(answer)
    for scheme in ("Basic", "Digest", "Bearer Bearer", "Negotiate"):
        given = {"authorization": f"{scheme} {made_by.token(**_ACTOR)}"}
        assert shown.get("/api/status", **given)[0] == 401
    for plain in ("x_forwarded_email", "x_forwarded_user", "x_auth_request_email", "remote_user"):
        assert shown.get("/api/status", **{plain: "eve@example.com"})[0] == 401
    for header in ("x_forwarded_access_token", "x_pomerium_jwt_assertion", "cookie"):
        assert shown.get("/api/status", **{header: made_by.token(**_ACTOR)})[0] == 401
    huge = bearer(made_by.token(**_ACTOR, more="x" * 20_000))
    assert shown.ask("/api/status", **huge)[0] in {400, 431}
    assert shown.ask("/")[0] == 200


def test_two_authorization_headers_are_refused(
    shown: ConsoleUnderTest, made_by: TestIssuer
) -> None:
    """A client's own and the proxy's: which of them counts must not depend on their order."""
    assert shown.port is not None
    good, bad = made_by.token(**_ACTOR), made_by.token(aud="other")
    for pair in ((good, bad), (bad, good), (good, good), (good, "")):
        with socket.create_connection(("127.0.0.1", shown.port), timeout=60) as client:
            lines = [f"Authorization: Bearer {each}" for each in pair]
            head = ["GET /api/status HTTP/1.1", "host: localhost", "connection: close", *lines]
            client.sendall("\r\n".join([*head, "", ""]).encode())
            answer = client.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 401"), pair
        assert b"several headers Authorization" in answer


def test_a_flood_of_invented_keys_reaches_the_issuer_once_each_ten_seconds(
    shown: ConsoleUnderTest, made_by: TestIssuer
) -> None:
    good = bearer(made_by.token())
    assert shown.get("/api/status", **good)[0] == 200
    key = next(iter(made_by.keys.values()))
    invented = [
        jwt.encode(made_by.claims(), key, "RS256", {"kid": f"invented {number}"})
        for number in range(300)
    ]
    asked, began = made_by.requests[KEYS], time.monotonic()
    with ThreadPoolExecutor(16) as several:
        answers = several.map(lambda token: shown.get("/api/status", **bearer(token)), invented)
        assert {status for status, _ in answers} == {401}
    passed = time.monotonic() - began
    assert made_by.requests[KEYS] - asked <= 1 + passed / 10
    assert shown.get("/api/status", **good)[0] == 200


def test_a_stream_ends_with_its_token(shown: ConsoleUnderTest, made_by: TestIssuer) -> None:
    """Within the minute by which clocks may differ, and completely: the page connects again."""
    answers = list[tuple[int, bytes, float]]()

    def asked_in_time() -> bool:
        """Return whether the token had not expired by the time it was checked."""
        late, began = bearer(made_by.token(exp=int(time.time()) - 55)), time.monotonic()
        status, body = shown.ask("/api/tail", **late)
        answers.append((status, body, time.monotonic() - began))
        return status == 200

    wait_until(asked_in_time, "every token comes too late")
    _, body, took = answers[-1]
    assert b"event: rate" in body
    assert took < 50, "it has outlived its token"
    assert shown.get("/api/status", **bearer(made_by.token()))[0] == 200


def test_another_header_and_a_token_of_the_consoles_own_do_too(
    tmp_path: Path, made_by: TestIssuer
) -> None:
    file = tmp_path / "token"
    file.write_text(_TOKEN)
    more = ("--oidc-header", "X-Pomerium-Jwt-Assertion", "--token-file", str(file))
    found = started(tmp_path, *options(made_by, *more))
    try:
        forwarded = {"x_pomerium_jwt_assertion": made_by.token()}
        assert found.get("/api/status", **forwarded)[1]["viewer"] == "ann@example.com"
        assert found.get("/api/status", **bearer(made_by.token()))[0] == 401
        assert found.get("/api/status", **bearer(_TOKEN))[1]["viewer"] == ""
        assert found.get("/api/status", **bearer(_TOKEN[:-1]))[0] == 401
        refused = found.act("pause", command=_PAUSE, **bearer(_TOKEN))
        assert "read-only" in error_of(refused)
    finally:
        assert found.close() == 0
    assert _TOKEN[:12] not in found.log


def test_a_key_that_the_issuer_has_changed_is_found(tmp_path: Path) -> None:
    with TestIssuer() as made_by:
        found = started(tmp_path, *options(made_by))
        try:
            assert found.get("/api/status", **bearer(made_by.token()))[0] == 200
            made_by.rotate("second")
            token = bearer(made_by.token())
            wait_until(lambda: found.get("/api/status", **token)[0] == 200, "it is not found")
            assert made_by.requests[KEYS] == 2
        finally:
            assert found.close() == 0


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (("--oidc-issuer", "https://a.example"), "set audience"),
        (("--oidc-issuer", "cdc.example.com", "--oidc-audience", "a"), "set keys"),
        (("--oidc-issuer", "http://a.example", "--oidc-audience", "a"), "set keys"),
        (
            (
                *("--oidc-issuer", "https://a.example", "--oidc-audience", "a"),
                *("--oidc-keys", "http://a.example/keys"),
            ),
            "an https URL",
        ),
        (
            (
                *("--oidc-issuer", "https://a.example", "--oidc-audience", "a"),
                *("--oidc-keys", "missing.json"),
            ),
            "cannot read the issuer's keys",
        ),
        (
            ("--oidc-issuer", "https://a.example", "--oidc-audience", "a", "--viewer", "ann@a"),
            "names nobody",
        ),
        (
            ("--oidc-issuer", "https://a.example", "--oidc-audience", "a", "--allow-actions"),
            "nobody may run commands",
        ),
        (("--oidc-audience", "a"), "no issuer"),
        (("--actor", "group:oncall"), "no issuer"),
        (("--listen", "0.0.0.0:0"), "no token and no issuer"),
    ],
    ids=lambda each: each if isinstance(each, str) else None,
)
def test_a_console_that_could_be_entered_without_a_name_does_not_start(
    given: tuple[str, ...], complaint: str, tmp_path: Path
) -> None:
    config = tmp_path / "lockstep.yaml"
    config.write_text(_CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "cdc.cli.main", "console", "-c", str(config), *given],
        capture_output=True, text=True, timeout=120, env=environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 78, done.stderr
    assert complaint in done.stderr
    assert "what to do" in done.stderr


def test_a_decision_has_the_name_of_who_took_it(
    pipeline: NewPipeline, tmp_path: Path, made_by: TestIssuer
) -> None:
    line = pipeline("CREATE TABLE t (id int PRIMARY KEY)")
    line.start().wait_ready()
    letter = given_up(line, "queue.mail", 1)
    file = line.write("console.yaml", http__listen=f"127.0.0.1:{line.daemon.port}")
    lists = ("--allow-actions", "--actor", "group:oncall")
    shown = ConsoleUnderTest(file, tmp_path / "console.log", *options(made_by, *lists))
    actor = bearer(made_by.token(**_ACTOR))
    try:
        command = f"cdc queue discard --yes mail {letter}"
        assert shown.act("discard", "queue.mail", letter, command, **actor)[0] == 202

        def decided() -> dict[str, Any] | None:
            events = shown.get("/api/dead", **actor)[1]["events"] or ()
            return next((each for each in events if each["state"] == "discarded"), None)

        wait_until(decided, "it is not decided")
        found = decided()
        assert found is not None
        assert found["decided_by"].endswith("by the console, eve@example.com, 127.0.0.1")
    finally:
        shown.close()
