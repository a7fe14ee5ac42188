"""An erasure during a compaction: the base that is made does not have the erased row."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from cdc.config import Config
from cdc.errors import ConfigError
from lockstep.jobs.archiving import erasing
from lockstep.jobs.archiving.erasing import Place, Subject
from lockstep.jobs.archiving.running import opened
from lockstep.jobs.archiving.table import ArchiveTable
from lockstep.jobs.compacting import erasing as bases_erasing
from lockstep.jobs.compacting import frontiers, layout, proving
from lockstep.jobs.compacting.bases import Bases, bases_of
from lockstep.jobs.compacting.layout import BaseRecord
from lockstep.jobs.compacting.running import Compaction
from lockstep.sinks.delta import lake
from lockstep.sinks.delta.lake import ConflictError
from tests.property.archived_world import ArchivedWorld, configured
from tests.property.followed_world import USERS
from tests.property.test_reduce import made


class Erased:
    """Erases a deleted row; the files that are replaced stay, which an erasure deletes last."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.places = set[Place]()

    def run(self) -> None:
        """Erase it, the first time that it is called."""
        archive = opened(self._config)
        assert archive.find()
        if self.places:
            return
        subject = self._deleted(archive)
        assert erasing.erase(self._config, archive, subject, lambda: subject) is not None
        archive.find()
        self.places = erasing.places(archive)
        bases_erasing.erase(self._config, self.places)

    def _deleted(self, archive: ArchiveTable) -> Subject:
        where = f"topic = '{USERS}' AND op = 'd'"
        for key in sorted(set(lake.read(archive.table, ["key"], where)["key"].to_pylist())):
            try:
                return erasing.find(self._config, archive, USERS, [key])
            except ConfigError:
                continue  # the row was inserted again
        raise AssertionError("the world has a deleted row")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return configured(tmp_path)


@pytest.fixture
def archived(config: Config) -> ArchivedWorld:
    world = made(Random(2), 12, 1 << 24, started=True, widened=False)
    return ArchivedWorld(config, world)


def _expect_erased(config: Config, places: set[Place]) -> None:
    bases = bases_of(config)
    assert bases.find()
    rows = lake.read(bases.table, layout.SCHEMA.names).to_pylist()
    assert rows
    assert not places & {(each["topic"], each["partition"], each["offset"]) for each in rows}
    proof = proving.prove(config, {})
    assert proof is not None
    assert proof.findings == ()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_compaction_sees_an_erasure_from_before_it_loads_the_bases(
    config: Config, archived: ArchivedWorld, monkeypatch: pytest.MonkeyPatch, *, is_first: bool
) -> None:
    last, erased, create = len(archived.world.frontiers), Erased(config), Bases.create
    if not is_first:
        archived.archive_upto(last - 1)
        Compaction(config, None).run()
    archived.archive_upto(last)

    def after_erasure(bases: Bases) -> None:
        erased.run()
        create(bases)

    monkeypatch.setattr(Bases, "create", after_erasure)
    Compaction(config, None).run()
    _expect_erased(config, erased.places)


def test_a_first_compaction_conflicts_with_an_erasure_from_after_it_has_loaded_the_bases(
    config: Config, archived: ArchivedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    erased, newest = Erased(config), frontiers.newest
    archived.archive_upto(len(archived.world.frontiers))

    def after_erasure(*given: object) -> object:
        erased.run()
        return newest(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(frontiers, "newest", after_erasure)
    with pytest.raises(ConflictError):
        Compaction(config, None).run()
    Compaction(config, None).run()
    _expect_erased(config, erased.places)


def test_a_proof_of_bases_that_an_erasure_replaces_meanwhile_starts_again(
    config: Config, archived: ArchivedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    archived.archive_upto(len(archived.world.frontiers))
    Compaction(config, None).run()
    erased, kept = Erased(config), Bases.kept

    def before_erasure(bases: Bases, many: int) -> list[BaseRecord]:
        found = kept(bases, many)
        erased.run()
        return found

    monkeypatch.setattr(Bases, "kept", before_erasure)
    proof = proving.prove(config, {})
    assert erased.places
    assert proof is not None
    assert proof.number > 1, "it is the base that the erasure has made"
    assert proof.findings == ()
