"""A daemon, and followers that run as sessions of `cdc follow`, in which to inject faults.

The processes of a session, Java and Python workers too, are found by it and their command lines.
"""

from __future__ import annotations

import random
import shutil
from typing import TYPE_CHECKING, Final

import pytest

from tests.fixtures.commands import CommandSession

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.daemon import Daemon, PipelineUnderTest

SHOWN_CHARACTERS: Final = 4_000
# Exit codes that a restart would only repeat.
_FINAL: Final = {64, 70, 77, 78, 2}


class Copies:
    """One copy of all followers, or more; `look` restarts what has ended."""

    line: PipelineUnderTest  # once it is made

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.copies: list[CommandSession] = []
        self._started = 0

    @property
    def daemon(self) -> Daemon:
        return self.line.daemon

    def environment(self) -> dict[str, str]:
        """Return variables of the next copy's processes."""
        return {}

    def follow(self, failpoint: str = "") -> CommandSession:
        """Start a copy of the followers."""
        self._started += 1
        name = f"follow-{self._started}"
        copy = CommandSession(
            self.line.config_file,
            "follow",
            log=self.folder / f"{name}.log",
            scratch=self.folder / name,
            failpoint=failpoint,
            env=self.environment(),
        )
        self.copies.append(copy)
        return copy

    def look(self) -> None:
        """Restart what has ended; fail where a restart would not help."""
        if self.daemon.process.poll() is not None:
            self.line.start()
        for copy in [each for each in self.copies if not each.running]:
            code = copy.process.returncode
            if code in _FINAL:
                pytest.fail(f"cdc follow ended with {code}: {copy.log[-SHOWN_CHARACTERS:]}")
            self.drop(copy)
        if not self.copies:
            self.follow()

    def drop(self, copy: CommandSession) -> None:
        """Kill a copy and delete its scratch folder."""
        copy.kill()
        self.copies.remove(copy)
        shutil.rmtree(copy.scratch, ignore_errors=True)

    def leave_one(self) -> None:
        """Continue with one copy without failpoints."""
        for copy in list(self.copies):
            if copy.failpoint or copy is not self.copies[0]:
                self.drop(copy)
        self.look()

    def end_copies(self) -> None:
        """Kill all copies, and show the ends of their logs."""
        for copy in list(self.copies):
            print(f"--- cdc follow, exit code {copy.process.returncode}")  # noqa: T201 - on failure
            print(copy.log[-SHOWN_CHARACTERS:])  # noqa: T201
            self.drop(copy)
