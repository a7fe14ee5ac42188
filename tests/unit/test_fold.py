"""The fold's findings about single records that break the contract, and how it folds odd ones."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from cdc.encode import oversize
from cdc.events import LSN, Frontier, PartitionEnd
from cdc.verify.fold import Fold
from cdc.verify.frontiers import MAX_FINDINGS

T = "shop.public.users"
Row = dict[str, Any]


def event(op: str, seq: int, after: Row | None = None, **source: object) -> bytes:
    fields = {"schema": "public", "table": "users", "seq": seq, "epoch": 1, "ordinal": seq}
    before = source.pop("before", None)
    fields |= {"commit_lsn": "0/100", **source}
    return orjson.dumps({"op": op, "before": before, "after": after, "source": fields})


def findings(fold: Fold) -> list[str]:
    """Return its findings, without those about a missing frontier."""
    reported = fold.finish().findings
    return [each for each in reported if "frontier" not in each]


def test_a_replayed_event_is_a_finding_as_visible_twice() -> None:
    fold = Fold()
    fold.add(T, 0, 0, b"1", event("c", 1, {"id": 1}))
    fold.add(T, 0, 1, b"1", event("c", 1, {"id": 1}))
    assert any("visible twice" in each for each in findings(fold))


def test_a_missing_seq_is_one_finding_with_its_range() -> None:
    fold = Fold()
    fold.add(T, 0, 0, b"1", event("c", 1, {"id": 1}))
    fold.add(T, 0, 1, b"2", event("c", 5, {"id": 2}))
    fold.add(T, 0, 2, b"3", event("c", 6, {"id": 3}))
    assert findings(fold) == ["seq 2 to 4 is missing from the log"]


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
    assert any("no earlier event has its value" in each for each in findings(fold))


def test_a_create_after_a_delete_in_another_change_does_not_inherit() -> None:
    fold = Fold()
    fold.add(T, 0, 0, b"1", event("c", 1, {"id": 1, "bio": "long"}))
    fold.add(T, 0, 1, b"1", event("d", 2, before={"id": 1}))
    fold.add(T, 0, 2, b"1", None)
    fold.add(T, 0, 3, b"2", event("c", 3, {"id": 2, "bio": "?"}, unchanged=["bio"]))
    assert any("no earlier event has its value" in each for each in findings(fold))


def test_a_row_unseen_until_an_incremental_snapshot_reads_it_is_no_finding() -> None:
    """The table existed before the log held it, and a snapshot reads it after the change."""
    fold = Fold()
    fold.add(T, 0, 0, b'{"id":1}', event("u", 1, {"id": 1, "body": "?"}, unchanged=["body"]))
    fold.add(T, 0, 1, b'{"id":1}', event("r", 2, {"id": 1, "body": "whole"}))
    assert findings(fold) == []
    assert fold.tables[T].rows == {b'{"id":1}': {"id": 1, "body": "whole"}}


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


def test_a_logical_message_has_its_place_among_the_changes_and_no_table() -> None:
    """One outside any transaction has ordinal 0, and may share the next one's commit LSN."""
    fold = Fold()
    fold.add(T, 0, 0, b"1", event("c", 1, {"id": 1}, ordinal=1))
    nowhere: dict[str, object] = {"schema": "", "table": ""}
    fold.add("shop.cdc.messages", 0, 0, b"p", event("m", 2, None, ordinal=2, **nowhere))
    fold.add(
        "shop.cdc.messages",
        0,
        1,
        b"p",
        event("m", 3, None, commit_lsn="0/200", ordinal=0, **nowhere),
    )
    fold.add(T, 0, 1, b"2", event("c", 4, {"id": 2}, commit_lsn="0/200", ordinal=1))
    changes = [PartitionEnd(T, 0, end, 1) for end in (1, 2)]
    output = [PartitionEnd("shop.cdc.messages", 0, end, 1) for end in (1, 2)]
    for lsn, seq, ends in ((0x108, 2, [changes[0], output[0]]), (0x200, 3, output[1:])):
        fold.add_frontier(Frontier(1, LSN(lsn), seq, 0, tuple(ends)))
    fold.add_frontier(Frontier(1, LSN(0x208), 4, 0, (changes[1],)))
    assert fold.finish().findings == ()
    assert set(fold.tables) == {T}
    assert fold.events == 4


@pytest.mark.parametrize(
    ("value", "output"),
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
def test_a_record_that_breaks_the_contract_is_a_finding(value: bytes | None, output: str) -> None:
    fold = Fold()
    fold.add(T, 0, 0, b"1", value)
    assert any(output in each for each in findings(fold))


def test_a_tombstone_must_follow_its_delete() -> None:
    fold = Fold()
    fold.add(T, 0, 0, b"1", event("c", 1, {"id": 1}))
    fold.add(T, 0, 1, b"1", event("d", 2, before={"id": 1}))
    fold.add(T, 0, 2, b"2", event("c", 3, {"id": 2}))
    fold.add(T, 0, 3, b"1", None)
    reported = findings(fold)
    assert len(reported) == 2
    assert all("tombstone" in each for each in reported)


def test_a_transaction_in_two_pieces_is_a_finding() -> None:
    """Its events must be consecutive in `seq`: another transaction's between them split it."""
    fold = Fold()
    fold.add(T, 0, 0, b"1", event("c", 1, {"id": 1}, commit_lsn="0/100", ordinal=1))
    fold.add(T, 0, 1, b"2", event("c", 2, {"id": 2}, commit_lsn="0/200", ordinal=1))
    fold.add(T, 0, 2, b"3", event("c", 3, {"id": 3}, commit_lsn="0/100", ordinal=2))
    assert any("not after" in each for each in findings(fold))


def test_events_after_the_last_frontier_are_a_finding() -> None:
    fold = Fold()
    fold.add(T, 0, 0, b"1", event("c", 1, {"id": 1}))
    fold.add_frontier(Frontier(1, LSN(0x130), 1, 0, (PartitionEnd(T, 0, 2, 1),)))
    fold.add(T, 0, 3, b"2", event("c", 2, {"id": 2}, commit_lsn="0/200"))
    reported = fold.finish().findings
    assert any("but the newest event is seq 2" in each for each in reported)
    assert any("1 events of shop.public.users/0 are after" in each for each in reported)


def test_a_frontier_of_deleted_records_is_a_finding() -> None:
    fold = Fold()
    fold.add_frontier(Frontier(1, LSN(0x130), 3, 0, (PartitionEnd(T, 2, 7, 3),)))
    reported = fold.finish().findings
    assert any("counts 3 events of shop.public.users/2" in each for each in reported)


def test_an_empty_log_is_complete() -> None:
    folded = Fold().finish()
    assert folded.findings == ()
    assert (folded.events, folded.seq, folded.frontier) == (0, 0, None)


def test_a_thousand_findings_are_counted_and_a_hundred_listed() -> None:
    fold = Fold()
    for offset in range(1000):
        fold.add(T, 0, offset, b"1", None)
    reported = fold.finish().findings
    assert len(reported) == MAX_FINDINGS + 1
    assert reported[-1] == "and 900 more findings"


def test_a_frontier_that_goes_back_is_a_finding() -> None:
    fold = Fold()
    fold.add(T, 0, 0, b"1", event("c", 1, {"id": 1}))
    fold.add_frontier(Frontier(1, LSN(0x130), 1, 0, (PartitionEnd(T, 0, 1, 1),)))
    fold.add_frontier(Frontier(1, LSN(0x120), 1, 0, ()))
    assert fold.finish().findings == ("the frontier goes back from 0/130 (seq 1) to 0/120 (seq 1)",)


def test_a_frontier_lies_after_its_commit() -> None:
    fold = Fold()
    fold.add(T, 0, 0, b"1", event("c", 1, {"id": 1}))
    fold.add_frontier(Frontier(1, LSN(0x100), 1, 0, (PartitionEnd(T, 0, 1, 1),)))
    assert fold.finish().findings == (
        "the frontier 0/100 (seq 1) is not after its commit at 0/100",
    )


def test_a_new_epoch_may_begin_at_a_lower_lsn() -> None:
    """Another server's WAL has other addresses: LSNs compare only within an epoch."""
    fold = Fold()
    fold.add(T, 0, 0, b"1", event("c", 1, {"id": 1}, commit_lsn="5/100"))
    fold.add_frontier(Frontier(1, LSN.parse("5/130"), 1, 0, (PartitionEnd(T, 0, 1, 1),)))
    fold.add(T, 0, 2, b"2", event("c", 2, {"id": 2}, commit_lsn="0/100", epoch=2))
    fold.add_frontier(Frontier(2, LSN.parse("0/130"), 2, 0, (PartitionEnd(T, 0, 3, 1),)))
    assert fold.finish().findings == ()


def test_records_must_be_fed_in_offset_order() -> None:
    fold = Fold()
    fold.add(T, 0, 5, b"1", event("c", 1, {"id": 1}))
    fold.add(T, 0, 5, b"2", event("c", 2, {"id": 2}))
    assert findings(fold) == ["shop.public.users/0 offset 5 was read after offset 5"]


def test_a_topic_holds_one_table() -> None:
    fold = Fold()
    fold.add(T, 0, 0, b"1", event("c", 1, {"id": 1}))
    fold.add(T, 0, 1, b"2", event("c", 2, {"id": 2}, table="orders"))
    assert any("is of public.orders, not of public.users" in each for each in findings(fold))


@pytest.mark.parametrize("op", ["u", "d"])
def test_a_keyless_change_must_hold_the_old_row(op: str) -> None:
    fold = Fold()
    fold.add(T, 0, 0, None, event(op, 1, {"url": "/"}))
    assert any("without its old values" in each for each in findings(fold))


def test_a_keyless_row_that_is_not_there_cannot_be_deleted() -> None:
    fold = Fold()
    fold.add(T, 0, 0, None, event("d", 1, before={"url": "/"}))
    assert any("keyless row that is not there" in each for each in findings(fold))


# -- dead letters ----------------------------------------------------------------------------------


def split(seq: int = 1) -> oversize.Split:
    after = {"id": 1, "bio": "long " * 1_000}
    return oversize.split(T, b'{"id":1}', event("c", seq, after, ts_us=5), 3_000)


def test_an_event_too_large_for_its_topic_is_folded_completely_whenever_its_letter_arrives() -> (
    None
):
    for letter_first in (True, False):
        fold, parts = Fold(), split()
        if letter_first:
            for letter in parts.letter:
                fold.add_letter(*letter)
        fold.add(T, 0, 0, parts.key, parts.value)
        fold.add(T, 0, 1, b"2", event("c", 2, {"id": 2}))
        if not letter_first:
            assert fold.events == 0
            for letter in parts.letter:
                fold.add_letter(*letter)
        assert fold.events == 2
        assert findings(fold) == []
        assert fold.tables[T].rows[b'{"id":1}'] == {"id": 1, "bio": "long " * 1_000}


def test_a_missing_or_incomplete_letter_is_a_finding_and_the_rest_is_folded() -> None:
    fold, parts = Fold(), split()
    fold.add(T, 0, 0, parts.key, parts.value)
    fold.add(T, 0, 1, b"2", event("c", 2, {"id": 2}))
    for letter in parts.letter[:-1]:
        fold.add_letter(*letter)
    [reported] = findings(fold)
    assert "seq 1, op c" in reported
    assert "dead letter 1-1 is not complete" in reported
    assert fold.events == 2


def test_a_letter_without_an_event_is_a_finding() -> None:
    fold = Fold()
    fold.add(T, 0, 0, b"1", event("c", 1, {"id": 1}))
    for letter in split(2).letter:
        fold.add_letter(*letter)
    fold.add_letter(b"nonsense", b"")
    assert [each.split(":")[0] for each in findings(fold)] == [
        "the topic of dead letters holds a record that can't be read",
        "no event points to dead letter 1-2",
    ]


def test_a_pointer_that_differs_from_its_letter_elsewhere_is_a_finding() -> None:
    for old, new in ((b'"op":"c"', b'"op":"u"'), (b'"id":1,', b'"id":3,'), (b"0/100", b"0/101")):
        fold, parts = Fold(), split()
        for letter in parts.letter:
            fold.add_letter(*letter)
        fold.add(T, 0, 0, parts.key, parts.value.replace(old, new))
        assert any("more than what it leaves out" in each for each in findings(fold)), new


def test_what_began_elsewhere_is_folded_as_far_as_the_log_shows_it() -> None:
    """Unknown columns of a table copied past the log are left out; a truncate completes it."""
    fold, update = Fold(complete=lambda *_: False), {"id": 1, "n": 2, "bio": "?"}
    fold.add(T, 0, 0, b"1", event("u", 1, update, unchanged=["bio"]))
    fold.add(T, 0, 1, b"2", event("d", 2, before={"id": 2}))
    fold.add(T, 0, 2, b"2", None)
    fold.add(T, 0, 3, None, event("d", 3, before={"url": "/"}))
    assert fold.tables[T].rows == {b"1": {"id": 1, "n": 2}}
    assert not fold.tables[T].complete
    fold.add(T, 0, 4, None, event("t", 4))
    assert findings(fold) == []
    assert fold.tables[T].complete
    fold.add(T, 0, 5, b"3", event("u", 5, {"id": 3}))
    assert any("updates a row that is not there" in each for each in findings(fold))
