"""What the fold says of single records that break the contract, and how it folds the odd ones."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from cdc.events import LSN, Frontier, PartitionEnd
from cdc.log.fold import Fold
from cdc.log.fold_cuts import MAX_FINDINGS

T = "shop.public.users"
Row = dict[str, Any]


def event(op: str, seq: int, after: Row | None = None, **source: object) -> bytes:
    fields = {"schema": "public", "table": "users", "seq": seq, "epoch": 1, "ordinal": seq}
    before = source.pop("before", None)
    fields |= {"commit_lsn": "0/100", **source}
    return orjson.dumps({"op": op, "before": before, "after": after, "source": fields})


def findings(fold: Fold) -> list[str]:
    """Return what it found, leaving out that no frontier was given."""
    told = fold.finish().findings
    return [each for each in told if "frontier" not in each]


def test_a_replayed_event_is_told_as_visible_twice() -> None:
    fold = Fold()
    fold.add(T, 0, 0, b"1", event("c", 1, {"id": 1}))
    fold.add(T, 0, 1, b"1", event("c", 1, {"id": 1}))
    assert any("visible twice" in each for each in findings(fold))


def test_a_missing_seq_is_told_once_with_its_range() -> None:
    fold = Fold()
    fold.add(T, 0, 0, b"1", event("c", 1, {"id": 1}))
    fold.add(T, 0, 1, b"2", event("c", 5, {"id": 2}))
    fold.add(T, 0, 2, b"3", event("c", 6, {"id": 3}))
    assert findings(fold) == ["seq 2 to 4 is missing from the log"]


def test_a_log_may_begin_at_a_later_seq_when_told_so() -> None:
    fold = Fold(first_seq=17)
    fold.add(T, 0, 0, b"1", event("c", 17, {"id": 1}))
    assert findings(fold) == []
    assert fold.seq == 17


def test_a_changed_key_takes_unsent_columns_along() -> None:
    """The new row's long column was not sent: its value is that of the row just deleted."""
    fold = Fold()
    fold.add(T, 0, 0, b"1", event("c", 1, {"id": 1, "bio": "long"}, ordinal=1))
    fold.add(T, 0, 1, b"1", event("d", 2, before={"id": 1}, ordinal=2))
    fold.add(T, 0, 2, b"1", None)
    moved = event("c", 3, {"id": 2, "bio": "?"}, ordinal=2, unchanged=["bio"])
    fold.add(T, 1, 0, b"2", moved)
    assert findings(fold) == []
    assert fold.tables[T].rows == {b"2": {"id": 2, "bio": "long"}}


def test_an_unsent_column_of_a_row_never_seen_is_unknown_not_null() -> None:
    fold = Fold()
    fold.add(T, 0, 0, b"1", event("c", 1, {"id": 1, "bio": "?"}, unchanged=["bio"]))
    assert any("no value was told yet" in each for each in findings(fold))


def test_a_create_after_a_delete_in_another_change_does_not_inherit() -> None:
    fold = Fold()
    fold.add(T, 0, 0, b"1", event("c", 1, {"id": 1, "bio": "long"}))
    fold.add(T, 0, 1, b"1", event("d", 2, before={"id": 1}))
    fold.add(T, 0, 2, b"1", None)
    fold.add(T, 0, 3, b"2", event("c", 3, {"id": 2, "bio": "?"}, unchanged=["bio"]))
    assert any("no value was told yet" in each for each in findings(fold))


def test_a_truncate_empties_partitions_that_were_read_later() -> None:
    """Only `seq` orders a truncate against the other partitions of its table."""
    fold = Fold()
    fold.add(T, 0, 0, None, event("t", 2))
    fold.add(T, 1, 0, b"1", event("c", 1, {"id": 1}))
    fold.add(T, 1, 1, b"2", event("c", 3, {"id": 2}))
    assert findings(fold) == []
    assert fold.tables[T].rows == {b"2": {"id": 2}}


def test_equal_keyless_rows_are_counted() -> None:
    fold = Fold()
    for seq in (1, 2, 3):
        fold.add(T, 0, seq, None, event("c", seq, {"url": "/"}))
    fold.add(T, 0, 4, None, event("d", 4, before={"url": "/"}))
    assert findings(fold) == []
    assert len(fold.tables[T]) == 2


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"{", "is not a change event"),
        (event("x", 1), "unknown op"),
        (event("u", 1, {"id": 1}), "updates a row that is not there"),
        (event("d", 1, before={"id": 1}), "deletes a row that is not there"),
        (event("c", 1), "has no new row"),
        (event("c", 1, {"id": 1}, commit_lsn="nowhere"), "not an LSN"),
        (None, "tombstone"),
    ],
)
def test_a_record_that_breaks_the_contract_is_told(value: bytes | None, said: str) -> None:
    fold = Fold()
    fold.add(T, 0, 0, b"1", value)
    assert any(said in each for each in findings(fold))


def test_a_tombstone_must_stand_right_behind_its_delete() -> None:
    fold = Fold()
    fold.add(T, 0, 0, b"1", event("c", 1, {"id": 1}))
    fold.add(T, 0, 1, b"1", event("d", 2, before={"id": 1}))
    fold.add(T, 0, 2, b"2", event("c", 3, {"id": 2}))
    fold.add(T, 0, 3, b"1", None)
    told = findings(fold)
    assert len(told) == 2
    assert all("tombstone" in each for each in told)


def test_a_transaction_in_two_pieces_is_told() -> None:
    """Its events must follow each other in `seq`: another one's between them are a tear."""
    fold = Fold()
    fold.add(T, 0, 0, b"1", event("c", 1, {"id": 1}, commit_lsn="0/100", ordinal=1))
    fold.add(T, 0, 1, b"2", event("c", 2, {"id": 2}, commit_lsn="0/200", ordinal=1))
    fold.add(T, 0, 2, b"3", event("c", 3, {"id": 3}, commit_lsn="0/100", ordinal=2))
    assert any("not after" in each for each in findings(fold))


def test_events_behind_the_last_frontier_are_told() -> None:
    fold = Fold()
    fold.add(T, 0, 0, b"1", event("c", 1, {"id": 1}))
    fold.add_frontier(Frontier(1, LSN(0x130), 1, 0, (PartitionEnd(T, 0, 2, 1),)))
    fold.add(T, 0, 3, b"2", event("c", 2, {"id": 2}, commit_lsn="0/200"))
    told = fold.finish().findings
    assert any("but the newest event is seq 2" in each for each in told)
    assert any("1 events of shop.public.users/0 stand behind" in each for each in told)


def test_a_frontier_of_records_that_are_gone_is_told() -> None:
    fold = Fold()
    fold.add_frontier(Frontier(1, LSN(0x130), 3, 0, (PartitionEnd(T, 2, 7, 3),)))
    told = fold.finish().findings
    assert any("counts 3 events of shop.public.users/2" in each for each in told)


def test_an_empty_log_is_whole() -> None:
    folded = Fold().finish()
    assert folded.findings == ()
    assert (folded.events, folded.seq, folded.frontier) == (0, 0, None)


def test_a_thousand_findings_are_counted_and_a_hundred_told() -> None:
    fold = Fold()
    for offset in range(1000):
        fold.add(T, 0, offset, b"1", None)
    told = fold.finish().findings
    assert len(told) == MAX_FINDINGS + 1
    assert told[-1] == "and 900 more findings"
