"""Read a slot's stream from the socket and discard it: the rate of the walsender itself.

A separate program: `python -m benchmarks.raw_reader PORT SLOT END_LSN NAP_MS on|off`; prints one
JSON object with the seconds from START_REPLICATION to the end, the bytes, and the reads. With `on`,
open transactions are streamed (protocol 2).

libpq opens the connection and starts the stream; then this program reads the socket directly and
parses nothing, so that the figure has no client cost. With a nap between two reads the socket's
buffer fills and the walsender is not woken for every row: the limit. Without one it is an eager
reader, like `pg_recvlogical`. The end is the keepalive that reports that the WAL was sent up to
END_LSN. Nothing is confirmed.

Reference: https://www.postgresql.org/docs/current/protocol-replication.html
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import sys
import time
from dataclasses import asdict, dataclass

import psycopg
from psycopg.pq import ExecStatus

from benchmarks.backlog import PUBLICATION

_READ_BYTES = 4 << 20
_SILENCE_SECONDS = 60.0
# CopyData with a primary keepalive: 'd', length, 'k', WAL end, clock, reply wanted.
_KEEPALIVE = struct.Struct("!cIcQQ?")
_KEEPALIVE_LENGTH = _KEEPALIVE.size - 1  # the length counts itself and what follows


@dataclass(frozen=True)
class Drained:
    seconds: float
    bytes: int
    reads: int


def options(*, in_progress: bool) -> dict[str, str]:
    """Return pgoutput's options, with or without streaming of open transactions."""
    plain = {"proto_version": "2" if in_progress else "1", "publication_names": PUBLICATION}
    return {**plain, "streaming": "on"} if in_progress else plain


def start(port: int, slot: str, *, in_progress: bool = False) -> psycopg.Connection:
    """Return a connection that streams from the slot."""
    given = ", ".join(f"{key} '{value}'" for key, value in options(in_progress=in_progress).items())
    connection: psycopg.Connection = psycopg.Connection.connect(
        f"host=127.0.0.1 port={port} user=postgres dbname=bench sslmode=disable"
        " gssencmode=disable replication=database",
        autocommit=True,
    )
    pgconn = connection.pgconn
    pgconn.send_query(f'START_REPLICATION SLOT "{slot}" LOGICAL 0/0 ({given})'.encode())
    while True:
        while pgconn.is_busy():
            select.select([pgconn.socket], [], [], _SILENCE_SECONDS)
            pgconn.consume_input()
        result = pgconn.get_result()
        if result is not None and result.status == ExecStatus.COPY_BOTH:
            return connection
        message = result.error_message.decode() if result else "no result"
        raise SystemExit(f"START_REPLICATION failed: {message}")


def caught_up(tail: bytes, end_lsn: int) -> bool:
    """Return whether the stream's last bytes are a keepalive at or past `end_lsn`."""
    if len(tail) < _KEEPALIVE.size:
        return False
    kind, length, message, wal_end, _clock, _reply = _KEEPALIVE.unpack(tail[-_KEEPALIVE.size :])
    return bool(
        kind == b"d" and length == _KEEPALIVE_LENGTH and message == b"k" and wal_end >= end_lsn
    )


def drain(stream: socket.socket, end_lsn: int, nap_seconds: float) -> Drained:
    """Read until the walsender reports that it has sent everything."""
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    tail = b""
    total = reads = 0
    started = time.perf_counter()
    while not caught_up(tail, end_lsn):
        if nap_seconds:
            time.sleep(nap_seconds)
        count = stream.recv_into(buffer)
        if not count:
            raise SystemExit("the server closed the connection")
        total += count
        reads += 1
        # A keepalive may be split over two reads.
        tail = (tail + bytes(view[max(0, count - _KEEPALIVE.size) : count]))[-_KEEPALIVE.size :]
    return Drained(seconds=time.perf_counter() - started, bytes=total, reads=reads)


def parse_lsn(text: str) -> int:
    high, low = text.split("/")
    return int(high, 16) << 32 | int(low, 16)


def main(port: str, slot: str, end_lsn: str, nap_ms: str, in_progress: str) -> None:
    connection = start(int(port), slot, in_progress=in_progress == "on")
    # A second descriptor of the same socket: libpq keeps its own and does not read any further.
    with socket.socket(fileno=os.dup(connection.pgconn.socket)) as stream:
        stream.settimeout(_SILENCE_SECONDS)
        drained = drain(stream, parse_lsn(end_lsn), float(nap_ms) / 1000)
    connection.close()
    print(json.dumps(asdict(drained)))


if __name__ == "__main__":
    main(*sys.argv[1:])
