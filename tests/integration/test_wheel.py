"""The wheel: every file that a checkout has, and what a user of pip alone meets.

The fresh environment has the wheel and the packages that it requires, linked from the test's own
environment, so nothing is downloaded: extras that were not requested are missing.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.fixtures.commands import environment
from tests.fixtures.daemon import PipelineUnderTest

ROOT = Path(__file__).parents[2]
_FOLDERS = {
    "cdc": "cdc",
    "lockstep": "lockstep",
    "sinks": "lockstep/sinks",
    "jobs": "lockstep/jobs",
    "migrations": "cdc/migrations",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel."""
    tmp_path = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (built,) = tmp_path.glob("*.whl")
    return built


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """Unpack the wheel, as an installer would."""
    into = tmp_path / "site"
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(into)
    return into


def test_the_wheel_has_every_file_and_its_migrations_work(
    installed: Path, bare: PipelineUnderTest, tmp_path: Path
) -> None:
    ours = {
        f"{packed}/{path.relative_to(ROOT / folder)}"
        for folder, packed in _FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    packed = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    assert ours == {each for each in packed if ".dist-info/" not in each}

    heads = {"signal_table": 2, "heartbeat_table": 1, "ddl_audit": 2}
    bare.write("lockstep.yaml", migrations=dict.fromkeys(heads, True))

    def run(*command: str) -> str:
        kept = environment()
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=kept | {"PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    where = run(
        "-c",
        "import cdc, lockstep.sinks, lockstep.jobs as jobs\n"
        "print(cdc.__file__, lockstep.sinks.__file__, jobs.__file__)",
    )
    assert all(file.startswith(str(installed)) for file in where.split())
    cdc = ["-m", "cdc.cli.main"]
    config = ["-c", str(bare.config_file)]
    run(*cdc, "setup", *config)
    output = run(*cdc, "migrations", "status", *config)
    assert all(f"{name} is there ({name}_{head})" in output for name, head in heads.items())
    run(*cdc, "teardown", "--yes", "--topics", *config)
    assert bare.query("SELECT to_regnamespace('lockstep')") == (None,)


# --- an install without extras ---


def required(wheel: Path, *extras: str) -> set[str]:
    """Return the distributions that pip would install with the wheel and these extras."""
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (each for each in packed.namelist() if each.endswith(".dist-info/METADATA"))
        text = packed.read(name).decode()
    wanted = [
        (each, extras or ("",)) for each in re.findall(r"^Requires-Dist: (.+)$", text, re.MULTILINE)
    ]
    found: set[str] = set()
    while wanted:
        line, chosen = wanted.pop()
        requirement = Requirement(line)
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": each}) for each in chosen):
            continue
        if requirement.name.lower() not in found:
            found.add(requirement.name.lower())
            below = tuple(requirement.extras) or ("",)
            wanted += [(each, below) for each in metadata.requires(requirement.name) or ()]
    return found


@pytest.fixture
def plain(wheel: Path, tmp_path: Path) -> Path:
    """Install the wheel without extras into its own environment; return its `cdc`."""
    home = tmp_path / "plain"
    venv.create(home, with_pip=False, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    for name in required(wheel):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(str(distribution.locate_file(top)))
    install = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install"]
    quiet = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel)]
    subprocess.run([*install, *quiet], check=True, capture_output=True)
    return home / "bin" / "cdc"


CONFIG = """\
pipeline: shop
source: {dsn: "postgresql://me@127.0.0.1:1/shop", tables: ["public.*"]}
log: {bootstrap_servers: "127.0.0.1:1"}
migrations: {signal_table: true}
followers:
  cache: {redis: {url: "redis://127.0.0.1:1/0"}}
  search: {opensearch: {url: "http://127.0.0.1:1"}}
"""
WITHOUT = [
    (["follow"], "spark,redis,opensearch"),
    (["follow", "--followers", "cache"], "spark,redis"),
    (["rebuild", "search"], "spark,opensearch"),
    (["spark", "jars"], "spark"),
    (["migrations", "sql"], "migrations"),
    (["local", "up", "kafka"], "local"),
    (["demo", "--for", "1s"], "local,spark,redis,opensearch"),
]


def test_what_an_extra_is_missing_for_is_reported_in_one_sentence(
    plain: Path, tmp_path: Path
) -> None:
    (tmp_path / "lockstep.yaml").write_text(CONFIG, encoding="utf-8")
    hidden = ("LOCKSTEP_", "PYTHON", "SPARK_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    env["LOCKSTEP_CACHE"] = str(tmp_path / "cache")

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )

    for command, extras in WITHOUT:
        done = run(str(plain), *command)
        assert done.returncode == 78, (command, done.stderr)
        assert f"what to do: pip install 'lockstep-cdc[{extras}]'" in done.stderr, command
        assert "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) == 2, done.stderr
    for name, *given in (["follow"], ["rebuild", "cache"], ["snapshot"]):
        reported = run(str(plain), "spark", "app", name)
        path = Path(reported.stdout.strip())
        assert path.is_file()
        assert path.is_relative_to(plain.parents[1])
        # As a user would run it without Spark's own spark-submit.
        done = run(str(plain.with_name("python")), str(path), *given, "--config", "lockstep.yaml")
        assert done.returncode == 78, done.stderr
        assert "what to do: pip install 'lockstep-cdc[spark]'" in done.stderr
        assert "Traceback" not in done.stderr
    reported = run(str(plain), "spark", "app", "follow", "--json")
    assert json.loads(reported.stdout)["app"] == "follow"


def test_the_spark_extra_alone_can_fetch_its_jars(wheel: Path) -> None:
    fetchers = {"maven-artifact", "requests"}
    assert not fetchers & required(wheel)
    assert fetchers <= required(wheel, "spark")
    assert fetchers <= required(wheel, "local")


def test_the_packages_readme_leads_nowhere_outside_itself(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (each for each in packed.namelist() if each.endswith(".dist-info/METADATA"))
        text = packed.read(name).decode()
        assert {"cdc/py.typed", "lockstep/sinks/py.typed", "lockstep/jobs/py.typed"} <= set(
            packed.namelist()
        )
    assert "Description-Content-Type: text/markdown" in text
    assert "# Lockstep" in text
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert all(target.startswith("https://") for target in targets), targets


def test_the_packages_readme_links_to_the_source_where_its_url_is_known() -> None:
    without_relative_links = runpy.run_path(str(ROOT / "scripts" / "package_readme.py"))[
        "without_relative_links"
    ]
    text = "see [the CLI](docs/CLI.md), [there](https://example.org/x) and [below](#use-it)"
    assert without_relative_links(text, "https://example.org/lockstep/") == text.replace(
        "docs/CLI.md", "https://example.org/lockstep/blob/main/docs/CLI.md"
    )
    assert without_relative_links(text, None) == text.replace("[the CLI](docs/CLI.md)", "the CLI")
    pictured = f"# Lockstep\n\n![the console](docs/console/console.png)\n\n{text}"
    assert without_relative_links(pictured, None).startswith("# Lockstep\n\nsee the CLI")
