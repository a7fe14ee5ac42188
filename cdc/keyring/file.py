"""The keyring that is a local file: SQLite, which several processes of one machine share.

It never appears by itself: `create` makes it, and `FileKeyring` raises ConfigError where there is
none. A lost keyring would otherwise be replaced by an empty one, and nobody would notice.

A new key is written at once, so that every process sees it, and synced by `make_durable`, before
the first event that it encrypts is committed: thousands of new subjects in one batch cost one sync.
A synced commit in SQLite's WAL makes all earlier ones durable (https://sqlite.org/wal.html).

Subjects are stored as an HMAC whose key is in the file: without the file, nobody learns whether
somebody is in it.
"""

from __future__ import annotations

import hmac
import os
import sqlite3
import stat
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cdc.errors import ConfigError, UnavailableError
from cdc.keyring.contract import (
    KEY_BYTES,
    KEY_NUMBER_BYTES,
    KEYRING_NUMBER_BYTES,
    Key,
    KeyCounts,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_FORMAT: Final = b"1"
_BUSY_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.05
_TABLES: Final = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE keys (
    subject BLOB PRIMARY KEY, number BLOB NOT NULL UNIQUE, secret BLOB NOT NULL,
    syncs INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE forgotten (subject BLOB PRIMARY KEY, at INTEGER NOT NULL) WITHOUT ROWID;
"""
_SYNCS: Final = "(SELECT value FROM facts WHERE name = 'syncs')"
# A key is on disk once there was a sync after it, by any process.
_FIND: Final = f"SELECT number, secret, syncs < {_SYNCS} FROM keys WHERE subject = ?"  # noqa: S608 - our own
# A transaction of its own.
_ADD: Final = f"""
INSERT OR IGNORE INTO keys SELECT :subject, :number, :secret, {_SYNCS}
WHERE NOT EXISTS (SELECT 1 FROM forgotten WHERE subject = :subject)
"""  # noqa: S608 - our own


def create(path: Path) -> None:
    """Make an empty keyring, readable by its owner only; raise ConfigError if the file exists."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        raise ConfigError(
            f"{path} exists already", hint="a keyring is never replaced: move the file away first"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path} can't be created: {error.strerror}",
            hint="keyring.path names a file in a folder that exists",
        ) from error
    facts = {
        "format": _FORMAT,
        "number": os.urandom(KEYRING_NUMBER_BYTES),
        "secret": os.urandom(KEY_BYTES),
        "changes": 0,
        "syncs": 0,
    }
    with _translated(path), closing(_connect(path)) as file:
        # Small pages: a new key writes two of them.
        file.execute("PRAGMA page_size = 1024")
        file.execute("PRAGMA journal_mode = WAL")
        file.executescript(f"BEGIN; {_TABLES}")
        file.executemany("INSERT INTO facts VALUES (?, ?)", facts.items())
        file.execute("COMMIT")


class FileKeyring:
    """A keyring in a file; see `cdc.keyring.contract.Keyring`."""

    def __init__(self, path: Path, busy_seconds: float = _BUSY_SECONDS) -> None:
        """Open it; raise ConfigError if there is none, or others may read it.

        Another process is waited for as long as `busy_seconds`.
        """
        try:
            there = path.stat()
        except OSError as error:
            raise ConfigError(
                f"there is no keyring at {path}: {error.strerror}",
                hint="`cdc keys create` makes the first one. If it was lost, restore it from a"
                " backup: without its keys nothing that they encrypted can be read. A keyring file"
                " is on one machine; workers on others need a plugin (docs/ENCRYPTION.md)",
            ) from error
        if there.st_mode & (stat.S_IROTH | stat.S_IWOTH):
            raise ConfigError(f"every user can read the keys in {path}", hint=f"chmod 600 {path}")
        self._path, self._busy_seconds = path, busy_seconds
        self._identity = there.st_dev, there.st_ino
        self._lock = threading.Lock()
        self._is_durable = True
        with _translated(path):
            self._file = _connect(path, busy_seconds)
            is_ours = self._rows("SELECT 1 FROM sqlite_master WHERE name = 'facts'")
            facts = dict(self._rows("SELECT name, value FROM facts") if is_ours else ())
        if not is_ours:
            raise ConfigError(f"{path} is no keyring", hint="restore it from a backup")
        if facts.get("format") != _FORMAT:
            raise ConfigError(
                f"{path} is a keyring of another release", hint="use the release that wrote it"
            )
        self.number: bytes = facts["number"]
        self._secret: bytes = facts["secret"]

    def key_of(self, subject: bytes) -> Key | None:
        hashed = self._hashed(subject)
        with self._lock, _translated(self._path):
            if (found := self._found(hashed)) is not None:
                return found
            made = Key(os.urandom(KEY_NUMBER_BYTES), os.urandom(KEY_BYTES))
            if self._file.execute(_ADD, {"subject": hashed, **made._asdict()}).rowcount:
                self._is_durable = False
                return made
            # Another process was first, or the subject is forgotten.
            return self._found(hashed)

    def _found(self, hashed: bytes) -> Key | None:
        for number, secret, is_durable in self._rows(_FIND, hashed):
            self._is_durable &= bool(is_durable)
            return Key(number, secret)
        return None

    def find(self, number: bytes) -> bytes | None:
        self._expect_same_file()
        with self._lock, _translated(self._path):
            found = self._rows("SELECT secret FROM keys WHERE number = ?", number)
        return found[0][0] if found else None

    def make_durable(self) -> None:
        self._expect_same_file()
        with self._lock, _translated(self._path):
            if not self._is_durable:
                self._synced("UPDATE facts SET value = value + 1 WHERE name = 'syncs'")
                self._is_durable = True

    def _expect_same_file(self) -> None:
        """Raise ConfigError unless the open file is still the one that others open by its path."""
        try:
            there = self._path.stat()
        except OSError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != self._identity:
            raise ConfigError(
                f"the keyring {self._path} was {'replaced' if there else 'removed'} while this"
                " process had it open: keys that it makes now would be lost",
                hint="see that the file there has all keys, then start this process again",
            )

    def forget(self, subject: bytes) -> bool:
        hashed = self._hashed(subject)
        with self._lock, _translated(self._path):
            had_key = bool(self._rows("SELECT 1 FROM keys WHERE subject = ?", hashed))
            self._synced(
                "DELETE FROM keys WHERE subject = :subject",
                "INSERT OR IGNORE INTO forgotten VALUES (:subject, :at)",
                "UPDATE facts SET value = value + 1 WHERE name = 'changes'",
                subject=hashed,
                at=int(time.time()),
            )
            self._overwrite()
        return had_key

    def allow(self, subject: bytes) -> bool:
        hashed = self._hashed(subject)
        with self._lock, _translated(self._path):
            was = bool(self._rows("SELECT 1 FROM forgotten WHERE subject = ?", hashed))
            self._synced(
                "DELETE FROM forgotten WHERE subject = :subject",
                "UPDATE facts SET value = value + 1 WHERE name = 'changes'",
                subject=hashed,
            )
        return was

    def counts(self) -> KeyCounts:
        with self._lock, _translated(self._path):
            ((keys, forgotten),) = self._rows(
                "SELECT (SELECT count(*) FROM keys), (SELECT count(*) FROM forgotten)"
            )
        return KeyCounts(keys, forgotten)

    def changes(self) -> int:
        with self._lock, _translated(self._path):
            ((changes,),) = self._rows("SELECT value FROM facts WHERE name = 'changes'")
        return int(changes)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _overwrite(self) -> None:
        """Leave no copy of a deleted key in the file, nor in its WAL."""
        deadline = time.monotonic() + self._busy_seconds
        while True:
            ((busy, *_),) = self._rows("PRAGMA wal_checkpoint(TRUNCATE)")
            if not busy:
                return
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"the key is deleted, but another process reads {self._path}: a copy of the"
                    " key is still in its WAL",
                    hint="run the command again",
                )
            time.sleep(_POLL_SECONDS)

    def _synced(self, *statements: str, **values: object) -> None:
        """Execute them in one transaction that is on disk afterwards."""
        self._file.execute("PRAGMA synchronous = FULL")
        try:
            with self._writing():
                for each in statements:
                    self._file.execute(each, values)
        finally:
            self._file.execute("PRAGMA synchronous = NORMAL")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._file.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._file.execute("COMMIT")
        except BaseException:
            if self._file.in_transaction:
                self._file.execute("ROLLBACK")
            raise

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        # All of them at once: a statement that is not read to its end keeps the file locked.
        return self._file.execute(query, values).fetchall()

    def _hashed(self, subject: bytes) -> bytes:
        return hmac.digest(self._secret, subject, "sha256")


def _connect(path: Path, busy_seconds: float = _BUSY_SECONDS) -> sqlite3.Connection:
    file = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw", timeout=busy_seconds, isolation_level=None,
        check_same_thread=False, uri=True,
    )  # fmt: skip
    # Pages are seldom moved from the WAL into the file: each time takes two syncs.
    for pragma in ("wal_autocheckpoint = 20000", "synchronous = NORMAL", "secure_delete = ON"):
        file.execute(f"PRAGMA {pragma}")
    return file


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise UnavailableError(
            f"the keyring {path} can't be used now: {error}",
            hint="see the file, its folder's rights, and the free space",
        ) from error
    except sqlite3.DatabaseError as error:
        raise ConfigError(
            f"{path} is no keyring: {error}", hint="restore it from a backup"
        ) from error
