"""One server as a plain process: prepared, started, found again, stopped, killed.

The common part of the four servers. A start is complete when the server answers; a start that fails
shows the end of its log. The server keeps its ports and data over any stop, clean or not, unless
another process has taken a port meanwhile: then it gets another.

Callers hold the home's lock around start and stop. A kill takes no lock: tests use it on a busy
server.
"""

from __future__ import annotations

import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from cdc.errors import LocalStackError
from cdc.playground.servers import ports
from cdc.playground.servers.home import Home, ServerState
from cdc.playground.servers.process import spawn
from cdc.runtime.artifacts import ArtifactCache
from cdc.runtime.progress import Progress

_START_TRIES: Final = 3
_RETRY_SECONDS: Final = 0.5  # a dead server's children need a moment to notice that it is dead
_POLL_SECONDS: Final = 0.03
_PROBE_SECONDS: Final = 2.0


class EmbeddedServer(ABC):
    """A subclass defines what to run and when it is ready; this class owns the life cycle."""

    name: ClassVar[str]
    default_version: ClassVar[str]
    ports_needed: ClassVar[int] = 1
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    ready_seconds: ClassVar[float] = 120.0  # a loaded CI machine is ten times slower than a desktop
    stop_seconds: ClassVar[float] = 45.0
    # A start whose log ends with one of these is worth a retry.
    retried: ClassVar[tuple[str, ...]] = ("ddress already in use", "Address in use")

    def __init__(self, home: Home, cache: ArtifactCache, progress: Progress) -> None:
        self.home = home
        self.cache = cache
        self.progress = progress

    # What a subclass provides.

    @abstractmethod
    def prepare(self, state: ServerState) -> None:
        """Fetch and set up whatever the command needs; cheap when already done."""

    @abstractmethod
    def command(self, state: ServerState) -> list[str]:
        """Return the argument list that runs the server in the foreground."""

    @abstractmethod
    def is_ready(self, state: ServerState) -> bool:
        """Return whether the server answers. May raise OSError while it does not."""

    @abstractmethod
    def url(self) -> str:
        """Return the URL for clients."""

    def spawn_options(self) -> dict[str, Any]:
        return {}

    # The life cycle.

    @property
    def state(self) -> ServerState:
        return self.home.state(self.name)

    @property
    def data(self) -> Path:
        return self.home.data / self.name

    @property
    def running(self) -> bool:
        return self.state.process.alive

    @property
    def pid(self) -> int:
        state = self.state
        if not state.process.alive:
            raise LocalStackError(f"{self.name} is not running", hint="start it: cdc local up")
        return state.pid

    @property
    def port(self) -> int:
        return self.state.ports[0]

    def start(self, version: str | None = None, settings: Mapping[str, str] | None = None) -> None:
        """Run the server unless it runs; with other settings than before it is restarted."""
        state = self.state
        if state.process.alive:
            if version is not None and version != state.version:
                raise LocalStackError(
                    f"{self.name} {state.version} is running in {self.home.path}, not {version}",
                    hint="cdc local down, then up again; each version keeps its own data",
                )
            if settings is not None and dict(settings) != state.settings:
                self.stop()
            elif self._becomes_ready(state):
                return
        if settings is not None:
            state.settings = dict(settings)
        state.version = version or state.version or self.default_version
        self.prepare(state)
        for attempt in range(1, _START_TRIES + 1):
            self._choose_ports(state)
            self.home.rotate_log(self.name)
            began = time.monotonic()
            process = spawn(
                self.command(state),
                self.home.log(self.name),
                self.home.path,
                **self.spawn_options(),
            )
            state.pid, state.started = process.pid, process.started
            self.home.remember(self.name, state)
            if self._becomes_ready(state):
                seconds = time.monotonic() - began
                self.progress.step(self.name, f"up at {self.url()} in {seconds:.1f} s")
                return
            tail = self.home.tail(self.name)
            if attempt == _START_TRIES or not any(each in tail for each in self.retried):
                raise self._failed("ended while it was starting", tail)
            time.sleep(_RETRY_SECONDS)

    def stop(self) -> None:
        """End the server cleanly, or by SIGKILL if that takes too long."""
        process = self.state.process
        process.signal(self.stop_signal)
        if not process.wait(self.stop_seconds):
            self.kill()

    def kill(self) -> None:
        """SIGKILL the server and its child processes, as a crash would; wait until all ended."""
        process = self.state.process
        family = [process, *process.descendants()] if process.alive else []
        for each in family:
            each.signal(signal.SIGKILL)
        for each in family:
            each.wait(10)

    def _choose_ports(self, state: ServerState) -> None:
        """Keep the stored ports that are free, and choose the others again."""
        others = self.home.remembered_ports()
        kept = [port for port in state.ports if ports.is_free(port)]
        while len(kept) < self.ports_needed:
            kept.append(ports.choose(others | set(kept)))
        state.ports = kept

    def _becomes_ready(self, state: ServerState) -> bool:
        """Wait until the server answers; return False if it has ended instead, as when killed."""
        deadline = time.monotonic() + self.ready_seconds
        while time.monotonic() < deadline:
            if not state.process.alive:
                return False
            try:
                if self.is_ready(state):
                    return True
            except OSError:
                pass
            time.sleep(_POLL_SECONDS)
        self.kill()
        raise self._failed(
            f"gave no answer within {self.ready_seconds:.0f} s", self.home.tail(self.name)
        )

    def _failed(self, what: str, tail: str) -> LocalStackError:
        return LocalStackError(
            f"{self.name} {what}; the end of {self.home.log(self.name)}:\n{tail}",
            hint="fix what the log reports and run `cdc local up` again; if its data is damaged, "
            f"remove {self.data}* (the data is lost)",
        )


def probe(port: int, request: bytes) -> bytes:
    """Send a probe to a server on loopback and return the start of its reply."""
    with socket.create_connection((ports.LOOPBACK, port), _PROBE_SECONDS) as connection:
        connection.sendall(request)
        # Read everything that has arrived: unread data would make the close a reset.
        return connection.recv(64 * 1024)
