"""What must have arrived: each change exactly once, from any subject.

A content takes a topic's events in the order of each partition, and raises at the first that is
impossible; `complete` raises if any is missing. Both are checked against the source: ids that were
inserted, balances that only grow, rows as the table holds them.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, Protocol

import orjson

from benchmarks.failure import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_ID: Final = re.compile(rb'"id":\s*(\d+)')


class Content(Protocol):
    """The events that one table's topic must hold."""

    def take(self, key: bytes | None, value: bytes) -> None:
        """Count one event; raise BenchmarkError if it is a repeat, out of order, or not ours."""
        ...

    def complete(self) -> None:
        """Raise BenchmarkError unless every event was there."""
        ...


class EachIdOnce:
    """A create of each id from 1 to `rows`."""

    def __init__(self, table: str, rows: int) -> None:
        self._table = table
        self._rows = rows
        self._seen = bytearray(rows + 1)
        self._events = 0

    def take(self, key: bytes | None, value: bytes) -> None:  # noqa: ARG002 - the key is enough
        number = row_id(key)
        if not 1 <= number <= self._rows or self._seen[number]:
            raise _wrong(self._table, f"an event of row {number} is a repeat or not ours")
        self._seen[number] = 1
        self._events += 1

    def complete(self) -> None:
        _all(self._table, self._events, self._rows)


class GrowingBalances:
    """Updates, each of which raises its row's balance, up to the balances that the table holds.

    So every event of a row differs from every other and their order is known: growing balances, one
    for each update, prove each update exactly once and in order.
    """

    def __init__(
        self, table: str, columns: tuple[str, str], updates: int, final: Mapping[int, int]
    ) -> None:
        self._table = table
        self._id, self._balance = columns
        self._updates = updates
        self._final = {row: balance for row, balance in final.items() if balance}
        self._balances: dict[int, int] = {}
        self._events = 0

    def take(self, key: bytes | None, value: bytes) -> None:
        event = orjson.loads(value)
        after = event["after"]
        row, balance = after[self._id], after[self._balance]
        if event["op"] != "u" or orjson.loads(key or b"{}") != {self._id: row}:
            raise _wrong(self._table, f"an event of row {row} is no update of it")
        if balance <= self._balances.get(row, 0):
            raise _wrong(self._table, f"an event of row {row} is repeated or late")
        self._balances[row] = balance
        self._events += 1

    def complete(self) -> None:
        _all(self._table, self._events, self._updates)
        if self._balances != self._final:
            raise _wrong(self._table, "the last balances are not the table's")


class TheseRows:
    """A create of each of these rows, identified by some of their columns.

    For a table without a key.
    """

    def __init__(
        self, table: str, columns: tuple[str, ...], rows: Iterable[tuple[Any, ...]]
    ) -> None:
        self._table = table
        self._columns = columns
        self._missing = Counter(rows)
        self._rows = self._missing.total()
        self._events = 0

    def take(self, key: bytes | None, value: bytes) -> None:
        event = orjson.loads(value)
        after = event["after"]
        row = tuple(after[column] for column in self._columns)
        if key is not None or event["op"] != "c" or not self._missing[row]:
            raise _wrong(self._table, "an event is a repeat or not ours")
        self._missing[row] -= 1
        self._events += 1

    def complete(self) -> None:
        _all(self._table, self._events, self._rows)


def row_id(key: str | bytes | None) -> int:
    """Return the id in a key like {"id":7}; -1 for a key of another form."""
    found = _ID.search(key if isinstance(key, bytes) else b"")
    return int(found.group(1)) if found else -1


def _all(table: str, events: int, expected: int) -> None:
    if events != expected:
        raise _wrong(table, f"{events:,} of {expected:,} events are there")


def _wrong(table: str, what: str) -> BenchmarkError:
    return BenchmarkError(
        f"table {table}: {what}",
        hint="the figure would not count: look for a replay or an error in the subject's log",
    )
