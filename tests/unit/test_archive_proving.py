"""What a proof finds while a job archives: the archive alone, without a broker."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from msgspec.structs import replace

from lockstep.jobs.archiving import proving
from lockstep.jobs.archiving.rows import of_cut_record
from lockstep.jobs.archiving.running import opened
from lockstep.jobs.archiving.writing import write
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
