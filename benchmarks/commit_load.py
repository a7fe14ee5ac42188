"""Commit single rows at a steady rate, independent of everything downstream.

A separate program: `python -m benchmarks.commit_load PORT RATE SECONDS`; prints one JSON object
with the rows committed and how late the worst commit started.

An open loop: a row is due at its scheduled time, not when the row before is done, so a stall of the
database shows as late commits and not as fewer commits. Latencies are counted from Postgres' own
commit time, so lateness here does not hide in them. Ids count from 1.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import LiteralString

import psycopg

from benchmarks.rows import VALUES

CONNECTIONS = 4
_INSERT: LiteralString = f"INSERT INTO bench VALUES ({VALUES.replace('{i}', '%(i)s::bigint')})"


class Load:
    """Connections that share the rows: each commits every `CONNECTIONS`th row."""

    def __init__(self, port: int, rate: int, seconds: float) -> None:
        self._port = port
        self._interval = 1.0 / rate
        self._rows = round(rate * seconds)
        self._latest = [0.0] * CONNECTIONS
        self._failures: list[Exception] = []

    def run(self) -> dict[str, float]:
        started = time.monotonic() + 0.2  # all connections are open by then
        threads = [
            threading.Thread(target=self._commit, args=(turn, started))
            for turn in range(CONNECTIONS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failures:
            raise self._failures[0]
        return {"committed": self._rows, "late_ms_max": round(max(self._latest) * 1000, 1)}

    def _commit(self, turn: int, started: float) -> None:
        try:
            with psycopg.connect(
                f"host=127.0.0.1 port={self._port} user=postgres dbname=bench sslmode=disable",
                autocommit=True,
                prepare_threshold=0,
            ) as connection:
                for row in range(turn, self._rows, CONNECTIONS):
                    due = started + row * self._interval
                    ahead = due - time.monotonic()
                    if ahead > 0:
                        time.sleep(ahead)
                    else:
                        self._latest[turn] = max(self._latest[turn], -ahead)
                    connection.execute(_INSERT, {"i": row + 1})
        except Exception as error:  # noqa: BLE001 - handed to the thread that waits
            self._failures.append(error)


def main(port: str, rate: str, seconds: str) -> None:
    print(json.dumps(Load(int(port), int(rate), float(seconds)).run()))


if __name__ == "__main__":
    main(*sys.argv[1:])
