"""The worked example of `jobs.cuts.in_order`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lockstep.jobs.cuts.in_order import in_order
from lockstep.jobs.cuts.reduce import Bounds, Reduced

UNSENT = "__debezium_unavailable_value"
STORED = b'{"id":1,"n":1,"big":"stored"}'


def event(seq: int, op: str, ordinal: int, row: dict[str, Any] | None = None) -> bytes:
    unchanged = [name for name, value in (row or {}).items() if value == UNSENT]
    source = {
        "seq": seq,
        "commit_lsn": "0/100",
        "ordinal": ordinal,
        "schema_id": 1,
        "ts_us": 0,
        "unchanged": unchanged,
    }
    return json.dumps({"op": op, "source": source, "before": None, "after": row}).encode()


def reduced(*, complete_rows: bool) -> Reduced:
    """Reduce the example, given in another order than that of `seq`."""
    events = [
        (b"5", event(9, "c", 2, {"id": 5, "n": 2, "big": UNSENT})),
        (b"5", event(10, "u", 3, {"id": 5, "n": 3, "big": UNSENT})),
        (b"1", event(7, "u", 1, {"id": 1, "n": 2, "big": UNSENT})),
        (b"1", event(8, "d", 2)),
    ]
    partitions = [([key], [value]) for key, value in events]
    return in_order(
        partitions,
        Bounds(6, 10),
        letter=lambda _: b"",
        rows=lambda keys, _: {key: STORED for key in keys if key == b"1"},
        complete_rows=complete_rows,
    )


@pytest.mark.parametrize("complete_rows", [False, True])
def test_a_row_takes_what_was_not_sent_along_to_its_other_key(*, complete_rows: bool) -> None:
    deleted, moved = reduced(complete_rows=complete_rows).changes
    assert (deleted.key, deleted.seq, deleted.row) == (b"1", 8, None)
    assert (moved.key, moved.seq, moved.unchanged) == (b"5", 10, ())
    assert moved.row is not None
    assert json.loads(moved.row) == {"id": 5, "n": 3, "big": "stored"}


def test_the_stored_row_is_read_before_it_is_deleted() -> None:
    assert reduced(complete_rows=False).taken == {b"5": {b"1"}}
