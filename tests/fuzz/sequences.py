"""Chunks of a replication stream, made of anything, through relations, sequencer and encoders.

An input is what a chunk is: CopyData messages, each with its 5 bytes of header. It begins in the
midst of a transaction in which a keyed and a keyless table have been described; relation messages
in it describe more. Whatever comes, the sequencer raises a CDCError or has counted right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from struct import pack
from typing import Final

from cdc.errors import CDCError
from tests.golden.reading import RECORDINGS, load
from tests.property.histories import KEYS, TABLES
from tests.property.stream import Session, begin, frame, position

_HEADER: Final = 5
# A frame that is no longer than a keepalive is none: the stream takes those in itself.
_SHORTEST: Final = 26


def _copied(frames: list[bytes]) -> bytes:
    return b"".join(b"d" + pack(">I", len(each) + 4) + each for each in frames)


def _frames(chunk: bytes) -> list[bytes]:
    """Cut the chunk as the protocol says; what a header promises too much of ends it."""
    found, at = [], 0
    while at + _HEADER <= len(chunk):
        size = int.from_bytes(chunk[at + 1 : at + _HEADER], "big") - 4
        each = chunk[at + _HEADER : at + _HEADER + max(size, 0)]
        if len(each) >= _SHORTEST:
            found.append(each)
        at += _HEADER + max(size, 0)
    return found


def check(data: bytes) -> None:
    """Feed the chunk; events, messages and seq must agree, also after an error."""
    session = Session(position(), KEYS)
    session.feed([begin(), *map(frame, TABLES)])
    with suppress(CDCError):
        session.feed(_frames(data))
    sequencer = session.sequencer
    waiting = session.waiting()
    events = [each for each in waiting if each.value is not None]
    assert sequencer.events == len(events)
    assert sequencer.seq == len(events)
    assert sum(session.batch.close().values()) == len(events)
    for each in waiting:
        assert each.value is not None or each.key is not None


def seeds() -> Iterator[bytes]:
    """Yield recorded steps as chunks, and the rows of one that describes its tables."""
    for path in sorted(RECORDINGS.glob("1[57]-*.jsonl")):
        recording = load(path)
        for payloads in recording.payloads.values():
            # The check has a transaction open already: without the first, the rest is taken.
            yield _copied([frame(payload) for payload in payloads])
            yield _copied([frame(payload) for payload in payloads[1:]])
