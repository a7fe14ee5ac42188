"""A short fuzzing run in every test run, and every input that has ever broken something.

`make campaign` searches for long. An input that breaks a target goes into `crashers/TARGET/` with
the fix, under a name that describes its effect.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.tiers import missing
from tests.fuzz.targets import PLANTED, TARGETS

ROOT = Path(__file__).parents[2]
CRASHERS = sorted((Path(__file__).parent / "crashers").glob("*/*"))
SOUND = [name for name in TARGETS if name != PLANTED]


def _search(name: str, artifacts: Path, seed: int = 7) -> subprocess.CompletedProcess[str]:
    if importlib.util.find_spec("atheris") is None:
        missing("atheris", "it has no wheel for this machine")
    options = [
        "--runs",
        str(TARGETS[name].sample),
        "--seed",
        str(seed),
        "--artifacts",
        str(artifacts),
    ]
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz", name, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.mark.parametrize("path", CRASHERS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_broke_once_breaks_no_more(path: Path) -> None:
    TARGETS[path.parent.name].check(path.read_bytes())


@pytest.mark.parametrize("name", SOUND)
def test_what_servers_sent_and_its_prefixes_break_nothing(name: str) -> None:
    target = TARGETS[name]
    for seed in target.seeds():
        target.check(seed)
        target.check(seed[: len(seed) // 2])


@pytest.mark.parametrize("name", SOUND)
def test_a_moment_of_search_finds_nothing(name: str, tmp_path: Path) -> None:
    done = _search(name, tmp_path)
    found = [path.read_bytes() for path in tmp_path.iterdir()]
    assert (done.returncode, found) == (0, []), done.stdout[-2_000:]


def test_the_search_finds_a_bug_that_is_there(tmp_path: Path) -> None:
    # Most seeds find it at once; one that does not proves nothing.
    searches = (_search(PLANTED, tmp_path, seed) for seed in range(1, 7))
    done = next(done for done in searches if done.returncode)
    assert "the planted bug" in done.stdout
    (crasher,) = tmp_path.iterdir()
    with pytest.raises(AssertionError, match="planted"):
        TARGETS[PLANTED].check(crasher.read_bytes())
