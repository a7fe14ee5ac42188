"""The archive in a bucket of an S3 server, whose login is in the environment alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest

from cdc.errors import ConfigError
from cdc.runtime import spark as files
from lockstep.jobs.archiving import cuts, proving, running, upkeep
from lockstep.jobs.archiving.upkeep import ArchiveUpkeep
from lockstep.jobs.archiving.versions import history
from lockstep.jobs.compacting import proving as bases_proving
from lockstep.jobs.compacting.running import Compaction
from lockstep.jobs.erasing import Erasing
from lockstep.sinks.delta.actions import Files
from lockstep.sinks.delta.lake import ConflictError
from tests.fixtures.archived import Archived
from tests.fixtures.daemon import NewPipeline
from tests.fixtures.object_store import SECRET, Bucket
from tests.fixtures.spark import need_java
from tests.fixtures.spark_cluster import standalone
from tests.integration.test_erase import TABLES, Kept

_JOB_SECONDS = 240
_USERS = "CREATE TABLE users (id int PRIMARY KEY, name text)"


def job(name: str, config_file: Path, *given: str, failpoint: str = "") -> list[bytes]:
    """Run a job to its end, or until it kills itself at the failpoint; return what it prints."""
    done = subprocess.run(
        [sys.executable, str(files.job(name)), "--config", str(config_file), *given],
        env={**os.environ, "LOCKSTEP_FAILPOINT": failpoint},
        capture_output=True,
        timeout=_JOB_SECONDS,
        check=False,
    )
    assert done.returncode == (-signal.SIGKILL if failpoint else 0), done.stderr.decode()
    return [done.stdout, done.stderr]


def test_an_archive_in_a_bucket_is_complete_and_proved_and_has_one_writer(
    pipeline: NewPipeline, bucket: Bucket, tmp_path: Path
) -> None:
    """Killed when its files are written, before the commit; the login is in no file of ours."""
    made = pipeline(_USERS, archive={"path": f"{bucket.url}/shop/archive", "every_seconds": 0})
    made.start().wait_ready()
    archived = Archived(made)
    made.database.execute("INSERT INTO users SELECT g, 'n' || g FROM generate_series(1, 90) g")
    archived.reach()
    late = running.opened(made.config)
    position = late.open()
    made.database.execute("UPDATE users SET name = 'b' WHERE id % 9 = 0")
    archived.log_reach()
    printed = job("archive", made.config_file, "--once", failpoint="archive_written")
    assert archived.position() == position
    printed += job("archive", made.config_file, "--once")
    assert archived.stored() == archived.logged(archived.position())
    with pytest.raises(ConflictError):  # another copy has committed since it was opened
        late.commit([], position, "OPTIMIZE")
    base, _ = Compaction(made.config, None).run()
    proof = proving.prove(made.config, running.opened(made.config))
    assert (proof.findings, proof.events) == ((), proof.seq)
    bases = bases_proving.prove(made.config, proof.chains)
    assert bases is not None
    assert (bases.findings, base.seq) == ((), proof.seq)
    assert [each.op for each in history(made.config, "public.users", "9")] == ["insert", "update"]
    assert sorted(
        each.name for each in (bucket.folder / "shop" / "archive").iterdir() if each.is_dir()
    ) == ["_bases", "_delta_log"]
    ours = [each for folder in (bucket.folder, tmp_path) for each in folder.rglob("*")]
    printed += [each.read_bytes() for each in ours if each.is_file()]
    assert not any(SECRET.encode() in each for each in printed)


def test_a_store_without_conditional_puts_is_refused(
    pipeline: NewPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There two copies of the archive would replace each other's commits."""
    made = pipeline(_USERS, archive={"path": str(tmp_path / "archive"), "every_seconds": 0})
    running.opened(made.config).open()
    monkeypatch.setattr(Files, "put_new", Files.put)
    with pytest.raises(ConfigError, match="conditional puts"):
        running.opened(made.config).open()


@pytest.mark.long("two jobs at once")
def test_two_jobs_at_once_archive_each_record_once(pipeline: NewPipeline, bucket: Bucket) -> None:
    """Of two commits at one place the bucket takes one; the other job reads the table again."""
    made = pipeline(
        _USERS, archive={"path": f"{bucket.url}/archive", "every_seconds": 0, "max_events": 20}
    )
    made.start().wait_ready()
    archived = Archived(made)
    for step in range(30):
        low = 100 * step
        made.database.execute(
            f"INSERT INTO users SELECT g, 'n' FROM generate_series({low}, {low + 30}) g"
        )
    archived.log_reach()
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(job, "archive", made.config_file, "--once") for _ in range(2)]
        for each in jobs:
            each.result()
    assert archived.stored() == archived.logged(archived.position())
    proof = proving.prove(made.config, running.opened(made.config))
    assert (proof.findings, proof.events) == ((), proof.seq)
    assert proof.cuts > 5


@pytest.mark.long("an erasure in a bucket")
def test_files_are_joined_and_deleted_and_a_row_is_erased_in_a_bucket(
    pipeline: NewPipeline, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pipeline(
        *TABLES,
        archive={"path": f"{bucket.url}/archive", "every_seconds": 0, "bases_kept": 3},
    )
    made.start().wait_ready()
    kept = Kept(Archived(made), bucket.folder)
    marker = uuid4().hex
    kept.lived(marker)
    archive = running.opened(kept.config)
    position = archive.open()
    monkeypatch.setattr(upkeep, "FEWEST", 2)
    monkeypatch.setattr(upkeep, "MORE_HOURS", -kept.config.archive.vacuum_hours - 1)
    joined = ArchiveUpkeep(archive, kept.config.archive).join(position)
    assert ArchiveUpkeep(archive, kept.config.archive).vacuum() == joined > 1
    kept.expect_sound(0)
    assert kept.holds(marker)
    done = Erasing(kept.config, "public.users", f"new-{marker}").run()
    assert done.erasure is not None
    assert kept.holds(marker) == []
    kept.expect_sound(done.erasure.events)


@pytest.mark.long("a minute on a Spark cluster")
@pytest.mark.slow
def test_executors_archive_into_a_bucket_and_spark_writes_down_no_login(
    pipeline: NewPipeline, bucket: Bucket, tmp_path: Path
) -> None:
    """The workers have the login in their environment, as the driver has."""
    need_java()
    made = pipeline(_USERS, archive={"path": f"{bucket.url}/archive", "every_seconds": 0})
    made.start().wait_ready()
    archived = Archived(made)
    many = cuts.LARGE_EVENTS + 1_000
    made.database.execute(f"INSERT INTO users SELECT g, 'n' FROM generate_series(1, {many}) g")
    archived.log_reach()
    folder = tmp_path / "spark"
    folder.mkdir()
    with standalone(folder, 1) as cluster:
        command = [*cluster.submitting("archive"), "--config", str(made.config_file), "--once"]
        done = subprocess.run(
            command, env=cluster.env, capture_output=True, timeout=_JOB_SECONDS, check=False
        )
    (tmp_path / "output").write_bytes(done.stdout + done.stderr)
    assert done.returncode == 0, done.stderr.decode()[-6_000:]
    assert archived.stored() == archived.logged(archived.position())
    written = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert any(each.name.startswith("events_") for each in written), "Spark's event log"
    assert not any(SECRET.encode() in each.read_bytes() for each in written)
