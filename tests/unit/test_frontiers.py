"""When a frontier is due, and what it contains."""

from __future__ import annotations

from cdc.events import LSN
from cdc.log.frontiers import Frontiers
from tests.property.stream import position

USERS = ("p.public.users", 0)
ORDERS = ("p.public.orders", 3)


def at(lsn: int, seq: int, *, is_open: bool = False) -> Frontiers:
    """Return frontiers after one committed batch: three events of users, one of orders."""
    frontiers = Frontiers("p", 2, position(), {})
    frontiers.add({USERS: 3, ORDERS: 1})
    frontiers.acknowledged(position(end_lsn=lsn, seq=seq, is_open=is_open), {USERS: 17, ORDERS: 5})
    return frontiers


def test_a_frontier_lists_ends_and_counts_in_a_fixed_order() -> None:
    record = at(0x200, 4).take()
    assert record is not None
    assert (record.pipeline, record.epoch, record.lsn, record.seq) == ("p", 2, LSN(0x200), 4)
    assert record.partitions == ((*ORDERS, 5, 1), (*USERS, 17, 3))


def test_nothing_is_due_when_nothing_moved() -> None:
    frontiers = Frontiers("p", 1, position(), {})
    assert not frontiers.due
    assert frontiers.take() is None
    moved = at(0x200, 4)
    due = [moved.due, moved.take() is not None, moved.due, moved.take() is not None]
    assert due == [True, True, False, False]


def test_no_frontier_inside_a_transaction() -> None:
    frontiers = at(0x200, 4, is_open=True)
    assert not frontiers.due
    assert frontiers.take() is None
    assert frontiers.take(LSN(0x900)) is None


def test_events_wait_for_the_frontier_after_the_transactions_end() -> None:
    frontiers = at(0x200, 4, is_open=True)
    assert frontiers.add({USERS: 2}) == ((*ORDERS, 1), (*USERS, 5))
    frontiers.acknowledged(position(end_lsn=0x300, seq=6), {USERS: 20})
    record = frontiers.take()
    assert record is not None
    assert record.partitions == ((*ORDERS, 5, 1), (*USERS, 20, 5))


def test_an_unknown_end_postpones_the_frontier() -> None:
    frontiers = Frontiers("p", 1, position(), {})
    frontiers.add({USERS: 1})
    frontiers.acknowledged(position(end_lsn=0x200, seq=1), {USERS: -1})
    assert not frontiers.due
    assert frontiers.take(LSN(0x900)) is None
    frontiers.add({USERS: 1})
    frontiers.acknowledged(position(end_lsn=0x300, seq=2), {USERS: 4})
    record = frontiers.take()
    assert record is not None
    assert record.partitions == ((*USERS, 4, 2),)


def test_an_end_below_what_was_acknowledged_before_is_a_loss() -> None:
    frontiers = at(0x200, 4)
    assert not frontiers.regressed
    frontiers.add({USERS: 2})
    # Two more records, and yet it ends at the same offset.
    frontiers.acknowledged(position(end_lsn=0x300, seq=6), {USERS: 17})
    assert frontiers.regressed == {USERS: (17, 18)}


def test_a_loss_that_was_outgrown_shows_by_the_count() -> None:
    complete = at(0x200, 4)
    complete.take()
    complete.add({ORDERS: 3})
    complete.acknowledged(position(end_lsn=0x300, seq=7), {ORDERS: 7})
    assert not complete.regressed, "it ends beyond where it ended"
    assert complete.take() is not None
    assert complete.regressed == {ORDERS: (7, 8)}


def test_an_idle_pipelines_frontier_moves_on_without_events() -> None:
    record = Frontiers("p", 1, position(end_lsn=0x200, seq=4), {}).take(LSN(0x900))
    assert record is not None
    assert (record.lsn, record.seq, record.partitions) == (LSN(0x900), 4, ())


def test_a_restart_takes_up_what_no_frontier_covers() -> None:
    resume = position(end_lsn=0x200, seq=4, pending=((*USERS, 3),))
    frontiers = Frontiers("p", 1, resume, {USERS: 18})
    record = frontiers.take()
    assert record is not None
    assert (record.lsn, record.seq, record.partitions) == (LSN(0x200), 4, ((*USERS, 18, 3),))
    assert frontiers.add({}) == ()
