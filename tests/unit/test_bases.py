"""Which files of bases are deleted: none that the newest base has, whatever can't be read."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest

from cdc.config import Config
from cdc.errors import UnavailableError
from lockstep.jobs.compacting import bases as bases_module
from lockstep.jobs.compacting import layout, past, proving
from lockstep.jobs.compacting.bases import Bases, bases_of
from lockstep.jobs.compacting.layout import BaseRecord
from lockstep.jobs.compacting.running import Compaction
from lockstep.sinks.delta import lake
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
        bases.vacuum()
    assert _stored(bases) == added
    commit.unlink()
    commit.write_bytes(text)
    assert len(bases.kept(1)) == 1
    assert bases.vacuum() == 0


def test_files_of_the_newest_version_stay_though_its_commit_is_not_ours(bases: Bases) -> None:
    commit = _commit(bases)
    commit.write_text(commit.read_text().replace("userMetadata", "otherMetadata", 1))
    assert bases.kept(1) == []
    assert bases.vacuum() == 0
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


def _compacted(config: Config, many: int) -> list[BaseRecord]:
    """Make so many bases, each of files of its own that are old; return them."""
    world = made(Random(2), 12, 1 << 24, started=True, widened=False)
    archived, found = ArchivedWorld(config, world), []
    for upto in range(len(world.frontiers) - many + 1, len(world.frontiers) + 1):
        archived.archive_upto(upto)
        found.append(Compaction(config, None).run()[0])
        for path in Path(bases_of(config).path).glob("*.parquet"):
            os.utime(path, (0, 0))
    return found


def test_more_kept_bases_do_not_include_those_whose_files_were_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bases_module, "GRACE_HOURS", 0)
    *_, before, newest = _compacted(configured(tmp_path, bases_kept=1), 4)
    more = configured(tmp_path, bases_kept=4)
    proof = proving.prove(more, {})
    assert proof is not None
    assert (proof.findings, proof.bases) == ((), 2)
    assert newest.oldest == before.number
    state = past.find(more, before.applied.lsn)
    assert state is not None
    assert state.base == before


def test_a_base_that_is_no_longer_kept_can_be_read_for_an_hour(tmp_path: Path) -> None:
    first, second, third = _compacted(configured(tmp_path, bases_kept=1), 3)
    assert [each.oldest for each in (first, second, third)] == [1, 1, 1]
    bases = bases_of(configured(tmp_path))
    for record in (first, second, third):
        rows = lake.read(bases.version(record.number), layout.SCHEMA.names).cast(layout.SCHEMA)
        held = tuple(each for each in record.tables if each.rows)
        assert layout.total(layout.counted(rows)) == held
