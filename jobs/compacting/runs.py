"""The runs of a base, and which of them a compaction folds again: its cost follows the change.

A file of a base has rows of one table, or of small ones that share it; tables that share files are
a *unit*. What one compaction writes of a unit is a *run*. A run has one event of each key, but the
runs before may have earlier events of it: the newest counts, so readers fold all runs.

A compaction folds what was archived since, and with it the newest runs, so many that each one that
stays is `RATIO` times as large as all that is newer. So the runs of a unit are few, and superseded
rows are a quarter at most. A fold without older runs is complete: only then may it leave out
deletes that are no longer kept, because an older run could still have the row.

Pure.
"""

from __future__ import annotations

import json
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from lockstep.jobs.compacting.layout import TableCount

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

# How many times as large as all newer rows a run is that stays as it is.
RATIO: Final = 4
# A smaller run never stays: it costs less to write it again than to have one more file.
LEAST_BYTES: Final = 64 << 10
_TABLES: Final = "lockstep.tables"  # the tag of what a file holds
_RUN: Final = "lockstep.run"  # the tag of the base that it was written for
_TOPICS: Final = "lockstep.topics"  # in its place in files of bases that had no runs
_tables: Final = msgspec.json.Decoder(tuple[TableCount, ...]).decode


class BaseFile(NamedTuple):
    """A file of a base, as its add action describes it."""

    path: str
    bytes: int
    run: int
    topics: frozenset[str]
    tables: tuple[TableCount, ...] | None  # None: of a base that had no runs

    @classmethod
    def of(cls, add: Mapping[str, Any]) -> BaseFile:
        """Return the file that an action adds; raise KeyError or ValueError if it is not ours."""
        tags, path, size = dict(add["tags"]), add["path"], int(add["size"])
        if _TABLES not in tags:
            return cls(path, size, 0, frozenset(json.loads(tags[_TOPICS])), None)
        tables = _tables(tags[_TABLES])
        return cls(path, size, int(tags[_RUN]), frozenset(each.topic for each in tables), tables)

    def rows(self, topic: str) -> int:
        """Return how many rows of a table it has."""
        return sum(each.rows for each in self.tables or () if each.topic == topic)


def tags(tables: Iterable[TableCount], run: int) -> dict[str, str]:
    """Return the tags from which `BaseFile.of` knows a file."""
    return {_TABLES: msgspec.json.encode(list(tables)).decode(), _RUN: str(run)}


class Merging(NamedTuple):
    """What a compaction folds: the events after the base, and these files of it. Pickles."""

    run: int  # that it writes
    files: frozenset[str]  # which it replaces
    rows: dict[str, int]  # of each table, at most
    partly: dict[str, str]  # tables of which older runs stay, each with the name of its unit

    @property
    def complete(self) -> set[str]:
        """Tables of which no older run stays."""
        return self.rows.keys() - self.partly.keys()


def merging(
    files: Collection[BaseFile],
    events: Mapping[str, int],
    truncated: Collection[str],
    tables: Iterable[TableCount],
    run: int,
) -> Merging:
    """Return what to fold, given how many `events` were archived since; `tables` is the base's."""
    held = {each.topic: each.rows for each in tables}
    found = Merging(run, frozenset(), {}, {})
    for topics in _units(files, events):
        if topics.isdisjoint(events):
            continue
        mine = [each for each in files if each.topics <= topics]
        newer = sum(events.get(topic, 0) for topic in topics)
        taken = mine if topics & set(truncated) else _newest(mine, newer)
        found = found._replace(files=found.files.union(each.path for each in taken))
        is_complete = len(taken) == len(mine)
        for topic in topics:
            old = held.get(topic, 0) if is_complete else sum(each.rows(topic) for each in taken)
            found.rows[topic] = events.get(topic, 0) + (0 if topic in truncated else old)
            if not is_complete:
                found.partly[topic] = min(topics)
    return found


def _units(files: Iterable[BaseFile], topics: Iterable[str]) -> list[set[str]]:
    """Return the sets of tables that share files; a table without files is one."""
    found: list[set[str]] = []
    for some in [*(each.topics for each in files), *({topic} for topic in topics)]:
        shared = [each for each in found if not each.isdisjoint(some)]
        found = [each for each in found if each.isdisjoint(some)]
        found.append(set(some).union(*shared))
    return found


def _newest(files: list[BaseFile], newer: int) -> list[BaseFile]:
    """Return the files of a unit's newest runs that are folded again; `newer` counts events."""
    if any(each.tables is None for each in files):
        return files
    passed: list[BaseFile] = []
    taken = 0
    by_run = attrgetter("run")
    for _, run in groupby(sorted(files, key=by_run, reverse=True), key=by_run):
        its = list(run)
        passed += its
        rows = sum(table.rows for each in its for table in each.tables or ())
        if rows < RATIO * newer or sum(each.bytes for each in its) < LEAST_BYTES:
            taken = len(passed)
        newer += rows
    return passed[:taken]
