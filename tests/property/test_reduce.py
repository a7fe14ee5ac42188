"""For any history and any cuts: reduced and written, it is the database's state.

At every frontier, with a sink that keeps what is not sent and with one that needs complete rows.
The quick way and the ordered one agree; and the fold, which ignores cuts, ends with the same rows.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from itertools import permutations
from random import Random
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.errors import GapError
from cdc.events import LSN
from cdc.log import names
from cdc.log.dead_letters import DeadLetterAssembler, Pointer
from cdc.verify.events import canonical
from cdc.verify.fold import Fold
from lockstep.conformance.memory import STORES, Memory, MemorySink
from lockstep.jobs.apply.applying import Applying, TornError
from lockstep.jobs.cuts.in_order import Letter, in_order
from lockstep.jobs.cuts.reduce import Bounds, NeedsOrderError, Reduced, completed, newest
from lockstep.jobs.cuts.schemas import version
from lockstep.sinks.contract import Applied, Changes, Column, Version
from lockstep.sinks.shapes import RowShape, Shaper
from tests.property.followed_world import CLICKS, LINES, USERS, Record, World
from tests.property.stream import PREFIX

Partitions = list[tuple[list[bytes | None], list[bytes]]]
DEAD = names.dead_topic(PREFIX)


class Cuts:
    """The records of a world, cut at some of its frontiers."""

    def __init__(self, world: World, chance: Random) -> None:
        self.world = world
        last = len(world.frontiers) - 1
        self.at = [n for n in range(last + 1) if n == last or chance.random() < 0.6]

    def __iter__(self) -> Any:  # noqa: ANN401 - a generator of what `follow` takes
        ends: dict[tuple[str, int], int] = defaultdict(int)
        above = before = 0
        for at in self.at:
            begins = dict(ends)
            for frontier in self.world.frontiers[before : at + 1]:
                for topic, number, end, _ in frontier.partitions:
                    ends[topic, number] = end
            frontier = self.world.frontiers[at]
            found = [
                record
                for record in self.world.records
                if begins.get(record[:2], 0) <= record.offset < ends[record[:2]]
            ]
            yield Bounds(above, frontier.seq), found, self.world.states[at]
            above, before = frontier.seq, at + 1


def by_table(records: list[Record]) -> dict[str, Partitions]:
    tables: dict[str, dict[int, tuple[list[bytes | None], list[bytes]]]] = {}
    for record in records:
        if record.value is not None and record.topic != DEAD:
            parts = tables.setdefault(record.topic, {})
            keys, values = parts.setdefault(record.partition, ([], []))
            keys.append(record.key)
            values.append(record.value)
    return {topic: [parts[n] for n in sorted(parts)] for topic, parts in tables.items()}


class Torn(Exception):  # noqa: N818 - no error: the writer's death
    """The writer has died."""


class Frail(MemorySink):
    """Writes one change after another, in the given order, and dies after `left` changes."""

    left = 0  # changes until its death; 0: it does not die

    def write(self, changes: Changes) -> int:
        if changes.version.name in self.histories():
            return super().write(changes)
        changed = super().write(changes._replace(changes=[]))
        for change in changes.changes:
            changed += super().write(Changes(changes.versions, [change]))
            self.left -= 1
            if self.left == 0:
                raise Torn
        return changed


class Following:
    """A sink in memory, moved from frontier to frontier as `jobs.apply.following` does it."""

    def __init__(
        self,
        world: World,
        *,
        complete_rows: bool,
        histories: frozenset[str],
        sink: type[MemorySink] = Frail,
    ) -> None:
        self.sink: Any = sink("reduce", complete_rows=complete_rows, histories=histories)
        STORES.pop("reduce", None)
        self.sink.open()
        self.known = {each.topic: version(each)._replace(schema_id=1) for each in world.versions}
        self.applying = Applying(self.sink, lambda topic, _: (self.known[topic],))

    @staticmethod
    def letters(records: list[Record]) -> Letter:
        """Return the lookup of the dead letters among the records, each at least once."""
        letters = DeadLetterAssembler()
        for record in records:
            if record.topic == DEAD:
                letters.add(record.key, record.value)
        taken: dict[str, bytes] = {}

        def letter(pointer: Pointer) -> bytes:
            if pointer.id not in taken:
                taken[pointer.id] = letters.event(pointer)
            return taken[pointer.id]

        return letter

    def take(self, bounds: Bounds, records: list[Record], *, torn: bool = False) -> None:
        letter = self.letters(records)
        tables = []
        for topic, partitions in by_table(records).items():
            both_ways(partitions, bounds, letter)
            name = self.known[topic].name
            tables.append(
                self.applying.reduce(topic, partitions, bounds, name=name, letter=letter, torn=torn)
            )
        for _ in self.applying.write(bounds.upto, tables):
            pass
        self.commit(bounds)

    def commit(self, bounds: Bounds) -> None:
        self.sink.commit(Applied("shop", 1, 1, LSN(bounds.upto), bounds.upto, 0, 0, {}))


def both_ways(partitions: Partitions, bounds: Bounds, letter: Letter) -> None:
    """Expect the quick way, if it can handle the events, to agree with the ordered one."""
    with suppress(NeedsOrderError):
        quick = newest(partitions, bounds)
        same(quick, in_order(partitions, bounds, letter=letter, rows=lambda *_: {}))


def same(one: Reduced, other: Reduced) -> None:
    """Expect equal results, except for the order of keys and placeholders for missing values."""
    reported = []
    for reduced in (one, other):
        rows = []
        for change in sorted(reduced.changes, key=lambda change: change.seq):
            row = orjson.loads(change.row) if change.row else {}
            kept = {name: value for name, value in row.items() if name not in change.unchanged}
            rows.append((change._replace(row=None), kept, change.row is None))
        reported.append((rows, reduced.truncated))
    assert reported[0] == reported[1]
    assert one.schema_ids <= other.schema_ids


def folded(world: World, chance: Random) -> dict[str, Any]:
    """Fold the log, its partitions and frontiers in any interleaving."""
    queues: dict[object, list[Any]] = {"frontiers": list(reversed(world.frontiers))}
    for record in reversed(world.records):
        queues.setdefault(record[:2], []).append(record)
    left = list(queues.values())
    fold = Fold()
    while left:
        queue = chance.choice(left)
        for _ in range(min(len(queue), chance.randint(1, 9))):
            each = queue.pop()
            if not isinstance(each, Record):
                fold.add_frontier(each)
            elif each.topic == DEAD:
                fold.add_letter(each.key, each.value)
            else:
                fold.add(*each)
        if not queue:
            left.remove(queue)
    reported = fold.finish()
    assert reported.findings == ()
    return reported.tables


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    transactions=st.integers(1, 14),
    complete_rows=st.booleans(),
    started=st.booleans(),
    limit=st.sampled_from([2_000, 1 << 24]),
    history=st.booleans(),
    widened=st.booleans(),
)
def test_every_frontier_is_the_databases_state(
    *,
    seed: int,
    transactions: int,
    complete_rows: bool,
    started: bool,
    limit: int,
    history: bool,
    widened: bool,
) -> None:
    chance = Random(seed)
    world = made(chance, transactions, limit, started=started, widened=widened)
    histories = frozenset({"public.lines"} if history else ())
    following = Following(world, complete_rows=complete_rows, histories=histories)
    store = STORES["reduce"]
    for bounds, records, state in Cuts(world, chance):
        following.take(bounds, records)
        expect(store, state, but=histories)
    tables = folded(world, chance)
    for topic, name in ((USERS, "public.users"), (LINES, "public.lines")):
        if topic in tables and name not in histories:
            assert tables[topic].rows == store.rows(name)
    if history and LINES in tables:
        assert len(store.tables["public.lines"].history) == tables[LINES].events


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    transactions=st.integers(2, 14),
    complete_rows=st.booleans(),
    started=st.booleans(),
    widened=st.booleans(),
)
def test_a_cut_torn_off_anywhere_is_brought_to_its_end(
    *, seed: int, transactions: int, complete_rows: bool, started: bool, widened: bool
) -> None:
    """Even if interrupted again; except if keys have swapped places in a cycle."""
    chance = Random(seed)
    world = made(chance, transactions, 1 << 24, started=started, widened=widened)
    following = Following(world, complete_rows=complete_rows, histories=frozenset())
    for bounds, records, state in Cuts(world, chance):
        try:
            for torn in (False, True, True):
                following.sink.left = chance.choice((0, 1, 2, 3, 5, 8))
                with suppress(Torn):
                    following.take(bounds, records, torn=torn)
            following.sink.left = 0
            following.take(bounds, records, torn=True)
        except TornError:
            return
        expect(STORES["reduce"], state)


def made(
    chance: Random, transactions: int, limit: int, *, started: bool, widened: bool = False
) -> World:
    """Return a history; a `widened` one has one more epoch, which starts anywhere in it."""
    world = World(chance, limit)
    when = chance.choice(("snapshot", "stream", "stream")) if widened else ""
    if started:
        world.snapshot(widened=when == "snapshot")
    if when != "stream":
        return world.run(transactions)
    world.run(chance.randint(1, transactions), ends=chance.random() < 0.5)
    return world.widen().run(chance.randint(1, transactions))


def expect(store: Memory, state: dict[str, Any], but: frozenset[str] = frozenset()) -> None:
    """Expect the store to show the database's state."""
    assert store.rows("public.users") == state[USERS]
    clicks = store.tables["public.clicks"].keyless if "public.clicks" in store.tables else []
    assert sorted(map(canonical, clicks)) == sorted(map(canonical, state[CLICKS]))
    if "public.lines" not in but:
        assert store.rows("public.lines") == state[LINES]


def test_the_newest_is_the_one_of_the_highest_seq() -> None:
    """Not the one of the highest partition, nor the one given last."""
    key = b'{"id":1}'
    older, newer = (([key], [_event(seq, {"id": 1, "name": str(seq)})]) for seq in (3, 10))
    deleted = ([key], [_event(12, None, op="d")])
    for batches in permutations((older, newer, deleted)):
        (change,) = newest(batches, Bounds(0, 12)).changes
        assert (change.seq, change.row) == (12, None)
    for batches in permutations((older, newer)):
        (change,) = newest(batches, Bounds(0, 12)).changes
        assert (change.seq, orjson.loads(change.row or b"")["name"]) == (10, "10")


def test_unchanged_columns_are_taken_by_seq_in_any_order_of_batches() -> None:
    key = b'{"id":1}'
    events = [
        _event(3, {"id": 1, "body": "three"}, op="c"),
        _event(5, {"id": 1, "body": "five"}),
        _event(8, {"id": 1, "body": "?"}, unchanged=("body",)),
    ]
    for order in permutations(events):
        for batches in ([([key], [each]) for each in order], [([key] * 3, list(order))]):
            (change,) = newest(batches, Bounds(0, 8)).changes
            assert (change.seq, change.unchanged) == (8, ())
            assert orjson.loads(change.row or b"") == {"id": 1, "body": "five"}


def _event(
    seq: int, after: dict[str, Any] | None, *, op: str = "u", unchanged: tuple[str, ...] = ()
) -> bytes:
    source: dict[str, Any] = {"seq": seq, "commit_lsn": f"0/{seq:X}", "ordinal": 1}
    source |= {"schema_id": 1, "ts_us": 0, "unchanged": unchanged}
    return orjson.dumps({"op": op, "after": after, "source": source})


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    transactions=st.integers(1, 14),
    started=st.booleans(),
    widened=st.booleans(),
)
def test_the_order_in_which_events_are_given_is_nothing(
    *, seed: int, transactions: int, started: bool, widened: bool
) -> None:
    """Partitions in any order, events of each in any order: both ways order them by seq."""
    chance = Random(seed)
    world = made(chance, transactions, 1 << 24, started=started, widened=widened)
    for bounds, records, _ in Cuts(world, chance):
        letter = Following.letters(records)
        for partitions in by_table(records).values():
            wanted = in_order(partitions, bounds, letter=letter, rows=lambda *_: {})
            mixed = [shuffled(chance, each) for each in partitions]
            chance.shuffle(mixed)
            found = in_order(mixed, bounds, letter=letter, rows=lambda *_: {})
            assert found == wanted
            with suppress(NeedsOrderError):
                same(newest(mixed, bounds), wanted)


def shuffled(
    chance: Random, events: tuple[list[bytes | None], list[bytes]]
) -> tuple[list[bytes | None], list[bytes]]:
    pairs = list(zip(*events, strict=True))
    chance.shuffle(pairs)
    keys, values = zip(*pairs, strict=True)
    return list(keys), list(values)


def test_an_event_of_another_cut_is_a_gap() -> None:
    """The frontiers belong to another log, even if the counts match."""
    world = World(Random(3), 1 << 24).run(6)
    partitions = by_table(world.records)[USERS]
    for bounds in (Bounds(0, 3), Bounds(world.seq, world.seq + 100)):
        with pytest.raises(GapError, match="is in the cut of seq"):
            newest(partitions, bounds)


def test_unknown_columns_are_named_as_unchanged() -> None:
    """Both ways: the store lost the row or never had it. A shape that needs it has no output."""
    event = {
        "op": "u",
        "after": {"id": 1, "name": "Ada", "body": "__debezium_unavailable_value", "note": "?"},
        "source": {
            "seq": 5,
            "commit_lsn": "0/5",
            "ordinal": 1,
            "schema_id": 1,
            "ts_us": 0,
            "unchanged": ["body", "note"],
        },
    }
    key, partitions = b'{"id":1}', [([b'{"id":1}'], [orjson.dumps(event)])]
    columns = tuple(Column(name, "text", 25, -1, nullable=True) for name in ("id", "name", "body"))
    table = Version(1, "public", "users", USERS, ("id",), columns, {})

    def stored(_: object, __: object) -> dict[bytes, bytes]:
        return {key: b'{"note":"kept"}'}

    def letter(_: Pointer) -> bytes:
        raise AssertionError

    bounds = Bounds(4, 5)
    for reduced in (
        completed(newest(partitions, bounds), stored),
        in_order(partitions, bounds, letter=letter, rows=stored, complete_rows=True),
    ):
        (change,) = reduced.changes
        assert change.unchanged == ("body",)
        assert orjson.loads(change.row or b"") == {"id": 1, "name": "Ada", "note": "kept"}
        for form, shows in (("row", False), ("fields", False), ("hash", False), ("text", True)):
            shape = RowShape(key="u:{name}", form=form, value="{id}" if form == "text" else None)
            assert bool(Shaper(shape, table, "shop").shaped(change)) is shows
