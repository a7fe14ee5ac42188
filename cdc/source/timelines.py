"""A server's timelines: its ancestors, and where it left each.

A promotion or a restore starts a new timeline. Its history names every ancestor with the LSN up to
which the server shares that ancestor's WAL: what was written on the ancestor after it, this server
never had. Pure.

https://www.postgresql.org/docs/current/continuous-archiving.html#BACKUP-TIMELINES
"""

from __future__ import annotations

from typing import NamedTuple

from cdc.errors import ProtocolError
from cdc.events import LSN


class Ancestor(NamedTuple):
    """An earlier timeline of the server, and where the server left it."""

    timeline: int
    left_at: LSN


class System(NamedTuple):
    """What a walsender reports of itself."""

    identifier: str
    timeline: int
    ancestors: tuple[Ancestor, ...] = ()  # oldest first; also empty where the server kept no record


def parse_history(text: str) -> tuple[Ancestor, ...]:
    """Return the ancestors that a timeline history file lists."""
    lines = [line.split("#", 1)[0].split() for line in text.splitlines()]
    try:
        return tuple(Ancestor(int(line[0]), LSN.parse(line[1])) for line in lines if line)
    except (ValueError, IndexError) as error:
        raise ProtocolError("the server's timeline history cannot be read") from error
