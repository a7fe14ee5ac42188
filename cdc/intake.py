"""What is sequenced next: chunks of the stream, and streamed transactions once they commit.

Walks each chunk once: the sequencer takes what is in commit order, the spool what belongs to a
transaction still open, the stream what is no frame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc import failpoints
from cdc.decode import messages
from cdc.errors import ProtocolError
from cdc.events import LSN
from cdc.inprogress import InProgress
from cdc.log import names
from cdc.log.message import MessageEncoder
from cdc.log.routes import LogicalMessages
from cdc.places import Pause
from cdc.sequence import Sequencer
from cdc.spool import Spool, home

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cdc.config import Config
    from cdc.log.records import ResumeIdentity, ResumePosition
    from cdc.places import Step
    from cdc.source.stream import Stream
    from cdc.tables import Tables


class Intake:
    """The way from the stream into the sequencer."""

    def __init__(
        self,
        config: Config,
        stream: Stream,
        tables: Tables,
        identity: ResumeIdentity,
        position: ResumePosition,
        describe: Callable[[messages.Relation], None],
        full: Callable[[], None],
    ) -> None:
        """`describe` makes a relation's rows encodable; `full` empties a batch of full size."""
        self._stream = stream
        self._spool: Spool | None = None
        self._in_progress: InProgress | None = None
        if stream.streaming != "off":
            self._spool = Spool(home(config.source.spool_dir, config.pipeline))
            self._in_progress = InProgress(self._spool)
        logical = LogicalMessages(
            MessageEncoder(identity.database, config.prefix),
            tables.batch.topic(names.messages_topic(config.prefix), 1)[0],
            tables.dead,
        )
        self.sequencer = Sequencer(
            position,
            identity.epoch,
            tables.batch,
            config.batch.max_events,
            logical,
            parallel=stream.streaming == "parallel",
        )
        self._describe = describe
        self._full = full
        # A committed transaction that is read back: its rows come before what the stream sends.
        self._commit: messages.StreamCommit | None = None
        self._chunks: Iterator[bytes] = iter(())
        self._ending = False

    @property
    def reading_back(self) -> bool:
        """Whether more can be taken without anything having arrived."""
        return self._commit is not None

    def close(self) -> None:
        """Drop what open transactions have streamed: a next session gets it again."""
        if self._spool:
            self._spool.close()

    def end(self) -> None:
        """Let `take` stop where the transaction being read ends, from here on."""
        self._ending, self.sequencer.max_events = True, 0

    def take(self) -> int:
        """Sequence the next chunk, if there is one; return how many bytes it had."""
        if self._commit:
            if chunk := next(self._chunks, b""):
                self._walk(chunk, streamed=True)
                return len(chunk)
            end, self._commit = self._commit, None
            self.sequencer.commit(end.commit_lsn, end.end_lsn, end.commit_time_us)
            if self._ending:
                return 0
        chunk = self._stream.read()
        if chunk:
            failpoints.reach("after_receive")
            self._stream.keep(chunk, self._walk(chunk))
            received_lsn = LSN(self.sequencer.received_lsn)
            self._stream.received_lsn = max(self._stream.received_lsn, received_lsn)
        return len(chunk)

    def _walk(self, chunk: bytes, *, streamed: bool = False) -> int:
        """Take a chunk to where it ends or a read-back begins; return how far that is."""
        at = 0
        step: Step | Pause | None = None
        while not self._over(step, streamed=streamed):
            if self._in_progress and self._in_progress.in_block:
                at, step = self._in_progress.walk(chunk, at)
            else:
                at, step = self.sequencer.feed(chunk, at, streamed=streamed)
            match step:
                case Pause.OTHER:
                    at = self._stream.other(chunk, at)
                case Pause.FULL if not self._ending:
                    self._full()
                case messages.Relation():
                    if self._in_progress:
                        self._in_progress.hear(step)
                    self._describe(step)
                case messages.StreamStart():
                    self._streamed().start(step)
                case messages.StreamAbort():
                    self._streamed().abort(step)
                case messages.StreamCommit():
                    self._begin(step)
        return at

    def _over(self, step: Step | Pause | None, *, streamed: bool) -> bool:
        """Whether the walk of a chunk ends at this step."""
        if step is Pause.FULL:
            return self._ending
        return step is Pause.MORE or (self._commit is not None and not streamed)

    def _streamed(self) -> InProgress:
        if self._in_progress is None:
            raise ProtocolError("a streamed transaction, which this stream was not asked for")
        return self._in_progress

    def _begin(self, commit: messages.StreamCommit) -> None:
        self._chunks = self._streamed().commit(commit)
        self.sequencer.begin(commit.commit_lsn, commit.commit_time_us, commit.xid)
        self._commit = commit
