"""The demo clears its own folder at every start, and no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cdc.errors import ConfigError
from cdc.playground.demo.home import claimed

if TYPE_CHECKING:
    from pathlib import Path


def test_a_folder_with_files_of_others_is_refused_and_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "thesis.tex"
    precious.write_text("years of work")
    with pytest.raises(ConfigError, match="not the demo's"), claimed(tmp_path, keep=lambda: False):
        pass
    assert list(tmp_path.iterdir()) == [precious]


def test_what_a_run_left_is_deleted_by_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    with claimed(folder, keep=lambda: True) as home:
        (home.data / "kept").write_text("of the first run")
    assert (folder / "data" / "kept").exists()
    with claimed(folder, keep=lambda: True) as home:
        assert not list(home.data.iterdir())


def test_nothing_but_the_marks_is_left_without_keep(tmp_path: Path) -> None:
    with claimed(tmp_path / "demo", keep=lambda: False) as home:
        (home.data / "rows").write_text("made up")
    assert all(each.stat().st_size == 0 for each in (tmp_path / "demo").iterdir())


def test_two_demos_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        claimed(tmp_path / "demo", keep=lambda: False),
        pytest.raises(ConfigError, match=r"runs in .* already"),
        claimed(tmp_path / "demo", keep=lambda: False),
    ):
        pass
