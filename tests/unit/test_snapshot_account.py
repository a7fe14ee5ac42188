"""The snapshot campaign's checker works: it reports every wrong history, and no right one."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from cdc.events import LSN
from tests.faults.snapshot_account import _partitions, _Rows, _seqs
from tests.fixtures.witness import Record

History = list[tuple[Any, ...]]

# op, key, n, transaction and ordinal; ordinal 0 is the initial snapshot's.
RIGHT: History = [
    ("r", 1, 5, 0, 0),
    ("r", 2, 1, 0, 0),
    ("u", 1, 6, 7, 1),
    ("d", 2, None, 8, 1),
    ("d", 1, None, 9, 1),
    ("c", 3, 7, 9, 1),  # the key of 1 changed
    ("r", 3, 7, 10, 1),  # read again
    ("c", 2, 1, 11, 1),
]
WRONG: dict[str, History] = {
    "a change in snapshot and stream": [("r", 1, 6, 0, 0), ("u", 1, 6, 7, 1)],
    "a change in neither": [("r", 1, 5, 0, 0), ("u", 1, 7, 7, 1)],
    "a row in neither": [("u", 1, 2, 7, 1)],
    "a delete of what was not there": [("d", 1, None, 7, 1)],
    "a row that stayed of an older generation": [("r", 1, 1, 0, 0), ("c", 1, 1, 7, 1)],
    "a changed key that lost a version": [
        ("r", 1, 1, 0, 0),
        ("d", 1, None, 7, 1),
        ("c", 2, 9, 7, 1),
    ],
    "a row read too early": [("r", 1, 1, 0, 0), ("u", 1, 2, 7, 1), ("r", 1, 1, 8, 1)],
    "a row read too late": [("r", 1, 1, 0, 0), ("r", 1, 2, 8, 1), ("u", 1, 2, 9, 1)],
    "a row come back": [("r", 1, 1, 0, 0), ("d", 1, None, 7, 1), ("r", 1, 1, 8, 1)],
}


def records(history: History) -> list[Record]:
    found = []
    for seq, (op, key, n, xid, ordinal) in enumerate(history, 1):
        snapshot = "true" if op == "r" else "false"
        source = {"seq": seq, "txId": xid or None, "ordinal": ordinal, "snapshot": snapshot}
        event = {"op": op, "source": source, "after": None if n is None else {"n": n}}
        found.append(Record("t", 0, seq, str(key).encode(), orjson.dumps(event)))
    return found


def reported(history: History, *, complete: bool = True) -> list[str]:
    rows = _Rows(complete=complete)
    for record in records(history):
        rows.take(record, record.event)
    return rows.wrong


def test_a_correct_history_has_no_finding() -> None:
    assert reported(RIGHT) == []
    assert reported([("u", 1, 4, 7, 1), ("r", 2, 9, 8, 1), ("u", 1, 5, 9, 1)], complete=False) == []


@pytest.mark.parametrize("name", WRONG)
def test_an_incorrect_history_is_a_finding(name: str) -> None:
    assert reported(WRONG[name])


def test_what_a_log_never_knew_may_be_read_but_not_come_back() -> None:
    assert len(reported([("d", 1, None, 7, 1), ("r", 1, 3, 8, 1)], complete=False)) == 1


@pytest.mark.parametrize(
    ("by_point", "streamed"),
    [
        ({LSN(1): [1, 2], LSN(5): [2, 3]}, [4]),  # twice, and a generation below the previous one
        ({LSN(1): [1, 4]}, [3, 4]),
        ({LSN(1): [1]}, [2, 4]),  # a hole in the stream
        ({LSN(1): [9]}, [2]),
    ],
)
def test_seqs_that_meet_or_lack_are_findings(
    by_point: dict[LSN, list[int]], streamed: list[int]
) -> None:
    findings: list[str] = []
    _seqs({LSN(1): [1, 7], LSN(5): [9]}, [10, 11], findings)
    assert findings == []
    _seqs(by_point, streamed, findings)
    assert findings


def test_a_key_out_of_order_or_in_two_partitions_is_a_finding() -> None:
    right = records(RIGHT)
    findings: list[str] = []
    _partitions(right, findings)
    assert findings == []
    _partitions([right[2], right[0]], findings)
    _partitions([right[0], right[2]._replace(partition=1)], findings)
    assert len(findings) == 2
