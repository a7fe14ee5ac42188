"""A proxy for OpenSearch that refuses some requests, or some items of a bulk: 429, 503.

A refused request may have been carried out all the same: the client cannot know. No more of HTTP is
supported than this needs: each request is forwarded complete, on a connection of its own.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import orjson

_SECONDS: Final = 60.0
_SAYS: Final = b'{"error":{"type":"es_rejected_execution_exception","reason":"full"},"status":%d}'


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, proxy: HttpProxy) -> None:
        self.proxy = proxy
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as the base class
        """Log nothing: clients are killed here."""


class HttpProxy:
    """Forwards to `port` of loopback; set `share` and `status` while it runs."""

    def __init__(self, port: int, seed: int) -> None:
        self.target = port
        self.share = 0.0  # of requests that are refused
        self.status = 503
        self.items = False  # whether it refuses items of a bulk instead of all of it
        self.refused = 0
        self.chance = random.Random(f"{seed}/http")
        self._server = _Server(self)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def refuses(self) -> bool:
        if self.chance.random() >= self.share:
            return False
        self.refused += 1
        return True

    def repair(self) -> None:
        self.share = 0.0

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = _SECONDS

    def log_message(self, *_: Any) -> None:  # noqa: ANN401 - as the base class
        """Log nothing."""

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        proxy = self.server.proxy
        complete = not (proxy.items and self.path.partition("?")[0].endswith("/_bulk"))
        if complete and proxy.refuses():
            if proxy.chance.random() < 0.5:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    self._forward(body)
            self._answer(proxy.status, _SAYS % proxy.status, "application/json")
            return
        try:
            status, reply, kind = self._forward(body)
        except (OSError, http.client.HTTPException):
            self.close_connection = True
            return
        self._answer(status, reply if complete else self._some(reply), kind)

    def _some(self, reply: bytes) -> bytes:
        """Report some of a bulk's items as refused."""
        proxy = self.server.proxy
        try:
            reported = orjson.loads(reply)
            for item in reported["items"]:
                (done,) = item.values()
                if proxy.refuses():
                    done |= {"status": 429, "error": {"type": "x", "reason": "full"}}
                    reported["errors"] = True
        except (ValueError, KeyError):
            return reply
        return orjson.dumps(reported)

    def _forward(self, body: bytes) -> tuple[int, bytes, str]:
        target = http.client.HTTPConnection("127.0.0.1", self.server.proxy.target, timeout=_SECONDS)
        kept = {
            k: v
            for k, v in self.headers.items()
            if k.lower() not in {"host", "connection", "accept-encoding"}
        }
        try:
            target.request(self.command, self.path, body, kept)
            answer = target.getresponse()
            kind = answer.getheader("Content-Type") or "application/json"
            length = answer.getheader("Content-Length")
            reply = answer.read()
            self.length = length if self.command == "HEAD" else None
            return answer.status, reply, kind
        finally:
            target.close()

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", getattr(self, "length", None) or str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        self._pass()

    def do_HEAD(self) -> None:
        self._pass()

    def do_PUT(self) -> None:
        self._pass()

    def do_POST(self) -> None:
        self._pass()

    def do_DELETE(self) -> None:
        self._pass()
