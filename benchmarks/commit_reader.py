"""The floor of the latency: when a commit reaches a reader that does nothing with it.

A separate program: `python -m benchmarks.commit_reader PORT SLOT SKIP ROWS`; reads ROWS
transactions from the slot as eagerly as it can, decodes only their commit times, and prints the
percentiles in milliseconds, without the first SKIP, as one JSON object.

Reference: https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html
"""

from __future__ import annotations

import json
import select
import struct
import sys
import time
from dataclasses import asdict

from benchmarks.arrivals import percentiles
from benchmarks.raw_reader import start

# XLogData: 'w', WAL start, WAL end, clock; then the message: 'B', final LSN, commit time.
_BEGIN = struct.Struct("!cQQqcQq")
_POSTGRES_EPOCH_US = 946_684_800_000_000  # 2000-01-01
_SILENCE_SECONDS = 30.0


def commit_time_us(frame: bytes | memoryview) -> int | None:
    """Return the commit time that a begin message carries, since 1970; None for other frames."""
    if len(frame) < _BEGIN.size:
        return None
    kind, _start, _end, _clock, message, _final_lsn, committed = _BEGIN.unpack_from(frame)
    if kind != b"w" or message != b"B":
        return None
    return int(committed) + _POSTGRES_EPOCH_US


def main(port: str, slot: str, skip: str, rows: str) -> None:
    connection = start(int(port), slot)
    pgconn = connection.pgconn
    latencies_ms: list[float] = []
    while len(latencies_ms) < int(rows):
        length, frame = pgconn.get_copy_data(1)
        if length == 0:
            ready, _, _ = select.select([pgconn.socket], [], [], _SILENCE_SECONDS)
            if not ready:
                raise SystemExit(f"silence after {len(latencies_ms)} of {rows} transactions")
            pgconn.consume_input()
            continue
        arrived_us = time.time_ns() // 1000
        committed_us = commit_time_us(frame)
        if committed_us is not None:
            latencies_ms.append((arrived_us - committed_us) / 1000)
    connection.close()
    print(json.dumps(asdict(percentiles(latencies_ms[int(skip) :]))))


if __name__ == "__main__":
    main(*sys.argv[1:])
