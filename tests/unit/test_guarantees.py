"""Every guarantee names a test that exists, and figures are those of the runs that are kept."""

from __future__ import annotations

import re
from pathlib import Path

import orjson

from tests.campaign import summary

ROOT = Path(__file__).parents[2]
_TEXT = (ROOT / "docs" / "GUARANTEES.md").read_text("utf-8")
# A table ends with its first line that is none, whatever headings there are.
_TABLE = _TEXT.partition("| guarantee | why it holds | tests |\n")[2].partition("\n\n")[0]
_ROWS = [line for line in _TABLE.splitlines() if line.startswith("| **")]
# More may be added; fewer means that some were dropped, or are no longer found.
_FEWEST = 53
_SECURITY = (ROOT / "docs" / "SECURITY.md").read_text("utf-8")
_CASES = _TEXT.partition("## Cases")[2].partition("\n## ")[0]
_PATH = re.compile(r"`((?:tests|cdc|benchmarks)/[\w./-]*)`")


def test_a_guarantee_names_the_tests_that_attack_it() -> None:
    attacks = {row.split("**")[1]: row.rstrip("| ").rpartition(" | ")[2] for row in _ROWS}
    assert len(attacks) == len(_ROWS) >= _FEWEST
    assert {
        guarantee: attack for guarantee, attack in attacks.items() if "`tests/" not in attack
    } == {}


def test_what_it_names_is_there() -> None:
    named = set(_PATH.findall(_TEXT)) | set(_PATH.findall(_SECURITY))
    assert named
    assert {path for path in named if not (ROOT / path).exists()} == set()


def test_each_section_on_security_names_the_tests_that_attack_it() -> None:
    sections = re.findall(r"^## (.+)$", _SECURITY, re.MULTILINE)
    rows = re.findall(r"^\| ([^|]+) \| ([^|]*`tests/[^|]*) \|$", _SECURITY, re.MULTILINE)
    assert [section for section, _ in rows] == [each for each in sections if each != "Tests"]


def test_the_figures_of_long_runs_are_those_that_were_kept() -> None:
    kept = summary(orjson.loads((ROOT / "tests" / "campaign.json").read_bytes()))
    assert kept in " ".join(_TEXT.split())


def test_figures_of_views_are_added_once_they_are_kept() -> None:
    kept = orjson.loads((ROOT / "tests" / "campaign.json").read_bytes())
    one = {"first_seed": 7, "seeds": 50, "views": 59, "kills": 80, "cuts": 500, "ddl": 1_000}
    many = {"first_seed": 7, "rounds": 50, "views": 60, "injuries": 120, "cuts": {"a": 1, "b": 2}}
    compared = {"comparisons": 29_500, "differences": 0}
    views = {"one_process": one | compared, "processes": many | compared}
    added = summary(kept | {"views": views}).partition("each store the database")[2]
    assert added.startswith("; 50 seeds of 59 views in one process with 80 kills (from seed 7)")
    assert added.endswith("29,500 comparisons at 3 frontiers, 0 differences.")


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
