"""However a large cut is divided among tasks: their files are what the small path writes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.events import LSN
from cdc.log.dead_letters import chunk_key
from lockstep.jobs.apply import buckets as executors
from lockstep.jobs.apply import keyless
from lockstep.jobs.apply.applying import Applying
from lockstep.jobs.apply.buckets import TableShare, complete, files_to_end, written
from lockstep.jobs.cuts.by_key import every
from lockstep.jobs.cuts.reduce import Bounds, parsed
from lockstep.jobs.cuts.schemas import version
from lockstep.sinks.contract import Applied, Change, Version
from lockstep.sinks.delta import buckets, keyless_buckets, targets
from lockstep.sinks.delta.layout import COMMIT_LSN, COMMITTED_AT, SEQ
from lockstep.sinks.delta.settings import DeltaSettings
from lockstep.sinks.delta.sink import DeltaSink
from lockstep.sinks.delta.targets import Piece, Target
from tests.fixtures.seeds import examples
from tests.property.followed_world import LINES, USERS, Record, World
from tests.property.stream import PREFIX
from tests.property.test_delta_appliers import seen
from tests.property.test_reduce import DEAD, Cuts, Following, Partitions, by_table, made

# Limits at which each history has several tasks, pieces, flushes and reads of a file.
TINY = ((executors, "PIECE_EVENTS"), (targets, "HELD_BYTES"), (targets, "KEYS_AT_ONCE"),
        (targets, "ROWS_AT_ONCE"))  # fmt: skip
HISTORY = frozenset({"public.users", "public.lines"})


Letters = dict[str, list[dict[str, Any]]]


def letters_of(records: list[Record]) -> Letters:
    """Return the records of each dead letter, as the join with their pointers has them."""
    found: Letters = {}
    for record in records:
        if record.topic == DEAD:
            found.setdefault(chunk_key(record.key).id, []).append(record._asdict())
    return found


class Tasks:
    """A lake that is moved from frontier to frontier: large cuts by tasks, others by the driver."""

    def __init__(
        self,
        world: World,
        chance: Random,
        settings: DeltaSettings,
        large: float,
    ) -> None:
        self.chance, self.settings, self.large = chance, settings, large
        self.known = {each.topic: version(each)._replace(schema_id=1) for each in world.versions}
        self.open()

    def open(self) -> None:
        self.sink = DeltaSink(self.settings)
        self.sink.open()
        self.applying = Applying(self.sink, self.versions)

    def versions(self, topic: str, schema_ids: Collection[int]) -> tuple[Version, ...]:
        """Return versions of a topic's table, which are all alike."""
        return tuple(self.known[topic]._replace(schema_id=each) for each in sorted(schema_ids))

    def take(self, bounds: Bounds, records: list[Record]) -> None:
        is_large = self.chance.random() < self.large
        while is_large and self.chance.random() < 0.3:
            self.write(bounds, records, is_large=True)
            self.open()  # killed before the commit
        self.write(bounds, records, is_large=is_large)
        self.sink.commit(Applied("shop", 1, 1, LSN(bounds.upto), bounds.upto, 0, 0, {}))

    def write(self, bounds: Bounds, records: list[Record], *, is_large: bool) -> None:
        self.sink.begin(bounds.upto, list(self.known.values()))
        letter = Following.letters(records)
        for topic, partitions in by_table(records).items():
            share = self.share(topic, partitions, bounds) if is_large else None
            if share is not None:
                self.by_tasks(share, partitions, bounds, letters_of(records))
                continue
            name = self.known[topic].name
            table = self.applying.reduce(topic, partitions, bounds, name=name, letter=letter)
            self.applying.write_table(table)

    def share(self, topic: str, partitions: Partitions, bounds: Bounds) -> TableShare | None:
        events = [parsed(value) for _, values in partitions for value in values]
        truncates = [event.source.seq for event in events if event.op == "t"]
        truncated = max(truncates, default=None)
        if any(event.op == "c" and event.source.unchanged for event in events):
            return None
        target = self.sink.target(
            [self.known[topic]], bounds.upto, truncated, self.truncates(partitions, bounds)
        )
        ids = {event.source.schema_id for event in events}
        versions = {each.schema_id: each for each in self.versions(topic, ids)}
        has_old = any(event.op in {"u", "d"} for event in events)
        return target and TableShare(target, versions, truncated, 0, has_old)

    @staticmethod
    def truncates(partitions: Partitions, bounds: Bounds) -> list[Change]:
        """Return the truncates, in the order of their seqs, as `Large` reads them."""
        events = [
            (key, value)
            for part in partitions
            for key, value in zip(*part, strict=True)
            if parsed(value).op == "t"
        ]
        keys, values = [key for key, _ in events], [value for _, value in events]
        return [each for found in every([(keys, values)], bounds) for each in found]

    def by_tasks(
        self, share: TableShare, partitions: Partitions, bounds: Bounds, letters: Letters
    ) -> None:
        """Do what `jobs.apply.buckets.write` has Spark do."""
        if not share.target.key:
            self.keyless(share, partitions, bounds, letters)
            return
        tasks, is_history = self.chance.randint(1, 4), share.target.is_history
        shuffled: list[list[tuple[bytes, int, bytes]]] = [[] for _ in range(tasks)]
        for keys, values in partitions:
            for key, value in zip(keys, values, strict=True):
                source = parsed(value).source
                seq = source.seq
                if key is not None and (is_history or seq >= (share.truncated or 0)):
                    full = complete(value, letters[source.dead.id] if source.dead else None)
                    shuffled[zlib.crc32(key) % tasks].append((key, seq, full))
        found: list[Piece] = files_to_end(share.target)
        for each in shuffled:
            records = ((key, value) for key, _, value in sorted(each))
            found += written(share, bounds, records)
        found.sort(key=lambda piece: (piece.place, piece.path))
        marked = buckets.marked({share.target.place: share.target}, found)
        actions = [json.loads(action) for _, action in marked]
        self.sink.stage(share.target, actions)

    def keyless(
        self, share: TableShare, partitions: Partitions, bounds: Bounds, letters: Letters
    ) -> None:
        """Do what `jobs.apply.keyless.write` has Spark do."""
        target = share.target
        records = self.ordered(share, partitions, letters)
        changes = list(keyless.changes_of(share, bounds, ((None, value) for value in records)))
        if not share.has_old:
            added = keyless.written(share, [each for some in changes for each in some.changes])
            self.sink.stage(target, [json.loads(action) for action in added])
            return
        halves = [half for some in changes for half in keyless_buckets.halves(target, some, {})]
        halves.sort(key=lambda half: (half.id, -half.seq, not half.is_new))
        tasks = self.chance.randint(1, 3)
        found = [
            each
            for task in range(tasks)
            for each in keyless.resolved(
                share, (half for half in halves if half.id[0] % tasks == task)
            )
        ]
        pieces = [piece for piece, is_taken in found if not is_taken]
        pieces += self.taken(target, {piece.data: piece.rows for piece, is_ in found if is_})
        pieces.sort(key=lambda piece: (piece.place, piece.path))
        marked = buckets.marked({target.place: target}, pieces)
        self.sink.stage(target, [json.loads(action) for _, action in marked])

    @staticmethod
    def ordered(share: TableShare, partitions: Partitions, letters: Letters) -> list[bytes]:
        """Return the events that no truncate removes, in the order of their seqs."""
        found: list[tuple[int, bytes]] = []
        for value in (value for _, values in partitions for value in values):
            source = parsed(value).source
            if source.seq > (share.truncated or 0):
                dead = letters[source.dead.id] if source.dead else None
                found.append((source.seq, complete(value, dead)))
        return [value for _, value in sorted(found)]

    @staticmethod
    def taken(target: Target, wanted: dict[bytes, int]) -> list[Piece]:
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

    def expect(self, state: dict[str, Any]) -> None:
        for topic in (USERS, LINES):
            if topic in self.known:
                rows = {
                    key: orjson.loads(row) for key, _, row in self.sink.contents(self.known[topic])
                }
                assert rows == state[topic]


@settings(max_examples=examples(25))
@given(
    seed=st.integers(0, 2**32),
    transactions=st.integers(1, 14),
    started=st.booleans(),
    widened=st.booleans(),
    limit=st.sampled_from([2_000, 1 << 24]),
    history=st.booleans(),
    tiny=st.lists(st.sampled_from([1, 2, 5, 1_000]), min_size=4, max_size=4),
)
def test_tasks_leave_the_databases_state(
    *,
    seed: int,
    transactions: int,
    started: bool,
    widened: bool,
    limit: int,
    history: bool,
    tiny: list[int],
) -> None:
    """Large cuts and small ones in turns, one process after another."""
    chance = Random(seed)
    world = made(chance, transactions, limit, started=started, widened=widened)
    with TemporaryDirectory() as folder, ExitStack() as limits:
        for (module, name), value in zip(TINY, tiny, strict=True):
            limits.enter_context(patch.object(module, name, value))
        paths = [str(Path(folder, name)) for name in ("mixed", "small")]
        one, other = (
            DeltaSettings(
                "shop",
                "mirror",
                PREFIX,
                path,
                applier=how,
                history=HISTORY if history else frozenset(),
            )
            for path, how in zip(
                paths, (chance.choice(("auto", "vectors")), "vectors"), strict=True
            )
        )
        mixed, small = Tasks(world, chance, one, 0.7), Tasks(world, Random(seed), other, 0)
        for bounds, records, state in Cuts(world, chance):
            for each in (mixed, small):
                each.take(bounds, records)
                each.expect(state)
            # Of equal rows without a key any may be deleted.
            for table, *ours in (["users"], ["lines"], ["clicks", SEQ, COMMIT_LSN, COMMITTED_AT]):
                if Path(paths[0], f"public.{table}").exists():
                    assert seen(paths[0], table, *ours) == seen(paths[1], table, *ours)
