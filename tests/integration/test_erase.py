"""An erased row's bytes are found nowhere, and everything else is proved and read as before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from cdc import failpoints
from cdc.errors import ConfigError
from cdc.log import reader
from cdc.runtime import spark as files
from lockstep.jobs.archiving import erasing, proving
from lockstep.jobs.archiving.rows import key_hash
from lockstep.jobs.archiving.running import opened
from lockstep.jobs.archiving.upkeep import Upkeep
from lockstep.jobs.archiving.versions import history
from lockstep.jobs.archiving.writing import removed, write
from lockstep.jobs.compacting import proving as bases_proving
from lockstep.jobs.compacting.running import Compaction
from lockstep.jobs.erasing import Erasing
from lockstep.jobs.following_stores import run_of
from lockstep.jobs.reading_as_of import read_as_of_arrow
from lockstep.jobs.spark.starting import SparkStart
from tests.fixtures.archived import Archived
from tests.fixtures.daemon import NewPipeline
from tests.fixtures.read_back import read_to_end
from tests.integration.test_compaction import rows_of, source

_JOB_SECONDS = 120
TABLES = (
    "CREATE TABLE users (id text PRIMARY KEY, name text, body text)",
    "ALTER TABLE users ALTER body SET STORAGE EXTERNAL",
    "CREATE TABLE quiet (id int PRIMARY KEY, name text)",
)


class Kept:
    """A pipeline with an archive and bases, whose rows have random markers in all their values."""

    def __init__(self, archived: Archived, folder: Path) -> None:
        self.archived, self.config, self.folder = archived, archived.config, folder
        self.execute = archived.pipeline.database.execute

    def lived(self, marker: str, each: Callable[[], None] = lambda: None) -> None:
        """Write a row among others, change it and its key, and delete it; archive all of it.

        `each` is called after each step.
        """
        self.execute(
            "INSERT INTO users SELECT gen_random_uuid(), 'n', 'b' FROM generate_series(1, 20) g",
            f"INSERT INTO users VALUES ('old-{marker}', 'name {marker}', repeat('{marker}', 4000))",
            "INSERT INTO quiet SELECT coalesce(max(id), 0) + 1, 'q' FROM quiet",
        )
        self.archived.reach()
        Compaction(self.config, None).run()
        each()
        self.execute(
            f"UPDATE users SET name = 'other {marker}' WHERE id = 'old-{marker}'",
            f"UPDATE users SET id = 'new-{marker}' WHERE id = 'old-{marker}'",
        )
        self.archived.reach()
        Compaction(self.config, None).run()
        each()
        self.execute("UPDATE users SET name = 'n2' WHERE name = 'n'")
        self.execute(f"DELETE FROM users WHERE id = 'new-{marker}'")
        self.archived.reach()
        each()

    def holds(self, marker: str, folder: Path | None = None) -> list[str]:
        """Return the files of a folder with a marker, or the hash of a key that has it.

        Without a folder those of archive and bases.
        """
        found, folder = [], folder or self.folder
        hashes = {str(key_hash(b'{"id":"%s-%s"}' % (a, marker.encode()))) for a in (b"old", b"new")}
        for path in folder.rglob("*"):
            if path.is_dir():
                continue
            text = path.read_bytes()
            if path.name.endswith(".parquet"):
                text = repr(pq.ParquetFile(path).read().to_pylist()).encode()
            if any(each.encode() in text for each in (marker, *hashes)):
                found.append(str(path.relative_to(folder)))
        return found

    def logged(self, marker: str) -> set[str]:
        """Return the topics that have a marker in a record."""
        resume = reader.read_resume(self.config)
        assert resume is not None
        names = ("frontier", "schema", "messages", "dead", "snapshot", "resume", "followers")
        topics = dict(resume[0].partitions) | {
            f"{self.config.prefix}.cdc.{n}": 1 for n in names[:-1]
        }
        return {
            message.topic() or ""
            for message in read_to_end(self.config, topics)
            if marker.encode() in (message.key() or b"") + (message.value() or b"")
        }

    def expect_sound(self, erased_events: int) -> None:
        """Check that all proofs pass, and that base and archive are what the source has."""
        proof = proving.prove(self.config, opened(self.config))
        assert (proof.findings, proof.erased_events) == ((), erased_events)
        bases = bases_proving.prove(self.config, proof.chains)
        assert bases is not None
        assert bases.findings == ()
        for table in ("users", "quiet"):
            assert rows_of(self.archived, table) == source(self.archived, table)

    def kill(self, failpoint: str, *given: str) -> None:
        """Run the command until it kills itself."""
        config = str(self.archived.pipeline.config_file)
        killed = subprocess.run(
            [sys.executable, str(files.job("archived")), "erase", "--config", config, *given],
            env={**os.environ, "LOCKSTEP_FAILPOINT": failpoint},
            capture_output=True,
            timeout=_JOB_SECONDS,
            check=False,
        )
        assert killed.returncode == -signal.SIGKILL, (failpoint, killed.stderr.decode())

    def follow(self) -> None:
        """Run the mirror's follower up to what was committed so far."""
        until = self.archived.log_reach()
        spark = SparkStart(lambda: pytest.fail("no Spark"), set())
        run = run_of(spark, self.config, "mirror", until)
        assert run.run() == 0, run.error

    def in_mirror(self) -> dict[Any, dict[str, Any]]:
        read = read_as_of_arrow(str(self.folder.parent / "lake"), ["public.users"])
        rows = read.tables["public.users"].select(["id", "name", "body"]).to_pylist()
        return {row["id"]: row for row in rows}


@pytest.fixture
def kept(pipeline: NewPipeline, tmp_path: Path) -> Kept:
    folder = tmp_path / "archive"
    made = pipeline(
        *TABLES,
        followers={"mirror": {"delta": {"path": str(tmp_path / "lake")}}},
        archive={"path": str(folder), "every_seconds": 0, "bases_kept": 3},
        log={"kafka": {"message.max.bytes": 60_000}},
    )
    made.start().wait_ready()
    return Kept(Archived(made), folder)


def test_an_erased_row_is_found_nowhere_and_every_proof_still_closes(kept: Kept) -> None:
    """Not in archive, bases, replaced files, Delta's logs or topics; with the key that it had."""
    marker, other = uuid4().hex, uuid4().hex
    kept.lived(marker)
    kept.lived(other)
    archive = opened(kept.config)
    position = archive.open()
    Upkeep(archive, kept.config.archive).join(position)
    kept.expect_sound(0)
    assert kept.holds(marker)
    assert len(kept.logged(marker)) == 2  # the table's topic and the dead letters
    versions = len(history(kept.config, "public.users", f"old-{other}"))
    done = Erasing(kept.config, "public.users", f"new-{marker}").run()
    assert done.erasure is not None
    assert (done.erasure.keys, done.erasure.events, done.unread) == (2, 5, [])
    assert kept.holds(marker) == []
    assert {topic for topic, _ in done.topics} == kept.logged(marker)
    kept.expect_sound(5)
    assert len(history(kept.config, "public.users", f"old-{other}")) == versions
    with pytest.raises(ConfigError, match="a daemon streams"):
        Erasing(kept.config, "public.users", f"new-{marker}", with_topics=True)
    kept.archived.pipeline.daemon.term()
    with pytest.raises(ConfigError, match="mirror has not applied"):
        Erasing(kept.config, "public.users", f"new-{marker}", with_topics=True).run()
    kept.archived.pipeline.start().wait_ready()
    kept.follow()
    kept.archived.pipeline.daemon.term()
    kept.kill(failpoints.ERASE_TOPICS_NAMES[0], "--topics", "--", "public.users", f"new-{marker}")
    again = Erasing(kept.config, "public.users", f"new-{marker}", with_topics=True).run()
    assert (again.erasure, again.topics, again.epoch) == (None, {}, 2)
    assert kept.logged(marker) == set()
    # The pipeline, the archive and compactions continue.
    kept.archived.pipeline.start().wait_ready()
    kept.lived(uuid4().hex)
    Compaction(kept.config, None).run()
    kept.expect_sound(5)
    logs = [daemon.log for daemon in kept.archived.pipeline.daemons]
    assert all(logs)
    assert not any(marker in log for log in logs)


def test_old_versions_of_a_mirror_do_not_have_an_erased_row(kept: Kept) -> None:
    """Neither its files nor the bounds of values in Delta's log; the follower continues."""
    marker, lake = uuid4().hex, kept.folder.parent / "lake"
    kept.lived(marker, each=kept.follow)
    assert any(each.endswith(".json") for each in kept.holds(marker, lake))
    assert any(each.endswith(".parquet") for each in kept.holds(marker, lake))
    done = Erasing(kept.config, "public.users", f"new-{marker}", with_mirrors=True).run()
    assert done.stores == {}
    assert kept.holds(marker, lake) == []
    assert kept.in_mirror() == source(kept.archived, "users")
    kept.execute("UPDATE users SET name = 'after' WHERE name = 'n2'")
    kept.follow()
    assert kept.in_mirror() == source(kept.archived, "users")


def test_a_row_that_exists_or_is_not_archived_is_not_erased(kept: Kept) -> None:
    kept.execute("INSERT INTO users VALUES ('a', 'n', 'b')")
    kept.archived.reach()
    with pytest.raises(ConfigError, match="exists, or its deletion"):
        Erasing(kept.config, "public.users", "a")
    kept.execute("DELETE FROM users WHERE id = 'a'")
    kept.archived.log_reach()
    with pytest.raises(ConfigError, match="exists, or its deletion"):
        Erasing(kept.config, "public.users", "a")
    kept.archived.reach()
    assert Erasing(kept.config, "public.users", "a").run().erasure is not None
    with pytest.raises(ConfigError, match="neither archive nor log has a table"):
        Erasing(kept.config, "public.no_such", "a")


def test_a_forged_erasure_is_named(kept: Kept) -> None:
    """An attacker who replaces records by their leaves has no audit record of it."""
    kept.lived(marker := uuid4().hex)
    archive = opened(kept.config)
    position = archive.open()
    subject = erasing.find(
        kept.config, archive, f"{kept.config.prefix}.public.users", [_key(f"new-{marker}")]
    )
    for path, add in archive.added().items():
        rows = erasing.read(archive, path)
        mask = erasing.mask_of(rows, subject, f"{kept.config.prefix}.cdc.dead")
        if any(mask.to_pylist()):
            parts = [rows.filter(pc.invert(mask)), erasing.bare(rows.filter(mask))]
            forged = write(archive.files, pa.concat_tables(parts))
            archive.commit([removed(add), forged], position, "ERASE")
    findings = proving.prove(kept.config, opened(kept.config)).findings
    assert any("are erased, where erasures state 0" in each for each in findings), findings


def _key(text: str) -> bytes:
    return b'{"id":"%s"}' % text.encode()


@pytest.mark.long("seven kills of one job", sample=["committed"])
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("erase_committed",), id="committed"),
        pytest.param(failpoints.ERASE_NAMES, id="all"),
    ],
)
def test_an_erasure_killed_at_any_step_is_completed_by_the_next(
    kept: Kept, names: tuple[str, ...]
) -> None:
    for number, failpoint in enumerate(names, 1):
        marker = uuid4().hex
        kept.lived(marker)
        kept.kill(failpoint, "--", "public.users", f"new-{marker}")
        Erasing(kept.config, "public.users", f"new-{marker}").run()
        assert kept.holds(marker) == [], failpoint
        kept.expect_sound(5 * number)
        archive = opened(kept.config)
        assert archive.find()
        assert len(erasing.erasures(kept.config, archive)) == number
