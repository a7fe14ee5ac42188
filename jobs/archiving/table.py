"""The archive's Delta table: opened, created, and committed to, each commit with its digest.

A commit is one file of Delta's log that must not exist yet, written by us (`sinks.delta.actions`):
so of two copies of the archive one is first, and the other reads the table again. Its metadata has
the archive's position, and two digests: of the commit before it, as that is stored, and of itself,
computed with zeros in its own place. It has the digests of Delta's newest checkpoint, too. So no
byte of Delta's log changes unnoticed.
"""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from deltalake import DeltaTable
from pyarrow.fs import FileSelector

from cdc import failpoints
from cdc.errors import ConfigError, StoreLostError
from cdc.log.follower_reports import TableCommit
from lockstep.jobs.archiving import layout
from lockstep.jobs.archiving.writing import FILE_SUFFIX
from lockstep.sinks.delta import lake, log
from lockstep.sinks.delta.actions import Files
from lockstep.sinks.delta.lake import ConflictError
from lockstep.sinks.delta.layout import facts, metadata, struct

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from datetime import datetime

    from lockstep.jobs.archiving.layout import ArchivePosition
    from lockstep.sinks.delta.actions import Action

_ZEROS: Final = "0" * 64
_OWN: Final = re.compile(rb'("own\\*": \\*")[0-9a-f]{64}')
_LOG: Final = "_delta_log"
HINT: Final = "_last_checkpoint"
CHECKPOINT: Final = re.compile(r"\d{20}\.checkpoint\.")
_COMMIT: Final = re.compile(r"\d{20}\.json")
_PROPERTIES: Final = {"delta.appendOnly": "false"}
CHECKPOINT_EVERY: Final = 50
_RESTORE: Final = "restore it from a backup of the storage"


class ChainedTable:
    """A Delta table whose commits have digests of each other."""

    columns: Sequence[tuple[str, str]]
    about: str

    def __init__(self, path: str, storage: Mapping[str, str], pipeline: str) -> None:
        self.path, self.storage, self._pipeline = path, dict(storage), pipeline
        self.files = Files(path, storage)
        self._table: DeltaTable | None = None
        self._checkpoint: dict[str, str] | None = None  # None: not known
        self._newest: TableCommit | None = None  # None: not known

    @property
    def table(self) -> DeltaTable:
        """The table; available after `find` or `open`."""
        assert self._table is not None, "it was opened"
        return self._table

    def find(self) -> bool:
        """Load the table's newest version; return whether it exists."""
        self._table = lake.opened(self.path, self.storage)
        self._checkpoint = None  # another process may have replaced it
        return self._table is not None

    def newest_commit(self) -> TableCommit:
        """Return the loaded version's commit."""
        version = self.table.version()
        if self._newest is None or self._newest.version != version:
            text = self._read_log(f"{version:020d}.json")
            self._newest = TableCommit(version, sha256(text).hexdigest())
        return self._newest

    def create(self) -> None:
        """Load the table, create a missing one; it can then be written.

        Raises ConfigError if its storage would let two writers replace each other's commits.
        """
        if not self.find():
            lake.made(
                self.path,
                struct(self.columns, self.about),
                self.storage,
                properties=_PROPERTIES,
                facts={"pipeline": self._pipeline},
                about=f"lockstep {self.about}",
            )
            self.find()
        self._expect_conditional_puts()

    def _expect_conditional_puts(self) -> None:
        """Try to write the newest commit again, with the bytes that it has."""
        newest = f"{self.table.version():020d}.json"
        text = self._read_log(newest)
        try:
            self.files.put_new(f"{_LOG}/{newest}", text)
        except ConflictError:
            return
        raise ConfigError(
            f"the storage of {self.path} has no conditional puts: it replaced a file that exists",
            hint="use one that honours `If-None-Match: *`, as S3 does: without it two copies of"
            " the archive would replace each other's commits",
        )

    def stated(self) -> dict[str, Any]:
        """Return the facts in the newest commit of ours."""
        stated = lake.newest_facts(self.table)
        if not stated and self.table.version():
            raise StoreLostError(
                f"{self.path}: no commit of the {self.about} is left in Delta's log", hint=_RESTORE
            )
        owner = stated.get("pipeline", self._pipeline)
        if owner != self._pipeline:
            raise ConfigError(
                f"{self.path} is the {self.about} of pipeline {owner}",
                hint="give each pipeline an archive.path of its own",
            )
        return stated

    def commit_facts(
        self, actions: Sequence[Action], stated: Mapping[str, object], operation: str
    ) -> None:
        """Commit the version after the loaded one; raise ConflictError if it exists or existed.

        It is then the loaded one, also if another process has committed the next one meanwhile.
        """
        version = self.table.version() + 1
        if self._checkpoint is None:
            self._checkpoint = self._newest_checkpoint()
        # Last, directly before the put: an erasure deletes commits from the oldest on, so while the
        # loaded one is there, the next one was not deleted, and the put fails if it ever existed.
        before = self._read_log(f"{version - 1:020d}.json")
        about = dict(stated) | {
            "before": sha256(before).hexdigest(),
            "own": _ZEROS,
            "checkpoint": self._checkpoint,
        }
        now = int(time.time() * 1_000)
        info = {
            "timestamp": now,
            "operation": operation,
            "operationParameters": {},
            "isolationLevel": "Serializable",
            "isBlindAppend": operation == "WRITE",
            "engineInfo": "lockstep",
            "readVersion": version - 1,
            "userMetadata": metadata(**about),
        }
        lines: list[Action] = [{"commitInfo": info}, *actions]
        text = "\n".join(json.dumps(each, separators=(",", ":")) for each in lines).encode()
        text = _with_own(text, _digest(text))
        self.files.put_new(f"_delta_log/{version:020d}.json", text)
        self._newest = TableCommit(version, sha256(text).hexdigest())
        with lake.translated(self.path):
            self.table.update_incremental()
            if version % CHECKPOINT_EVERY == 0:
                self.table.create_checkpoint()
                self._checkpoint = None
            lake.return_to(self.table, version)

    def _newest_checkpoint(self) -> dict[str, str]:
        """Return the digests of the newest checkpoint's files, and of the file that names it."""
        names = [name for name in self.files.names(_LOG) if CHECKPOINT.match(name)]
        newest = max(names, default=HINT)
        mine = [name for name in names if name[:20] == newest[:20]] + [HINT] * bool(names)
        return {name: sha256(self._read_log(name)).hexdigest() for name in mine}

    def _read_log(self, name: str) -> bytes:
        """Return a file of Delta's log, as `read_named`."""
        return self.read_named(f"{_LOG}/{name}")

    def read_named(self, name: str) -> bytes:
        """Return a file that the loaded version has, of its data or of Delta's log.

        Raises ConflictError if it was deleted after a later commit, as an erasure does.
        """
        try:
            return self.read(name)
        except FileNotFoundError as error:
            newest = lake.opened(self.path, self.storage)
            if newest is not None and newest.version() > self.table.version():
                raise ConflictError(f"{self.path}: another commit was first") from error
            raise StoreLostError(f"{self.path}: {name} is missing", hint=_RESTORE) from error

    def read(self, name: str) -> bytes:
        """Return a file's bytes; raise FileNotFoundError if there is none, and no other OSError."""
        return self.files.read(name)

    def added(self) -> dict[str, dict[str, Any]]:
        """Return the add action of each file; ConflictError if only later versions are left."""
        with lake.translated(self.path):
            try:
                return log.added(self.table)
            except FileNotFoundError as error:  # an erasure deletes what it has listed
                raise ConflictError(f"{self.path}: another commit was first") from error

    def delete_unnamed(self, needed: Collection[str], oldest: datetime) -> int:
        """Delete data files that are older, and not `needed`; return how many.

        Without a commit: delta-rs' own vacuum writes some, which would have no digests.
        """
        with lake.translated(self.path):
            files = log.files(self.table)
            old = [
                each.path
                for each in files.get_file_info(FileSelector(""))
                if each.base_name.endswith(FILE_SUFFIX)
                and each.base_name not in needed
                and each.mtime < oldest
            ]
            for path in old:
                with suppress(FileNotFoundError):  # an erasure was first
                    files.delete_file(path)
        return len(old)

    def forget_versions(self, commit: Callable[[], None]) -> None:
        """Delete the versions before the loaded one from Delta's log; files stay.

        `commit` makes the next version, which has the digests of the new checkpoint. Old
        commits are deleted from the oldest on: so at each step the log is complete.
        """
        version, files = self.table.version(), log.files(self.table)
        with lake.translated(self.path):
            self.table.create_checkpoint()
        self._checkpoint = None
        failpoints.reach("erase_checkpoint")
        commit()
        failpoints.reach("erase_stated")
        for name in self.files.names(_LOG):
            is_old = _COMMIT.fullmatch(name) or CHECKPOINT.match(name)
            if is_old and int(name[:20]) < version:
                with lake.translated(self.path), suppress(FileNotFoundError):
                    files.delete_file(f"{_LOG}/{name}")  # unless another erasure was first
                failpoints.reach("erase_forgotten")

    def removed_since(self, oldest: datetime) -> set[str]:
        """Return the files that commits since then have removed."""
        found = set()
        for name in self._commits_since(oldest):
            for line in self._read_log(name).splitlines():
                if remove := json.loads(line).get("remove"):
                    found.add(remove["path"])
        return found

    def _commits_since(self, oldest: datetime) -> list[str]:
        with lake.translated(self.path):
            found = log.files(self.table).get_file_info(FileSelector(_LOG))
        return [
            each.base_name
            for each in found
            if _COMMIT.fullmatch(each.base_name) and each.mtime >= oldest
        ]


class ArchiveTable(ChainedTable):
    """One archive."""

    columns = layout.DELTA_COLUMNS
    about = "archive"

    def open(self) -> ArchivePosition:
        """Load the table, create a missing one; return its position."""
        self.create()
        return self.position()

    def position(self) -> ArchivePosition:
        """Return the position in the newest commit of ours."""
        return layout.position(self._pipeline, self.stated())

    def commit(self, actions: Sequence[Action], position: ArchivePosition, operation: str) -> None:
        """Commit the version after the loaded one; raise ConflictError if it exists."""
        self.commit_facts(actions, layout.facts(position), operation)


def check_commits(texts: Iterator[tuple[str, bytes]]) -> Iterator[tuple[str, str]]:
    """Yield the name of each altered commit, and what is wrong; `texts` are in their order.

    The commit that created the table, by delta-rs, has no digests; the next one has its own.
    """
    before: tuple[str, bytes] | None = None
    for name, text in texts:
        try:
            own, previous, version = _digests(text)
        except (ValueError, KeyError, TypeError, AttributeError):
            own = previous = None
            yield name, "can't be read: it was altered"
            before = None
            continue
        if own is not None and own != _digest(text):
            yield name, "is not what was written"
        elif own is not None and version != int(name[:20]):
            yield name, f"is the commit of version {version}"
        elif previous is not None and before and sha256(before[1]).hexdigest() != previous:
            yield before[0], "is not what the next commit continues"
        if own is None and int(name[:20]) > 0:
            yield name, "was not written by the archive"
        before = name, text


def _digests(text: bytes) -> tuple[str | None, str | None, int]:
    """Return a commit's own digest, that of the commit before, and its version."""
    about = json.loads(text.split(b"\n", 1)[0])["commitInfo"]
    stated = facts(about.get("userMetadata"))
    own, before = stated.get("own"), stated.get("before")
    version = int(about.get("readVersion", -1)) + 1
    return own and str(own), before and str(before), version  # type: ignore[return-value]


def _digest(text: bytes) -> str:
    """Return the digest that a commit has of itself."""
    return sha256(_with_own(text, _ZEROS)).hexdigest()


def _with_own(text: bytes, digest: str) -> bytes:
    return _OWN.sub(lambda match: match[1] + digest.encode(), text, count=1)


def commit_facts(text: bytes) -> dict[str, Any]:
    """Return what a commit states; nothing if it can't be read."""
    try:
        first = json.loads(text.split(b"\n", 1)[0])
        return facts(first["commitInfo"].get("userMetadata"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def stated_checkpoint(text: bytes) -> dict[str, str]:
    """Return the digests of checkpoint files that a commit states; none if it can't be read."""
    found = commit_facts(text).get("checkpoint")
    return found if isinstance(found, dict) else {}
