"""Write pgoutput messages: the decoder's inverse, for tests only.

Shares no code with the decoder, so that a shared mistake would have to be made twice; the golden
recordings check both against real servers.
"""

from __future__ import annotations

from struct import pack
from typing import TypeAlias, assert_never

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
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    TupleData,
    Type,
    Update,
    Value,
)


def encode(message: Message) -> bytes:  # noqa: C901, PLR0911 - one case a message
    """Return the payload that Postgres would send for `message`."""
    match message:
        case Begin(lsn, time_us, xid):
            return b"B" + pack(">QqI", lsn, _pg_time(time_us), xid)
        case Commit(lsn, end_lsn, time_us):
            return b"C" + pack(">BQQq", 0, lsn, end_lsn, _pg_time(time_us))
        case Origin(lsn, name):
            return b"O" + pack(">Q", lsn) + _string(name)
        case LogicalMessage(transactional, lsn, prefix, content, xid):
            head = pack(">BQ", transactional, lsn) + _string(prefix)
            return b"M" + _xid(xid) + head + pack(">i", len(content)) + content
        case Relation() | Type() | Insert() | Update() | Delete() | Truncate():
            return _encode_change(message)
        case StreamStart() | StreamStop() | StreamCommit() | StreamAbort():
            return _encode_stream(message)
        case BeginPrepare(lsn, end_lsn, time_us, xid, gid):
            return b"b" + pack(">QQqI", lsn, end_lsn, _pg_time(time_us), xid) + _string(gid)
        case Prepare(lsn, end_lsn, time_us, xid, gid):
            return b"P" + _prepared(lsn, end_lsn, time_us, xid, gid)
        case CommitPrepared(lsn, end_lsn, time_us, xid, gid):
            return b"K" + _prepared(lsn, end_lsn, time_us, xid, gid)
        case StreamPrepare(lsn, end_lsn, time_us, xid, gid):
            return b"p" + _prepared(lsn, end_lsn, time_us, xid, gid)
        case RollbackPrepared(end_lsn, rollback_end_lsn, prepared_us, rolled_back_us, xid, gid):
            times = (_pg_time(prepared_us), _pg_time(rolled_back_us))
            head = pack(">BQQqqI", 0, end_lsn, rollback_end_lsn, *times, xid)
            return b"r" + head + _string(gid)
        case _:
            assert_never(message)


Change: TypeAlias = Relation | Type | Insert | Update | Delete | Truncate


def _encode_change(message: Change) -> bytes:  # noqa: PLR0911 - one case a message
    xid = _xid(message.xid)
    match message:
        case Relation(relation_id, namespace, name, identity, columns):
            names = _namespace(namespace) + _string(name)
            head = b"R" + xid + pack(">I", relation_id) + names + identity.value.encode()
            return head + pack(">H", len(columns)) + b"".join(map(_column, columns))
        case Type(type_id, namespace, name):
            return b"Y" + xid + pack(">I", type_id) + _namespace(namespace) + _string(name)
        case Insert(relation_id, new):
            return b"I" + xid + pack(">I", relation_id) + b"N" + _tuple(new)
        case Update(relation_id, None, new):
            return b"U" + xid + pack(">I", relation_id) + b"N" + _tuple(new)
        case Update(relation_id, old, new):
            assert old is not None
            return b"U" + xid + pack(">I", relation_id) + _old(old) + b"N" + _tuple(new)
        case Delete(relation_id, old):
            return b"D" + xid + pack(">I", relation_id) + _old(old)
        case Truncate(relation_ids, cascade, restart_identity):
            head = pack(">iB", len(relation_ids), cascade + 2 * restart_identity)
            return b"T" + xid + head + pack(f">{len(relation_ids)}I", *relation_ids)
        case _:
            assert_never(message)


def _encode_stream(message: StreamStart | StreamStop | StreamCommit | StreamAbort) -> bytes:
    match message:
        case StreamStart(xid, first_segment):
            return b"S" + pack(">IB", xid, first_segment)
        case StreamStop():
            return b"E"
        case StreamCommit(xid, lsn, end_lsn, time_us):
            return b"c" + pack(">IBQQq", xid, 0, lsn, end_lsn, _pg_time(time_us))
        case StreamAbort(xid, subxid, None, None):
            return b"A" + pack(">II", xid, subxid)
        case StreamAbort(xid, subxid, lsn, time_us):
            assert lsn is not None
            assert time_us is not None
            return b"A" + pack(">IIQq", xid, subxid, lsn, _pg_time(time_us))
        case _:
            assert_never(message)


def _pg_time(time_us: int) -> int:
    return time_us - 946_684_800_000_000


def _string(text: str) -> bytes:
    return text.encode() + b"\0"


def _namespace(name: str) -> bytes:
    return _string("" if name == "pg_catalog" else name)


def _xid(xid: int | None) -> bytes:
    return b"" if xid is None else pack(">I", xid)


def _prepared(lsn: int, end_lsn: int, time_us: int, xid: int, gid: str) -> bytes:
    return pack(">BQQqI", 0, lsn, end_lsn, _pg_time(time_us), xid) + _string(gid)


def _column(column: RelationColumn) -> bytes:
    head = pack(">B", column.key) + _string(column.name)
    return head + pack(">Ii", column.type_id, column.type_modifier)


def _old(old: KeyTuple | OldTuple) -> bytes:
    return (b"K" if isinstance(old, KeyTuple) else b"O") + _tuple(old.values)


def _tuple(values: TupleData) -> bytes:
    return pack(">H", len(values)) + b"".join(map(_value, values))


def _value(value: Value) -> bytes:
    match value:
        case None:
            return b"n"
        case bytes(text):
            return b"t" + pack(">i", len(text)) + text
        case Binary(data):
            return b"b" + pack(">i", len(data)) + data
        case _:
            assert value is UNCHANGED
            return b"u"
