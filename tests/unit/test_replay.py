"""What Postgres sends again shows whether it is the server that the log comes from. Pure."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from cdc.errors import Exit, GapError
from cdc.events import LSN
from cdc.sequence.replay import SessionReplay
from tests.property.stream import position

TIME = 1_000
# The log's last transaction committed at 400; then the slot advanced, idle, to 900.
LOG = replace(
    position(end_lsn=0x900, commit_lsn=0x400, ordinal=2, seq=7, committed_at_us=TIME),
    xid=771,
    origin="any",
)


def replay(begins_at: int = 0x200, **changed: object) -> SessionReplay:
    return SessionReplay(replace(LOG, **changed), begins_at, "any")


def test_the_same_history_is_proven_when_the_end_of_the_log_is_reached() -> None:
    sent = replay()
    sent.transaction(0x300, 5, 700)
    sent.transaction(0x400, TIME, 771)
    assert not sent.proven
    sent.reached()
    assert sent.proven


@pytest.mark.parametrize(
    ("commit_lsn", "us", "xid", "words"),
    [
        (0x400, TIME, 772, "transaction 772 where the log holds transaction 771"),
        (0x400, TIME + 1, 771, "where the log holds"),
        (0x500, TIME, 772, "which the log does not hold"),
        (0x8FF, TIME, 772, "which the log does not hold"),
        (0x900, TIME, 772, "the log's last transaction, 771, is not in what Postgres sends"),
    ],
    ids=["another xid", "another time", "after the last", "before the end", "none came"],
)
def test_another_history_is_a_gap(commit_lsn: int, us: int, xid: int, words: str) -> None:
    with pytest.raises(GapError, match=words) as reported:
        replay().transaction(commit_lsn, us, xid)
    assert reported.value.exit_code == Exit.CONFIG
    assert "restored" in str(reported.value)


def test_an_end_that_is_reached_without_the_last_transaction_is_a_gap() -> None:
    with pytest.raises(GapError, match="is not in what Postgres sends"):
        replay().reached()


def test_a_slot_that_begins_after_the_last_transaction_does_not_send_it() -> None:
    sent = replay(begins_at=0x401)
    sent.transaction(0x900, TIME, 800)
    assert sent.proven
    with pytest.raises(GapError, match="which the log does not hold"):
        replay(begins_at=0x401).transaction(0x700, TIME, 800)


def test_a_transaction_that_is_cut_is_known_by_its_xid() -> None:
    """No record before its end has its commit time."""
    cut: dict[str, Any] = {"open": True, "end_lsn": LSN(0x300)}
    sent = replay(**cut)
    sent.transaction(0x400, TIME + 5, 771)
    sent.transaction(0x500, TIME, 772)
    assert sent.proven
    with pytest.raises(GapError, match="transaction 9 where"):
        replay(**cut).transaction(0x400, TIME, 9)


@pytest.mark.parametrize("changed", [{"xid": None}, {"origin": "none"}])
def test_a_record_that_says_nothing_of_it_has_nothing_to_compare(
    changed: dict[str, Any],
) -> None:
    assert replay(**changed).proven


def test_after_a_message_of_no_transaction_nothing_may_come_that_the_log_lacks() -> None:
    sent = replay(xid=0)
    sent.message(0x400)
    with pytest.raises(GapError, match="which the log does not hold"):
        sent.transaction(0x600, TIME, 800)
    sent.reached()
    assert sent.proven


def test_a_message_that_is_the_logs_last_change_must_come_again() -> None:
    """A canary is written every few seconds, so it mostly is the last."""
    for lsn in (0x300, 0x401):
        sent = replay(xid=0)
        sent.message(lsn)
        sent.transaction(0x380, TIME, 700)
        with pytest.raises(GapError, match="last change, a message, is not in what Postgres sends"):
            sent.transaction(0x900, TIME, 800)
    lagging = replay(xid=0, begins_at=0x400)  # its LSN is its end, so the slot has passed it
    lagging.reached()
    assert lagging.proven
    sent = replay()
    sent.message(0x400)
    with pytest.raises(GapError, match="771, is not in what Postgres sends"):
        sent.reached()


def test_a_transaction_that_the_log_holds_in_part_ends_after_the_records_end() -> None:
    """What is sent between that end and its commit proves nothing."""
    sent = replay(open=True, end_lsn=0x300, begins_at=0x300)
    sent.transaction(0x380, 5, 700)
    assert not sent.proven
    assert sent.end_lsn > 0x400
    sent.transaction(0x400, 0, 771)
    sent.transaction(0x500, 9, 772)
    assert sent.proven
