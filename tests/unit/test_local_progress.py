"""What people see while servers are fetched."""

from __future__ import annotations

import io

import pytest

from cdc.runtime.progress import Terminal
from tests.fixtures.servers import matches


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_line_is_rewritten_and_ends_with_the_total() -> None:
    out = Tty()
    progress = Terminal(out)
    progress.expect(4_000_000)
    for _ in range(4):
        progress.got(1_000_000)
    progress.step("kafka", "up")
    lines = out.getvalue().split("\n")
    assert "4.0 of 4.0 MB" in lines[-3]
    assert lines[-2].endswith("kafka       up")
    assert lines[-1] == ""


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end() -> None:
    out = io.StringIO()
    progress = Terminal(out)
    progress.expect(1_000_000)
    for _ in range(1000):
        progress.got(1000)
    assert len(out.getvalue().splitlines()) == 1
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize(
    ("spec", "majors"),
    [(">= 16", {16, 17, 18}), ("<16", {14, 15}), (">=15,<17", {15, 16}), ("== 17", {17})],
)
def test_a_version_mark_selects_majors(spec: str, majors: set[int]) -> None:
    assert {major for major in range(14, 19) if matches(spec, major)} == majors


def test_a_version_mark_that_nobody_understands_is_an_error() -> None:
    with pytest.raises(ValueError, match="not a version spec"):
        matches("16+", 16)
