"""A connection pooler before Postgres is reported as one: it passes no replication connection.

It answers as PgBouncer before 1.23 does; no more of PgBouncer is needed here.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

import psycopg
import pytest

from cdc.operate.doctor.run import examine
from cdc.operate.findings import Severity
from tests.fixtures.daemon import NewPipeline

_CONFIG = 78
_SSL_REQUEST = 80_877_103


@pytest.fixture
def pooler() -> Iterator[int]:
    """Refuse every replication connection as PgBouncer does; return the port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client, suppress(OSError, struct.error):
                    _refuse(client)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)


def _refuse(client: socket.socket) -> None:
    size, code = struct.unpack("!II", client.recv(8))
    if code == _SSL_REQUEST:
        client.sendall(b"N")
        size, code = struct.unpack("!II", client.recv(8))
    wanted = client.recv(size - 8)
    name = b"replication" if b"replication\0" in wanted else b"options"
    fields = b"SFATAL\0C08P01\0Munsupported startup parameter: " + name + b"\0\0"
    client.sendall(b"E" + struct.pack("!I", 4 + len(fields)) + fields)


def test_a_daemon_connected_to_a_pooler_reports_it_and_stops(
    pipeline: NewPipeline, pooler: int
) -> None:
    line = pipeline("CREATE TABLE users (id int PRIMARY KEY)")
    dsn = psycopg.conninfo.make_conninfo(line.database.dsn, host="127.0.0.1", port=pooler)
    file = line.write("pooled.yaml", source__dsn=dsn)
    line.refused(
        _CONFIG, "unsupported startup parameter: replication", "PgBouncer", config_file=file
    )
    line.settings["source"]["dsn"] = dsn
    line.config_file = file
    (finding,) = [each for each in examine(line.config) if each.check == "postgres"]
    assert finding.severity is Severity.ERROR
    assert "PgBouncer" in finding.fix
