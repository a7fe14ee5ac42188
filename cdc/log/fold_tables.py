"""A table as the log describes it, and the names by which rows are compared and reported."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import orjson

from cdc.verify.frontiers import Findings

if TYPE_CHECKING:
    from cdc.verify.events import Row


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
    whole: bool = True
    # What would be wrong if the log had held the table from its first row on.
    doubts: Findings = field(default_factory=Findings)

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
