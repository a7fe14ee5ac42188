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
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from cdc.decode import messages, pgoutput
from cdc.errors import CDCError, GapError, ProtocolError
from cdc.events import LSN
from cdc.log.partition import SIZES, murmur2, partition_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.log.batch import Batch, Message, Partition
    from cdc.log.encoder import Encoder, New
    from cdc.log.records import ResumePosition

# Where the pgoutput payload begins in an XLogData frame: 'w', start LSN, end LSN, server clock.
PAYLOAD: Final = 25
_RELATION: Final = slice(PAYLOAD + 1, PAYLOAD + 5)
# Relation id, kind of tuple and column count: they tell a new row from one with an old image, and
# a row of the described columns from any other, in one look-up.
_ROW: Final = slice(PAYLOAD + 1, PAYLOAD + 8)

_INSERT, _UPDATE, _DELETE, _COMMIT = b"IUDC"
_NEW_ROWS: Final = frozenset(b"IU")
_CREATED, _UPDATED, _NULL = b"c", b"u", b"null"
_start_lsn = struct.Struct(">Q").unpack_from

# More than any transaction has changes: the log holds all of it.
_WHOLE: Final = 1 << 63

_TX: Final = b'"ts_ms":%d,"ts_us":%d,"ts_ns":%d000,"txId":%d,"epoch":%d,"commit_lsn":"%X/%X"'
_TIMES: Final = b'"ts_ms":%d,"ts_us":%d,"ts_ns":%d000'


class Place(NamedTuple):
    """The last change sequenced; `open` when its transaction goes on behind it."""

    commit_lsn: LSN
    ordinal: int
    open: bool


class Table(NamedTuple):
    """A relation as the stream last described it: how its rows are encoded, where they go."""

    encoder: Encoder
    partitions: list[Partition]

    def send(self, key: bytes | None, value: bytes) -> Partition:
        """Put a record into its key's partition, and return that."""
        number = 0 if key is None else partition_of(key, len(self.partitions))
        partition = self.partitions[number]
        partition.append({"key": key, "value": value})
        return partition


# The same, flat: new rows' encoder, the partitions' appends, their number.
Row: TypeAlias = "tuple[New, tuple[Callable[[Message], None], ...], int]"


class Sequencer:
    """The state of the stream between two frames."""

    def __init__(self, resume: ResumePosition, epoch: int, batch: Batch, max_events: int) -> None:
        self.end_lsn = resume.end_lsn  # of the newest whole transaction
        self.committed_at_us = resume.committed_at_us
        self.ordinal = 0  # of the newest change in the transaction being read
        self.seq = resume.seq
        self.cut_seq = resume.seq  # where the batch began
        self.in_transaction = False
        self.types: dict[int, str] = {}  # names of types that are not built in
        # Open until the transaction that the resume record cuts has been read to its end.
        self._place = Place(resume.commit_lsn, resume.ordinal, resume.open)
        self._epoch = epoch
        self._resume = resume
        self._batch = batch
        self._max_events = max_events
        self._tables: dict[bytes, Table] = {}
        self._rows: dict[bytes, Row] = {}  # what the row path needs, by a new row's first bytes
        self.transaction_lsn = LSN(0)  # the commit LSN of the transaction being read
        self._skip = 0  # so many of this transaction's changes are in the log already
        self._tx = self._times = b""

    @property
    def place(self) -> Place:
        """Where the records sequenced so far end, for the resume record beside them."""
        if self.in_transaction and self.ordinal > self._skip:
            return Place(self.transaction_lsn, self.ordinal, open=True)
        return self._place

    @property
    def replaying(self) -> bool:
        """Whether the log already holds the next change of the transaction being read."""
        return self.in_transaction and self.ordinal < self._skip

    @property
    def events(self) -> int:
        """How many events the batch holds."""
        return self.seq - self.cut_seq

    def cut(self) -> None:
        """Begin the next batch here."""
        self.cut_seq = self.seq

    def describe(self, relation_id: int, table: Table) -> None:
        """Make `table` what the relation's row messages mean from here on."""
        relation = relation_id.to_bytes(4, "big")
        self._tables[relation] = table
        for known in [row for row in self._rows if row.startswith(relation)]:
            del self._rows[known]
        columns = len(table.encoder.schema.columns).to_bytes(2, "big")
        appends = tuple(partition.append for partition in table.partitions)
        self._rows[relation + b"N" + columns] = (table.encoder.new, appends, len(table.partitions))

    def feed(self, frames: list[bytes], at: int = 0) -> tuple[int, messages.Relation | None]:
        """Sequence `frames[at:]`; return where it stopped, and the relation to describe first.

        Raises ProtocolError, with the LSN, on bytes that do not match the grammar or the order of
        messages; nothing of the frame it names was sequenced.
        """
        rows, tx, times, skip = self._known_rows(), self._tx, self._times, self._skip
        # The next event's seq and the next change's ordinal.
        seq, ordinal, size, index = self.seq + 1, self.ordinal + 1, 0, at
        try:
            # The daemon's hot path: local names, no call but the encoder's and the partitioner's.
            for index in range(at, len(frames)):
                frame = frames[index]
                tag = frame[PAYLOAD]
                row = rows.get(frame[_ROW]) if tag in _NEW_ROWS else None
                if row is None:
                    self.seq, self.ordinal = seq - 1, ordinal - 1
                    relation = self._other(tag, frame)
                    seq, ordinal, skip = self.seq + 1, self.ordinal + 1, self._skip
                    rows, tx, times = self._known_rows(), self._tx, self._times
                    if relation or (tag == _COMMIT and self.events >= self._max_events):
                        return index + 1, relation
                elif ordinal <= skip:
                    ordinal += 1
                else:
                    new, appends, partitions = row
                    op = _CREATED if tag == _INSERT else _UPDATED
                    key, value = new(frame, op, seq, ordinal, tx, times)
                    if key is None:
                        number = 0
                    else:
                        number = murmur2(None, key, SIZES[len(key)], partitions, None, None)
                    appends[number]({"key": key, "value": value})
                    seq += 1
                    ordinal += 1
                    size += len(value)
        except CDCError as error:
            raise _located(frames[index], error) from error
        except (struct.error, IndexError, TypeError, ValueError, OverflowError) as error:
            # Only the kind of error: its text may quote the row.
            kind = type(error).__name__
            raise _located(frames[index], ProtocolError(f"malformed message ({kind})")) from error
        finally:
            self.seq, self.ordinal = seq - 1, ordinal - 1
            self._batch.bytes += size
        return len(frames), None

    def _known_rows(self) -> dict[bytes, Row]:
        # Outside a transaction no row has a place, so none is known there.
        return self._rows if self.in_transaction else {}

    def _table(self, relation_id: bytes) -> Table:
        if not self.in_transaction or relation_id not in self._tables:
            raise ProtocolError("a row of no transaction, or of a table that was not described")
        return self._tables[relation_id]

    def _other(self, tag: int, frame: bytes) -> messages.Relation | None:
        """Take one message that is not a plain new row; return a relation to describe."""
        if tag == _UPDATE or tag == _DELETE:  # noqa: PLR1714, SIM109 - a tuple would be built
            table = self._table(frame[_RELATION])
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
        elif begin.final_lsn < resume.end_lsn:
            self._skip = _WHOLE
        elif self._place.open:
            raise _apart(
                f"transaction {begin.final_lsn} begins, though the log holds only the first"
                f" {self._place.ordinal} changes of {self._place.commit_lsn}"
            )
        else:
            self._skip = 0
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
            raise _apart(
                f"transaction {commit.commit_lsn} ends after {self.ordinal} changes, the log holds"
                f" {self._skip} of it"
            )
        if commit.end_lsn < self.end_lsn:
            raise ProtocolError(f"commit end {commit.end_lsn} comes after {self.end_lsn}")
        self.end_lsn = commit.end_lsn
        self._place = Place(commit.commit_lsn, self.ordinal, open=False)
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
        table.send(key, value)

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
        partition = table.send(key, value)
        if key is not None:
            partition.append({"key": key, "value": None})
            partition.tombstones += 1

    def _truncate(self, truncate: messages.Truncate, frame: bytes) -> None:
        lsn = _start_lsn(frame, 1)[0]
        tables = [self._table(each.to_bytes(4, "big")) for each in truncate.relation_ids]
        for table in tables:
            self.ordinal += 1
            if self.ordinal <= self._skip:
                continue
            self.seq += 1
            value = table.encoder.truncate(lsn, self.seq, self.ordinal, self._tx, self._times)
            self._batch.bytes += len(value)
            table.send(None, value)


def _apart(what: str) -> GapError:
    return GapError(
        what,
        hint="slot and log are of different pasts: `cdc teardown --topics`, then `cdc setup` and a"
        " snapshot, begin anew",
    )


def _type_name(message: messages.Type) -> str:
    system = message.namespace in ("", "pg_catalog")
    return message.name if system else f"{message.namespace}.{message.name}"


def _located(frame: bytes, error: CDCError) -> CDCError:
    lsn = LSN(_start_lsn(frame, 1)[0]) if len(frame) >= PAYLOAD else LSN(0)
    return type(error)(f"{error.what} (at LSN {lsn})", hint=error.hint)
