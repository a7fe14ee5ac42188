"""A TCP wire that is not read: what it sends arrives all the same, however much waits.

Only the kernel's own TCP shows it: a full receive buffer that may not grow makes Linux 6.6 and
later drop acknowledgements too, at times; so many wires are tried at once.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from cdc.source.stream import UNREAD_SECONDS
from cdc.source.wire import BUFFER_BYTES, Wire, wire
from tests.fixtures.daemon import START_SECONDS, wait_until

_WIRES = 16
_FEEDBACK = bytes(34)
_HEAD_BYTES = 5  # of the message that carries it
# How much a walsender flushes at a time, and how often: small pieces use a buffer up early.
_PIECES = (b"x" * 1_000, b"x" * 700)
_PAUSE_SECONDS = 0.0005
_FILL_SECONDS = 1.5


class Unread:
    """One wire and the server's end of it."""

    def __init__(self, listener: socket.socket, piece: bytes) -> None:
        ours = socket.create_connection(listener.getsockname())
        self.end, _ = listener.accept()
        for each in (ours, self.end):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.end.settimeout(0)
        self.ours = ours
        pgconn: Any = SimpleNamespace(socket=ours.fileno(), ssl_in_use=False, used_gssapi=False)
        client: Any = SimpleNamespace(pgconn=pgconn)
        self.wire: Wire = wire(client, replication=True)
        self.piece, self.sent, self.received = piece, 0, 0

    def fill(self) -> None:
        with suppress(BlockingIOError):
            self.sent += self.end.send(self.piece)

    def receive(self) -> int:
        with suppress(BlockingIOError):
            self.received += len(self.end.recv(1 << 16))
        return self.received

    def close(self) -> None:
        self.wire.close()
        self.ours.close()
        self.end.close()


@pytest.fixture
def unread() -> Iterator[list[Unread]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = [Unread(listener, _PIECES[number % 2]) for number in range(_WIRES)]
    yield made
    for each in made:
        each.close()


def _full(unread: list[Unread]) -> bool:
    return all(each.sent > BUFFER_BYTES for each in unread)


def test_what_is_sent_arrives_though_nothing_is_read(unread: list[Unread]) -> None:
    """For feedback: without it a walsender ends the session after wal_sender_timeout."""
    began, room, sent = time.monotonic(), False, 0
    while (passed := time.monotonic() - began) < _FILL_SECONDS or not _full(unread):
        assert passed < START_SECONDS, "no buffer was full"
        for each in unread:
            each.fill()
        if not room and passed > UNREAD_SECONDS:
            room = True
            for each in unread:
                each.wire.make_room()
        if passed > 0.1 * (sent + 1):
            sent += 1
            for each in unread:
                each.wire.send(_FEEDBACK)
        time.sleep(_PAUSE_SECONDS)
    wanted = sent * (_HEAD_BYTES + len(_FEEDBACK))
    wait_until(lambda: all(each.receive() == wanted for each in unread), "feedback does not arrive")


def test_what_piled_up_is_read_completely_and_the_buffer_shrinks_again(
    unread: list[Unread],
) -> None:
    its = unread[0]
    its.wire.make_room()
    while its.sent < 4 * BUFFER_BYTES:
        its.fill()
    read = 0

    def all_read() -> bool:
        nonlocal read
        read += len(its.wire.read())
        return read == its.sent

    wait_until(all_read, "what was sent does not come", pause=0)
    its.fill()
    wait_until(its.wire.read, "the last does not come")
    size = its.ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    assert size == 2 * BUFFER_BYTES, "the kernel says twice what was asked for"
