"""Slices of the tables: parts of base and archive that one process folds, whatever the tables hold.

A slice has the rows of some topics, and of large ones a range of `key_hash`; so all events of a key
are in one slice. Files skip what is outside by their statistics, because their rows are sorted. A
table without a key, or whose key has changed, is not compacted: its slices are ranges of seqs.

What lies in base and archive is described by `Past`, which executors get, too.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
import pyarrow.dataset as ds

from cdc.errors import StoreLostError
from lockstep.jobs.archiving import layout as archived
from lockstep.jobs.compacting import layout
from lockstep.jobs.compacting.frontiers import quoted
from lockstep.sinks.delta import lake, log

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from deltalake import DeltaTable

    from cdc.events import LSN
    from lockstep.jobs.compacting.runs import Merging

# The size of a slice's rows in memory, about; it takes three times as much while it is folded.
SLICE_BYTES: Final = 192 << 20
# A smaller table shares a slice, and its files, with others.
OWN_BYTES: Final = 24 << 20
# How many times larger rows are in memory than in a file.
_INFLATED: Final = 8
_FOOTER_BYTES: Final = 6_000  # what a file has in addition to rows, about
_LEAST_BYTES: Final = 200  # of a row in memory, however well its file is compressed
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

    @property
    def filter(self) -> ds.Expression:
        """The slice as a filter of rows in files."""
        named = ds.field("topic").isin(self.topics)
        if not self.column:
            return named
        at = ds.field(self.column)
        return named & (at >= self.low) & (at <= self.high)


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
    merging: Merging | None = None  # what a compaction folds; None: everything is read


class PastTables:
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

    def of(self, part: Slice) -> pa.Table:
        """Return the events of a slice; of the base only what a compaction folds again."""
        if self.past.merging is None:
            return self.rows(part.where)
        truncated = pa.array(sorted(self.past.floors), pa.string())
        there = part.filter & ~ds.field("topic").isin(truncated)
        base = self._of_files(self.past.merging.files, there)
        return pa.concat_tables([self.after(part.where), base])

    def of_keys(self, topic: str, hashes: Collection[int]) -> pa.Table:
        """Return the base's events of a table's keys with these hashes."""
        if self.base is None:
            return layout.SCHEMA.empty_table()
        where = (ds.field("topic") == topic) & ds.field("key_hash").isin(
            pa.array(hashes, pa.int64())
        )
        return self._of_files(self.base.file_uris(), where)

    def _of_files(self, paths: Collection[str], where: ds.Expression) -> pa.Table:
        """Return the rows of some of the base's files that a filter selects."""
        if self.base is None or not paths:
            return layout.SCHEMA.empty_table()
        options = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
        with lake.translated(self.past.bases):
            files = ds.dataset(
                sorted(path.rpartition("/")[2] for path in paths),
                schema=layout.SCHEMA,
                format=ds.ParquetFileFormat(default_fragment_scan_options=options),
                filesystem=log.files(self.base),
            )
            return files.to_table(filter=where)

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
        there = "op IS NOT NULL AND leaf IS NULL"  # not erased
        return f"{there} AND cut > {first} AND cut <= {last} AND {seqs}"


def of_keys(topic: str, size: int) -> Iterator[Slice]:
    """Yield the slices of one table of so many bytes by its keys."""
    many = max(1, -(-size // SLICE_BYTES))
    lows = [_LEAST + _HASHES * each // many for each in range(many)]
    highs = [*(low - 1 for low in lows[1:]), _MOST]
    yield from (Slice((topic,), "key_hash", *each) for each in zip(lows, highs, strict=True))


def of_seqs(topic: str, size: int, seq: int) -> Iterator[Slice]:
    """Yield the slices of one table of so many bytes by seq, up to one."""
    many = max(1, -(-size // SLICE_BYTES))
    bounds = [(seq + 1) * each // many for each in range(many + 1)]
    for low, high in pairwise(bounds):
        yield Slice((topic,), "seq", low, high - 1)


def planned(sizes: Mapping[str, int], uncompacted: Collection[str], seq: int) -> Iterator[Slice]:
    """Yield slices of all tables, given how many bytes each has in memory, about."""
    shared: list[str] = []
    total = 0
    for topic, size in sorted(sizes.items()):
        if size < OWN_BYTES:
            if total + size > SLICE_BYTES and shared:
                yield Slice(tuple(shared))
                shared, total = [], 0
            shared.append(topic)
            total += size
        elif topic in uncompacted:
            yield from of_seqs(topic, size, seq)
        else:
            yield from of_keys(topic, size)
    if shared:
        yield Slice(tuple(shared))


class RowSizes:
    """How large rows are in memory, estimated from the files of tables."""

    def __init__(self, tables: Iterable[DeltaTable]) -> None:
        found: dict[str, list[int]] = {}
        size = rows = 0
        for table in tables:
            actions = pa.table(table.get_add_actions(flatten=True))
            named = ("min.topic", "max.topic", "size_bytes", "num_records")
            for first, last, bytes_, many in zip(
                *(actions[name].to_pylist() for name in named), strict=True
            ):
                data = max(0, bytes_ - _FOOTER_BYTES)
                size, rows = size + data, rows + many
                if first == last:  # another file has several tables
                    mine = found.setdefault(first, [0, 0])
                    mine[0] += data
                    mine[1] += many
        self._average = size / max(1, rows)
        self._of = {topic: size / max(1, many) for topic, (size, many) in found.items()}

    def of(self, topic: str, rows: int) -> int:
        """Return the bytes of so many rows of a table."""
        each = self._of.get(topic, self._average)
        return int(rows * max(_LEAST_BYTES, _INFLATED * each))


def floors(tables: PastTables, topics: Iterable[str]) -> dict[str, int]:
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
