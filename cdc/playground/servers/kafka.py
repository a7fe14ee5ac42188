"""Kafka in KRaft mode: one node that is broker and controller, on loopback.

Everything has one replica, transactions included. Heap and compiler are kept small: the broker
idles at 160 MB and still accepts more than a Python client can produce.

Settings can make it one of several nodes: `node.id`, `controller.quorum.voters`, and `cluster.id`,
which is not a broker setting but the id that the nodes' folders must share.
"""

from __future__ import annotations

import base64
import shutil
import struct
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, Final

from cdc.errors import LocalStackError
from cdc.playground.servers.home import ServerState
from cdc.playground.servers.jvm import JavaServer
from cdc.playground.servers.ports import LOOPBACK
from cdc.playground.servers.server import probe
from cdc.runtime.java import find_java

_SETTINGS: Final = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "auto.create.topics.enable": "false",
    "num.partitions": "4",
    # One node: every internal topic has one replica, and one partition is quicker to load.
    "default.replication.factor": "1",
    "min.insync.replicas": "1",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
    # A killed producer's transaction is aborted within a second of its timeout, not within ten.
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    # After a kill the controller waits until the dead broker's session has expired before it admits
    # the same broker again: this is most of the time until it answers.
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "500",
    "controller.quorum.election.timeout.ms": "500",
    "controller.quorum.fetch.timeout.ms": "1000",
    # Memory and threads for a machine of two cores that runs everything.
    "num.network.threads": "2",
    "num.io.threads": "2",
    "background.threads": "2",
    "num.recovery.threads.per.data.dir": "1",
    "log.cleaner.threads": "1",
    "log.cleaner.dedupe.buffer.size": str(8 * 1024 * 1024),
    "log.cleaner.io.buffer.size": str(128 * 1024),
    "log.index.size.max.bytes": str(1024 * 1024),
}

_CLUSTER_ID: Final = "cluster.id"

# ApiVersions, version 0, no client id: answered once the broker accepts requests.
_API_VERSIONS: Final = struct.pack("!ihhih", 10, 18, 0, 1, -1)


class Kafka(JavaServer):
    """One broker per home; its second port is the controller's."""

    name: ClassVar[str] = "kafka"
    default_version: ClassVar[str] = "4.3.1"
    ports_needed: ClassVar[int] = 2

    def url(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    def prepare(self, state: ServerState) -> None:
        del state
        self.cache.fetch("kafka")
        find_java()
        self.data.mkdir(parents=True, exist_ok=True)

    def command(self, state: ServerState) -> list[str]:
        settings = {k: v for k, v in state.settings.items() if k != _CLUSTER_ID}
        properties = _write_properties(self.data, state.ports, settings)
        command = self.server_command("kafka.Kafka", str(properties))
        if not (self.data / "logs" / "meta.properties").exists():
            self._format(state.settings)
        return command

    def is_ready(self, state: ServerState) -> bool:
        return bool(probe(state.ports[0], _API_VERSIONS))

    def _format(self, settings: Mapping[str, str]) -> None:
        """Create the folder of a new cluster.

        Its files are written here, except one that is the same in all: Kafka's tool takes a second
        of two cores.
        """
        checkpoint = self.cache.derive(
            f"{self.cache.fetch('kafka').name}-bootstrap.checkpoint", self._make_checkpoint
        )
        logs = self.data / "logs"
        logs.mkdir(exist_ok=True)
        shutil.copyfile(checkpoint, logs / checkpoint.name.rpartition("-")[2])
        # Last and atomically: its existence shows that the folder is complete.
        part = logs / "meta.properties.part"
        part.write_text(
            f"version=1\nnode.id={settings.get('node.id', _SETTINGS['node.id'])}\n"
            f"cluster.id={settings.get(_CLUSTER_ID) or new_id()}\ndirectory.id={new_id()}\n",
            encoding="utf-8",
        )
        part.rename(logs / "meta.properties")

    def _make_checkpoint(self, target: Path) -> None:
        """Run Kafka's own tool, for the file that states the cluster's features."""
        with TemporaryDirectory() as folder:
            properties = _write_properties(Path(folder), [9092, 9093], {})
            tool = [*self.java_command("kafka.tools.StorageTool"), "format"]
            made = subprocess.run(
                [*tool, "-t", new_id(), "-c", str(properties)],
                capture_output=True,
                text=True,
                check=False,
            )
            if made.returncode != 0:
                raise LocalStackError(
                    f"Kafka's folder could not be formatted: {made.stdout}{made.stderr}".strip(),
                    hint="fix what it reports and try again",
                )
            shutil.copyfile(Path(folder) / "logs" / "bootstrap.checkpoint", target)


def _write_properties(folder: Path, ports: list[int], others: Mapping[str, str]) -> Path:
    broker, controller = ports
    settings = {
        **_SETTINGS,
        "controller.quorum.voters": f"1@{LOOPBACK}:{controller}",
        "listeners": f"PLAINTEXT://{LOOPBACK}:{broker},CONTROLLER://{LOOPBACK}:{controller}",
        "advertised.listeners": f"PLAINTEXT://{LOOPBACK}:{broker}",
        "log.dirs": str(folder / "logs"),
        **others,
    }
    path = folder / "server.properties"
    path.write_text("".join(f"{k}={v}\n" for k, v in settings.items()), encoding="utf-8")
    return path


def new_id() -> str:
    """Return a UUID as Kafka writes it; one with a leading dash would look like an option."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not text.startswith("-"):
            return text
