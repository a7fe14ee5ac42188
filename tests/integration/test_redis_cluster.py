"""A Redis cluster under a follower: lost servers, moving slots, and what is no cluster."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from cdc.errors import ConfigError, StoreLostError, UnavailableError
from lockstep.conformance.store import LINES, USERS, apply
from lockstep.sinks.redis.reader import RedisReader
from lockstep.sinks.redis.sink import RedisSettings, RedisSink
from lockstep.sinks.shapes import RowShape
from tests.fixtures.store_redis import users
from tests.fixtures.store_redis_cluster import ClusterServers


def test_a_server_that_is_not_there_passes_and_a_wrong_one_does_not(
    redis_cluster: ClusterServers, redis_url: str, redis_client: redis.Redis
) -> None:
    redis_cluster.flush()
    away = RedisSink(RedisSettings("redis://127.0.0.1:1/0", "shop", "cache"))
    with pytest.raises(UnavailableError, match="ConnectionError"):
        away.open()
    for url, cluster in ((redis_cluster.url, False), (redis_url, True)):
        sink = RedisSink(RedisSettings(url, "shop", "cache", cluster=cluster))
        with pytest.raises(ConfigError, match="cluster"):
            _follow(sink, 8)
        sink.close()


def _follow(sink: RedisSink, cuts: int) -> None:
    sink.open()
    for seq in range(1, cuts + 1):
        apply(sink, seq, users(seq, 1, seq))


def test_a_cluster_that_loses_one_server_is_a_lost_store(
    redis_cluster: ClusterServers, open_sink: Callable[[RedisSettings], RedisSink]
) -> None:
    """Once the loss is seen, the other's slots take no rows either; then all starts again."""
    redis_cluster.flush()
    settings = RedisSettings(redis_cluster.url, "shop", "cache", cluster=True)
    for lost in (0, 1):
        sink = open_sink(settings)
        apply(sink, 50, users(0, 50, 1))
        redis_cluster.flush(lost)
        with pytest.raises(StoreLostError):
            apply(sink, 100, users(0, 50, 51))
        with pytest.raises(StoreLostError):
            sink.open()
        sink.start_over(lost + 2)
        assert sink.open() is None
        assert not any(node.keys("shop:public*") for node in redis_cluster.nodes)


@pytest.mark.parametrize("has_record", [False, True], ids=["rows", "record"])
def test_a_lost_server_is_replaced_by_a_shadow_build_alongside_the_rest(
    redis_cluster: ClusterServers,
    open_sink: Callable[[RedisSettings], RedisSink],
    *,
    has_record: bool,
) -> None:
    """Readers see the rest, at no frontier, and the lost generation stays lost until the switch."""
    redis_cluster.flush()
    settings = RedisSettings(redis_cluster.url, "shop", "cache", cluster=True)
    sink = open_sink(settings)
    apply(sink, 50, users(0, 50, 1))
    holds = [bool(node.keys("shop:cdc:cache")) for node in redis_cluster.nodes]
    lost, kept = holds.index(has_record), redis_cluster.nodes[holds.index(not has_record)]
    redis_cluster.flush(lost)
    rest = set(kept.keys("shop:public*"))
    assert rest
    with pytest.raises(StoreLostError):
        sink.open()
    shadow = sink.at(2)
    shadow.open()
    with redis.RedisCluster.from_url(redis_cluster.url) as client:
        reader = RedisReader(client, "shop", "cache")
        assert reader.frontier() is None
        apply(shadow, 50, users(0, 50, 1))
        assert reader.frontier() is None
        assert set(kept.keys("shop:public*")) >= rest
        if has_record:  # nothing is known of it: the follower's report shows that it is lost
            assert open_sink(settings).open() is None
        else:
            with pytest.raises(StoreLostError):
                open_sink(settings)
        sink.switch(2)
        state = open_sink(settings).open()
        assert state is not None
        assert state.applied.seq == 50
        found = reader.frontier()
        assert found is not None
        assert (found.generation, found.seq) == (2, 50)
    names = {name for node in redis_cluster.nodes for name in node.keys("shop:public.users:*")}
    assert names == {b"shop:public.users:%d" % number for number in range(50)}
    shadow.close()


def test_one_server_that_lost_its_last_writes_is_detected(
    redis_cluster: ClusterServers, open_sink: Callable[[RedisSettings], RedisSink]
) -> None:
    """A failover or a crash between two cuts, of a server without the follower's own key."""
    redis_cluster.flush()
    settings = RedisSettings(redis_cluster.url, "shop", "cache", cluster=True)
    sink = open_sink(settings)
    apply(sink, 50, users(0, 50, 1))
    (other,) = (node for node in redis_cluster.nodes if not node.keys("shop:cdc:cache"))
    kept = {name: other.dump(name) for name in other.keys("*") if b".slot:" not in name}
    assert len(kept) > 80  # values, companions, and the server's record of the frontier
    apply(sink, 100, users(0, 50, 51))
    assert open_sink(settings).open() is not None
    for name, value in kept.items():
        other.restore(name, 0, value, replace=True)
    with pytest.raises(StoreLostError, match="last writes"):
        sink.begin(150, [USERS])
    with pytest.raises(StoreLostError, match="last writes"):
        sink.open()
    sink.start_over(2)
    assert sink.open() is None
    apply(sink, 100, users(0, 50, 51))


def test_slots_that_move_while_they_are_written_lose_nothing(
    redis_cluster: ClusterServers, open_sink: Callable[[RedisSettings], RedisSink]
) -> None:
    """The cut waits while a slot migrates, and continues at its new server; then back again."""
    redis_cluster.flush()
    shape = RowShape(key="{{team}}:{name}")
    settings = RedisSettings(redis_cluster.url, "shop", "cache", cluster=True)
    sink = open_sink(settings._replace(shapes={"public.users": shape}))
    apply(sink, 2, users(0, 2, 1))
    slot = redis_cluster.nodes[0].cluster("KEYSLOT", "{team}")
    ids = [node.cluster("MYID").decode() for node in redis_cluster.nodes]
    owner = int(slot >= 8192)
    for seq in (3, 5):
        source, target = redis_cluster.nodes[owner], redis_cluster.nodes[1 - owner]
        target.cluster("SETSLOT", slot, "IMPORTING", ids[owner])
        source.cluster("SETSLOT", slot, "MIGRATING", ids[1 - owner])
        port = target.connection_pool.connection_kwargs["port"]
        while names := source.cluster("GETKEYSINSLOT", slot, 100):
            source.migrate("127.0.0.1", port, names, 0, 60_000)
        with pytest.raises(UnavailableError):  # a script can't create keys until the migration ends
            apply(sink, seq, users(0, 1, seq))
        for node in (target, source):
            node.cluster("SETSLOT", slot, "NODE", ids[1 - owner])
        apply(sink, seq, users(0, 1, seq))
        apply(sink, seq + 1, users(1, 1, seq + 1))
        owner = 1 - owner
    names = {name for node in redis_cluster.nodes for name in node.scan_iter("{team}:*")}
    assert names == {b"{team}:n5", b"{team}:n6"}
    with pytest.raises(ConfigError, match="between hash slots"):
        open_sink(settings._replace(shapes={"public.lines": RowShape(key="l:{name}")})).begin(
            9, [LINES]
        )
