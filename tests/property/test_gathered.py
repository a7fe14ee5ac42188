"""However small the pieces of a large cut are: gathered, they are the cut's result."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from random import Random

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.conformance.memory import STORES, MemorySink
from lockstep.jobs.apply import large
from lockstep.jobs.cuts import pieces
from lockstep.jobs.cuts.reduce import Bounds, parsed
from lockstep.sinks.contract import Applied, Changes, Version
from lockstep.sinks.delta.gathered import GatheredChanges
from tests.property.followed_world import Record
from tests.property.test_reduce import Cuts, Following, Partitions, by_table, expect, made


class Gathering(MemorySink):
    """Has nothing of a cut in its store until the commit, as Delta."""

    def begin(self, reached: int, versions: Sequence[Version], above: int | None = None) -> None:
        super().begin(reached, versions, above)
        self.gathered: dict[str, GatheredChanges] = {}

    def write(self, changes: Changes) -> int:
        name = changes.version.name
        new = GatheredChanges(history=name in self.histories())
        self.gathered.setdefault(name, new).add(changes)
        return 0

    def rows(self, version: Version, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        stored = super().rows(version, keys)
        gathered = self.gathered.get(version.name)
        return gathered.rows(keys, stored) if gathered else stored

    def commit(self, applied: Applied) -> None:
        for name, gathered in self.gathered.items():
            reported = gathered.changes()
            if name not in self.histories():
                keys = [change.key for change in reported.changes if change.key is not None]
                assert len(set(keys)) == len(keys)
                assert all(change.seq > (reported.truncated or 0) for change in reported.changes)
            super().write(reported)
        super().commit(applied)


class InPieces(Following):
    """Takes each cut as `jobs.apply.large` does: partition by partition, in the order of `mix`."""

    mix: Callable[[Partitions], None]

    def take(self, bounds: Bounds, records: list[Record], *, torn: bool = False) -> None:
        self.sink.begin(bounds.upto, list(self.known.values()))
        letters = self.letters(records)
        for topic, partitions in by_table(records).items():
            version = self.known[topic]
            if not is_in_order(partitions) and version.name not in self.sink.histories():
                known = defaultdict[int, Version](lambda version=version: version)  # type: ignore[misc]
                self.mix(partitions)
                for partition in partitions:
                    for piece in pieces.pieces(zip(*partition, strict=True)):
                        large.write(self.sink, piece, bounds, known)
                continue
            events = chain.from_iterable(zip(*each, strict=True) for each in partitions)
            ordered = sorted(events, key=lambda each: parsed(each[1]).source.seq)
            for piece in pieces.pieces(ordered, complete=True):
                table = self.applying.reduce(
                    topic,
                    [piece],
                    bounds,
                    name=version.name,
                    letter=letters,
                    quick=False,
                    torn=torn,
                )
                self.applying.write_table(table)
        self.commit(bounds)


def is_in_order(partitions: Partitions) -> bool:
    """Return whether one partition is not enough; `jobs.apply.large` decides by its counts."""
    if len({parsed(value).source.epoch for _, values in partitions for value in values}) > 1:
        return True
    for keys, values in partitions:
        for key, value in zip(keys, values, strict=True):
            event = orjson.loads(value)
            source = event["source"]
            if (
                key is None
                or source.get("dead")
                or (event["op"] == "c" and source.get("unchanged"))
            ):
                return True
    return False


@contextmanager
def pieces_of(events: int) -> Iterator[None]:
    before, pieces.PIECE_EVENTS = pieces.PIECE_EVENTS, events  # type: ignore[misc]
    try:
        yield
    finally:
        pieces.PIECE_EVENTS = before  # type: ignore[misc]


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    transactions=st.integers(1, 14),
    events=st.integers(1, 6),
    limit=st.sampled_from([2_000, 1 << 24]),
    history=st.booleans(),
    widened=st.booleans(),
)
def test_gathered_pieces_are_the_databases_state(
    *, seed: int, transactions: int, events: int, limit: int, history: bool, widened: bool
) -> None:
    chance = Random(seed)
    world = made(chance, transactions, limit, started=True, widened=widened)
    histories = frozenset({"public.lines"} if history else ())
    following = InPieces(world, complete_rows=False, histories=histories, sink=Gathering)
    following.mix = chance.shuffle
    with pieces_of(events):
        for bounds, records, state in Cuts(world, chance):
            following.take(bounds, records)
            expect(STORES["reduce"], state, but=histories)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    transactions=st.integers(1, 14),
    events=st.integers(1, 6),
    limit=st.sampled_from([2_000, 1 << 24]),
    widened=st.booleans(),
)
def test_the_rows_that_tasks_write_are_the_databases_state(
    *, seed: int, transactions: int, events: int, limit: int, widened: bool
) -> None:
    """Executors write to a store of complete rows, one partition each, at different times."""
    chance = Random(seed)
    world = made(chance, transactions, limit, started=True, widened=widened)
    following = InPieces(world, complete_rows=True, histories=frozenset())
    following.mix = chance.shuffle
    with pieces_of(events):
        for bounds, records, state in Cuts(world, chance):
            following.take(bounds, records)
            expect(STORES["reduce"], state)
