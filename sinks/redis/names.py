"""What keys are called in Redis: a row's value by its shape, and beside it what we need to know.

    shop:public.users:7                       a row's value, or whatever its template says
    shop:~cache.1:public.users:{"id":7}       its companion: which seq wrote it, and where it stands
    shop:~cache.1:public.users>ada@x.org      of a place that rows come to and leave: who is there
    shop:~cache.2=shop:public.users:7         a value of a build that readers do not see yet
    shop:cdc:cache                            the follower's own key: frontier, generations
    shop:~cache.slot:{3x}                     in each slot of a cluster: what was written is there,
    shop:~cache.2@{3x}                        in some of them: and up to which seq of a generation

A *build* is one filling of a table's keys; a generation says which build each table has, so that a
single table can be built anew. In a cluster `{tag}` stands behind the build, which puts a name into
the hash slot of its value, whatever braces either contains.
"""

from __future__ import annotations

import functools
import re
from binascii import crc_hqx
from typing import Final, NamedTuple

SLOTS: Final = 16384
_GLOB: Final = re.compile(rb"([*?\[\]\\^-])")


def slot_of(name: bytes) -> int:
    """Return the hash slot of a key, as every Redis cluster has it."""
    opened = name.find(b"{")
    if opened >= 0:
        closed = name.find(b"}", opened + 1)
        if closed > opened + 1:
            name = name[opened + 1 : closed]
    # CRC16 of the XMODEM kind, as the cluster specification names it.
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
    """What a companion's name says."""

    build: int
    table: str
    key: bytes


_COMPANION: Final = re.compile(rb"(\d+):(\{[0-9a-f]+\})?([^>]*?):(\{.*\})", re.DOTALL)


class Names:
    """The names of one follower's keys."""

    def __init__(self, prefix: str, follower: str, *, cluster: bool) -> None:
        self.cluster = cluster
        self.main = f"{prefix}:cdc:{follower}".encode()
        self._ours = f"{prefix}:~{follower}.".encode()

    def slot(self, place: bytes) -> int:
        """Return the slot that a place's keys are in; 0 where there are none."""
        return slot_of(place) if self.cluster else 0

    def _tag(self, slot: int) -> bytes:
        return tags()[slot] if self.cluster else b""

    def companions(self, build: int, table: str, slot: int) -> bytes:
        """Return what the names of a table's companions begin with; the row's key follows."""
        return b"%b%d:%b%b:" % (self._ours, build, self._tag(slot), table.encode())

    def holders(self, build: int, table: str, slot: int) -> bytes:
        """Return what the names of who holds a place begin with; the place follows."""
        return b"%b%d:%b%b>" % (self._ours, build, self._tag(slot), table.encode())

    def aside(self, build: int, slot: int) -> bytes:
        """Return what stands before a place while its build is not the one that readers see."""
        return b"%b%d=%b" % (self._ours, build, self._tag(slot))

    def sentinel(self, slot: int) -> bytes:
        """Return the key that tells, in a cluster, that a slot still has what was written to it."""
        return b"%bslot:%b" % (self._ours, self._tag(slot))

    def frontier(self, generation: int, slot: int) -> bytes:
        """Return the key that tells, in a cluster, up to which seq its server has a generation."""
        return b"%b%d@%b" % (self._ours, generation, self._tag(slot))

    def every(self) -> bytes:
        """Return what SCAN matches all of a follower's keys by, but its own and the values."""
        return _glob(self._ours) + b"*"

    def parsed(self, name: bytes) -> Companion | None:
        """Return what a companion's name says; None of other names."""
        match = _COMPANION.fullmatch(name, len(self._ours))
        if match is None or bool(match[2]) != self.cluster:
            return None
        return Companion(int(match[1]), match[3].decode(), match[4])

    def values(self, head: bytes, build: int | None) -> bytes:
        """Return what SCAN matches values by whose places begin so; a build's that lie aside."""
        if build is None:
            return _glob(head) + b"*"
        return b"%b%d=%b%b*" % (_glob(self._ours), build, b"{*}" * self.cluster, _glob(head))

    def pattern(self, build: int, table: str | None, mark: bytes = b":") -> bytes:
        """Return what SCAN matches a build's keys by: a table's companions, holders, or all."""
        tag = b"{*}" if self.cluster else b""
        rest = b"" if table is None else tag + _glob(table.encode()) + mark
        return b"%b%d%b%b*" % (_glob(self._ours), build, b":" if rest else b"[:=@]", rest)


def _glob(text: bytes) -> bytes:
    return _GLOB.sub(rb"\\\1", text)
