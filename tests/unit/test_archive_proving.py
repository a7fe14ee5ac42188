"""What a proof finds while a job archives: the archive alone, without a broker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from msgspec.structs import replace

from cdc.errors import UnavailableError
from lockstep.jobs.archiving import delta_log, proving, stored
from lockstep.jobs.archiving.erasing import forget, read
from lockstep.jobs.archiving.rows import of_cut_record
from lockstep.jobs.archiving.running import opened
from lockstep.jobs.archiving.stored import Place
from lockstep.jobs.archiving.writing import removed, write
from tests.property.archived_world import ArchivedWorld, configured
from tests.property.stream import PREFIX
from tests.property.test_reduce import made


@pytest.fixture
def archived(tmp_path: Path) -> ArchivedWorld:
    """Return an archive of some cuts."""
    world = made(Random(0), 8, 1 << 24, started=True, widened=False)
    found = ArchivedWorld(configured(tmp_path), world)
    for number in range(len(world.frontiers)):
        found.archive_upto(number + 1)
    return found


def proof_of(archived: ArchivedWorld) -> proving.ArchiveProof:
    return proving.prove(archived.config, opened(archived.config))


@pytest.mark.parametrize(
    ("ahead", "has_record", "is_sound"),
    [(1, True, True), (1, False, True), (2, False, True), (2, True, False), (3, False, False)],
)
def test_executors_may_write_one_cut_ahead_and_the_job_none(
    archived: ArchivedWorld, *, ahead: int, has_record: bool, is_sound: bool
) -> None:
    newest = archived.position.newest
    assert newest is not None
    assert proof_of(archived).findings == ()
    number = newest.number + ahead
    rows = pa.Table.from_batches([of_cut_record(PREFIX, replace(newest, number=number))])
    if not has_record:
        rows = rows.set_column(1, "topic", pa.array([f"{PREFIX}.public.users"]))
    name = write(archived.archive.files, rows)["add"]["path"]
    proof = proof_of(archived)
    if is_sound:
        assert (proof.findings, proof.unnamed) == ((), (name,))
    else:
        what = f"file {name} has cut {number}, and the newest commit has cut {newest.number}"
        assert (proof.findings, proof.unnamed) == ((f"{what}: commits are missing",), ())


def test_files_of_topics_with_long_names_are_not_confused(archived: ArchivedWorld) -> None:
    newest, prefix = archived.position.newest, "a" * 60
    assert newest is not None
    rows = pa.Table.from_batches([of_cut_record(PREFIX, newest)])
    for number in range(3):
        named = rows.set_column(1, "topic", pa.array([f"{prefix}{number}"]))
        named = named.set_column(2, "partition", pa.array([number], pa.int32()))
        place = Place.of(write(archived.archive.files, named)["add"])
        found = [each for each in range(3) if place.may_have(f"{prefix}{each}")]
        assert found == [number]
        parts = [each for each in range(3) if place.may_have(f"{prefix}{number}", each)]
        assert parts == [number]


def rewrite(archived: ArchivedWorld) -> None:
    """Write all files again and delete the replaced ones and old versions, as an erasure does."""
    archive = opened(archived.config)
    position, actions, replaced = archive.open(), [], archive.added()
    for name, add in replaced.items():
        actions += [removed(add), write(archive.files, read(archive, name))]
    archive.commit(actions, position, "ERASE")
    forget(archive)
    for name in replaced:
        (Path(archive.path) / name).unlink()


def before_calls(
    monkeypatch: pytest.MonkeyPatch, of: object, name: str, do: Callable[[], None], numbers: range
) -> None:
    """Do something before some calls of a function, which are counted from 0."""
    calls, function = [0], getattr(of, name)

    def called(*given: object) -> object:
        if calls[0] in numbers:
            do()
        calls[0] += 1
        return function(*given)

    monkeypatch.setattr(of, name, called)


@pytest.mark.parametrize(
    ("of", "name"),
    [(delta_log, "check"), (proving, "is_unaltered"), (stored, "sorted_rows")],
)
@pytest.mark.parametrize("at", [0, 1])
def test_an_erasure_while_it_proves_is_no_finding(
    archived: ArchivedWorld, monkeypatch: pytest.MonkeyPatch, of: object, name: str, at: int
) -> None:
    before = proof_of(archived)
    before_calls(monkeypatch, of, name, lambda: rewrite(archived), range(at, at + 1))
    assert proof_of(archived) == before


def test_delta_s_log_may_lose_old_versions_while_it_is_read(
    archived: ArchivedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, archive = proof_of(archived), opened(archived.config)
    before_calls(monkeypatch, archive.files, "read", lambda: rewrite(archived), range(1, 2))
    assert proving.prove(archived.config, archive) == before


def test_erasures_again_and_again_are_an_error_that_may_pass(
    archived: ArchivedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_calls(monkeypatch, stored, "sorted_rows", lambda: rewrite(archived), range(1_000))
    with pytest.raises(UnavailableError, match="erased from"):
        proof_of(archived)


def test_a_file_that_the_newest_version_has_is_missing(
    archived: ArchivedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if another commit was made meanwhile."""
    archive = opened(archived.config)
    position = archive.open()
    name = min(archive.added())
    (Path(archive.path) / name).unlink()

    def commit() -> None:
        assert archive.find()
        archive.commit([], position, "OPTIMIZE")

    before_calls(monkeypatch, proving, "is_unaltered", commit, range(1))
    assert any(f"{name} (" in each and "is missing" in each for each in proof_of(archived).findings)
