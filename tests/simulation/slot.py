"""A replication slot: committed transactions in order, sent again from the confirmed LSN.

`Wire` is the socket of one session. It returns the bytes that a walsender would send in pieces of
any size, with keepalives, and takes feedback. Everything after the confirmed LSN is sent in every
session; a slot may also have lost a confirmation, as it does when its server crashes.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import pack, unpack_from
from typing import TYPE_CHECKING, Final

import psycopg

from cdc.events import LSN
from tests.property.histories import History
from tests.simulation.walsender import Walsender

if TYPE_CHECKING:
    from tests.simulation.scheduler import Scheduler

_FEEDBACK: Final = ord("r")


def _keepalive(wal_end: int, *, reply: bool) -> bytes:
    return pack(">cIcQqB", b"d", 22, b"k", wal_end, 0, reply)


class Slot:
    """The server's side, in all sessions."""

    def __init__(self, history: History, scheduler: Scheduler) -> None:
        self.history = history
        self.committed = 0  # how many of the history's transactions are in the WAL
        self.confirmed = LSN(0)
        self.remembered = LSN(0)  # which confirmed LSN survives a crash of the server
        self.watch: Callable[[LSN], None] = lambda _: None
        self._scheduler = scheduler

    def goes_on(self) -> None:
        """Commit some more transactions at the source."""
        self.committed += self._scheduler.some(len(self.history) - self.committed)

    def confirm(self, lsn: LSN) -> None:
        self.watch(lsn)
        self.confirmed = max(self.confirmed, lsn)
        if self._scheduler.happens("slot is saved"):
            self.remembered = self.confirmed

    def first(self) -> int:
        """Return the first transaction that a session is sent."""
        if self._scheduler.happens("server crashes"):
            self.confirmed = self.remembered
        for index, transaction in enumerate(self.history):
            if transaction.final_lsn >= self.confirmed:
                return index
        return len(self.history)


class Wire:
    """One session's socket; has the methods of `cdc.source.wire.Wire`."""

    def __init__(self, slot: Slot, scheduler: Scheduler, *, streaming: bool) -> None:
        self._slot = slot
        self._streaming = streaming
        self._scheduler = scheduler
        self._next = 0
        self._buffer = b""
        self._wal_end = LSN(0)

    def start(self, _command: bytes) -> None:
        self._next = self._slot.first()
        self._wal_end = self._slot.confirmed
        self._sender = Walsender(
            self._slot.history, self._next, self._scheduler.chance, streaming=self._streaming
        )

    def make_room(self) -> None:
        """Do nothing: what is not read is not sent."""

    def read(self) -> bytes:
        """Return some of the available bytes, which may end inside a message."""
        if self._scheduler.happens("connection is cut"):
            raise psycopg.OperationalError("simulated")
        self._fill()
        size = self._scheduler.piece(len(self._buffer))
        piece, self._buffer = self._buffer[:size], self._buffer[size:]
        return piece

    def send(self, data: bytes) -> None:
        if self._scheduler.happens("feedback is lost"):
            raise psycopg.OperationalError("simulated")
        kind, _, confirmed = unpack_from(">BQQ", data)
        assert kind == _FEEDBACK
        if confirmed:
            self._slot.confirm(LSN(confirmed))

    def close(self) -> None:
        self._buffer = b""

    def _fill(self) -> None:
        slot, scheduler = self._slot, self._scheduler
        while self._next < slot.committed and len(self._buffer) < 100_000:
            transaction = slot.history[self._next]
            self._blocks()
            for frame in self._sender.committed():
                if scheduler.happens("keepalive within"):
                    # The walsender has read up to the commit record, which it is decoding.
                    self._say(transaction.final_lsn)
                self._buffer += frame
            self._wal_end = LSN(transaction.end_lsn)
            self._next += 1
        self._blocks()
        if self._next >= slot.committed and scheduler.happens("keepalive"):
            more = slot.history[self._next :]
            limit = more[0].final_lsn if more else self._wal_end + 50
            self._say(self._wal_end + scheduler.some(max(0, limit - self._wal_end)))

    def _blocks(self) -> None:
        while self._streaming and self._scheduler.happens("block comes"):
            self._buffer += b"".join(self._sender.block())

    def _say(self, wal_end: int) -> None:
        reply = self._scheduler.happens("reply requested")
        self._buffer += _keepalive(wal_end, reply=reply)
