"""One table of messages and their bytes, written by hand from the manual, and what is refused."""

from __future__ import annotations

from typing import get_args

import pytest

from cdc.decode.messages import (
    UNCHANGED,
    Begin,
    BeginPrepare,
    Binary,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    KeyTuple,
    LogicalMessage,
    Message,
    OldTuple,
    Origin,
    Prepare,
    Relation,
    RelationColumn,
    ReplicaIdentity,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    Update,
)
from cdc.decode.pgoutput import decode
from cdc.errors import ProtocolError
from cdc.events import LSN
from tests.property.pgoutput_writer import encode

LSN_1, LSN_2 = LSN.parse("1/A"), LSN.parse("1/B")
HEX_LSN_1, HEX_LSN_2 = "00000001 0000000A ", "00000001 0000000B "

# 2000-01-01 and one microsecond before, in Unix microseconds.
TIME_1, TIME_2 = 946_684_800_000_000, 946_684_799_999_999
HEX_TIME_1, HEX_TIME_2 = "00000000 00000000 ", "FFFFFFFF FFFFFFFF "

HEX_XID = "FFFFFFFE "
XID = 2**32 - 2

Case = tuple[Message, str]

OUTSIDE: list[Case] = [
    (Begin(LSN_1, TIME_1, XID), "42 " + HEX_LSN_1 + HEX_TIME_1 + HEX_XID),
    (Commit(LSN_1, LSN_2, TIME_2), "43 00 " + HEX_LSN_1 + HEX_LSN_2 + HEX_TIME_2),
    (Origin(LSN_1, "up"), "4F " + HEX_LSN_1 + "7570 00"),
    (Origin(LSN(0), ""), "4F 00000000 00000000 00"),
    (
        Relation(
            16,
            "pg_catalog",
            "é",
            ReplicaIdentity.FULL,
            (
                RelationColumn(key=True, name="a", type_id=23, type_modifier=-1),
                RelationColumn(key=False, name="", type_id=25, type_modifier=7),
            ),
        ),
        "52 00000010 00 C3A9 00 66 0002 01 61 00 00000017 FFFFFFFF 00 00 00000019 00000007",
    ),
    (Relation(1, "s", "t", ReplicaIdentity.DEFAULT, ()), "52 00000001 73 00 74 00 64 0000"),
    (Relation(1, "s", "t", ReplicaIdentity.NOTHING, ()), "52 00000001 73 00 74 00 6E 0000"),
    (Relation(1, "s", "t", ReplicaIdentity.INDEX, ()), "52 00000001 73 00 74 00 69 0000"),
    (Type(16_384, "s", "mood"), "59 00004000 73 00 6D6F6F64 00"),
    (Type(16_384, "pg_catalog", "text"), "59 00004000 00 74657874 00"),
    (
        Insert(16, (b"1", None, b"", UNCHANGED, Binary(b"\0\xff"))),
        "49 00000010 4E 0005 74 00000001 31 6E 74 00000000 75 62 00000002 00FF",
    ),
    (Insert(2**32 - 1, ()), "49 FFFFFFFF 4E 0000"),
    (Update(16, None, (b"n",)), "55 00000010 4E 0001 74 00000001 6E"),
    (
        Update(16, KeyTuple((b"K", None)), (b"N", UNCHANGED)),
        "55 00000010 4B 0002 74 00000001 4B 6E 4E 0002 74 00000001 4E 75",
    ),
    (Update(16, OldTuple((None,)), (None,)), "55 00000010 4F 0001 6E 4E 0001 6E"),
    (Delete(16, KeyTuple((b"1",))), "44 00000010 4B 0001 74 00000001 31"),
    (Delete(16, OldTuple((None,))), "44 00000010 4F 0001 6E"),
    (Truncate((), cascade=False, restart_identity=False), "54 00000000 00"),
    (Truncate((1, 2), cascade=True, restart_identity=False), "54 00000002 01 00000001 00000002"),
    (Truncate((1,), cascade=False, restart_identity=True), "54 00000001 02 00000001"),
    (Truncate((1,), cascade=True, restart_identity=True), "54 00000001 03 00000001"),
    (
        LogicalMessage(transactional=True, lsn=LSN_1, prefix="p", content=b"\0c"),
        "4D 01 " + HEX_LSN_1 + "70 00 00000002 0063",
    ),
    (
        LogicalMessage(transactional=False, lsn=LSN_1, prefix="", content=b""),
        "4D 00 " + HEX_LSN_1 + "00 00000000",
    ),
    (StreamStart(XID, first_segment=True), "53 " + HEX_XID + "01"),
    (StreamStart(XID, first_segment=False), "53 " + HEX_XID + "00"),
    (
        StreamCommit(XID, LSN_1, LSN_2, TIME_1),
        "63 " + HEX_XID + "00 " + HEX_LSN_1 + HEX_LSN_2 + HEX_TIME_1,
    ),
    (StreamAbort(XID, 3), "41 " + HEX_XID + "00000003"),
    (
        BeginPrepare(LSN_1, LSN_2, TIME_1, XID, "gid"),
        "62 " + HEX_LSN_1 + HEX_LSN_2 + HEX_TIME_1 + HEX_XID + "676964 00",
    ),
    (
        Prepare(LSN_1, LSN_2, TIME_2, XID, "gid"),
        "50 00 " + HEX_LSN_1 + HEX_LSN_2 + HEX_TIME_2 + HEX_XID + "676964 00",
    ),
    (
        CommitPrepared(LSN_1, LSN_2, TIME_2, XID, "gid"),
        "4B 00 " + HEX_LSN_1 + HEX_LSN_2 + HEX_TIME_2 + HEX_XID + "676964 00",
    ),
    (
        RollbackPrepared(LSN_1, LSN_2, TIME_1, TIME_2, XID, "gid"),
        "72 00 " + HEX_LSN_1 + HEX_LSN_2 + HEX_TIME_1 + HEX_TIME_2 + HEX_XID + "676964 00",
    ),
    (
        StreamPrepare(LSN_1, LSN_2, TIME_2, XID, "gid"),
        "70 00 " + HEX_LSN_1 + HEX_LSN_2 + HEX_TIME_2 + HEX_XID + "676964 00",
    ),
]

IN_STREAM: list[Case] = [
    (Origin(LSN(0), "up"), "4F 00000000 00000000 7570 00"),
    (
        Relation(1, "s", "t", ReplicaIdentity.FULL, (), XID),
        "52 " + HEX_XID + "00000001 73 00 74 00 66 0000",
    ),
    (Type(1, "s", "t", XID), "59 " + HEX_XID + "00000001 73 00 74 00"),
    (Insert(1, (None,), XID), "49 " + HEX_XID + "00000001 4E 0001 6E"),
    (Update(1, None, (None,), XID), "55 " + HEX_XID + "00000001 4E 0001 6E"),
    (Delete(1, KeyTuple((b"",)), XID), "44 " + HEX_XID + "00000001 4B 0001 74 00000000"),
    (
        Truncate((1,), cascade=True, restart_identity=False, xid=XID),
        "54 " + HEX_XID + "00000001 01 00000001",
    ),
    (
        LogicalMessage(transactional=True, lsn=LSN_1, prefix="p", content=b"c", xid=XID),
        "4D " + HEX_XID + "01 " + HEX_LSN_1 + "70 00 00000001 63",
    ),
    (StreamStop(), "45"),
]

PARALLEL: list[Case] = [
    (
        StreamAbort(XID, 3, LSN_1, TIME_2),
        "41 " + HEX_XID + "00000003 " + HEX_LSN_1 + HEX_TIME_2,
    ),
    (StreamAbort(3, 3, LSN(0), TIME_1), "41 00000003 00000003 00000000 00000000" + HEX_TIME_1),
]

TABLE = [
    *((message, octets, False, False) for message, octets in OUTSIDE),
    *((message, octets, True, False) for message, octets in IN_STREAM),
    *((message, octets, False, True) for message, octets in PARALLEL),
]

every_message = pytest.mark.parametrize(
    ("message", "payload", "in_stream", "parallel"),
    [(message, bytes.fromhex(octets), *place) for message, octets, *place in TABLE],
    ids=[f"{type(message).__name__}-{number}" for number, (message, *_) in enumerate(TABLE)],
)


@every_message
def test_reads_as_the_manual_says(
    message: Message, payload: bytes, *, in_stream: bool, parallel: bool
) -> None:
    assert decode(payload, in_stream=in_stream, parallel=parallel) == message


@every_message
def test_the_tests_writer_writes_as_the_manual_says(
    message: Message, payload: bytes, *, in_stream: bool, parallel: bool
) -> None:
    assert encode(message) == payload


@every_message
def test_a_message_cut_anywhere_is_refused(
    message: Message, payload: bytes, *, in_stream: bool, parallel: bool
) -> None:
    for length in range(len(payload)):
        with pytest.raises(ProtocolError):
            decode(payload[:length], in_stream=in_stream, parallel=parallel)


@every_message
def test_a_byte_too_many_is_refused(
    message: Message, payload: bytes, *, in_stream: bool, parallel: bool
) -> None:
    with pytest.raises(ProtocolError):
        decode(payload + b"\0", in_stream=in_stream, parallel=parallel)


def test_the_table_has_every_message() -> None:
    covered = {type(message) for message, *_ in TABLE}
    assert covered == set(get_args(Message))


REFUSED = [
    ("", "pgoutput, byte 0: expected a message, found nothing"),
    ("58", "pgoutput message, byte 0: expected a message that may come outside a stream block"),
    ("45", "byte 0: expected a message that may come outside a stream block, found StreamStop"),
    ("42 0000", "Begin, byte 1: expected the final LSN, found 2 of its 8 bytes"),
    ("42 00000000 00000000", "Begin, byte 1: expected the final LSN, found 0/0"),
    ("42" + HEX_LSN_1 + HEX_TIME_1 + HEX_XID + "0000", "Begin, byte 21: expected the end, found 2"),
    ("43 01", r"Commit, byte 1: expected flags \(0 to 0\), found 0x01"),
    ("63 00000001 80", r"StreamCommit, byte 5: expected flags \(0 to 0\), found 0x80"),
    ("50 04", r"Prepare, byte 1: expected flags \(0 to 0\), found 0x04"),
    ("4F 00000000 00000000 7570", "Origin, byte 9: .* a zero byte, found 2 bytes, none zero"),
    ("59 00000001 73 00 61C3 00", "Type, byte 8: expected the type's name in UTF-8, found"),
    ("59 00000001 EDA080 00 00", "Type, byte 5: expected the namespace in UTF-8, found"),
    ("52 00000001 00 00 78", "Relation, byte 7: expected replica identity 'd'.*, found 0x78"),
    ("52 00000001 00 00 64 0001", "Relation, byte 10: expected a column's flags, found 0 of"),
    ("52 00000001 00 00 64 0001 02", r"byte 10: expected a column's flags \(0 to 1\), found 0x02"),
    ("49 00000001 4F", "Insert, byte 5: expected a new tuple 'N', found 0x4f"),
    ("49 00000001 4E 0001", "Insert, byte 8: expected a value of kind .*, found nothing"),
    ("49 00000001 4E 0001 78", "Insert, byte 8: expected a value of kind .*, found 0x78"),
    ("49 00000001 4E 0001 74 0000", "Insert, byte 9: expected the length .*, found 2 of its 4"),
    ("49 00000001 4E 0001 74 00000002 31", "byte 9: .* found 2 with 1 bytes left"),
    ("49 00000001 4E 0001 62 FFFFFFFF", "byte 9: .* found -1 with 0 bytes left"),
    ("55 00000001 44", "Update, byte 5: expected an old tuple 'K' or 'O' or a new tuple 'N'"),
    ("55 00000001 4B 0000 4B", "Update, byte 8: expected a new tuple 'N', found 0x4b"),
    ("55 00000001 4B 0000", "Update, byte 8: expected a new tuple 'N', found 0 of its 1 bytes"),
    ("44 00000001 4E", "Delete, byte 5: expected an old tuple 'K' or 'O', found 0x4e"),
    ("54 00000001 04 00000001", r"Truncate, byte 5: expected flags \(0 to 3\), found 0x04"),
    ("54 FFFFFFFF 00", "Truncate, byte 1: .* found -1 with 0 bytes left"),
    ("54 7FFFFFFF 00 00000001", "Truncate, byte 1: .* found 2147483647 with 4 bytes left"),
    ("4D 02", r"LogicalMessage, byte 1: expected flags \(0 to 1\), found 0x02"),
    ("4D 00" + HEX_LSN_1 + "00 80000000", "byte 11: .* found -2147483648 with 0 bytes left"),
    ("4D 00" + HEX_LSN_1 + "00 00000002 00", "byte 11: .* found 2 with 1 bytes left"),
    ("53 00000001 02", r"StreamStart, byte 5: expected first segment \(0 to 1\), found 0x02"),
]


@pytest.mark.parametrize(("octets", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_the_refusal_names_message_offset_and_expectation(octets: str, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        decode(bytes.fromhex(octets))


@pytest.mark.parametrize("tag", b"BCSEcAbPKrpX")
def test_only_changes_and_the_end_may_come_in_a_stream_block(tag: int) -> None:
    outside = [bytes.fromhex(octets) for _, octets in OUTSIDE]
    for payload in (payload for payload in outside if payload[0] == tag):
        with pytest.raises(ProtocolError, match="may come in a stream block"):
            decode(payload, in_stream=True)


def test_a_parallel_abort_is_not_taken_for_a_serial_one() -> None:
    """Otherwise a wrong setting would look like a healthy stream."""
    (parallel, _), (serial, _) = PARALLEL[0], OUTSIDE[-6]
    with pytest.raises(ProtocolError):
        decode(encode(parallel), parallel=False)
    with pytest.raises(ProtocolError):
        decode(encode(serial), parallel=True)


def test_unchanged_null_empty_and_binary_are_four_different_values() -> None:
    message = decode(bytes.fromhex("49 00000001 4E 0004 75 6E 74 00000000 62 00000000"))
    assert isinstance(message, Insert)
    unchanged, null, empty, binary = message.new
    assert unchanged is UNCHANGED
    assert null is None
    assert empty == b""
    assert binary == Binary(b"")
    assert len({unchanged, null, empty, binary}) == 4


def test_an_old_key_is_not_an_old_row() -> None:
    key: KeyTuple | OldTuple = KeyTuple((b"1",))
    assert key != OldTuple((b"1",))


def test_a_refusal_shows_no_row_values() -> None:
    payload = encode(Insert(1, (b"secret", b"secret")))
    for cut in (payload[:-3], payload + b"secret", payload.replace(b"\0\2", b"\0\3", 1)):
        with pytest.raises(ProtocolError) as refusal:
            decode(cut)
        assert "secret" not in str(refusal.value)
