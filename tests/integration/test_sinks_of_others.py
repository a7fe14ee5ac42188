"""A sink of another package: the one that docs/FOLLOWERS.md shows, word for word."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cdc.config import Config
from cdc.config.followers import Follower
from cdc.errors import ConfigError
from lockstep.jobs.apply import stores
from lockstep.sinks.contract import Generations, SinkKind

ROOT = Path(__file__).parents[2]
_NAMED = re.compile(r"```python\n# (my_\w+\.py)\n(.*?)```", re.DOTALL)
_ENTRY = re.compile(r"```toml\n(\[project\.entry-points.*?)```", re.DOTALL)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the package of the page, as pip does."""
    page = (ROOT / "docs/FOLLOWERS.md").read_text("utf-8")
    for name, text in _NAMED.findall(page):
        (tmp_path / name).write_text(text, "utf-8")
    entry = _ENTRY.search(page)
    assert entry is not None
    points = tomllib.loads(entry[1])["project"]["entry-points"]["lockstep.sinks"]
    info = tmp_path / "my_sink-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-sink\nVersion: 1\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    lines += ["broken = my_nothing:KIND", "odd = my_sink:FileSink"]
    (info / "entry_points.txt").write_text("\n".join(["[lockstep.sinks]", *lines]) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    invalidate_caches()
    return tmp_path


def made(config: Config, **plugin: Any) -> Any:  # noqa: ANN401 - any kind's sink
    follower = msgspec.convert({"plugin": plugin}, Follower)
    return stores.sink(config, "mine", follower)


@pytest.fixture
def config() -> Config:
    given = {"pipeline": "shop", "source": {"dsn": "host=h", "tables": ["public.*"]},
             "log": {"bootstrap_servers": "localhost:1"}}  # fmt: skip
    return msgspec.convert(given, Config)


def installed(folder: Path) -> None:
    """Declare our own entry points of pytest, as installing this checkout does."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    info = folder / "checkout-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: checkout\nVersion: 1\n")
    lines = [f"{name} = {at}" for name, at in project["entry-points"]["pytest11"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines]) + "\n")


def run_pytest(folder: Path, *given: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *given],
        cwd=folder,
        env={"PYTHONPATH": f"{folder}:{ROOT}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("plugin", [(), ("-p", "lockstep.conformance.plugin")])
def test_the_documented_sink_passes_the_suite(package: Path, plugin: tuple[str, ...]) -> None:
    """With the command of the page, and without our package's entry points."""
    command = re.search(
        r"^\$ pytest (.*--sink.*)$", (ROOT / "docs/FOLLOWERS.md").read_text(), re.MULTILINE
    )
    assert command is not None
    if not plugin:
        installed(package)
    done = run_pytest(package, *plugin, *command[1].split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 10


_OF_ANOTHER = """\
import pytest

def pytest_addoption(parser):
    parser.addoption("--sink", default="theirs")

@pytest.fixture
def store(request):
    return request.config.getoption("--sink")
"""


def test_other_tests_are_free_to_use_the_names_of_the_suite(tmp_path: Path) -> None:
    """Installed, the plugin changes nothing in a run that does not use it."""
    installed(tmp_path)
    (tmp_path / "conftest.py").write_text(_OF_ANOTHER)
    (tmp_path / "test_own.py").write_text("def test_own(store):\n    assert store == 'theirs'\n")
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "--sink"
        not in run_pytest(tmp_path, "--help", "-p", "no:cacheprovider", "--noconftest").stdout
    )


def test_its_follower_is_configured_by_its_entry_point(package: Path, config: Config) -> None:
    sink = made(config, kind="files", options={"path": str(package / "x.json")})
    assert type(sink).__name__ == "FileSink"
    assert not isinstance(sink, Generations)
    assert sink.open() is None
    assert sink.current() == 1


@pytest.mark.parametrize(
    ("kind", "options", "what"),
    [
        (
            "nothing",
            {},
            "no package has the sink nothing; installed are broken, delta, files, odd,",
        ),
        ("redis", {}, "redis is no plugin"),
        ("broken", {}, "my_nothing:KIND can't be imported"),
        ("odd", {}, r"my_sink:FileSink is no lockstep\.contract\.SinkKind"),
        ("files", {}, r"followers\.mine\.plugin\.options: Object missing required field `path`"),
        ("files", {"path": "x", "pth": 1}, r"options\.pth: unknown name"),
        ("files", {"path": 7}, r"Expected `str`, got `int` - at `\$\.path`"),
    ],
)
def test_a_wrong_kind_or_option_is_named(
    package: Path, config: Config, kind: str, options: dict[str, object], what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        made(config, kind=kind, options=options)


def test_our_own_kinds_are_declared_like_those_of_others() -> None:
    """An install has the entry points of pyproject.toml, which name the kinds that we list."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = project["entry-points"][stores.GROUP]
    assert list(declared) == list(stores.OURS)
    for name, value in declared.items():
        module, _, attribute = value.partition(":")
        assert module == stores.__name__
        found = getattr(stores, attribute)
        assert isinstance(found, SinkKind)
        assert found is stores.OURS[name]
