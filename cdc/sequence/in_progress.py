"""Transactions that Postgres streams before they commit, block by block.

Each block's messages go into the spool as they arrive; at the commit the spool returns them and
they are sequenced like any other transaction's. What a subtransaction wrote is dropped if it
aborts.

Two things a stream does not always show: that a subtransaction has aborted, and which one a logical
message belongs to. If either is in doubt, the transaction is not published from its blocks:
`RereadError` ends the session, and in the next one Postgres sends it complete, at its commit. The
same happens if a table was described differently after the transaction's own description: read back
at the commit, the older description would replace the newer one, which Postgres does not repeat. An
abort leaves no description in doubt: if the stream shows one, Postgres describes everything that
follows again.

https://www.postgresql.org/docs/current/protocol-logical-replication.html (stream blocks)
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from cdc.decode import messages, pgoutput
from cdc.decode.frames import COPY_DATA, HEADER_SIZE, PADDING, PAYLOAD, XLOG_DATA, content_end
from cdc.errors import ProtocolError, RereadError
from cdc.sequence.state import Pause

if TYPE_CHECKING:
    from cdc.sequence.spool import Committed, Spool

# As `cdc.decode.frames.head`, with the xid after the tag.
_head = Struct(">BIBQ16xBI").unpack_from

_STOP, _MESSAGE, _ORIGIN, _RELATION = b"EMOR"
_CHANGES: Final = frozenset(b"IUDTRY")  # and what describes them: each carries its xid


class _Open:
    """An open transaction: who wrote last, and what may have been rolled back unreported."""

    def __init__(self, xid: int) -> None:
        # Kept from block to block: a message without an xid, as the origin at the start of each
        # block, must not count as the top-level transaction's, because that would end the
        # subtransactions that may still abort.
        self.xid = self.writer = xid
        self.parts_at = -1  # where in the spool the first bytes of subtransactions start
        self.messages = False
        self.described: dict[int, messages.Relation] = {}
        self.outdated = False

    def written_by(self, writer: int, size: int) -> None:
        """Note who writes from `size` on."""
        self.writer = writer
        if writer != self.xid and self.parts_at < 0:
            self.parts_at = size

    def truncated_to(self, size: int) -> None:
        """Note that everything from `size` on was dropped."""
        if self.parts_at >= size:
            self.parts_at = -1

    def described_outside(self, relation: messages.Relation) -> None:
        """Note how a table is described outside the transaction's own blocks."""
        if self.described.get(relation.relation_id, relation) != relation:
            self.outdated = True

    @property
    def in_doubt(self) -> bool:
        """Whether its blocks may differ from what was committed.

        They may hold changes of an aborted subtransaction: its abort is not reported if its changes
        were too large for the server's memory, and so on its disk when the rest was streamed.
        """
        return self.parts_at >= 0 or self.messages or self.outdated


class OpenTransactions:
    """Every open transaction of which a block has arrived."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._open: dict[int, _Open] = {}
        self._xid = 0  # whose block is open; 0 for none

    @property
    def in_block(self) -> bool:
        """Whether what comes next belongs to a block."""
        return self._xid != 0

    def start(self, block: messages.StreamStart) -> None:
        """Start a block."""
        if self._xid:
            raise ProtocolError("a stream block begins inside another")
        self._xid = block.xid
        self._open.setdefault(block.xid, _Open(block.xid))

    def walk(self, chunk: bytes, at: int) -> tuple[int, Pause | None]:
        """Spool the block's frames from `at` on; return where it stopped, None at the block's end.

        Raises SpoolError if they can't be written to the disk.
        """
        end, run_start = content_end(chunk), at
        transaction = self._open[self._xid]
        while at + HEADER_SIZE <= end:
            kind, length, inner, _, tag, xid = _head(chunk, at)
            stop = at + 1 + length
            if stop > end:
                break
            if inner != XLOG_DATA or kind != COPY_DATA:
                self._append(chunk, run_start, at)
                return at, Pause.OTHER
            if tag in _CHANGES:
                if xid != transaction.writer:
                    self._append(chunk, run_start, at)
                    transaction.written_by(xid, self._spool.size(self._xid))
                    run_start = at
                if tag == _RELATION:
                    relation = _plain(
                        pgoutput.decode(chunk[at + PAYLOAD : stop], in_stream=True, parallel=False)
                    )
                    transaction.described[relation.relation_id] = relation
            elif tag == _STOP:
                self._append(chunk, run_start, at)
                self._xid = 0
                return stop, None
            elif tag == _MESSAGE:
                transaction.messages = True  # its xid is the top-level transaction's
            elif tag != _ORIGIN:
                raise ProtocolError(f"message {bytes([tag])!r} inside a stream block")
            at = stop
        self._append(chunk, run_start, at)
        return at, Pause.MORE

    def abort(self, message: messages.StreamAbort) -> None:
        """Drop what the (sub)transaction wrote."""
        self._spool.abort(message.xid, message.subxid)
        if message.subxid == message.xid:
            self._open.pop(message.xid, None)
        elif message.xid in self._open:
            self._open[message.xid].truncated_to(self._spool.size(message.xid))

    def note_description(self, relation: messages.Relation) -> None:
        """Note a description outside the open transactions' own blocks."""
        for transaction in self._open.values():
            transaction.described_outside(_plain(relation))

    def commit(self, message: messages.StreamCommit) -> Committed:
        """Return the transaction's frames, in chunks of complete ones.

        Raises RereadError if they may differ from what was committed.
        """
        if self._open.pop(message.xid, _Open(message.xid)).in_doubt:
            raise RereadError(
                f"transaction {message.xid}, streamed before its commit at {message.commit_lsn},"
                " has subtransactions or logical messages, of which its stream does not always show"
                " that they were rolled back, or tables that have changed since it described them"
            )
        return self._spool.commit(message.xid, PADDING)

    def _append(self, chunk: bytes, begin: int, end: int) -> None:
        if begin < end:
            self._spool.append(
                self._xid, self._open[self._xid].writer, memoryview(chunk)[begin:end]
            )


def _plain(relation: messages.Message) -> messages.Relation:
    """Return the description without the transaction it came in."""
    assert isinstance(relation, messages.Relation)
    return replace(relation, xid=None)
