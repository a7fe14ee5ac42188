"""The servers of one benchmark: its own embedded stack, deleted afterwards.

Postgres runs with the settings that the workload names. The broker is the embedded one with Kafka's
default threads and the Java settings that its documentation recommends; the stack's own broker
settings are small, for demos, and would slow the measured subject down. The broker is warmed up
before anything is measured, so that the first subject does not pay for its JIT compilation.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psycopg
from confluent_kafka import Producer

from benchmarks.failure import BenchmarkError
from benchmarks.progress import say
from benchmarks.subject import RunContext
from benchmarks.topics import Topics
from cdc.playground.servers.jvm import log_configuration
from cdc.playground.servers.kafka import Kafka
from cdc.playground.servers.stack import LocalStack
from cdc.runtime.artifacts import ArtifactCache, default_cache
from cdc.runtime.java import find_java
from cdc.runtime.progress import Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_POSTGRES_MAJOR: Final = 17
# https://kafka.apache.org/41/operations/java-version: "typical arguments". With the start scripts'
# 1 GB the collector keeps 50 MB for new objects and pauses the broker for 10 to 20 ms every second,
# with any subject; with this heap, once in ten seconds.
_BROKER_HEAP: Final = ("-Xms6G", "-Xmx6G")
_BROKER_JVM: Final = (
    "-XX:MetaspaceSize=96m",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:G1HeapRegionSize=16M",
    "-XX:MinMetaspaceFreeRatio=50",
    "-XX:MaxMetaspaceFreeRatio=80",
    "-XX:+ExplicitGCInvokesConcurrent",
    "-Djava.awt.headless=true",
)
# Kafka's defaults for settings that the embedded broker has smaller.
_BROKER_SETTINGS: Final = {
    "num.network.threads": "3",
    "num.io.threads": "8",
    "background.threads": "10",
    "log.cleaner.dedupe.buffer.size": "134217728",
    "log.cleaner.io.buffer.size": "524288",
    "log.index.size.max.bytes": "10485760",
    # Delete topics' files at once, not during the next run.
    "log.segment.delete.delay.ms": "1000",
}
_WARM_UP_BYTES: Final = 700  # about the size of an event
_WARM_UP_PARTITIONS: Final = 4
_WARM_UP_TRANSACTION: Final = 50_000
# Every way in which a subject writes: without transactions, and in transactions of compressed
# batches.
_WARM_UPS: Final[tuple[tuple[int, dict[str, str | int]], ...]] = (
    (200_000, {"linger.ms": 5}),
    (200_000, {"linger.ms": 20, "compression.type": "lz4", "batch.size": 1_000_000}),
    (
        400_000,
        {
            "linger.ms": 20,
            "compression.type": "lz4",
            "batch.size": 1_000_000,
            "transactional.id": "warm",
        },
    ),
)


class StockBroker(Kafka):
    """The embedded broker with the settings of Kafka's own start scripts."""

    def java_command(self, *arguments: str) -> list[str]:
        # The stack's flags also configure logging, which is needed here too.
        logging = f"-Dlog4j2.configurationFile={log_configuration(self.home)}"
        program = str(find_java().program)
        return [program, *_BROKER_HEAP, *_BROKER_JVM, logging, "-cp", self.class_path(), *arguments]


@dataclass(frozen=True)
class Servers:
    """Running servers."""

    place: RunContext
    postgres_pid: int
    kafka_pid: int
    versions: dict[str, str]
    settings: dict[str, Any]

    @property
    def postgres_port(self) -> int:
        return self.place.postgres_port

    @property
    def bootstrap(self) -> str:
        return self.place.bootstrap

    def connect(self) -> psycopg.Connection:
        return _connect(self.postgres_port, "bench")


@contextmanager
def running(
    name: str, postgres: Mapping[str, str], *, keep: bool, broker: Mapping[str, str] | None = None
) -> Iterator[Servers]:
    """Run Postgres and a broker for the duration of the block, in their own folder.

    `broker` has settings that override Kafka's defaults.
    """
    with folder_of(name, keep=keep) as folder:
        # Tied: if this process is killed, the servers go too.
        stack = LocalStack(folder / "stack", progress=Terminal(), tied=True)
        try:
            yield _start(stack, folder, postgres, {**_BROKER_SETTINGS, **(broker or {})})
        finally:
            stack.down()


@contextmanager
def folder_of(name: str, *, keep: bool) -> Iterator[Path]:
    """Return a workload's folder, which is deleted at the end of the block unless `keep`."""
    folder = Path(tempfile.mkdtemp(prefix=f"lockstep-{name}-"))
    # If Postgres runs as another user, that user must be able to enter the folder.
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        if keep:
            say(f"the servers' folder and the logs are left in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _start(
    stack: LocalStack, folder: Path, postgres: Mapping[str, str], broker_settings: dict[str, str]
) -> Servers:
    stack.up(["postgres"], pg_major=_POSTGRES_MAJOR, settings={"postgres": postgres})
    broker = StockBroker(stack.home, ArtifactCache(default_cache(), Terminal()), Terminal())
    with stack.home.lock():
        broker.start(settings=broker_settings)
    port = stack["postgres"].port
    with _connect(port, "postgres") as connection:
        connection.execute("CREATE DATABASE bench")
        shown = connection.execute("SHOW server_version").fetchone()
    assert shown is not None
    _warm_up(broker.url())
    return Servers(
        place=RunContext(folder=folder, postgres_port=port, bootstrap=broker.url()),
        postgres_pid=stack["postgres"].pid,
        kafka_pid=broker.pid,
        versions={"postgres": str(shown[0]), "kafka": broker.state.version},
        settings={
            "postgres": dict(postgres),
            "broker": {"java_flags": _java_flags(broker.pid), **broker_settings},
        },
    )


def _java_flags(pid: int) -> str:
    """Return the flags that the broker runs with; raise unless they are those of a stock broker."""
    wanted = [*_BROKER_HEAP, *_BROKER_JVM]
    _, *command = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").split("\0")
    if command[: len(wanted)] != wanted:
        raise BenchmarkError(f"the broker runs with {command}", hint="no figure counts")
    return " ".join(wanted)


def _connect(port: int, database: str) -> psycopg.Connection:
    return psycopg.connect(
        f"host=127.0.0.1 port={port} user=postgres dbname={database} sslmode=disable",
        autocommit=True,
    )


def _warm_up(bootstrap: str) -> None:
    """Write and read many records in every way, so that the broker's JIT compiles its code."""
    topics = Topics(bootstrap)
    topics.create("warm.up", partitions=_WARM_UP_PARTITIONS)
    for records, settings in _WARM_UPS:
        producer = Producer({"bootstrap.servers": bootstrap, "log_level": 0, **settings})
        transactional = "transactional.id" in settings
        if transactional:
            producer.init_transactions()
        for first in range(0, records, _WARM_UP_TRANSACTION):
            if transactional:
                producer.begin_transaction()
            for number in range(first, first + _WARM_UP_TRANSACTION):
                _produce(producer, number)
            producer.flush()
            if transactional:
                producer.commit_transaction()
    for _ in topics.read("warm.up"):
        pass
    topics.delete_prefix("warm")
    say("the broker is warm")


def _produce(producer: Producer, number: int) -> None:
    # Hex digits, which a codec compresses about as well as rows.
    value = hashlib.sha256(b"%d" % number).hexdigest() * (_WARM_UP_BYTES // 64)
    while True:
        try:
            producer.produce("warm.up", value, partition=number % _WARM_UP_PARTITIONS)
        except BufferError:
            producer.poll(0.05)
        else:
            return
