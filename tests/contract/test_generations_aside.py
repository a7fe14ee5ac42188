"""A shadow build changes nothing that readers see, even if a process dies or resumes meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import pytest

from cdc.errors import ConfigError, SwitchedError
from lockstep.sinks.contract import Generations, Sink
from lockstep.sinks.delta import generations as delta_generations
from lockstep.sinks.delta import lake
from lockstep.sinks.delta.frontiers import Frontiers
from lockstep.sinks.opensearch.client import Client
from tests.contract.test_generations import lines, put, users
from tests.contract.under_test import LINES, USERS, StoreUnderTest, apply, key, row

USERS_ALONE: Final = frozenset({"public.users"})
# The steps of a switch in a store, in order: it may be killed before each of them.
STEPS: Final[dict[str, tuple[tuple[Any, str], ...]]] = {
    "DeltaSink": (
        (lake, "copied"),
        (lake, "append"),
        (Frontiers, "_append"),
        (delta_generations, "_delete"),
    ),
    "OpenSearchSink": ((Client, "call"),),
}


class KilledError(Exception):
    """The switching process ends here."""


@pytest.fixture
def several(sink: Sink) -> Generations:
    if not hasattr(sink, "at"):
        pytest.skip("this store has one generation")
    return cast("Generations", sink)


def test_a_shadow_build_of_one_table_leaves_the_others_at_their_frontier(
    several: Generations, store: StoreUnderTest
) -> None:
    """It may be far ahead of them: it must not write the other tables."""
    apply(several, 5, users(5, 1), lines(4, 7))
    aside = several.at(2, USERS_ALONE)
    aside.open()
    put(aside, 2, 8, users(8, 1), lines(7, 7, 8))
    assert store.rows("public.users") == {key(USERS, 1): row(USERS, 5, 1)}
    assert store.rows("public.lines") == {key(LINES, 7, 1): row(LINES, 4, 7, 1)}
    several.switch(2)
    state = several.open()
    assert state is not None
    assert (state.applied.seq, state.reached) == (5, 8)
    put(several, 2, 8, users(8, 1), lines(7, 7, 8))
    assert store.rows("public.users") == {key(USERS, 1): row(USERS, 8, 1)}
    assert store.rows("public.lines") == {key(LINES, n, 1): row(LINES, 7, n, 1) for n in (7, 8)}
    aside.close()


def test_a_shadow_build_is_not_continued_for_other_tables(
    several: Generations,
) -> None:
    """Otherwise those would miss earlier changes, and readers would lose rows at the switch."""
    apply(several, 5, users(5, 1), lines(4, 7))
    for number, begun, other in (
        (2, USERS_ALONE, None),
        (3, None, USERS_ALONE),
        (4, USERS_ALONE, frozenset({"public.lines"})),
    ):
        aside = several.at(number, begun)
        aside.open()
        put(aside, number, 5, users(5, 1), lines(4, 7))
        with pytest.raises(ConfigError, match=f"generation {number}"):
            several.at(number, other).open()
        assert several.at(number, begun).open() is not None
        aside.close()
        several.drop(number)
    assert list(several.generations()) == [1]


def test_a_switch_that_is_killed_before_any_of_its_steps_loses_nothing(
    several: Generations, store: StoreUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower continues at the old or the new generation; the next switch completes it."""
    steps = STEPS.get(type(several).__name__)
    if steps is None:
        pytest.skip("killed elsewhere, or in one step")
    generation, at, killed, moved, ended = 1, 5, 0, 0, False
    apply(several, at, users(at, 1, 2), lines(4, 7))
    while not ended:
        following = store.sink()
        following.open()
        number, at = generation + 1, at + 3
        aside = several.at(number)
        aside.open()
        put(aside, number, at - 3, users(at - 3, 1, 2), lines(4, 7))
        with monkeypatch.context() as patched:
            _limit(patched, steps, killed)
            try:
                cast("Generations", store.sink()).switch(number)
                ended = True
            except KilledError:
                ended = False
        seen = store.rows("public.users")
        assert seen == {key(USERS, n): row(USERS, at - 3, n) for n in (1, 2)}, killed
        try:
            put(following, generation, at, users(at, 1, 2))
        except SwitchedError:
            moved += 1
        several.switch(number)
        assert several.current() == number
        state = several.open()
        assert state is not None
        assert state.applied.generation == number
        put(several, number, at, users(at, 1, 2), lines(4, 7))
        assert store.rows("public.users") == {key(USERS, n): row(USERS, at, n) for n in (1, 2)}
        assert store.rows("public.lines") == {key(LINES, 7, 1): row(LINES, 4, 7, 1)}
        for each in (aside, following):
            each.close()
        generation, killed = number, killed + 1
    assert killed > 3
    assert moved > 0
    for old in sorted(several.generations().keys() - {generation}):
        several.drop(old)
    assert list(several.generations()) == [generation]


def _limit(patched: pytest.MonkeyPatch, steps: tuple[tuple[Any, str], ...], most: int) -> None:
    """Kill the process after `most` steps, before the next one."""
    left = most

    def limit(real: Callable[..., Any]) -> Callable[..., Any]:
        def limited(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - any step's
            nonlocal left
            left -= 1
            if left < 0:
                raise KilledError
            return real(*given, **named)

        return limited

    for owner, name in steps:
        patched.setattr(owner, name, limit(getattr(owner, name)))
