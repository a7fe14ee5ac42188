"""A chunk is published once, complete and with all changes since its low watermark, or discarded.

Any events in any order, also copies of watermarks, and everything that is on its way when the chunk
is dropped.
"""

from __future__ import annotations

from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cdc.events import LSN
from cdc.log.records import SchemaColumn, SchemaRecord
from cdc.snapshot.incremental.chunk_state import (
    AwaitCommit,
    Committing,
    Discarded,
    Dropped,
    Effect,
    Event,
    Fail,
    High,
    HighReached,
    Low,
    LowReached,
    Publish,
    Published,
    Read,
    ReadOn,
    RecordChanges,
    Requested,
    Restart,
    Retry,
    RowsRead,
    State,
    StopRecording,
    advance,
)
from cdc.snapshot.incremental.reconcile import MAX_CHANGES, RowChange
from cdc.snapshot.incremental.records import TableName
from cdc.source import described
from cdc.source.chunks import Chunk
from cdc.source.lookups import SentTable as PublishedTable
from cdc.source.lookups import TableFacts

TABLE = TableName("public", "wide")
DESCRIBED = described.DescribedTable(
    oid=7, schema="public", name="wide", replica_identity="d",
    columns=(described.SentColumn("id", 20, -1, key=True),), types={}, outputs=("id",),
    facts=TableFacts(("id",), {"id": False}), published=PublishedTable((), None), heaps=(),
)  # fmt: skip
VERSION = SchemaRecord(
    schema_id=3, relation_id=7, schema="public", table="wide", topic="t", from_lsn=LSN(1),
    replica_identity="d", key=("id",),
    columns=(SchemaColumn(name="id", type="int8", type_id=20, type_modifier=-1, nullable=False),),
)  # fmt: skip
# It saw the transactions below 100 but 90.
CHUNK = Chunk(DESCRIBED, ("id",), "90:100:90", [b"row"], ("9",), ended=False, bytes=3, seconds=0.1)
LOW = LowReached(0x100, 7, VERSION.schema_id)
HIGH = HighReached(0x200, {}, VERSION)
COMMITTING = Committing(VERSION, TABLE, None)

events = st.sampled_from(
    [
        *(LOW, LOW, RowsRead(CHUNK), RowsRead(CHUNK), HIGH, HIGH, COMMITTING, Dropped()),
        LowReached(0x180, 7, 4),
        HighReached(0x200, {90: 0x80}, VERSION),
        HighReached(0x200, {90: 0x180, 50: 0x80}, VERSION),
        HighReached(0x200, {}, None),
        HighReached(0x200, {}, replace(VERSION, schema_id=4, replica_identity="f")),
        Committing(replace(VERSION, key=("other",)), TABLE, None),
        Committing(VERSION, TableName("public", "old"), None),
        Committing(VERSION, TABLE, ("other",)),
    ]
)
E = TypeVar("E")


def run(given_events: list[Event]) -> tuple[State, list[Effect]]:
    state: State = Requested()
    effects: list[Effect] = []
    for event in given_events:
        # The stream has one high watermark of a chunk, after its low one and its rows.
        if isinstance(event, HighReached) and isinstance(state, Requested | Low):
            continue
        state, more = advance(state, event)
        effects += more
    return state, effects


def of(kind: type[E], effects: list[Effect]) -> list[E]:
    return [each for each in effects if isinstance(each, kind)]


@given(st.lists(events, max_size=20))
def test_whatever_arrives_a_chunk_is_published_once_or_discarded(found: list[Event]) -> None:
    state, effects = run(found)
    assert len(of(Publish, effects)) == isinstance(state, Published)
    ended = [*of(Retry, effects), *of(Restart, effects), *of(Fail, effects)]
    assert len(ended) <= isinstance(state, Discarded)
    assert len(of(ReadOn, effects)) <= 1
    assert len(of(AwaitCommit, effects)) <= 1
    if isinstance(state, Published | Discarded):
        for event in (LOW, RowsRead(CHUNK), HIGH, COMMITTING, Dropped()):
            assert advance(state, event) == (state, ())


@given(st.lists(events, max_size=20))
def test_changes_are_recorded_from_the_low_watermark_to_the_high_one(found: list[Event]) -> None:
    state, effects = run(found)
    started, stopped = of(RecordChanges, effects), of(StopRecording, effects)
    assert len(started) <= 1
    assert len(started) - len(stopped) == isinstance(state, Low | Read)
    for one, other in zip(started, stopped, strict=False):
        assert one.changes is other.changes
    for published in of(Publish, effects):
        assert published.changes is started[0].changes
        assert published.chunk is CHUNK


def test_rows_that_arrive_before_the_low_watermark_are_kept() -> None:
    orders: tuple[list[Event], ...] = ([LOW, RowsRead(CHUNK)], [RowsRead(CHUNK), LOW])
    for order in orders:
        state, effects = run(order)
        assert isinstance(state, Read)
        assert (state.chunk, state.low.lsn) == (CHUNK, LOW.lsn)
        assert len(effects) == 2


def test_a_copy_of_the_low_watermark_is_ignored() -> None:
    """From a later one on, changes between the two would be missing."""
    state, effects = run([LOW, LowReached(0x180, 7, 4), RowsRead(CHUNK)])
    assert isinstance(state, Read)
    assert state.low.lsn == LOW.lsn
    assert len(of(RecordChanges, effects)) == 1


@pytest.mark.parametrize(
    ("high", "outcome"),
    [
        (HIGH, AwaitCommit),
        (HighReached(0x200, {90: LOW.lsn - 1}, VERSION), Retry),  # it may have changed a row
        (HighReached(0x200, {90: LOW.lsn + 1}, VERSION), AwaitCommit),  # so it was recorded
        (HighReached(0x200, {50: LOW.lsn - 1}, VERSION), AwaitCommit),  # the SELECT saw it
        (HighReached(0x200, {}, replace(VERSION, schema_id=4, replica_identity="f")), Retry),
    ],
)
def test_a_chunk_is_read_again_where_the_stream_may_know_more(
    high: HighReached, outcome: type[Effect]
) -> None:
    state, effects = run([LOW, RowsRead(CHUNK), high])
    assert len(of(outcome, effects)) == 1
    assert isinstance(state, Discarded if outcome is Retry else High)
    assert len(of(AwaitCommit, effects)) == (outcome is not Retry)


@pytest.mark.parametrize("version", [None, replace(VERSION, replica_identity="f")])
def test_a_table_is_described_as_the_select_found_it(version: SchemaRecord | None) -> None:
    """Where the stream has not described it, or before its replica identity changed."""
    state, effects = run([LOW, RowsRead(CHUNK), HighReached(0x200, {}, version)])
    assert isinstance(state, High)
    assert of(AwaitCommit, effects) == [AwaitCommit(CHUNK)]


def test_a_chunk_with_too_many_changes_is_read_again() -> None:
    state, effects = run([LOW, RowsRead(CHUNK)])
    changes = of(RecordChanges, effects)[0].changes
    for xid in range(MAX_CHANGES + 2):
        changes.add(RowChange(xid, None, b"key"))
    state, after = advance(state, HIGH)
    assert state == Discarded()
    assert len(of(Retry, [*after])) == 1


@pytest.mark.parametrize(
    ("committing", "outcome"),
    [
        (COMMITTING, Publish),
        (Committing(VERSION, TABLE, ("id",)), Publish),
        (Committing(replace(VERSION, key=("other",)), TABLE, None), Fail),
        (Committing(VERSION, TableName("public", "old"), None), Restart),
        (Committing(VERSION, TABLE, ("other",)), Restart),
    ],
)
def test_a_chunk_is_published_only_under_the_table_and_key_of_the_snapshot(
    committing: Committing, outcome: type[Effect]
) -> None:
    state, effects = run([LOW, RowsRead(CHUNK), HIGH, committing])
    assert len(of(outcome, effects)) == 1
    assert state == (Published() if outcome is Publish else Discarded())


def test_a_chunk_that_is_dropped_at_its_high_watermark_is_not_published() -> None:
    state, effects = run([LOW, RowsRead(CHUNK), HIGH, Dropped(), COMMITTING])
    assert state == Discarded()
    assert not of(Publish, effects)
