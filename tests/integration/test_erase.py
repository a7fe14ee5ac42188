"""An erased row's bytes are found nowhere, and everything else is proved and read as before."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace
from pyspark.sql import SparkSession

from cdc import failpoints
from cdc.errors import ConfigError
from cdc.log import groups, reader, topics
from cdc.log.groups import Group
from cdc.runtime import spark as files
from lockstep.jobs.archiving import erasing, layout, proving
from lockstep.jobs.archiving.rows import archive_topic, erased_topic, key_hash, of_erasure
from lockstep.jobs.archiving.running import opened
from lockstep.jobs.archiving.table import ArchiveTable
from lockstep.jobs.archiving.upkeep import ArchiveUpkeep
from lockstep.jobs.archiving.versions import history
from lockstep.jobs.archiving.writing import removed, write
from lockstep.jobs.compacting import proving as bases_proving
from lockstep.jobs.compacting import runs
from lockstep.jobs.compacting.bases import bases_of
from lockstep.jobs.compacting.running import Compaction
from lockstep.jobs.erasing import Erasing
from lockstep.jobs.following_stores import run_of
from lockstep.jobs.reading_as_of import read_as_of_arrow
from lockstep.jobs.spark.starting import SparkStart
from lockstep.sinks.delta import lake
from lockstep.sinks.delta.lake import ConflictError
from tests.fixtures.archived import Archived
from tests.fixtures.daemon import NewPipeline
from tests.fixtures.read_back import read_to_end
from tests.integration.test_compaction import rows_of, source
from tests.integration.test_incremental_snapshot import begin, wait_state

_JOB_SECONDS = 400
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
        wanted = (marker, _in_message(marker), *hashes)
        for path in folder.rglob("*"):
            if path.is_dir():
                continue
            text = path.read_bytes()
            if path.name.endswith(".parquet"):
                text = repr(pq.ParquetFile(path).read().to_pylist()).encode()
            if any(each.encode() in text for each in wanted):
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

    def follow(self, *names: str, spark: SparkStart | None = None) -> None:
        """Run followers, all of them if none is named, up to what was committed so far."""
        until = self.archived.log_reach()
        start = spark or SparkStart(lambda: pytest.fail("no Spark"), set())
        for name in names or self.config.followers:
            run = run_of(start, self.config, name, until)
            assert run.run() == 0, run.error

    def erase(self, key: str, *given: str) -> dict[str, Any]:
        """Run `cdc erase`; return what it prints as JSON."""
        config = str(self.archived.pipeline.config_file)
        options = [*given, "--yes", "--json", "-c", config, "public.users", key]
        done = subprocess.run(
            [sys.executable, "-m", "cdc.cli.main", "erase", *options],
            capture_output=True,
            timeout=_JOB_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def in_mirror(self, folder: str = "lake") -> dict[Any, dict[str, Any]]:
        read = read_as_of_arrow(str(self.folder.parent / folder), ["public.users"])
        rows = read.tables["public.users"].select(["id", "name", "body"]).to_pylist()
        return {row["id"]: row for row in rows}


@pytest.fixture(autouse=True)
def many_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fold no run of a base again: several files of it have events of the row."""
    monkeypatch.setattr(runs, "RATIO", 0)
    monkeypatch.setattr(runs, "LEAST_BYTES", 0)


@pytest.fixture
def kept(pipeline: NewPipeline, tmp_path: Path) -> Kept:
    return _kept(pipeline, tmp_path, {"mirror": {"delta": {"path": str(tmp_path / "lake")}}})


def _kept(
    pipeline: NewPipeline,
    tmp_path: Path,
    followers: dict[str, object],
    cleanup: str = "delete",
    **more: dict[str, object],
) -> Kept:
    folder = tmp_path / "archive"
    made = pipeline(
        *TABLES,
        followers=followers,
        **more,
        archive={"path": str(folder), "every_seconds": 0, "bases_kept": 3},
        log={"kafka": {"message.max.bytes": 60_000}, "cleanup": cleanup},
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
    ArchiveUpkeep(archive, kept.config.archive).join(position)
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
    for upto, _ in proving.prove(kept.config, opened(kept.config)).chains:
        assert proving.prove(kept.config, opened(kept.config), upto).findings == ()
    assert len(history(kept.config, "public.users", f"old-{other}")) == versions
    with pytest.raises(ConfigError, match="a daemon streams"):
        Erasing(kept.config, "public.users", f"new-{marker}", with_topics=True)
    kept.archived.pipeline.daemon.term()
    with pytest.raises(ConfigError, match="mirror has not applied"):
        Erasing(kept.config, "public.users", f"new-{marker}", with_topics=True).run()
    kept.archived.pipeline.start().wait_ready()
    kept.follow()
    kept.archived.pipeline.daemon.term()
    with closing(Group(kept.config, "app", sorted(kept.logged(marker)), "beginning")):
        pass  # acknowledges nothing
    with pytest.raises(ConfigError, match="the group app has not acknowledged"):
        Erasing(kept.config, "public.users", f"new-{marker}", with_topics=True).run()
    groups.remove(kept.config, "app")
    kept.kill(failpoints.ERASE_TOPICS_NAMES[0], "--topics", "--", "public.users", f"new-{marker}")
    again = kept.erase(f"new-{marker}", "--topics")
    assert (again["erasure"], again["topics"], again["epoch"]) == (None, [], 2)
    assert kept.logged(marker) == set()
    # The pipeline, the archive and compactions continue.
    kept.archived.pipeline.start().wait_ready()
    kept.lived(uuid4().hex)
    Compaction(kept.config, None).run()
    kept.expect_sound(5)
    logs = [daemon.log for daemon in kept.archived.pipeline.daemons]
    assert all(logs)
    assert not any(marker in log for log in logs)


@pytest.mark.parametrize("cleanup", ["delete", "compact", "both"])
def test_topics_of_each_policy_lose_the_row_and_keep_their_policy(
    pipeline: NewPipeline, tmp_path: Path, cleanup: str
) -> None:
    """Kafka deletes no records of a topic that it only compacts; a killed run changes nothing."""
    kept = _kept(pipeline, tmp_path, {}, cleanup)
    made, client = kept.archived.pipeline, topics.admin(kept.config)
    topic = f"{made.config.prefix}.public.users"

    def settings() -> dict[str, str]:
        names = ("cleanup.policy", "retention.ms", "retention.bytes")
        found = topics.settings_of(client, [topic])[topic]
        return {name: found[name] for name in names}

    before = settings()
    kept.lived(marker := uuid4().hex)
    assert made.daemon.term() == 0
    kept.kill(failpoints.ERASE_TOPICS_NAMES[0], "--topics", "--", "public.users", f"new-{marker}")
    if cleanup == "compact":  # meanwhile nothing may be deleted by retention
        unlimited = {"retention.ms": "-1", "retention.bytes": "-1"}
        assert settings() == {"cleanup.policy": "compact,delete"} | unlimited
    found = kept.erase(f"new-{marker}", "--topics")
    assert (found["topics"], found["epoch"]) == ([], 2)
    assert (kept.logged(marker), settings()) == (set(), before)
    daemon = made.start().wait_ready()
    assert daemon.health()["wrong_policies"] == {}
    kept.lived(uuid4().hex)
    kept.expect_sound(5)
    if cleanup == "compact":  # it shall have every row, of which it has lost the older ones
        wait_state(made, begin(made, "public.users"))
        records = read_to_end(kept.config, {topic: made.resume()[0].partitions[topic]})
        published = {message.key() for message in records if message.value() is not None}
        assert {_key(each) for each in source(kept.archived, "users")} <= published  # type: ignore[arg-type]


def test_a_topic_that_somebody_compacts_is_not_emptied(kept: Kept) -> None:
    kept.lived(marker := uuid4().hex)
    kept.follow()
    assert kept.archived.pipeline.daemon.term() == 0
    topic = f"{kept.config.prefix}.public.users"
    topics.alter(topics.admin(kept.config), {topic: {"cleanup.policy": "compact"}})
    with pytest.raises(ConfigError, match=r"cleanup\.policy has no `delete`") as refused:
        Erasing(kept.config, "public.users", f"new-{marker}", with_topics=True).run()
    assert "cdc doctor" in refused.value.hint


@pytest.mark.long("four followers, five times each")
def test_an_erased_row_is_in_no_store_and_no_author_s_message(
    pipeline: NewPipeline, tmp_path: Path
) -> None:
    """Of a mirror, a history, soft deletes, and a database that is vacuumed; all continue."""
    lake, copy = tmp_path / "lake", tmp_path / "copy.db"
    delta = {"path": str(lake / "mirror"), "applier": "vectors"}
    kept = _kept(
        pipeline,
        tmp_path,
        {
            "mirror": {"delta": delta},
            "versions": {"delta": {"path": str(lake / "v"), "history": ["public.users"]}},
            "soft": {"delta": {"path": str(lake / "s"), "deletes": "soft"}},
            "copy": {"sql": {"url": f"sqlite:///{copy}"}},
        },
    )
    marker, other = uuid4().hex, uuid4().hex
    kept.lived(other)
    kept.lived(marker, each=kept.follow)
    kept.execute("INSERT INTO users VALUES ('signed', 'n', 'b')")
    with kept.archived.pipeline.database.connect() as connection, connection.transaction():
        connection.execute("SELECT pg_logical_emit_message(true, 'audit', %s)", [f"by {marker}"])
        connection.execute("DELETE FROM users WHERE id = 'signed'")
    kept.archived.reach()
    kept.follow()
    assert {each.partition("/")[0] for each in kept.holds(marker, lake)} == {"mirror", "v", "s"}
    versions = _versions(lake / "v")
    others = history(kept.config, "public.users", f"old-{other}")
    done = kept.erase(f"new-{marker}", "--mirrors")
    assert done["mirrors"] == {name: ["public.users"] for name in ("mirror", "versions", "soft")}
    assert list(done["stores"]) == ["copy"]
    assert kept.holds(marker, lake) == []
    assert _versions(lake / "v") == [each for each in versions if marker not in each[0]]
    assert sum(other in each[0] for each in versions) == 3
    # The database's pages have deleted rows until it is vacuumed, as is printed.
    with closing(sqlite3.connect(copy)) as database:
        database.execute("VACUUM")
    assert marker.encode() not in copy.read_bytes()
    # An author is who the application says it was: kept, unless it is asked for.
    assert kept.erase("signed")["messages"] == {"audit": 1}
    assert kept.holds(marker)
    assert kept.erase("signed", "--messages", "audit")["messages"] == {}
    assert kept.holds(marker) == []
    kept.expect_sound(5 + 2 + 1)
    assert history(kept.config, "public.users", f"old-{other}") == others
    kept.execute("UPDATE users SET name = 'after' WHERE name = 'n2'")
    kept.follow()
    assert kept.in_mirror("lake/mirror") == source(kept.archived, "users")
    valid = [each for each in _versions(lake / "v") if each[2]]
    assert {each[0] for each in valid} == source(kept.archived, "users").keys()


def _in_message(marker: str) -> str:
    """Return how a message's event has a marker that starts at a multiple of 3 bytes."""
    return base64.b64encode(marker.encode()).decode().rstrip("=")[:-1]


def _versions(lake: Path) -> list[tuple[str, int, bool]]:
    """Return id, seq and whether it is valid, of each version of a history."""
    found = read_as_of_arrow(str(lake), ["public.users"]).tables["public.users"]
    return sorted(
        zip(*(found[name].to_pylist() for name in ("id", "_seq", "_current")), strict=True)
    )


@pytest.mark.long("views on Spark")
def test_views_over_an_erased_row_do_not_have_it(
    pipeline: NewPipeline, tmp_path: Path, spark: SparkSession
) -> None:
    """Nor a view over the view; the follower of views is not left without its frontier."""
    views: dict[str, object] = {
        "names": {"sql": "SELECT id, name FROM users", "key": ["id"]},
        "longer": {"sql": "SELECT id, name || '!' AS name FROM names", "key": ["id"]},
    }
    lake, answers = tmp_path / "lake", tmp_path / "answers"
    followers = {
        "mirror": {"delta": {"path": str(lake)}},
        "answers": {
            "mirror": "mirror",
            "views": list(views),
            "delta": {"path": str(answers), "history": ["views.longer"]},
        },
    }
    kept = _kept(pipeline, tmp_path, followers, views=views)
    start = SparkStart(lambda: spark, {"mirror"})
    both = partial(kept.follow, "mirror", "answers", spark=start)
    marker = uuid4().hex
    kept.lived(marker, each=both)
    assert kept.holds(marker, answers)
    kept.execute("UPDATE users SET name = 'n3' WHERE name = 'n2'")
    kept.archived.reach()
    kept.follow("mirror")
    with pytest.raises(ConfigError, match="answers is at seq"):
        Erasing(kept.config, "public.users", f"new-{marker}", with_mirrors=True).run()
    both()
    done = Erasing(kept.config, "public.users", f"new-{marker}", with_mirrors=True).run()
    assert done.mirrors["answers"] == ["views.definitions", "views.longer", "views.names"]
    assert kept.holds(marker, lake) == kept.holds(marker, answers) == []
    kept.execute("UPDATE users SET name = 'n4' WHERE name = 'n3'")
    both()
    names = read_as_of_arrow(str(answers), ["views.names"]).tables["views.names"]
    assert sorted(names["id"].to_pylist()) == sorted(source(kept.archived, "users"))
    assert set(names["name"].to_pylist()) == {"n4"}


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


@pytest.mark.parametrize("deleted", [False, True], ids=["exists", "deleted-again"])
def test_a_row_that_returns_before_the_commit_is_checked_again(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, *, deleted: bool
) -> None:
    """Its key is inserted and archived between the check and the commit."""
    kept.execute("INSERT INTO users VALUES ('a', 'first', 'b')")
    kept.execute("DELETE FROM users WHERE id = 'a'")
    kept.archived.reach()
    erasure = Erasing(kept.config, "public.users", "a")

    def returns(failpoint: str) -> None:
        if failpoint != "erase_file":
            return
        monkeypatch.undo()
        kept.execute("INSERT INTO users VALUES ('a', 'again', 'b')")
        if deleted:
            kept.execute("DELETE FROM users WHERE id = 'a'")
        kept.archived.reach()

    monkeypatch.setattr(failpoints, "reach", returns)
    if deleted:
        done = erasure.run().erasure
        assert done is not None
        archive = opened(kept.config)
        assert archive.find()
        erased = erasing.erased_seqs(archive, f"{kept.config.prefix}.public.users")
        assert (done.events, done.last_seq) == (4, pc.max(erased).as_py())
    else:
        with pytest.raises(ConfigError, match="exists, or its deletion"):
            erasure.run()
        names = [json.loads(value)["after"] for value in _values(kept, "a")]
        assert [each and each["name"] for each in names] == ["first", None, "again"]
    assert rows_of(kept.archived, "users") == source(kept.archived, "users")


def test_a_commit_after_an_erasure_is_a_conflict_and_a_running_archive_continues(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The erasure deletes the commit that the other process has loaded, and the checkpoint."""
    kept.execute("INSERT INTO users VALUES ('a', 'n', 'b'), ('b', 'n', 'b')")
    kept.execute("DELETE FROM users")
    kept.archived.reach()
    Compaction(kept.config, None).run()
    archive, bases = opened(kept.config), bases_of(kept.config)
    position = archive.open()
    bases.create()
    record = bases.newest()
    assert record is not None

    def erases(failpoint: str) -> None:
        if failpoint == "archive_cut":
            monkeypatch.undo()
            assert Erasing(kept.config, "public.users", "a").run().erasure is not None

    monkeypatch.setattr(failpoints, "reach", erases)
    kept.execute("INSERT INTO quiet VALUES (1, 'q')")
    kept.archived.reach()
    with pytest.raises(ConflictError):
        archive.commit([], position, "WRITE")
    with pytest.raises(ConflictError):
        bases.commit(record, [], set(bases.added()))
    assert archive.find()
    archive.commit([], archive.position(), "WRITE")
    # Two erasures delete the commit after the loaded one, too: it could be written again.
    assert archive.find()
    position = archive.position()
    assert Erasing(kept.config, "public.users", "b").run().erasure is not None
    with pytest.raises(ConflictError):
        archive.commit([], position, "WRITE")
    assert archive.find()
    archive.commit([], archive.position(), "WRITE")
    kept.expect_sound(4)


def test_an_erasure_between_whose_files_another_one_comes_is_done(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one replaces files that this one has listed and is about to read."""
    for change in (
        "INSERT INTO users VALUES ('a', 'first', 'b'), ('other', 'second', 'b')",
        "UPDATE users SET name = name || ' changed'",
        "DELETE FROM users",
    ):
        kept.execute(change)
        kept.archived.reach()
    erasure = Erasing(kept.config, "public.users", "a")

    def another(failpoint: str) -> None:
        if failpoint == "erase_file":
            monkeypatch.undo()
            assert Erasing(kept.config, "public.users", "other").run().erasure is not None

    monkeypatch.setattr(failpoints, "reach", another)
    done = erasure.run().erasure
    assert done is not None
    assert done.events == 3
    archive = _opened(kept)
    assert len(erasing.erasures(kept.config, archive)) == 2
    assert not proving.prove(kept.config, archive).findings


def _opened(kept: Kept) -> ArchiveTable:
    archive = opened(kept.config)
    assert archive.find()
    return archive


def _values(kept: Kept, key: str) -> list[bytes]:
    """Return the archived events of a row, in seq order."""
    archive = opened(kept.config)
    assert archive.find()
    where = f"op IS NOT NULL AND key_hash = {key_hash(_key(key))}"
    rows = lake.read(archive.table, ["seq", "value"], where).sort_by("seq")
    values: list[bytes] = rows["value"].to_pylist()
    return values


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
        mask = erasing.mask_of(rows, subject, kept.config.prefix)
        if any(mask.to_pylist()):
            parts = [rows.filter(pc.invert(mask)), erasing.bare(rows.filter(mask))]
            forged = write(archive.files, pa.concat_tables(parts))
            archive.commit([removed(add), forged], position, "ERASE")
    chains = proving.prove(kept.config, opened(kept.config)).chains
    for upto in (None, *(lsn for lsn, _ in chains)):
        findings = proving.prove(kept.config, opened(kept.config), upto).findings
        assert any("are erased, where erasures state 0" in each for each in findings), findings


def test_an_altered_or_dropped_audit_names_the_first_cut_after_it(
    kept: Kept, tmp_path: Path
) -> None:
    """Each of two erasures, replaced by one that says something else, or taken out."""
    for name in ("m1", "m2"):
        kept.lived(name)
        assert Erasing(kept.config, "public.users", f"new-{name}").run().erasure is not None
    kept.lived("m3")
    prefix, archive = kept.config.prefix, opened(kept.config)
    position, topic = archive.open(), erased_topic(prefix)
    assert position.newest is not None
    assert position.audits == (2, position.newest.audit)
    first, second = erasing.erasures(kept.config, archive)
    assert sum(many for _, many in first.cuts) == first.records
    where = f"topic = '{archive_topic(prefix)}'"
    values = lake.read(archive.table, ["value"], where)["value"].to_pylist()
    cuts = sorted(map(layout.decode, values), key=lambda each: each.number)
    expected = [next(each.number for each in cuts if each.audits > at) for at in (0, 1)]
    assert expected[0] < expected[1]
    attacks: list[tuple[int, erasing.Erasure | None]] = [
        (0, replace(first, table="public.quiet")),
        (0, replace(first, cuts=())),
        (1, replace(second, erased_at_us=0)),
        (1, None),
    ]
    for number, (at, other) in enumerate(attacks):
        copy = tmp_path / f"altered-{number}"
        shutil.copytree(kept.folder, copy)
        altered = ArchiveTable(str(copy), {}, kept.config.pipeline)
        altered.open()
        for path, add in altered.added().items():
            rows = erasing.read(altered, path)
            mine = pc.and_(pc.equal(rows["topic"], topic), pc.equal(rows["offset"], at))
            if not pc.any(mine).as_py():
                continue
            parts = [rows.filter(pc.invert(mine))]
            if other is not None:
                value = msgspec.json.encode(other)
                audit = of_erasure(prefix, expected[at] - 1, at, value)
                parts.append(pa.Table.from_batches([audit]))
            forged = pa.concat_tables(parts)
            actions = [removed(add, changes_rows=True)]
            actions += [write(altered.files, forged)] * bool(len(forged))
            altered.commit(actions, position, "ERASE")
        findings = proving.prove(kept.config, altered).findings
        named = [each for each in findings if "an audit record is missing or is not" in each]
        assert len(named) == 1, findings
        assert named[0].startswith(f"cut {expected[at]} "), named
    assert proving.prove(kept.config, opened(kept.config)).findings == ()


def _key(text: str) -> bytes:
    return b'{"id":"%s"}' % text.encode()


@pytest.mark.long("nine kills of one job", sample=["committed"])
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("erase_committed",), id="committed"),
        pytest.param(failpoints.ERASE_NAMES + failpoints.ERASE_MIRRORS_NAMES, id="all"),
    ],
)
def test_an_erasure_killed_at_any_step_is_completed_by_the_next(
    kept: Kept, names: tuple[str, ...]
) -> None:
    for number, failpoint in enumerate(names, 1):
        marker = uuid4().hex
        kept.lived(marker, each=kept.follow)
        kept.kill(failpoint, "--mirrors", "--", "public.users", f"new-{marker}")
        assert kept.in_mirror() == source(kept.archived, "users")
        Erasing(kept.config, "public.users", f"new-{marker}", with_mirrors=True).run()
        assert kept.holds(marker, kept.folder.parent) == [], failpoint
        kept.expect_sound(5 * number)
        archive = opened(kept.config)
        assert archive.find()
        assert len(erasing.erasures(kept.config, archive)) == number
