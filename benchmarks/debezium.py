"""The peer: Debezium's Postgres connector in Kafka Connect standalone, at its best settings.

Its exactly-once needs distributed Connect, so it runs at-least-once here, which favours it. Its
topics have one partition, which suits it best: one task writes in one order either way. Three
settings:

- `default`: as installed.
- `best`: for drains. Large batches and queue, a 50 ms poll, no extra headers, no statistics
  (a queue offer per event to a second thread), a producer with lz4 and large batches.
- `fast`: for latency. The same with a 10 ms poll and no linger.

Heap and collector are those of Kafka's own start scripts. The jars are locked in
`debezium.lock`. Reference: https://debezium.io/documentation/reference/stable/connectors/postgresql.html
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.backlog import PUBLICATION
from benchmarks.peer_files import Peer
from benchmarks.programs import Program
from benchmarks.topics import Topics
from cdc.playground.servers import ports

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from benchmarks.subject import RunContext

# bin/connect-standalone.sh and bin/kafka-run-class.sh of Kafka 4.3.
HEAP = ("-Xms256M", "-Xmx2G")
_JVM = (
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
    "-XX:MaxInlineLevel=15",
    "-Djava.awt.headless=true",
)

_JSON = "org.apache.kafka.connect.json.JsonConverter"

_TUNED: Mapping[str, str | int] = {
    "max.batch.size": 16_384,
    "max.queue.size": 65_536,
    "poll.interval.ms": 50,
    "extended.headers.enabled": "false",
    "statistics.metrics.enabled": "false",
}
_TUNED_PRODUCER: Mapping[str, str | int] = {
    "producer.batch.size": 524_288,
    "producer.linger.ms": 20,
    "producer.compression.type": "lz4",
    "producer.buffer.memory": 134_217_728,
}


@dataclass(frozen=True)
class Debezium:
    """The connector with one set of settings."""

    variant: str
    peer: Peer
    connector: Mapping[str, str | int] = field(default_factory=dict)
    producer: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"debezium-{self.variant}"

    @property
    def settings(self) -> Mapping[str, str | int]:
        return {**self.connector, **self.producer, "heap": " ".join(HEAP), "partitions": 1}

    def topic(self, run: str, table: str) -> str:
        return f"{run}.public.{table}"

    def prepare(self, place: RunContext, run: str, tables: tuple[str, ...]) -> None:
        topics = Topics(place.bootstrap)
        for table in tables:
            topics.create(self.topic(run, table), partitions=1)

    def start(self, place: RunContext, run: str) -> Program:
        folder = place.folder / run
        folder.mkdir()
        worker = _write(folder / "worker.properties", self._worker(place, folder))
        connector = _write(folder / "connector.properties", self._connector(place, run))
        command = [self.peer.java, *HEAP, *_JVM]
        logging = self.peer.write_log_config(folder)
        command += [f"-Dlog4j2.configurationFile={logging}", "-cp", self.peer.class_path]
        command += ["org.apache.kafka.connect.cli.ConnectStandalone", str(worker), str(connector)]
        return Program(self.name, command, folder / "log")

    def _worker(self, place: RunContext, folder: Path) -> Mapping[str, str | int]:
        return {
            "bootstrap.servers": place.bootstrap,
            "key.converter": _JSON,
            "value.converter": _JSON,
            "key.converter.schemas.enable": "false",
            "value.converter.schemas.enable": "false",
            "offset.storage.file.filename": str(folder / "offsets"),
            "offset.flush.interval.ms": 10_000,
            "plugin.path": self.peer.plugins,
            "listeners": f"http://127.0.0.1:{ports.choose()}",
            **self.producer,
        }

    def _connector(self, place: RunContext, run: str) -> Mapping[str, str | int]:
        return {
            "name": run,
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "tasks.max": 1,
            "database.hostname": "127.0.0.1",
            "database.port": place.postgres_port,
            "database.user": "postgres",
            "database.password": "unused",
            "database.dbname": "bench",
            "topic.prefix": run,
            "plugin.name": "pgoutput",
            "slot.name": run,
            "publication.name": PUBLICATION,
            "publication.autocreate.mode": "disabled",
            "snapshot.mode": "no_data",
            "schema.include.list": "public",
            **self.connector,
        }


def default(peer: Peer) -> Debezium:
    return Debezium("default", peer)


def best(peer: Peer) -> Debezium:
    return Debezium("best", peer, _TUNED, _TUNED_PRODUCER)


def fast(peer: Peer) -> Debezium:
    return Debezium(
        "fast",
        peer,
        {**_TUNED, "poll.interval.ms": 10},
        {**_TUNED_PRODUCER, "producer.linger.ms": 0},
    )


def _write(path: Path, properties: Mapping[str, str | int]) -> Path:
    path.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
    return path
