"""A switch of generations in Redis, killed before and behind every step of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import redis

from cdc.errors import SwitchedError
from sinks.contract import Changes
from sinks.redis.client import Call, Client, Script
from sinks.redis.sink import RedisSink, Settings
from sinks.shapes import Shape
from tests.contract.under_test import LINES, USERS, applied, change, row

PLAIN = Shape()
SHAPES = {
    "rows": (PLAIN, PLAIN),
    "rows that move": (Shape(key="by:{name}"), Shape(key="by:{name}")),
    "hashes": (Shape(key="h:{id}", form="hash"), Shape(key="h:{id}", form="hash")),
    "sets": (Shape(key="all", form="set", member="{name}"),) * 2,
    "another shape": (PLAIN, Shape(key="{{u}}:{id}", form="text", value="{name}")),
    "another form at the same keys": (
        Shape(key="u:{id}"),
        Shape(key="u:{id}", form="hash", fields=("name",)),
    ),
}


class KilledError(Exception):
    """The process that switches ends here."""


def seen(client: Any) -> dict[str, object]:  # noqa: ANN401 - untyped enough
    """Return all that readers find."""
    found: dict[str, object] = {}
    for name in client.scan_iter(count=1_000):
        kind, text = client.type(name), name.decode()
        if text.startswith(("shop:~", "shop:cdc:")):
            continue
        if kind == b"string":
            value = client.get(name)
            found[text] = json.loads(value) if value[:1] == b"{" else value
        else:
            found[text] = client.hgetall(name) if kind == b"hash" else client.smembers(name)
    return found


def put(sink: RedisSink, seq: int, *users: int) -> None:
    """Write users and a line as of one frontier."""
    sink.begin(seq, [USERS, LINES])
    sink.write(Changes((USERS,), [change(USERS, n, row(USERS, n, n), n) for n in users]))
    sink.write(Changes((LINES,), [change(LINES, 9, row(LINES, 9, 1, 1), 1, 1)]))
    sink.commit(applied(seq))


def built(settings: Settings, shapes: tuple[Shape, Shape]) -> tuple[RedisSink, RedisSink]:
    """Return a current generation with a row too many and one too few, and a whole one aside."""
    old = RedisSink(settings._replace(shapes={"public.users": shapes[0]}))
    old.open()
    put(old, 9, 1, 2, 4)
    aside = RedisSink(settings._replace(shapes={"public.users": shapes[1]})).at(2)
    aside.open()
    put(aside, 9, 1, 2, 3)
    return old, aside


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_a_switch_that_is_killed_goes_on_with_whoever_opens_the_store(
    redis_url: str,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    shapes: tuple[Shape, Shape],
) -> None:
    """And no step takes away a row that both generations have at their frontier."""
    settings = Settings(redis_url, "shop", "cache")
    run: Callable[[Client, Script, Iterable[Call]], list[Any]] = Client.run
    steps, ended = 0, False
    while not ended:
        redis_client.flushall()
        old, aside = built(settings, shapes)
        before = seen(redis_client)
        left = steps

        def limited(client: Client, script: Script, calls: Iterable[Call]) -> list[Any]:
            nonlocal left
            left -= 1
            if left < 0:
                raise KilledError
            return run(client, script, calls)

        monkeypatch.setattr(Client, "run", limited)
        try:
            old.switch(2)
            ended = True
        except KilledError:
            middle = seen(redis_client)
            _nothing_right_is_missing(before, middle, shapes)
        monkeypatch.setattr(Client, "run", run)
        if steps > 0:
            with pytest.raises(SwitchedError):
                old.begin(10, [])
        assert aside.open() is not None
        current = RedisSink(settings._replace(shapes={"public.users": shapes[1]}))
        current.open()
        if steps > 0:
            assert current.current() == 2
            put(current, 9, 1, 2, 3)
            fresh = seen(redis_client)
            assert fresh == _expected(settings, shapes[1], redis_client)
        for each in (old, aside, current):
            each.close()
        steps += 1
    assert steps > 4


def _expected(settings: Settings, shape: Shape, client: redis.Redis) -> dict[str, object]:
    """Return what a store that never was another has."""
    client.flushall()
    sink = RedisSink(settings._replace(shapes={"public.users": shape}))
    sink.open()
    put(sink, 9, 1, 2, 3)
    sink.close()
    return seen(client)


def _nothing_right_is_missing(
    before: dict[str, object], middle: dict[str, object], shapes: tuple[Shape, Shape]
) -> None:
    if shapes[0] != shapes[1]:
        return
    for name, value in before.items():
        if isinstance(value, set):
            found = middle.get(name)
            assert isinstance(found, set)
            assert found >= value - {b"n4"}
        elif "4" not in name:
            assert middle.get(name) == value, name
