"""The archive's files, read and checked one by one: no query engine, and no file trusted.

A file is compared with the SHA-256 in its add action before anything in it is read. Its rows are
then sorted by cut, partition and offset, so that each *span* is one slice. Files of large cuts hold
one partition's offsets one after another, so memory holds few files at a time.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lockstep.jobs.archiving import layout
from lockstep.jobs.archiving.writing import SHA256

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from lockstep.sinks.delta.actions import Files

# How many files are kept, sorted, for the next cut.
_KEPT: Final = 3
_GROUPED: Final = ("cut", "topic", "partition")
_SORTED: Final = [(name, "ascending") for name in (*_GROUPED, "offset")]

Key = tuple[int, str, int]  # cut, topic, partition


class Place(NamedTuple):
    """A file, and what its statistics state of its rows."""

    path: str
    digest: str | None
    first_cut: int
    last_cut: int
    first_topic: str
    last_topic: str
    first_partition: int
    last_partition: int
    first_offset: int
    rows: int

    @classmethod
    def of(cls, add: Mapping[str, Any]) -> Place:
        """Return what an add action states."""
        stats = json.loads(add["stats"])
        least, most = stats["minValues"], stats["maxValues"]
        tags = dict(add.get("tags") or ())
        return cls(
            add["path"], tags.get(SHA256), least["cut"], most["cut"], least["topic"],
            most["topic"], least["partition"], most["partition"], least["offset"],
            stats["numRecords"],
        )  # fmt: skip

    def may_have(self, topic: str, partition: int | None = None) -> bool:
        """Return whether rows of a topic, or of a partition of it, may be in the file."""
        if partition is not None and self.first_topic == self.last_topic:
            is_there = self.first_partition <= partition <= self.last_partition
        else:  # each of its topics may have any
            is_there = True
        return is_there and self.first_topic <= topic <= self.last_topic

    def __str__(self) -> str:
        topics = (
            self.first_topic
            if self.first_topic == self.last_topic
            else (f"{self.first_topic} to {self.last_topic}")
        )
        cuts = (
            f"cut {self.first_cut}"
            if self.first_cut == self.last_cut
            else (f"cuts {self.first_cut} to {self.last_cut}")
        )
        return f"file {self.path} ({cuts}, {topics})"


class Stored:
    """The rows of files that were found unaltered."""

    def __init__(self, files: Files, places: list[Place]) -> None:
        self._files = files
        self._by_cut: dict[int, list[Place]] = {}
        self._of_many: list[Place] = []
        for place in sorted(places, key=lambda place: place.first_offset):
            if place.first_cut == place.last_cut:
                self._by_cut.setdefault(place.first_cut, []).append(place)
            else:
                self._of_many.append(place)
        self._loaded: OrderedDict[str, tuple[pa.Table, dict[Key, tuple[int, int]]]] = OrderedDict()

    def span(self, cut: int, topic: str, partition: int) -> Iterator[pa.Table]:
        """Yield a span's rows, in the order of their offsets if no file was written twice."""
        several = [each for each in self._of_many if each.first_cut <= cut <= each.last_cut]
        found = []
        for place in (*several, *self._by_cut.get(cut, ())):
            if not place.may_have(topic, partition):
                continue
            table, index = self._load(place)
            if slot := index.get((cut, topic, partition)):
                found.append(table.slice(*slot))
        found.sort(key=lambda rows: rows["offset"][0].as_py())
        yield from found

    def all_of(self, topics: Collection[str]) -> Iterator[tuple[str, pa.Table]]:
        """Yield the rows of some topics, each with its topic, file by file."""
        places = {each.path: each for many in self._by_cut.values() for each in many}
        for place in (*places.values(), *self._of_many):
            if any(map(place.may_have, topics)):
                table, index = self._load(place)
                for (_, name, _), slot in index.items():
                    if name in topics:
                        yield name, table.slice(*slot)

    def erased(self) -> int:
        """Return how many records of all files have been replaced by their leaves."""
        places = {each.path for many in self._by_cut.values() for each in many}
        found = 0
        for path in (*places, *(each.path for each in self._of_many)):
            data = pa.BufferReader(self._files.read(path))
            leaves = pq.read_table(data, columns=["leaf"])["leaf"]
            found += len(leaves) - leaves.null_count
        return found

    def _load(self, place: Place) -> tuple[pa.Table, dict[Key, tuple[int, int]]]:
        found = self._loaded.pop(place.path, None)
        if found is None:
            found = sorted_rows(self._files.read(place.path))
        self._loaded[place.path] = found
        while len(self._loaded) > _KEPT:
            self._loaded.popitem(last=False)
        return found


def is_unaltered(files: Files, place: Place) -> bool | None:
    """Return whether a file has the bytes that were written; None if it is missing."""
    try:
        data = files.read(place.path)
    except FileNotFoundError:
        return None
    return sha256(data).hexdigest() == place.digest


def last_cuts(files: Files, path: str, topic: str) -> tuple[int, int]:
    """Return the last cut of which a file has rows, and the last of which it has those of a topic.

    0 for none, and if it can't be read.
    """
    try:
        rows = pq.read_table(pa.BufferReader(files.read(path)), columns=["cut", "topic"])
    except (OSError, pa.ArrowInvalid):
        return 0, 0
    of_topic = rows.filter(pc.equal(rows["topic"], topic))
    return pc.max(rows["cut"]).as_py() or 0, pc.max(of_topic["cut"]).as_py() or 0


def sorted_rows(data: bytes) -> tuple[pa.Table, dict[Key, tuple[int, int]]]:
    """Return a file's rows, sorted, and where each span is: its first row and its length."""
    table = pq.read_table(pa.BufferReader(data)).cast(layout.SCHEMA).sort_by(_SORTED)
    index: dict[Key, tuple[int, int]] = {}
    for start, end in pairwise([*_starts(table), table.num_rows]):
        key = tuple(table[name][start].as_py() for name in _GROUPED)
        assert key not in index, "sorted rows of a span are next to each other"
        index[key] = (start, end - start)
    return table, index


def _starts(table: pa.Table) -> list[int]:
    """Return where spans begin in sorted rows."""
    if not table.num_rows:
        return []
    changed = pa.array([False] * (table.num_rows - 1), pa.bool_())
    for name in _GROUPED:
        column = table[name].combine_chunks()
        changed = pc.or_(changed, pc.not_equal(column[1:], column[:-1]))
    return [0, *(at + 1 for at in pc.indices_nonzero(changed).to_pylist())]
