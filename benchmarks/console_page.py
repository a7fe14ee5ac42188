"""Ask a console what its page asks, as often, and follow the live tail, until it is stopped.

A separate program: `python -m benchmarks.console_page PORT`; on SIGTERM prints one JSON object, the
milliseconds that each answer of each path took, and how many changes the tail has shown.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from typing import Final

# As cdc/console/page/console.js does.
_EVERY_SECONDS: Final = 2.0
_PATHS: Final = ("/api/status", "/api/tables", "/api/chart")
_TAIL: Final = "/api/tail"
_TIMEOUT_SECONDS: Final = 30.0


class Page:
    """One page that is open in a browser."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stopping = threading.Event()
        self._took_ms: dict[str, list[float]] = {path: [] for path in _PATHS}
        self._shown = 0

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> dict[str, object]:
        threading.Thread(target=self._tail, daemon=True).start()
        while not self._stopping.is_set():
            due = time.monotonic() + _EVERY_SECONDS
            asked = [threading.Thread(target=self._ask, args=(path,)) for path in _PATHS]
            for each in asked:
                each.start()
            for each in asked:
                each.join()
            self._stopping.wait(max(0.0, due - time.monotonic()))
        return {"took_ms": self._took_ms, "shown": self._shown}

    def _ask(self, path: str) -> None:
        began = time.monotonic()
        with closing(self._connection()) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
        # 503 is what it answers before its first measurement.
        if answer.status == 200:
            self._took_ms[path].append(round((time.monotonic() - began) * 1_000, 2))

    def _tail(self) -> None:
        with closing(self._connection()) as connection:
            connection.request("GET", _TAIL)
            answer = connection.getresponse()
            while line := answer.readline():
                self._shown += line.startswith(b"data:")

    def _connection(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT_SECONDS)


def main(port: str) -> None:
    page = Page(int(port))
    signal.signal(signal.SIGTERM, lambda *_: page.stop())
    print(json.dumps(page.run()))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (OSError, HTTPException) as error:
        sys.exit(f"the console does not answer: {error}")
