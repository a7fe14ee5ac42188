"""Fetch the servers' files: jars from a Maven repository, checked against our lock file.

A file appears under its name only when its sha256 is the locked one, so an existing file is
correct. An interrupted download resumes where it stopped. All stacks share one cache, and processes
that want the same section take turns.

Dependencies are not resolved: the lock lists every file. The repository is the Maven client's own
default, or LOCKSTEP_MAVEN.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Final

from cdc.errors import LocalStackError
from cdc.runtime import extras
from cdc.runtime.file_lock import file_lock
from cdc.runtime.progress import Progress

_PARALLEL: Final = 6  # downloads of one section
_TRIES: Final = 5
_TIMEOUT_SECONDS: Final = (15, 60)  # to connect, and between two pieces
_PIECE_BYTES: Final = 256 * 1024
_LOCK_TIMEOUT_SECONDS: Final = 900.0  # the time that a slow line needs for the largest section
_FETCHERS: Final = ("maven_artifact", "requests")
_NO_SUCH_FILE: Final = (403, 404, 410)


@dataclass(frozen=True)
class Artifact:
    """One locked file."""

    group: str
    name: str
    version: str
    size: int
    sha256: str

    @property
    def file_name(self) -> str:
        return f"{self.name}-{self.version}.jar"


@cache
def lock_sections() -> dict[str, tuple[Artifact, ...]]:
    return parse_lock(files("cdc.runtime").joinpath("artifacts.lock").read_text(encoding="utf-8"))


def parse_lock(text: str) -> dict[str, tuple[Artifact, ...]]:
    sections: dict[str, list[Artifact]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            rows = sections.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            coordinates, size, sha256 = line.split()
            group, name, version = coordinates.split(":")
            rows.append(Artifact(group, name, version, int(size), sha256))
    return {name: tuple(rows) for name, rows in sections.items()}


def default_cache() -> Path:
    if chosen := os.environ.get("LOCKSTEP_CACHE"):
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "lockstep"


class ArtifactCache:
    """The folder that all stacks share. Its files are complete and never change."""

    def __init__(self, root: Path, progress: Progress) -> None:
        self.root = root.absolute()
        self._progress = progress

    def fetch(self, section: str) -> Path:
        """Return the folder that holds exactly the section's files."""
        artifacts = lock_sections()[section]
        # A changed lock uses another folder: a class path must not mix two versions.
        digest = hashlib.sha256("".join(each.sha256 for each in artifacts).encode()).hexdigest()
        folder = self.root / f"{section}-{digest[:8]}"
        if not _missing(folder, artifacts):
            return folder
        with self._locked(section):
            folder.mkdir(parents=True, exist_ok=True)
            missing = _missing(folder, artifacts)
            extra = "spark" if section == "spark" else "local"  # both bring the Maven client
            extras.require("fetching jars", extra, only=_FETCHERS)
            self._progress.expect(sum(each.size for each in missing))
            with ThreadPoolExecutor(_PARALLEL) as pool:
                for _ in pool.map(lambda each: self._fetch_one(each, folder), missing):
                    pass
        return folder

    def derive(self, name: str, make: Callable[[Path], None]) -> Path:
        """Return the folder or file of this name; `make` creates it once, completely or not."""
        target = self.root / name
        if target.exists():
            return target
        with self._locked(name):
            if not target.exists():
                part = self.root / f"{name}.{os.getpid()}.part"
                make(part)
                part.rename(target)
        return target

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LocalStackError(
                f"the download folder {self.root} cannot be created: {error.strerror}",
                hint="choose another with LOCKSTEP_CACHE",
            ) from error
        waiting = partial(self._progress.step, name, "waiting for another process that fetches it")
        with file_lock(self.root / f"{name}.lock", _LOCK_TIMEOUT_SECONDS, waiting):
            yield

    def _fetch_one(self, artifact: Artifact, folder: Path) -> None:
        target = folder / artifact.file_name
        part = folder / f"{artifact.file_name}.part"
        for attempt in range(1, _TRIES + 1):
            try:
                self._download(artifact, part)
            except OSError as error:  # these include requests' errors
                if attempt == _TRIES or _is_final(error):
                    raise _not_fetched(artifact, str(error)) from error
                time.sleep(random.uniform(0.2, 0.5) * 2**attempt)  # noqa: S311 - jitter
                continue
            if _sha256(part) == artifact.sha256:
                part.replace(target)
                return
            self._progress.got(-part.stat().st_size)
            part.unlink()
        raise _not_fetched(artifact, "its sha256 is not the locked one")

    def _download(self, artifact: Artifact, part: Path) -> None:
        """Append what is missing. Where the server sends no partial content: download again."""
        import requests  # noqa: PLC0415 - costs 0.1 s, and most starts find all in the cache

        have = part.stat().st_size if part.exists() else 0
        headers = {"Range": f"bytes={have}-"} if 0 < have < artifact.size else {}
        with requests.get(
            _url(artifact), headers=headers, stream=True, timeout=_TIMEOUT_SECONDS
        ) as reply:
            reply.raise_for_status()
            resumed = reply.status_code == requests.codes.partial_content
            if resumed:
                self._progress.got(have)
            with part.open("ab" if resumed else "wb") as file:
                for piece in reply.iter_content(_PIECE_BYTES):
                    file.write(piece)
                    self._progress.got(len(piece))


def _url(artifact: Artifact) -> str:
    from maven_artifact import Artifact as Coordinates  # noqa: PLC0415 - as in _download
    from maven_artifact import Downloader  # noqa: PLC0415

    base = os.environ.get("LOCKSTEP_MAVEN")
    resolver = (Downloader(base=base) if base else Downloader()).resolver
    coordinates = Coordinates(artifact.group, artifact.name, artifact.version)
    return str(resolver.uri_for_artifact(coordinates))


def _missing(folder: Path, artifacts: tuple[Artifact, ...]) -> list[Artifact]:
    return [each for each in artifacts if not (folder / each.file_name).exists()]


def _is_final(error: OSError) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status in _NO_SUCH_FILE


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _not_fetched(artifact: Artifact, why: str) -> LocalStackError:
    return LocalStackError(
        f"{artifact.group}:{artifact.name}:{artifact.version} could not be fetched: {why}",
        hint="check the network and its proxy and try again (what has arrived is kept), or name a "
        "Maven mirror in LOCKSTEP_MAVEN",
    )
