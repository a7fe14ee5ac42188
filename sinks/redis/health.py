"""Check what the servers may evict, and whether a cluster has lost data."""

from __future__ import annotations

from typing import Final, Literal

from cdc.errors import ConfigError, StoreLostError
from lockstep.sinks.redis.calls import StoredTable
from lockstep.sinks.redis.client import RedisClient
from lockstep.sinks.redis.names import SLOTS, Names
from lockstep.sinks.redis.scripts import RAISE_SENTINEL, RAISE_SEQ, TOKEN_LENGTH

Evicts = Literal["", "volatile", "allkeys"]
_CHECKED_SLOTS: Final = range(0, SLOTS, 128)
_REBUILT: Final = "the follower builds it again from the log"


def evicts(client: RedisClient) -> Evicts:
    """Return which keys the servers may evict: none, those with a TTL, all."""
    found: Evicts = ""
    for memory in client.info("memory"):
        policy = str(memory.get("maxmemory_policy", "noeviction"))
        if memory.get("maxmemory") and policy.startswith("allkeys"):
            return "allkeys"
        if memory.get("maxmemory") and policy.startswith("volatile"):
            found = "volatile"
    return found


def refuse_eviction(stored_table: StoredTable, found: Evicts) -> None:
    """Raise ConfigError if evictions would make a table's data wrong."""
    reason = stored_table.why_not_evictable
    expires = stored_table.layout.shape.ttl_seconds is not None
    if reason and (found == "allkeys" or (found == "volatile" and expires)):
        raise ConfigError(
            f"{stored_table.version.name} can't be kept in a Redis that evicts keys: {reason}",
            hint="set `maxmemory-policy noeviction`, or use a form that is no collection, and a "
            "key of the primary key's columns",
        )


# --- a cluster's sentinels: a key in each slot, since its servers can be lost one by one ---


def raise_sentinels(
    client: RedisClient, names: Names, sentinel: bytes, *, new: bool = False
) -> None:
    """Raise every slot's sentinel in a cluster to this one; `new`: sentinels may be missing."""
    if names.cluster:
        slots, last = range(SLOTS), b"new" if new else b""
        script = RAISE_SENTINEL.encode()
        client.ask_all(
            [(b"EVAL", script, b"1", names.sentinel(slot), sentinel, last) for slot in slots], slots
        )


def check_slots(client: RedisClient, names: Names, sentinel: bytes) -> None:
    """Raise StoreLostError if a server of a cluster has lost its sentinels.

    Checks some slots of each server: a server loses all of its slots, and a write checks its own.
    """
    found, token = _sentinels(client, names), sentinel[:TOKEN_LENGTH]
    # One with an earlier step has lost what a switch moved, because it had a later step then.
    lost = sum(each is None or each[:TOKEN_LENGTH] != token or each < sentinel for each in found)
    if lost:
        raise StoreLostError(
            f"the Redis cluster has lost the data of {lost} of {len(found)} checked hash slots",
            hint=_REBUILT,
        )


def raise_seq(client: RedisClient, names: Names, generation: int, seq: int) -> None:
    """Record on every server of a cluster that it has a generation's rows up to a seq.

    Done after these rows, and before the follower's own key has the seq: a server that has lost its
    last writes, in a failover or a crash, then has a lower seq than that key.
    """
    if names.cluster:
        text, script = b"%016x" % seq, RAISE_SEQ.encode()
        at = [(slot, names.frontier(generation, slot)) for slot in _CHECKED_SLOTS]
        client.ask_all([(b"EVAL", script, b"1", name, text) for _, name in at], _CHECKED_SLOTS)


def expect_seq(client: RedisClient, names: Names, generation: int, frontier: bytes) -> None:
    """Raise StoreLostError if a server of a cluster lacks rows of the frontier `frontier`."""
    if names.cluster and frontier:
        asked = [(b"GET", names.frontier(generation, slot)) for slot in _CHECKED_SLOTS]
        if any((each or b"") < frontier[:16] for each in client.ask_all(asked, _CHECKED_SLOTS)):
            raise StoreLostError(
                "a server of the Redis cluster has lost its last writes: another took over, or it"
                " was restarted",
                hint=f"{_REBUILT}; `appendfsync always` and synchronous replicas lose less",
            )


def refuse_orphans(client: RedisClient, names: Names) -> None:
    """Raise StoreLostError if a cluster has the follower's data but not its own key."""
    if any(_sentinels(client, names)):
        raise StoreLostError("the Redis cluster has lost the follower's frontier", hint=_REBUILT)


def _sentinels(client: RedisClient, names: Names) -> list[bytes | None]:
    slots = sorted({*_CHECKED_SLOTS, *client.first_slots()}) if names.cluster else []
    return client.ask_all([(b"GET", names.sentinel(slot)) for slot in slots], slots)
