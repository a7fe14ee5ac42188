"""A range of the past is published to a topic: every event once, in seq order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cdc import failpoints
from cdc.cli.main import run as cdc
from cdc.errors import ConfigError, Exit
from cdc.log.reader import read_frontier_tail
from cdc.runtime import spark as files
from lockstep.jobs import replaying
from lockstep.jobs.replaying import RangeReplay
from tests.fixtures.archived import Archived
from tests.fixtures.daemon import NewPipeline
from tests.fixtures.read_back import read_to_end

_JOB_SECONDS = 400
Record = tuple[bytes | None, bytes | None]


class Kept:
    """A pipeline of which a part is archived, and a part is in the topics alone."""

    def __init__(self, archived: Archived) -> None:
        self.archived, self.config = archived, archived.config
        self.database = archived.pipeline.database

    def write(self, low: int) -> int:
        """Change both tables; return the seq of the log's frontier after it."""
        self.database.execute(
            f"INSERT INTO users SELECT g, 'n' || g FROM generate_series({low}, {low + 30}) g",
            f"INSERT INTO quiet VALUES ({low}, 'q')",
            f"UPDATE users SET id = id + 1000 WHERE id = {low + 1}",
            f"DELETE FROM users WHERE id % 7 = 1 AND id >= {low}",
        )
        self.archived.log_reach()
        return read_frontier_tail(self.config, 1)[-1][0].seq

    def log(self, first: int, last: int, *tables: str) -> list[Record]:
        """Return the records of a range as the topics have them, in seq order."""
        found: list[tuple[int, int, Record]] = []
        for table in tables:
            topic, seq = f"{self.config.prefix}.public.{table}", {}
            for message in read_to_end(self.config, {topic: self.config.log.partitions}):
                value, place = message.value(), message.partition()
                if value is not None:
                    seq[place] = json.loads(value)["source"]["seq"]
                found.append((seq[place], message.offset() or 0, (message.key(), value)))
        return [record for seq, _, record in sorted(found) if first < seq <= last]

    def topic(self, name: str) -> list[Record]:
        return [(each.key(), each.value()) for each in read_to_end(self.config, {name: 1})]


@pytest.fixture
def kept(pipeline: NewPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    monkeypatch.setattr(replaying, "WINDOW_EVENTS", 20)
    made = pipeline(
        "CREATE TABLE users (id int PRIMARY KEY, name text)",
        "CREATE TABLE quiet (id int PRIMARY KEY, name text)",
        archive={"path": str(tmp_path / "archive"), "every_seconds": 0},
        source={"canary_seconds": 0.5},
    )
    made.start().wait_ready()
    return Kept(Archived(made))


def test_a_range_is_published_once_from_archive_and_topics(kept: Kept) -> None:
    """Its records are the log's, byte for byte; a repeated or longer range adds what is missing."""
    seqs = [kept.write(0), kept.write(100)]
    kept.archived.reach()
    seqs += [kept.write(200), kept.write(300)]
    into = f"{kept.config.pipeline}-replay-{os.getpid()}"
    first, middle, last = seqs[0], seqs[2], seqs[3]
    done = RangeReplay(kept.config, into, first, middle).run()
    assert kept.topic(into)[: done.records] == _without_messages(kept, into, first, middle)
    again = RangeReplay(kept.config, into, first, middle).run()
    assert (again.events, again.continued) == (0, middle)
    RangeReplay(kept.config, into, first, last).run()
    assert kept.topic(into) == _without_messages(kept, into, first, last)
    one = f"{into}-users"
    RangeReplay(kept.config, one, "beginning", last, ("public.users",)).run()
    assert kept.topic(one) == kept.log(0, last, "users")
    with pytest.raises(ConfigError, match="holds other records"):
        RangeReplay(kept.config, one, first, last).run()
    with pytest.raises(ConfigError, match="pipeline's own topics"):
        RangeReplay(kept.config, f"{kept.config.prefix}.public.users", first, last)


def test_a_log_that_has_started_again_does_not_continue_a_replay(
    kept: Kept, tmp_path: Path
) -> None:
    """Its seqs begin at 0 again; the topic's last seq is one of the log before."""
    made, last = kept.archived.pipeline, kept.write(0)
    into = f"{kept.config.pipeline}-restarted-{os.getpid()}"
    assert RangeReplay(made.config, into, "beginning", last).run().events
    kept.archived.reach()
    again = RangeReplay(made.config, into, "beginning", last).run()
    assert (again.continued, again.events) == (last, 0)  # the archive has the same first frontier
    made.daemon.term()
    assert cdc(["teardown", "--topics", "--yes", "-c", str(made.config_file)]) == Exit.OK
    made.config_file = made.write("new.yaml", archive__path=str(tmp_path / "other"))
    assert cdc(["setup", "-c", str(made.config_file)]) == Exit.OK
    made.start().wait_ready()
    newest = kept.write(100)
    with pytest.raises(ConfigError, match="holds other records"):
        RangeReplay(made.config, into, "beginning", newest).run()


def _without_messages(kept: Kept, into: str, first: int, last: int) -> list[Record]:
    """Return the range of both tables; logical messages (also canaries) must be the only others."""
    wanted = kept.log(first, last, "users", "quiet")
    found = [record for record in kept.topic(into) if record in wanted]
    others = [record for record in kept.topic(into) if record not in wanted]
    assert found == wanted
    assert all(value and json.loads(value)["op"] == "m" for _, value in others)
    return kept.topic(into)


@pytest.mark.long("the other step", sample=["replay_committed:2"])
@pytest.mark.parametrize("failpoint", [f"{each}:2" for each in failpoints.REPLAY_NAMES])
def test_a_replay_killed_in_a_window_publishes_every_event_once(kept: Kept, failpoint: str) -> None:
    kept.write(0)
    kept.archived.reach()
    last = kept.write(100)
    into = f"{kept.config.pipeline}-killed-{os.getpid()}-{failpoint.partition(':')[0]}"
    given = ["--from", "beginning", "--to", str(last), "--into", into, "--table", "public.users"]
    config = str(kept.archived.pipeline.config_file)
    command = [sys.executable, str(files.job("archived")), "replay", "--config", config, *given]
    script = f"from lockstep.jobs import replaying; replaying.WINDOW_EVENTS = 20; {_MAIN}"
    killed = subprocess.run(
        [sys.executable, "-c", script, *command[2:]],
        env={**os.environ, "LOCKSTEP_FAILPOINT": failpoint},
        capture_output=True,
        timeout=_JOB_SECONDS,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    done: Any = subprocess.run(
        [*command, "--json"], capture_output=True, timeout=_JOB_SECONDS, check=True
    )
    assert json.loads(done.stdout)["continued"] > 0
    assert kept.topic(into) == kept.log(0, last, "users")


_MAIN = (
    "from lockstep.jobs import archived; from lockstep.jobs.apply import app;"
    " app.run(archived.main)"
)
