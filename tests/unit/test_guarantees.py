"""Every guarantee names a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_TEXT = (ROOT / "docs" / "GUARANTEES.md").read_text("utf-8")
_TABLE = _TEXT.split("## ", 1)[0]
_ROWS = [line for line in _TABLE.splitlines() if line.startswith("| **")]
_PATH = re.compile(r"`((?:tests|cdc|benchmarks)/[\w./-]*)`")


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: row.split("**")[1])
def test_a_guarantee_names_what_attacks_it(row: str) -> None:
    attacks = row.rstrip("| ").rpartition(" | ")[2]
    assert _PATH.findall(attacks) or attacks.startswith("the same"), attacks


@pytest.mark.parametrize("path", sorted(set(_PATH.findall(_TEXT))))
def test_what_it_names_is_there(path: str) -> None:
    assert (ROOT / path).exists()
