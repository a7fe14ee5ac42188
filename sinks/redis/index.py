"""A table's index in Redis: the keys of its existing rows, so that a truncate finds only these.

The scripts maintain it with the rows, in the same call: a set for each bucket, in the rows' own
hash slot. The follower's key has the buckets in which a row may be, recorded before the first row
is written there. A set is never empty once it exists; so if the set of a recorded bucket is
missing, it was evicted, or the writer was killed before its first row, and the index is of no use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from lockstep.sinks.redis.calls import StoredTable, TargetBuild
from lockstep.sinks.redis.client import RedisClient
from lockstep.sinks.redis.state import buckets_field

# How many buckets are read at a time, and about how many keys of each.
_BUCKETS_AT_ONCE: Final = 64
_KEYS_AT_ONCE: Final = 1_000


def bitmap(buckets: Collection[int]) -> bytes:
    """Return buckets as a bitmap, the first in the lowest bit of the first byte."""
    found = bytearray(max(buckets) // 8 + 1)
    for bucket in buckets:
        found[bucket // 8] |= 1 << bucket % 8
    return bytes(found)


def recorded(stored: bytes) -> list[int]:
    """Return the buckets in a bitmap."""
    return [8 * at + bit for at, byte in enumerate(stored) for bit in range(8) if byte >> bit & 1]


def companions(
    client: RedisClient, stored_table: StoredTable, target: TargetBuild
) -> Iterator[list[bytes]] | None:
    """Return the names of the companions of all existing rows; None if the index lacks some."""
    if not target.indexed:
        return None
    names, table = stored_table.names, stored_table.version.name
    stored = client.ask("HGET", names.main, buckets_field(target.build, table)) or b""
    buckets = recorded(stored)
    sets = [names.index(target.build, table, bucket) for bucket in buckets]
    if not all(client.ask_all([(b"EXISTS", name) for name in sets], buckets)):
        return None
    return _companions(client, stored_table, target, buckets)


def _companions(
    client: RedisClient, stored_table: StoredTable, target: TargetBuild, buckets: Sequence[int]
) -> Iterator[list[bytes]]:
    names, table, build = stored_table.names, stored_table.version.name, target.build
    for first in range(0, len(buckets), _BUCKETS_AT_ONCE):
        cursors = dict.fromkeys(buckets[first : first + _BUCKETS_AT_ONCE], b"0")
        while cursors:
            asked = [
                (b"SSCAN", names.index(build, table, at), cursor, b"COUNT", b"%d" % _KEYS_AT_ONCE)
                for at, cursor in cursors.items()
            ]
            found = zip(list(cursors), client.ask_all(asked, list(cursors)), strict=True)
            for bucket, (cursor, keys) in found:
                prefix = names.companions(build, table, bucket)
                yield [prefix + key for key in keys if key]
                cursors[bucket] = cursor
            cursors = {bucket: cursor for bucket, cursor in cursors.items() if cursor != b"0"}
