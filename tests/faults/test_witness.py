"""The oracle itself: a log with one event too few, too many or out of place does not pass."""

from __future__ import annotations

from collections.abc import Callable

import orjson
import pytest

from tests.fixtures import witness as oracle
from tests.fixtures.daemon import NewPipeline, wait_until
from tests.fixtures.load import TABLES, Load
from tests.fixtures.witness import Difference, Record, Witness

Forgery = Callable[[list[Record]], list[Record]]


def _drop(records: list[Record]) -> list[Record]:
    return records[:50] + records[51:]


def _double(records: list[Record]) -> list[Record]:
    return [*records, records[50]]


def _swap(records: list[Record]) -> list[Record]:
    """Exchange the seqs of two events of one table, from different transactions."""
    one, other = records[10], records[60]
    a, b = one.event["source"]["seq"], other.event["source"]["seq"]
    return [
        _renumbered(record, {a: b, b: a}) if record in (one, other) else record
        for record in records
    ]


def _renumbered(record: Record, numbers: dict[int, int]) -> Record:
    event = record.event
    event["source"]["seq"] = numbers[event["source"]["seq"]]
    return record._replace(value=orjson.dumps(event))


def test_a_log_with_one_event_wrong_does_not_pass(
    pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = pipeline(*TABLES)
    witness = Witness(line)
    line.start().wait_ready()
    with Load(line.database.dsn, seed=1) as load:
        wait_until(lambda: load.commits > 100, "no load")
    witness.check()
    true = [record for record in oracle.data_records(line) if record.value is not None]
    assert {"c", "u", "d"} <= {record.event["op"] for record in true}

    def forged(forgery: Forgery) -> Difference:
        monkeypatch.setattr(oracle, "data_records", lambda _line: forgery(true))
        return witness.difference()

    assert forged(list)[:3] == (0, 0, 0)
    assert forged(_drop).lost > 0
    assert forged(_double).duplicate > 0
    assert any(forged(_swap)[:3])
