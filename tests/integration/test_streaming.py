"""The log does not show whether Postgres streams a transaction or keeps it until its commit."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cdc.playground.servers.stack import LocalStack
from tests.fixtures.alike import Another, content, quiesced
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.standby import NewPair, majors
from tests.fixtures.tiers import missing
from tests.fixtures.witness import Witness
from tests.integration import streamed_load


def streamed(line: PipelineUnderTest) -> int:
    """Return how many transactions Postgres has started to stream to it."""
    return int(
        line.query(
            "SELECT stream_txns FROM pg_stat_replication_slots WHERE slot_name = %s",
            line.config.slot,
        )[0]
    )


def spooled(line: PipelineUnderTest) -> list[Path]:
    """Return the files in its spool directory, without the daemon's own empty directory."""
    spool_dir = line.config.source.spool_dir
    assert spool_dir is not None
    return list(Path(spool_dir).glob("lockstep-*/spool.*/*"))


def rereads(line: PipelineUnderTest) -> int:
    reported = [event for event in line.daemon.events if event["event"] == "starting over"]
    return sum("streamed before its commit" in event["fields"]["error"] for event in reported)


@pytest.mark.commit("both ways a transaction is sent")
@pytest.mark.majors
@pytest.mark.parametrize("major", majors(15, 16, 17, 18))
def test_streamed_or_sent_at_commit_the_log_is_the_same_byte_for_byte(
    major: int, new_pair: NewPair, another: Another
) -> None:
    _, line = new_pair(
        major,
        *streamed_load.TABLES,
        standby=False,
        settings=streamed_load.SETTINGS,
        streaming="off",
    )
    witness = Witness(line)
    lines = [line, another(line, streaming="on")]
    if major >= 16:
        lines.append(another(line, streaming="parallel"))
    for each in lines:
        each.start()
    for each in lines:
        each.daemon.wait_ready()
    streamed_load.write(line.database.dsn)
    quiesced(lines)
    counts = [streamed(each) for each in lines]
    assert counts[0] == 0
    assert all(count >= 6 for count in counts[1:]), "Postgres did not stream"
    assert [each.daemon.metric("lockstep_reconnects_total") for each in lines] == [0] * len(lines)
    streamed_load.write_doubtful(line.database.dsn)
    quiesced(lines)
    assert [rereads(each) for each in lines] == [0] + [1] * (len(lines) - 1)
    assert not any(witness.difference())
    complete = content(line)
    for each in lines[1:]:
        assert content(each) == complete
        wait_until(lambda: not spooled(each), "the file stays")  # noqa: B023 - at once


# -- when something dies while blocks are spooled --------------------------------------------------

_USERS = "CREATE TABLE users (id int PRIMARY KEY, n int NOT NULL, name text)"
# More than the spool keeps in memory, and little for Postgres, which compresses it.
_WIDE = "INSERT INTO users SELECT i, 1, repeat('w', 10000) FROM generate_series({}, {}) i"
# A chunk that is read back is a megabyte: a hundred of these rows, and a batch.
_SMALL_BATCHES = {"max_events": 50, "max_wait_ms": 50}


def new_line(new: NewPipeline, spool_dir: Path, streaming: str = "on") -> PipelineUnderTest:
    source: dict[str, object] = {"streaming": streaming, "spool_dir": str(spool_dir)}
    line = new(_USERS, source=source, batch=_SMALL_BATCHES)
    line.database.execute(
        f"ALTER DATABASE {line.database.name} SET logical_decoding_work_mem = '64kB'"
    )
    return line


def started(line: PipelineUnderTest, first: int) -> psycopg.Connection[tuple[Any, ...]]:
    """Begin a large transaction, and wait until some of it is in the daemon's spool."""
    session = psycopg.connect(line.database.dsn)
    session.execute(_WIDE.format(first, first + 2_500).encode())
    # Only WAL on disk is sent, and an open transaction alone flushes none.
    line.database.execute("CHECKPOINT")
    wait_until(lambda: spooled(line), "nothing is spooled")
    return session


def homes(line: PipelineUnderTest) -> list[Path]:
    """Return the spool directories of its daemons, running and dead."""
    spool_dir = line.config.source.spool_dir
    assert spool_dir is not None
    return list(Path(spool_dir).glob("lockstep-*/spool.*"))


@pytest.mark.long("tests/property/test_streamed_histories.py crashes anywhere")
def test_killed_while_it_spools_it_leaves_no_files_and_loses_nothing(
    pipeline: NewPipeline, tmp_path: Path
) -> None:
    line = new_line(pipeline, tmp_path)
    witness = Witness(line)
    daemon = line.start().wait_ready()
    with started(line, 10_000) as kept, started(line, 20_000) as dropped:
        daemon.kill()
        assert spooled(line)
        dropped.rollback()
        line.start().wait_ready()
        wait_until(lambda: spooled(line), "it is not streamed again")
        assert len(homes(line)) == 1
        kept.execute(_WIDE.format(30_000, 30_100).encode())
        kept.commit()
    assert witness.check().events == 2_501 + 101
    wait_until(lambda: not spooled(line), "the file stays")
    assert line.daemon.term() == 0
    assert homes(line) == []


@pytest.mark.long("tests/property/test_streamed_histories.py crashes anywhere")
def test_killed_while_it_reads_back_it_continues_after_what_it_published(
    pipeline: NewPipeline, tmp_path: Path
) -> None:
    line = new_line(pipeline, tmp_path)
    witness = Witness(line)
    daemon = line.start("after_commit:6").wait_ready()
    with started(line, 10_000) as session:
        session.commit()
    reached = 1
    for failpoint in ("before_confirm:4", "after_flush:3", ""):
        assert daemon.wait_exit() == -signal.SIGKILL
        position = line.resume()[1]
        assert position.open
        assert reached < position.seq < 2_500, "it died before or after the transaction"
        reached = position.seq
        daemon = line.start(failpoint)
    assert witness.check().events == 2_501
    assert streamed(line) >= 2, "Postgres did not stream"
    assert (len(homes(line)), spooled(line)) == (1, [])


@pytest.mark.long("a crash of the server, which the campaign has")
def test_what_postgres_forgot_in_a_crash_is_forgotten_in_the_spool(
    killable_pipeline: NewPipeline, killable_stack: LocalStack, tmp_path: Path
) -> None:
    """The dead transaction is streamed again, then reported as aborted, without a WAL position."""
    line = new_line(killable_pipeline, tmp_path, "parallel")
    witness = Witness(line)
    line.start().wait_ready()
    session = started(line, 10_000)
    killable_stack["postgres"].kill()
    session.close()
    killable_stack.start("postgres")
    line.daemon.wait_ready()
    line.database.execute("INSERT INTO users VALUES (1, 1)", "CHECKPOINT")
    assert witness.check().events == 1
    wait_until(lambda: not spooled(line), "it stays in the spool")
    assert line.daemon.process.poll() is None


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give daemons that start from here on their own file system at this path, 4 MB of it free."""
    alone = ("unshare", "--map-root-user", "--mount")
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode != 0:
        missing("namespaces", "unshare may not make any here")
    place = tmp_path / "disk"
    place.mkdir()
    mount = f"mount -t tmpfs -o size=64m,mode=0700 lockstep {place}"
    fill = f"head -c 60M /dev/zero > {place}/ballast"
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nexec {" ".join(alone)} sh -c \'{mount} && {fill} && exec "$0" "$@"\''
        f' {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return place


def test_a_full_disk_makes_it_wait_and_say_so_until_there_is_room(
    pipeline: NewPipeline, small_disk: Path
) -> None:
    line = new_line(pipeline, small_disk)
    witness = Witness(line)
    daemon = line.start().wait_ready()
    with psycopg.connect(line.database.dsn) as session:
        session.execute(_WIDE.format(1, 2_500).encode())
    output = "spooling a streamed transaction"
    wait_until(lambda: daemon.log.count(output) > 2, "it does not say so")
    # Between two sessions; at the beginning of each it streams, until the disk is full again.
    wait_until(lambda: daemon.health()["status"] == 503, "it is ready all the same")
    assert "No space left on device" in daemon.log
    assert "source.spool_dir" in daemon.log
    assert line.resume()[1].seq == 0
    # The path as the daemon sees it.
    (Path(f"/proc/{daemon.process.pid}/root") / small_disk.relative_to("/") / "ballast").unlink()
    assert witness.check().events == 2_500
    daemon.wait_ready()
    assert daemon.term() == 0
