"""`cdc` with a trace of its batches' times: what `latency --stages` runs as ours.

A separate program: `python -m benchmarks.traced_daemon TRACE ARGUMENTS...` runs `cdc ARGUMENTS` and
writes TRACE, a JSON object, when it ends. All times in it are microseconds since 1970. It costs the
daemon an append to a list for each event. It has the requests to the broker if the configuration
lets librdkafka log them (`log.kafka.debug: protocol`), which costs more.
"""

from __future__ import annotations

import gc
import json
import logging
import re
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cdc.log.trace
from cdc.cli.main import main as run_cdc

if TYPE_CHECKING:
    from cdc.log.batch import BatchContents
    from cdc.log.trace import Moments

_TASKS = Path("/proc/self/task")
# librdkafka's own measurement of a request: from the write to the answer.
_ANSWER = re.compile(r"Received (\w+)Response .* rtt ([\d.]+)ms\)")


class Requests(logging.Handler):
    """The round trips that librdkafka logs, by kind of request, in milliseconds."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.milliseconds: dict[str, list[float]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if found := _ANSWER.search(record.getMessage()):
            self.milliseconds.setdefault(found[1], []).append(float(found[2]))


class Recorder:
    """The tracer; it also records the garbage collector's pauses. Appends only."""

    def __init__(self) -> None:
        self._received: list[tuple[int, float, float]] = []
        self._batches: list[tuple[int, BatchContents, Moments]] = []
        self._spans: list[tuple[str, float, float]] = []
        self._collecting_at = 0.0
        self.requests = Requests()
        gc.callbacks.append(self._collected)

    def received(self, seq: int, began_at: float, ended_at: float) -> None:
        self._received.append((seq, began_at, ended_at))

    def committed(self, seq: int, cut: BatchContents, moments: Moments) -> None:
        self._batches.append((seq, cut, moments))

    def span(self, name: str, began_at: float, ended_at: float) -> None:
        self._spans.append((name, began_at, ended_at))

    def _collected(self, phase: str, _info: dict[str, Any]) -> None:
        now = time.monotonic()
        if phase == "start":
            self._collecting_at = now
        else:
            self._spans.append(("garbage collection", self._collecting_at, now))

    def write(self, path: Path) -> None:
        offset = time.time() - time.monotonic()

        def us(at: float) -> int:
            return round((at + offset) * 1e6)

        batches = [
            {
                "seq": seq,
                "events": cut.events,
                "partitions": cut.partitions,
                "frontier": cut.frontier_lsn is not None,
                "moments_us": [us(at) for at in moments.in_order()],
            }
            for seq, cut, moments in self._batches
        ]
        trace = {
            "received": [(seq, us(began), us(ended)) for seq, began, ended in self._received],
            "batches": batches,
            "spans": [(name, us(began), us(ended)) for name, began, ended in self._spans],
            "requests_ms": self.requests.milliseconds,
            "threads": threads(),
        }
        path.write_text(json.dumps(trace))


def threads() -> list[dict[str, Any]]:
    """Return how long each thread ran, and how long it was ready to run without a core."""
    names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    found = []
    for task in _TASKS.iterdir():
        try:
            ran_ns, waited_ns, turns = (task / "schedstat").read_text().split()
            name = names.get(task.name) or (task / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended since the folder was listed
        seconds = {"cpu_s": int(ran_ns) / 1e9, "waited_s": int(waited_ns) / 1e9}
        found.append({"thread": name, **seconds, "turns": int(turns)})
    return found


def main(trace: str, *arguments: str) -> None:
    recorder = Recorder()
    cdc.log.trace.tracer = recorder
    requests = logging.getLogger("cdc.log.librdkafka")
    requests.addHandler(recorder.requests)
    requests.setLevel(logging.DEBUG)
    requests.propagate = False
    try:
        run_cdc([*arguments])
    finally:
        recorder.write(Path(trace))


if __name__ == "__main__":
    main(*sys.argv[1:])
