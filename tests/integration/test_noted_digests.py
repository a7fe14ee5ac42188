"""`cdc archive digests` and `cdc prove --digests`: chains in a place that no writer can change."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import obstore
import pytest
from msgspec.structs import replace
from obstore.exceptions import PermissionDeniedError

from cdc.errors import ConfigError, GapError, UnavailableError
from cdc.log import acknowledged, digests, names, reader, records, topics
from cdc.log.digests import ChunkHash
from cdc.log.records import FrontierRecord, ResumePosition
from cdc.operate.followers import ARCHIVE
from cdc.verify import topics as log_proof
from lockstep.jobs.apply.running import FollowerRun
from lockstep.jobs.archiving import proving
from lockstep.jobs.archiving.noting import Notes
from lockstep.jobs.archiving.running import Archiving
from lockstep.jobs.archiving.table import ArchiveTable
from lockstep.sinks.delta.actions import Files
from lockstep.sinks.delta.lake import ConflictError
from tests.fixtures.archived import Archived
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.object_store import Bucket, CreateOnly, S3Proxy
from tests.golden import loading
from tests.golden.record_log import records_of

_SECONDS = 300


@pytest.fixture
def line(pipeline: NewPipeline, archive_path: str) -> PipelineUnderTest:
    made = pipeline(
        "CREATE TABLE users (id int PRIMARY KEY, name text)",
        archive={"path": archive_path, "every_seconds": 0},
        source={"canary_seconds": 0},
    )
    made.start().wait_ready()
    made.database.execute("INSERT INTO users SELECT g, 'ada' FROM generate_series(1, 50) g")
    return made


def command(line: PipelineUnderTest, *arguments: str) -> list[str]:
    cdc = str(Path(sys.executable).with_name("cdc"))
    return [cdc, *arguments, "--json", "-c", str(line.config_file)]


def prove(line: PipelineUnderTest, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run `cdc prove`; return its exit code and what it prints."""
    done = subprocess.run(
        command(line, "prove", *arguments), capture_output=True, timeout=_SECONDS, check=False
    )
    assert done.returncode in {0, 1}, done.stderr.decode()
    return done.returncode, json.loads(done.stdout)


def test_noted_chains_are_compared_with_log_and_archive(
    line: PipelineUnderTest, archive_path: str
) -> None:
    """Once by itself, again and again with --follow; a missing end shows offline too."""
    place, archived = archive_path.replace("archive", "digests"), Archived(line)
    notes = Notes(line.config, place)
    with pytest.raises(ConfigError, match="has no digests"):
        notes.read()
    archived.reach()
    first, is_new = notes.note()
    assert is_new
    assert notes.note() == (first, False)
    following = subprocess.Popen(
        command(line, "archive", "digests", "--into", place, "--follow", "--every", "1"),
        stdout=subprocess.DEVNULL,
    )
    line.database.execute("UPDATE users SET name = 'ben' WHERE id = 7")
    archived.log_reach()
    wait_until(lambda: len(notes.read()) > 1, "nothing more was noted")
    following.send_signal(signal.SIGTERM)
    assert following.wait(_SECONDS) == 0
    until = archived.reach()
    assert line.daemon.term() == 0
    notes.note()
    code, found = prove(line, "--digests", place)
    assert (code, found["findings"]) == (0, [])
    assert found["log"]["noted"] == found["archive"]["noted"] == len(notes.read())
    assert prove(line, "--digests", place, "--lsn", str(first.lsn))[0] == 0
    # Events that were noted, and that the archive's end lacks.
    line.start().wait_ready()
    line.database.execute("DELETE FROM users WHERE id = 7")
    assert archived.log_reach() > until
    last, _ = notes.note()
    assert prove(line, "--digests", place)[0] == 0  # the log has them
    code, found = prove(line, "--digests", place, "--offline")
    [finding] = found["findings"]
    assert code == 1
    assert f"the frontier {last.lsn} (seq {last.seq}) was noted" in finding
    assert "its newest commits are missing" in finding
    assert prove(line, "--digests", place, "--offline", "--lsn", str(until))[0] == 0


def test_who_may_only_create_objects_can_note_chains_and_alter_none(
    pipeline: NewPipeline, s3_server: S3Proxy, bucket: Bucket, tmp_path: Path
) -> None:
    """With the policy of docs/ARCHIVE.md, in a bucket with object lock."""
    archive = {"path": str(tmp_path / "archive"), "every_seconds": 0}
    made = pipeline(
        "CREATE TABLE users (id int PRIMARY KEY, name text)",
        archive=archive,
        source={"canary_seconds": 0},
    )
    made.start().wait_ready()
    made.database.execute("INSERT INTO users VALUES (1, 'ada')")
    Archived(made).reach()
    assert made.daemon.term() == 0  # so that no frontier comes between the two
    place = f"{bucket.url}/audit"
    with CreateOnly(s3_server, f"{bucket.folder.name}/audit") as guard:
        for is_new in (True, False):
            done = subprocess.run(
                command(made, "archive", "digests", "--into", place),
                env=os.environ | {"AWS_ENDPOINT_URL": guard.url},
                capture_output=True, timeout=_SECONDS, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr.decode()
            assert json.loads(done.stdout)["new"] is is_new
        owner = Files(place, {})
        [name] = owner.names(made.config.pipeline)
        noted = f"{made.config.pipeline}/{name}"
        content = owner.read(noted)
        held = {"aws_endpoint": guard.url, "aws_checksum_algorithm": "sha256"}
        login = Files(place, held)
        with pytest.raises(ConflictError):
            login.put_new(noted, b"other")
        for attempt in (
            partial(login.put, noted, b"other"),
            partial(login.read, noted),
            partial(login.names, ""),
            partial(Files(bucket.url, held).put_new, "elsewhere", b"other"),
        ):
            with pytest.raises(UnavailableError):
                attempt()
        with pytest.raises(PermissionDeniedError):
            obstore.delete(login.store, login.prefix + noted)
        # Without the checksum S3 refuses it.
        with pytest.raises(UnavailableError):
            Files(place, {"aws_endpoint": guard.url}).put_new(f"{noted}.new", b"other")
    assert owner.read(noted) == content
    code, found = prove(made, "--digests", place)
    assert (code, found["archive"]["noted"]) == (0, 1)


def test_nothing_is_noted_of_an_altered_frontier(
    line: PipelineUnderTest, archive_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Archived(line).log_reach()
    notes = Notes(line.config, archive_path)
    [(record, at)] = reader.read_frontier_tail(line.config, 1)
    altered = replace(record, committed_at_us=0)
    monkeypatch.setattr(reader, "read_frontier_tail", lambda *_: [(altered, at)])
    with pytest.raises(GapError, match="does not match its own chain"):
        notes.note()
    monkeypatch.setattr(reader, "read_frontier_tail", lambda *_: [])
    with pytest.raises(ConfigError, match="no frontier with a chain"):
        notes.note()


class Forger:
    """Somebody who may write all topics and the archive, and knows how both are made."""

    def __init__(self, line: PipelineUnderTest) -> None:
        self.line, self.config = line, line.config
        self.bootstrap = str(line.config.log.bootstrap_servers)
        self.records = records_of(self.bootstrap, line.config.prefix)

    def replace(self, old: str, new: str) -> int:
        """Replace a text in every event; return how many have it."""
        many = 0
        for each in self.records:
            own = each["topic"].startswith(f"{self.config.prefix}.cdc.")
            if not own and each.get("value") and old in each["value"]:
                each["value"] = each["value"].replace(old, new)
                many += 1
        return many

    def seal(self) -> None:
        """Compute each digest again, and the chain, and the resume record that states it."""
        topic, chain = names.frontier_topic(self.config.prefix), ""
        ends = dict[tuple[str, int], int]()
        for each in self.records:
            if each["topic"] != topic or not each.get("value"):
                continue
            record = records.decode(FrontierRecord, each["value"].encode(), topic)
            hashed = []
            for name, number, end, _ in record.partitions:
                start = ends.get((name, number), 0)
                ends[name, number] = end
                hashed.append(self._digest(record, name, number, range(start, end)))
            record = digests.sealed(replace(record, digests=tuple(hashed)), chain)
            chain = record.chain
            each["value"] = records.encode(record).decode()
        resume = names.resume_topic(self.config.prefix)
        for each in self.records:
            if each["topic"] == resume and '"position"' in each.get("key", ""):
                position = records.decode(ResumePosition, each["value"].encode(), resume)
                each["value"] = records.encode(replace(position, chain=chain)).decode()

    def _digest(self, record: FrontierRecord, topic: str, number: int, offsets: range) -> str:
        found = [
            each
            for each in self.records
            if (each["topic"], each["partition"]) == (topic, number)
            and each.get("offset", -1) in offsets
        ]
        border, digest = record.seq - sum(record.chunks), digests.START
        for seqs in record.chunks:
            chunk, many = ChunkHash(), 0
            last = 0
            for each in found:
                if each["value"] is not None:
                    last = json.loads(each["value"])["source"]["seq"]
                if border < last <= border + seqs:
                    value = None if each["value"] is None else each["value"].encode()
                    chunk.add_columns([each["key"] and each["key"].encode()], [value])
                    many += 1
            border += seqs
            if many:
                digest = digests.fold(digest, chunk.digest())
        return digests.encoded(digest)

    def write(self) -> None:
        """Replace the topics."""
        admin, config = topics.admin(self.config), self.config
        held = {each["topic"] for each in self.records}
        for done in admin.delete_topics(sorted(held)).values():
            done.result(timeout=60)
        wait_until(lambda: not held & set(admin.list_topics(timeout=60).topics), "the topics stay")
        data = topics.data_topic(config, "public", "users")
        own = [*topics.internal_topics(config), topics.followers_topic(config)]
        made = {each.name: each for each in [*own, data]}
        topics.ensure(admin, config, list(made.values()))
        resume = names.resume_topic(config.prefix)
        # Reports of followers are outside of transactions; the archive's job writes others.
        without = (resume, names.followers_topic(config.prefix))
        log = loading.RecordedLog(4, {}, self.records)
        loading.load(log, self.bootstrap, without=without)
        old = [each for each in self.records if each["topic"] == resume and "key" in each]
        written = [(each["key"].encode(), each["value"].encode()) for each in old]
        acknowledged.write(config, resume, written)


def test_a_history_that_was_rewritten_in_log_and_archive_is_named(
    line: PipelineUnderTest, archive_path: str, tmp_path: Path
) -> None:
    """Each is sound and both agree: only what was noted shows that they are others than before."""
    if archive_path != str(tmp_path / "archive"):
        pytest.skip("the archive's place makes no difference here")
    archived, place = Archived(line), str(tmp_path / "digests")
    archived.reach()
    first, _ = Notes(line.config, place).note()
    line.database.execute("UPDATE users SET name = 'ben' WHERE id = 7")
    archived.reach()
    assert line.daemon.term() == 0
    Notes(line.config, place).note()
    assert prove(line, "--digests", place)[0] == 0
    forger = Forger(line)
    assert forger.replace('"name":"ada"', '"name":"eve"') >= 50
    forger.seal()
    forger.write()
    shutil.rmtree(archive_path)
    run = FollowerRun(
        line.config, ARCHIVE, "delta", Archiving(line.config, None, archived.frontier())
    )
    assert run.run() == 0, run.error
    written = line.frontiers()
    assert all(after.previous == before.chain for before, after in pairwise(written))
    assert log_proof.prove(line.config).findings == ()
    archive = ArchiveTable(archive_path, {}, line.config.pipeline)
    assert proving.prove(line.config, archive).findings == ()
    code, found = prove(line)
    assert (code, found["findings"]) == (0, [])
    stored = [value or b"" for *_, value in archived.stored()]
    assert any(b'"name":"eve"' in value for value in stored)
    assert not any(b'"name":"ada"' in value for value in stored)
    for offline in ((), ("--offline",)):
        code, found = prove(line, "--digests", place, *offline)
        assert code == 1
        named = [each for each in found["findings"] if f"{first.lsn} (seq {first.seq})" in each]
        assert named
        assert all("has another chain than was noted" in each for each in found["findings"])
