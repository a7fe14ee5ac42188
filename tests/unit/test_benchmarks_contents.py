"""A figure counts only if every event arrived exactly once: checks must see one wrong event."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks.contents import EachIdOnce, GrowingBalances, TheseRows
from benchmarks.drain_bigtx import BigTransaction
from benchmarks.drain_inserts import Inserts
from benchmarks.drain_tpcb import TpcB
from benchmarks.drain_wide import COLUMNS, Wide
from benchmarks.failure import BenchmarkError
from benchmarks.memory_bigtx import LargeRows, SmallRows
from benchmarks.rows import ROWS_PER_TRANSACTION
from benchmarks.workload import Clock

if TYPE_CHECKING:
    from benchmarks.contents import Content
    from benchmarks.workload import Workload

WORKLOADS: tuple[Workload, ...] = (
    Inserts(),
    TpcB(),
    BigTransaction(),
    Wide(),
    SmallRows(),
    LargeRows(),
)

Event = tuple[bytes | None, bytes]


def feed(content: Content, events: list[Event]) -> None:
    for key, value in events:
        content.take(key, value)
    content.complete()


def inserted(row: int) -> Event:
    return b'{"id":%d}' % row, b"{}"


def test_each_id_once_is_complete() -> None:
    feed(EachIdOnce("bench", 3), [inserted(row) for row in (2, 1, 3)])


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        ([1, 2], "2 of 3 events"),
        ([1, 2, 2], "repeat"),
        ([1, 2, 3, 1], "repeat"),
        ([1, 2, 4], "not ours"),
        ([0], "not ours"),
    ],
)
def test_a_missing_repeated_or_strange_row_is_seen(rows: list[int], wrong: str) -> None:
    with pytest.raises(BenchmarkError, match=wrong):
        feed(EachIdOnce("bench", 3), [inserted(row) for row in rows])


def updated(row: int, balance: int, *, op: str = "u") -> Event:
    value = {"op": op, "after": {"aid": row, "abalance": balance}}
    return b'{"aid":%d}' % row, json.dumps(value).encode()


def balances() -> GrowingBalances:
    return GrowingBalances("accounts", ("aid", "abalance"), 3, {1: 30, 2: 5, 9: 0})


def test_growing_balances_are_complete() -> None:
    feed(balances(), [updated(1, 10), updated(2, 5), updated(1, 30)])


@pytest.mark.parametrize(
    ("events", "wrong"),
    [
        ([updated(1, 10), updated(1, 30)], "2 of 3 events"),
        ([updated(1, 10), updated(1, 10)], "repeat"),
        ([updated(1, 30), updated(1, 10)], "is repeated or late"),
        ([updated(1, 10), updated(2, 5), updated(2, 6)], "not the table's"),
        ([updated(1, 10), updated(1, 30), updated(3, 1)], "not the table's"),
        ([updated(1, 10, op="c")], "no update"),
        ([(b'{"aid":2}', updated(1, 10)[1])], "no update"),
    ],
)
def test_a_missing_repeated_or_late_update_is_seen(events: list[Event], wrong: str) -> None:
    with pytest.raises(BenchmarkError, match=wrong):
        feed(balances(), events)


def kept(*row: int, key: bytes | None = None) -> Event:
    value = {"op": "c", "after": dict(zip(("tid", "delta"), row, strict=True))}
    return key, json.dumps(value).encode()


def history() -> TheseRows:
    return TheseRows("history", ("tid", "delta"), [(1, 2), (1, 2), (3, 4)])


def test_these_rows_are_complete_though_two_are_alike() -> None:
    feed(history(), [kept(1, 2), kept(3, 4), kept(1, 2)])


@pytest.mark.parametrize(
    ("events", "wrong"),
    [
        ([kept(1, 2), kept(3, 4)], "2 of 3 events"),
        ([kept(3, 4), kept(3, 4)], "repeat"),
        ([kept(5, 6)], "not ours"),
        ([kept(1, 2, key=b"{}")], "not ours"),
    ],
)
def test_a_missing_or_repeated_row_without_a_key_is_seen(events: list[Event], wrong: str) -> None:
    with pytest.raises(BenchmarkError, match=wrong):
        feed(history(), events)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_a_pinned_backlog_fills_complete_transactions(workload: Workload) -> None:
    assert workload.rows % ROWS_PER_TRANSACTION == 0
    assert workload.tables


def test_one_transaction_is_timed_from_the_slot_on() -> None:
    """A clock from the first record on would miss the server's decoding and our spilling."""
    clocks = {workload.name: workload.clock for workload in WORKLOADS}
    assert clocks["drain-bigtx"] is Clock.SLOT_TAKEN
    assert clocks["drain-inserts"] is Clock.FIRST_RECORD


def test_a_wide_row_has_thirty_columns_of_many_types() -> None:
    assert len(COLUMNS) == 30
    assert len({kind.split("(")[0] for _, kind, _ in COLUMNS}) >= 17
