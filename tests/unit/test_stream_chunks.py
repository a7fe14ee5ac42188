"""Chunks of the stream: complete messages first, for pieces of any size; and invalid frames."""

from __future__ import annotations

import tracemalloc
from random import Random
from struct import unpack

import psycopg
import pytest

from cdc.decode.frames import PADDING, content_end, length
from cdc.decode.messages import Insert
from cdc.errors import GapError, Policy, ProtocolError, UnavailableError
from cdc.events import LSN
from cdc.source import stream as stream_module
from cdc.source.wire import READ_BYTES
from tests.property.played import NOTICE, PlayedStream, cut, keepalive
from tests.property.stream import begin, chunk, commit, frame

ROW = frame(Insert(1, (b"1", b"a" * 40)))
MESSAGES = [begin(), keepalive(5), ROW, NOTICE, ROW, commit()]
ALL = b"".join(MESSAGES)


class Clock:
    """The stream's module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    it = Clock()
    monkeypatch.setattr(stream_module, "time", it)
    return it


def first(data: bytes) -> int:
    """Return where the first message of a chunk ends."""
    return int(1 + length(data)[0])


# -- chunks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("longest", [1, 2, 7, 40, 200, len(ALL)])
def test_any_cut_and_any_use_of_chunks_return_every_byte_once_in_order(longest: int) -> None:
    for seed in range(20):
        chance = Random(seed)
        stream = PlayedStream(cut(ALL, chance, longest))
        taken: list[bytes] = []
        while sum(map(len, taken)) < len(ALL):
            data = stream.read()
            if not data:
                continue
            assert data.endswith(PADDING)
            assert first(data) <= content_end(data), "its first message is not complete"
            at = 0
            for _ in range(chance.randint(1, 3)):
                if content_end(data) - at >= 5 and at + first(data[at:]) <= content_end(data):
                    taken.append(data[at : at + first(data[at:])])
                    at += len(taken[-1])
            stream.keep(data, at)
        assert taken == MESSAGES


def test_no_chunk_is_returned_before_its_first_message_is_complete() -> None:
    stream = PlayedStream([ROW[:3], ROW[3:6], ROW[6:-1]])
    assert [stream.read() for _ in range(4)] == [b""] * 4
    stream.wire.pieces.append(ROW[-1:] + ROW[:2])
    assert stream.read() == chunk(ROW, ROW[:2])


def test_what_is_kept_is_returned_first_and_at_once_if_it_is_complete() -> None:
    stream = PlayedStream([ROW + ROW + ROW[:9]])
    data = stream.read()
    stream.keep(data, len(ROW))
    assert stream.read() == chunk(ROW, ROW[:9])
    stream.keep(data, 2 * len(ROW))
    assert stream.read() == b""
    stream.wire.pieces.append(ROW[9:])
    assert stream.read() == chunk(ROW)
    stream.keep(chunk(ROW), len(ROW))
    assert stream.read() == b""


@pytest.mark.parametrize("in_front", [b"", ROW])
def test_a_huge_message_is_joined_once(in_front: bytes) -> None:
    """In one buffer, as the pieces arrive: never held twice, and never copied as it grows."""
    large = frame(Insert(1, (b"1", bytes(50 << 20))))
    data = in_front + large
    pieces = [data[at : at + READ_BYTES] for at in range(0, len(data), READ_BYTES)]
    stream = PlayedStream([*pieces, ROW])
    tracemalloc.start()
    if in_front:
        stream.keep(stream.read(), len(in_front))
    for _ in range(len(pieces) - 1 - bool(in_front)):
        assert stream.read() == b""
    read = stream.read()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < len(large) * 5 // 4
    assert read == chunk(large)
    assert stream.read() == chunk(ROW)


# -- what is no frame ------------------------------------------------------------------------------


def other(stream: PlayedStream, message: bytes) -> int:
    """Pass a message that is between two others; return where the stream found its end."""
    return stream.other(chunk(ROW, message, ROW), len(ROW)) - len(ROW)


def test_a_keepalive_is_answered_if_it_requests_a_reply() -> None:
    stream = PlayedStream([])
    assert other(stream, keepalive(0x500)) == len(keepalive(0))
    assert (stream.keepalive_lsn, stream.reply_requested, stream.wire.sent) == (0x500, False, [])
    other(stream, keepalive(0x600, reply=True))
    assert (stream.keepalive_lsn, stream.reply_requested) == (0x600, True)
    assert len(stream.wire.sent) == 1


@pytest.mark.parametrize(
    "bad",
    [
        b"d\0\0\0\x05k",
        b"d\0\0\0\x0ak" + bytes(5),
        keepalive(1).replace(b"\x16k", b"\x17k") + b"\0",
        b"d\0\0\0\x04",
        b"d\0\0\0\x06z\0",
    ],
    ids=["no keepalive's length", "half a keepalive", "too long", "empty", "of unknown kind"],
)
def test_copy_data_of_no_known_shape_is_refused(bad: bytes) -> None:
    with pytest.raises(ProtocolError):
        other(PlayedStream([]), bad)


def test_a_notice_changes_nothing_unless_the_publication_was_dropped() -> None:
    stream = PlayedStream([])
    assert other(stream, NOTICE) == len(NOTICE)
    text = b'Mskipped loading publication "p"\0\0'
    with pytest.raises(GapError, match='publication "p" was dropped'):
        other(stream, b"N" + (4 + len(text)).to_bytes(4, "big") + text)


def test_an_error_in_the_stream_is_translated() -> None:
    text = b"SFATAL\0C57P01\0Mgoing down\0\0"
    with pytest.raises(UnavailableError, match="going down") as raised:
        other(PlayedStream([]), b"E" + (4 + len(text)).to_bytes(4, "big") + text)
    assert raised.value.policy is Policy.BACKOFF


def test_a_connection_that_breaks_while_it_is_read_is_translated() -> None:
    stream = PlayedStream([])

    def broken() -> bytes:
        raise psycopg.OperationalError("the connection broke: reset")

    stream.wire.read = broken  # type: ignore[method-assign]
    with pytest.raises(UnavailableError, match="the connection broke"):
        stream.read()


def test_a_stop_while_a_standby_is_down_is_retried_where_libpq_reads() -> None:
    stream = PlayedStream([])

    def stopped() -> bytes:
        raise psycopg.errors.ObjectNotInPrerequisiteState("does not have active_pid")

    stream.wire.read = stopped  # type: ignore[method-assign]
    with pytest.raises(UnavailableError, match="active_pid"):
        stream.read()


# -- feedback and silence --------------------------------------------------------------------------


def positions(stream: PlayedStream) -> list[tuple[int, int, int, int]]:
    """Return what was sent: written, flushed, applied, and whether an answer is wanted."""
    found = [unpack(">cQQQqB", sent) for sent in stream.wire.sent]
    assert all(one[0] == b"r" for one in found)
    return [(*one[1:4], one[5]) for one in found]


def test_flushed_never_decreases_and_is_never_above_written() -> None:
    stream = PlayedStream([])
    stream.received_lsn = LSN(0x300)
    for lsn in (0x100, 0x200, 0x200, 0x150, 0x400):
        stream.confirm(LSN(lsn))
    assert positions(stream) == [
        (0x300, 0x100, 0x100, 0),
        (0x300, 0x200, 0x200, 0),
        (0x400, 0x400, 0x400, 0),
    ]


def test_feedback_is_sent_in_time_and_requests_a_reply(clock: Clock) -> None:
    stream = PlayedStream([])
    for clock.now in (1.0, 9.9, 10.0, 11.0, 19.9, 20.1):
        stream.tick()
    assert positions(stream) == [(0, 0, 0, 1)] * 2


def test_a_peer_that_does_not_answer_is_given_up(clock: Clock) -> None:
    stream = PlayedStream([ROW])
    clock.now = 61.0
    assert stream.read(), "it was not silent: nobody had listened"
    clock.now = 121.0
    assert stream.read() == b""
    clock.now = 121.1
    with pytest.raises(UnavailableError, match="silent for 60 s"):
        stream.read()


def test_any_byte_shows_that_the_peer_is_alive(clock: Clock) -> None:
    stream = PlayedStream([])
    for clock.now in (50.0, 100.0, 150.0):
        stream.wire.pieces.append(ROW[:3])
        assert stream.read() == b"" or clock.now > 50.0
