"""The types that every stage shares: LSN, Position, PartitionEnd and Frontier.

Pure values that import no module of ours, so that every layer, the sinks and the jobs can use them.
Order is `Position` within one epoch and `seq` over the pipeline; never the clock, the offset
or a change's own WAL address (a COPY gives many rows one address, and an insert that commits later
can carry a lower one than the delete of the same key).
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple, Self

# The separators between names, and between a table's name and a key.
_AMBIGUOUS: Final = re.compile('[.:"]')
# A byte that topics may not have.
_ESCAPE = re.compile(r"_x([0-9A-F]{2})")
# The key of a truncate in a compacted topic, where Kafka accepts no record without one. No row has
# it: theirs are JSON objects. A later truncate replaces an earlier one.
TRUNCATE_KEY: Final = b'"truncate"'
_LSN: Final = re.compile("([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


class LSN(int):
    """A byte position in the WAL (unsigned 64 bits), written as Postgres writes it: `0/16B3748`."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the LSN that `text` (`HIGH/LOW`) names; raise ValueError if it names none."""
        match = _LSN.fullmatch(text)
        if not match:
            raise ValueError(f"not an LSN: {text!r} (expected HIGH/LOW in hexadecimal)")
        return cls(int(match[1], 16) << 32 | int(match[2], 16))

    def __str__(self) -> str:
        return f"{self >> 32:X}/{self & 0xFFFFFFFF:X}"

    def __repr__(self) -> str:
        return f"LSN({str(self)!r})"


class Position(NamedTuple):
    """A change's position in the total order: compare as a tuple.

    `ordinal` counts the changes of one transaction from 1 (insert, update, delete, each truncated
    table), before any filter of ours, so that it does not depend on the configuration.
    """

    epoch: int
    commit_lsn: LSN
    ordinal: int


class PartitionEnd(NamedTuple):
    """One partition's share of a frontier: read up to `offset` (exclusive), find `events` events.

    `events` counts the events since the previous frontier; tombstones are not events.
    """

    topic: str
    partition: int
    offset: int
    events: int


class Frontier(NamedTuple):
    """A commit end LSN up to which every source transaction is in the log.

    `seq` is the newest change's at that point, `committed_at_us` its commit time in microseconds
    since 1970 UTC, and `partitions` every partition touched since the previous frontier. `holes` is
    how many seqs since then have no event: only an initial snapshot leaves any.
    """

    epoch: int
    lsn: LSN
    seq: int
    committed_at_us: int
    partitions: tuple[PartitionEnd, ...]
    holes: int = 0


def table_name(schema: str, table: str) -> str:
    """Return a table's unique name as the configuration writes it, `schema.table`.

    A name that holds a dot, a colon or a quote is put in double quotes.
    """
    return ".".join(
        '"' + name.replace('"', '""') + '"' if _AMBIGUOUS.search(name) else name
        for name in (schema, table)
    )


def unescape(name: str) -> str:
    """Return the name that is written like this in topics and folders (`cdc.log.names.escape`)."""
    return _ESCAPE.sub(lambda m: chr(int(m[1], 16)), name).encode("latin-1").decode()


def unescaped_table(place: str) -> tuple[str, str]:
    """Return (schema, table) of a topic's or folder's name; raise ValueError if it has none."""
    schema, table = place.split(".")
    return unescape(schema), unescape(table)


def row_key(key: bytes | None) -> bytes | None:
    """Return the key of a record's row; None if it has none, as a truncate."""
    return None if key == TRUNCATE_KEY else key
