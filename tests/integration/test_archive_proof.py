"""`cdc prove` names every altered bit, and every dropped or swapped file, of a real archive."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from msgspec.structs import replace

from cdc.config import Config
from cdc.events import LSN
from cdc.log import follower_reports
from cdc.operate.followers import ARCHIVE
from cdc.verify import topics
from lockstep.jobs.archiving import proving, table, upkeep
from lockstep.jobs.archiving.layout import CutRecord
from lockstep.jobs.archiving.rows import of_cut_record
from lockstep.jobs.archiving.table import ArchiveTable
from lockstep.jobs.archiving.upkeep import ArchiveUpkeep
from lockstep.jobs.archiving.writing import write
from lockstep.sinks.delta.actions import Files
from tests.fixtures.archived import Archived
from tests.fixtures.daemon import NewPipeline

ALTERATIONS = 40


class Kept:
    """An archive of some cuts, half of its files joined, and the log that it was made of."""

    def __init__(self, archived: Archived, path: Path) -> None:
        self.archived, self.path = archived, path
        self.reported = follower_reports.read(archived.config)[ARCHIVE]

    @property
    def config(self) -> Config:
        return self.archived.config

    def proof(
        self, path: Path | None = None, upto: LSN | None = None, *, offline: bool = False
    ) -> proving.ArchiveProof:
        archive = ArchiveTable(str(path or self.path), {}, self.config.pipeline)
        reported = None if offline else self.reported
        return proving.prove(self.config, archive, upto, None, reported)


@pytest.fixture
def kept(pipeline: NewPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    monkeypatch.setattr(upkeep, "FEWEST", 2)
    monkeypatch.setattr(table, "CHECKPOINT_EVERY", 3)
    path = tmp_path / "archive"
    made = pipeline(
        "CREATE TABLE users (id int PRIMARY KEY, name text)",
        archive={"path": str(path), "every_seconds": 0},
        log={"kafka": {"message.max.bytes": 60_000}},
    )
    made.start().wait_ready()
    archived = Archived(made)
    for number in range(6):
        made.database.execute(
            f"INSERT INTO users SELECT {number * 100} + g, 'n' FROM generate_series(1, 40) g",
            f"DELETE FROM users WHERE id % 9 = {number}",
            f"INSERT INTO users VALUES (-{number + 1}, repeat('y', 100000))",
        )
        archived.reach()
        if number == 3:
            archive = ArchiveTable(str(path), {}, made.config.pipeline)
            position = archive.open()
            assert ArchiveUpkeep(archive, made.config.archive).join(position)
    return Kept(archived, path)


def altered(path: Path, copy: Path, chance: Random) -> str:
    """Copy the archive and alter one thing; return the name of the file that was altered.

    Not the oldest commit, or an older checkpoint: Delta deletes these, since a checkpoint follows.
    """
    shutil.copytree(path, copy)
    named = {each.name for each in copy.glob("_delta_log/*.json")}
    checkpoints = [
        max(copy.glob("_delta_log/*.checkpoint.parquet")),
        copy / "_delta_log" / "_last_checkpoint",
    ]
    live = {
        name
        for each in sorted(copy.glob("_delta_log/*.json"))
        for name in re.findall(r'"add":\{"path":"([^"]+)"', each.read_text())
    }
    removed = {
        name
        for each in copy.glob("_delta_log/*.json")
        for name in re.findall(r'"remove":\{"path":"([^"]+)"', each.read_text())
    }
    files = sorted([copy / "_delta_log" / name for name in named])
    data = sorted(copy / name for name in live - removed)
    match chance.choice(["bit", "bit", "bit", "drop", "swap"]):
        case "drop":
            file = chance.choice([*data, *checkpoints, *files[1:], files[-1]])
            file.unlink()
        case "swap":
            file, other = chance.sample(chance.choice([data, files]), 2)
            both = file.read_bytes(), other.read_bytes()
            file.write_bytes(both[1])
            other.write_bytes(both[0])
        case _:
            file = chance.choice([*files, *data, *data, *checkpoints])
            text = bytearray(file.read_bytes())
            text[chance.randrange(len(text))] ^= 1 << chance.randrange(8)
            file.write_bytes(bytes(text))
    return str(file.name)


@pytest.mark.commit("what `cdc prove` must name")
def test_every_altered_bit_and_every_dropped_or_swapped_file_is_named(
    kept: Kept, tmp_path: Path
) -> None:
    proof = kept.proof()
    assert not proof.findings
    position = kept.archived.position()
    assert position.newest is not None
    assert (proof.cuts, proof.seq) == (position.newest.number, position.applied.seq)
    assert (proof.events, proof.undigested, proof.erased) == (proof.seq, 0, 0)
    live = topics.prove(kept.config, known=topics.KnownChains(proof.chains, proof.chain))
    assert not live.findings
    assert (live.seq_from, live.events, live.anchored) == (1, live.seq, True)
    assert len(proof.chains) == proof.cuts
    first, *_ = proof.chains
    other = topics.prove(kept.config, known=topics.KnownChains({first: "x"}, "x"))
    assert not other.anchored
    assert len(other.findings) == 1, other.findings
    chance = Random(15)
    for number in range(ALTERATIONS):
        copy = tmp_path / f"copy-{number}"
        name = altered(kept.path, copy, chance)
        found = kept.proof(copy).findings
        assert any(name in each for each in found), (name, found)
        shutil.rmtree(copy)
    upto = [lsn for lsn, _ in proof.chains][2]
    part = kept.proof(upto=upto)
    assert (part.findings, part.cuts, part.lsn) == ((), 3, str(upto))
    beyond = LSN(position.applied.lsn + 1)
    found = kept.proof(upto=beyond).findings
    assert found == (f"the archive ends at {position.applied.lsn}, before {beyond}",)
    # A cut of which a file is missing is named, with partitions, offsets and seqs.
    copy = tmp_path / "copy"
    shutil.copytree(kept.path, copy)
    newest = max(copy.glob("part-*"), key=lambda each: each.stat().st_mtime)
    newest.unlink()
    found = kept.proof(copy).findings
    assert any(newest.name in each for each in found)
    assert re.search(r"cut|cuts \d+", " ".join(found))


def expect_that_executors_may_write_ahead(kept: Kept, newest: CutRecord) -> None:
    """Files of the cut after the next are no finding; one with its cut record is."""
    ahead = replace(newest, number=newest.number + 2)
    record = pa.Table.from_batches([of_cut_record(kept.config.prefix, ahead)])
    plain = record.set_column(1, "topic", pa.array(["shop.public.users"]))
    for rows, is_found in ((plain, False), (record, True)):
        path = kept.path / write(Files(str(kept.path), {}), rows)["add"]["path"]
        proof = kept.proof()
        assert bool(proof.findings) == is_found, proof.findings
        assert (path.name in proof.unnamed) != is_found
        path.unlink()


def test_the_newest_commits_are_missed_by_the_jobs_report_or_by_what_was_written_after_them(
    kept: Kept,
) -> None:
    """Without the report, by data of a later cut, or by a checkpoint; the newest by neither."""
    texts = {each: each.read_bytes() for each in kept.path.glob("_delta_log/*")}
    commits = sorted(each for each in texts if each.suffix == ".json")
    newest = kept.archived.position().newest
    assert newest is not None
    assert kept.proof().unnamed == ()
    for each in texts.keys() - set(commits):
        each.unlink()
    for many, later_cuts in ((1, 0), (2, 1), (3, 1)):  # the third joined files
        commits[-many].unlink()
        lost = kept.proof()
        first = commits[-many].name
        assert any(first in each and "is missing" in each for each in lost.findings), many
        seqs = f"seq {lost.seq + 1} to {newest.seq} are missing"
        assert any(seqs in each for each in lost.findings), lost.findings
        offline = kept.proof(offline=True)
        later = [each for each in offline.findings if "commits are missing" in each]
        assert len(later) == later_cuts, offline.findings
        assert len(offline.unnamed) == 1
    for each, text in texts.items():
        each.write_bytes(text)
    assert kept.proof(offline=True).findings == ()
    expect_that_executors_may_write_ahead(kept, newest)
    # A report of another history: as if the commits since had been written again.
    other = kept.reported.commit
    assert other is not None
    kept.reported = replace(kept.reported, commit=other._replace(digest="0" * 64))
    assert kept.proof().findings == (
        f"_delta_log/{other.version:020d}.json is not what its job has reported",
    )
    last = ArchiveTable(str(kept.path), {}, kept.config.pipeline)
    assert last.find()
    last.table.create_checkpoint()
    commits[-1].unlink()
    assert any(commits[-1].name in each for each in kept.proof(offline=True).findings)
