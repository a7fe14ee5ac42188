"""The embedded stack: start servers, list them, stop them.

    stack = LocalStack(home)
    ends = stack.up(["postgres", "kafka"])
    ... ends.postgres_dsn, ends.kafka_bootstrap ...
    stack["kafka"].kill(); stack.start("kafka")     # same port, same data
    stack.down()

A server starts only when requested. Stacks in different homes are independent and share one
download cache. Two processes that start the same home take turns, and the second finds everything
running. Servers outlive this process, unless the stack is tied to it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from cdc.errors import LocalStackError
from cdc.playground.servers.home import Home
from cdc.playground.servers.kafka import Kafka
from cdc.playground.servers.opensearch import OpenSearch
from cdc.playground.servers.postgres import Postgres
from cdc.playground.servers.process import kill_session
from cdc.playground.servers.redis import Redis
from cdc.playground.servers.server import EmbeddedServer
from cdc.runtime.artifacts import ArtifactCache, default_cache
from cdc.runtime.progress import Progress

Settings = Mapping[str, Mapping[str, str]]

SERVERS: Final[dict[str, type[EmbeddedServer]]] = {
    "postgres": Postgres,
    "kafka": Kafka,
    "redis": Redis,
    "opensearch": OpenSearch,
}
DEFAULT_SERVERS: Final = ("postgres", "kafka")


@dataclass(frozen=True)
class Endpoints:
    """The addresses for clients; None where a server is not running."""

    postgres_dsn: str | None = None
    kafka_bootstrap: str | None = None
    redis_url: str | None = None
    opensearch_url: str | None = None


@dataclass(frozen=True)
class ServerStatus:
    """One line of `cdc local status`."""

    name: str
    version: str
    running: bool
    pid: int | None
    url: str | None
    memory_mb: float | None
    log: str


class LocalStack:
    """The servers of one home."""

    def __init__(
        self,
        home: Path,
        *,
        progress: Progress | None = None,
        tied: bool = False,
    ) -> None:
        """Nothing is started or written yet. A tied stack is stopped when this process ends."""
        self.home = Home(home)
        self._progress = progress or Progress()
        self._tied = tied
        self._watcher: subprocess.Popen[bytes] | None = None
        store = ArtifactCache(default_cache(), self._progress)
        self._servers = {
            name: kind(self.home, store, self._progress) for name, kind in SERVERS.items()
        }

    def __getitem__(self, name: str) -> EmbeddedServer:
        try:
            return self._servers[name]
        except KeyError:
            raise LocalStackError(
                f"the embedded stack has no server {name!r}", hint=f"one of {', '.join(SERVERS)}"
            ) from None

    def up(
        self,
        names: Iterable[str] = DEFAULT_SERVERS,
        *,
        pg_major: int | None = None,
        settings: Settings | None = None,
    ) -> Endpoints:
        """Start these servers; those that already run are left unchanged.

        Settings are by server name and stored for later starts; a server that runs with other
        settings than the given ones is restarted.
        """
        servers = [self[name] for name in names]
        chosen = settings or {}
        versions = {} if pg_major is None else {"postgres": str(pg_major)}
        what = "waiting for another command that starts or stops it"
        with self.home.lock(partial(self._progress.step, "stack", what)):
            self._watch()
            pool = ThreadPoolExecutor(len(servers) or 1)
            try:
                started = [
                    pool.submit(server.start, versions.get(server.name), chosen.get(server.name))
                    for server in servers
                ]
                for each in started:
                    each.result()
            except KeyboardInterrupt:
                # The caller is about to exit, and a download may take minutes.
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            except Exception:
                pool.shutdown()  # the others continue, so that the next `up` finds them
                raise
            pool.shutdown()
        return self.endpoints()

    def start(self, name: str) -> None:
        """Start one server as it was: same version, settings, data and, if free, ports."""
        with self.home.lock():
            self[name].start()

    def stop(self, name: str) -> None:
        with self.home.lock():
            self[name].stop()

    def down(self) -> list[str]:
        """Stop every server and return the names of those that ran; kill what else is recorded."""
        if not self.home.path.exists():
            return []
        for file in self.home.run.glob("*.json"):
            process = self.home.state(file.stem).process
            if file.stem not in SERVERS and process.alive:
                kill_session(process.pid)
        with self.home.lock():
            running = [server for server in self._servers.values() if server.running]
            with ThreadPoolExecutor(len(running) or 1) as pool:
                for _ in pool.map(lambda server: server.stop(), running):
                    pass
            self._unwatch()
        return [server.name for server in running]

    def endpoints(self) -> Endpoints:
        urls = {name: each.url() for name, each in self._servers.items() if each.running}
        return Endpoints(
            postgres_dsn=urls.get("postgres"),
            kafka_bootstrap=urls.get("kafka"),
            redis_url=urls.get("redis"),
            opensearch_url=urls.get("opensearch"),
        )

    def status(self) -> list[ServerStatus]:
        return [_status(server) for server in self._servers.values()]

    def _watch(self) -> None:
        """Start a process that stops the stack when this process has ended."""
        if not self._tied or (self._watcher is not None and self._watcher.poll() is None):
            return
        self._watcher = subprocess.Popen(
            [sys.executable, "-m", "cdc.playground.servers.stack", str(self.home.path)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            # It must find this package even where it is not installed.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def _unwatch(self) -> None:
        if self._watcher is not None:
            self._watcher.terminate()
            self._watcher.communicate()
            self._watcher = None


def _status(server: EmbeddedServer) -> ServerStatus:
    state = server.state
    running = state.process.alive
    if running:
        server.home.rotate_log(server.name)
    return ServerStatus(
        name=server.name,
        version=state.version or server.default_version,
        running=running,
        pid=state.pid if running else None,
        url=server.url() if running else None,
        memory_mb=round(state.process.memory_bytes() / 1e6, 1) if running else None,
        log=str(server.home.log(server.name)),
    )


if __name__ == "__main__":
    # A tied stack's watcher: only the process that the stack is tied to writes to this pipe, which
    # therefore closes with it, also by SIGKILL.
    sys.stdin.buffer.read()
    LocalStack(Path(sys.argv[1])).down()
