"""What is measured: a process that carries the changes behind a slot into a topic.

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
class Place:
    """Where a subject reads, writes and keeps its files."""

    folder: Path
    postgres_port: int
    bootstrap: str


class Subject(Protocol):
    """Something that captures."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, str | int]:
        """The settings that are not its defaults, for the result."""
        ...

    def topic(self, run: str, table: str) -> str:
        """Return the topic that the table's events go to in this run."""
        ...

    def prepare(self, place: Place, run: str, tables: tuple[str, ...]) -> None:
        """Do what is done once before a start, such as creating the topics. Not measured."""
        ...

    def start(self, place: Place, run: str) -> AbstractContextManager[Program]:
        """Start on the slot named `run`, which exists; stopped at the end of the block."""
        ...
