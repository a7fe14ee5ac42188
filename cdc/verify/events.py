"""Change events as the fold reads them: docs/EVENTS.md as types, as far as the fold needs it."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from cdc.log.dead_letters import Pointer
from cdc.log.fold_tables import key_hash

Row = dict[str, Any]


class Source(msgspec.Struct, gc=False):
    """What the fold reads of an event's `source`."""

    schema: str
    table: str
    seq: int
    epoch: int
    commit_lsn: str
    ordinal: int
    unchanged: list[str] = []
    dead: Pointer | None = None
    snapshot: str = "false"


class Event(msgspec.Struct, gc=False):
    """What the fold reads of a change event; a logical message has no images."""

    op: str
    source: Source
    before: Row | None = None
    after: Row | None = None

    @property
    def initial(self) -> bool:
        """Whether it is part of the initial snapshot, before the stream."""
        return self.source.ordinal == 0 and self.source.snapshot == "true"

    def without(self, columns: tuple[str, ...]) -> Event:
        """Return the event without some columns and without its pointer to a dead letter."""
        source = msgspec.structs.replace(self.source, dead=None)
        return Event(self.op, source, _left(self.before, columns), _left(self.after, columns))


def _left(row: Row | None, columns: tuple[str, ...]) -> Row | None:
    return row and {name: value for name, value in row.items() if name not in columns}


class Arrival(NamedTuple):
    """An event with its position in the log, while it waits for its turn in `seq` order."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    event: Event

    def says(self, what: str) -> str:
        """Return a sentence about this event."""
        return (
            f"{self.topic}/{self.partition} offset {self.offset}, seq {self.event.source.seq}, op"
            f" {self.event.op}, key {key_hash(self.key)} {what}"
        )
