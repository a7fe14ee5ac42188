"""A shadow build is verified, compared and switched to; the old generation stays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from random import Random
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.errors import CDCError, ConfigError, SwitchedError, UnavailableError
from cdc.events import LSN
from cdc.log import reader
from lockstep.conformance.memory import STORES, MemorySink
from lockstep.conformance.store import LINES, USERS, applied, change, key, row
from lockstep.jobs.apply.opening import AS_OF_ABOVE
from lockstep.jobs.generations import builders, comparing
from lockstep.jobs.generations.builders import LogBuilder
from lockstep.jobs.generations.comparing import Holding, KeyDifference, Newest
from lockstep.jobs.generations.in_place import InPlace
from lockstep.jobs.generations.rebuilding import DivergedError, Rebuild
from lockstep.sinks.contract import Applied, Change, Changes, Generations, Sink, Version

TABLES = {version.name: version for version in (USERS, LINES)}


class KilledError(Exception):
    """The process has died here."""


class Log:
    """Changes in seq order; followers of a generation apply them when `forward` is called."""

    keeps_seqs = True

    def __init__(self) -> None:
        self.changes: list[tuple[Version, Change]] = []
        self.dies_at: int | None = None
        self.before_each: Callable[[], None] = lambda: None
        self._random = Random(5)

    def grow(self, count: int) -> None:
        for _ in range(count):
            seq, version = len(self.changes) + 1, self._random.choice([USERS, LINES])
            ids = [self._random.randint(1, 9) for _ in version.key]
            there = None if self._random.random() < 0.3 else row(version, seq, *ids)
            self.changes.append((version, change(version, seq, there, *ids)))

    def tables(self) -> Sequence[str]:
        return list(TABLES)

    def knows(self, _: Applied) -> bool:
        return True

    def prepare(self, sink: Generations, generation: int, tables: frozenset[str] | None) -> int:  # noqa: ARG002 - a Builder's
        """Do nothing: everything is there."""
        return 0

    read_again = prepare

    def expect_past(self) -> None:
        """Do nothing: all rows are in the log."""

    def forward(self, sink: Generations, generation: int, until: LSN | None) -> Applied:
        """Act as a `Builder`: a frontier at each seq, three in a cut."""
        state = sink.open()
        at = state.applied.seq if state else 0
        # Grows only before it is read, so that the read ends.
        self.before_each()
        end = len(self.changes)
        while until is not None and applied(end).lsn > until:
            end -= 1
        while at < end:
            upto = min(at + 3, end)
            if self.dies_at is not None and upto >= self.dies_at:
                raise KilledError
            cut = self.changes[at:upto]
            sink.begin(upto, [version for version, _ in cut])
            for version in TABLES.values():
                newest = {each.key: each for table, each in cut if table is version}
                sink.write(Changes((version,), list(newest.values())))
            sink.commit(applied(upto, generation=generation))
            at = upto
        return applied(at, generation=generation)

    def versions(self, _: Applied) -> Sequence[Version]:
        self.before_each()
        return list(TABLES.values())

    def truth(self, version: Version, at: Applied) -> Holding:
        return Holding((name, seq, None) for name, seq in self.keys(version, at))

    def altered_at(self, _: Version, __: Applied) -> int:
        return 0

    def with_ends(self, at: Applied, tables: frozenset[str]) -> Applied:
        return at._replace(ends={**at.ends, **{f"shop.{name}": (at.seq,) for name in tables}})

    def keys(self, version: Version, at: Applied) -> Iterator[tuple[bytes, int]]:
        newest = {
            each.key: each
            for table, each in self.changes[: at.seq]
            if table is version and each.key
        }
        return ((name, each.seq) for name, each in newest.items() if name and each.row is not None)

    def rows(self, version: Version, at: Applied) -> dict[bytes, object]:
        return {
            name: msgspec.json.decode(self.changes[seq - 1][1].row or b"null")
            for name, seq in self.keys(version, at)
        }


@pytest.fixture
def log() -> Log:
    made = Log()
    made.grow(40)
    return made


@pytest.fixture
def sink(request: pytest.FixtureRequest) -> Iterator[MemorySink]:
    yield MemorySink(request.node.nodeid)
    STORES.pop(request.node.nodeid, None)


def check(sink: MemorySink, log: Log, store: str) -> None:
    at = STORES[store].applied
    assert at is not None
    for name, version in TABLES.items():
        assert STORES[store].rows(name) == log.rows(version, at)
    assert sink.current() == STORES[store].generation


def test_differences_of_the_old_generation_are_reported_and_fixed(
    sink: MemorySink, log: Log, request: pytest.FixtureRequest
) -> None:
    """The old one stays, and is compared, until it is dropped."""
    log.forward(sink, 1, None)
    store = STORES[request.node.nodeid]
    right = log.rows(USERS, applied(40))
    wrong = store.tables["public.users"].rows
    deleted, other = list(right)[:2]
    del wrong[deleted]
    wrong[other] = (wrong[other][0], {"id": 0})
    wrong[key(USERS, 77)] = (3, {"id": 77})
    described: list[str] = []
    reported: list[tuple[int, int | None, bool]] = []

    def report(at: Applied, why: str) -> None:
        reported.append((at.generation, sink.current(), not why))

    log.before_each = lambda: log.grow(2)
    outcome = Rebuild(sink, log, described.append, report).run()
    assert reported == [(2, 1, False), (2, 2, True)]
    users = next(each for each in outcome.tables if each.table == "public.users")
    assert {each.key for each in users.differences} == {
        Holding([(name, 0, None)]).differences(Holding([])).first(1)[0].key
        for name in (deleted, other, key(USERS, 77))
    }
    check(sink, log, request.node.nodeid)
    with pytest.raises(SwitchedError):
        sink.begin(99, [USERS])
    state = sink.open()
    assert state is not None
    assert state.applied.generation == 2
    assert sorted(sink.generations()) == [1, 2]
    assert Rebuild(sink, log, described.append).drop_old() == [1]
    check(sink, log, request.node.nodeid)


class Refiller(LogBuilder):
    """Empties a store when its rows can be had, and has nothing else to fill it with."""

    def __init__(self) -> None:
        self.finds_rows = False

    def beginning(self, generation: int) -> Applied:
        return Applied.beginning("shop", generation)

    def refill(self, sink: Sink, generation: int, empty: Callable[[], None]) -> Applied:
        if not self.finds_rows:
            raise UnavailableError("the log lacks rows", hint="start `cdc run`")
        assert sink.current() == 1
        empty()
        assert sink.current() == generation
        return applied(9, generation=generation)


def test_a_rebuild_in_place_that_cannot_begin_reports_nothing(sink: MemorySink, log: Log) -> None:
    """A report of the next generation makes those of a running follower void."""
    log.forward(sink, 1, None)
    reported: list[tuple[int, int | None, bool]] = []

    def report(at: Applied, why: str) -> None:
        reported.append((at.generation, sink.current(), not why))

    builder = Refiller()
    with pytest.raises(UnavailableError):
        InPlace(sink, builder, report, 1).run()
    assert (reported, sink.current()) == ([], 1)
    builder.finds_rows = True
    InPlace(sink, builder, report, 1).run()
    assert reported == [(2, 1, False), (2, 2, True)]


def test_the_old_generation_advances_meanwhile_and_readers_never_see_less(
    sink: MemorySink, log: Log, request: pytest.FixtureRequest
) -> None:
    """Its changes during the comparison are no difference; its follower moves to the new one."""
    follower = MemorySink(request.node.nodeid)
    log.forward(follower, 1, None)
    seen: list[int] = []

    def goes_on() -> None:
        log.before_each = lambda: None
        log.grow(4)
        log.forward(follower, 1, None)
        seen.append(STORES[request.node.nodeid].reached)
        log.before_each = goes_on if len(seen) < 5 else log.before_each

    # Before the shadow build is continued, and between that and the comparison.
    log.before_each = goes_on
    outcome = Rebuild(sink, log, lambda _: None).run()
    assert len(seen) == 5
    assert [each.differences for each in outcome.tables] == [(), ()]
    assert outcome.applied.seq >= seen[-1]
    log.before_each = lambda: None
    with pytest.raises(SwitchedError):
        follower.begin(999, [USERS])
    log.grow(3)
    log.forward(follower, 2, None)
    check(sink, log, request.node.nodeid)


@pytest.mark.parametrize("dies_at", range(3, 48, 9))
def test_a_rebuild_killed_anywhere_continues_its_shadow_build(
    sink: MemorySink, log: Log, request: pytest.FixtureRequest, dies_at: int
) -> None:
    """And readers see the old state until the new one is complete."""
    log.forward(sink, 1, None)
    log.grow(5)
    log.dies_at = dies_at
    with pytest.raises(KilledError):
        Rebuild(sink, log, lambda _: None).run()
    assert sink.current() == 1
    log.dies_at = None
    outcome = Rebuild(sink, log, lambda _: None).run()
    assert (outcome.generation, outcome.former) == (2, 1)
    check(sink, log, request.node.nodeid)


def test_a_switch_that_another_process_finished_is_reported(sink: MemorySink, log: Log) -> None:
    """A switch that an attempt did not survive is completed when a process opens the store."""
    log.forward(sink, 1, None)
    reported: list[tuple[int, bool]] = []
    log.before_each = lambda: sink.switch(2) if 2 in sink.generations() else None
    outcome = Rebuild(
        sink, log, lambda _: None, lambda at, why: reported.append((at.generation, not why))
    ).run()
    assert (outcome.generation, sink.current()) == (2, 2)
    assert reported == [(2, True)]


@pytest.mark.parametrize(
    ("reported", "started", "number"), [(5, False, 6), (5, True, 6), (2, True, 2)]
)
def test_its_number_is_one_whose_reports_are_honoured(
    sink: MemorySink,
    log: Log,
    reported: int,
    started: bool,  # noqa: FBT001 - a case
    number: int,
) -> None:
    """Also in a store that was lost since, or where an attempt died right before its switch."""
    log.forward(sink, 1, None)
    if started:
        sink.at(2).open()
    assert Rebuild(sink, log, lambda _: None, reported=reported).run().generation == number


def test_one_table_is_rebuilt_and_the_others_are_kept(
    sink: MemorySink, log: Log, request: pytest.FixtureRequest
) -> None:
    log.forward(sink, 1, None)
    log.grow(5)
    STORES[request.node.nodeid].tables["public.users"].rows.clear()
    reported: list[tuple[int, bool]] = []
    rebuild = Rebuild(sink, log, lambda _: None, lambda at, why: reported.append((at.seq, not why)))
    outcome = rebuild.run(frozenset({"public.users"}))
    assert (sink.current(), outcome.applied.seq) == (2, 40)
    assert outcome.applied.ends["shop.public.users"] == (40,)
    # The others lack what the new table has: it must not be reported as applied.
    assert reported == [(45, False), (40, False)]
    log.forward(sink, 2, None)
    check(sink, log, request.node.nodeid)


def test_a_table_that_the_follower_does_not_have_is_refused(sink: MemorySink, log: Log) -> None:
    """Before anything starts: otherwise an empty build would be switched to."""
    log.forward(sink, 1, None)
    with pytest.raises(ConfigError, match=r"no table public\.user\b"):
        Rebuild(sink, log, lambda _: None).run(frozenset({"public.users", "public.user"}))
    assert list(sink.generations()) == [1]


def test_a_build_that_differs_from_the_log_is_not_shown(sink: MemorySink, log: Log) -> None:
    log.forward(sink, 1, None)
    keys = log.keys
    log.keys = lambda version, at: itertools.chain(  # type: ignore[method-assign]
        keys(version, at), [(b"{}", 1)]
    )
    with pytest.raises(DivergedError) as described:
        Rebuild(sink, log, lambda _: None).run()
    assert isinstance(described.value, CDCError)
    assert sink.current() == 1


def test_a_generation_as_of_an_lsn_never_advances(
    sink: MemorySink, log: Log, request: pytest.FixtureRequest
) -> None:
    """Readers do not see it, and the next rebuild does not continue with it."""
    log.forward(sink, 1, None)
    asked = applied(20).lsn
    outcome = Rebuild(sink, log, lambda _: None).as_of(LSN(asked + 1))
    assert outcome.applied.seq == 21
    assert outcome.generation > AS_OF_ABOVE
    still = sink.at(outcome.generation)
    still.open()
    found = {name: seq for name, seq, _ in still.contents(USERS)}
    assert found == dict(log.keys(USERS, applied(21)))
    assert sink.current() == 1
    assert Rebuild(sink, log, lambda _: None).run().generation == 2
    check(sink, log, request.node.nodeid)


def test_a_past_state_without_directly_copied_rows_is_refused(
    sink: MemorySink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log never had their first rows; no build is started."""
    config = Mock(prefix="shop", pipeline="shop")
    config.selection.of.return_value.snapshot = "log"
    topics = {"shop.public.users": 1, "shop.public.lines": 1}
    config.followers = {"mirror": Mock()}
    monkeypatch.setattr(reader, "read_resume", lambda _: (Mock(),))
    monkeypatch.setattr(builders, "Chosen", lambda *_: Mock(among=lambda _: topics))
    copied: set[str] = set()
    monkeypatch.setattr(builders, "recorded", lambda _: copied)
    builder = LogBuilder(config, "mirror", Mock(), print)
    builder.expect_past()
    copied.add("shop.public.lines")
    with pytest.raises(ConfigError, match=r"no past states of public\.lines"):
        Rebuild(sink, builder, print).as_of(LSN(9))
    assert sink.generations() == {}


def test_holdings_differ_by_key_seq_and_value() -> None:
    mine = [(b"%d" % n, n, b"x") for n in range(9)]
    theirs = [(b"0", 0, b"x"), (b"1", 7, b"x"), (b"2", 2, b"y"), *mine[3:8], (b"9", 9, b"x")]
    differences = Holding(mine).differences(Holding(theirs))
    found = differences.first(9)
    assert (len(differences), differences.missing) == (4, (1, 1))
    assert found == tuple(sorted(found))
    assert differences.first(2) == found[:2]
    assert {(each.left, each.right) for each in differences.up_to(7).first(9)} == {(1, 7), (2, 2)}
    assert {(each.left, each.right) for each in found} == {(1, 7), (2, 2), (8, None), (None, 9)}
    assert len(Holding(mine).differences(Holding(theirs), values=False)) == 3
    assert all(isinstance(each, KeyDifference) for each in found)
    again = Holding(mine[:3]).differences(Holding([]))
    assert {each.right for each in differences.found_again(again).first(9)} == {7, 2}
    assert {each.left for each in differences.only_left().first(9)} == {1, 2, 8}
    altered = Holding([(b"1", 9, None), (b"2", 9, None)]).differences(
        Holding([(b"1", 4, None), (b"3", 4, None)])
    )
    assert {(each.left, each.right) for each in altered.not_altered(9).first(9)} == {
        (9, None),
        (None, 4),
    }


def test_differences_take_no_more_than_what_is_compared() -> None:
    """After a change of its shape every row of a table may differ."""
    sides = [Holding((b"%d" % n, 7, value) for n in range(200_000)) for value in (b"x", b"y")]
    differences = sides[0].differences(sides[1])
    assert (len(differences), differences.missing) == (200_000, (0, 0))
    assert differences.size < 40 * len(differences)
    assert len(differences.first(1_000)) == 1_000


@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60),
    st.integers(0, 40),
    st.randoms(),
)
def test_the_newest_event_of_a_key_decides_in_any_order(
    events: list[tuple[int, bool]], above: int, random: Random
) -> None:
    """They arrive from several partitions, and are folded at any moment."""
    described = [(b"%d" % key, seq, there) for seq, (key, there) in enumerate(events, 1)]
    left = {key: seq if there else 0 for key, seq, there in described}
    newest = Newest()
    random.shuffle(described)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(comparing, "AT_ONCE", random.randint(1, 9))
        patched.setattr(comparing, "FOLDED_AT", random.randint(1, 30))
        for key, seq, there in described:
            newest.add(key, seq, there=there)
    wanted = Holding((key, seq, None) for key, seq in left.items() if seq > above)
    found = newest.rows(above)
    assert not found.differences(wanted, values=False)
    assert len(found) == len(wanted)
