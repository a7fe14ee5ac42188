"""A switch of generations in Redis, killed before and after every step of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import pytest
import redis
from redis.cluster import RedisCluster

from cdc.errors import ConfigError, SwitchedError
from lockstep.conformance.store import LINES, USERS, applied, apply, change, key, row
from lockstep.jobs.generations.comparing import Holding
from lockstep.jobs.generations.rebuilding import DivergedError, Rebuild
from lockstep.sinks.contract import Applied, Change, Changes, Generations, Version
from lockstep.sinks.redis.client import Call, RedisClient, Script
from lockstep.sinks.redis.sink import RedisSettings, RedisSink
from lockstep.sinks.shapes import RowShape
from tests.fixtures.store_redis_cluster import ClusterServers

PLAIN = RowShape()
SHAPES = {
    "rows": (PLAIN, PLAIN),
    "rows that move": (RowShape(key="by:{name}"), RowShape(key="by:{name}")),
    "hashes": (RowShape(key="h:{id}", form="hash"), RowShape(key="h:{id}", form="hash")),
    "sets": (RowShape(key="all", form="set", member="{name}"),) * 2,
    "another shape": (PLAIN, RowShape(key="{{u}}:{id}", form="text", value="{name}")),
    "another form at the same keys": (
        RowShape(key="u:{id}"),
        RowShape(key="u:{id}", form="hash", fields=("name",)),
    ),
}


class KilledError(Exception):
    """The process that switches ends here."""


def seen(client: Any) -> dict[str, object]:  # noqa: ANN401 - untyped enough
    """Return everything that readers find."""
    found: dict[str, object] = {}
    for name in client.scan_iter(count=1_000):
        text = name.decode()
        if text.startswith(("shop:~", "shop:cdc:")):
            continue
        kind = client.type(name)
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


def built(
    settings: RedisSettings, shapes: tuple[RowShape, RowShape]
) -> tuple[RedisSink, RedisSink]:
    """Return a current generation with a row too many and one too few, and a shadow build."""
    old = RedisSink(settings._replace(shapes={"public.users": shapes[0]}))
    old.open()
    put(old, 9, 1, 2, 4)
    shadow = RedisSink(settings._replace(shapes={"public.users": shapes[1]})).at(2)
    shadow.open()
    put(shadow, 9, 1, 2, 3)
    return old, shadow


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_a_killed_switch_is_continued_at_the_next_open(
    redis_url: str,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    shapes: tuple[RowShape, RowShape],
) -> None:
    """No step removes a row that both generations have at their frontier."""
    settings = RedisSettings(redis_url, "shop", "cache")
    run: Callable[[RedisClient, Script, Iterable[Call]], list[Any]] = RedisClient.run
    steps, ended = 0, False
    while not ended:
        redis_client.flushall()
        old, shadow = built(settings, shapes)
        before = seen(redis_client)
        left = steps

        def limited(client: RedisClient, script: Script, calls: Iterable[Call]) -> list[Any]:
            nonlocal left
            left -= 1
            if left < 0:
                raise KilledError
            return run(client, script, calls)

        monkeypatch.setattr(RedisClient, "run", limited)
        try:
            old.switch(2)
            ended = True
        except KilledError:
            middle = seen(redis_client)
            _nothing_right_is_missing(before, middle, shapes)
        monkeypatch.setattr(RedisClient, "run", run)
        if steps > 0:
            with pytest.raises(SwitchedError):
                old.begin(10, [])
        assert shadow.open() is not None
        current = RedisSink(settings._replace(shapes={"public.users": shapes[1]}))
        current.open()
        if steps > 0:
            assert current.current() == 2
            put(current, 9, 1, 2, 3)
            fresh = seen(redis_client)
            assert fresh == _expected(settings, shapes[1], redis_client, 1, 2, 3)
        for each in (old, shadow, current):
            each.close()
        steps += 1
    assert steps > 4


def _expected(
    settings: RedisSettings,
    shape: RowShape,
    client: Any,  # noqa: ANN401 - of a server or a cluster
    *users: int,
) -> dict[str, object]:
    """Return the content of a store that never had another generation."""
    client.flushall()
    sink = RedisSink(settings._replace(shapes={"public.users": shape}))
    sink.open()
    put(sink, 9, *users)
    sink.close()
    return seen(client)


def _nothing_right_is_missing(
    before: dict[str, object], middle: dict[str, object], shapes: tuple[RowShape, RowShape]
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


def _nobody() -> None:
    """Run no other process."""


class Turns:
    """Runs other processes before a chosen step of a switch, and kills them later."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.steps = 0
        self._left: int | None = None
        self._place = 0
        self._others: Callable[[], None] = _nobody
        for name in ("run", "ask_all"):
            patched.setattr(RedisClient, name, self._counted(getattr(RedisClient, name)))

    def let_in(self, others: Callable[[], None], place: int, most: int) -> None:
        """Call `others` before that step, and kill them after `most` steps of their own."""

        def limited() -> None:
            self._left = most
            with suppress(KilledError):
                others()
            self._left = None

        self.steps, self._place, self._others = 0, place, limited

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:  # noqa: ANN401 - any step's
            if self._left is not None:
                self._left -= 1
                if self._left < 0:
                    raise KilledError
                return real(*given)
            self.steps += 1
            if self.steps == self._place:
                self._others()
            return real(*given)

        return counted


def _overtaken(
    settings: RedisSettings, shapes: tuple[RowShape, RowShape], turns: Turns, place: int, most: int
) -> bool:
    """Switch while others run; return whether that step was reached."""
    old, shadow = built(settings, shapes)
    new = settings._replace(shapes={"public.users": shapes[1]})
    late, build = RedisSink(settings._replace(shapes={"public.users": shapes[0]})), shadow.at(2)
    for each in (late, build):
        each.open()
        each.begin(20, [USERS, LINES])
    found = RedisSink(new)

    def others() -> None:
        # Copies in the middle of a cut of either generation, then one that opens the store.
        changes = [change(USERS, 20, row(USERS, 20, n), n) for n in (2, 4)]
        for each in (late, build):
            with pytest.raises(SwitchedError):  # noqa: PT012 - its commit is refused by one server
                each.write(Changes((USERS,), changes))
                each.commit(applied(20))
        found.open()
        put(found, 30, 1, 2, 3, 5)

    turns.let_in(others, place, most)
    old.switch(2)
    came = turns.steps >= place
    turns.let_in(_nobody, 0, 0)
    found.open()
    put(found, 30, 1, 2, 3, 5)
    for each in (old, shadow, late, build, found):
        each.close()
    return came


def test_a_slow_copy_of_a_switch_undoes_nothing(
    redis_url: str, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overtaken before any of its steps by a process that ends the switch, or dies at it too."""
    settings, turns = RedisSettings(redis_url, "shop", "cache"), Turns(monkeypatch)
    for shapes in (SHAPES["rows"], SHAPES["rows that move"], SHAPES["sets"]):
        wanted = _expected(settings, shapes[1], redis_client, 1, 2, 3, 5)
        for most in (4, 7, 100):
            place, came = 2, True  # the switch has started
            while came:
                redis_client.flushall()
                came = _overtaken(settings, shapes, turns, place, most)
                assert seen(redis_client) == wanted, (shapes, place, most)
                place += 1
            assert place > 5


def test_a_clusters_slots_each_keep_out_who_is_late(
    redis_cluster: ClusterServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a step is not atomic: each slot's sentinel shows how far the switch is."""
    settings = RedisSettings(redis_cluster.url, "shop", "cache", cluster=True)
    turns, shapes = Turns(monkeypatch), SHAPES["rows"]
    with RedisCluster.from_url(redis_cluster.url) as client:
        wanted = _expected(settings, shapes[1], client, 1, 2, 3, 5)
        # Before the slots are marked, while old values are moved away, while new ones are moved in.
        for place in (2, 4, 8):
            redis_cluster.flush()
            assert _overtaken(settings, shapes, turns, place, 100)
            assert seen(client) == wanted, place
        client.disconnect_connection_pools()


def test_a_table_rebuilt_by_another_key_has_no_row_of_the_old_one(
    redis_url: str, redis_client: redis.Redis
) -> None:
    """The cut in which the key changed is applied again, after the switch."""
    settings = RedisSettings(redis_url, "shop", "cache")
    sink = RedisSink(settings)
    sink.open()
    put(sink, 9, 1, 2)
    other = USERS._replace(schema_id=9, key=("name",))
    by_name = [
        Change(b'{"name":"n%d"}' % n, n, json.dumps(row(other, n, id=1)).encode(), 9, n, n)
        for n in (14, 15)
    ]
    again = Changes((USERS, other), [change(USERS, 13, row(USERS, 13, 3), 3), by_name[0]])
    with pytest.raises(ConfigError, match="another key"):
        apply(sink, 14, again)
    shadow = sink.at(2, frozenset({"public.users"}))
    shadow.open()
    shadow.begin(15, [other])
    shadow.write(Changes((other,), by_name))
    shadow.commit(applied(15, generation=2))
    sink.switch(2)
    state = sink.open()
    assert state is not None
    assert (state.applied.seq, state.reached) == (9, 15)
    lines = Changes((LINES,), [change(LINES, 12, row(LINES, 12, 2, 2), 2, 2)])
    assert apply(sink, 15, lines, again) == 1
    assert {name for name in seen(redis_client) if "users" in name} == {
        "shop:public.users:n14",
        "shop:public.users:n15",
    }
    for each in (sink, shadow):
        each.close()


class Rows:
    """What a generation is built from: rows, and the keys and seqs that must be found."""

    keeps_seqs = True

    def __init__(self, *changes: Change) -> None:
        self.changes = changes
        self.keys = {each.key or b"": each.seq for each in changes if each.row is not None}

    def prepare(self, *_: object) -> int:
        return 0

    read_again = prepare

    def forward(self, sink: Generations, generation: int, _: object) -> Applied:
        sink.open()
        sink.begin(20, [USERS])
        sink.write(Changes((USERS,), self.changes))
        sink.commit(applied(20, generation=generation))
        return applied(20, generation=generation)

    def versions(self, _: Applied) -> list[Version]:
        return [USERS]

    def knows(self, _: Applied) -> bool:
        return True

    def tables(self) -> frozenset[str]:
        return frozenset({"public.users"})

    def truth(self, _: Version, __: Applied) -> Holding:
        return Holding((key, seq, None) for key, seq in self.keys.items())

    def altered_at(self, _: Version, __: Applied) -> int:
        return 0

    def expect_past(self) -> None:
        """Do nothing: all rows are there."""

    def with_ends(self, at: Applied, _: frozenset[str]) -> Applied:
        return at


@pytest.mark.parametrize(
    "shape",
    [
        PLAIN,
        RowShape(key="by:{name}", form="fields", fields=("id", "body")),
        RowShape(key="all", form="zset", member="{id}", score="amount"),
        RowShape(ttl_seconds=100),
        RowShape(key="h:{id}", form="hash", ttl_seconds=100),
    ],
)
def test_a_rebuild_is_compared_by_known_rows_not_by_visible_ones(
    redis_url: str, redis_client: redis.Redis, shape: RowShape
) -> None:
    """NULL or NaN in a template, two rows at one key, unknown columns, deletes, expired rows."""
    reported: dict[int, dict[str, object]] = {
        1: {},
        2: {"name": None},
        3: {"amount": "NaN"},
        4: {"name": "n1"},
        5: {},
    }
    changes = [change(USERS, n, row(USERS, n, n, **values), n) for n, values in reported.items()]
    changes[4] = changes[4]._replace(unchanged=("body", "name", "amount"))
    builder = Rows(*changes, change(USERS, 6, None, 6))
    sink = RedisSink(RedisSettings(redis_url, "shop", "cache", shapes={"public.users": shape}))
    sink.open()
    rebuild = Rebuild(sink, builder, lambda _: None)
    assert rebuild.run().generation == 2
    builder.keys[key(USERS, 7)] = 7  # whose value and version have expired
    if shape.ttl_seconds:
        assert rebuild.run().generation == 3
    else:
        with pytest.raises(DivergedError):
            rebuild.run()
    builder.keys[key(USERS, 2)] = 9
    with pytest.raises(DivergedError):
        rebuild.run()
    sink.close()
