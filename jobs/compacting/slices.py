"""Slices of the tables: parts of base and archive that one process folds, whatever the tables hold.

A slice has the rows of some topics, and of large ones a range of `key_hash`; so all events of a key
are in one slice. Files skip what is outside by their statistics, because their rows are sorted. A
table without a key, or whose key has changed, is not compacted: its slices are ranges of seqs.

What lies in base and archive is described by `Past`, which executors get, too.
"""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

from cdc.errors import StoreLostError
from lockstep.jobs.archiving import layout as archived
from lockstep.jobs.compacting import layout
from lockstep.jobs.compacting.frontiers import quoted
from lockstep.sinks.delta import lake

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from deltalake import DeltaTable

    from cdc.events import LSN

# How many rows a slice has, about: a row of 400 bytes takes a kilobyte while it is folded.
SLICE_ROWS: Final = 400_000
# A table with fewer shares a slice, and its files, with others.
_OWN_ROWS: Final = 50_000
_HASHES: Final = 1 << 64
_LEAST: Final = -(1 << 63)
_MOST: Final = (1 << 63) - 1
# The columns that archive and base have in common.
_COMMON: Final = [name for name in layout.SCHEMA.names if name in archived.SCHEMA.names]


class Slice(NamedTuple):
    """Rows of topics; of one topic, those with a hash or seq from `low` to `high`."""

    topics: tuple[str, ...]
    column: str = ""  # key_hash or seq; empty: all
    low: int = 0
    high: int = 0

    @property
    def where(self) -> str:
        """The slice as a predicate."""
        named = f"topic IN ({', '.join(map(quoted, self.topics))})"
        if not self.column:
            return named
        return f"{named} AND {self.column} >= {self.low} AND {self.column} <= {self.high}"


class Past(NamedTuple):
    """The rows up to a frontier: of a base, and of the archive after it. Pickles."""

    prefix: str
    archive: str
    bases: str
    storage: dict[str, str]
    version: int  # of the archive's table
    base: int | None
    above: int  # the base's seq; 0 without one
    cuts: tuple[int, int]  # after the first, up to the second
    seq: int
    lsn: LSN
    floors: dict[str, int]  # the seq of each table's last truncate after the base
    uncompacted: frozenset[str]
    deletes_since_us: int = 0


class Tables:
    """The tables of a `Past`, opened when they are read."""

    def __init__(self, past: Past) -> None:
        self.past = past

    @cached_property
    def archive(self) -> DeltaTable:
        """The archive's table."""
        return _opened(self.past.archive, self.past.storage, self.past.version)

    @cached_property
    def base(self) -> DeltaTable | None:
        """The base's table; None if it is the beginning."""
        if self.past.base is None:
            return None
        return _opened(self.past.bases, self.past.storage, self.past.base)

    def rows(self, where: str) -> pa.Table:
        """Return the events that a predicate selects."""
        parts = [self.after(where)]
        if self.base is not None:
            parts.append(lake.read(self.base, layout.SCHEMA.names, where).cast(layout.SCHEMA))
        return pa.concat_tables(parts)

    def after(self, where: str) -> pa.Table:
        """Return the events after the base that a predicate selects."""
        found = lake.read(self.archive, _COMMON, f"{self.within} AND ({where})")
        fill = pa.nulls(len(found), pa.binary())
        return found.append_column("fill", fill).select(layout.SCHEMA.names).cast(layout.SCHEMA)

    @property
    def within(self) -> str:
        """What selects the archive's events after the base, up to the frontier."""
        first, last = self.past.cuts
        seqs = f"seq > {self.past.above} AND seq <= {self.past.seq}"
        return f"op IS NOT NULL AND cut > {first} AND cut <= {last} AND {seqs}"


def of_keys(topic: str, rows: int) -> Iterator[Slice]:
    """Yield the slices of one table by its keys."""
    many = max(1, -(-rows // SLICE_ROWS))
    lows = [_LEAST + _HASHES * each // many for each in range(many)]
    highs = [*(low - 1 for low in lows[1:]), _MOST]
    yield from (Slice((topic,), "key_hash", *each) for each in zip(lows, highs, strict=True))


def of_seqs(topic: str, rows: int, seq: int) -> Iterator[Slice]:
    """Yield the slices of one table by seq, up to one."""
    many = max(1, -(-rows // SLICE_ROWS))
    bounds = [(seq + 1) * each // many for each in range(many + 1)]
    for low, high in itertools.pairwise(bounds):
        yield Slice((topic,), "seq", low, high - 1)


def planned(rows: Mapping[str, int], uncompacted: Collection[str], seq: int) -> Iterator[Slice]:
    """Yield slices of all tables, given how many rows each has at most."""
    shared: list[str] = []
    size = 0
    for topic, many in sorted(rows.items()):
        if many < _OWN_ROWS:
            if size + many > SLICE_ROWS and shared:
                yield Slice(tuple(shared))
                shared, size = [], 0
            shared.append(topic)
            size += many
        elif topic in uncompacted:
            yield from of_seqs(topic, many, seq)
        else:
            yield from of_keys(topic, many)
    if shared:
        yield Slice(tuple(shared))


def floors(tables: Tables, topics: Iterable[str]) -> dict[str, int]:
    """Return the seq of each table's last truncate after the base."""
    listed = ", ".join(map(quoted, topics))
    if not listed:
        return {}
    where = f"{tables.within} AND op = 't' AND topic IN ({listed})"
    found = lake.read(tables.archive, ["topic", "seq"], where)
    last = found.group_by("topic").aggregate([("seq", "max")])
    return dict(zip(last["topic"].to_pylist(), last["seq_max"].to_pylist(), strict=True))


def _opened(path: str, storage: Mapping[str, str], version: int) -> DeltaTable:
    found = lake.opened(path, storage, version)
    if found is None:
        raise StoreLostError(f"{path} is missing")
    return found
