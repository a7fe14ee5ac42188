"""Arbitrary chunks of a replication stream through stream, spool, sequencer and encoders.

An input is the content of a chunk: consecutive protocol messages, the last of them possibly
incomplete. It starts inside a transaction in which some tables have been described; relation
messages in it describe more. For any input, a CDCError is raised or the counts are right.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from cdc.decode import messages
from cdc.decode.frames import PADDING, content_end
from cdc.decode.messages import Relation
from cdc.errors import CDCError
from cdc.events import LSN
from cdc.sequence.in_progress import OpenTransactions
from cdc.sequence.spool import Spool
from cdc.sequence.state import Pause, Step
from tests.golden.reading import RECORDINGS, load
from tests.property.histories import KEYS, TABLES
from tests.property.played import PlayedStream
from tests.property.stream import Session, begin, frame, position


@cache
def _spool() -> Spool:
    folder = tempfile.mkdtemp(prefix="lockstep-fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Spool(Path(folder))


class _Walk:
    """Walks chunks as `cdc.daemon.pipeline` does."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.in_progress = OpenTransactions(_spool())
        self._stream = PlayedStream([])

    def take(self, chunk: bytes, *, streamed: bool = False) -> None:
        at = 0
        step: Step | Pause | None = None
        while step is not Pause.MORE:
            if self.in_progress.in_block:
                at, step = self.in_progress.walk(chunk, at)
            else:
                at, step = self._session.sequencer.feed(chunk, at, streamed=streamed)
            assert at <= content_end(chunk), "the padding is nobody's message"
            match step:
                case Pause.OTHER:
                    at = self._stream.other(chunk, at)
                case Relation():
                    self._session.describe(step)
                case messages.StreamStart():
                    self.in_progress.start(step)
                case messages.StreamAbort():
                    self.in_progress.abort(step)
                case messages.StreamCommit():
                    self._replay(step)

    def _replay(self, commit: messages.StreamCommit) -> None:
        chunks = self.in_progress.commit(commit)
        sequencer = self._session.sequencer
        sequencer.begin(commit.commit_lsn, commit.commit_time_us, commit.xid)
        for chunk in chunks:
            self.take(chunk, streamed=True)
        sequencer.commit(commit.commit_lsn, commit.end_lsn, commit.commit_time_us)

    def close(self) -> None:
        """Leave nothing in the spool for the next input."""
        for xid in _spool().open_xids:
            _spool().abort(xid, xid)


def check(data: bytes) -> None:
    """Walk the chunk; if nothing was refused, events, messages and seq agree."""
    session = Session(position(), KEYS)
    session.feed([begin(), *map(frame, TABLES)])
    walk = _Walk(session)
    try:
        walk.take(data + PADDING)
    except CDCError:
        return  # the session ends, and with it everything that it has not committed
    finally:
        walk.close()
    sequencer = session.sequencer
    waiting = session.waiting()
    events = [each for each in waiting if each.value is not None]
    assert sequencer.events == len(events)
    assert sequencer.seq == len(events)
    assert sum(session.batch.close().values()) == len(events)
    assert sequencer.end_lsn >= LSN(0)
    for each in waiting:
        assert each.value is not None or each.key is not None


def seeds() -> Iterator[bytes]:
    """Yield recorded steps as chunks: after an open transaction, and on their own."""
    end = frame(b"C" + bytes(1) + _ends() + bytes(8))
    for path in sorted(RECORDINGS.glob("1[57]-*.jsonl")):
        recording = load(path)
        complete_stream = b""
        for payloads in recording.payloads.values():
            chunk = b"".join(map(frame, payloads))
            # The first payload would begin a transaction inside the open one.
            yield b"".join(map(frame, payloads[1:]))
            yield end + chunk
            complete_stream += chunk
        yield end + complete_stream


def _ends() -> bytes:
    """Return the commit and end LSN of the transaction that `check` begins."""
    return (0x2000).to_bytes(8, "big") + (0x2008).to_bytes(8, "big")
