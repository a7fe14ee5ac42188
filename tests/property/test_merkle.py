"""Merkle roots are those of RFC 6962, in any number of steps, and differ if anything does."""

from __future__ import annotations

from hashlib import sha256

from hypothesis import assume, given
from hypothesis import strategies as st

from lockstep.jobs.archiving import merkle

leaves = st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=40)


def of_rfc(nodes: list[bytes]) -> bytes:
    """Return the root by the definition: split at the largest power of two below the number."""
    if len(nodes) == 1:
        return nodes[0]
    at = 1
    while 2 * at < len(nodes):
        at *= 2
    return sha256(b"\1" + of_rfc(nodes[:at]) + of_rfc(nodes[at:])).digest()


@given(st.lists(leaves, min_size=1, max_size=4))
def test_the_root_is_the_one_that_the_rfc_defines(steps: list[list[bytes]]) -> None:
    tree = merkle.Tree()
    for nodes in steps:
        tree.extend(nodes)
    nodes = [node for step in steps for node in step]
    assert (tree.root(), tree.count) == (of_rfc(nodes), len(nodes))
    assert merkle.Tree(nodes).root() == tree.root()


@given(leaves, leaves)
def test_other_leaves_have_another_root(nodes: list[bytes], others: list[bytes]) -> None:
    assume(nodes != others)
    assert merkle.Tree(nodes).root() != merkle.Tree(others).root()


record = st.tuples(st.integers(0, 2**63 - 1), st.none() | st.binary(), st.none() | st.binary())
salts = st.binary(min_size=merkle.SALT_BYTES, max_size=merkle.SALT_BYTES)


@given(salts, salts, record, record)
def test_a_leaf_depends_on_salt_offset_key_and_value(
    salt: bytes,
    other_salt: bytes,
    first: tuple[int, bytes | None, bytes | None],
    other: tuple[int, bytes | None, bytes | None],
) -> None:
    assume((salt, first) != (other_salt, other))
    assert merkle.leaf(salt, *first) != merkle.leaf(other_salt, *other)
