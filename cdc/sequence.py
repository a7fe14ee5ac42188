"""Frames → records in the one order: Position, seq, whole transactions.

The pure middle of the daemon: no I/O, no clock. `feed` walks frames in the order Postgres sent
them, which is commit order, gives each change its ordinal and each event its seq, and puts the
encoded records into the batch. What the resume record covers is counted and not published again,
so a replay gives every event the seq it had.

`feed` stops, and says where, at a relation message (its table's schema, topic and encoder are I/O
that the pipeline does) and at a commit once the batch has reached its size.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.decode import messages, pgoutput
from cdc.errors import CDCError, GapError, ProtocolError
from cdc.events import LSN
from cdc.log.encoder import KIND, Encoder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cdc.log.batch import Batch, Message, Partition
    from cdc.log.records import ResumePosition

# Where the pgoutput payload begins in an XLogData frame: 'w', start LSN, end LSN, server clock.
PAYLOAD: Final = 25
_RELATION: Final = slice(PAYLOAD + 1, PAYLOAD + 5)

_INSERT, _UPDATE, _DELETE, _COMMIT, _NEW = b"IUDCN"
_CREATED, _UPDATED, _NULL = b"c", b"u", b"null"
_start_lsn = struct.Struct(">Q").unpack_from

# More than any transaction has changes: the log holds all of it.
_WHOLE: Final = 1 << 63

_TX: Final = b'"ts_ms":%d,"ts_us":%d,"ts_ns":%d000,"txId":%d,"epoch":%d,"commit_lsn":"%X/%X"'
_TIMES: Final = b'"ts_ms":%d,"ts_us":%d,"ts_ns":%d000'


class Table(NamedTuple):
    """A relation as the stream last described it, flat for the row path."""

    encoder: Encoder
    new: Callable[[bytes, bytes, int, int, bytes, bytes], tuple[bytes | None, bytes]]
    partition: Callable[[bytes | None], int]
    appends: tuple[Callable[[Message], None], ...]
    partitions: list[Partition]

    @classmethod
    def of(cls, encoder: Encoder, partitions: list[Partition]) -> Table:
        """Return the table whose encoder's records go to `partitions`."""
        appends = tuple(partition.append for partition in partitions)
        return cls(encoder, encoder.new, encoder.partition, appends, partitions)


class Sequencer:
    """The state of the stream between two frames."""

    def __init__(self, resume: ResumePosition, epoch: int, batch: Batch, max_events: int) -> None:
        self.end_lsn = resume.end_lsn  # of the newest whole transaction
        self.commit_lsn = resume.commit_lsn  # of the newest whole transaction
        self.committed_at_us = resume.committed_at_us
        self.ordinal = resume.ordinal
        self.seq = resume.seq
        self.cut_seq = resume.seq  # where the batch began
        self.in_transaction = False
        self.types: dict[int, str] = {}  # names of types that are not built in
        self._epoch = epoch
        self._resume = resume
        self._batch = batch
        self._max_events = max_events
        self._tables: dict[bytes, Table] = {}
        self.transaction_lsn = LSN(0)  # the commit LSN of the transaction being read
        self._skip = 0  # so many of this transaction's changes are in the log already
        self._tx = self._times = b""

    @property
    def open(self) -> bool:
        """Whether the batch holds part of a transaction that goes on."""
        return self.in_transaction and self.ordinal > self._skip

    @property
    def replaying(self) -> bool:
        """Whether the log already holds the next change of the transaction being read."""
        return self.in_transaction and self.ordinal < self._skip

    @property
    def events(self) -> int:
        """How many events the batch holds."""
        return self.seq - self.cut_seq

    @property
    def newest_lsn(self) -> LSN:
        """The commit LSN of the newest change in the batch or before it."""
        return self.transaction_lsn if self.open else self.commit_lsn

    def cut(self) -> None:
        """Begin the next batch here."""
        self.cut_seq = self.seq

    def describe(self, relation_id: int, table: Table) -> None:
        """Make `table` what the relation's row messages mean from here on."""
        self._tables[relation_id.to_bytes(4, "big")] = table

    def feed(self, frames: list[bytes], at: int = 0) -> tuple[int, messages.Relation | None]:
        """Sequence `frames[at:]`; return where it stopped, and the relation to describe first.

        Raises ProtocolError, with the LSN, on bytes that do not match the grammar or the order of
        messages; nothing of the frame it names was sequenced.
        """
        tables = self._known()
        tx, times, skip = self._tx, self._times, self._skip
        seq, ordinal, size, index = self.seq, self.ordinal, 0, at
        try:
            # The daemon's hot path: local names, no call but the encoder's and the partitioner's.
            for index in range(at, len(frames)):
                frame = frames[index]
                tag = frame[PAYLOAD]
                if tag == _INSERT:
                    op = _CREATED
                elif tag == _UPDATE and frame[KIND] == _NEW:
                    op = _UPDATED
                else:
                    self.seq, self.ordinal = seq, ordinal
                    relation = self._other(tag, frame)
                    seq, ordinal, skip = self.seq, self.ordinal, self._skip
                    tables, tx, times = self._known(), self._tx, self._times
                    if relation or (tag == _COMMIT and self.events >= self._max_events):
                        return index + 1, relation
                    continue
                table = tables[frame[_RELATION]]
                if ordinal < skip:
                    ordinal += 1
                    continue
                key, value = table.new(frame, op, seq + 1, ordinal + 1, tx, times)
                table.appends[table.partition(key)]({"key": key, "value": value})
                seq += 1
                ordinal += 1
                size += len(value)
        except KeyError:
            raise _located(
                frames[index], ProtocolError("a row of no table or transaction")
            ) from None
        except CDCError as error:
            raise _located(frames[index], error) from error
        except (struct.error, IndexError, ValueError, OverflowError) as error:
            raise _located(frames[index], ProtocolError(f"malformed message: {error}")) from error
        finally:
            self.seq, self.ordinal = seq, ordinal
            self._batch.bytes += size
        return len(frames), None

    def _known(self) -> Mapping[bytes, Table]:
        # Outside a transaction no row has a place, so no table is known there.
        return self._tables if self.in_transaction else {}

    def _other(self, tag: int, frame: bytes) -> messages.Relation | None:
        """Take one message that is not a plain new row; return a relation to describe."""
        if tag == _UPDATE or tag == _DELETE:  # noqa: PLR1714, SIM109 - a tuple would be built
            table = self._known()[frame[_RELATION]]
            self.ordinal += 1
            if self.ordinal > self._skip:
                (self._update if tag == _UPDATE else self._delete)(table, frame)
            return None
        message = pgoutput.decode(frame[PAYLOAD:])
        match message:
            case messages.Begin():
                self._begin(message)
            case messages.Commit():
                self._commit(message)
            case messages.Relation():
                return message
            case messages.Type():
                self.types[message.type_id] = _type_name(message)
            case messages.Truncate():
                self._truncate(message, frame)
            case messages.Origin():
                pass  # where a transaction was first written; every origin is published alike
            case _:
                raise ProtocolError(
                    f"a {type(message).__name__} message, which this stream was not asked for"
                )
        return None

    def _begin(self, begin: messages.Begin) -> None:
        if self.in_transaction:
            raise ProtocolError("a transaction begins inside another")
        self.in_transaction = True
        resume = self._resume
        if resume.open and begin.final_lsn == resume.commit_lsn:
            self._skip = resume.ordinal
        else:
            self._skip = _WHOLE if begin.final_lsn < resume.end_lsn else 0
        self.ordinal = 0
        self.transaction_lsn, us = begin.final_lsn, begin.commit_time_us
        times = (us // 1000, us, us)
        self._times = _TIMES % times
        lsn = begin.final_lsn
        self._tx = _TX % (*times, begin.xid, self._epoch, lsn >> 32, lsn & 0xFFFFFFFF)

    def _commit(self, commit: messages.Commit) -> None:
        if not self.in_transaction or commit.commit_lsn != self.transaction_lsn:
            raise ProtocolError(f"commit {commit.commit_lsn} ends no transaction that began")
        self.in_transaction = False
        if self._skip == _WHOLE:
            return
        if self.ordinal < self._skip:
            raise GapError(
                f"transaction {commit.commit_lsn} ends after {self.ordinal} changes, the log holds"
                f" {self._skip} of it",
                hint="slot and log are of different pasts: `cdc teardown --topics`, then `cdc"
                " setup` and a snapshot, begin anew",
            )
        if commit.end_lsn < self.end_lsn:
            raise ProtocolError(f"commit end {commit.end_lsn} comes after {self.end_lsn}")
        self.end_lsn = commit.end_lsn
        self.commit_lsn = commit.commit_lsn
        self.committed_at_us = commit.commit_time_us

    def _update(self, table: Table, frame: bytes) -> None:
        """Publish an update that carries an old image; a changed key is a delete and a create."""
        encoder = table.encoder
        q, before, olds = encoder.old(frame)
        old_key = encoder.key(olds)
        place = (self.ordinal, self._tx, self._times)
        key, value = encoder.after(frame, q, before, olds, _UPDATED, self.seq + 1, *place)
        if key != old_key:
            self._removed(table, frame, before, old_key)
            key, value = encoder.after(frame, q, _NULL, olds, _CREATED, self.seq + 1, *place)
        self.seq += 1
        self._batch.bytes += len(value)
        table.appends[table.partition(key)]({"key": key, "value": value})

    def _delete(self, table: Table, frame: bytes) -> None:
        q, before, olds = table.encoder.old(frame)
        if q != len(frame):
            raise ProtocolError(f"{len(frame) - q} bytes after a delete's old row")
        self._removed(table, frame, before, table.encoder.key(olds))

    def _removed(self, table: Table, frame: bytes, before: bytes, key: bytes | None) -> None:
        """Publish a delete and, where there is a key, its tombstone, in one partition."""
        self.seq += 1
        lsn = _start_lsn(frame, 1)[0]
        place = (self.seq, self.ordinal, self._tx, self._times)
        value = table.encoder.delete(lsn, before, *place)
        self._batch.bytes += len(value)
        partition = table.partitions[table.partition(key)]
        partition.append({"key": key, "value": value})
        if key is not None:
            partition.append({"key": key, "value": None})
            partition.tombstones += 1

    def _truncate(self, truncate: messages.Truncate, frame: bytes) -> None:
        lsn = _start_lsn(frame, 1)[0]
        for relation_id in truncate.relation_ids:
            table = self._known()[relation_id.to_bytes(4, "big")]
            self.ordinal += 1
            if self.ordinal <= self._skip:
                continue
            self.seq += 1
            value = table.encoder.truncate(lsn, self.seq, self.ordinal, self._tx, self._times)
            self._batch.bytes += len(value)
            table.appends[0]({"key": None, "value": value})


def _type_name(message: messages.Type) -> str:
    system = message.namespace in ("", "pg_catalog")
    return message.name if system else f"{message.namespace}.{message.name}"


def _located(frame: bytes, error: CDCError) -> CDCError:
    lsn = LSN(_start_lsn(frame, 1)[0]) if len(frame) >= PAYLOAD else LSN(0)
    return type(error)(f"{error.what} (at LSN {lsn})", hint=error.hint)
