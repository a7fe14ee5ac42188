"""A truncate in Redis finds its rows by the table's index, or by a scan if that may lack some."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import redis

from lockstep.conformance.store import LINES, USERS, applied, apply, change, row
from lockstep.sinks.contract import Changes
from lockstep.sinks.redis import rows
from lockstep.sinks.redis.client import Call, RedisClient, Script
from lockstep.sinks.redis.scripts import APPLY
from lockstep.sinks.redis.sink import SMALL_CHANGES, RedisSettings, RedisSink
from lockstep.sinks.shapes import RowShape
from tests.fixtures.store_redis import expect_indexed, users
from tests.fixtures.store_redis_cluster import ClusterServers

SHAPES = {
    "rows": RowShape(),
    "rows that move": RowShape(key="{{u}}:{name}"),
    "hashes": RowShape(key="h:{id}", form="hash"),
    "a set": RowShape(key="all", form="set", member="{name}"),
}


@pytest.fixture
def settings(redis_url: str, redis_client: redis.Redis) -> RedisSettings:
    return RedisSettings(redis_url, "shop", "cache")


def scans(client: Any) -> int:  # noqa: ANN401 - of a server or a cluster's node
    """Return how many SCAN commands the server has run."""
    return int(client.info("commandstats").get("cmdstat_scan", {"calls": 0})["calls"])


def names(client: Any, table: str) -> list[bytes]:  # noqa: ANN401 - as above
    return sorted(client.keys(f"shop:{table}:*"))


def line(seq: int) -> Changes:
    return Changes((LINES,), [change(LINES, seq, row(LINES, seq, 1, 2), 1, 2)])


def truncated(seq: int) -> Changes:
    return Changes((USERS,), [], seq)


def test_a_truncate_scans_nothing_and_leaves_other_tables(
    settings: RedisSettings,
    redis_client: redis.Redis,
    open_sink: Callable[[RedisSettings], RedisSink],
) -> None:
    """Of small and of large cuts, with deleted, inserted and changed rows before it."""
    sink = open_sink(settings)
    apply(sink, SMALL_CHANGES + 10, users(0, SMALL_CHANGES + 9, 1), line(SMALL_CHANGES + 10))
    apply(sink, 4_001, Changes((USERS,), [change(USERS, 4_001, None, 7)]))
    apply(sink, 4_002, users(5, 1, 4_002))
    expect_indexed(redis_client)
    before = scans(redis_client)
    apply(sink, 4_004, users(3, 1, 4_004)._replace(truncated=4_003))
    assert scans(redis_client) == before
    assert names(redis_client, "public.users") == [b"shop:public.users:3"]
    assert names(redis_client, "public.lines") == [b"shop:public.lines:1:2"]
    expect_indexed(redis_client)
    apply(sink, 4_006, truncated(4_006))
    assert not names(redis_client, "public.users")


@pytest.mark.parametrize("many", [20, SMALL_CHANGES], ids=["small cut", "large cut"])
def test_a_truncate_scans_nothing_where_rows_were_only_deleted(
    settings: RedisSettings,
    redis_client: redis.Redis,
    open_sink: Callable[[RedisSettings], RedisSink],
    many: int,
) -> None:
    """Of unknown rows, in buckets that never had one; some with rows in the same cut."""
    sink = open_sink(settings)
    unknown = [change(USERS, 10 + n, None, 10_000 + n) for n in range(many)]
    apply(sink, 4_000, Changes((USERS,), [*users(0, 2, 1).changes, *unknown]))
    apply(sink, 4_001, Changes((USERS,), [change(USERS, 4_001, None, 1)]))
    expect_indexed(redis_client)
    before = scans(redis_client)
    apply(sink, 4_002, truncated(4_002))
    assert scans(redis_client) == before
    assert not names(redis_client, "public.users")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_truncate_of_a_cluster_scans_nothing(
    redis_cluster: ClusterServers, open_sink: Callable[[RedisSettings], RedisSink], shape: RowShape
) -> None:
    redis_cluster.flush()
    shapes = {"public.users": shape}
    sink = open_sink(RedisSettings(redis_cluster.url, "shop", "cache", cluster=True, shapes=shapes))
    apply(sink, 41, users(0, 40, 1), line(41))
    before = [scans(node) for node in redis_cluster.nodes]
    apply(sink, 44, users(3, 1, 44)._replace(truncated=43))
    assert [scans(node) for node in redis_cluster.nodes] == before
    assert [key for key, _, _ in sink.contents(USERS)] == [b'{"id":3}']
    assert len(list(sink.contents(LINES))) == 1


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_frozen_copy_in_a_cluster_writes_no_row_that_was_truncated_meanwhile(
    redis_cluster: ClusterServers,
    open_sink: Callable[[RedisSettings], RedisSink],
    monkeypatch: pytest.MonkeyPatch,
    shape: RowShape,
) -> None:
    """It has read the floor; another copy repeats its cut, and applies the truncate after it."""
    redis_cluster.flush()
    shapes = {"public.users": shape}
    settings = RedisSettings(redis_cluster.url, "shop", "cache", cluster=True, shapes=shapes)
    apply(open_sink(settings), 5, users(0, 5, 1))
    frozen, other = open_sink(settings), open_sink(settings)
    run, scripts = RedisClient.run, list[str]()

    def freezing(client: RedisClient, script: Script, calls: Iterable[Call]) -> list[Any]:
        scripts.append(script.text)
        if scripts.count(APPLY) == 1 and script.text == APPLY:
            apply(other, 10, users(3, 5, 6))
            apply(other, 20, users(6, 2, 19)._replace(truncated=15))
        return run(client, script, calls)

    frozen.begin(10, [USERS])
    monkeypatch.setattr(RedisClient, "run", freezing)
    frozen.write(users(3, 5, 6))
    seqs = {key: seq for key, seq, _ in open_sink(settings).contents(USERS)}
    assert seqs == {b'{"id":6}': 19, b'{"id":7}': 20}
    apply(other, 25, users(0, 5, 21))
    assert len(list(other.contents(USERS))) == 7


@pytest.mark.parametrize("lost", ["one set", "its record", "a store of a former version"])
def test_a_truncate_scans_where_the_index_may_lack_rows(
    lost: str,
    settings: RedisSettings,
    redis_client: redis.Redis,
    open_sink: Callable[[RedisSettings], RedisSink],
) -> None:
    """An evicted set, a writer killed before its first row, and a store that never had an index."""
    apply(open_sink(settings), 200, users(0, 200, 1))
    index = redis_client.keys("shop:~cache.1#*public.users")
    if lost == "one set":
        redis_client.delete(index[0])
    elif lost == "its record":
        # A bucket that was recorded, and no row was written there.
        redis_client.hset("shop:cdc:cache", "buckets:1:public.users", b"\xff" * 9)
    else:
        redis_client.delete(*index)
        redis_client.hdel("shop:cdc:cache", "buckets:1:public.users")
        layout = json.loads(redis_client.hget("shop:cdc:cache", "layout:1:public.users") or b"")
        redis_client.hset("shop:cdc:cache", "layout:1:public.users", json.dumps(layout[:3]))
    sink = open_sink(settings)
    apply(sink, 201, users(0, 1, 201))
    before = scans(redis_client)
    apply(sink, 202, truncated(202))
    assert scans(redis_client) > before
    assert not names(redis_client, "public.users")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rows_are_there_until_those_that_replace_them_are(
    settings: RedisSettings,
    redis_client: redis.Redis,
    open_sink: Callable[[RedisSettings], RedisSink],
    shape: RowShape,
) -> None:
    """As when a view is computed again: a task's copy of the sink writes the rows."""
    of_shape = settings._replace(shapes={"public.users": shape})
    sink, reader = open_sink(of_shape), open_sink(of_shape)
    apply(sink, 9, users(0, 9, 1))

    def ids() -> set[int]:
        """Return the rows that readers see now."""
        return {json.loads(key)["id"] for key, _, row in reader.contents(USERS) if row}

    sink.begin(20, [USERS])
    sink.write(truncated(20))
    assert ids() == {*range(9)}
    copy = pickle.loads(pickle.dumps(sink))  # noqa: S301 - our own
    new = [each._replace(seq=20) for each in users(7, 4, 20).changes]
    assert copy.write(Changes((USERS,), new)) == 4
    assert ids() == {*range(11)}
    sink.commit(applied(20))
    assert ids() == {*range(7, 11)}
    expect_indexed(redis_client)


def test_a_row_is_not_read_after_its_truncate(
    settings: RedisSettings, open_sink: Callable[[RedisSettings], RedisSink]
) -> None:
    sink = open_sink(settings)
    apply(sink, 9, users(0, 9, 1))
    sink.begin(20, [USERS])
    sink.write(truncated(20))
    assert sink.rows(USERS, [b'{"id":3}']) == {}
    sink.commit(applied(20))


def test_rows_that_expire_have_no_index(
    settings: RedisSettings,
    redis_client: redis.Redis,
    open_sink: Callable[[RedisSettings], RedisSink],
) -> None:
    sink = open_sink(settings._replace(shapes={"public.users": RowShape(ttl_seconds=60)}))
    apply(sink, 5, users(0, 5, 1))
    assert not redis_client.keys("shop:~cache.1#*")
    apply(sink, 6, truncated(6))
    assert not names(redis_client, "public.users")


def test_a_truncate_killed_in_the_middle_is_repeated(
    settings: RedisSettings,
    redis_client: redis.Redis,
    open_sink: Callable[[RedisSettings], RedisSink],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some of the rows are deleted; the next process deletes the others, by the same index."""
    apply(open_sink(settings), 500, users(0, 500, 1))

    class KilledError(Exception):
        pass

    real, calls = rows.below_floor, 0

    def killed(*given: Any) -> Any:  # noqa: ANN401 - as the function has them
        nonlocal calls
        calls += 1
        if calls > 3:
            raise KilledError
        return real(*given)

    monkeypatch.setattr("lockstep.sinks.redis.sink.below_floor", killed)
    with pytest.raises(KilledError):
        apply(open_sink(settings), 502, truncated(501), users(1, 1, 502))
    monkeypatch.undo()
    assert 0 < len(names(redis_client, "public.users")) < 500
    before = scans(redis_client)
    apply(open_sink(settings), 502, users(1, 1, 502)._replace(truncated=501))
    assert scans(redis_client) == before
    assert names(redis_client, "public.users") == [b"shop:public.users:1"]
    expect_indexed(redis_client)


def test_a_rebuilt_table_has_its_own_index(
    settings: RedisSettings,
    redis_client: redis.Redis,
    open_sink: Callable[[RedisSettings], RedisSink],
) -> None:
    """It is dropped with its build."""
    sink = open_sink(settings)
    apply(sink, 40, users(0, 40, 1))
    shadow = sink.at(2)
    shadow.open()
    apply(shadow, 40, users(0, 20, 21))
    sink.switch(2)
    sink.drop(1)
    shadow.close()
    assert not redis_client.keys("shop:~cache.1*")
    assert redis_client.keys("shop:~cache.2#*")
    sink = open_sink(settings)
    before = scans(redis_client)
    apply(sink, 41, truncated(41))
    assert scans(redis_client) == before
    assert not names(redis_client, "public.users")
