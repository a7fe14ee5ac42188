"""How lines fit a terminal: 80 columns suffice, and piped output is never wrapped."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import Final

import click

# Wider lines are hard to read, on any terminal.
_MOST_COLUMNS: Final = 100


def columns() -> int | None:
    """Return how many columns a line may have; None where stdout is no terminal."""
    if not sys.stdout.isatty():
        return None
    return min(_MOST_COLUMNS, shutil.get_terminal_size().columns)


def labelled(name: str, value: str, width: int) -> None:
    """Print a label of `width` columns and its value; further lines are below the value."""
    lines = wrapped(value, width + 1)
    click.echo(f"{click.style(f'{name:<{width}}', dim=True)} {lines}")


def wrapped(text: str, indent: int) -> str:
    """Return the text wrapped: its first line starts at column `indent`, and so do the others."""
    room = columns()
    if room is None or room <= indent + 20:
        return text
    lines = textwrap.wrap(
        text, room - indent, break_long_words=False, break_on_hyphens=False, tabsize=4
    )
    return f"\n{' ' * indent}".join(lines)
