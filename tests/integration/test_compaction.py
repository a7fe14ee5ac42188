"""Bases of a real archive: made step by step, equal to the source, and killed at each step."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from msgspec.structs import replace

from cdc import failpoints
from cdc.log import follower_reports
from cdc.operate.followers import BASES
from cdc.runtime import spark as files
from lockstep.jobs.archiving import proving as archive_proving
from lockstep.jobs.archiving.running import opened
from lockstep.jobs.compacting import layout, past, proving, runs, slices
from lockstep.jobs.compacting.bases import Bases, bases_of
from lockstep.jobs.compacting.older import OlderEvents
from lockstep.jobs.compacting.past import newest_rows
from lockstep.jobs.compacting.reporting import report
from lockstep.jobs.compacting.running import Compaction
from lockstep.jobs.compacting.runs import BaseFile
from lockstep.jobs.compacting.slices import PastTables
from lockstep.jobs.cuts.reduce import parsed
from lockstep.sinks.delta import lake
from tests.fixtures.archived import Archived
from tests.fixtures.daemon import NewPipeline

_JOB_SECONDS = 400
ALTERATIONS = 30
TABLES = (
    "CREATE TABLE users (id int PRIMARY KEY, name text, body text)",
    "ALTER TABLE users ALTER body SET STORAGE EXTERNAL",
    "CREATE TABLE quiet (id int PRIMARY KEY, name text)",
)
WRITES = (
    "INSERT INTO users SELECT g, 'n' || g, repeat('x', 3000) || g FROM generate_series(1, 60) g",
    "INSERT INTO quiet SELECT g, 'q' FROM generate_series(1, 9) g",
    "UPDATE users SET name = name || 'u' WHERE id % 3 = 0",
    "UPDATE users SET id = id + 1000, name = 'moved' WHERE id % 5 = 0",
    "INSERT INTO users VALUES (-1, 'large', repeat('y', 200000))",
    "UPDATE users SET name = 'large' WHERE id = -1",
    (
        "ALTER TABLE users ADD COLUMN more text DEFAULT 'm';"
        " UPDATE users SET name = 'after' WHERE id % 7 = 0"
    ),
    (
        "ALTER TABLE users RENAME COLUMN body TO content;"
        " UPDATE users SET name = 'renamed' WHERE id % 4 = 0"
    ),
    "DELETE FROM users WHERE id % 11 = 0",
)


def rows_of(archived: Archived, table: str) -> dict[int, dict[str, Any]]:
    """Return the rows of a table at the archive's newest frontier, altered as DDL has done it."""
    state = past.find(archived.config)
    assert state is not None
    tables = PastTables(state.past)
    older = OlderEvents(tables)
    topic = f"{archived.config.prefix}.public.{table}"
    found = {}
    for part in state.slices(frozenset({topic})):
        for row in newest_rows(state.past, tables, older, part).to_pylist():
            event = parsed(row["value"])
            if event.op == "d":
                continue
            event = older.letter(event) if event.source.dead else event
            after = json.loads(bytes(event.after)) | json.loads(row["fill"] or b"{}")
            for altered in older.alterations(topic):
                if altered.seq > row["seq"]:
                    after = json.loads(altered.row(json.dumps(after).encode()))
            found[after["id"]] = after
    return found


def source(archived: Archived, table: str) -> dict[int, dict[str, Any]]:
    with archived.pipeline.database.connect() as connection:
        found = connection.execute(f"SELECT id, row_to_json(t) FROM {table} t".encode()).fetchall()
    return dict(found)


def compacted(archived: Archived, write: str) -> tuple[layout.BaseRecord, bool]:
    """Write, archive and compact; the base must be the source's rows, and be proved."""
    archived.pipeline.database.execute(write)
    archived.reach()
    made = Compaction(archived.config, None).run()
    for table in ("users", "quiet"):
        assert rows_of(archived, table) == source(archived, table), write
    proof = proving.prove(archived.config, {})
    assert proof is not None
    assert proof.findings == (), write
    return made


@pytest.fixture
def many_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fold no run again: each compaction only adds what has changed."""
    monkeypatch.setattr(runs, "RATIO", 0)
    monkeypatch.setattr(runs, "LEAST_BYTES", 0)


def test_each_base_is_the_source_at_its_frontier(
    pipeline: NewPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that were not sent, large rows, changed keys, DDL, with few and with many runs."""
    monkeypatch.setattr(runs, "LEAST_BYTES", 0)
    made = pipeline(
        *TABLES,
        archive={"path": str(tmp_path / "archive"), "every_seconds": 0, "bases_kept": 2},
        log={"kafka": {"message.max.bytes": 60_000}},
    )
    made.start().wait_ready()
    archived = Archived(made)
    for number, write in enumerate(WRITES, 1):
        monkeypatch.setattr(runs, "RATIO", (0, 0, 0, 1, runs.RATIO)[number % 5])
        record, is_new = compacted(archived, write)
        assert is_new
        assert record.number == number
    bases = bases_of(made.config)
    assert bases.find()
    assert [each.number for each in bases.kept(2)] == [len(WRITES), len(WRITES) - 1]
    made.database.execute("TRUNCATE users")
    archived.reach()
    assert rows_of(archived, "users") == {}
    record, _ = Compaction(made.config, None).run()
    assert [each.rows for each in record.tables if each.topic.endswith("users")] in ([], [0])


@pytest.mark.long("in a bucket, too", sample=["folder"])
def test_a_compaction_killed_at_any_step_makes_the_base_at_the_next_start(
    pipeline: NewPipeline, archive_path: str
) -> None:
    made = pipeline(*TABLES, archive={"path": archive_path, "every_seconds": 0})
    made.start().wait_ready()
    archived = Archived(made)
    made.database.execute(  # enough that this run stays
        "INSERT INTO users SELECT -g, md5(g::text), md5('b' || g) FROM generate_series(1, 4000) g"
    )
    archived.reach()
    Compaction(made.config, None).run()
    for number, failpoint in enumerate(failpoints.COMPACT_NAMES):
        low = 100 * number
        made.database.execute(
            f"INSERT INTO users SELECT g, 'n', 'b' FROM generate_series({low}, {low + 40}) g",
            f"DELETE FROM users WHERE abs(id) < 200 AND abs(id) % 9 = {number}",
        )
        archived.reach()
        command = [sys.executable, str(files.job("compact")), "--config", str(made.config_file)]
        before = _base(archived)
        killed = subprocess.run(
            command,
            env={**os.environ, "LOCKSTEP_FAILPOINT": failpoint},
            capture_output=True,
            timeout=_JOB_SECONDS,
            check=False,
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
        is_there = failpoint == "compact_committed"
        assert (_base(archived) != before) == is_there
        done = subprocess.run(
            [*command, "--json"], capture_output=True, timeout=_JOB_SECONDS, check=True
        )
        assert json.loads(done.stdout)["made"] is not is_there
        assert rows_of(archived, "users") == source(archived, "users")
        newest = _base(archived)
        assert newest is not None
        assert newest.seq == archived.position().applied.seq
        state = past.find(made.config)
        assert state is not None
        base = PastTables(state.past).base
        assert base is not None
        rows = lake.read(base, layout.SCHEMA.names).cast(layout.SCHEMA)
        assert layout.total(layout.counted(pa.table(rows))) == newest.tables


def _files(bases: Bases) -> list[BaseFile]:
    return [BaseFile.of(add) for add in bases.added().values()]


def test_a_run_is_left_as_it_is_until_what_is_newer_has_a_quarter_of_its_rows(
    pipeline: NewPipeline, tmp_path: Path
) -> None:
    """A compaction writes the change, and the state is the source's, however many runs it has."""
    made = pipeline(*TABLES, archive={"path": str(tmp_path / "archive"), "every_seconds": 0})
    made.start().wait_ready()
    archived, bases = Archived(made), bases_of(made.config)
    found = []
    for write in (
        "INSERT INTO users SELECT g, md5(g::text), md5('b' || g) FROM generate_series(1, 9000) g",
        "UPDATE users SET name = 'one' WHERE id <= 50",
        "UPDATE users SET name = 'two' WHERE id BETWEEN 20 AND 70",
        "DELETE FROM users WHERE id BETWEEN 40 AND 60",
        "UPDATE users SET name = 'many' WHERE id > 6500",
        "UPDATE users SET name = 'last' WHERE id = 9000",
        "TRUNCATE users; INSERT INTO users VALUES (1, 'n', 'b')",
    ):
        record, _ = compacted(archived, write)
        assert bases.find()
        found.append((sorted({each.run for each in _files(bases)}), record.rows))
    assert found == [
        ([1], 9_000),
        ([1, 2], 9_050),
        ([1, 3], 9_070),  # the first update's run is small, and folded again
        ([1, 4], 9_070),
        ([5], 9_000),  # a fifth of the rows and their superseded events are more than a quarter
        ([5, 6], 9_001),
        ([7], 1),
    ]


@pytest.mark.usefixtures("many_runs")
def test_a_delete_stays_while_an_older_run_has_its_row_and_no_reader_sees_the_row(
    pipeline: NewPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short deletes are kept, and in tables that have not changed since; then it goes."""
    monkeypatch.setattr(slices, "OWN_BYTES", 0)
    path = str(tmp_path / "archive")
    made = pipeline(
        *TABLES, archive={"path": path, "every_seconds": 0, "tombstone_hours": 0.000_001}
    )
    made.start().wait_ready()
    archived = Archived(made)
    for write in (
        "INSERT INTO users SELECT g, 'n', 'b' FROM generate_series(1, 9) g",
        "INSERT INTO quiet SELECT g, 'q' FROM generate_series(1, 9) g",
        "DELETE FROM quiet WHERE id > 3; DELETE FROM users WHERE id > 3",
        "UPDATE users SET name = 'other'",
        "UPDATE users SET name = 'another'",
    ):
        record, _ = compacted(archived, write)
    assert [(each.rows, each.deletes) for each in record.tables] == [(15, 6), (21, 6)]
    monkeypatch.setattr(runs, "LEAST_BYTES", 1 << 30)
    made.database.execute("DELETE FROM quiet; DELETE FROM users WHERE id = 1")
    archived.reach()
    record, _ = Compaction(made.config, None).run()
    assert sum(each.rows for each in record.tables) <= 2 + 4, "some of the last deletes may be kept"
    assert rows_of(archived, "users") == source(archived, "users")


def test_a_delete_that_is_no_longer_kept_is_no_difference_in_a_table_that_stays(
    pipeline: NewPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "OWN_BYTES", 0)  # files of their own
    made = pipeline(*TABLES, archive={"path": str(tmp_path / "archive"), "every_seconds": 0})
    made.start().wait_ready()
    archived = Archived(made)
    made.database.execute("INSERT INTO quiet VALUES (1, 'q')", "DELETE FROM quiet")
    archived.reach()
    kept, _ = Compaction(made.config, None).run()
    assert [each.deletes for each in kept.tables] == [1]
    made.database.execute("INSERT INTO users VALUES (1, 'n', 'b')")
    archived.reach()
    archive = replace(made.config.archive, tombstone_hours=0.0)
    short = replace(made.config, archive=archive)
    record, _ = Compaction(short, None).run()
    assert [each.deletes for each in record.tables] == [1, 0], "its file is not written again"
    proof = proving.prove(made.config, {})
    assert proof is not None
    assert proof.findings == ()


def _base(archived: Archived) -> layout.BaseRecord | None:
    bases = bases_of(archived.config)
    return bases.newest() if bases.find() else None


@pytest.mark.usefixtures("many_runs")
def test_every_altered_bit_and_every_dropped_or_swapped_file_of_bases_is_named(
    pipeline: NewPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "OWN_BYTES", 5_000)
    path = tmp_path / "archive"
    made = pipeline(*TABLES, archive={"path": str(path), "every_seconds": 0, "bases_kept": 3})
    made.start().wait_ready()
    archived = Archived(made)
    for number in range(3):
        low = 100 * number
        made.database.execute(
            f"INSERT INTO users SELECT g, 'n', 'b' FROM generate_series({low}, {low + 40}) g",
            f"INSERT INTO quiet VALUES ({number}, 'q')",
        )
        archived.reach()
        Compaction(made.config, None).run()
    report(made.config)
    reported = follower_reports.read(made.config)[BASES]
    chains = archive_proving.prove(made.config, opened(made.config)).chains
    proof = proving.prove(made.config, chains, reported)
    assert proof is not None
    assert (proof.findings, proof.bases, proof.number) == ((), 3, 3)
    newest = bases_of(made.config)
    assert newest.find()
    assert {each.run for each in _files(newest)} == {1, 2, 3}
    second = newest.kept(3)[1].applied.lsn
    part = proving.prove(made.config, chains, reported, upto=second)
    assert part is not None
    assert (part.findings, part.bases, part.number) == ((), 2, 2)
    chance, folder = Random(15), path / "_bases"
    for _ in range(ALTERATIONS):
        restore, name = altered(folder, chance)
        found = proving.prove(made.config, chains, reported)
        assert found is not None
        assert any(name in each for each in found.findings), (name, found.findings)
        restore()
    assert proving.prove(made.config, chains, reported) == proof
    other = proving.prove(made.config, dict.fromkeys(chains, "x"))
    assert other is not None
    assert sum("another chain" in each for each in other.findings) == 3
    # Bases that are all missing are missed by the report; those without commits by their files.
    kept = folder.rename(path / "elsewhere")
    assert proving.prove(made.config, chains) is None
    lost = proving.prove(made.config, chains, reported)
    assert lost is not None
    assert f"one was made at {reported.lsn}" in lost.findings[0]
    kept.rename(folder)
    shutil.rmtree(folder / "_delta_log")
    left = proving.prove(made.config, chains)
    assert left is not None
    assert "has no base any more" in left.findings[0]


def altered(folder: Path, chance: Random) -> tuple[Callable[[], None], str]:
    """Alter one file of the bases; return what restores it, and its name."""
    data = sorted(folder.glob("part-*"))
    commits = sorted(folder.glob("_delta_log/*.json"))
    match chance.choice(["bit", "bit", "drop", "swap"]):
        case "drop":
            file = chance.choice([*data, *commits, commits[-1]])
            text = file.read_bytes()
            file.unlink()
        case "swap":
            file, other = chance.sample(chance.choice([data, commits]), 2)
            text, others = file.read_bytes(), other.read_bytes()
            file.write_bytes(others)
            other.write_bytes(text)
            return partial(restored, {file: text, other: others}), file.name
        case _:
            file = chance.choice([*data, *commits])
            text = file.read_bytes()
            changed = bytearray(text)
            changed[chance.randrange(len(text))] ^= 1 << chance.randrange(8)
            file.write_bytes(bytes(changed))

    return partial(restored, {file: text}), file.name


def restored(texts: dict[Path, bytes]) -> None:
    for file, text in texts.items():
        file.write_bytes(text)
