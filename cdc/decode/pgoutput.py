"""Decode pgoutput messages.

Pure: one payload in, one frozen message out; no I/O, no clock, no state. Bytes that do not match
the grammar raise `ProtocolError`; they are never skipped, because a gap is silent data loss.

Two facts that the bytes do not show come from the caller: whether a stream block is open (then
changes carry an xid, and nothing but changes may come), and whether the stream was asked for as
`parallel` (then stream aborts carry an LSN and a time; protocol 4 alone does not make them).

Names are decoded here and must be UTF-8, the client encoding that we ask for; values stay bytes.
Which message may follow which, and what a value means, is not checked here.

This is the reference reading of the format: what an encoder compiled for one relation reads from a
row must equal what is read here.

Grammar: https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

from cdc.decode.cursor import INT32, UINT16, UINT32, Cursor
from cdc.decode.messages import (
    Begin,
    BeginPrepare,
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
from cdc.errors import ProtocolError

_KEY, _NEW = b"KN"
_REPLICA_IDENTITIES: Final = "".join(identity.value for identity in ReplicaIdentity).encode()
_TRUNCATE_CASCADE: Final = 1
_TRUNCATE_RESTART_IDENTITY: Final = 2

_Prepared: TypeAlias = BeginPrepare | Prepare | CommitPrepared | StreamPrepare


def decode(payload: bytes, *, in_stream: bool = False, parallel: bool = False) -> Message:
    """Return the one message that `payload` is, to its last byte, or raise ProtocolError.

    `in_stream` from the message after a `StreamStart` up to and including its `StreamStop`;
    `parallel` when replication was started with streaming 'parallel'.
    """
    if not payload:
        raise ProtocolError("pgoutput, byte 0: expected a message, found nothing")
    name, read = (_IN_STREAM if in_stream else _OUTSIDE).get(payload[0], _NEITHER)
    cursor = Cursor(payload, name, in_stream=in_stream, parallel=parallel)
    message = read(cursor)
    cursor.finish()
    return message


def _begin(cursor: Cursor) -> Begin:
    return Begin(
        cursor.lsn("the final LSN"), cursor.time_us("the commit time"), cursor.number(UINT32, "xid")
    )


def _commit(cursor: Cursor) -> Commit:
    cursor.flags(0, "flags")
    return Commit(
        cursor.lsn("the commit LSN"),
        cursor.lsn("the end LSN"),
        cursor.time_us("the commit time"),
    )


def _origin(cursor: Cursor) -> Origin:
    return Origin(cursor.lsn_or_zero("the origin's commit LSN"), cursor.string("the origin's name"))


def _relation(cursor: Cursor) -> Relation:
    xid = cursor.change_xid()
    return Relation(
        cursor.number(UINT32, "the relation's OID"),
        # Postgres sends pg_catalog as an empty name.
        cursor.string("the namespace") or "pg_catalog",
        cursor.string("the relation's name"),
        ReplicaIdentity(
            chr(cursor.tag(_REPLICA_IDENTITIES, "replica identity 'd', 'n', 'f' or 'i'"))
        ),
        tuple([_column(cursor) for _ in range(cursor.number(UINT16, "the number of columns"))]),
        xid,
    )


def _column(cursor: Cursor) -> RelationColumn:
    return RelationColumn(
        cursor.flags(1, "a column's flags") == 1,
        cursor.string("a column's name"),
        cursor.number(UINT32, "a column's type"),
        cursor.number(INT32, "a column's type modifier"),
    )


def _type(cursor: Cursor) -> Type:
    xid = cursor.change_xid()
    return Type(
        cursor.number(UINT32, "the type's OID"),
        cursor.string("the namespace") or "pg_catalog",
        cursor.string("the type's name"),
        xid,
    )


def _insert(cursor: Cursor) -> Insert:
    xid = cursor.change_xid()
    relation_id = cursor.number(UINT32, "the relation's OID")
    cursor.tag(b"N", "a new tuple 'N'")
    return Insert(relation_id, cursor.tuple_data(), xid)


def _update(cursor: Cursor) -> Update:
    xid = cursor.change_xid()
    relation_id = cursor.number(UINT32, "the relation's OID")
    old: KeyTuple | OldTuple | None = None
    part = cursor.tag(b"KON", "an old tuple 'K' or 'O' or a new tuple 'N'")
    if part != _NEW:
        old = _old(cursor, part)
        cursor.tag(b"N", "a new tuple 'N'")
    return Update(relation_id, old, cursor.tuple_data(), xid)


def _delete(cursor: Cursor) -> Delete:
    xid = cursor.change_xid()
    relation_id = cursor.number(UINT32, "the relation's OID")
    return Delete(relation_id, _old(cursor, cursor.tag(b"KO", "an old tuple 'K' or 'O'")), xid)


def _old(cursor: Cursor, part: int) -> KeyTuple | OldTuple:
    return KeyTuple(cursor.tuple_data()) if part == _KEY else OldTuple(cursor.tuple_data())


def _truncate(cursor: Cursor) -> Truncate:
    xid = cursor.change_xid()
    count_at = cursor.at
    count = cursor.number(INT32, "the number of relations")
    flags = cursor.flags(_TRUNCATE_CASCADE | _TRUNCATE_RESTART_IDENTITY, "flags")
    return Truncate(
        cursor.oids(count, count_at, "relations"),
        bool(flags & _TRUNCATE_CASCADE),
        bool(flags & _TRUNCATE_RESTART_IDENTITY),
        xid,
    )


def _logical_message(cursor: Cursor) -> LogicalMessage:
    xid = cursor.change_xid()
    return LogicalMessage(
        cursor.flags(1, "flags") == 1,
        cursor.lsn_or_zero("the message's LSN"),
        # Postgres converts neither prefix nor content, whatever the database's encoding is.
        cursor.text_of_any_encoding("the prefix"),
        cursor.octets("the content"),
        xid,
    )


def _stream_start(cursor: Cursor) -> StreamStart:
    return StreamStart(cursor.number(UINT32, "xid"), cursor.flags(1, "first segment") == 1)


def _stream_commit(cursor: Cursor) -> StreamCommit:
    xid = cursor.number(UINT32, "xid")
    cursor.flags(0, "flags")
    return StreamCommit(
        xid,
        cursor.lsn("the commit LSN"),
        cursor.lsn("the end LSN"),
        cursor.time_us("the commit time"),
    )


def _stream_abort(cursor: Cursor) -> StreamAbort:
    xid = cursor.number(UINT32, "xid")
    subxid = cursor.number(UINT32, "the subtransaction's xid")
    if not cursor.parallel:
        return StreamAbort(xid, subxid)
    return StreamAbort(
        xid, subxid, cursor.lsn_or_zero("the abort LSN"), cursor.time_us("the abort time")
    )


def _prepared(kind: type[_Prepared], cursor: Cursor) -> _Prepared:
    """Return a message about a prepared transaction; its rollback has other fields."""
    if kind is not BeginPrepare:
        cursor.flags(0, "flags")
    return kind(
        cursor.lsn("the LSN"),
        cursor.lsn("the end LSN"),
        cursor.time_us("the time"),
        cursor.number(UINT32, "xid"),
        cursor.string("the global identifier"),
    )


def _rollback_prepared(cursor: Cursor) -> RollbackPrepared:
    cursor.flags(0, "flags")
    return RollbackPrepared(
        cursor.lsn("the end LSN"),
        cursor.lsn("the rollback's end LSN"),
        cursor.time_us("the prepare time"),
        cursor.time_us("the rollback time"),
        cursor.number(UINT32, "xid"),
        cursor.string("the global identifier"),
    )


def _refuse(cursor: Cursor) -> Message:
    place = "in" if cursor.in_stream else "outside"
    tag = cursor.payload[0]
    found, _ = (_OUTSIDE | _IN_STREAM).get(tag, (f"0x{tag:02x}", None))
    raise cursor.error(f"a message that may come {place} a stream block", found, 0)


_Reader: TypeAlias = "Callable[[Cursor], Message]"
_NEITHER: Final[tuple[str, _Reader]] = ("message", _refuse)

# A stream block holds changes, which then carry an xid, and the transaction's origin.
_ANYWHERE: Final[dict[int, tuple[str, _Reader]]] = {
    ord("O"): ("Origin", _origin),
    ord("R"): ("Relation", _relation),
    ord("Y"): ("Type", _type),
    ord("I"): ("Insert", _insert),
    ord("U"): ("Update", _update),
    ord("D"): ("Delete", _delete),
    ord("T"): ("Truncate", _truncate),
    ord("M"): ("LogicalMessage", _logical_message),
}
_IN_STREAM: Final = _ANYWHERE | {ord("E"): ("StreamStop", lambda _: StreamStop())}
_OUTSIDE: Final = _ANYWHERE | {
    ord("B"): ("Begin", _begin),
    ord("C"): ("Commit", _commit),
    ord("S"): ("StreamStart", _stream_start),
    ord("c"): ("StreamCommit", _stream_commit),
    ord("A"): ("StreamAbort", _stream_abort),
    ord("b"): ("BeginPrepare", partial(_prepared, BeginPrepare)),
    ord("P"): ("Prepare", partial(_prepared, Prepare)),
    ord("K"): ("CommitPrepared", partial(_prepared, CommitPrepared)),
    ord("r"): ("RollbackPrepared", _rollback_prepared),
    ord("p"): ("StreamPrepare", partial(_prepared, StreamPrepare)),
}
