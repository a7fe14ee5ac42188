"""What sinks guarantee for stores that hold several generations, with any store."""

from __future__ import annotations

from typing import Final

import msgspec
import pytest

from cdc.errors import ConfigError, SwitchedError
from lockstep.conformance.store import (
    LINES,
    USERS,
    StoreUnderTest,
    applied,
    apply,
    change,
    key,
    row,
)
from lockstep.sinks.contract import Changes, Generations, Sink, Version

_USERS_ALONE: Final = frozenset({"public.users"})


def users(seq: int, *ids: int) -> Changes:
    return Changes((USERS,), [change(USERS, seq, row(USERS, seq, each), each) for each in ids])


def lines(seq: int, *ids: int) -> Changes:
    return Changes(
        (LINES,), [change(LINES, seq, row(LINES, seq, each, 1), each, 1) for each in ids]
    )


def put(sink: Sink, generation: int, seq: int, *tables: Changes) -> None:
    """Write one cut into a generation."""
    sink.begin(seq, [version for changes in tables for version in changes.versions])
    for changes in tables:
        sink.write(changes)
    sink.commit(applied(seq, generation=generation))


def seqs(sink: Generations, version: Version) -> dict[bytes, int]:
    return {each: seq for each, seq, _ in sink.contents(version)}


def test_readers_see_a_shadow_build_from_its_switch_on(
    several: Generations, store: StoreUnderTest
) -> None:
    """And the previous generation's follower notices, and continues in the new one."""
    assert several.current() == 1
    apply(several, 5, users(5, 1, 2), lines(4, 7))
    shadow = several.at(2)
    assert shadow.open() is None
    put(shadow, 2, 3, users(3, 1))
    assert several.current() == 1
    assert store.rows("public.users") == {key(USERS, n): row(USERS, 5, n) for n in (1, 2)}
    assert {number: a and a.seq for number, a in several.generations().items()} == {1: 5, 2: 3}
    assert seqs(shadow, USERS) == {key(USERS, 1): 3}
    put(shadow, 2, 6, users(6, 1, 3), lines(4, 7))
    found = {each: (seq, value) for each, seq, value in shadow.contents(USERS)}
    assert found.keys() == {key(USERS, 1), key(USERS, 3)}
    assert msgspec.json.decode(found[key(USERS, 3)][1])["name"] == "n6"
    for _ in range(2):
        several.switch(2)
        assert several.current() == 2
    assert store.rows("public.users") == {key(USERS, n): row(USERS, 6, n) for n in (1, 3)}
    with pytest.raises(SwitchedError):
        several.begin(7, [USERS])
    state = several.open()
    assert state is not None
    assert (state.applied.seq, state.applied.generation) == (6, 2)
    put(several, 2, 8, users(8, 4))
    assert key(USERS, 4) in store.rows("public.users")
    shadow.close()


def test_a_cut_that_a_switch_interrupted_does_not_hinder_the_next(
    several: Generations, store: StoreUnderTest
) -> None:
    """In the same process, which had written a part of it into the previous generation."""
    apply(several, 5, users(5, 1), lines(4, 7))
    several.begin(8, [USERS])
    several.write(users(8, 1, 2))
    shadow = several.at(2)
    shadow.open()
    put(shadow, 2, 8, users(8, 1, 2), lines(4, 7))
    several.switch(2)
    shadow.close()
    state = several.open()
    assert state is not None
    assert (state.applied.generation, state.applied.seq) == (2, 8)
    put(several, 2, 9, lines(9, 7))
    assert store.rows("public.users") == {key(USERS, n): row(USERS, 8, n) for n in (1, 2)}
    assert store.rows("public.lines") == {key(LINES, 7, 1): row(LINES, 9, 7, 1)}


def test_the_one_before_stays_until_it_is_dropped(
    several: Generations, store: StoreUnderTest
) -> None:
    apply(several, 5, users(5, 1), lines(4, 7))
    shadow = several.at(2)
    shadow.open()
    put(shadow, 2, 5, users(5, 1), lines(4, 7))
    with pytest.raises(ConfigError):
        several.drop(1)
    several.switch(2)
    old = several.at(1)
    assert old.open() is not None
    assert seqs(old, USERS) == {key(USERS, 1): 5}
    with pytest.raises(ConfigError):
        several.drop(2)
    for _ in range(2):
        several.drop(1)
        assert list(several.generations()) == [2]
    assert store.rows("public.users") == {key(USERS, 1): row(USERS, 5, 1)}
    for each in (old, shadow):
        each.close()


@pytest.mark.parametrize("ahead", [True, False])
def test_a_shadow_build_of_some_tables_shares_the_others(
    several: Generations, store: StoreUnderTest, *, ahead: bool
) -> None:
    """The next cut must reach what any table has: before that, the store is at no frontier."""
    apply(several, 5, users(5, 1, 2), lines(4, 7))
    if ahead:
        apply(several, 6, users(6, 2))
    shadow = several.at(2, frozenset({"public.users"}))
    assert shadow.open() is None
    put(shadow, 2, 5, users(5, 1, 2), lines(4, 7))
    if not ahead:
        put(shadow, 2, 6, users(6, 2))
    several.switch(2)
    state = several.open()
    assert state is not None
    assert (state.applied.seq, state.reached) == (5, 6)
    put(several, 2, 6, users(6, 2))
    assert store.rows("public.users") == {
        key(USERS, n): row(USERS, seq, n) for n, seq in ((1, 5), (2, 6))
    }
    assert store.rows("public.lines") == {key(LINES, 7, 1): row(LINES, 4, 7, 1)}
    shadow.close()


def test_a_shadow_build_of_one_table_leaves_the_others_at_their_frontier(
    several: Generations, store: StoreUnderTest
) -> None:
    """It may be far ahead of them: it must not write the other tables."""
    apply(several, 5, users(5, 1), lines(4, 7))
    shadow = several.at(2, _USERS_ALONE)
    shadow.open()
    put(shadow, 2, 8, users(8, 1), lines(7, 7, 8))
    assert store.rows("public.users") == {key(USERS, 1): row(USERS, 5, 1)}
    assert store.rows("public.lines") == {key(LINES, 7, 1): row(LINES, 4, 7, 1)}
    several.switch(2)
    state = several.open()
    assert state is not None
    assert (state.applied.seq, state.reached) == (5, 8)
    put(several, 2, 8, users(8, 1), lines(7, 7, 8))
    assert store.rows("public.users") == {key(USERS, 1): row(USERS, 8, 1)}
    assert store.rows("public.lines") == {key(LINES, n, 1): row(LINES, 7, n, 1) for n in (7, 8)}
    shadow.close()


@pytest.mark.parametrize("seq", [5, 6])
@pytest.mark.parametrize("has_changed", [False, True])
def test_a_switch_of_some_tables_takes_the_ends_that_it_is_given(
    several: Generations, seq: int, *, has_changed: bool
) -> None:
    """The previous generation may have lacked these tables: its own frontier has no ends of them.

    Those of the shadow build are of all tables, also of others that are missing.
    """
    apply(several, 5, lines(4, 7))
    shadow = several.at(2, _USERS_ALONE)
    shadow.open()
    put(shadow, 2, seq, users(seq, 1))
    known = applied(4 if has_changed else 5)
    given = known._replace(ends={**known.ends, "shop.public.added": (7, 8)})
    several.switch(2, given)
    state = several.open()
    assert state is not None
    assert (state.applied.generation, state.applied.seq, state.reached) == (2, 5, seq)
    assert state.applied.ends == (applied(5) if has_changed else given).ends
    shadow.close()


def test_a_shadow_build_is_not_continued_for_other_tables(
    several: Generations,
) -> None:
    """Otherwise those would miss earlier changes, and readers would lose rows at the switch."""
    apply(several, 5, users(5, 1), lines(4, 7))
    for number, tables, other in (
        (2, _USERS_ALONE, None),
        (3, None, _USERS_ALONE),
        (4, _USERS_ALONE, frozenset({"public.lines"})),
    ):
        shadow = several.at(number, tables)
        shadow.open()
        put(shadow, number, 5, users(5, 1), lines(4, 7))
        with pytest.raises(ConfigError, match=f"generation {number}"):
            several.at(number, other).open()
        assert several.at(number, tables).open() is not None
        shadow.close()
        several.drop(number)
    assert list(several.generations()) == [1]
