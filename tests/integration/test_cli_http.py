"""Health and metrics over real HTTP."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.client import HTTPConnection

import pytest

from cdc.errors import ConfigError, Exit
from cdc.operate.health import Health, HealthState
from cdc.operate.http import MAX_CONNECTIONS, HttpServer, serve
from cdc.operate.metrics import Metrics
from cdc.playground.servers import ports


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
def server(health: Health) -> Iterator[HttpServer]:
    server = serve("127.0.0.1:0", health, Metrics())
    assert server is not None
    yield server
    server.close()


def get(server: HttpServer, path: str, method: str = "GET") -> tuple[int, str, bytes]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read()
    finally:
        connection.close()


def test_ready_follows_the_state_and_gives_the_reason(server: HttpServer, health: Health) -> None:
    status, kind, body = get(server, "/readyz")
    assert (status, kind) == (503, "application/json")
    assert json.loads(body)["state"] == "starting"
    assert get(server, "/livez")[0] == 200
    health.to(HealthState.STREAMING, "all is well")
    status, _, body = get(server, "/readyz?verbose")
    assert status == 200
    assert json.loads(body)["reason"] == "all is well"
    assert json.loads(body)["lag_seconds"] == 0


def test_metrics_are_prometheus_text(server: HttpServer) -> None:
    status, kind, body = get(server, "/metrics")
    assert status == 200
    assert kind.startswith("text/plain")
    assert b"lockstep_published_lsn 0.0" in body


def test_other_paths_name_the_right_ones(server: HttpServer) -> None:
    status, _, body = get(server, "/")
    assert status == 404
    assert b"/livez /readyz /healthz /metrics" in body
    assert get(server, "/metrics", "HEAD")[2] == b""
    assert get(server, "/metrics", "POST")[0] == 501


def test_a_probe_is_answered_however_many_connections_are_idle(server: HttpServer) -> None:
    with ExitStack() as stack:
        idle = []
        for number in range(200):
            each = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            idle.append(stack.enter_context(each))
            if number % 2:
                each.sendall(b"GET /livez HTTP/1.1\r\n")  # a request that never ends
            if number % 20 == 0:
                assert get(server, "/livez")[0] == 200
        assert get(server, "/livez")[0] == 200
        # Those that had to leave were closed, the oldest first.
        for each in idle[: len(idle) - MAX_CONNECTIONS]:
            with suppress(ConnectionResetError):
                assert each.recv(1) == b""


def test_an_address_in_use_is_an_error_of_the_configuration(server: HttpServer) -> None:
    with pytest.raises(ConfigError, match=r"cannot serve HTTP on http\.listen") as caught:
        serve(f"127.0.0.1:{server.port}", Health(), Metrics())
    assert caught.value.exit_code is Exit.CONFIG


def test_an_empty_address_serves_nothing() -> None:
    assert serve("", Health(), Metrics()) is None


def test_closing_twice_is_harmless_and_frees_the_port(health: Health) -> None:
    # No outgoing connection takes a port of this range.
    server = serve(f"127.0.0.1:{ports.choose()}", health, Metrics())
    assert server is not None
    server.close()
    server.close()
    again = serve(f"127.0.0.1:{server.port}", health, Metrics())
    assert again is not None
    again.close()
