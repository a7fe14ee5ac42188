"""Record a log as one version writes it: `python -m tests.golden.record_log N FOLDER`.

`FOLDER` has the source of a version whose resume and frontier records are of format N, such as
`git archive` unpacks it: format 1 is from before digests (dcc68a0e^), 2 from before BLAKE3
(6660141e^), 3 from before digests of snapshots (712789cf), 4 the present one. Its own setup and
daemon run on servers started for this alone, and write every kind of event. What its topics hold
then goes to `logs/format-N.jsonl`: a header with the rows of the database, then a line for each
record, with its offset, time, key and value.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from base64 import b64encode
from pathlib import Path
from typing import Any, Final

import psycopg
import yaml
from confluent_kafka import Consumer, KafkaError, TopicPartition

from cdc.playground.servers.stack import LocalStack
from tests.golden.loading import file_of, prefix_of

_SECONDS: Final = 120.0
_TABLES: Final = (
    "CREATE TABLE users (id int PRIMARY KEY, name text, at timestamptz, price numeric)",
    "CREATE TABLE clicks (id int, note text)",
    "ALTER TABLE clicks REPLICA IDENTITY FULL",
)
_WRITES: Final = (
    "INSERT INTO users SELECT g, 'n', '2026-01-01Z', g / 7.0 FROM generate_series(1, 12) g",
    "INSERT INTO clicks SELECT g, 'c' FROM generate_series(1, 4) g",
    "UPDATE users SET name = 'ü \"quoted\"' WHERE id = 2",
    "UPDATE users SET id = 103 WHERE id = 3",
    "DELETE FROM users WHERE id IN (4, 5)",
    "TRUNCATE clicks",
    "INSERT INTO clicks VALUES (9, NULL)",
    "ALTER TABLE users ADD COLUMN more int",
    "UPDATE users SET more = 6 WHERE id = 6",
    "INSERT INTO users VALUES (200, repeat('y', 30000))",
    "SELECT pg_logical_emit_message(true, 'audit', '{\"by\": \"ada\"}')",
    "UPDATE users SET price = price * 2 WHERE id > 9",
)


def record(format_: int, folder: Path) -> None:
    """Run the version in `folder` and write what its log holds."""
    with tempfile.TemporaryDirectory() as home:
        stack = LocalStack(Path(home) / "stack", tied=True)
        try:
            ends = stack.up(["postgres", "kafka"])
            assert ends.postgres_dsn is not None
            assert ends.kafka_bootstrap is not None
            _record(format_, folder, Path(home), ends.postgres_dsn, ends.kafka_bootstrap)
        finally:
            stack.down()


def _record(format_: int, folder: Path, home: Path, dsn: str, bootstrap: str) -> None:
    config = home / "lockstep.yaml"
    sections = {
        "pipeline": prefix_of(format_),
        "source": {"dsn": dsn, "canary_seconds": 0},
        "log": {
            "bootstrap_servers": bootstrap,
            "partitions": 2,
            "kafka": {"message.max.bytes": 20_000},
        },
        "http": {"listen": ""},
        "snapshot": {"mode": "never"},
    }
    config.write_text(yaml.safe_dump(sections), "utf-8")
    with psycopg.connect(dsn, autocommit=True) as database:
        for statement in _TABLES:
            database.execute(statement.encode())
        _cdc(folder, "setup", "-c", str(config))
        with _daemon(folder, config) as daemon:
            for statement in _WRITES:
                database.execute(statement.encode())
                _wait_confirmed(database)  # so each has a batch and a frontier of its own
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(_SECONDS) == 0
        rows = {
            name: [row[0] for row in database.execute(query)]
            for name, query in (
                ("public.users", b"SELECT to_jsonb(u) FROM users u ORDER BY id"),
                ("public.clicks", b"SELECT to_jsonb(c) FROM clicks c ORDER BY id"),
            )
        }
    head = {"format": format_, "rows": rows}
    lines = [head, *records_of(bootstrap, prefix_of(format_))]
    file_of(format_).write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")


def _cdc(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "cdc.cli.main", *words]
    subprocess.run(command, check=True, cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)})


def _daemon(folder: Path, config: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "cdc.cli.main", "run", "-c", str(config)]
    return subprocess.Popen(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)})


def _wait_confirmed(database: psycopg.Connection[Any]) -> None:
    """Return when the daemon has confirmed what was committed."""
    [lsn] = database.execute(b"SELECT pg_current_wal_lsn()::text").fetchone() or [""]
    query = b"SELECT bool_and(confirmed_flush_lsn >= %s) FROM pg_replication_slots"
    deadline = time.monotonic() + _SECONDS
    while database.execute(query, [lsn]).fetchone() != (True,):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the daemon has not confirmed {lsn}")
        time.sleep(0.1)


def records_of(bootstrap: str, prefix: str) -> list[dict[str, Any]]:
    """Return every committed record of the pipeline's topics, by topic, partition and offset."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "record",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
        }
    )
    topics = consumer.list_topics(timeout=30).topics
    left = {
        (name, number)
        for name, topic in topics.items()
        if name.startswith(f"{prefix}.")
        for number in topic.partitions
    }
    consumer.assign([TopicPartition(*each, 0) for each in left])
    found: list[dict[str, Any]] = []
    while left:
        message = consumer.poll(30)
        assert message is not None
        place: Any = (message.topic(), message.partition())
        error = message.error()
        if error is not None:
            assert error.code() == KafkaError._PARTITION_EOF, error
            found.append({"topic": place[0], "partition": place[1], "end": message.offset()})
            left.discard(place)
            continue
        found.append(
            {
                "topic": place[0],
                "partition": place[1],
                "offset": message.offset(),
                "ms": message.timestamp()[1],
                "headers": message.headers(),
                "key": _text(message.key()),
                "value": _text(message.value()),
            }
        )
    consumer.close()
    return sorted(
        found,
        key=lambda each: (each["topic"], each["partition"], each.get("offset", 1 << 60)),
    )


def _text(value: bytes | None) -> str | dict[str, str] | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:  # a piece of a dead letter
        return {"base64": b64encode(value or b"").decode()}


if __name__ == "__main__":
    record(int(sys.argv[1]), Path(sys.argv[2]).resolve())
