"""What is sequenced next: chunks of the stream, and streamed transactions once they commit.

Walks each chunk once: the sequencer takes what is in commit order, the spool what belongs to a
transaction that is still open, the stream what is not a frame.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import msgspec

from cdc import failpoints
from cdc.decode import messages
from cdc.encode.logical_messages import MessageEncoder
from cdc.encode.routes import LogicalMessages
from cdc.errors import ProtocolError
from cdc.events import LSN
from cdc.log import names
from cdc.log.records import ALTERED
from cdc.sequence.in_progress import OpenTransactions
from cdc.sequence.lookahead import Upcoming
from cdc.sequence.sequencer import Sequencer
from cdc.sequence.spool import Spool, spool_directory
from cdc.sequence.state import Pause, Wanted

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.config import Config
    from cdc.encode.routes import TableRoute
    from cdc.log.records import ResumeIdentity, ResumePosition
    from cdc.sequence.replay import SessionReplay
    from cdc.sequence.spool import Committed
    from cdc.sequence.state import Step
    from cdc.sequence.table_versions import TableVersions
    from cdc.source.column_changes import ColumnChange
    from cdc.source.stream import Stream


T = TypeVar("T")

# A chunk that is longer holds one huge row, which takes seconds: it is processed in the background.
LONG_BYTES: Final = 8 << 20


class RunBlocking(Protocol):
    """Runs a call in the background, and answers Postgres until it has ended."""

    def __call__(self, call: Callable[[], T], /) -> T: ...


class Intake:
    """The way from the stream into the sequencer."""

    def __init__(
        self,
        config: Config,
        stream: Stream,
        tables: TableVersions,
        identity: ResumeIdentity,
        position: ResumePosition,
        full: Callable[[], None],
        run_blocking: RunBlocking,
        replay: SessionReplay | None = None,
    ) -> None:
        """`full` publishes a batch of full size."""
        self._stream, self._tables = stream, tables
        self._spool: Spool | None = None
        self._in_progress: OpenTransactions | None = None
        if stream.streaming != "off":
            self._spool = Spool(spool_directory(config.source.spool_dir, config.pipeline))
            self._in_progress = OpenTransactions(self._spool)
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
            replay=replay,
        )
        self._full = full
        self._run_blocking = run_blocking
        # A committed transaction that is read back: its rows come before what the stream sends.
        self._commit: messages.StreamCommit | None = None
        self._chunks: Committed | None = None
        self._ending = False
        self._upcoming: Upcoming | None = None  # of the chunk being walked

    @property
    def reading_back(self) -> bool:
        """Whether more can be taken without anything having arrived."""
        return self._commit is not None

    def close(self) -> None:
        """Drop what open transactions have streamed: the next session receives it again."""
        if self._spool:
            self._spool.close()

    def end(self) -> None:
        """From here on, make `take` stop where the transaction being read ends."""
        self._ending, self.sequencer.max_events = True, 0

    def take(self) -> int:
        """Sequence the next chunk, if there is one; return how many bytes it had."""
        if self._commit:
            if chunk := self._read_back():
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
        return len(chunk)

    def _read_back(self) -> bytes:
        """Return the next chunk of the transaction that is read back; no bytes at its end."""
        chunks = self._chunks
        assert chunks is not None, "its commit gave them"
        if chunks.next_bytes > LONG_BYTES:
            return self._run_blocking(lambda: next(chunks))
        return next(chunks, b"")

    def _walk(self, chunk: bytes, *, streamed: bool = False) -> int:
        """Walk a chunk until it ends or a read-back starts; return how far that is."""
        at = 0
        step: Step | Pause | None = None
        upcoming = self._upcoming = Upcoming(chunk, streamed=streamed)
        while not self._over(step, streamed=streamed):
            walk: Callable[[], tuple[int, Step | Pause | None]]
            if self._in_progress and self._in_progress.in_block:
                walk = partial(self._in_progress.walk, chunk, at)
            else:
                walk = partial(self.sequencer.feed, chunk, at, streamed=streamed)
            at, step = self._run_blocking(walk) if len(chunk) - at > LONG_BYTES else walk()
            # Before what the step requires: while that waits, health reports how far it is.
            received_lsn = LSN(self.sequencer.received_lsn)
            self._stream.received_lsn = max(self._stream.received_lsn, received_lsn)
            if step is Pause.OTHER:
                at = self._stream.other(chunk, at)
            elif step is Pause.FULL and not self._ending:
                self._full()
            else:
                upcoming.at = at
                self._do(step)
        return at

    def _do(self, step: Step | Pause | None) -> None:
        """Do what a message requires before the next one is taken."""
        match step:
            case messages.Relation():
                if self._in_progress:
                    self._in_progress.note_description(step)
                self._describe(step)
            case Wanted():
                step.go_on()
            case messages.StreamStart():
                self._streamed().start(step)
            case messages.StreamAbort():
                self._streamed().abort(step)
            case messages.StreamCommit():
                self._begin(step)

    def _describe(self, relation: messages.Relation) -> None:
        """Make the relation's rows encodable."""
        sequencer, tables, upcoming = self.sequencer, self._tables, self._upcoming
        table = self._run_blocking(
            lambda: tables.describe(
                relation,
                sequencer.types,
                sequencer.transaction_lsn,
                replaying=sequencer.replaying,
                upcoming=upcoming,
                xid=sequencer.xid,
            )
        )
        self._use(relation, table)

    def describe_changed(self, change: ColumnChange) -> None:
        """Write the version of a table whose columns have changed, although no row has."""
        sequencer, tables = self.sequencer, self._tables
        found = self._run_blocking(
            lambda: tables.describe_changed(change, sequencer.types, sequencer.transaction_lsn)
        )
        if found is not None:
            self._use(*found)

    def _use(self, relation: messages.Relation, table: TableRoute) -> None:
        """Encode the relation's rows by its newest version from here on."""
        sequencer, alteration = self.sequencer, self._tables.take_alteration()
        sequencer.describe(relation.relation_id, table)
        if alteration is not None and not sequencer.replaying:
            sequencer.note(ALTERED, msgspec.json.encode(alteration))

    def _over(self, step: Step | Pause | None, *, streamed: bool) -> bool:
        """Whether the walk of a chunk ends at this step."""
        if step is Pause.FULL:
            return self._ending
        return step is Pause.MORE or (self._commit is not None and not streamed)

    def _streamed(self) -> OpenTransactions:
        if self._in_progress is None:
            raise ProtocolError("a streamed transaction, which this stream was not asked for")
        return self._in_progress

    def _begin(self, commit: messages.StreamCommit) -> None:
        self._chunks = self._streamed().commit(commit)
        self.sequencer.begin(commit.commit_lsn, commit.commit_time_us, commit.xid)
        self._commit = commit
