"""Serve `/livez`, `/readyz`, `/healthz` and `/metrics` over plain HTTP, from standard threads.

There is no login and no TLS: listen on loopback or a private network. It never blocks the pipeline:
at most `MAX_CONNECTIONS` are open, and a client that sends nothing is dropped. A further connection
closes the oldest one, so that a probe is answered however many others are open.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST

from cdc.errors import ConfigError
from cdc.operate.findings import Level

if TYPE_CHECKING:
    from cdc.operate.health import Health
    from cdc.operate.metrics import Metrics

log = logging.getLogger("cdc.operate.http")

# Each has a thread. A probe is closed unanswered only if as many connections follow it at once.
MAX_CONNECTIONS = 64
# A probe sends its one request at once.
_CLIENT_TIMEOUT_SECONDS = 5.0
PATHS = ("/livez", "/readyz", "/healthz", "/metrics")


def serve(listen: str, health: Health, metrics: Metrics) -> HttpServer | None:
    """Serve on `listen` (`host:port`, port 0 for a free one); nothing where it is empty.

    Raises ConfigError where the address cannot be bound.
    """
    if not listen:
        return None
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    try:
        family = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][0]
        server = HttpServer(host, int(port), family, health, metrics)
    except OSError as error:
        raise ConfigError(
            f"cannot serve HTTP on http.listen = {listen}: {error.strerror or error}",
            hint="choose another address or port in http.listen (port 0 chooses a free one, an "
            "empty value serves none), or stop the process that listens there",
        ) from error
    log.info("serving health and metrics", extra={"fields": {"host": host, "port": server.port}})
    return server


class HttpServer(ThreadingHTTPServer):
    """A running server; `port` is the real one. Ends with `close` or with the process."""

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, host: str, port: int, family: int, health: Health, metrics: Metrics) -> None:
        self.address_family = family
        self.health = health
        self.metrics = metrics
        self._open: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        super().__init__((host, port), _Handler)
        self.port: int = self.server_address[1]
        self._thread = threading.Thread(target=self.serve_forever, name="cdc-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and wait for the serving thread. May be called twice."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def server_bind(self) -> None:
        # HTTPServer asks DNS for our own name here, which can take seconds and is not needed.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "lockstep", self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as the base class
        with self._lock:
            self._open[request] = None
            if len(self._open) > MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401 - as the base class
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401, ARG002 - as the base class
        log.debug("a client went away", exc_info=True)  # noqa: LOG014 - called in the handler


class _Handler(BaseHTTPRequestHandler):
    server: HttpServer
    protocol_version = "HTTP/1.1"
    server_version = "lockstep"
    sys_version = ""
    timeout = _CLIENT_TIMEOUT_SECONDS

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(HTTPStatus.OK, CONTENT_TYPE_LATEST, self.server.metrics.text())
        elif path in ("/livez", "/readyz"):
            report = self.server.health.report()
            good = report.live if path == "/livez" else report.ready
            status = HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE
            found = self.server.metrics.verdict()
            body = report.body() | {
                "lag_seconds": round(max(0, self.server.metrics.lag_seconds), 3),
                "incremental_snapshots": [
                    each.summary for each in self.server.metrics.incremental_snapshots()
                ],
                "followers": [each.fields() for each in self.server.metrics.followers()],
                "webhooks": [each.fields() for each in self.server.metrics.webhooks()],
                "verdict": found and found.fields(),
                "wrong_policies": self.server.metrics.wrong_policies,
                "compaction_held": self.server.metrics.compaction_held,
                "unread": self.server.metrics.unread(),
                "pipeline": self.server.metrics.pipeline,
                "refused_messages": self.server.metrics.refusals.fields(),
            }
            self._answer(status, "application/json", orjson.dumps(body) + b"\n")
        elif path == "/healthz" and (found := self.server.metrics.verdict()):
            failed = found.level is Level.FAILED
            status = HTTPStatus.SERVICE_UNAVAILABLE if failed else HTTPStatus.OK
            self._answer(status, "application/json", orjson.dumps(found.fields()) + b"\n")
        else:
            text = f"not here; try {' '.join(PATHS)}\n"
            self._answer(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", text.encode())

    do_HEAD = do_GET  # noqa: N815 - the name that the base class looks up

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            with suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base class
        """Do not log probes, which arrive every few seconds."""
