"""The wire against a simulated server: every message, at every cut, and its endings."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from struct import pack
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg import errors

from cdc.errors import ConfigError, Policy, ProtocolError, SlotBusyError, UnavailableError
from cdc.source import wire as wire_module
from cdc.source.connection import translate
from cdc.source.wire import READ_BYTES, Wire, wire
from tests.fixtures.daemon import wait_until

COMMAND = b'START_REPLICATION SLOT "s" LOGICAL 0/0 ()'
QUERY = b"Q" + pack(">I", 5 + len(COMMAND)) + COMMAND + b"\0"


def message(kind: bytes, body: bytes = b"") -> bytes:
    return kind + pack(">I", 4 + len(body)) + body


def error(state: str = "55006", text: str = "slot is active", severity: str = "ERROR") -> bytes:
    fields = [f"S{severity}", f"V{severity}", f"C{state}", f"M{text}", "Fslot.c", "L1"]
    return message(b"E", b"".join(field.encode() + b"\0" for field in fields) + b"\0")


def notice(text: str) -> bytes:
    return message(b"N", b"SWARNING\0C01000\0M" + text.encode() + b"\0\0")


COPY_BOTH = message(b"W", b"\0\0\0")
DATA = message(b"d", b"w" + bytes(24) + b"B" + bytes(20))


class Server:
    """The other end of the socket, and the notices that the wire passed on."""

    def __init__(self) -> None:
        ours, self.end = socket.socketpair()
        pgconn = SimpleNamespace(socket=ours.detach(), ssl_in_use=False, used_gssapi=False)
        client: Any = SimpleNamespace(pgconn=pgconn)
        self.descriptor: int = pgconn.socket
        self.notices: list[str] = []
        self.wire = wire(client, self.notices.append)

    def say(self, data: bytes) -> None:
        self.end.sendall(data)

    def heard(self) -> bytes:
        """Return what has arrived from the wire so far."""
        self.end.settimeout(0)
        try:
            return self.end.recv(1 << 20)
        except BlockingIOError:
            return b""


@pytest.fixture
def server() -> Iterator[Server]:
    it = Server()
    yield it
    it.wire.close()
    it.end.close()
    socket.socket(fileno=it.descriptor).close()


def read_all(of: Wire, size: int) -> bytes:
    """Read until `size` bytes have arrived."""
    came = bytearray()

    def enough() -> bool:
        came.extend(of.read())
        return len(came) >= size

    wait_until(enough, "the bytes do not come", 10, pause=0)
    return bytes(came)


# -- the start -------------------------------------------------------------------------------------


def test_the_start_sends_the_command_and_hands_over_what_came_behind_the_answer(
    server: Server,
) -> None:
    server.say(COPY_BOTH + DATA + DATA[:9])
    server.wire.start(COMMAND)
    assert server.heard() == QUERY
    assert server.wire.read() == DATA + DATA[:9]
    assert server.wire.read() == b""
    server.say(DATA[9:])
    assert server.wire.read() == DATA[9:]


def test_what_else_a_server_says_before_its_answer_is_heard_or_left(server: Server) -> None:
    status = message(b"S", b"TimeZone\0UTC\0")
    server.say(status + notice("mind the gap") + message(b"Z", b"I") + COPY_BOTH)
    server.wire.start(COMMAND)
    assert server.notices == ["mind the gap"]
    assert server.wire.read() == b""


def test_an_answer_cut_at_every_byte_is_understood() -> None:
    answer = notice("n") + message(b"S", b"a\0b\0") + COPY_BOTH
    for cut in range(1, len(answer)):
        server = Server()
        server.say(answer[:cut])
        late = threading.Timer(0.002, server.say, [answer[cut:] + DATA])
        late.start()
        server.wire.start(COMMAND)
        late.join()
        assert read_all(server.wire, len(DATA)) == DATA
        assert server.notices == ["n"]
        server.wire.close()
        server.end.close()
        socket.socket(fileno=server.descriptor).close()


def test_a_start_that_is_refused_raises_the_servers_error(server: Server) -> None:
    server.say(error("55006", 'replication slot "s" is active for PID 1'))
    with pytest.raises(errors.ObjectInUse, match="is active for PID 1") as raised:
        server.wire.start(COMMAND)
    assert raised.value.sqlstate == "55006"
    assert isinstance(translate(raised.value, "starting"), SlotBusyError)


@pytest.mark.parametrize("state", ["XX999", "", "zzzzz"])
def test_an_error_of_an_unknown_state_is_an_error_all_the_same(server: Server, state: str) -> None:
    server.say(error(state, "what nobody has seen"))
    with pytest.raises(psycopg.DatabaseError, match="what nobody has seen") as raised:
        server.wire.start(COMMAND)
    assert raised.value.sqlstate == (state or None)
    assert "what nobody has seen" in translate(raised.value, "starting").what


def test_an_error_in_other_bytes_than_utf8_is_told_as_far_as_it_can_be(server: Server) -> None:
    server.say(message(b"E", b"SFEHLER\0C42704\0Mgel\xf6scht\0\0"))
    with pytest.raises(errors.UndefinedObject, match="gel\ufffdscht"):
        server.wire.start(COMMAND)


def test_a_server_that_closes_or_keeps_silent_instead_of_answering(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_module, "_START_SECONDS", 0.05)
    with pytest.raises(psycopg.OperationalError, match="does not answer START_REPLICATION"):
        server.wire.start(COMMAND)
    server.say(COPY_BOTH[:4])
    server.end.shutdown(socket.SHUT_WR)
    with pytest.raises(psycopg.OperationalError, match="server closed the connection") as raised:
        server.wire.start(COMMAND)
    assert isinstance(translate(raised.value, "starting"), UnavailableError)


def test_an_answer_of_another_protocol_is_refused(server: Server) -> None:
    server.say(message(b"X", b"what is this"))
    with pytest.raises(ProtocolError, match="type b'X'"):
        server.wire.start(COMMAND)


# -- reading ---------------------------------------------------------------------------------------


def test_nothing_to_read_is_nothing_and_never_blocks(server: Server) -> None:
    assert server.wire.read() == b""
    server.say(DATA[:1])
    assert server.wire.read() == DATA[:1]
    assert server.wire.read() == b""


def test_fifty_megabytes_come_through_piece_by_piece(server: Server) -> None:
    size = 50 << 20
    sender = threading.Thread(target=server.say, args=[bytes(size)])
    sender.start()
    count, longest = 0, 0

    def enough() -> bool:
        nonlocal count, longest
        came = server.wire.read()
        count, longest = count + len(came), max(longest, len(came))
        return count == size

    wait_until(enough, "the bytes do not come", 20, pause=0)
    sender.join()
    assert longest <= READ_BYTES


def test_a_server_that_closes_has_ended_the_connection_and_may_be_tried_again(
    server: Server,
) -> None:
    server.say(DATA)
    server.end.shutdown(socket.SHUT_WR)
    assert server.wire.read() == DATA, "what came before the end counts"
    with pytest.raises(psycopg.OperationalError, match="closed the connection") as raised:
        server.wire.read()
    assert translate(raised.value, "reading").policy is Policy.BACKOFF


def test_a_reset_is_a_broken_connection() -> None:
    """By TCP: a socket pair knows no reset."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    pgconn = SimpleNamespace(socket=ours.fileno(), ssl_in_use=False, used_gssapi=False)
    client: Any = SimpleNamespace(pgconn=pgconn)
    it = wire(client, print)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    with pytest.raises(psycopg.OperationalError, match="the connection broke") as raised:
        wait_until(it.read, "no reset", 10, pause=0.001)
    assert translate(raised.value, "reading").policy is Policy.BACKOFF
    with pytest.raises(psycopg.OperationalError, match="the connection broke"):
        it.send(b"r")
    it.close()
    ours.close()


def test_to_close_the_wire_leaves_the_connections_own_descriptor_open(server: Server) -> None:
    server.wire.close()
    again = socket.socket(fileno=socket.dup(server.descriptor))
    again.sendall(b"still here")
    again.close()
    assert server.heard() == b"still here"


# -- sending ---------------------------------------------------------------------------------------


def test_feedback_is_a_copy_data_message(server: Server) -> None:
    server.wire.send(b"r" + bytes(33))
    assert server.heard() == message(b"d", b"r" + bytes(33))


def test_what_a_busy_server_does_not_take_is_kept_in_order_and_goes_out_later(
    server: Server,
) -> None:
    sent = [b"r" + pack(">I", number) + bytes(20_000) for number in range(100)]
    for each in sent:
        server.wire.send(each)  # a few megabytes, more than a socket holds
    expected = b"".join(message(b"d", each) for each in sent)
    got = bytearray()

    def all_there() -> bool:
        got.extend(server.heard())
        assert server.wire.read() == b""  # reading is what sends the rest
        return len(got) >= len(expected)

    wait_until(all_there, "the rest does not come", 10, pause=0)
    assert bytes(got) == expected


# -- messages that are no data ---------------------------------------------------------------------


def test_an_error_in_the_stream_raises_what_it_says(server: Server) -> None:
    with pytest.raises(errors.AdminShutdown, match="terminating connection") as raised:
        server.wire.other(error("57P01", "terminating connection due to administrator command"))
    assert translate(raised.value, "reading").policy is Policy.BACKOFF
    with pytest.raises(errors.UndefinedObject) as gone:
        server.wire.other(error("42704", 'publication "p" does not exist'))
    assert not isinstance(translate(gone.value, "reading"), ConfigError | UnavailableError)


def test_a_notice_is_passed_on_with_its_text_alone(server: Server) -> None:
    server.wire.other(notice('skipped loading publication "p"'))
    server.wire.other(message(b"N", b"SNOTICE\0\0"))
    assert server.notices == ['skipped loading publication "p"', ""]


def test_the_servers_end_of_the_copy_is_a_reason_to_come_again(server: Server) -> None:
    with pytest.raises(UnavailableError, match="ended the replication stream"):
        server.wire.other(message(b"c"))


@pytest.mark.parametrize("kind", [b"S", b"C", b"Z", b"A"])
def test_what_a_server_may_say_at_any_time_is_nothing_to_us(server: Server, kind: bytes) -> None:
    server.wire.other(message(kind, b"whatever\0"))


@pytest.mark.parametrize("kind", [b"T", b"D", b"W", b"\0", b"H"])
def test_any_other_message_is_refused(server: Server, kind: bytes) -> None:
    with pytest.raises(ProtocolError):
        server.wire.other(message(kind, b"whatever"))
