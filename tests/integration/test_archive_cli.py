"""`cdc archive`, `cdc prove` and `cdc history` as they are typed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cdc.console.explain import Explainer
from cdc.errors import ConfigError, Exit, GapError
from cdc.log import names, topics
from cdc.operate.followers import ARCHIVE
from lockstep.jobs.apply.running import FollowerRun
from lockstep.jobs.archiving.running import Archiving
from lockstep.jobs.compacting.running import Compaction
from tests.fixtures.archived import Archived
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest

_SECONDS = 400


def cdc(made: PipelineUnderTest, *arguments: str) -> tuple[int, Any]:
    """Run a command with --json; return its exit code and what it printed."""
    command = [str(Path(sys.executable).with_name("cdc")), *arguments, "--json"]
    env = {"PATH": "/usr/bin:/bin", "LOCKSTEP_CONFIG": str(made.config_file)}
    if path := os.environ.get("PYTHONPATH"):
        env["PYTHONPATH"] = path
    done = subprocess.run(
        command,
        env=env,
        capture_output=True,
        timeout=_SECONDS,
        check=False,
    )
    assert done.returncode in {0, 1}, done.stderr.decode()
    return done.returncode, json.loads(done.stdout)


def test_an_archive_is_described_and_proved_and_has_a_rows_history(
    pipeline: NewPipeline, tmp_path: Path
) -> None:
    made = pipeline(
        "CREATE TABLE users (id int PRIMARY KEY, name text)",
        archive={"path": str(tmp_path / "archive"), "every_seconds": 0},
        source={"canary_seconds": 0},  # events are counted
    )
    made.start().wait_ready()
    code, status = cdc(made, "status")
    assert (code, status["verdict"]["sentence"]) == (Exit.FAILED, "failed: archive has never run")
    made.database.execute(
        "INSERT INTO users VALUES (7, 'a')", "UPDATE users SET name = 'b' WHERE id = 7"
    )
    archived = Archived(made)
    archived.reach()
    position = archived.position().applied
    code, described = cdc(made, "archive", "status")
    assert (code, described["seq"], described["lag_events"]) == (0, position.seq, 0)
    assert described["bases"] is None
    base, _ = Compaction(made.config, None).run()
    made.database.execute("UPDATE users SET name = 'c' WHERE id = 7")
    archived.reach()
    described = cdc(made, "archive", "status")[1]
    bases = described["bases"]
    assert (bases["kept"], bases["number"], bases["seq"]) == (1, base.number, base.seq)
    assert bases["events_since"] == described["seq"] - base.seq > 0
    files = (tmp_path / "archive" / "_bases").glob("part-*")
    assert bases["bytes"] == sum(each.stat().st_size for each in files)
    code, proof = cdc(made, "prove")
    assert (code, proof["complete"], proof["findings"]) == (0, True, [])
    chain = proof["archive"]["chain"]
    assert cdc(made, "prove", "--offline", "--chain", chain)[0] == Exit.OK
    code, proof = cdc(made, "prove", "--offline", "--chain", "x")
    assert (code, proof["complete"], proof["log"]) == (Exit.FAILED, False, None)
    code, found = cdc(made, "history", "public.users", "7")
    assert (code, [each["op"] for each in found]) == (0, ["insert", "update", "update"])
    assert cdc(made, "history", "public.users", "8") == (Exit.FAILED, [])
    # The console explains a value by the same command.
    console = Explainer(made.config, made.config_file)
    explained = asyncio.run(console.versions("public.users", "7"))
    assert explained == {"count": 3, "versions": found, "searched": None}
    assert asyncio.run(console.versions("public.users", "8"))["count"] == 0
    with pytest.raises(ConfigError, match="neither archive nor log"):
        asyncio.run(console.versions("public.no_such", "--json"))
    code, proof = cdc(made, "prove", "--lsn", base.lsn)
    assert (code, proof["archive"]["seq"], proof["bases"]["number"]) == (0, base.seq, 1)
    altered = next((tmp_path / "archive" / "_bases").glob("part-*"))
    text = altered.read_bytes()
    altered.write_bytes(text[:-1])
    code, proof = cdc(made, "prove", "--lsn", base.lsn)
    assert code == Exit.FAILED
    assert any(altered.name in each for each in proof["findings"])
    altered.write_bytes(text)
    next((tmp_path / "archive").glob("part-*")).unlink()
    code, proof = cdc(made, "prove", "--offline")
    assert code == Exit.FAILED
    assert any("part-" in each for each in proof["findings"])


def test_what_is_missing_at_the_end_is_named_by_what_the_log_has_of_it(
    pipeline: NewPipeline, tmp_path: Path
) -> None:
    """The newest commits, then all bases; without a broker only by a chain that was noted."""
    folder = tmp_path / "archive"
    made = pipeline(
        "CREATE TABLE users (id int PRIMARY KEY, name text)",
        archive={"path": str(folder), "every_seconds": 0},
    )
    made.start().wait_ready()
    archived = Archived(made)
    for number in range(3):
        made.database.execute(f"INSERT INTO users VALUES ({number}, 'n')")
        archived.reach()
    assert cdc(made, "archive", "compact")[0] == Exit.OK
    code, proof = cdc(made, "prove")
    assert (code, proof["findings"], proof["bases"]["bases"]) == (0, [], 1)
    chain = proof["archive"]["chain"]
    newest = max(folder.glob("_delta_log/*.json"))
    text = newest.read_bytes()
    newest.unlink()
    code, found = cdc(made, "prove")
    assert code == Exit.FAILED
    assert any(newest.name in each for each in found["findings"]), found
    assert any("its job has reported seq" in each for each in found["findings"]), found
    assert cdc(made, "prove", "--offline", "--chain", chain)[0] == Exit.FAILED
    found = cdc(made, "prove", "--offline")[1]
    # The base was made of the cut that is missing.
    assert [each.partition(":")[0] for each in found["findings"]] == ["bases"]
    assert len(found["archive"]["unnamed"]) == 1
    (folder / "_bases").rename(tmp_path / "elsewhere")
    assert cdc(made, "prove", "--offline")[0] == Exit.OK, "nothing else has known of it"
    newest.write_bytes(text)
    code, found = cdc(made, "prove")
    assert code == Exit.FAILED
    assert len(found["findings"]) == 1
    assert "has no base any more: one was made at" in found["findings"][0]
    # What retention has deleted meanwhile is in neither, whatever the job reports by then.
    frontier = names.frontier_topic(made.config.prefix), 0
    ends = archived.position().applied.end_of
    made.database.execute("INSERT INTO users VALUES (7, 'n')")
    archived.log_reach()
    made.daemon.term()
    topics.delete_records(topics.admin(made.config), {frontier: ends[frontier]})
    newest.unlink()
    run = FollowerRun(made.config, ARCHIVE, "delta", Archiving(made.config, None))
    assert run.run() == Exit.CONFIG
    assert isinstance(run.error, GapError)
    found = cdc(made, "prove")[1]["findings"]
    assert any("are in neither archive nor log" in each for each in found), found
    assert not any("its job has reported seq" in each for each in found), found
