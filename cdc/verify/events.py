"""Change events as the fold reads them, and the tables that it makes of them.

docs/EVENTS.md as types, as far as the fold needs it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from cdc.encode.alterations import altered
from cdc.log.dead_letters import Pointer
from cdc.log.records import ALTERED, Alteration
from cdc.verify.frontiers import Findings

Row = dict[str, Any]


class FoldSource(msgspec.Struct, gc=False):
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


class Message(msgspec.Struct, gc=False):
    """A logical message."""

    prefix: str
    content: str  # base64


class FoldEvent(msgspec.Struct, gc=False):
    """What the fold reads of a change event; a logical message has no images."""

    op: str
    source: FoldSource
    before: Row | None = None
    after: Row | None = None
    message: Message | None = None

    @property
    def alters(self) -> bool:
        """Whether it alters the rows of a table."""
        return self.message is not None and self.message.prefix == ALTERED

    @property
    def initial(self) -> bool:
        """Whether it is part of the initial snapshot, before the stream."""
        return self.source.ordinal == 0 and self.source.snapshot == "true"

    def without(self, columns: tuple[str, ...]) -> FoldEvent:
        """Return the event without some columns and without its pointer to a dead letter."""
        source = msgspec.structs.replace(self.source, dead=None)
        return FoldEvent(self.op, source, _left(self.before, columns), _left(self.after, columns))


def _left(row: Row | None, columns: tuple[str, ...]) -> Row | None:
    return row and {name: value for name, value in row.items() if name not in columns}


decode: Final = msgspec.json.Decoder(FoldEvent).decode


class Arrival(NamedTuple):
    """An event with its position in the log, while it waits for its turn in `seq` order."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    event: FoldEvent

    def sentence(self, what: str) -> str:
        """Return a sentence about this event."""
        return (
            f"{self.topic}/{self.partition} offset {self.offset}, seq {self.event.source.seq}, op"
            f" {self.event.op}, key {key_hash(self.key)} {what}"
        )


@dataclass(slots=True)
class TableState:
    """One table as the log describes it: rows by key bytes, or a multiset if there is no key."""

    topic: str
    schema: str
    table: str
    rows: dict[bytes, Row] = field(default_factory=dict)
    keyless: Counter[bytes] = field(default_factory=Counter)
    events: int = 0
    # Whether the log holds all its rows; else the rows that it started with are not in the log,
    # until a truncate.
    complete: bool = True
    # What would be wrong if the log had held the table from its first row on.
    doubts: Findings = field(default_factory=Findings)

    def alter(self, alteration: Alteration) -> None:
        """Give the rows the columns of another table version."""

        def new(row: Row) -> Row:
            return altered(alteration, row, None, msgspec.json.decode, str)

        self.rows = {key: new(row) for key, row in self.rows.items()}
        keyless, self.keyless = self.keyless, Counter()
        for row, many in keyless.items():
            self.keyless[canonical(new(msgspec.json.decode(row)))] += many

    @property
    def name(self) -> str:
        return f"{self.schema}.{self.table}"

    def __len__(self) -> int:
        return len(self.rows) + self.keyless.total()


def canonical(row: Row) -> bytes:
    """Return the same bytes for `row` whatever the order of its columns."""
    return orjson.dumps(row, option=orjson.OPT_SORT_KEYS)


def key_hash(key: bytes | None) -> str:
    """Return a short name for a key that reveals nothing of it."""
    return "none" if key is None else hashlib.sha256(key).hexdigest()[:12]
