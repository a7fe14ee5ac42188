"""`cdc prove` names every altered bit, and every dropped or swapped file, of a real archive."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from random import Random

import pytest

from cdc.config import Config
from cdc.events import LSN
from cdc.verify import topics
from lockstep.jobs.archiving import proving, table, upkeep
from lockstep.jobs.archiving.table import Archive
from lockstep.jobs.archiving.upkeep import Upkeep
from tests.fixtures.archived import Archived
from tests.fixtures.daemon import NewPipeline

ALTERATIONS = 40


class Kept:
    """An archive of some cuts, half of its files joined, and the log that it was made of."""

    def __init__(self, archived: Archived, path: Path) -> None:
        self.archived, self.path = archived, path

    @property
    def config(self) -> Config:
        return self.archived.config

    def proof(self, path: Path | None = None) -> proving.Proof:
        return proving.prove(self.config, Archive(str(path or self.path), {}, self.config.pipeline))


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
            archive = Archive(str(path), {}, made.config.pipeline)
            position = archive.open()
            assert Upkeep(archive, made.config.archive).join(position)
    return Kept(archived, path)


def altered(path: Path, copy: Path, chance: Random) -> str:
    """Copy the archive and alter one thing; return the name of the file that was altered."""
    shutil.copytree(path, copy)
    named = {each.name for each in copy.glob("_delta_log/*.json")}
    checkpoint = max(copy.glob("_delta_log/*.checkpoint.parquet"))
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
            file = chance.choice([*data, checkpoint])
            file.unlink()
        case "swap":
            file, other = chance.sample(data, 2)
            both = file.read_bytes(), other.read_bytes()
            file.write_bytes(both[1])
            other.write_bytes(both[0])
        case _:
            file = chance.choice([*files, *data, *data, checkpoint])
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
    part = proving.prove(kept.config, Archive(str(kept.path), {}, kept.config.pipeline), upto)
    assert (part.findings, part.cuts, part.lsn) == ((), 3, str(upto))
    beyond = LSN(position.applied.lsn + 1)
    found = proving.prove(
        kept.config, Archive(str(kept.path), {}, kept.config.pipeline), beyond
    ).findings
    assert found == (f"the archive ends at {position.applied.lsn}, before {beyond}",)
    # A cut of which a file is missing is named, with partitions, offsets and seqs.
    copy = tmp_path / "copy"
    shutil.copytree(kept.path, copy)
    newest = max(copy.glob("part-*"), key=lambda each: each.stat().st_mtime)
    newest.unlink()
    found = kept.proof(copy).findings
    assert any(newest.name in each for each in found)
    assert re.search(r"cut|cuts \d+", " ".join(found))
