"""librdkafka's own log lines, reduced to changes: one line when a broker goes away, not hundreds.

Each client logs every attempt to reconnect, several times a second. What is new is passed on: a
broker's first failure, another reason, and the same reason again after a quiet time or as a
reminder. The newest failures are kept, so that an error can explain why no broker answers.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from typing import Final, NamedTuple

# A client reconnects at least every second: a failure after this belongs to another outage.
QUIET_SECONDS: Final = 15.0
_REMIND_SECONDS: Final = 300.0
# Brokers of one cluster, and what may be wrong with each; beyond it the oldest are forgotten.
_MOST: Final = 1_000
_NOISE: Final = (
    re.compile(r"\[thrd:[^\]]*\]: "),
    re.compile(r" \(after \d+ms in state [A-Z0-9_]+(?:, \d+ identical error\(s\) suppressed)?\)"),
)
# `host:port/id: what happened`; of a bootstrap server the id is `bootstrap`.
_BROKER: Final = re.compile(r"^(?P<broker>\S+:\d+)/(?:bootstrap|-?\d+): (?P<reason>.*)$", re.DOTALL)
_CONNECT: Final = re.compile(r"^Connect to \S+ failed: ")


# How librdkafka quotes a setting's value that it refuses.
_VALUE: Final = re.compile(r'value ".*"(?= for)|(?<=beginning at: ).*', re.DOTALL)


class _Seen(NamedTuple):
    first_at: float  # when the line was passed on (monotonic)
    last_at: float
    held: int  # lines held back since


class BrokerLog(logging.Filter):
    """Passes on what changes."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()  # each client logs from its own threads
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._failures: dict[str, tuple[str, float]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        text = without_values(plain(record))
        match = _BROKER.match(text)
        broker, reason = match.group("broker", "reason") if match else ("", text)
        reason = _CONNECT.sub("", reason)
        now = time.monotonic()
        with self._lock:
            if match:
                self._failures[broker] = (reason, now)
            held = self._held(broker, reason, now)
        if held is None:
            return False
        again = f" ({held} more lines like this were left out)" if held else ""
        record.msg, record.args = (
            "%s%s",
            (f"Kafka broker {broker}: {reason}" if match else text, again),
        )
        return True

    def _held(self, broker: str, reason: str, now: float) -> int | None:
        """Return how many lines like this were held back before it; None: hold this one too."""
        key = (broker, reason)
        seen = self._seen.pop(key, None)
        if seen and now - seen.last_at < QUIET_SECONDS and now - seen.first_at < _REMIND_SECONDS:
            self._seen[key] = seen._replace(last_at=now, held=seen.held + 1)
            return None
        self._seen[key] = _Seen(now, now, 0)
        if len(self._seen) > _MOST:
            del self._seen[next(iter(self._seen))]
        return seen.held if seen else 0

    def failures(self) -> str:
        """Return why brokers did not answer lately: `host:port: Connection refused`; or ""."""
        lately = time.monotonic() - QUIET_SECONDS
        with self._lock:
            found = [f"{b}: {reason}" for b, (reason, at) in self._failures.items() if at > lately]
        return "; ".join(found[:5])


def plain(record: logging.LogRecord) -> str:
    """Return librdkafka's message, without its facility, client, thread and counts."""
    text = str(record.args[-1]) if isinstance(record.args, tuple) and record.args else record.msg
    for noise in _NOISE:
        text = noise.sub("", text)
    return text


def without_values(text: str) -> str:
    """Return librdkafka's text without a setting's value, which may be a secret."""
    return _VALUE.sub("…", text)
