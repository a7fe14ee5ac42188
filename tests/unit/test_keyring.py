"""The keyring file: its keys are the same for every process, and a deleted one is nowhere."""

from __future__ import annotations

import multiprocessing
import sqlite3
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from cdc.config.keyring import KeyringConfig
from cdc.errors import ConfigError, UnavailableError
from cdc.keyring import file, opening
from cdc.keyring.ciphers import Ciphers, given_subject, subject_of
from cdc.keyring.contract import KEY_BYTES, KEY_NUMBER_BYTES, Key

ADA = subject_of("user", b"7")
EVE = subject_of("user", b"8")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "keys.sqlite"
    file.create(place)
    return place


def encrypted(ciphers: Ciphers, subject: bytes, text: bytes) -> str:
    found = ciphers.encryptor("user")(subject, text)
    assert found[:5] == b'"enc:'
    return found.decode().strip('"')


def every_byte(path: Path) -> bytes:
    """Return what is in the keyring's folder, its WAL included."""
    return b"".join(each.read_bytes() for each in sorted(path.parent.iterdir()))


@pytest.mark.parametrize("text", ["", "ada@example.com", 'Zoë \\ " \n 😀', "x" * 100_000])
def test_a_value_is_decrypted_as_it_was(path: Path, text: str) -> None:
    ciphers = Ciphers(file.FileKeyring(path))
    value = encrypted(ciphers, b"7", text.encode())
    assert ciphers.decrypt(value) == text
    assert value == encrypted(Ciphers(file.FileKeyring(path)), b"7", text.encode())
    assert value != encrypted(ciphers, b"8", text.encode())
    assert len(text) < 8 or text not in value
    assert ciphers.decrypt(None) is None


def test_kinds_of_subjects_have_keys_of_their_own(path: Path) -> None:
    ring = file.FileKeyring(path)
    assert ring.key_of(subject_of("user", b"7")) != ring.key_of(subject_of("firm", b"7"))
    assert ring.key_of(subject_of("a", b"bc")) != ring.key_of(subject_of("ab", b"c"))


def test_a_forgotten_subject_is_unreadable_and_gets_no_other_key(path: Path) -> None:
    ring = file.FileKeyring(path)
    ciphers = Ciphers(ring)
    ada, eve = encrypted(ciphers, b"7", b"ada"), encrypted(ciphers, b"8", b"eve")
    assert ring.forget(ADA)
    assert ciphers.decrypt(ada) is None
    # Until the next commit the deleted key may be used: nobody can read that, either.
    assert ciphers.decrypt(encrypted(ciphers, b"7", b"ada")) is None
    ciphers.make_durable()
    assert ciphers.encryptor("user")(b"7", b"ada") == b"null"
    assert ciphers.decrypt(eve) == "eve"
    assert not ring.forget(ADA)
    assert ring.counts() == (1, 1)


def test_another_process_is_noticed_at_the_next_commit(path: Path) -> None:
    ours, theirs = Ciphers(file.FileKeyring(path)), file.FileKeyring(path)
    encrypted(ours, b"7", b"ada")
    theirs.forget(ADA)
    ours.make_durable()
    assert ours.encryptor("user")(b"7", b"ada") == b"null"
    assert theirs.allow(ADA)
    assert not theirs.allow(ADA)
    ours.make_durable()
    assert ours.decrypt(encrypted(ours, b"7", b"ada again")) == "ada again"


def test_no_copy_of_a_deleted_key_is_left_in_the_file_or_its_wal(path: Path) -> None:
    ring = file.FileKeyring(path)
    keys = [ring.key_of(subject_of("user", b"%d" % each)) for each in range(500)]
    secrets = [key.secret for key in keys if key]
    ring.make_durable()
    assert all(each in every_byte(path) for each in secrets)
    for each in range(0, 500, 2):
        ring.forget(subject_of("user", b"%d" % each))
    left = [each in every_byte(path) for each in secrets]
    assert left == [False, True] * 250


def test_the_file_does_not_say_whose_keys_it_has(path: Path) -> None:
    ring = file.FileKeyring(path)
    ring.key_of(subject_of("user", b"ada.lovelace"))
    ring.forget(subject_of("user", b"eve.online"))
    assert b"lovelace" not in every_byte(path)
    assert b"online" not in every_byte(path)


def test_a_key_that_is_read_meanwhile_is_not_reported_as_overwritten(path: Path) -> None:
    """A reader holds the WAL: the key is deleted, and the error says that its copy is not."""
    ring = file.FileKeyring(path, busy_seconds=0.2)
    ring.key_of(ADA)
    ring.make_durable()
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("PRAGMA busy_timeout = 0")
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM keys").fetchall()
    with pytest.raises(UnavailableError, match="still in its WAL"):
        ring.forget(ADA)
    reader.close()
    assert not ring.forget(ADA)


def first_key(path: str) -> list[Key | None]:
    ring = file.FileKeyring(Path(path))
    return [ring.key_of(subject_of("user", b"%d" % each)) for each in range(200)]


def test_processes_and_threads_that_meet_a_subject_get_one_key(path: Path) -> None:
    with ProcessPoolExecutor(3, multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(first_key, [str(path)] * 3))
    assert found[0] == found[1] == found[2]
    ring = file.FileKeyring(path)
    with ThreadPoolExecutor(4) as threads:
        keys = list(threads.map(lambda _: ring.key_of(EVE), range(40)))
    assert len(set(keys)) == 1


def test_a_key_of_another_process_is_synced_by_all_who_use_it(path: Path) -> None:
    """The one that made it may not have come to its commit yet."""
    one, other = file.FileKeyring(path), file.FileKeyring(path)
    one.key_of(ADA)
    assert not syncs(path)
    other.key_of(ADA)
    other.make_durable()
    assert syncs(path) == 1
    for ring in (one, file.FileKeyring(path)):
        ring.key_of(ADA)
        ring.make_durable()
    assert syncs(path) == 2, "the one that made it does not know of the other's sync"
    file.FileKeyring(path).key_of(ADA)
    other.make_durable()
    assert syncs(path) == 2


def syncs(path: Path) -> int:
    with closing(sqlite3.connect(path)) as raw:
        ((found,),) = raw.execute("SELECT value FROM facts WHERE name = 'syncs'").fetchall()
    return int(found)


def test_a_process_that_dies_leaves_its_keys(path: Path) -> None:
    """A commit may already have what it encrypted."""
    first = file.FileKeyring(path)
    key = first.key_of(ADA)
    first.make_durable()
    del first  # nothing closed the file
    assert file.FileKeyring(path).key_of(ADA) == key


def test_a_keyring_is_never_made_by_itself_nor_replaced(tmp_path: Path) -> None:
    place = tmp_path / "keys.sqlite"
    with pytest.raises(ConfigError, match="there is no keyring") as raised:
        file.FileKeyring(place)
    assert "cdc keys create" in (raised.value.hint or "")
    assert not place.exists()
    file.create(place)
    assert place.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="exists already"):
        file.create(place)
    with pytest.raises(ConfigError, match="can't be created"):
        file.create(tmp_path / "no" / "folder")


def test_a_keyring_that_every_user_can_read_is_refused(path: Path) -> None:
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="every user can read"):
        file.FileKeyring(path)


@pytest.mark.parametrize("content", [b"", b"no database" * 100])
def test_another_file_is_no_keyring(tmp_path: Path, content: bytes) -> None:
    place = tmp_path / "other"
    place.write_bytes(content)
    place.chmod(0o600)
    with pytest.raises(ConfigError, match="no keyring"):
        file.FileKeyring(place)


def test_a_keyring_of_another_release_is_refused(path: Path) -> None:
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE facts SET value = x'32' WHERE name = 'format'")
    with pytest.raises(ConfigError, match="another release"):
        file.FileKeyring(path)


def test_what_is_no_value_of_this_keyring_is_an_error(path: Path) -> None:
    ciphers = Ciphers(file.FileKeyring(path))
    value = encrypted(ciphers, b"7", b"ada@example.com")
    for other in ("ada@example.com", "", "enc:", "enc:AAAA", value[:-4] + "!!!!"):
        with pytest.raises(ConfigError, match="not an encrypted value"):
            ciphers.decrypt(other)
    last = "AAAA" if value[-8:-4] != "AAAA" else "BBBB"
    with pytest.raises(ConfigError, match="was changed"):
        ciphers.decrypt(value[:-8] + last + value[-4:])


def test_a_value_of_another_keyring_is_not_taken_for_a_forgotten_one(
    path: Path, tmp_path: Path
) -> None:
    file.create(tmp_path / "other.sqlite")
    value = encrypted(Ciphers(file.FileKeyring(tmp_path / "other.sqlite")), b"7", b"ada")
    with pytest.raises(ConfigError, match="another keyring"):
        Ciphers(file.FileKeyring(path)).decrypt(value)


# --- a plugin ---


class InMemory:
    """A keyring of another package."""

    number = b"mem0"

    def __init__(self, options: dict[str, object]) -> None:
        self.options = options
        self.keys: dict[bytes, Key] = {}
        self.forgotten = 0
        self.synced = 0

    def key_of(self, subject: bytes) -> Key | None:
        number = b"%d" % len(self.keys)
        made = Key(number.rjust(KEY_NUMBER_BYTES), number.rjust(KEY_BYTES))
        return self.keys.setdefault(subject, made)

    def find(self, number: bytes) -> bytes | None:
        return {key.number: key.secret for key in self.keys.values()}.get(number)

    def make_durable(self) -> None:
        self.synced += 1

    def forget(self, subject: bytes) -> bool:
        self.forgotten += 1
        return self.keys.pop(subject, None) is not None

    def changes(self) -> int:
        return self.forgotten


def test_a_plugin_takes_the_place_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("memory", f"{__name__}:InMemory", "lockstep.keyrings")
    monkeypatch.setattr(opening, "entry_points", lambda **_: EntryPoints([entry]))
    options = {"url": "https://keys.example.com"}
    ring = opening.open_keyring(KeyringConfig(plugin="memory", options=dict(options)))
    assert isinstance(ring, InMemory)
    assert ring.options == options
    ciphers = Ciphers(ring)
    value = encrypted(ciphers, b"7", b"ada")
    ciphers.make_durable()
    assert (ciphers.decrypt(value), ring.synced) == ("ada", 1)
    ring.forget(ADA)
    assert ciphers.decrypt(value) is None


def test_a_plugin_that_no_package_has_is_named() -> None:
    with pytest.raises(ConfigError, match="no packages have the keyring vault"):
        opening.open_keyring(KeyringConfig(plugin="vault"))


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_a_file_that_is_no_longer_the_one_that_is_open_is_used_no_more(
    path: Path, change: str
) -> None:
    """A key that only the open file has could never be found again, and none be forgotten."""
    ciphers = Ciphers(file.FileKeyring(path))
    value = encrypted(ciphers, b"7", b"text")
    ciphers.make_durable()
    path.unlink()
    if change == "replaced":
        file.create(path)
    encrypted(ciphers, b"8", b"text")
    with pytest.raises(ConfigError, match=f"was {change} while"):
        ciphers.make_durable()
    with pytest.raises(ConfigError, match=f"was {change} while"):
        ciphers.decrypt(value)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        *(("7", b"7"), ("007", b"7"), (" 7 ", b"7"), ("+7", b"7"), ("-7", b"-7"), ("", b"")),
        ("6B29FC40-CA47-1067-B31D-00DD010662DA", b"6b29fc40-ca47-1067-b31d-00dd010662da"),
        ("{6b29fc40ca471067b31d00dd010662da}", b"6b29fc40-ca47-1067-b31d-00dd010662da"),
    ],
)
def test_a_subject_is_found_however_it_is_written(given: str, text: bytes) -> None:
    assert given_subject("user", given) == subject_of("user", text)


@pytest.mark.parametrize("given", ["ada", "7.0", "7_000", "7-8", "6b29fc40", "1" * 20])
def test_what_is_no_subject_is_not_reported_as_forgotten(given: str) -> None:
    with pytest.raises(ConfigError, match="neither an integer nor a uuid"):
        given_subject("user", given)
