"""The compiled encoders against a slow reading of the contract, and against malformed bytes."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.decode.messages import Relation
from cdc.errors import ProtocolError
from cdc.events import LSN
from cdc.log import names
from cdc.sequence.state import Pause
from tests.property import reference
from tests.property.pgoutput_writer import encode
from tests.property.reference import Described, EventPlace, Expected, RowMessage
from tests.property.rows import Table, messages, tables
from tests.property.stream import (
    PARTITIONS,
    TIME_US,
    Published,
    Session,
    begin,
    chunk,
    frame,
    position,
)

LSN_OF_ROW = 0x1_0000_1000


@st.composite
def cases(draw: st.DrawFn) -> tuple[Table, list[RowMessage]]:
    table = draw(tables())
    return table, draw(st.lists(messages(table), min_size=1, max_size=4))


@st.composite
def row_cases(draw: st.DrawFn) -> tuple[Table, RowMessage]:
    table = draw(tables())
    return table, draw(messages(table))


def session_in_transaction(table: Table) -> Session:
    relation = table.relation
    session = Session(position(), {relation.relation_id: table.primary_key})
    session.feed([begin(), frame(relation)])
    return session


def parsed(text: bytes | None) -> Any:  # noqa: ANN401 - any JSON
    """Return a JSON text's value; members keep their order, and no name may occur twice."""
    if text is None:
        return None

    def distinct(members: list[tuple[str, object]]) -> dict[str, object]:
        assert len(dict(members)) == len(members)
        return dict(members)

    return json.loads(text, object_pairs_hook=distinct)


def expected_records(table: Table, rows: list[RowMessage]) -> list[Expected]:
    described = Described(table.relation, table.key, schema_id=1, partitions=PARTITIONS)
    expected: list[Expected] = []
    seq = 1
    for ordinal, message in enumerate(rows, 1):
        place = EventPlace(LSN_OF_ROW, LSN(0x2000), TIME_US, 771, ordinal, seq)
        records = reference.events(message, described, place)
        seq += sum(record.value is not None for record in records)
        expected += records
    return expected


def in_order(published: list[Published]) -> list[Expected]:
    """Return the records in the order of seq, each tombstone after its event."""
    found, seq = [], 0
    for number, record in enumerate(published):
        value = parsed(record.value)
        seq = value["source"]["seq"] if value else seq
        found.append((seq, number, Expected(parsed(record.key), value)))
    return [record for _, _, record in sorted(found, key=lambda one: one[:2])]


@given(cases())
def test_events_follow_the_contract(case: tuple[Table, list[RowMessage]]) -> None:
    table, rows = case
    session = session_in_transaction(table)
    session.feed([frame(row, LSN_OF_ROW) for row in rows])
    published = session.waiting()
    assert in_order(published) == expected_records(table, rows)
    topic = names.data_topic("shop", table.relation.namespace, table.relation.name)
    for one in published:
        assert one.topic == topic
        assert one.partition == reference.partition_of(one.key, PARTITIONS)
        # The key's columns in the key's order, the row's in the table's.
        assert one.key is None or tuple(parsed(one.key)) == table.key
        after = parsed(one.value)["after"] if one.value else None
        assert after is None or [*after] == [column.name for column in table.relation.columns]
    assert session.batch.bytes == sum(len(one.value or b"") for one in published)
    # Frontiers count events, so tombstones must not be among them.
    events = Counter((one.topic, one.partition) for one in published if one.value is not None)
    assert session.batch.close() == events
    assert events.total() == session.sequencer.seq


@given(row_cases())
def test_every_strict_prefix_raises(case: tuple[Table, RowMessage]) -> None:
    table, row = case
    complete = encode(row)
    session = session_in_transaction(table)
    for length in range(len(complete)):
        with pytest.raises(ProtocolError):
            session.feed([frame(complete[:length], LSN_OF_ROW)])
        assert session.sequencer.seq == 0
        assert session.waiting() == []


@given(row_cases())
def test_an_incomplete_frame_is_left_for_the_next_read(case: tuple[Table, RowMessage]) -> None:
    table, row = case
    complete = frame(row, LSN_OF_ROW)
    session = session_in_transaction(table)
    for length in range(len(complete)):
        assert session.sequencer.feed(chunk(complete[:length])) == (0, Pause.MORE)
        assert session.sequencer.feed(chunk(b"xyz", complete[:length]), 3) == (3, Pause.MORE)
    assert session.sequencer.seq == session.sequencer.ordinal == 0
    assert session.waiting() == []


@given(row_cases(), st.binary(min_size=1, max_size=9))
def test_every_trailing_byte_raises(case: tuple[Table, RowMessage], trailing: bytes) -> None:
    table, row = case
    session = session_in_transaction(table)
    with pytest.raises(ProtocolError):
        session.feed([frame(encode(row) + trailing, LSN_OF_ROW)])
    assert session.waiting() == []


@given(row_cases(), st.data())
def test_mutated_rows_encode_something_or_raise(
    case: tuple[Table, RowMessage], data: st.DataObject
) -> None:
    table, row = case
    payload = bytearray(encode(row))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(1, len(payload) - 1))
        payload[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    session = session_in_transaction(table)
    try:
        session.feed([frame(bytes(payload), LSN_OF_ROW)])
    except ProtocolError:
        assert session.sequencer.seq == 0
    else:
        events = [r for r in session.waiting() if r.value is not None]
        assert len(events) == session.sequencer.seq


@given(row_cases(), st.binary(max_size=60), st.sampled_from(b"IUD"))
def test_random_rows_encode_something_or_raise(
    case: tuple[Table, RowMessage], rest: bytes, tag: int
) -> None:
    table, _ = case
    session = session_in_transaction(table)
    head = bytes([tag]) + table.relation.relation_id.to_bytes(4, "big")
    try:
        session.feed([frame(head + rest, LSN_OF_ROW)])
    except ProtocolError:
        assert session.waiting() == []


@given(tables())
def test_a_relation_message_written_and_read_gives_the_key_in_key_order(table: Table) -> None:
    session = Session(position(), {table.relation.relation_id: table.primary_key})
    session.feed([begin()])
    _, relation = session.sequencer.feed(chunk(frame(table.relation)))
    assert isinstance(relation, Relation)
    version = session.describe(relation)
    assert version.key == table.key
    assert [column.name for column in version.columns] == [
        column.name for column in table.relation.columns
    ]
