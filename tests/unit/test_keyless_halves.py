"""Old and new rows without a key, by the hash of their values: what is added, what is deleted."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from lockstep.sinks.contract import Change
from lockstep.sinks.delta.keyless_buckets import Half, Taken, resolved


def half(seq: int, name: bytes, *, is_new: bool) -> Half:
    change = Change(None, seq, b"{}", 1, 2, 3)
    return Half(name, seq, is_new, msgspec.msgpack.encode(change) if is_new else b"")


def forwards(halves: list[Half]) -> tuple[list[int], dict[bytes, int]]:
    """Return the seqs of the rows that remain, and the stored rows that are deleted."""
    added: dict[bytes, list[int]] = {}
    taken: dict[bytes, int] = {}
    for each in sorted(halves, key=lambda each: (each.seq, each.is_new)):
        mine = added.setdefault(each.id, [])
        if each.is_new:
            mine.append(each.seq)
        elif mine:
            mine.pop()
        else:
            taken[each.id] = taken.get(each.id, 0) + 1
    return sorted(seq for seqs in added.values() for seq in seqs), taken


@pytest.mark.parametrize("seed", range(20))
def test_an_old_row_takes_the_newest_equal_row_before_it(seed: int) -> None:
    """Or else a stored one; also the row that an update without a difference writes."""
    chance = Random(seed)
    halves = []
    for seq in range(1, 40):
        kind = chance.choice(("insert", "delete", "update"))
        if kind != "insert":
            halves.append(half(seq, chance.choice((b"a", b"b", b"c")), is_new=False))
        if kind != "delete":
            halves.append(half(seq, chance.choice((b"a", b"b", b"c")), is_new=True))
    found = list(resolved(sorted(halves, key=lambda each: (each.id, -each.seq, not each.is_new))))
    remaining = sorted(each.seq for each in found if isinstance(each, Change))
    taken = {each.id: each.rows for each in found if isinstance(each, Taken)}
    assert (remaining, taken) == forwards(halves)
