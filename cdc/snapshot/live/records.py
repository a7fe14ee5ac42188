"""What the log knows of each live snapshot: a record in `<prefix>.cdc.snapshot`, by its id.

It goes out in the Kafka transaction of the rows that it counts and of the resume record, so all
three agree whatever happens. Exact JSON both ways, as `cdc.log.records`. Pure.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from cdc.log.records import FORMAT

State = Literal["running", "paused", "done", "stopped", "failed"]
ACTIVE: Final = ("running", "paused")
# So many that are over are kept: to be listed, and so that a command that is read twice is known.
KEPT: Final = 100

Key = tuple[str, ...]  # a key's values as Postgres writes them, in the key's order


class LiveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One live snapshot of one table."""

    format: int = FORMAT
    pipeline: str
    id: str
    schema: str
    table: str
    state: State
    relation_id: int = 0  # 0: not looked up yet
    where: str | None = None
    keys: bool = False  # only rows by their keys, those that `again` names
    anew: bool = False  # the table is still to be emptied in the log
    last: Key | None = None  # up to here, in the key's order, the log has the rows
    to: Key | None = None  # the greatest key when it began
    again: tuple[Key, ...] = ()  # to be read by key, whatever comes before
    swept: bool = False  # all up to `to` is in the log
    rows: int = 0  # published
    estimate: int | None = None  # of the table's rows
    began_at_us: int = 0
    at_us: int = 0
    why: str | None = None  # it failed, or waits
    withheld: bool = False  # keys or condition may hold hidden values, so they are not here
    # Since when it has read in vain, and how many errors in a row; None while rows arrive.
    failing_since_us: int | None = None
    errors: int = 0

    @property
    def name(self) -> str:
        return f"{self.schema}.{self.table}"

    @property
    def told(self) -> dict[str, object]:
        """What a log line says of it; never a key."""
        return {
            "id": self.id,
            "table": self.name,
            "state": self.state,
            "rows": self.rows,
            "why": self.why,
        }

    @property
    def active(self) -> bool:
        """Whether it is still to be worked on."""
        return self.state in ACTIVE


class CommandRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A command that was carried out, for as long as its signature would still be believed."""

    format: int = FORMAT
    pipeline: str
    id: str  # the signature's
    lsn: str  # of the message: read there again, it is the same one
    at_us: int  # its transaction's commit


def command_key(pipeline: str, number: str) -> bytes:
    """Return the key of a command's record."""
    return msgspec.json.encode({"pipeline": pipeline, "part": "command", "id": number})


def live_key(pipeline: str, number: str) -> bytes:
    """Return the key of a live snapshot's record."""
    return msgspec.json.encode({"pipeline": pipeline, "part": "live", "id": number})
