"""The files that the peer needs: its jars, fetched and checked against our lock, and a Java.

The newest Java found, because it is the fastest for the peer: PEER_JAVA if set, else the newest of
those below /usr/lib/jvm and the embedded stack's own.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from cdc.playground.servers.jvm import class_path
from cdc.runtime.artifacts import Artifact, ArtifactCache, default_cache, parse_lock
from cdc.runtime.java import find_java
from cdc.runtime.progress import Terminal

_LOCK: Final = Path(__file__).parent / "debezium.lock"
_INSTALLED: Final = Path("/usr/lib/jvm")
_LOG4J: Final = """\
<Configuration status="ERROR">
  <Appenders>
    <Console name="out" target="SYSTEM_OUT">
      <PatternLayout pattern="%d{ISO8601} %p %c{1.} %m%n"/>
    </Console>
  </Appenders>
  <Loggers>
    <Root level="INFO"><AppenderRef ref="out"/></Root>
    <Logger name="org.apache.kafka.clients" level="WARN"/>
  </Loggers>
</Configuration>
"""


@dataclass(frozen=True)
class Peer:
    """Kafka Connect's class path, the folder of the connector's plugin, and the Java to use."""

    java: str
    class_path: str
    plugins: str

    def write_log_config(self, folder: Path) -> Path:
        path = folder / "log4j2.xml"
        path.write_text(_LOG4J)
        return path


class PeerCache(ArtifactCache):
    """The embedded stack's download cache, with the peer's lock."""

    def fetch(self, section: str) -> Path:
        """Return the folder that holds exactly the section's files."""
        artifacts = lock()[section]
        # The plugin's folder is a plugin path: Connect treats each folder below it as a plugin.
        folder = self.root / "debezium" / f"{section}-{versions()['debezium']}"
        folder.mkdir(parents=True, exist_ok=True)
        with self._locked(f"debezium-{section}"):
            missing = [each for each in artifacts if not (folder / each.file_name).exists()]
            self._progress.expect(sum(each.size for each in missing))
            for each in missing:
                self._fetch_one(each, folder)
        return folder


@cache
def lock() -> dict[str, tuple[Artifact, ...]]:
    return parse_lock(_LOCK.read_text(encoding="utf-8"))


def fetch() -> Peer:
    """Return the peer's files; fetch the missing ones."""
    store = PeerCache(default_cache(), Terminal())
    connect, plugin = store.fetch("connect"), store.fetch("debezium")
    return Peer(java=str(newest_java()), class_path=class_path(connect), plugins=str(plugin.parent))


def versions() -> dict[str, str]:
    """Return the peer's versions, for the result."""
    locked = {each.name: each.version for rows in lock().values() for each in rows}
    return {
        "debezium": locked["debezium-connector-postgres"],
        "kafka-connect": locked["connect-runtime"],
        "peer-java": _release(newest_java()),
    }


@cache
def newest_java() -> Path:
    if chosen := os.environ.get("PEER_JAVA"):
        return Path(chosen)
    found = [find_java().program, *_INSTALLED.glob("*/bin/java")]
    return max(found, key=lambda program: [int(part) for part in _release(program).split(".")])


def _release(program: Path) -> str:
    """Return the version in the `release` file that every Java runtime has."""
    try:
        text = (program.resolve().parent.parent / "release").read_text(encoding="utf-8")
    except OSError:
        return "0"
    found = re.search(r'JAVA_VERSION="([\d.]+)', text)
    return found.group(1) if found else "0"
