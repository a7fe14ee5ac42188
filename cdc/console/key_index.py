"""Where a partition may have a key: four bytes for each event, in a file.

A run is what `RUN` offsets of the partition have: sorted entries, each of 24 bits of a key's hash
and the block of `BLOCK` offsets in which the key is. So a look-up reads those blocks and no others.
A block may be named though the key is not in it, once in a thousand runs; none is left out.

Nothing in the file is believed: its first line names the partition, the topic by Kafka's id, and
each run has a checksum that is compared whenever it is read. What is damaged, cut off or of another
partition is not indexed: the caller reads the log there. So a file may be deleted at any time, and
is never synchronized.

The newest offsets, which are no complete run yet, are in memory. Memory holds them, and of each
other run its place in the file.
"""

from __future__ import annotations

import os
import sys
import threading
from array import array
from bisect import bisect_left
from contextlib import suppress
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

from cdc.events import TRUNCATE_KEY
from cdc.log.partitions import OffsetRange

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

RUN: Final = 1 << 14
BLOCK: Final = 1 << 6
_BLOCKS: Final = RUN // BLOCK - 1  # the bits of an entry that are the block's number
# Blocks that are no further apart are read at once: an answer of the broker costs more than their
# events. And how many offsets are, at most.
_NEAR: Final = 8 * BLOCK
_MOST_AT_ONCE: Final = 4_096
# Where the newest run is more than so many later than the one that grows, that one is given up: it
# is read again later, as what is newest is asked for most.
_JUMP: Final = 4
# A file is written again when so many bytes of it, and more than half, are of no use.
_LEAST_WASTE: Final = 1 << 20

_MAGIC: Final = b"run1"
# Its first offset; offset and checksum of its last record, -1 if it has none; entries; checksum.
_HEADER: Final = Struct("<4sqqIII")
_MOST_NAME: Final = 4_096


class Anchor(NamedTuple):
    """The last record that was indexed: as long as the log has it, nothing before it changed."""

    offset: int
    crc: int


class Entries:
    """What reading a range of the partition has found."""

    def __init__(self) -> None:
        self.found = array("I")
        self.anchor: Anchor | None = None

    def add(self, offset: int, key: bytes | None) -> None:
        """Take an event; without a key it is a truncate, or of a table that has none."""
        self.found.append(hashed(key) | (offset % RUN) // BLOCK)


class FoundBlocks(NamedTuple):
    """What the index has of one run: the blocks before offset `upto` that may have a key."""

    upto: int
    blocks: list[OffsetRange]  # in the order of the log


class _Growing(NamedTuple):
    """The newest run, of which offsets before `end` are indexed."""

    start: int
    end: int
    entries: array[int]
    anchor: Anchor | None


class _Place(NamedTuple):
    at: int
    size: int


def hashed(key: bytes | None) -> int:
    """Return the part of an entry that its key gives."""
    return crc32(TRUNCATE_KEY if key is None else key) & ~_BLOCKS


def anchor_of(offset: int, key: bytes | None, value: bytes | None, at_ms: int) -> Anchor:
    """Return the anchor that a record is."""
    crc = crc32(value or b"", crc32(key or b""))
    return Anchor(offset, crc32(at_ms.to_bytes(8, "little", signed=True), crc))


class PartitionIndex:
    """The index of one partition; for several threads at once."""

    def __init__(self, path: Path, name: bytes) -> None:
        """Continue the file if it is of `name`, one line that identifies the partition's content.

        Raises OSError if the folder can't be used.
        """
        assert b"\n" not in name
        self._path = path
        self._name = name + f" {sys.byteorder}\n".encode()
        self._seed = crc32(self._name)
        self._lock = threading.Lock()
        self._runs: dict[int, _Place] = {}
        self._growing: _Growing | None = None
        self._size = 0
        if not self._load():
            self.clear()

    @property
    def bytes_on_disk(self) -> int:
        return self._size

    def clear(self) -> None:
        """Forget everything: the file is of a log that is not there any more."""
        with self._lock:
            self._replace([])
            self._growing = None

    # --- what is asked ---

    def find(self, run: int, hashes: Collection[int]) -> FoundBlocks | None:
        """Return where the run that starts at an offset may have keys; None: it is not indexed."""
        with self._lock:
            growing = self._growing
            if growing is not None and growing.start == run:
                numbers = {each & _BLOCKS for each in growing.entries if each & ~_BLOCKS in hashes}
                return FoundBlocks(growing.end, _spans(run, numbers, growing.end))
            entries = self._read(run)
        if entries is None:
            return None
        numbers = set()
        for each in hashes:
            at = bisect_left(entries, each)
            while at < len(entries) and entries[at] & ~_BLOCKS == each:
                numbers.add(entries[at] & _BLOCKS)
                at += 1
        return FoundBlocks(run + RUN, _spans(run, numbers, run + RUN))

    def anchor(self) -> Anchor | None:
        """Return the newest record that is indexed; None if there is none."""
        with self._lock:
            if self._growing is not None and self._growing.anchor is not None:
                return self._growing.anchor
            for run in sorted(self._runs, reverse=True):
                if self._read(run) is not None:
                    anchor = self._header_of(run)
                    if anchor is not None:
                        return anchor
        return None

    def indexed(self, held: OffsetRange) -> int:
        """Return how many offsets of a range are indexed."""
        with self._lock:
            spans = [OffsetRange(each, each + RUN) for each in self._runs]
            if self._growing is not None:
                spans.append(OffsetRange(self._growing.start, self._growing.end))
        return sum(max(0, min(each.end, held.end) - max(each.start, held.start)) for each in spans)

    # --- what is built ---

    def missing(self, held: OffsetRange) -> OffsetRange | None:
        """Return what is to be read next of what the partition holds: the newest first, a run."""
        if held.start >= held.end:
            return None
        newest = held.end - held.end % RUN
        with self._lock:
            growing = self._growing
            if growing is not None and newest > growing.start + _JUMP * RUN:
                growing = self._growing = None
            if growing is None and newest < held.end:
                return OffsetRange(max(newest, held.start), held.end)
            if growing is not None and growing.end < held.end:
                return OffsetRange(max(growing.end, held.start), min(growing.start + RUN, held.end))
            first = held.start - held.start % RUN
            for run in range(newest - RUN, first - 1, -RUN):
                if run not in self._runs:
                    return OffsetRange(max(run, held.start), run + RUN)
        return None

    def add(self, read: OffsetRange, entries: Entries) -> None:
        """Take what is in a range that `missing` has named. Raises OSError if it can't be kept."""
        run = read.start - read.start % RUN
        with self._lock:
            before = self._growing
            if before is not None and before.start == run:
                anchor = entries.anchor or before.anchor
                grown = before._replace(
                    end=read.end, entries=before.entries + entries.found, anchor=anchor
                )
            else:
                grown = _Growing(run, read.end, entries.found, entries.anchor)
            if grown.end < run + RUN:
                self._growing = grown
                return
            self._append(run, _packed(grown, self._seed))
            if before is not None and before.start == run:
                self._growing = None

    def forget_before(self, offset: int) -> None:
        """Drop the runs of which the log has nothing left. Raises OSError."""
        with self._lock:
            if self._growing is not None and self._growing.start + RUN <= offset:
                self._growing = None
            for run in [each for each in self._runs if each + RUN <= offset]:
                del self._runs[run]
            used = len(self._name) + sum(each.size for each in self._runs.values())
            waste = self._size - used
            if waste > max(used, _LEAST_WASTE):
                self._replace(sorted(self._runs))

    # --- the file ---

    def _load(self) -> bool:
        """Find the file's runs; return whether it is this partition's."""
        try:
            with self._path.open("rb") as file:
                if file.readline(_MOST_NAME) != self._name:
                    return False
                end, at = os.fstat(file.fileno()).st_size, file.tell()
                while at + _HEADER.size <= end:
                    magic, run, _, _, count, _ = _HEADER.unpack(file.read(_HEADER.size))
                    size = _HEADER.size + 4 * count
                    if magic != _MAGIC or at + size > end:
                        break  # the end of a write that did not end; what follows is overwritten
                    self._runs[run] = _Place(at, size)
                    at += size
                    file.seek(at)
        except FileNotFoundError:
            return False
        self._size = at
        return True

    def _packed(self, run: int) -> bytes | None:
        """Return a run as the file has it; None, and it is not indexed, if it is damaged."""
        place = self._runs.get(run)
        if place is None:
            return None
        packed = b""
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(place.at)
            packed = file.read(place.size)
        if len(packed) == place.size:
            magic, first, offset, crc, count, checksum = _HEADER.unpack_from(packed)
            same = (magic, first, _HEADER.size + 4 * count) == (_MAGIC, run, place.size)
            checked = _checksum(self._seed, run, offset, crc, packed[_HEADER.size :])
            if same and checksum == checked:
                return packed
        del self._runs[run]
        return None

    def _read(self, run: int) -> memoryview[int] | None:
        packed = self._packed(run)
        return None if packed is None else memoryview(packed)[_HEADER.size :].cast("I")

    def _header_of(self, run: int) -> Anchor | None:
        packed = self._packed(run)
        if packed is None:
            return None
        _, _, offset, crc, _, _ = _HEADER.unpack_from(packed)
        return Anchor(offset, crc) if offset >= 0 else None

    def _append(self, run: int, packed: bytes) -> None:
        with self._path.open("r+b") as file:
            file.seek(self._size)
            file.write(packed)
            file.truncate()  # what an earlier write has left
        self._runs[run] = _Place(self._size, len(packed))
        self._size += len(packed)

    def _replace(self, kept: Iterable[int]) -> None:
        """Write the file again, with these runs alone."""
        at, runs = len(self._name), dict[int, _Place]()
        partly = self._path.with_suffix(".new")
        with open(partly, "wb", opener=_private) as file:
            file.write(self._name)
            for run in kept:
                packed = self._packed(run)
                if packed is None:
                    continue
                file.write(packed)
                runs[run] = _Place(at, len(packed))
                at += len(packed)
        partly.replace(self._path)
        self._runs, self._size = runs, at


def runs_below(end: int, start: int) -> Iterator[int]:
    """Yield the first offsets of the runs that a range has parts of, the newest first."""
    if start < end:
        yield from range((end - 1) // RUN * RUN, start // RUN * RUN - 1, -RUN)


def _spans(run: int, numbers: Iterable[int], end: int) -> list[OffsetRange]:
    """Return the blocks of these numbers, near ones as one, at most up to an offset."""
    found = list[OffsetRange]()
    for number in sorted(numbers):
        start = run + number * BLOCK
        until = min(start + BLOCK, end)
        last = found[-1] if found else None
        if last and start - last.end <= _NEAR and until - last.start <= _MOST_AT_ONCE:
            found[-1] = OffsetRange(last.start, until)
        else:
            found.append(OffsetRange(start, until))
    return found


def _packed(grown: _Growing, seed: int) -> bytes:
    """Return a run that is complete as the file has it."""
    entries = array("I", sorted(set(grown.entries))).tobytes()
    offset, crc = grown.anchor or (-1, 0)
    checksum = _checksum(seed, grown.start, offset, crc, entries)
    header = _HEADER.pack(_MAGIC, grown.start, offset, crc, len(entries) // 4, checksum)
    return header + entries


def _checksum(seed: int, run: int, offset: int, crc: int, entries: bytes) -> int:
    return crc32(entries, crc32(b"%d %d %d" % (run, offset, crc), seed))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
