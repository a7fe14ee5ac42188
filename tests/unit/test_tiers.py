"""The choice of tests by tier, and their division among processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import durations
from tests.fixtures import workers

pytest_plugins = ["pytester"]
_ROOT = Path(__file__).parents[2]
_TESTS = """
import pytest

def test_short(): pass

def test_slow(): pass

@pytest.mark.commit("why")
def test_slow_and_a_sample(): pass

@pytest.mark.long("why")
def test_long(): pass

@pytest.mark.long("why", again=True)
def test_in_both(): pass

@pytest.mark.long("why", sample=["b"])
@pytest.mark.parametrize("name", ["a", "b"])
def test_sampled(name): pass

@pytest.mark.long("why", sample=["b"], again=True)
@pytest.mark.parametrize("name", ["a", "b"])
def test_sampled_in_both(name): pass
"""
_MODULE = "test_of_tiers.py"
_TOOK = {"test_slow": 10.0, "test_slow_and_a_sample": 60.0, "test_long": 60.0}
_COMMIT = {
    *("test_short", "test_slow_and_a_sample", "test_in_both"),
    *("test_sampled[b]", "test_sampled_in_both[b]"),
}
_SLOW = {"test_slow"}
_LONG = {
    *("test_long", "test_in_both", "test_sampled[a]"),
    *("test_sampled_in_both[a]", "test_sampled_in_both[b]"),
}


@pytest.fixture
def chosen(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Other processes, since the long tier changes the environment and Hypothesis' settings."""
    pytester.makeconftest(
        "from pathlib import Path\n"
        "from tests import durations\n"
        "durations.FILE = Path(__file__).with_name('durations.json')\n"
        "pytest_plugins = ['tests.fixtures.seeds', 'tests.fixtures.tiers']\n"
    )
    pytester.path.joinpath("durations.json").write_text(json.dumps({_MODULE: _TOOK}), "utf-8")
    monkeypatch.setenv("PYTHONPATH", str(_ROOT))
    monkeypatch.delenv("LOCKSTEP_TEST_REQUIRE", raising=False)
    return pytester


@pytest.mark.parametrize(
    ("tier", "expected"),
    [
        ("commit", _COMMIT),
        ("slow", _SLOW),
        ("long", _LONG),
        ("all", _COMMIT | _SLOW | _LONG),
    ],
)
def test_each_test_is_in_a_tier(tier: str, expected: set[str], chosen: pytest.Pytester) -> None:
    chosen.makepyfile(**{Path(_MODULE).stem: _TESTS})
    ended = chosen.runpytest_subprocess("--collect-only", "-q", "--tier", tier)
    assert {line.partition("::")[2] for line in ended.outlines if "::" in line} == expected


def test_a_sample_that_no_case_is_in_is_an_error(chosen: pytest.Pytester) -> None:
    chosen.makepyfile(_TESTS.replace('["b"]', '["c"]'))
    ended = chosen.runpytest_subprocess("--collect-only")
    assert ended.ret == pytest.ExitCode.USAGE_ERROR
    ended.stderr.fnmatch_lines(["*no such cases: c*"])


def test_the_long_tier_prints_a_new_seed(
    chosen: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCKSTEP_SEED", raising=False)
    chosen.makepyfile("def test_it(): pass")
    seeds = {
        line
        for _ in range(2)
        for line in chosen.runpytest_subprocess("--tier", "long").outlines
        if line.startswith("tier: long, LOCKSTEP_SEED: ")
    }
    assert len(seeds) == 2


def test_what_is_required_fails_instead_of_being_skipped(
    chosen: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = "from tests.fixtures.tiers import missing\ndef test_it(): missing('java', 'none')"
    chosen.makepyfile(test)
    chosen.runpytest_subprocess().assert_outcomes(skipped=1)
    monkeypatch.setenv("LOCKSTEP_TEST_REQUIRE", "containers,java")
    chosen.runpytest_subprocess().assert_outcomes(failed=1)


def test_what_was_missing_is_named_at_the_end_with_how_many_tests_it_skipped(
    chosen: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skipped in another process, by a fixture or by the test; other reasons are not among them."""
    monkeypatch.setenv("PATH", str(chosen.path))
    chosen.makepyfile(
        "import pytest\n"
        "from tests.fixtures.tiers import missing, need_program\n"
        "@pytest.fixture(scope='session')\n"
        "def browser(): missing('chromium', 'it is not here')\n"
        "def test_1(browser): pass\n"
        "def test_2(browser): pass\n"
        "def test_3(): need_program('promtool')\n"
        "def test_4(): pytest.skip('of another kind')\n"
        "def test_5(): pass\n"
    )
    skipped = "tests skipped for what is not here: chromium 2, promtool 1;"
    expected = [f"{skipped} LOCKSTEP_TEST_REQUIRE=chromium,promtool fails them instead"]
    for options in ([], ["-n", "2"]):
        ended = chosen.runpytest_subprocess(*options)
        ended.assert_outcomes(skipped=4, passed=1)
        ended.stdout.fnmatch_lines(expected)
    monkeypatch.setenv("LOCKSTEP_TEST_REQUIRE", "promtool")
    ended = chosen.runpytest_subprocess()
    ended.assert_outcomes(skipped=3, failed=1, passed=1)
    ended.stdout.fnmatch_lines(["*LOCKSTEP_TEST_REQUIRE has promtool, and promtool is not on PATH"])
    monkeypatch.setenv("LOCKSTEP_TEST_REQUIRE", "promtoll")
    ended = chosen.runpytest_subprocess()
    assert ended.ret == pytest.ExitCode.USAGE_ERROR
    ended.stderr.fnmatch_lines(["*LOCKSTEP_TEST_REQUIRE: promtoll; known are *chromium*"])


def test_nothing_is_reported_where_nothing_was_missing(chosen: pytest.Pytester) -> None:
    chosen.makepyfile("def test_it(): pass")
    assert "skipped for" not in chosen.runpytest_subprocess().stdout.str()


def test_a_long_module_is_divided_and_costly_servers_start_in_few_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long, spark = "tests/faults/test_network.py", "tests/integration/test_following.py"
    known = {long: {"test_it": 20.0}, spark: {"test_it": 10.0}}
    monkeypatch.setattr(durations, "load", lambda: known)
    nodeids = [f"{module}::test_it[{n}]" for module in (long, spark) for n in range(6)]
    units = workers.units(nodeids, 2)
    assert [units[f"{long}::test_it[{n}]"][-1] for n in range(6)] == list("000111")
    assert {units[f"{spark}::test_it[{n}]"] for n in range(6)} == {"spark 0"}


def test_a_report_becomes_seconds_of_each_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "junit.xml"
    cases = "".join(
        f'<testcase classname="tests.unit.test_tiers" name="{name}" time="{seconds}"/>'
        for name, seconds in (("test_a[1]", 2), ("test_a[2]", 4), ("test_b", 0.01))
    )
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>", "utf-8")
    monkeypatch.setattr(durations, "FILE", tmp_path / "tests" / "durations.json")
    durations.FILE.parent.mkdir()
    durations.record(durations.in_report(report))
    assert durations.load() == {"tests/unit/test_tiers.py": {"test_a": 3.0}}
