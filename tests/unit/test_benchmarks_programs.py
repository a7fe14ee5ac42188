"""A measured program that breaks gives an error with its own output, never a figure."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks.failure import BenchmarkError
from benchmarks.programs import Program

if TYPE_CHECKING:
    from pathlib import Path


def python(code: str, folder: Path) -> Program:
    return Program("the subject", [sys.executable, "-c", code], folder / "log")


def test_a_program_that_fails_shows_its_last_output(tmp_path: Path) -> None:
    with (
        python("print('no such slot', flush=True); raise SystemExit(7)", tmp_path) as program,
        pytest.raises(BenchmarkError, match="exit code 7") as failed,
    ):
        program.wait(30)
    assert "no such slot" in failed.value.hint


def test_a_program_that_ends_while_it_is_watched_is_an_error(tmp_path: Path) -> None:
    """Even with exit code 0: the benchmark would wait for something that never arrives."""
    with python("pass", tmp_path) as program:
        program.wait(30)
        with pytest.raises(BenchmarkError, match="while it was measured"):
            program.check()


def test_a_program_does_not_outlive_its_block(tmp_path: Path) -> None:
    with python("import time; time.sleep(600)", tmp_path) as program:
        assert program.running()
        program.check()
    assert not program.running()


def test_a_program_that_takes_too_long_is_an_error(tmp_path: Path) -> None:
    with (
        python("import time; time.sleep(600)", tmp_path) as program,
        pytest.raises(BenchmarkError, match="not done after"),
    ):
        program.wait(0.01)


def test_a_programs_output_can_be_read(tmp_path: Path) -> None:
    with python("print('{}')", tmp_path) as program:
        program.wait(30)
        assert program.output() == "{}\n"
