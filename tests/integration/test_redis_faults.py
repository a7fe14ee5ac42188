"""What Redis does to a follower: flushes, kills, restores, refusals; and what readers see of it."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import redis

from cdc.errors import (
    CDCError,
    ConfigError,
    PermissionDeniedError,
    StoreLostError,
    UnavailableError,
)
from cdc.playground.servers.stack import LocalStack
from lockstep.conformance.store import LINES, USERS, applied, apply, change, key, row
from lockstep.sinks.contract import Change, Changes
from lockstep.sinks.redis.reader import RedisReader
from lockstep.sinks.redis.sink import SMALL_CHANGES, RedisSettings, RedisSink
from lockstep.sinks.shapes import RowShape
from tests.fixtures.seeds import first_seed
from tests.fixtures.store_redis import users

MANY = SMALL_CHANGES + 500


@pytest.fixture
def settings(redis_url: str, redis_client: redis.Redis) -> RedisSettings:
    return RedisSettings(redis_url, "shop", "cache")


def stored(client: redis.Redis, many: int) -> list[int | None]:
    """Return the seq that wrote each user's row, as a reader sees it."""
    values = client.mget([f"shop:public.users:{n}" for n in range(many)])
    return [None if value is None else int(json.loads(value)["name"][1:]) for value in values]


# --- refusals ---


def test_a_refusal_of_redis_is_an_error_with_a_hint(
    settings: RedisSettings,
    redis_client: redis.Redis,
    open_sink: Callable[[RedisSettings], RedisSink],
) -> None:
    """A temporary refusal leaves nothing half done: the same cut succeeds afterwards."""
    sink = open_sink(settings)
    apply(sink, 2, users(0, 2, 1))

    def refused(kind: type[CDCError], match: str) -> None:
        with pytest.raises(kind, match=match):
            apply(sink, 4, users(0, 2, 3))
        assert stored(redis_client, 2) == [1, 2]

    redis_client.config_set("maxmemory", "1")
    refused(UnavailableError, "no memory left")
    redis_client.config_set("maxmemory", "0")
    redis_client.replicaof("127.0.0.1", "1")
    refused(UnavailableError, "replica")
    redis_client.replicaof("NO", "ONE")
    redis_client.config_set("requirepass", "secret")
    sink.close()
    refused(PermissionDeniedError, "refuses")
    redis_client.execute_command("AUTH", "secret")  # type: ignore[no-untyped-call]
    redis_client.config_set("requirepass", "")
    redis_client.script_flush()
    apply(sink, 4, users(0, 2, 3))
    assert stored(redis_client, 2) == [3, 4]


def test_a_foreign_value_at_a_key_stops_the_follower(
    settings: RedisSettings,
    redis_client: redis.Redis,
    open_sink: Callable[[RedisSettings], RedisSink],
) -> None:
    shape = RowShape(key="names", form="set", member="{name}")
    sink = open_sink(settings._replace(shapes={"public.users": shape}))
    redis_client.set("names", "mine")
    with pytest.raises(ConfigError, match="another type of value") as caught:
        apply(sink, 1, users(0, 1, 1))
    assert "mine" not in str(caught.value)
    assert RedisReader(redis_client, "shop", "cache").frontier() is None
    with pytest.raises(ConfigError, match="another shape"):
        open_sink(settings).begin(2, [USERS])


def test_a_server_that_evicts_is_refused_unless_the_shape_tolerates_it(
    settings: RedisSettings,
    redis_client: redis.Redis,
    open_sink: Callable[[RedisSettings], RedisSink],
) -> None:
    """Complete rows at their keys: an evicted one is missing until it changes, and never old."""
    by_name = settings._replace(follower="named", shapes={"public.users": RowShape(key="{name}")})
    before = open_sink(by_name)
    before.begin(1, [USERS])
    redis_client.config_set("maxmemory", "100mb")
    redis_client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        before.open()
        with pytest.raises(ConfigError, match="evicts"):
            before.begin(1, [USERS])
        for shape in (RowShape(key="by:{name}"), RowShape(key="all", form="set", member="{name}")):
            with pytest.raises(ConfigError, match="evicts"):
                open_sink(settings._replace(shapes={"public.users": shape})).begin(1, [USERS])
        sink = open_sink(settings)
        apply(sink, 2, users(0, 2, 1))
        redis_client.delete("shop:public.users:0", 'shop:~cache.1:public.users:{"id":1}')
        assert apply(sink, 4, users(0, 2, 3)) == 2
        assert stored(redis_client, 2) == [3, 4]
        # If companions were evicted, a truncate finds their values only by name.
        apply(sink, 5, Changes((LINES,), [change(LINES, 5, row(LINES, 5, 1, 2), 1, 2)]))
        redis_client.delete(*redis_client.keys("shop:~cache.1:public.*"))
        redis_client.set("shop:public.lines2:1", "mine")
        late = Changes((USERS,), [change(USERS, 7, row(USERS, 7, 1), 1)], truncated=6)
        for _ in range(2):
            apply(sink, 7, late, Changes((LINES,), [], truncated=6))
            assert stored(redis_client, 2) == [None, 7]
            assert redis_client.keys("shop:public.lines*") == [b"shop:public.lines2:1"]
        apply(sink, 8, users(0, 2, 8))
        redis_client.delete('shop:~cache.1:public.users:{"id":1}')
        redis_client.set("shop:public.lines:1", "another follower's")
        by_id = settings._replace(shapes={"public.lines": RowShape(key="l:{no}{id}")})
        RedisSink(by_id).start_over(2)
        assert redis_client.keys("shop:public.[ul]*s:*") == [b"shop:public.lines:1"]
        sink.open()
        redis_client.delete("shop:cdc:cache")
        with pytest.raises(StoreLostError):
            sink.begin(5, [USERS])
    finally:
        redis_client.config_set("maxmemory", "0")
        redis_client.config_set("maxmemory-policy", "noeviction")


# --- flushes, kills, restores ---


def test_a_flush_in_the_middle_of_a_cut_is_found_before_its_end(
    settings: RedisSettings,
    redis_client: redis.Redis,
    open_sink: Callable[[RedisSettings], RedisSink],
) -> None:
    """By the next rows or by the commit, whichever is first; of a small cut nothing is stored."""
    sink = open_sink(settings)
    for small in (True, False):
        apply(sink, 1, users(0, 1, 1))
        sink.begin(2, [USERS])
        sink.write(users(0, 5 if small else MANY, 2))
        redis_client.flushall()
        with pytest.raises(StoreLostError):
            sink.commit(applied(2))
        assert redis_client.dbsize() == 0
        assert sink.open() is None


@pytest.fixture
def killable(tmp_path: Any) -> Iterator[LocalStack]:  # noqa: ANN401 - a path
    stack = LocalStack(tmp_path / "redis", tied=True)
    yield stack
    stack.down()


def test_a_kill_in_the_middle_of_a_cut_repeats_all_of_it(
    killable: LocalStack, open_sink: Callable[[RedisSettings], RedisSink]
) -> None:
    """Also if the process that commits it wrote nothing itself and was not connected then."""
    url = killable.up(["redis"]).redis_url
    settings = RedisSettings(str(url), "shop", "cache")
    sink = open_sink(settings)
    apply(sink, MANY, users(0, MANY, 1))
    sink.begin(2 * MANY, [USERS])
    executor = pickle.loads(pickle.dumps(sink))  # noqa: S301 - ours
    executor.write(users(0, MANY, MANY + 1))
    executor.close()
    killable["redis"].kill()
    killable.start("redis")
    sink.close()
    with pytest.raises(UnavailableError, match="was restarted"):
        sink.commit(applied(2 * MANY))
    state = sink.open()
    assert state is not None
    assert (state.applied.seq, state.reached) == (MANY, 2 * MANY)
    with redis.Redis.from_url(settings.url) as client:
        reader = RedisReader(client, "shop", "cache")
        with pytest.raises(UnavailableError):
            reader.values(["shop:public.users:0"], seconds=0.05)
        apply(sink, 2 * MANY, users(0, MANY, MANY + 1))
        assert stored(client, MANY) == list(range(MANY + 1, 2 * MANY + 1))
        assert reader.values(["shop:public.users:0"]).seq == 2 * MANY


def test_a_restored_dump_is_an_older_frontier_to_go_on_from(
    killable: LocalStack, open_sink: Callable[[RedisSettings], RedisSink]
) -> None:
    """The rows and the frontier are consistent; a follower that had a later frontier notices."""
    url = killable.up(["redis"], settings={"redis": {"appendonly": "no"}}).redis_url
    settings = RedisSettings(str(url), "shop", "cache")
    sink = open_sink(settings)
    apply(sink, 2, users(0, 2, 1))
    with redis.Redis.from_url(settings.url) as client:
        client.save()
        apply(sink, 5, Changes((USERS,), [change(USERS, 3, None, 0), *users(2, 2, 4).changes]))
        killable["redis"].kill()
        killable.start("redis")
        sink.close()
        with pytest.raises(UnavailableError, match="older frontier"):
            sink.begin(6, [USERS])
        state = sink.open()
        assert state is not None
        assert state.applied == applied(2)
        apply(sink, 5, Changes((USERS,), [change(USERS, 3, None, 0), *users(2, 2, 4).changes]))
        assert stored(client, 4) == [None, 2, 4, 5]


# --- what readers see ---


def test_readers_see_small_cuts_at_once_and_large_ones_by_the_frontier(
    settings: RedisSettings, redis_url: str, open_sink: Callable[[RedisSettings], RedisSink]
) -> None:
    """Money moves between two tables; every read finds all of it."""
    sink, chance = open_sink(settings), Random(first_seed())
    many = SMALL_CHANGES  # in two tables: a cut of all rows is a large one
    moved, seq = [0] * many, 0

    def cut(numbers: range) -> tuple[Changes, Changes]:
        nonlocal seq
        changes: tuple[list[Change], list[Change]] = ([], [])
        for n in numbers:
            moved[n] = chance.randint(-100, 100)
            for table, version, names in ((0, USERS, (n,)), (1, LINES, (n, 1))):
                seq += 1
                amount = str(moved[n] if table else -moved[n])
                changes[table].append(
                    change(version, seq, row(version, seq, *names, amount=amount), *names)
                )
        return Changes((USERS,), changes[0]), Changes((LINES,), changes[1])

    apply(sink, 2 * many, *cut(range(many)))
    done, wrong, reads = threading.Event(), list[str](), [0, 0]
    names = [
        f"shop:public.{t}" for n in range(0, many, 300) for t in (f"users:{n}", f"lines:{n}:1")
    ]

    def read() -> None:
        with redis.Redis.from_url(redis_url) as client:
            reader = RedisReader(client, "shop", "cache")
            while not done.is_set():
                with client.pipeline(transaction=True) as pipe:
                    pipe.hget("shop:cdc:cache", "applying").mget(names)
                    applying, at_once = pipe.execute()
                if not applying:
                    reads[0] += 1
                    wrong.extend(["at once"] * (_sum(at_once) != 0))
                try:
                    one_by_one = reader.values(names, seconds=0.5)
                except UnavailableError:
                    continue
                reads[1] += 1
                wrong.extend([f"at {one_by_one.seq}"] * (_sum(one_by_one.found) != 0))

    thread = threading.Thread(target=read)
    thread.start()
    rounds = 0
    # As many reads as a result needs, however slow the machine is.
    while min(reads) < 10 or rounds < 30:
        rounds += 1
        tables = cut(range(many) if rounds % 5 == 0 else range(0, many, 100))
        apply(sink, seq, *tables)
    done.set()
    thread.join()
    assert wrong == []


def _sum(values: list[bytes]) -> int:
    return sum(int(json.loads(value)["amount"]) for value in values)


def test_two_writers_at_once_only_repeat_each_other(
    settings: RedisSettings,
    redis_client: redis.Redis,
    open_sink: Callable[[RedisSettings], RedisSink],
) -> None:
    """In small cuts and in large ones, each at its own pace and from its own start."""
    cuts = [
        users(0, many, first) for many, first in ((50, 1), (MANY, 100), (50, 9_000), (20, 9_100))
    ]
    failed: list[BaseException] = []

    def follow(sink: RedisSink) -> None:
        try:
            for cut in cuts:
                apply(sink, cut.changes[-1].seq, cut)
        except BaseException as error:  # noqa: BLE001 - the test's own thread reports it
            failed.append(error)

    threads = [threading.Thread(target=follow, args=(open_sink(settings),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert stored(redis_client, 60) == [
        *range(9_100, 9_120),
        *range(9_020, 9_050),
        *range(150, 160),
    ]
    assert RedisReader(redis_client, "shop", "cache").values([]).seq == 9_119


def test_rows_and_tombstones_have_their_time(
    settings: RedisSettings,
    redis_client: redis.Redis,
    open_sink: Callable[[RedisSettings], RedisSink],
) -> None:
    """A value with a TTL expires first, its version later; a row of 20 MB is a row."""
    sink = open_sink(settings._replace(shapes={"public.lines": RowShape(ttl_seconds=100)}))
    big = "x" * 20_000_000
    lines = Changes((LINES,), [change(LINES, 1, row(LINES, 1, 1, 1), 1, 1)])
    large = Changes((USERS,), [change(USERS, 2, row(USERS, 2, 1, body=big), 1)])
    apply(sink, 3, lines, large, Changes((USERS,), [change(USERS, 3, None, 2)]))
    assert 0 < redis_client.ttl("shop:public.lines:1:1") <= 100
    assert redis_client.ttl('shop:~cache.1:public.lines:{"no":1,"id":1}') > 80_000
    assert redis_client.ttl("shop:public.users:1") == -1
    assert redis_client.ttl('shop:~cache.1:public.users:{"id":1}') == -1
    assert redis_client.ttl('shop:~cache.1:public.users:{"id":2}') > 80_000
    assert json.loads(redis_client.get("shop:public.users:1") or "{}")["body"] == big
    apply(sink, 4, Changes((USERS,), [change(USERS, 4, row(USERS, 4, 2), 2)]))
    assert redis_client.ttl('shop:~cache.1:public.users:{"id":2}') == -1


def test_keys_name_their_rows(
    settings: RedisSettings,
    redis_client: redis.Redis,
    open_sink: Callable[[RedisSettings], RedisSink],
) -> None:
    """One key column is used as it is; several are escaped and never collide; NULL is no text."""
    sink = open_sink(settings)
    version = USERS._replace(key=("id", "name"))
    keys = [("a:b", "c"), ("a", "b:c"), ("a%3Ab", "c"), ("%N", "c"), (None, "c")]
    changes = [
        Change(json.dumps({"id": one, "name": two}).encode(), seq, b"{}", 1, 1, 1)
        for seq, (one, two) in enumerate(keys, 1)
    ]
    apply(sink, 5, Changes((version,), changes))
    assert set(redis_client.keys("shop:public.users:*")) == {
        b"shop:public.users:" + name
        for name in (b"a%3Ab:c", b"a:b%3Ac", b"a%253Ab:c", b"%25N:c", b"%N:c")
    }
    assert sink.rows(version, [key(USERS, 1)]) == {}


def test_another_key_waits_for_a_truncate(
    settings: RedisSettings,
    redis_client: redis.Redis,
    open_sink: Callable[[RedisSettings], RedisSink],
) -> None:
    """With both keys a row would be stored twice: in small and large cuts, in tasks and copies."""
    other = USERS._replace(schema_id=9, key=("id", "name"))
    both, old = (USERS, other), users(0, MANY, 1)
    sink, late = open_sink(settings), open_sink(settings)
    apply(sink, MANY, old)
    seq = MANY

    def rows(*ids: int) -> list[Change]:
        nonlocal seq
        seq += len(ids)
        reported = [row(other, seq, id=each, name=f"n{each}") for each in ids]
        keys = [json.dumps({"id": each, "name": f"n{each}"}).encode() for each in ids]
        return [
            Change(k, seq, json.dumps(r).encode(), 9, 1, 1)
            for k, r in zip(keys, reported, strict=True)
        ]

    def names() -> set[bytes | str]:
        return set(redis_client.keys("shop:public.users:*"))

    with pytest.raises(ConfigError, match=r"another key now \(id, name\)") as caught:
        apply(sink, seq + 1, Changes(both, rows(1)))
    assert "--table public.users" in caught.value.hint
    assert len(names()) == MANY
    sink.begin(seq, both)
    with pytest.raises(ConfigError, match="another key"):
        pickle.loads(pickle.dumps(sink)).write(Changes(both, rows(2)))  # noqa: S301 - ours
    # A transaction that empties the table, in pieces as of a large cut; torn off, then complete.
    pieces = (
        Changes(both, [change(USERS, seq + 1, row(USERS, seq + 1, 1), 1)]),
        Changes(both, rows(3, 4)),
        Changes(both, rows(5), truncated=seq),
    )
    for torn in (True, False):
        sink.begin(seq, both)
        sink.rows(USERS, [])  # from here on changes are not gathered but written at once
        for piece in pieces:
            sink.write(piece)
        if torn:
            sink = open_sink(settings)
            with pytest.raises(ConfigError, match="another key"):
                apply(sink, seq, Changes(both, [change(USERS, seq + 9, row(USERS, 1, 1), 1)]))
    sink.commit(applied(seq))
    assert names() == {b"shop:public.users:5:n5"}
    # A copy with an older position writes deleted rows again, and continues.
    apply(late, MANY, old)
    apply(open_sink(settings), MANY, old)
    apply(late, seq, pieces[2])
    apply(late, seq + 1, Changes(both, rows(5, 6)))
    assert names() == {b"shop:public.users:5:n5", b"shop:public.users:6:n6"}
