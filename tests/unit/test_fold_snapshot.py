"""The rows of an initial snapshot in the fold: any order of ranges, holes, and errors."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cdc.events import LSN, Frontier, PartitionEnd
from cdc.verify.fold import Fold
from tests.unit.test_fold import T, event

Record = tuple[int, bytes, bytes | None]  # partition, key, value


def row(seq: int, ident: int, op: str = "r", **more: Any) -> Record:  # noqa: ANN401 - of `event`
    after = None if op == "d" else {"id": ident, "v": seq}
    value = event(op, seq, after, snapshot="true", ordinal=0, **more)
    return ident % 2, b"%d" % ident, value


def change(seq: int, ident: int, op: str, ordinal: int) -> Record:
    after = None if op in {"d", "t"} else {"id": ident, "v": -seq}
    return ident % 2, b"%d" % ident, event(op, seq, after, commit_lsn="0/200", ordinal=ordinal)


# Two generations: the second has no 3, which is deleted after its rows, and a newer 1.
SNAPSHOT = [row(7, 1), row(2, 2), row(1, 3), row(300, 2), row(290, 1), row(200, 4)]
DELETED = row(400, 3, "d", before={"id": 3})
STREAM = [change(401, 5, "c", 1), change(402, 4, "d", 2)]
FRONTIERS = [
    Frontier(1, LSN(0x100), 400, 0, (PartitionEnd(T, 0, 3, 3), PartitionEnd(T, 1, 5, 4)), 393),
    Frontier(1, LSN(0x210), 402, 0, (PartitionEnd(T, 0, 5, 1), PartitionEnd(T, 1, 6, 1))),
]


def folded(records: list[Record], frontiers: list[Frontier], seed: int = 0) -> Fold:
    """Feed partitions and frontiers in an interleaving that depends on the seed."""
    chance = random.Random(seed)
    queues: list[list[Any]] = [[r for r in records if r[0] == n] for n in (0, 1)]
    queues.append(list(frontiers))
    offsets = [0, 0]
    fold = Fold()
    while any(queues):
        queue = chance.choice([each for each in queues if each])
        item = queue.pop(0)
        if isinstance(item, Frontier):
            fold.add_frontier(item)
            continue
        number, key, value = item
        fold.add(T, number, offsets[number], key, value)
        offsets[number] += 1
    return fold


def complete() -> list[Record]:
    number, key, _ = DELETED
    deleted = change(402, 4, "d", 2)
    return [*SNAPSHOT, DELETED, (number, key, None), *STREAM, (deleted[0], deleted[1], None)]


@pytest.mark.parametrize("seed", range(20))
def test_ranges_of_two_generations_in_any_order_then_the_stream(seed: int) -> None:
    fold = folded(complete(), FRONTIERS, seed)
    outcome = fold.finish()
    assert outcome.findings == ()
    assert (outcome.events, outcome.seq) == (9, 402)
    assert fold.tables[T].rows == {
        b"1": {"id": 1, "v": 290},
        b"2": {"id": 2, "v": 300},
        b"5": {"id": 5, "v": -401},
    }


def test_a_row_that_is_missing_twice_or_late_is_a_finding() -> None:
    records = complete()
    assert any(
        "missing from the log" in f for f in folded(records[1:], FRONTIERS).finish().findings
    )
    twice = [*records[:6], row(2, 6), *records[6:]]
    assert any("visible twice" in f for f in folded(twice, FRONTIERS).finish().findings)
    late = [*records, row(250, 8)]
    assert any("visible twice" in f for f in folded(late, FRONTIERS, 3).finish().findings)
    stale = [row(290, 1), *records[:4], row(7, 1), *records[5:]]
    assert any("of a key after its seq" in f for f in folded(stale, FRONTIERS).finish().findings)


def test_holes_are_counted_exactly() -> None:
    odd = [FRONTIERS[0]._replace(holes=392), FRONTIERS[1]]
    reported = folded(complete(), odd).finish().findings
    assert any("holds 7 events instead of 8" in each for each in reported)
