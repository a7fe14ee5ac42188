"""Commits to the archive's table, while another process commits to it or storage fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from lockstep.jobs.archiving import table
from lockstep.jobs.archiving.running import opened
from lockstep.jobs.archiving.table import ArchiveTable
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
