"""The wire against a simulated server: every message, at every cut, and its endings."""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from struct import pack
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg import errors
from psycopg.pq import ExecStatus

from cdc.errors import (
    CDCError,
    ConfigError,
    GapError,
    Policy,
    ProtocolError,
    SlotBusyError,
    UnavailableError,
)
from cdc.source import stream as stream_module
from cdc.source.connection import translate
from cdc.source.wire import READ_BYTES, Wire, wire
from tests.fixtures.daemon import wait_until
from tests.property.played import PlayedWalsender, stream_on
from tests.property.stream import chunk

COMMAND = (
    b'START_REPLICATION SLOT "s" LOGICAL 0/0'
    b" (proto_version '1', publication_names '\"p\"', messages 'true')"
)
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
    """The other end of the socket, with a wire and a stream at ours."""

    def __init__(self) -> None:
        ours, self.end = socket.socketpair()
        pgconn = SimpleNamespace(socket=ours.detach(), ssl_in_use=False, used_gssapi=False)
        client: Any = SimpleNamespace(pgconn=pgconn)
        self.descriptor: int = pgconn.socket
        self.wire: Wire = wire(client, replication=True)
        self.stream = stream_on(PlayedWalsender(self.wire, self.descriptor))

    def say(self, data: bytes) -> None:
        self.end.sendall(data)

    def received(self) -> bytes:
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

    wait_until(enough, "the bytes do not come", pause=0)
    return bytes(came)


# -- the start -------------------------------------------------------------------------------------


def test_the_start_sends_the_command_and_keeps_what_arrives_after_the_answer(
    server: Server,
) -> None:
    server.say(COPY_BOTH + DATA + DATA[:9])
    server.stream.start()
    assert server.received() == QUERY
    data = server.stream.read()
    assert data == chunk(DATA, DATA[:9])
    server.stream.keep(data, len(DATA))
    assert server.stream.read() == b""
    server.say(DATA[9:])
    assert server.stream.read() == chunk(DATA)


def test_messages_before_the_answer_are_processed_or_ignored(server: Server) -> None:
    status = message(b"S", b"TimeZone\0UTC\0")
    server.say(status + notice("mind the gap") + message(b"Z", b"I") + COPY_BOTH)
    server.stream.start()
    assert server.stream.read() == b""


def test_a_publication_dropped_before_the_start_is_an_error(server: Server) -> None:
    server.say(notice('skipped loading publication "p"') + COPY_BOTH)
    with pytest.raises(GapError, match="was dropped"):
        server.stream.start()


def test_an_answer_cut_at_every_byte_is_understood() -> None:
    answer = notice("n") + message(b"S", b"a\0b\0") + COPY_BOTH
    for cut in range(1, len(answer)):
        server = Server()
        server.say(answer[:cut])
        late = threading.Timer(0.002, server.say, [answer[cut:] + DATA])
        late.start()
        server.stream.start()
        late.join()
        assert server.stream.read() == chunk(DATA)
        server.wire.close()
        server.end.close()
        socket.socket(fileno=server.descriptor).close()


def test_a_start_that_is_refused_raises_the_servers_error(server: Server) -> None:
    server.say(error("55006", 'replication slot "s" is active for PID 1'))
    with pytest.raises(SlotBusyError, match="is active for PID 1") as raised:
        server.stream.start()
    assert isinstance(raised.value.__cause__, errors.ObjectInUse)
    assert raised.value.__cause__.sqlstate == "55006"


@pytest.mark.parametrize("state", ["XX999", "", "zzzzz"])
def test_an_error_of_an_unknown_state_is_an_error_all_the_same(server: Server, state: str) -> None:
    server.say(error(state, "what nobody has seen"))
    with pytest.raises(CDCError, match="what nobody has seen") as raised:
        server.stream.start()
    assert isinstance(raised.value.__cause__, psycopg.DatabaseError)
    assert raised.value.__cause__.sqlstate == (state or None)


def test_an_error_that_is_not_utf8_is_shown_as_far_as_it_can_be(server: Server) -> None:
    server.say(message(b"E", b"SFEHLER\0C42704\0Mgel\xf6scht\0\0"))
    with pytest.raises(CDCError, match="gel\ufffdscht"):
        server.stream.start()


def test_a_server_that_closes_or_does_not_answer_is_an_error(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "START_SECONDS", 0.05)
    with pytest.raises(UnavailableError, match="does not answer START_REPLICATION"):
        server.stream.start()
    server.say(COPY_BOTH[:4])
    server.end.shutdown(socket.SHUT_WR)
    with pytest.raises(UnavailableError, match="server closed the connection"):
        server.stream.start()


def test_an_answer_of_another_protocol_is_refused(server: Server) -> None:
    server.say(message(b"X", b"what is this"))
    with pytest.raises(ProtocolError, match="type b'X'"):
        server.stream.start()


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

    wait_until(enough, "the bytes do not come", pause=0)
    sender.join()
    assert longest <= READ_BYTES


def test_a_server_that_closes_the_connection_is_retried(
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
    it = wire(client, replication=True)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    with pytest.raises(psycopg.OperationalError, match="the connection broke") as raised:
        wait_until(it.read, "no reset", pause=0.001)
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
    assert server.received() == b"still here"


# -- sending ---------------------------------------------------------------------------------------


def test_feedback_is_a_copy_data_message(server: Server) -> None:
    server.wire.send(b"r" + bytes(33))
    assert server.received() == message(b"d", b"r" + bytes(33))


def test_what_a_busy_server_does_not_accept_is_sent_later_in_order(
    server: Server,
) -> None:
    sent = [b"r" + pack(">I", number) + bytes(20_000) for number in range(100)]
    for each in sent:
        server.wire.send(each)  # a few megabytes, more than a socket holds
    expected = b"".join(message(b"d", each) for each in sent)
    got = bytearray()

    def all_there() -> bool:
        got.extend(server.received())
        assert server.wire.read() == b""  # reading is what sends the rest
        return len(got) >= len(expected)

    wait_until(all_there, "the rest does not come", pause=0)
    assert bytes(got) == expected


# -- messages that are no data ---------------------------------------------------------------------


def other(server: Server, data: bytes) -> None:
    server.stream.other(chunk(data), 0)


def test_an_error_in_the_stream_raises_what_it_reports(server: Server) -> None:
    with pytest.raises(UnavailableError, match="terminating connection") as raised:
        other(server, error("57P01", "terminating connection due to administrator command"))
    assert raised.value.policy is Policy.BACKOFF
    with pytest.raises(CDCError) as missing:
        other(server, error("42704", 'publication "p" does not exist'))
    assert not isinstance(missing.value, ConfigError | UnavailableError)


_STANDBY = 'replication slot "x" specified in parameter "synchronized_standby_slots" {}'


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("55000", _STANDBY.format("does not have active_pid")),
        ("22023", _STANDBY.format("does not exist")),
        ("22023", "le slot « x » spécifié dans le paramètre « synchronized_standby_slots »"),
        ("55000", "what a later version says"),
    ],
)
def test_a_server_that_stops_while_its_standby_is_down_is_retried(
    server: Server, state: str, text: str
) -> None:
    """The walsender waits for that standby, and fails when it must stop: nothing is lost."""
    with pytest.raises(UnavailableError) as raised:
        other(server, error(state, text))
    assert "synchronized_standby_slots" in raised.value.hint


def test_a_state_that_lasts_is_an_error_in_the_stream_and_at_the_start(server: Server) -> None:
    with pytest.raises(ConfigError):
        other(server, error("22023", "invalid regular expression option"))
    server.say(error("55000", 'can no longer get changes from replication slot "s"'))
    with pytest.raises(GapError, match="can no longer get changes"):
        server.stream.start()


def test_a_notice_of_another_subject_is_ignored(server: Server) -> None:
    other(server, notice("mind the gap"))
    other(server, message(b"N", b"SNOTICE\0\0"))


def test_the_servers_end_of_the_copy_is_retried(server: Server) -> None:
    with pytest.raises(UnavailableError, match="ended the replication stream"):
        other(server, message(b"c"))


@pytest.mark.parametrize("kind", [b"S", b"C", b"Z", b"A"])
def test_what_a_server_may_send_at_any_time_is_ignored(server: Server, kind: bytes) -> None:
    other(server, message(kind, b"whatever\0"))


@pytest.mark.parametrize("kind", [b"T", b"D", b"W", b"\0", b"H"])
def test_any_other_message_is_refused(server: Server, kind: bytes) -> None:
    with pytest.raises(ProtocolError):
        other(server, message(kind, b"whatever"))


# -- what only libpq can read ----------------------------------------------------------------------


class Libpq:
    """An encrypted connection: a simulated libpq, whose calls return the given items."""

    ssl_in_use, used_gssapi, nonblocking = True, False, 0

    def __init__(self, *came: bytes | str | None, end: object = None) -> None:
        """Strings are notices, None is nothing more for now; after them the copy has ended."""
        self.pgconn = self
        self._came, self._results = deque(came), deque([end] if end else [])

    def add_notice_handler(self, handler: Callable[[object], None]) -> None:
        self.handler: Callable[[object], None] | None = handler

    def remove_notice_handler(self, handler: object) -> None:
        assert handler == self.handler
        self.handler = None

    def exec_(self, _command: bytes) -> SimpleNamespace:
        return SimpleNamespace(status=ExecStatus.COPY_BOTH)

    def exec_params(self, _command: bytes, _values: None) -> SimpleNamespace:
        return SimpleNamespace(status=ExecStatus.COPY_OUT)

    def consume_input(self) -> None:
        """Do nothing: all has arrived."""

    def get_copy_data(self, _async: int) -> tuple[int, memoryview]:
        assert self._came is not None, "libpq was asked after the end"
        while self._came:
            item = self._came.popleft()
            if isinstance(item, str):
                assert self.handler is not None
                self.handler(SimpleNamespace(message_primary=item))
            else:
                return len(item or b""), memoryview(item or b"")
        self._came = None  # type: ignore[assignment]
        return -1, memoryview(b"")

    def get_result(self) -> object:
        return self._results.popleft() if self._results else None


def through_libpq(came: Libpq, *, replication: bool) -> Wire:
    connection: Any = came
    it = wire(connection, replication=replication)
    it.start(COMMAND)
    return it


def test_what_libpq_processes_itself_is_read_as_the_server_had_sent_it() -> None:
    came = Libpq(b"wrow", 'skipped loading publication "p"', b"wmore", None)
    it = through_libpq(came, replication=True)
    assert it.read() == message(b"W")
    text = message(b"N", b'Mskipped loading publication "p"\0\0')
    assert it.read() == text + message(b"d", b"wrow") + message(b"d", b"wmore")
    assert it.read() == message(b"c") + message(b"Z", b"T")
    it.close()
    assert came.handler is None


def test_the_servers_error_is_raised_after_the_data_that_preceded_it() -> None:
    """Libpq can't be asked for data again once it has reported the end."""
    result = SimpleNamespace(
        status=ExecStatus.FATAL_ERROR,
        error_field=lambda _: b"42704",
        get_error_message=lambda _encoding="": "gone",
    )
    it = through_libpq(Libpq(b"wrow", end=result), replication=True)
    assert it.read() == message(b"W")
    assert it.read() == message(b"d", b"wrow")
    with pytest.raises(errors.UndefinedObject):
        it.read()


def test_a_copys_rows_and_end_are_read_as_messages() -> None:
    done = SimpleNamespace(status=ExecStatus.COMMAND_OK)
    it = through_libpq(Libpq(b"row", end=done), replication=False)
    read = b"".join(it.read() for _ in range(3))
    ends = message(b"c") + message(b"Z", b"T")
    assert read == message(b"H") + message(b"d", b"row") + ends
