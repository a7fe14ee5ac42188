"""The systemd unit: what systemd itself finds in it, and that it knows our exit codes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from cdc.cli.main import cdc
from cdc.errors import Exit
from tests.fixtures.tiers import need_program

_UNIT = Path(__file__).parents[2] / "compose" / "lockstep@.service"
_PROGRAM = "/opt/lockstep/bin/cdc"


def verified(text: str, folder: Path) -> str:
    """Return what systemd complains about; the program is one that this machine has."""
    unit = folder / "lockstep@run.service"
    unit.write_text(text.replace(_PROGRAM, "/bin/true"), "utf-8")
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    return "\n".join(each for each in lines if unit.name in each or unit.stem in each)


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    need_program("systemd-analyze")
    text = _UNIT.read_text("utf-8")
    assert verified(text, tmp_path) == ""
    assert "RestartPreventExitStatuses" in verified(
        text.replace("RestartPreventExitStatus", "RestartPreventExitStatuses"), tmp_path
    ), "a wrong name is found"


def test_the_unit_restarts_unless_a_person_is_needed_and_names_parts_that_exist() -> None:
    text = _UNIT.read_text("utf-8")
    assert re.findall(r"^RestartPreventExitStatus=(.*)$", text, re.MULTILINE) == [
        str(int(Exit.CONFIG))
    ]
    assert re.findall(r"^Restart=(.*)$", text, re.MULTILINE) == ["always"]
    assert re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE) == [f"{_PROGRAM} %i"]
    named = set(re.findall(r"lockstep@(\w+)", text))
    assert named >= {"run", "follow", "console"}
    assert named <= set(cdc.list_commands(cdc.make_context("cdc", [], resilient_parsing=True)))
