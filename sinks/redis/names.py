"""The names of keys in Redis: a row's value, named by its shape, and the keys that we add.

    shop:public.users:7                       a row's value; a template may name it otherwise
    shop:~cache.1:public.users:{"id":7}       its companion: the seq that wrote it, and its place
    shop:~cache.1:public.users>ada@x.org      the holder of a place to which rows can move
    shop:~cache.2=shop:public.users:7         a value of a build that readers do not see yet
    shop:cdc:cache                            the follower's own key: frontier, generations
    shop:~cache.slot:{3x}                     in each slot of a cluster: that its data is not lost
    shop:~cache.2@{3x}                        in some slots: the last seq of a generation there
    shop:~cache.1#2f:public.users             the index: the keys of a bucket's existing rows

A *build* is one target of a table's keys; a generation has one build for each table, so that a
single table can be rebuilt. In a cluster `{tag}` follows the build, which puts a name into the hash
slot of its value, with any braces in either. The rows of a table and build are in *buckets*: in a
cluster a bucket is a hash slot, with one server it is a part of a fixed number, by a checksum of
the row's key.
"""

from __future__ import annotations

import functools
import re
from binascii import crc32, crc_hqx
from typing import Final, NamedTuple

SLOTS: Final = 16384
# The buckets of a table in one server: each of its sets stays small enough to grow without a pause.
_BUCKETS: Final = 64
_GLOB: Final = re.compile(rb"([*?\[\]\\^-])")


def slot_of(name: bytes) -> int:
    """Return the hash slot of a key, as every Redis cluster computes it."""
    opened = name.find(b"{")
    if opened >= 0:
        closed = name.find(b"}", opened + 1)
        if closed > opened + 1:
            name = name[opened + 1 : closed]
    # CRC16, the XMODEM variant, as in the cluster specification.
    return crc_hqx(name, 0) % SLOTS


@functools.cache
def tags() -> tuple[bytes, ...]:
    """Return for each slot a short text that is in it, in braces."""
    found: dict[int, bytes] = {}
    number = 0
    while len(found) < SLOTS:
        text = b"%x" % number
        found.setdefault(crc_hqx(text, 0) % SLOTS, b"{%b}" % text)
        number += 1
    return tuple(found[slot] for slot in range(SLOTS))


class Companion(NamedTuple):
    """The parts of a companion's name."""

    build: int
    table: str
    key: bytes


_INDEX: Final = re.compile(rb"(\d+)#")
_COMPANION: Final = re.compile(rb"(\d+):(\{[0-9a-f]+\})?([^>]*?):(\{.*\})", re.DOTALL)


class Names:
    """The names of one follower's keys."""

    def __init__(self, prefix: str, follower: str, *, cluster: bool) -> None:
        self.cluster = cluster
        self.main = f"{prefix}:cdc:{follower}".encode()
        self._ours = f"{prefix}:~{follower}.".encode()

    def slot(self, place: bytes) -> int:
        """Return the slot of a place's keys; 0 if there are no slots."""
        return slot_of(place) if self.cluster else 0

    @property
    def buckets(self) -> int:
        """How many buckets a table has."""
        return SLOTS if self.cluster else _BUCKETS

    def bucket(self, key: bytes) -> int:
        """Return the bucket of a row's key in one server."""
        return crc32(key) % _BUCKETS

    def _tag(self, slot: int) -> bytes:
        return tags()[slot] if self.cluster else b""

    def companions(self, build: int, table: str, slot: int) -> bytes:
        """Return the prefix of a table's companions; the row's key follows."""
        return b"%b%d:%b%b:" % (self._ours, build, self._tag(slot), table.encode())

    def holders(self, build: int, table: str, slot: int) -> bytes:
        """Return the prefix of the holders of places; the place follows."""
        return b"%b%d:%b%b>" % (self._ours, build, self._tag(slot), table.encode())

    def index(self, build: int, table: str, bucket: int) -> bytes:
        """Return the set with the keys of a bucket's existing rows."""
        where = self._tag(bucket) or b"%02x:" % bucket
        return b"%b%d#%b%b" % (self._ours, build, where, table.encode())

    def index_build(self, name: bytes) -> int | None:
        """Return the build whose index this is; None for other names."""
        match = _INDEX.match(name, len(self._ours))
        return int(match[1]) if match else None

    def shadow(self, build: int, slot: int) -> bytes:
        """Return the prefix of a place in a build that readers do not see."""
        return b"%b%d=%b" % (self._ours, build, self._tag(slot))

    def sentinel(self, slot: int) -> bytes:
        """Return the key that shows, in a cluster, that a slot has not lost its data."""
        return b"%bslot:%b" % (self._ours, self._tag(slot))

    def guard(self, slot: int) -> bytes:
        """Return the key by which a script in this slot knows whether its writer may write."""
        return self.sentinel(slot) if self.cluster else self.main

    def frontier(self, generation: int, slot: int) -> bytes:
        """Return the key with the seq up to which, in a cluster, its server has a generation."""
        return b"%b%d@%b" % (self._ours, generation, self._tag(slot))

    def every(self) -> bytes:
        """Return the SCAN pattern of all of a follower's keys except its own key and values."""
        return _glob(self._ours) + b"*"

    def parsed(self, name: bytes) -> Companion | None:
        """Return the parts of a companion's name; None for other names."""
        match = _COMPANION.fullmatch(name, len(self._ours))
        if match is None or bool(match[2]) != self.cluster:
            return None
        return Companion(int(match[1]), match[3].decode(), match[4])

    def values(self, head: bytes, build: int | None) -> bytes:
        """Return the SCAN pattern of values with this prefix; of a shadow `build` if given."""
        if build is None:
            return _glob(head) + b"*"
        return b"%b%d=%b%b*" % (_glob(self._ours), build, b"{*}" * self.cluster, _glob(head))

    def pattern(self, build: int, table: str | None, mark: bytes = b":") -> bytes:
        """Return the SCAN pattern of a build's keys: a table's companions, holders, or all."""
        tag = b"{*}" if self.cluster else b""
        rest = b"" if table is None else tag + _glob(table.encode()) + mark
        return b"%b%d%b%b*" % (_glob(self._ours), build, b":" if rest else b"[:=@#]", rest)


def _glob(text: bytes) -> bytes:
    return _GLOB.sub(rb"\\\1", text)
