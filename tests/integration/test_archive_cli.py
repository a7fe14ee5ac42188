"""`cdc archive`, `cdc prove` and `cdc history` as they are typed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cdc.console.explain import Explainer
from cdc.errors import ConfigError, Exit
from lockstep.jobs.compacting.running import Compaction
from tests.fixtures.archived import Archived
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest

_SECONDS = 400


def cdc(made: PipelineUnderTest, *arguments: str) -> tuple[int, Any]:
    """Run a command with --json; return its exit code and what it printed."""
    command = [str(Path(sys.executable).with_name("cdc")), *arguments, "--json"]
    done = subprocess.run(
        command,
        env={"PATH": "/usr/bin:/bin", "LOCKSTEP_CONFIG": str(made.config_file)},
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
    console = Explainer(made.config_file)
    explained = asyncio.run(console.versions("public.users", "7"))
    assert explained == {"count": 3, "versions": found}
    assert asyncio.run(console.versions("public.users", "8"))["count"] == 0
    with pytest.raises(ConfigError, match="neither archive nor log"):
        asyncio.run(console.versions("public.no_such", "--json"))
    next((tmp_path / "archive").glob("part-*")).unlink()
    code, proof = cdc(made, "prove", "--offline")
    assert code == Exit.FAILED
    assert any("part-" in each for each in proof["findings"])
