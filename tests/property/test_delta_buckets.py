"""However a large cut is divided among tasks: their files are what the small path writes."""

from __future__ import annotations

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
from lockstep.jobs.apply.applying import Applying
from lockstep.jobs.apply.cut_events import TableShare
from lockstep.jobs.cuts.reduce import Bounds, parsed
from lockstep.jobs.cuts.schemas import version
from lockstep.sinks.contract import Applied, Version
from lockstep.sinks.delta.layout import COMMIT_LSN, COMMITTED_AT, SEQ
from lockstep.sinks.delta.settings import DeltaSettings
from lockstep.sinks.delta.sink import DeltaSink
from tests.fixtures.seeds import examples
from tests.property.delta_tasks import TINY, by_tasks, letters_of, truncates_of
from tests.property.followed_world import LINES, USERS, Record, World
from tests.property.stream import PREFIX
from tests.property.test_delta_appliers import seen
from tests.property.test_reduce import Cuts, Following, Partitions, by_table, made

HISTORY = frozenset({"public.users", "public.lines"})


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
                letters = letters_of(records)
                by_tasks(self.sink, share, partitions, bounds, self.chance, letters)
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
            [self.known[topic]], bounds.upto, truncated, truncates_of(partitions, bounds)
        )
        ids = {event.source.schema_id for event in events}
        versions = {each.schema_id: each for each in self.versions(topic, ids)}
        has_old = any(event.op in {"u", "d"} for event in events)
        return target and TableShare(target, versions, truncated, 0, has_old)

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
