"""Which files of bases are deleted: none that the newest base has, whatever can't be read."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest

from cdc.errors import UnavailableError
from lockstep.jobs.compacting import proving
from lockstep.jobs.compacting.bases import Bases, bases_of
from lockstep.jobs.compacting.running import Compaction
from tests.property.archived_world import ArchivedWorld, configured
from tests.property.test_reduce import made


@pytest.fixture
def bases(tmp_path: Path) -> Bases:
    """Return one base, whose files are older than the grace time."""
    config = configured(tmp_path)
    world = made(Random(0), 8, 1 << 24, started=True, widened=False)
    ArchivedWorld(config, world).archive_upto(len(world.frontiers))
    Compaction(config, None).run()
    found = bases_of(config)
    assert found.find()
    for name in found.added():
        os.utime(Path(found.path) / name, (0, 0))
    return found


def _commit(bases: Bases) -> Path:
    return Path(bases.path) / f"_delta_log/{bases.table.version():020d}.json"


def _stored(bases: Bases) -> set[str]:
    return {path.name for path in Path(bases.path).glob("*.parquet")}


def test_a_commit_that_can_t_be_read_is_no_missing_one(bases: Bases) -> None:
    added, commit = bases.added().keys(), _commit(bases)
    text = commit.read_bytes()
    commit.unlink()
    commit.symlink_to(commit)  # reading it fails, also as root
    with pytest.raises(UnavailableError, match=commit.name):
        bases.vacuum(1)
    assert _stored(bases) == added
    commit.unlink()
    commit.write_bytes(text)
    assert len(bases.kept(1)) == 1
    assert bases.vacuum(1) == 0


def test_files_of_the_newest_version_stay_though_its_commit_is_not_ours(bases: Bases) -> None:
    commit = _commit(bases)
    commit.write_text(commit.read_text().replace("userMetadata", "otherMetadata", 1))
    assert bases.kept(1) == []
    assert bases.vacuum(1) == 0
    assert _stored(bases) == bases.added().keys() != set()


def test_deletes_that_the_base_before_has_dropped_are_no_difference_once_they_are_kept_longer(
    tmp_path: Path,
) -> None:
    world = made(Random(2), 12, 1 << 24, started=True, widened=False)
    short = configured(tmp_path, tombstone_hours=0.0)
    archived = ArchivedWorld(short, world)
    archived.archive_upto(len(world.frontiers) - 1)
    before, _ = Compaction(short, None).run()
    archived.archive_upto(len(world.frontiers))
    longer = configured(tmp_path, tombstone_hours=168.0)
    after, _ = Compaction(longer, None).run()
    assert after.deletes_since_us == before.deletes_since_us
    proof = proving.prove(longer, {})
    assert proof is not None
    assert proof.findings == ()
