"""Every guarantee names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_TEXT = (ROOT / "docs" / "GUARANTEES.md").read_text("utf-8")
_TABLE = _TEXT.split("## ", 1)[0]
_ROWS = [line for line in _TABLE.splitlines() if line.startswith("| **")]
_CASES = _TEXT.partition("## Cases")[2].partition("\n## ")[0]
_PATH = re.compile(r"`((?:tests|cdc|benchmarks)/[\w./-]*)`")


def test_a_guarantee_names_what_attacks_it() -> None:
    attacks = {row.split("**")[1]: row.rstrip("| ").rpartition(" | ")[2] for row in _ROWS}
    assert attacks
    assert {
        guarantee: attack
        for guarantee, attack in attacks.items()
        if not _PATH.findall(attack) and not attack.startswith("the same")
    } == {}


def test_what_it_names_is_there() -> None:
    named = set(_PATH.findall(_TEXT))
    assert named
    assert {path for path in named if not (ROOT / path).exists()} == set()


def names_in(folder: str) -> set[str]:
    return {
        name
        for path in (ROOT / folder).rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)
    }


def test_every_case_is_in_the_list_and_the_list_names_no_other() -> None:
    named = set(re.findall(r"`(test_\w+)`", _CASES))
    assert names_in("tests/cases") <= named <= names_in("tests")


def test_what_runs_on_one_major_is_run_on_each_by_make() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8").partition("BY_MAJOR :=")[2]
    listed = set(re.findall(r"\w+\.py", makefile.partition("\n\n")[0]))
    marked = {path.partition("test_")[2] for path in re.findall(r"`(tests/[\w/.]+)` ◦", _CASES)}
    assert listed == marked
