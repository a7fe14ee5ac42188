"""The wheel: every file that a checkout has, and migrations that work from where it puts them."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.fixtures.daemon import PipelineUnderTest

ROOT = Path(__file__).parents[2]
_FOLDERS = {"cdc": "cdc", "sinks": "sinks", "jobs": "jobs", "migrations": "cdc/migrations"}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Build the wheel and unpack it, as an installer would."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
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

    names = ["signal_table", "heartbeat_table", "ddl_audit"]
    bare.write("lockstep.yaml", migrations=dict.fromkeys(names, True))

    def run(*command: str) -> str:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("LOCKSTEP_", "PG"))}
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

    where = run("-c", "import cdc, sinks, jobs; print(cdc.__file__, sinks.__file__, jobs.__file__)")
    assert all(file.startswith(str(installed)) for file in where.split())
    cdc = ["-m", "cdc.cli.main"]
    config = ["-c", str(bare.config_file)]
    run(*cdc, "setup", *config)
    said = run(*cdc, "migrations", "status", *config)
    assert all(f"{name} is there ({name}_1)" in said for name in names)
    run(*cdc, "teardown", "--yes", "--topics", *config)
    assert bare.query("SELECT to_regnamespace('lockstep')") == (None,)
