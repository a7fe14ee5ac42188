"""One stack's folder: data, logs, and what is stored about each server.

home/lock            held while servers are started or stopped, by one process at a time
home/run/NAME.json   pid, start time, ports, version and settings; written atomically
home/data/NAME/      the server's own data
home/log/NAME.log    its output, kept small by rotation
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from cdc.errors import LocalStackError
from cdc.playground.servers.process import ProcessId
from cdc.runtime.file_lock import file_lock

LOG_LIMIT_BYTES: Final = 10 * 1024 * 1024  # enough for a day of warnings
_LOGS_KEPT: Final = 3
_LOCK_TIMEOUT_SECONDS: Final = 300.0  # a first start downloads while it holds the lock


@dataclass
class ServerState:
    """What is stored about a server between two runs of the command."""

    pid: int = 0
    started: str = ""
    ports: list[int] = field(default_factory=list)
    version: str = ""
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def process(self) -> ProcessId:
        return ProcessId(self.pid, self.started)


class Home:
    """Paths and stored state below one folder. Servers write only below it."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.run = self.path / "run"
        self.logs = self.path / "log"
        self.data = self.path / "data"

    def make(self) -> None:
        try:
            for folder in (self.path, self.run, self.logs, self.data):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LocalStackError(
                f"the stack's folder {self.path} cannot be created: {error.strerror}",
                hint="choose another with --home or LOCKSTEP_HOME",
            ) from error

    def state(self, name: str) -> ServerState:
        try:
            return ServerState(**json.loads((self.run / f"{name}.json").read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            # Only a file system that lost power leaves half a file; then the server's data decides.
            return ServerState()

    def remember(self, name: str, state: ServerState) -> None:
        target = self.run / f"{name}.json"
        part = target.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(asdict(state), indent=2), encoding="utf-8")
        part.replace(target)

    def remembered_ports(self) -> set[int]:
        return {port for file in self.run.glob("*.json") for port in self.state(file.stem).ports}

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def tail(self, name: str, lines: int = 20) -> str:
        try:
            with self.log(name).open(encoding="utf-8", errors="replace") as file:
                return "".join(deque(file, lines)).rstrip()
        except FileNotFoundError:
            return ""

    def rotate_log(self, name: str) -> None:
        """Rotate a large log: by copy and truncate, since a running server keeps it open."""
        log = self.log(name)
        if not log.exists() or log.stat().st_size < LOG_LIMIT_BYTES:
            return
        for number in range(_LOGS_KEPT - 1, 0, -1):
            older = log.with_name(f"{log.name}.{number}")
            if older.exists():
                older.replace(log.with_name(f"{log.name}.{number + 1}"))
        log.with_name(f"{log.name}.1").write_bytes(log.read_bytes())
        os.truncate(log, 0)

    @contextmanager
    def lock(self, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """Lock the stack: only one process at a time starts or stops servers here."""
        self.make()
        with file_lock(self.path / "lock", _LOCK_TIMEOUT_SECONDS, waiting):
            yield
