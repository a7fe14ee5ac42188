"""The order of messages, what a key change and a truncate become, and what is refused."""

from __future__ import annotations

import json

import pytest
from msgspec import structs

from cdc.decode.frames import PADDING
from cdc.decode.messages import (
    UNCHANGED,
    Delete,
    Insert,
    KeyTuple,
    LogicalMessage,
    Message,
    OldTuple,
    Origin,
    Relation,
    RelationColumn,
    ReplicaIdentity,
    StreamAbort,
    StreamCommit,
    StreamStart,
    Truncate,
    Type,
    Update,
)
from cdc.errors import CDCError, Exit, GapError, ProtocolError
from cdc.events import LSN
from cdc.sequence.state import LastChange, Pause
from tests.property.played import NOTICE, keepalive
from tests.property.stream import (
    TIME_US,
    Published,
    Session,
    begin,
    chunk,
    commit,
    frame,
    position,
)

ID = RelationColumn(key=True, name="id", type_id=23, type_modifier=-1)
NAME = RelationColumn(key=False, name="name", type_id=25, type_modifier=-1)
USERS = Relation(1, "public", "users", ReplicaIdentity.DEFAULT, (ID, NAME))
LOGS = Relation(2, "public", "logs", ReplicaIdentity.NOTHING, (NAME,))
INSERT = frame(Insert(1, (b"1", b"a")))


def session(**resume: int | bool) -> Session:
    """Return a session that is inside its first transaction, with users described."""
    fresh = Session(position(**resume), {1: ("id",)})  # type: ignore[arg-type]
    fresh.feed([begin(), frame(USERS)])
    return fresh


def ops(published: list[Published]) -> list[tuple[int, str | None]]:
    """Return (seq, op) in that order, tombstones as None after their delete."""
    found: list[tuple[int, str | None]] = []
    for one in published:
        value = json.loads(one.value) if one.value else None
        found.append((value["source"]["seq"] if value else found[-1][0], value and value["op"]))
    return sorted(found, key=lambda pair: (pair[0], pair[1] is None))


# -- order ---------------------------------------------------------------------------------------


OUT_OF_ORDER = {
    "a row before any transaction": [frame(USERS), INSERT],
    "an update before any transaction": [frame(USERS), frame(Update(1, None, (b"1", b"a")))],
    "a delete before any transaction": [frame(USERS), frame(Delete(1, KeyTuple((b"1", None))))],
    "a truncate before any transaction": [
        frame(USERS),
        frame(Truncate((1,), cascade=False, restart_identity=False)),
    ],
    "a row after its transaction": [begin(), frame(USERS), commit(), INSERT],
    "a row of a table that was not described": [begin(), INSERT],
    "a delete of a table that was not described": [begin(), frame(Delete(9, OldTuple(())))],
    "a truncate of a table that was not described": [
        begin(),
        frame(Truncate((1,), cascade=False, restart_identity=False)),
    ],
    "a begin inside a transaction": [begin(), begin(0x3000)],
    "a commit of nothing": [commit()],
    "a commit of another transaction": [begin(0x2000), commit(0x3000)],
    "a commit twice": [begin(), commit(), commit()],
    "a commit that ends before the one before it": [
        begin(0x2000),
        commit(0x2000, 0x5000),
        begin(0x3000),
        commit(0x3000, 0x3008),
    ],
    "a transactional message outside any transaction": [
        frame(LogicalMessage(transactional=True, lsn=LSN(0x900), prefix="p", content=b"c")),
    ],
    "a message of no transaction inside one": [
        begin(),
        frame(LogicalMessage(transactional=False, lsn=LSN(0x900), prefix="p", content=b"c")),
    ],
    "an unknown message": [frame(b"?")],
    "no message": [frame(b"")],
}


@pytest.mark.parametrize("frames", OUT_OF_ORDER.values(), ids=OUT_OF_ORDER)
def test_messages_out_of_order_are_refused(frames: list[bytes]) -> None:
    fresh = Session(position(), {1: ("id",)})
    with pytest.raises(ProtocolError) as raised:
        fresh.feed(frames)
    assert "(at LSN " in raised.value.what
    assert fresh.waiting() == []


def test_an_error_names_the_frames_lsn_and_keeps_what_came_before() -> None:
    fresh = session()
    with pytest.raises(ProtocolError, match="at LSN A/BC"):
        fresh.feed([INSERT, INSERT, frame(b"?", 0xA_0000_00BC), INSERT])
    assert len(fresh.waiting()) == fresh.sequencer.events == 2


@pytest.mark.parametrize(
    "message",
    [
        Insert(1, (b"1",)),
        Insert(1, (b"1", b"a", b"b")),
        Insert(1, (b"1", b"\xff")),
        Update(1, None, (b"1",)),
        Update(1, KeyTuple((b"1",)), (b"2", b"a")),
        Update(1, KeyTuple((b"1", None)), (b"2",)),
        Update(1, OldTuple((b"1", UNCHANGED)), (b"2", b"a")),
        Delete(1, KeyTuple((b"1",))),
        Delete(1, KeyTuple((b"1", None, None))),
        Delete(1, OldTuple((b"1", UNCHANGED))),
    ],
    ids=str,
)
def test_a_row_that_does_not_fit_its_relation_is_refused(message: Message) -> None:
    fresh = session()
    with pytest.raises(ProtocolError):
        fresh.feed([frame(message)])
    assert fresh.waiting() == []
    assert fresh.sequencer.seq == 0
    assert fresh.sequencer.ordinal == 0


def test_rows_with_other_kinds_of_tuples_are_refused() -> None:
    """'K' and 'O' where a new row belongs, 'N' where an old one belongs."""
    complete = frame(Update(1, KeyTuple((b"1", None)), (b"1", b"a")))
    for bad in (
        INSERT[:35] + b"K" + INSERT[36:],
        INSERT[:35] + b"O" + INSERT[36:],
        complete.replace(b"N\x00\x02t", b"K\x00\x02t"),
        complete.replace(b"K\x00\x02t", b"X\x00\x02t"),
        frame(b"D" + INSERT[31:]),
    ):
        fresh = session()
        with pytest.raises(ProtocolError):
            fresh.feed([bad])
        assert fresh.waiting() == []


def test_a_truncate_with_an_unknown_table_publishes_none_of_it() -> None:
    fresh = session()
    with pytest.raises(ProtocolError):
        fresh.feed([frame(Truncate((1, 9), cascade=False, restart_identity=False))])
    assert fresh.waiting() == []
    assert fresh.sequencer.seq == 0


def test_a_key_column_that_was_not_sent_is_refused() -> None:
    """Its placeholder as a key would overwrite another row."""
    fresh = session()
    with pytest.raises(ProtocolError):
        fresh.feed([frame(Update(1, None, (UNCHANGED, b"a")))])
    assert fresh.waiting() == []


# -- the events of changes ------------------------------------------------------------------------


def test_origins_types_and_empty_transactions_publish_nothing() -> None:
    fresh = Session(position(), {})
    empty = [begin(0x3000), commit(0x3000)]
    fresh.feed([begin(), frame(Origin(LSN(0), "o")), frame(Type(90001, "", "mood")), commit()])
    fresh.feed(empty)
    assert fresh.waiting() == []
    assert fresh.sequencer.types == {90001: "mood"}
    assert fresh.sequencer.end_lsn == 0x3008
    assert fresh.sequencer.last_change == LastChange(LSN(0x3000), 0, open=False, xid=771)


def test_types_outside_the_catalog_have_their_schemas_name() -> None:
    fresh = Session(position(), {})
    fresh.feed([begin(), frame(Type(1, "pg_catalog", "a")), frame(Type(2, "shop", "mood"))])
    assert fresh.sequencer.types == {1: "a", 2: "shop.mood"}


def test_a_changed_key_is_a_delete_with_tombstone_and_a_create() -> None:
    fresh = session()
    fresh.feed([frame(Update(1, KeyTuple((b"1", None)), (b"2", b"a")))])
    published = fresh.waiting()
    assert ops(published) == [(1, "d"), (1, None), (2, "c")]
    ordinals = {json.loads(one.value)["source"]["ordinal"] for one in published if one.value}
    assert ordinals == {1}
    assert fresh.sequencer.ordinal == 1


def test_a_key_that_stays_is_an_update() -> None:
    """Postgres also sends the old key if it had only the key's TOAST pointer to compare."""
    fresh = session()
    fresh.feed([frame(Update(1, KeyTuple((b"1", None)), (UNCHANGED, b"a")))])
    [one] = fresh.waiting()
    assert one.value is not None
    event = json.loads(one.value)
    assert (event["op"], event["before"], event["after"]) == (
        "u",
        {"id": 1},
        {"id": 1, "name": "a"},
    )
    assert "unchanged" not in event["source"]


def test_text_equal_to_the_placeholder_is_not_listed_as_unchanged() -> None:
    fresh = session()
    text = b"__debezium_unavailable_value"
    fresh.feed([frame(Update(1, None, (b"1", text))), frame(Update(1, None, (b"1", UNCHANGED)))])
    first, second = (json.loads(one.value or b"") for one in fresh.waiting())
    assert first["after"] == second["after"] == {"id": 1, "name": text.decode()}
    assert "unchanged" not in first["source"]
    assert second["source"]["unchanged"] == ["name"]


def test_a_truncate_is_one_event_a_table_in_partition_0_without_a_key() -> None:
    fresh = session()
    fresh.feed([frame(LOGS), frame(Truncate((2, 1), cascade=True, restart_identity=True))])
    published = fresh.waiting()
    assert {(one.topic, one.partition, one.key) for one in published} == {
        ("shop.public.users", 0, None),
        ("shop.public.logs", 0, None),
    }
    assert ops(published) == [(1, "t"), (2, "t")]
    assert fresh.sequencer.ordinal == 2


def test_a_table_without_a_key_keeps_its_order_in_partition_0() -> None:
    """No key, so no tombstone: it could not name a row."""
    fresh = session()
    complete = Relation(2, "public", "logs", ReplicaIdentity.FULL, (NAME,))
    old = OldTuple((b"a",))
    rows: list[Message] = [Insert(2, (b"a",)), Update(2, old, (b"b",)), Delete(2, old)]
    fresh.feed([frame(complete), *(frame(row) for row in rows)])
    published = fresh.waiting()
    assert ops(published) == [(1, "c"), (2, "u"), (3, "d")]
    assert {(one.partition, one.key) for one in published} == {(0, None)}


def test_a_new_description_holds_from_there_on() -> None:
    fresh = session()
    wider = Relation(1, "public", "users", USERS.replica_identity, (ID, NAME, NAME))
    fresh.feed([INSERT, frame(wider)])
    with pytest.raises(ProtocolError):
        fresh.feed([INSERT])
    fresh.feed([frame(Insert(1, (b"1", b"a", b"b")))])
    assert fresh.sequencer.seq == 3  # with the message that the table was altered


# -- where feed stops ------------------------------------------------------------------------------


def test_feed_stops_after_a_relation_and_returns_it() -> None:
    sequencer = Session(position(), {}).sequencer
    frames = chunk(begin(), frame(USERS), INSERT)
    at, step = sequencer.feed(frames)
    assert (at, step) == (len(begin()) + len(frame(USERS)), USERS)
    with pytest.raises(ProtocolError):
        sequencer.feed(frames, at)


def test_feed_stops_at_a_commit_once_the_batch_is_full() -> None:
    fresh = Session(position(), {1: ("id",)}, max_events=2)
    fresh.feed([begin(), frame(USERS), INSERT, commit()])
    full = [begin(0x3000), INSERT, INSERT, INSERT, commit(0x3000)]
    more = chunk(*full, begin(0x4000), INSERT)
    at, step = fresh.sequencer.feed(more)
    assert (at, step) == (sum(map(len, full)), Pause.FULL)
    fresh.sequencer.start_batch()
    assert fresh.sequencer.feed(more, at) == (len(more) - len(PADDING), Pause.MORE)
    assert fresh.sequencer.events == 1


KEEPALIVE = b"d" + (22).to_bytes(4, "big") + b"k" + bytes(17)


@pytest.mark.parametrize(
    "other", [KEEPALIVE, b"N\0\0\0\x10" + bytes(12), b"w\0\0\0\x30w" + bytes(43)], ids=repr
)
def test_feed_stops_at_a_message_that_is_no_frame(other: bytes) -> None:
    fresh = session()
    before = chunk(INSERT, other, INSERT)
    at, step = fresh.sequencer.feed(before)
    assert (at, step) == (len(INSERT), Pause.OTHER)
    assert fresh.sequencer.feed(before, at + len(other))[1] is Pause.MORE
    assert fresh.sequencer.seq == 2


@pytest.mark.parametrize("last", [NOTICE, NOTICE[:20], keepalive(0x9000), INSERT[:-1]])
def test_only_a_complete_frame_moves_what_was_received(last: bytes) -> None:
    """In a notice the bytes in the place of an LSN are those of a text."""
    fresh = session()
    fresh.sequencer.feed(chunk(INSERT, frame(Insert(1, (b"2", b"b")), 0x1800), last))
    assert fresh.sequencer.received_lsn == 0x1800


def test_feed_hands_over_what_belongs_to_a_streamed_transaction() -> None:
    fresh = session()
    for step in (
        StreamStart(7, first_segment=True),
        StreamCommit(7, LSN(0x2000), LSN(0x2008), TIME_US),
        StreamAbort(7, 8),
    ):
        assert fresh.sequencer.feed(chunk(frame(step), INSERT)) == (len(frame(step)), step)


def test_a_streamed_transactions_rows_are_read_after_their_xids() -> None:
    plain, streamed = session(), session()
    rows: list[Message] = [
        Insert(1, (b"1", b"a"), xid=None),
        Update(1, None, (b"1", UNCHANGED)),
        Update(1, KeyTuple((b"1", None)), (b"2", b"a")),
        Delete(1, KeyTuple((b"2", None))),
        Truncate((1,), cascade=False, restart_identity=False),
    ]
    plain.feed([frame(row) for row in rows])
    block = chunk(*(frame(structs.replace(row, xid=9)) for row in rows))
    assert streamed.sequencer.feed(block, streamed=True)[1] is Pause.MORE
    assert streamed.waiting() == plain.waiting() != []


# -- resume ----------------------------------------------------------------------------------------


def test_a_split_transaction_stays_open_until_its_end_is_read() -> None:
    """Even before its first frame is sent again: a keepalive at that time is not about it."""
    fresh = Session(position(commit_lsn=0x2000, ordinal=2, is_open=True, seq=7), {1: ("id",)})
    places = [fresh.sequencer.last_change]
    for one in (begin(), frame(USERS), INSERT, INSERT, INSERT, commit()):
        fresh.feed([one])
        places.append(fresh.sequencer.last_change)
    held = LastChange(LSN(0x2000), 2, open=True, xid=None)
    more = held._replace(ordinal=3, xid=771)
    assert places == [held, held, held, held, held, more, more._replace(open=False)]
    assert fresh.sequencer.seq == 8


def test_only_what_the_log_holds_of_a_split_transaction_is_skipped() -> None:
    fresh = session(commit_lsn=0x2000, ordinal=3, is_open=True, seq=7)
    replaying = [fresh.sequencer.replaying]
    truncate = frame(Truncate((1,), cascade=False, restart_identity=False))
    removed = frame(Delete(1, KeyTuple((b"1", None))))
    fresh.feed([INSERT, truncate, removed])
    replaying.append(fresh.sequencer.replaying)
    assert replaying == [True, False]
    assert fresh.waiting() == []
    fresh.feed([removed, truncate, INSERT, commit()])
    assert ops(fresh.waiting()) == [(8, "d"), (8, None), (9, "t"), (10, "c")]


def test_a_transaction_that_the_log_holds_is_skipped_completely() -> None:
    fresh = session(end_lsn=0x2008, commit_lsn=0x2000, ordinal=1, seq=7)
    fresh.feed([INSERT, INSERT, commit()])
    assert fresh.waiting() == []
    assert (fresh.sequencer.seq, fresh.sequencer.end_lsn) == (7, 0x2008)


@pytest.mark.parametrize(
    "frames",
    [
        [begin(0x2000), frame(USERS), INSERT, commit(0x2000)],
        [begin(0x3000), frame(USERS), INSERT, commit(0x3000)],
    ],
    ids=["it came shorter", "another came in its place"],
)
def test_a_split_transaction_that_is_sent_again_differently_is_a_gap(frames: list[bytes]) -> None:
    fresh = Session(position(commit_lsn=0x2000, ordinal=2, is_open=True, seq=2), {1: ("id",)})
    with pytest.raises(CDCError) as raised:
        fresh.feed(frames)
    assert isinstance(raised.value, GapError)
    assert raised.value.exit_code is Exit.CONFIG
    assert "cdc teardown --topics" in raised.value.hint
    assert fresh.waiting() == []
