"""Frames → records in the total order: Position, seq, complete transactions.

The pure middle of the daemon: no I/O, no clock. `feed` walks a chunk's frames in the order Postgres
sent them, which is commit order, gives each change its ordinal and each event its seq, and puts the
encoded records into the batch. What the resume record covers is counted and not published again,
so a replay gives every event the seq it had.

`feed` stops, and returns where and why, at what other modules must handle: a relation message (its
table's schema, topic and encoder are I/O that the pipeline does), a block or the end of a
transaction that Postgres streams before its commit (`cdc.sequence.in_progress`), a message that is
not a frame, and a commit once the batch has reached its size.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from orjson import dumps

from cdc.decode import frames, messages, pgoutput
from cdc.decode.cursor import POSTGRES_EPOCH_US
from cdc.decode.frames import PAYLOAD, ROW_END, XID_SIZE
from cdc.encode.encoder import TIMES, TX
from cdc.encode.logical_messages import OURS, PUBLISHED_OURS
from cdc.encode.partition import SIZES, murmur2
from cdc.encode.unreadable import unreadable_message
from cdc.errors import CDCError, ProtocolError
from cdc.events import LSN
from cdc.sequence.replay import NO_TRANSACTION
from cdc.sequence.state import LastChange, Pause, Row, Step, history_gap, located, type_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.encode.routes import LogicalMessages, Sent, TableRoute
    from cdc.log.batch import Batch
    from cdc.log.records import ResumePosition
    from cdc.sequence.observer import TransactionObserver
    from cdc.sequence.replay import SessionReplay

_BEGIN, _COMMIT, _INSERT, _UPDATE, _DELETE, _NEW = b"BCIUDN"
_CHANGES: Final = frozenset(b"IUD")
_ROWS: Final = (b"I", b"U", b"D")
_CREATED, _UPDATED, _NULL = b"c", b"u", b"null"

_begin, _BEGIN_SIZE = struct.Struct(">QqI").unpack_from, 20
_commit, _COMMIT_SIZE = struct.Struct(">BQQq").unpack_from, 25

_COMPLETE: Final = 1 << 63  # more changes than any transaction has: the log holds all of it
# Outside a transaction no row is allowed, so the look-up finds none.
_NO_ROWS: Final[dict[bytes, Row]] = {}


class Sequencer:
    """The state of the stream between two frames."""

    def __init__(
        self,
        resume: ResumePosition,
        epoch: int,
        batch: Batch,
        max_events: int,
        logical: LogicalMessages,
        *,
        parallel: bool = False,
        replay: SessionReplay | None = None,
    ) -> None:
        """Start at `resume`; `parallel` selects the protocol's variant of stream aborts.

        `replay` checks each transaction's begin until it is proven.
        """
        self.received_lsn = 0  # start LSN of the newest frame
        self.committed_at_us = resume.committed_at_us
        self.ordinal = 0  # of the newest change in the transaction being read
        self.seq = resume.seq
        self._batch_seq = resume.seq  # where the batch began
        self.in_transaction = False
        self.xid: int | None = None  # of the transaction being read
        self.transaction_us = 0  # when it committed, by the server's clock
        self.types: dict[int, str] = {}  # names of types that are not built in
        # LSNs are plain integers in the path of every transaction, and `LSN` where they are shown.
        self._end_lsn: int = resume.end_lsn
        # Open until the transaction that the resume record splits has been read to its end.
        split = (resume.commit_lsn, resume.ordinal, resume.open, resume.xid)
        self._last_change: tuple[int, int, bool, int | None] = split
        self._replay = replay
        self._epoch = epoch
        self._resume = resume
        self._batch, self.max_events = batch, max_events
        self._logical = logical
        self._parallel = parallel
        self.observer: TransactionObserver | None = None
        self._observed: dict[bytes, bool] = {}  # relations; whether also their plain new rows
        self._tables: dict[bytes, TableRoute] = {}
        self._rows: dict[bytes, Row] = {}  # what the row path needs, by a new row's first bytes
        self._rows_of: dict[bytes, list[bytes]] = {}  # the keys of `_rows` by relation
        self._commit_lsn = 0  # of the transaction being read
        self._skip = 0  # how many of this transaction's changes are in the log already
        self._noted = False  # whether a message of ours was published in this transaction
        self._tx = self._tx_at_home = self._times = b""

    @property
    def last_change(self) -> LastChange:
        """Where the records sequenced so far end, for the resume record written with them."""
        if self.in_transaction and (self.ordinal > self._skip or self._noted):
            xid = NO_TRANSACTION if self.xid is None else self.xid
            return LastChange(LSN(self._commit_lsn), self.ordinal, open=True, xid=xid)
        commit_lsn, ordinal, is_open, last_xid = self._last_change
        return LastChange(LSN(commit_lsn), ordinal, is_open, last_xid)

    @property
    def end_lsn(self) -> LSN:
        """The end of the newest complete transaction, or where `reach` moved it."""
        return LSN(self._end_lsn)

    @property
    def transaction_lsn(self) -> LSN:
        """The commit LSN of the transaction being read."""
        return LSN(self._commit_lsn)

    def reach(self, lsn: LSN) -> None:
        """Note that the WAL up to `lsn` holds nothing more for us."""
        assert lsn >= self._end_lsn
        self._end_lsn = lsn

    @property
    def replaying(self) -> bool:
        """Whether the log already holds the next change of the transaction being read."""
        return self.in_transaction and self.ordinal < self._skip

    @property
    def events(self) -> int:
        """How many events the batch holds."""
        return self.seq - self._batch_seq

    def start_batch(self) -> None:
        self._batch_seq = self.seq

    def describe(self, relation_id: int, table: TableRoute) -> None:
        """Use `table` for the relation's row messages from here on."""
        relation = relation_id.to_bytes(4, "big")
        self._tables[relation] = table._replace(observed=relation in self._observed)
        for known in self._rows_of.pop(relation, ()):
            del self._rows[known]
        if self._observed.get(relation):
            return  # none of its rows takes the fast path
        columns = len(table.encoder.schema.columns).to_bytes(2, "big")
        appends = table.partitions[0].appends
        for tag, op in ((b"I", _CREATED), (b"U", _UPDATED)):
            row = (table.encoder.new, op, appends, len(table.partitions))
            known = tag + relation + b"N" + columns
            self._rows[known] = row
            self._rows_of.setdefault(relation, []).append(known)

    def table(self, relation_id: int) -> TableRoute | None:
        """Return the relation as it was last described in this session."""
        return self._tables.get(relation_id.to_bytes(4, "big"))

    def observe(self, relation_id: int, *, all_rows: bool) -> None:
        """Show the relation's changes to the observer before they are published.

        Plain new rows only with `all_rows`, else those with an old row and truncates.
        """
        self._observed[relation_id.to_bytes(4, "big")] = all_rows
        self._describe_again(relation_id)

    def observe_no_more(self, relation_id: int) -> None:
        """Stop showing the relation's changes to the observer."""
        self._observed.pop(relation_id.to_bytes(4, "big"), None)
        self._describe_again(relation_id)

    def _describe_again(self, relation_id: int) -> None:
        if table := self.table(relation_id):
            self.describe(relation_id, table)

    @property
    def transaction_members(self) -> tuple[bytes, bytes]:
        """The members that every event of the transaction has: its identity and its times."""
        return self._tx, self._times

    def publish(self, table: TableRoute, key: bytes | None, value: bytes) -> None:
        """Publish an event that was built with the next `seq` and `ordinal`, as a change here."""
        self.ordinal += 1
        self._send(table, key, value)

    def note(self, prefix: str, content: bytes) -> None:
        """Publish a message of ours in the transaction being read.

        It has a seq, and the ordinal of the change before it: so the ordinals of the changes are
        the same in a replay, which does not publish it again.
        """
        assert self.in_transaction and not self.replaying, "the log does not hold this place"  # noqa: PT018
        self._noted = True
        lsn = LSN(self._commit_lsn)
        message = messages.LogicalMessage(True, lsn, prefix, content)  # noqa: FBT003 - pgoutput's
        self._publish_message(message, self._commit_lsn)

    def feed(
        self, chunk: bytes, at: int = 0, *, streamed: bool = False
    ) -> tuple[int, Step | Pause]:
        """Sequence the frames of `chunk` from `at` on; return where it stopped, and why.

        It stops after the message that it returns, else before what it has not taken. The frames of
        a `streamed` transaction, read back when it has committed, carry xids.

        Raises ProtocolError, with the LSN, on bytes that do not match the grammar or the order of
        messages; nothing of the frame it names was sequenced.
        """
        end, lsn = frames.content_end(chunk), self.received_lsn
        plain = end <= self._batch.plain_bytes  # no row can be too large for its topic
        xid = XID_SIZE if streamed else 0
        tag_at, columns_at, last = PAYLOAD, ROW_END + xid, end - frames.HEADER_SIZE
        find_row, tx, times, skip = self._plain_rows(plain=plain), self._tx, self._times, self._skip
        # The next event's seq and the next change's ordinal.
        seq, ordinal, size = self.seq + 1, self.ordinal + 1, 0
        frame, data, head = frames.COPY_DATA, frames.XLOG_DATA, frames.head
        hashed, sizes = murmur2, SIZES
        try:
            # The daemon's hot path: local names, no call but the encoder's and the partitioner's.
            while at <= last:
                kind, length, inner, start_lsn = head(chunk, at)
                stop = at + 1 + length
                if stop > end:
                    break
                if inner != data or kind != frame:
                    return at, Pause.OTHER
                lsn = start_lsn  # only of a complete frame: in other messages it is any bytes
                columns = at + columns_at
                row = find_row(
                    frames.row_head_without_xid(chunk, at) if xid else chunk[at + tag_at : columns]
                )
                if row is None:
                    self.seq, self.ordinal = seq - 1, ordinal - 1
                    tag = chunk[at + tag_at]
                    message = self._other(chunk, at, stop, lsn, tag, xid)
                    seq, ordinal, skip = self.seq + 1, self.ordinal + 1, self._skip
                    find_row, tx, times = self._plain_rows(plain=plain), self._tx, self._times
                    if message or (tag == _COMMIT and self.events >= self.max_events):
                        return stop, message or Pause.FULL
                elif ordinal <= skip:
                    ordinal += 1
                else:
                    new, op, appends, partitions = row
                    key, value = new(chunk, columns, stop, lsn, op, seq, ordinal, tx, times)
                    number = 0
                    if key is not None:
                        number = hashed(None, key, sizes[len(key)], partitions, None, None)
                    appends[number]({"key": key, "value": value})
                    seq += 1
                    ordinal += 1
                    size += len(value)
                at = stop
        except CDCError as error:
            raise located(lsn, error) from error
        except (struct.error, IndexError, TypeError, ValueError, OverflowError) as error:
            # Only the type of the error: its text may quote the row.
            raise located(lsn, self._unreadable(chunk, at, xid, error)) from error
        finally:
            self.seq, self.ordinal = seq - 1, ordinal - 1
            self._batch.bytes += size
            self.received_lsn = lsn
        return at, Pause.MORE

    def _unreadable(self, chunk: bytes, at: int, xid: int, error: Exception) -> CDCError:
        """Return the error of the frame at `at`, with the table and column that it is about."""
        stop = at + 1 + int.from_bytes(chunk[at + 1 : at + 5], "big")
        payload, relation = chunk[at + PAYLOAD : stop], at + PAYLOAD + 1 + xid
        table = self._tables.get(chunk[relation : relation + 4])
        named = None
        if payload[:1] in _ROWS and table is not None:
            named = unreadable_message(table.encoder, payload, error, in_stream=xid > 0)
        return named or ProtocolError(f"malformed message ({type(error).__name__})")

    def _plain_rows(self, *, plain: bool) -> Callable[[bytes], Row | None]:
        """Return the look-up of rows that `feed` may encode itself."""
        return (self._rows if self.in_transaction and plain else _NO_ROWS).get

    def _other(self, chunk: bytes, at: int, stop: int, lsn: int, tag: int, xid: int) -> Step | None:
        """Take one message that is not a plain new row; return what the pipeline must do."""
        if tag in _CHANGES:
            self._change(chunk, at + PAYLOAD + 1 + xid, stop, lsn, tag)
            return None
        body = at + PAYLOAD + 1
        if tag == _BEGIN and stop - body == _BEGIN_SIZE:
            commit_lsn, us, number = _begin(chunk, body)
            self.begin(commit_lsn, us + POSTGRES_EPOCH_US, number)
            return None
        if tag == _COMMIT and stop - body == _COMMIT_SIZE and not chunk[body]:
            _, commit_lsn, end_lsn, us = _commit(chunk, body)
            self.commit(commit_lsn, end_lsn, us + POSTGRES_EPOCH_US)
            return None
        message = pgoutput.decode(
            chunk[at + PAYLOAD : stop], in_stream=xid > 0, parallel=self._parallel
        )
        if isinstance(message, Step):
            return message
        match message:
            case messages.Type():
                self.types[message.type_id] = type_name(message)
            case messages.Truncate():
                self._truncate(message, lsn)
            case messages.LogicalMessage():
                return self._message(message, lsn)
            case messages.Origin():
                self._tx = b'%b,"origin":%b' % (self._tx_at_home, dumps(message.name))
            case _:
                raise ProtocolError(
                    f"a {type(message).__name__} message, which this stream was not asked for"
                )
        return None

    def begin(self, commit_lsn: int, us: int, xid: int | None) -> None:
        """Begin the transaction that commits at `commit_lsn`, `us` microseconds after 1970."""
        if self.in_transaction:
            raise ProtocolError("a transaction begins inside another")
        if self._replay is not None:
            self._replay.transaction(commit_lsn, us, xid)
            if self._replay.proven:
                self._replay = None
        self.in_transaction = True
        resume = self._resume
        if resume.open and commit_lsn == resume.commit_lsn:
            self._skip = resume.ordinal
        elif commit_lsn < resume.end_lsn:
            self._skip = _COMPLETE
        elif self._last_change[2]:
            raise history_gap(
                f"transaction {LSN(commit_lsn)} begins, though the log holds only the first"
                f" {self.last_change.ordinal} changes of {self.last_change.commit_lsn}"
            )
        else:
            self._skip = 0
        self.ordinal, self._noted = 0, False
        self._commit_lsn = commit_lsn
        self.xid, self.transaction_us = xid, us
        if self.observer is not None:
            self.observer.on_begin(commit_lsn, xid)
        self._times = times = TIMES % (us // 1000, us, us * 1000)
        number = _NULL if xid is None else b"%d" % xid
        high, low = commit_lsn >> 32, commit_lsn & 0xFFFFFFFF
        self._tx = TX % (times, number, self._epoch, high, low)
        self._tx_at_home = self._tx

    def commit(self, commit_lsn: int, end_lsn: int, us: int) -> None:
        """End the transaction that began."""
        if not self.in_transaction or commit_lsn != self._commit_lsn:
            raise ProtocolError(f"commit {LSN(commit_lsn)} ends no transaction that began")
        self.in_transaction = False
        if self._skip == _COMPLETE:
            return
        if self.ordinal < self._skip:
            raise history_gap(
                f"transaction {LSN(commit_lsn)} ends after {self.ordinal} changes, the log holds"
                f" {self._skip} of it"
            )
        if end_lsn < self._end_lsn:
            raise ProtocolError(f"commit end {LSN(end_lsn)} comes after {self.end_lsn}")
        if self.observer is not None:
            self.observer.on_commit()
        self._end_lsn = end_lsn
        xid = NO_TRANSACTION if self.xid is None else self.xid
        self._last_change = (commit_lsn, self.ordinal, False, xid)
        self.committed_at_us = us

    def _change(self, b: bytes, at: int, stop: int, lsn: int, tag: int) -> None:
        """Take a row message that is not a plain new row; its relation id is at `at`."""
        table = self._table(b[at : at + 4])
        self.ordinal += 1
        if self.ordinal <= self._skip:
            return
        if table.observed and self.observer is not None:
            relation_id = int.from_bytes(b[at : at + 4], "big")
            self.observer.on_change(relation_id, bytes([tag]) + b[at:stop])
        q, before, olds = at + 4, _NULL, table.encoder.no_olds
        if b[q] != _NEW and tag != _INSERT:
            q, before, olds = table.encoder.old(b, q, stop)
        position = (self.ordinal, self._tx, self._times)
        if tag == _DELETE:
            if q != stop:
                raise ProtocolError(f"{stop - q} bytes after a delete's old row")
            self._publish_delete(table, lsn, before, table.encoder.key(olds))
            return
        op = _CREATED if tag == _INSERT else _UPDATED
        key, value = table.encoder.after(b, q, stop, before, olds, lsn, op, self.seq + 1, *position)
        if before is not _NULL and key != (old_key := table.encoder.key(olds)):
            # A changed key is a delete of the old one and a create of the new one.
            self._publish_delete(table, lsn, before, old_key)
            key, value = table.encoder.after(
                b, q, stop, _NULL, olds, lsn, _CREATED, self.seq + 1, *position
            )
        self._send(table, key, value)

    def _publish_delete(
        self, table: TableRoute, lsn: int, before: bytes, key: bytes | None
    ) -> None:
        """Publish a delete and, if there is a key, its tombstone, in one partition."""
        position = (self.seq + 1, self.ordinal, self._tx, self._times)
        partition, key = self._send(table, key, table.encoder.delete(before, lsn, *position))
        if key is not None:
            partition.append({"key": key, "value": None})
            partition.others += 1

    def _truncate(self, truncate: messages.Truncate, lsn: int) -> None:
        tables = [(each, self._table(each.to_bytes(4, "big"))) for each in truncate.relation_ids]
        for relation_id, table in tables:
            self.ordinal += 1
            if self.ordinal > self._skip:
                if table.observed and self.observer is not None:
                    self.observer.on_truncate(relation_id)
                position = (self.seq + 1, self.ordinal, self._tx, self._times)
                self._send(table, None, table.encoder.truncate(lsn, *position))

    def _message(self, message: messages.LogicalMessage, lsn: int) -> Step | None:
        """Publish a logical message; outside any transaction it is a transaction of its own.

        A message of ours takes no ordinal: it is only passed to the observer, and not while
        replaying. A message that claims to be ours and is published is verified first.
        """
        if message.transactional:
            if not self.in_transaction:
                raise ProtocolError("a transactional message outside any transaction")
            if message.prefix.startswith(OURS):
                return self._pass_on(message, lsn, known=self.replaying)
            self.ordinal += 1
            if self.ordinal > self._skip and (verified := self._verified(message)):
                self._publish_message(verified, lsn)
            return None
        if self.in_transaction:
            raise ProtocolError("a non-transactional message inside a transaction")
        if self._replay is not None:
            self._replay.message(message.lsn)
        if message.prefix.startswith(OURS):
            return self._pass_on(message, lsn, known=message.lsn <= self._resume.end_lsn)
        if message.lsn > self._resume.end_lsn and (verified := self._verified(message)):
            # It has no time of its own, and the server's clock differs at each replay. Ordinal 0:
            # the next transaction's commit record may start where the message ends.
            self.begin(message.lsn, self.committed_at_us, None)
            self._publish_message(verified, lsn)
            self.commit(message.lsn, message.lsn, self.committed_at_us)
        return None

    def _pass_on(self, message: messages.LogicalMessage, lsn: int, *, known: bool) -> Step | None:
        if self.observer is None or known:
            return None
        return self.observer.on_message(message, lsn)

    def _verified(self, message: messages.LogicalMessage) -> messages.LogicalMessage | None:
        if not message.prefix.startswith(PUBLISHED_OURS):
            return message
        return self.observer.verified(message) if self.observer else None

    def _publish_message(self, message: messages.LogicalMessage, lsn: int) -> None:
        position = (self.seq + 1, self.ordinal, self._tx, self._times)
        self._send(self._logical, *self._logical.encoder.event(message, lsn, *position))

    def _send(self, table: TableRoute | LogicalMessages, key: bytes | None, value: bytes) -> Sent:
        """Number an event and put it into the batch."""
        self.seq += 1
        self._batch.bytes += len(value)
        return table.send(key, value)

    def _table(self, relation_id: bytes) -> TableRoute:
        if not self.in_transaction or relation_id not in self._tables:
            raise ProtocolError("a row of no transaction, or of a table that was not described")
        return self._tables[relation_id]
