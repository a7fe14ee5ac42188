"""The example of docs/CODE.md, word for word: its configuration is right, and its tests pass."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import yaml

from cdc.config import load
from tests.fixtures import code_example

if TYPE_CHECKING:
    from pathlib import Path


def test_the_examples_tests_pass_without_spark_and_servers(tmp_path: Path) -> None:
    code_example.write(tmp_path)
    (tmp_path / "conftest.py").write_text(
        "import sys\nsys.modules['pyspark'] = None  # as if it were not installed\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_the_examples_configuration_declares_its_views(tmp_path: Path) -> None:
    code_example.write(tmp_path)
    given = {
        "pipeline": "shop",
        "source": {"dsn": "postgresql://me@localhost/shop"},
        "log": {"bootstrap_servers": "localhost:9092"},
        **code_example.configuration(),
    }
    file = tmp_path / "lockstep.yaml"
    file.write_text(yaml.safe_dump(given))
    assert list(load(file, {}).views) == ["tag_counts", "post_tags", "sessions"]
