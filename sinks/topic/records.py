"""What the store's own topic holds, and the headers of rows. Pure.

The own topic `<prefix>.cdc.follower` is compacted and has two records: `frontier`, written in the
transaction of a cut, and `started`, written before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from cdc.errors import ConfigError
from cdc.events import LSN
from lockstep.sinks.contract import Applied

if TYPE_CHECKING:
    from collections.abc import Mapping

FRONTIER: Final = b"frontier"
STARTED: Final = b"started"
# Headers of rows and tombstones: the change's seq and its transaction's LSN, and who wrote it.
SEQ: Final = "lockstep.seq"
LSN_OF: Final = "lockstep.lsn"  # unknown for what a truncate or DDL without events has changed
FOLLOWER: Final = "lockstep.follower"


def owner_of(pipeline: str, follower: str) -> bytes:
    """Return what names a follower in the header of its rows."""
    return f"{pipeline}/{follower}".encode()


class TopicTable(msgspec.Struct, frozen=True):
    """A table's topic, with the end of each of its partitions at the frontier."""

    topic: str
    topic_id: str  # Kafka's: a topic that was deleted and created again has another
    key: tuple[str, ...]
    ends: tuple[int, ...]

    @property
    def partitions(self) -> list[tuple[str, int]]:
        """Its partitions, by topic and number."""
        return [(self.topic, number) for number in range(len(self.ends))]

    def at(self, ends: Mapping[tuple[str, int], int]) -> TopicTable:
        """Return it with the ends of those partitions that have another one."""
        places = zip(self.partitions, self.ends, strict=True)
        return msgspec.structs.replace(
            self, ends=tuple(ends.get(place, end) for place, end in places)
        )

    def with_key(self, key: tuple[str, ...]) -> TopicTable:
        """Return it with the key that its rows have."""
        return msgspec.structs.replace(self, key=key)


class TopicFrontier(msgspec.Struct, frozen=True, kw_only=True):
    """The record `frontier`: all of it is in the topics, below `ends`."""

    pipeline: str
    follower: str
    generation: int
    token: str  # of this filling of the store: another one has another
    seq: int = 0
    lsn: str = "0/0"
    committed_at_us: int = 0
    tables: dict[str, TopicTable]
    applied: dict[str, Any] | None = None  # the complete frontier, for the follower

    @property
    def state(self) -> Applied:
        """The applied frontier; the beginning, with the pipeline "", in a store without one."""
        if self.applied is None:
            return Applied.beginning("", self.generation)
        return Applied.from_fields(self.applied)

    def at(self, applied: Applied, tables: Mapping[str, TopicTable]) -> TopicFrontier:
        """Return the record of a later frontier."""
        return msgspec.structs.replace(
            self,
            generation=applied.generation,
            seq=applied.seq,
            lsn=str(LSN(applied.lsn)),
            committed_at_us=applied.committed_at_us,
            tables=dict(tables),
            applied=applied.fields,
        )


class Started(msgspec.Struct, frozen=True):
    """The record `started`: up to which seq a cut was to be written."""

    token: str
    reached: int


encode: Final = msgspec.json.Encoder().encode
_frontier: Final = msgspec.json.Decoder(TopicFrontier).decode
_started: Final = msgspec.json.Decoder(Started).decode


def decoded(topic: str, found: Mapping[bytes, bytes]) -> tuple[TopicFrontier, Started] | None:
    """Return the newest records; None if there is no frontier record."""
    if FRONTIER not in found:
        return None
    try:
        frontier = _frontier(found[FRONTIER])
        started = _started(found[STARTED]) if STARTED in found else Started(frontier.token, 0)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{topic} holds other records than a follower's",
            hint="give the follower another `topic.prefix`",
        ) from error
    return frontier, started
