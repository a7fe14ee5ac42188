"""What is measured: a process that carries the changes after a slot's position into a topic.

Ours and the peer are started differently and then measured by the same code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from benchmarks.programs import Program


@dataclass(frozen=True)
class RunContext:
    """Where a subject reads, writes and keeps its files."""

    folder: Path
    postgres_port: int
    bootstrap: str


class Subject(Protocol):
    """A capture process."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, str | int]:
        """The settings that differ from its defaults, for the result."""
        ...

    def topic(self, run: str, table: str) -> str:
        """Return the topic that the table's events go to in this run."""
        ...

    def prepare(self, place: RunContext, run: str, tables: tuple[str, ...]) -> None:
        """Prepare once before a start, for example create the topics. Not measured."""
        ...

    def start(self, place: RunContext, run: str) -> AbstractContextManager[Program]:
        """Start on the existing slot named `run`; stop at the end of the block."""
        ...
