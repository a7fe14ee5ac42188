"""Write to the demo's tables at a steady rate, from several connections, until stdin closes.

    python -m cdc.playground.demo.generator DSN --seed 7 --rate 300

It is a process of its own, so that its cost is not part of what is measured, and so that it ends
when the holder of its stdin ends, also by SIGKILL. Each writer keeps its connection for its
lifetime and opens a new one after Postgres was down. A writer's actions depend on the seed; how the
writers interleave, and which commits a killed server loses, does not.

Prints a line four times a second and a last one at its end: how many changes are committed.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from typing import Final

import psycopg

from cdc.playground.demo.actions import Actor
from cdc.playground.demo.schema import ACCOUNTS, OPENING_BALANCE

WRITERS: Final = 4
_ROLLED_BACK: Final = 0.03  # share of transactions that their writer rolls back
_REPORT_SECONDS: Final = 0.25
_RETRY_SECONDS: Final = 0.2
_CONNECT_SECONDS: Final = 3
# After an outage the lost time is not caught up: a burst would hide the requested rate.
_MOST_LAG_SECONDS: Final = 0.5


class LoadWriter(threading.Thread):
    """One connection and its actor, `rate` changes a second on average; `changes` committed."""

    def __init__(self, dsn: str, actor: Actor, rate: float, stop: threading.Event) -> None:
        super().__init__(name=f"writer-{actor.number}", daemon=True)
        self.changes = 0
        self._dsn = dsn
        self._actor = actor
        self._rate = rate
        # Not `_stop`: the thread class uses that name.
        self._stopped = stop

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                with psycopg.connect(self._dsn, connect_timeout=_CONNECT_SECONDS) as connection:
                    self._write(connection)
            except psycopg.OperationalError:
                # The server is down, or this connection was lost: chaos does that on purpose.
                self._stopped.wait(_RETRY_SECONDS)

    def _write(self, connection: psycopg.Connection) -> None:
        with connection.transaction(), connection.cursor() as cursor:
            self._actor.recall(cursor)
        due = time.monotonic()
        while not self._stopped.wait(max(0.0, due - time.monotonic())):
            changed = self._transact(connection)
            due = max(due + max(changed, 1) / self._rate, time.monotonic() - _MOST_LAG_SECONDS)

    def _transact(self, connection: psycopg.Connection) -> int:
        actor = self._actor
        action = actor.choose()
        roll_back = actor.random.random() < _ROLLED_BACK
        try:
            with connection.transaction(force_rollback=roll_back), connection.cursor() as cursor:
                changed = action(cursor)
        except psycopg.OperationalError:
            raise
        except psycopg.Error:
            # After a rollback memory may not know a unique key; the next action is another.
            return 1
        self.changes += 0 if roll_back else changed
        return changed


def fill(dsn: str) -> int:
    """Open the accounts that are missing, in one transaction; return how many were opened."""
    with psycopg.connect(dsn) as connection:
        return connection.execute(
            "INSERT INTO accounts (id, balance) SELECT n, %s::numeric FROM generate_series(1, %s) n"
            " ON CONFLICT DO NOTHING",
            (OPENING_BALANCE, ACCOUNTS),
        ).rowcount


def report(writers: list[LoadWriter]) -> None:
    print(sum(writer.changes for writer in writers), flush=True)  # noqa: T201 - stdout is for it


def _watch_stdin(stop: threading.Event) -> None:
    sys.stdin.read()
    stop.set()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m cdc.playground.demo.generator", description=__doc__
    )
    parser.add_argument("dsn")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rate", type=float, default=300.0, help="changes a second, all writers")
    arguments = parser.parse_args()
    stop = threading.Event()
    opened = fill(arguments.dsn)
    writers = [
        LoadWriter(arguments.dsn, Actor(n, WRITERS, arguments.seed), arguments.rate / WRITERS, stop)
        for n in range(WRITERS)
    ]
    writers[0].changes += opened
    for writer in writers:
        writer.start()
    threading.Thread(target=_watch_stdin, args=(stop,), daemon=True).start()
    while not stop.wait(_REPORT_SECONDS):
        report(writers)
    for writer in writers:
        writer.join(10)
    report(writers)


if __name__ == "__main__":
    main()
