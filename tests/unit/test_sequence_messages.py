"""Logical messages and origins among the changes."""

from __future__ import annotations

import json

from cdc.decode.messages import LogicalMessage, Origin
from cdc.events import LSN
from tests.property.stream import TIME_US, Session, begin, commit, frame, position
from tests.unit.test_sequence import INSERT, USERS, ops, session


def message(content: bytes, lsn: int, *, transactional: bool) -> bytes:
    return frame(LogicalMessage(transactional, LSN(lsn), "audit", content), lsn)


def test_a_logical_message_is_an_event_among_its_transactions_changes() -> None:
    fresh = session()
    fresh.feed([INSERT, message(b"\x00\xff", 0x1500, transactional=True), INSERT, commit()])
    published = fresh.waiting()
    assert ops(published) == [(1, "c"), (2, "m"), (3, "c")]
    [output] = [one for one in published if one.topic == "shop.cdc.messages"]
    event = json.loads(output.value or b"")
    assert output.key == b'{"prefix":"audit"}'
    assert event["message"] == {"prefix": "audit", "transactional": True, "content": "AP8="}
    source = event["source"]
    assert (source["ordinal"], source["commit_lsn"], source["txId"]) == (2, "0/2000", 771)


def test_a_message_outside_any_transaction_is_between_two_and_is_published_once() -> None:
    """Its position is its end in the WAL, where the next commit record may start: ordinal 0."""
    frames = [
        begin(), frame(USERS), INSERT, commit(),
        message(b"x", 0x3000, transactional=False),
        begin(0x3000), INSERT, commit(0x3000),
    ]  # fmt: skip
    fresh = Session(position(), {1: ("id",)})
    fresh.feed(frames)
    published = fresh.waiting()
    assert ops(published) == [(1, "c"), (2, "m"), (3, "c")]
    [event] = [json.loads(one.value or b"") for one in published if "messages" in one.topic]
    assert (event["source"]["commit_lsn"], event["source"]["ordinal"]) == ("0/3000", 0)
    assert event["source"]["txId"] is None
    assert event["ts_us"] == TIME_US
    again = Session(position(end_lsn=0x3000, commit_lsn=0x3000, seq=2), {1: ("id",)})
    again.feed(frames)
    assert ops(again.waiting()) == [(3, "c")]


def test_a_message_before_any_transaction_has_the_time_that_the_resume_record_says() -> None:
    """Even if that is zero: the event's value is a JSON number all the same."""
    for us in (0, 7, TIME_US):
        fresh = Session(position(committed_at_us=us), {})
        fresh.feed([message(b"x", 0x3000, transactional=False)])
        [event] = [json.loads(one.value or b"") for one in fresh.waiting()]
        assert (event["ts_ms"], event["ts_us"], event["ts_ns"]) == (us // 1_000, us, us * 1_000)
        assert event["source"]["ts_ns"] == us * 1_000


def test_an_origin_is_named_in_each_event_of_its_transaction() -> None:
    fresh = Session(position(), {1: ("id",)})
    far = frame(Origin(LSN(0x77), 'sub"1'))
    fresh.feed([begin(), far, frame(USERS), INSERT, commit(), begin(0x3000), INSERT])
    first, second = (json.loads(one.value or b"")["source"] for one in fresh.waiting())
    assert first["origin"] == 'sub"1'
    assert "origin" not in second
