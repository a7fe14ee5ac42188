"""Commits to the archive's table, while another process commits to it or storage fails."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from random import Random

import pytest
from deltalake import DeltaTable

from cdc.errors import CDCError, Policy, StoreLostError, UnavailableError
from lockstep.jobs.archiving import table, upkeep
from lockstep.jobs.archiving.running import opened
from lockstep.jobs.archiving.table import ArchiveTable
from lockstep.jobs.archiving.upkeep import ArchiveUpkeep
from lockstep.sinks.delta import log
from lockstep.sinks.delta.actions import Files
from lockstep.sinks.delta.lake import ConflictError
from tests.property.archived_world import ArchivedWorld, configured
from tests.property.test_reduce import made


@pytest.fixture
def archived(tmp_path: Path) -> ArchivedWorld:
    """Return an archive of two cuts."""
    world = made(Random(0), 8, 1 << 24, started=True, widened=False)
    found = ArchivedWorld(configured(tmp_path), world)
    found.archive_upto(1)
    found.archive_upto(2)
    return found


def after_its_put(files: Files, monkeypatch: pytest.MonkeyPatch, do: Callable[[], None]) -> None:
    """Call `do` once, directly after the next file that must not exist was written."""
    put_new = files.put_new

    def put(name: str, data: bytes) -> str | None:
        tag = put_new(name, data)
        monkeypatch.setattr(files, "put_new", put_new)
        do()
        return tag

    monkeypatch.setattr(files, "put_new", put)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_commit_right_after_ours_conflicts_with_our_next_one(
    archived: ArchivedWorld, monkeypatch: pytest.MonkeyPatch, *, checkpoints: bool
) -> None:
    ours, position = archived.archive, archived.position
    theirs: ArchiveTable = opened(archived.config)
    version = ours.table.version() + 1
    if checkpoints:
        monkeypatch.setattr(table, "CHECKPOINT_EVERY", version)

    def commit_theirs() -> None:
        assert theirs.open() == position
        theirs.commit([], position, "OPTIMIZE")

    after_its_put(ours.files, monkeypatch, commit_theirs)
    ours.commit([], position, "OPTIMIZE")
    assert (ours.table.version(), theirs.table.version()) == (version, version + 1)
    assert ours.newest_commit().version == version
    with pytest.raises(ConflictError):
        ours.commit([], position, "OPTIMIZE")
    assert ours.find()
    assert ours.table.version() == version + 1
    ours.commit([], position, "OPTIMIZE")


def refused(*_: object) -> None:
    raise PermissionError(13, "Permission denied")


def test_storage_that_fails_for_a_while_halts_nothing(
    archived: ArchivedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, position = archived.archive, archived.position
    keeper = ArchiveUpkeep(archive, archived.config.archive)
    version = archive.table.version()

    def expect_unavailable(do: Callable[[], object]) -> None:
        with pytest.raises(UnavailableError, match="permission denied") as caught:
            do()
        assert caught.value.policy is Policy.BACKOFF

    with monkeypatch.context() as patched:
        patched.setattr(log, "files", refused)
        expect_unavailable(archive.added)
        expect_unavailable(lambda: keeper.join(position))
        expect_unavailable(lambda: archive.delete_unnamed((), datetime.now(UTC)))
        expect_unavailable(lambda: archive.removed_since(datetime.now(UTC)))
    with monkeypatch.context() as patched:
        patched.setattr(DeltaTable, "update_incremental", refused)
        expect_unavailable(lambda: archive.commit([], position, "OPTIMIZE"))
    assert archive.find()
    assert archive.table.version() == version + 1, "it was committed"


def test_small_files_that_were_erased_meanwhile_are_listed_again(
    archived: ArchivedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "FEWEST", 1)
    archive, position, theirs = archived.archive, archived.position, opened(archived.config)
    keeper = ArchiveUpkeep(archive, archived.config.archive)
    name = min(archive.added())
    text = archive.read(name)

    def expect_repeated(of: type[CDCError]) -> None:
        with pytest.raises(of) as caught:
            keeper.join(position)
        assert caught.value.policy is Policy.BACKOFF

    (Path(archive.path) / name).unlink()
    expect_repeated(StoreLostError)
    theirs.open()
    theirs.commit([], position, "ERASE")
    expect_repeated(ConflictError)
    (Path(archive.path) / name).write_bytes(text)
    assert archive.find()
    assert keeper.join(position) == len(theirs.added())


def test_commits_that_an_erasure_deletes_meanwhile_are_a_conflict(
    archived: ArchivedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, position, theirs = archived.archive, archived.position, opened(archived.config)
    theirs.open()
    read = archive.read

    def forget_first(name: str) -> bytes:
        if theirs.table.version() == archive.table.version():
            theirs.forget_versions(partial(theirs.commit, [], position, "ERASE"))
        return read(name)

    monkeypatch.setattr(archive, "read", forget_first)
    with pytest.raises(ConflictError):
        archive.removed_since(datetime.fromtimestamp(0, UTC))

    def deleted(_: DeltaTable) -> log.Added:
        raise FileNotFoundError

    monkeypatch.setattr(log, "added", deleted)
    with pytest.raises(ConflictError):
        archive.added()


def test_a_file_that_another_process_deletes_first_is_deleted(
    archived: ArchivedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, unnamed = archived.archive, Path(archived.archive.path) / "part-0.zstd.parquet"
    unnamed.write_bytes(b"")
    needed, later = archive.added().keys(), datetime.now(UTC) + timedelta(hours=1)

    class Racing:
        def __init__(self, of: DeltaTable) -> None:
            self._files = files(of)

        def get_file_info(self, selector: object) -> object:
            return self._files.get_file_info(selector)

        def delete_file(self, path: str) -> None:
            unnamed.unlink()
            self._files.delete_file(path)

    files = log.files
    monkeypatch.setattr(log, "files", Racing)
    assert archive.delete_unnamed(needed, later) == 1
    assert not unnamed.exists()
