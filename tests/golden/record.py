"""Record what a real server sends: `python -m tests.golden.record --dsn DSN`.

For a server started for this alone, with wal_level=logical, max_prepared_transactions above zero
and autovacuum off (its catalog updates cause empty transactions on Postgres 14). Runs each scenario
that the server's major has a protocol for and writes it to `MAJOR-SCENARIO.jsonl`: a header, then
one line per step with its payloads in hexadecimal. Fails if a step's messages differ from those in
the scenario.
"""

from __future__ import annotations

import argparse
import json
import select
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Final

import psycopg

from cdc.events import LSN
from tests.golden.reading import RECORDINGS, decode_all
from tests.golden.scenario import ORIGIN, PUBLICATION, SCENARIOS, SETUP, Scenario, Step

# A step's work takes milliseconds; after this time nothing more will arrive.
STEP_TIMEOUT_S: Final = 20.0

# The daemon's client encoding; the least memory that Postgres allows, so that little data makes it
# stream.
STREAM_SETTINGS: Final = "-c client_encoding=UTF8 -c logical_decoding_work_mem=64kB"

Connection = psycopg.Connection[tuple[Any, ...]]


class Stream:
    """A walsender with a temporary slot, read until it has caught up."""

    def __init__(self, dsn: str, scenario: Scenario) -> None:
        self._connection = psycopg.connect(
            dsn, autocommit=True, replication="database", options=STREAM_SETTINGS
        )
        self._pgconn = self._connection.pgconn
        slot = f"golden_{scenario.name.replace('-', '_')}"
        two_phase = " TWO_PHASE" if scenario.two_phase else ""
        self._command(
            f"CREATE_REPLICATION_SLOT {slot} TEMPORARY LOGICAL pgoutput"
            f" NOEXPORT_SNAPSHOT{two_phase}",
            psycopg.pq.ExecStatus.TUPLES_OK,
        )
        options = {**scenario.options, "publication_names": "golden"}
        listed = ", ".join(f"{name} '{value}'" for name, value in options.items())
        self._command(
            f"START_REPLICATION SLOT {slot} LOGICAL 0/0 ({listed})",
            psycopg.pq.ExecStatus.COPY_BOTH,
        )

    def _command(self, command: str, expected: int) -> None:
        self._pgconn.send_query(command.encode())
        result = self._pgconn.get_result()
        if result is None or result.status != expected:
            raise RuntimeError(self._pgconn.get_error_message())
        if expected == psycopg.pq.ExecStatus.TUPLES_OK:
            while self._pgconn.get_result():
                pass

    def close(self) -> None:
        self._connection.close()

    def drain(self, upto: LSN) -> list[bytes]:
        """Return the payloads until the walsender has decoded everything before `upto`."""
        payloads: list[bytes] = []
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while time.monotonic() < deadline:
            # Asking for a reply brings a keepalive that reports how far the walsender is.
            self._pgconn.put_copy_data(struct.pack(">cQQQQB", b"r", 0, 0, 0, 0, 1))
            self._pgconn.flush()
            select.select([self._pgconn.socket], [], [], 0.05)
            self._pgconn.consume_input()
            for frame in self._frames():
                if frame.startswith(b"w"):
                    payloads.append(frame[25:])
                elif struct.unpack_from(">Q", frame, 1)[0] >= upto:
                    return payloads
        raise TimeoutError(f"the walsender did not reach {upto} in {STEP_TIMEOUT_S} s")

    def _frames(self) -> Iterator[bytes]:
        while True:
            size, data = self._pgconn.get_copy_data(1)
            if size == 0:
                return
            if size < 0:
                raise RuntimeError(self._pgconn.get_error_message() or "the stream ended")
            yield bytes(data)


def run_step(step: Step, sessions: dict[str, Connection], stream: Stream) -> list[bytes]:
    for statement in step.statements:
        session, _, rest = statement.partition(": ")
        if session in sessions:
            sessions[session].execute(rest)
        else:
            sessions["a"].execute(statement)
    # Only WAL on disk is sent, and nothing else flushes the WAL of an open transaction.
    admin = sessions["admin"]
    admin.execute("CHECKPOINT")
    row = admin.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
    assert row is not None
    return stream.drain(LSN.parse(row[0]))


def _drop_origin(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_replication_origin_drop(roname) FROM pg_replication_origin"
            " WHERE roname = %s",
            [ORIGIN],
        )


def record(dsn: str, scenario: Scenario) -> list[dict[str, Any]]:
    """Run `scenario` on the server at `dsn`, and return one entry per step."""
    with ExitStack() as stack:
        # Origins belong to the server, and outlive the database. Last, when no session uses it.
        stack.callback(_drop_origin, dsn)
        sessions: dict[str, Connection] = {}
        for name in ("a", "b", "c", "admin"):
            connection = stack.enter_context(psycopg.connect(dsn, autocommit=True))
            sessions[name] = connection
        admin = sessions["admin"]
        _drop_origin(dsn)
        admin.execute(SETUP)
        admin.execute(PUBLICATION)
        admin.execute("SELECT pg_replication_origin_create(%s)", (ORIGIN,))
        for connection in sessions.values():
            connection.execute("SET search_path = golden")

        stream = Stream(dsn, scenario)
        stack.callback(stream.close)
        entries = []
        for step in scenario.steps:
            payloads = run_step(step, sessions, stream)
            messages = decode_all(payloads, parallel=scenario.parallel)
            kinds = " ".join(type(message).__name__ for message in messages)
            if kinds != step.kinds:
                raise SystemExit(
                    f"{scenario.name}, step {step.name!r}:\n"
                    f"  expected {step.kinds}\n  recorded {kinds}"
                )
            entries.append({"step": step.name, "payloads": [one.hex() for one in payloads]})
        return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dsn", required=True, help="a superuser's, of a throw-away server")
    dsn = parser.parse_args().dsn
    with psycopg.connect(dsn) as connection:
        major, minor = divmod(connection.info.server_version, 10_000)
    RECORDINGS.mkdir(exist_ok=True)
    for scenario in SCENARIOS:
        if major < scenario.min_major:
            continue
        header = {"server": f"{major}.{minor}", "options": scenario.options}
        lines = [json.dumps(entry) for entry in (header, *record(dsn, scenario))]
        path = RECORDINGS / f"{major}-{scenario.name}.jsonl"
        path.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
