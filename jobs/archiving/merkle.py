"""A Merkle tree over the records of a cut, in the form of RFC 6962, with salted leaves.

A leaf is SHA-256 of 0, the record's salt, and the MessagePack of `[offset, key, value]`. Without
the salt, which is deleted with a record, nobody can find out by trying what a leaf was made of. A
*span* is a partition's part of a cut: its tree has the leaves in the order of their offsets. The
cut's tree has a leaf for each span. An inner node is SHA-256 of 1 and its two children.

Pure. https://www.rfc-editor.org/rfc/rfc6962#section-2.1
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

SALT_BYTES: Final = 16
_LEAF: Final = b"\0"
_NODE: Final = b"\1"
_encode: Final = msgspec.msgpack.Encoder().encode


class Tree:
    """The root over leaves that are added in their order; it keeps one node for each height."""

    def __init__(self, leaves: Iterable[bytes] = ()) -> None:
        self.count = 0
        # By height, the root of a complete tree that has no right neighbour yet.
        self._roots: list[bytes | None] = []
        self.extend(leaves)

    def extend(self, leaves: Iterable[bytes]) -> None:
        """Add the next leaves; many at once cost less, because they are paired height by height."""
        nodes, height = list(leaves), 0
        self.count += len(nodes)
        while nodes:
            if height == len(self._roots):
                self._roots.append(None)
            if (left := self._roots[height]) is not None:
                nodes.insert(0, left)
            self._roots[height] = nodes.pop() if len(nodes) % 2 else None
            pairs = zip(nodes[::2], nodes[1::2], strict=True)
            nodes = [sha256(_NODE + left + right).digest() for left, right in pairs]
            height += 1

    def root(self) -> bytes:
        """Return the root over all leaves so far; of none it is the digest of nothing."""
        found: bytes | None = None
        for left in self._roots:  # the lowest is the last part of the leaves
            if left is not None:
                found = left if found is None else sha256(_NODE + left + found).digest()
        return sha256().digest() if found is None else found


def leaf(salt: bytes, offset: int, key: bytes | None, value: bytes | None) -> bytes:
    """Return the leaf of a record."""
    return sha256(_LEAF + salt + _encode((offset, key, value))).digest()


def cut_root(spans: Iterable[tuple[str, int, int, bytes]]) -> bytes:
    """Return a cut's root, of its spans in their order: topic, partition, records, root."""
    return Tree(sha256(_LEAF + _encode(span)).digest() for span in spans).root()
