"""What Spark does with a table's part of a large cut, in one process: any division among tasks."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from itertools import chain
from operator import itemgetter
from random import Random
from typing import Any, NamedTuple

from cdc.log.dead_letters import chunk_key
from lockstep.jobs.apply import buckets as executors
from lockstep.jobs.apply import keyless
from lockstep.jobs.apply.buckets import files_to_end, written, written_buckets
from lockstep.jobs.apply.cut_events import NewestForm, TableShare, complete
from lockstep.jobs.apply.divided import Buckets, DividedReading, PartCount
from lockstep.jobs.cuts.by_key import every
from lockstep.jobs.cuts.reduce import Bounds, parsed
from lockstep.sinks.contract import Change
from lockstep.sinks.delta import buckets, keyless_buckets, targets
from lockstep.sinks.delta.sink import DeltaSink
from lockstep.sinks.delta.targets import Piece, Target
from tests.property.followed_world import Record
from tests.property.test_reduce import DEAD, Partitions

# Limits at which each history has several tasks, pieces, flushes and reads of a file.
TINY = ((executors, "PIECE_EVENTS"), (targets, "HELD_BYTES"), (targets, "KEYS_AT_ONCE"),
        (targets, "ROWS_AT_ONCE"))  # fmt: skip
Letters = dict[str, list[dict[str, Any]]]
Event = tuple[bytes | None, bytes, int]  # key, value and seq


def letters_of(records: list[Record]) -> Letters:
    """Return the records of each dead letter, as the join with their pointers has them."""
    found: Letters = {}
    for record in records:
        if record.topic == DEAD:
            found.setdefault(chunk_key(record.key).id, []).append(record._asdict())
    return found


def truncates_of(partitions: Partitions, bounds: Bounds) -> list[Change]:
    """Return the truncates, in the order of their seqs, as `Large` reads them."""
    events = [each for each in _events(partitions) if parsed(each[1]).op == "t"]
    keys, values = [key for key, _ in events], [value for _, value in events]
    return [each for found in every([(keys, values)], bounds) for each in found]


def by_tasks(
    sink: DeltaSink,
    share: TableShare,
    partitions: Partitions,
    bounds: Bounds,
    chance: Random,
    letters: Letters,
) -> None:
    """Do what `jobs.apply.buckets.write` and `jobs.apply.keyless.write` have Spark do."""
    if share.target.key and not share.changes_form and not letters and chance.random() < 0.7:
        pieces = _in_buckets(share, partitions, bounds, chance)
    else:
        do = _by_key if share.target.key else _keyless
        pieces = do(share, list(_prepared(share, partitions, letters)), bounds, chance)
    pieces.sort(key=lambda piece: (piece.place, piece.path))
    marked = buckets.marked({share.target.place: share.target}, pieces)
    sink.stage(share.target, [json.loads(action) for _, action in marked])


def _events(partitions: Partitions) -> Iterable[tuple[bytes | None, bytes]]:
    return chain.from_iterable(zip(*part, strict=True) for part in partitions)


def _prepared(share: TableShare, partitions: Partitions, letters: Letters) -> Iterable[Event]:
    """Yield the events that no truncate removes, as `prepared` has them."""
    has_key, form = bool(share.target.key), NewestForm(share)
    for key, value in _events(partitions):
        source = parsed(value).source
        first = 0 if share.target.is_history else (share.truncated or 0)
        if (key is not None) == has_key and source.seq > first:
            full = complete(value, letters[source.dead.id] if source.dead else None)
            if share.changes_form:
                (key,), (full,) = form.of([key], [full])  # noqa: PLW2901 - the same event
            yield key, full, source.seq


def _by_key(share: TableShare, events: list[Event], bounds: Bounds, chance: Random) -> list[Piece]:
    tasks = chance.randint(1, 4)
    shuffled: list[list[tuple[bytes, int, bytes]]] = [[] for _ in range(tasks)]
    for key, value, seq in events:
        assert key is not None
        shuffled[zlib.crc32(key) % tasks].append((key, seq, value))
    found: list[Piece] = files_to_end(share.target)
    for each in shuffled:
        records = ((key, value) for key, _, value in sorted(each))
        found += written(share, bounds, records)
    return found


class _Message(NamedTuple):
    """A record as the client returns it."""

    fields: tuple[bytes | None, bytes]

    def key(self) -> bytes | None:
        return self.fields[0]

    def value(self) -> bytes:
        return self.fields[1]


def _in_buckets(
    share: TableShare, partitions: Partitions, bounds: Bounds, chance: Random
) -> list[Piece]:
    """Read the partitions in several tasks, which give up what they keep at any time."""
    tables = {"t": Buckets(chance.randint(0, 3), chance.randint(1, 9))}
    count, shuffled = PartCount(), list[tuple[int, bytes]]()
    for part in partitions:
        reading = DividedReading(tables)
        for event in zip(*part, strict=True):
            reading.add("t", [_Message(event)], count)
            if chance.random() < 0.2:
                shuffled += reading.take()
        shuffled += reading.take()
    assert count.events == sum(len(values) for _, values in partitions)
    assert count.truncated == share.truncated
    chance.shuffle(shuffled)
    tasks = chance.randint(1, 4)
    found, many = files_to_end(share.target), 0
    for task in range(tasks):
        mine = sorted((each for each in shuffled if each[0] % tasks == task), key=itemgetter(0))
        *some, taken = written_buckets({"t": share}, bounds, tables, [piece for _, piece in mine])
        assert not taken.place
        many += taken.rows
        found += some
    assert many == sum(key is not None for keys, _ in partitions for key in keys)
    return found


def _keyless(share: TableShare, events: list[Event], bounds: Bounds, chance: Random) -> list[Piece]:
    target = share.target
    records = ((None, value) for _, value, _ in sorted(events, key=lambda event: event[2]))
    changes = list(keyless.changes_of(share, bounds, records))
    if not share.has_old:
        rows = [one for some in changes for one in some.changes if one.op != "t"]
        added = keyless.written(share, [one for one in rows if one.seq > target.seq])
        return [Piece(target.place, "", 0, action) for action in added]
    halves = [half for some in changes for half in keyless_buckets.halves(target, some, {})]
    halves.sort(key=lambda half: (half.id, -half.seq, not half.is_new))
    tasks = chance.randint(1, 3)
    found = [
        each
        for task in range(tasks)
        for each in keyless.resolved(share, (half for half in halves if half.id[0] % tasks == task))
    ]
    pieces = [piece for piece, is_taken in found if not is_taken]
    return pieces + _taken(target, {piece.data: piece.rows for piece, is_ in found if is_})


def _taken(target: Target, wanted: dict[bytes, int]) -> list[Piece]:
    """Return the stored rows to delete, by their hashes."""
    found: list[Piece] = []
    for path in [] if target.replaces else target.files:
        for rows in keyless_buckets.hashed(target, path):
            for row in rows.to_pylist():
                hashed = row.pop("id")
                if wanted.get(hashed, 0):
                    wanted[hashed] -= 1
                    found.append(Piece(**row))
    return found
