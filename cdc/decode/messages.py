"""The messages of pgoutput, protocol 1 to 4, named as the Postgres manual names them.

Frozen values; one class per message. What Postgres did not send has a value of its own: a value is
the text Postgres wrote (`bytes`, in the client encoding), `Binary`, `None` for NULL, or `UNCHANGED`
for a TOASTed value that the row kept. Absent old rows are `None`, old keys and old rows are two
types, and `xid` is `None` outside a stream block.

Times are Unix microseconds (`int`, since 1970-01-01 UTC), not Postgres's, which count from 2000.
Flag bytes that the protocol keeps at zero have no field: the decoder refuses any other value.

Not here: what a value's text means, which table is captured, which message may follow which.

Grammar: https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html
"""

from __future__ import annotations

from enum import Enum
from typing import Final, TypeAlias

from msgspec import Struct

from cdc.events import LSN


class Unchanged(Enum):
    """The kind of `UNCHANGED`; an enum of one, so that type checkers narrow on identity."""

    UNCHANGED = "unchanged"


UNCHANGED: Final = Unchanged.UNCHANGED


class Binary(Struct, frozen=True):
    """A value in its type's send format; sent only if the slot asked for `binary`."""

    data: bytes


Value: TypeAlias = bytes | Binary | Unchanged | None
TupleData: TypeAlias = tuple[Value, ...]


class KeyTuple(Struct, frozen=True):
    """The old key ('K'), one value per column of the relation.

    Columns outside the replica identity are `None` here because Postgres sends them so: they are
    unknown, not NULL. `Column.key` shows which is which.
    """

    values: TupleData


class OldTuple(Struct, frozen=True):
    """The complete old row ('O'), sent under REPLICA IDENTITY FULL."""

    values: TupleData


class ReplicaIdentity(Enum):
    """Which part of an old row Postgres logs; values as in `pg_class.relreplident`."""

    DEFAULT = "d"
    NOTHING = "n"
    FULL = "f"
    INDEX = "i"


class Begin(Struct, frozen=True):
    """A transaction follows. `final_lsn` is the LSN of its commit record, its commit LSN."""

    final_lsn: LSN
    commit_time_us: int
    xid: int


class Commit(Struct, frozen=True):
    """The transaction is complete. `end_lsn` is where its commit record ends."""

    commit_lsn: LSN
    end_lsn: LSN
    commit_time_us: int


class Origin(Struct, frozen=True):
    """The transaction came from the replication origin `name`; `commit_lsn` is its LSN there.

    `commit_lsn` is zero inside a stream block, where it is not known yet.
    """

    commit_lsn: LSN
    name: str


class RelationColumn(Struct, frozen=True):
    """A column of a relation. `key` is true if it is part of the replica identity."""

    key: bool
    name: str
    type_id: int
    type_modifier: int  # -1 for none
    attnum: int = 0  # 0: the stream does not send it; known if the catalog described the table


class Relation(Struct, frozen=True):
    """A table as it is from here on; sent before its first change and again when it may differ.

    Again means after DDL or a truncate, in each streamed transaction, and on each connection, so
    often with nothing new.
    """

    relation_id: int
    namespace: str
    name: str
    replica_identity: ReplicaIdentity
    columns: tuple[RelationColumn, ...]
    xid: int | None = None


class Type(Struct, frozen=True):
    """A type that is not built in. For a domain, `namespace` and `name` are its base type's."""

    type_id: int
    namespace: str
    name: str
    xid: int | None = None


class Insert(Struct, frozen=True):
    """`xid`, as in every change in a stream block, is of the (sub)transaction that wrote it."""

    relation_id: int
    new: TupleData
    xid: int | None = None


class Update(Struct, frozen=True):
    """`old` is `None` when the replica identity did not change and is not FULL."""

    relation_id: int
    old: KeyTuple | OldTuple | None
    new: TupleData
    xid: int | None = None


class Delete(Struct, frozen=True):
    relation_id: int
    old: KeyTuple | OldTuple
    xid: int | None = None


class Truncate(Struct, frozen=True):
    relation_ids: tuple[int, ...]
    cascade: bool
    restart_identity: bool
    xid: int | None = None


class LogicalMessage(Struct, frozen=True):
    """What `pg_logical_emit_message` wrote; outside any transaction if not `transactional`.

    `lsn` is where its WAL record ends, which may be the commit LSN of the transaction that follows.
    In a stream block `xid` is the top-level transaction's, never a subtransaction's.
    """

    transactional: bool
    lsn: LSN
    prefix: str
    content: bytes
    xid: int | None = None


class StreamStart(Struct, frozen=True):
    """A block of an uncommitted transaction follows, up to `StreamStop`."""

    xid: int
    first_segment: bool


class StreamStop(Struct, frozen=True):
    pass


class StreamCommit(Struct, frozen=True):
    xid: int
    commit_lsn: LSN
    end_lsn: LSN
    commit_time_us: int


class StreamAbort(Struct, frozen=True):
    """Drop what `subxid` wrote; the complete transaction if `subxid` equals `xid`.

    LSN and time are sent only under parallel streaming; `abort_lsn` is zero when Postgres found the
    transaction dead after a crash.
    """

    xid: int
    subxid: int
    abort_lsn: LSN | None = None
    abort_time_us: int | None = None


class BeginPrepare(Struct, frozen=True):
    prepare_lsn: LSN
    end_lsn: LSN
    prepare_time_us: int
    xid: int
    gid: str


class Prepare(Struct, frozen=True):
    prepare_lsn: LSN
    end_lsn: LSN
    prepare_time_us: int
    xid: int
    gid: str


class CommitPrepared(Struct, frozen=True):
    commit_lsn: LSN
    end_lsn: LSN
    commit_time_us: int
    xid: int
    gid: str


class RollbackPrepared(Struct, frozen=True):
    """`end_lsn` is the prepared transaction's, `rollback_end_lsn` the rollback's own."""

    end_lsn: LSN
    rollback_end_lsn: LSN
    prepare_time_us: int
    rollback_time_us: int
    xid: int
    gid: str


class StreamPrepare(Struct, frozen=True):
    prepare_lsn: LSN
    end_lsn: LSN
    prepare_time_us: int
    xid: int
    gid: str


Message: TypeAlias = (
    Begin
    | Commit
    | Origin
    | Relation
    | Type
    | Insert
    | Update
    | Delete
    | Truncate
    | LogicalMessage
    | StreamStart
    | StreamStop
    | StreamCommit
    | StreamAbort
    | BeginPrepare
    | Prepare
    | CommitPrepared
    | RollbackPrepared
    | StreamPrepare
)
