"""Start Spark's worker for a streaming source: connect first, then import what it needs.

Spark gives such a worker ten seconds from its start to connect, and no setting changes that
(`PythonWorkerFactory.PROCESS_WAIT_TIMEOUT_MS`, `createSimpleWorker`). Spark's own module imports
all of pyspark before it connects, which takes longer on a busy machine. This one connects with only
the standard library, and hands the connection over; after that Spark waits.

The program with which `jobs.spark.session` starts workers runs it in place of Spark's module.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from typing import IO, Final, cast

MODULE: Final = "pyspark.sql.streaming.python_streaming_source_runner"
_BUFFER_BYTES: Final = 65_536
_ANSWER_SECONDS: Final = 15.0


def connected() -> IO[bytes]:
    """Return the connection to the JVM that started this process, after sending it our pid."""
    path = os.environ.get("PYTHON_WORKER_FACTORY_SOCK_PATH")
    secret = os.environ.get("PYTHON_WORKER_FACTORY_SECRET", "")
    if path:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(_ANSWER_SECONDS)
        link.connect(path)
    else:
        is_six = os.environ.get("SPARK_PREFER_IPV6", "false").lower() == "true"
        host = "::1" if is_six else "127.0.0.1"
        port = int(os.environ["PYTHON_WORKER_FACTORY_PORT"])
        link = socket.create_connection((host, port), _ANSWER_SECONDS)
    file = cast("IO[bytes]", link.makefile("rwb", _BUFFER_BYTES))
    if not path:
        text = secret.encode()
        file.write(struct.pack("!i", len(text)) + text)
        file.flush()
        (size,) = struct.unpack("!i", file.read(4))
        if file.read(size) != b"ok":
            sys.exit("Spark refuses its own worker")
    link.settimeout(None)
    file.write(struct.pack("!i", os.getpid()))
    file.flush()
    return file


if __name__ == "__main__":
    with connected() as connection:
        from pyspark.sql.streaming.python_streaming_source_runner import main

        main(connection, connection)
