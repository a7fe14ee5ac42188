"""A switch of generations that is killed before any of its steps, in the stores that have steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import pytest

from cdc.errors import SwitchedError
from lockstep.conformance.store import LINES, USERS, StoreUnderTest, apply, key, row
from lockstep.conformance.test_generations import lines, put, users
from lockstep.sinks.contract import Generations
from lockstep.sinks.delta import generations as delta_generations
from lockstep.sinks.delta import lake
from lockstep.sinks.delta.frontiers import FrontierTable
from lockstep.sinks.opensearch.client import OpenSearchClient

# The steps of a switch in a store, in order: it may be killed before each of them.
STEPS: Final[dict[str, tuple[tuple[Any, str], ...]]] = {
    "DeltaSink": (
        (lake, "copied"),
        (lake, "append"),
        (FrontierTable, "_append"),
        (delta_generations, "_delete"),
    ),
    "OpenSearchSink": ((OpenSearchClient, "call"),),
}


class KilledError(Exception):
    """The switching process ends here."""


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
        shadow = several.at(number)
        shadow.open()
        put(shadow, number, at - 3, users(at - 3, 1, 2), lines(4, 7))
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
        for each in (shadow, following):
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
