"""The records of incremental snapshots in `<prefix>.cdc.snapshot`, by their ids.

A record is written in the Kafka transaction of the rows that it counts and of the resume record, so
all three always agree. Exact JSON both ways, as `cdc.log.records`. Pure.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from cdc.log.records import FORMAT

State = Literal["running", "paused", "done", "stopped", "failed"]
ACTIVE: Final = ("running", "paused")
# How many that are over are kept: to be listed, and to recognize a command that is read twice.
KEPT: Final = 100

Key = tuple[str, ...]  # a key's values as Postgres writes them, in the key's order


class LiveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One incremental snapshot of one table."""

    format: int = FORMAT
    pipeline: str
    id: str
    schema: str
    table: str
    state: State
    relation_id: int = 0  # 0: not looked up yet
    where: str | None = None
    keys: bool = False  # only rows by their keys, those that `again` names
    anew: bool = False  # the table in the log is still to be emptied
    last: Key | None = None  # in the key's order, the log has the rows up to here
    to: Key | None = None  # the greatest key at the start
    again: tuple[Key, ...] = ()  # to be read by key, in any case
    swept: bool = False  # everything up to `to` is in the log
    rows: int = 0  # published
    estimate: int | None = None  # of the table's rows
    began_at_us: int = 0
    at_us: int = 0
    why: str | None = None  # why it failed or waits
    withheld: bool = False  # keys or condition may hold hidden values, so they are not here
    # Since when no rows have arrived, and how many errors in a row; None while rows arrive.
    failing_since_us: int | None = None
    errors: int = 0

    @property
    def name(self) -> str:
        return f"{self.schema}.{self.table}"

    @property
    def told(self) -> dict[str, object]:
        """Return its fields for a log line; never a key."""
        return {
            "id": self.id,
            "table": self.name,
            "state": self.state,
            "rows": self.rows,
            "why": self.why,
        }

    @property
    def active(self) -> bool:
        """Whether it still has work to do."""
        return self.state in ACTIVE


class CommandRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A command that was carried out, kept as long as its signature would still be valid."""

    format: int = FORMAT
    pipeline: str
    id: str  # the signature's
    lsn: str  # of the message: a message with this LSN is the same one
    at_us: int  # its transaction's commit


def command_key(pipeline: str, number: str) -> bytes:
    """Return the key of a command's record."""
    return msgspec.json.encode({"pipeline": pipeline, "part": "command", "id": number})


def live_key(pipeline: str, number: str) -> bytes:
    """Return the key of an incremental snapshot's record."""
    return msgspec.json.encode({"pipeline": pipeline, "part": "live", "id": number})
