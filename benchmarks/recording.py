"""Real frames of a slot, kept in memory, and the parts of the row path set up for them.

The stages of `benchmarks.costs` are timed on it. Frames are read with the daemon's own `Stream` and
walked once, here, to find every inserted row; only the daemon's code is timed later.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cdc.decode import messages, pgoutput
from cdc.decode.frames import HEADER_SIZE, PAYLOAD, XLOG_DATA, content_end, head
from cdc.encode.encoder import Encoder
from cdc.encode.logical_messages import MessageEncoder
from cdc.encode.oversize import PLACEHOLDER, DeadLetters
from cdc.encode.routes import LogicalMessages, TableRoute
from cdc.events import LSN
from cdc.log.batch import Batch
from cdc.log.client import MAX_MESSAGE_BYTES
from cdc.log.records import ResumePosition, SchemaColumn, SchemaRecord
from cdc.runtime.background import BackgroundThread
from cdc.sequence.sequencer import Sequencer
from cdc.sequence.state import Pause
from cdc.source.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.config import Config

PARTITIONS: Final = 4
_DATABASE: Final = "bench"
_INSERT, _RELATION = b"IR"
# After the tag of an insert: relation id, kind of tuple, column count; then the first column.
_FIRST_COLUMN: Final = PAYLOAD + 1 + 4 + 1 + 2
# As long as the daemon's own pause when it reads a backlog.
_NAP_SECONDS: Final = 0.001


class Row(NamedTuple):
    """Where an inserted row is: the arguments of `Encoder.new` that the frame provides."""

    chunk: bytes
    first_column: int
    stop: int
    lsn: int


@dataclass
class Recording:
    """A backlog's chunks as they were read, its relations, and its rows by relation."""

    chunks: list[bytes] = field(default_factory=list)
    relations: dict[int, messages.Relation] = field(default_factory=dict)
    rows: dict[str, list[Row]] = field(default_factory=dict)
    receive_s: float = 0.0  # CPU seconds of reading

    @property
    def count(self) -> int:
        return sum(len(rows) for rows in self.rows.values())

    def take(self, chunk: bytes, other: Callable[[bytes, int], int]) -> int:
        """Record the chunk's relations and rows; return where its last complete frame ends.

        `other` takes bytes that are not a frame, and returns where the next frame starts.
        """
        at, end = 0, content_end(chunk)
        while at + HEADER_SIZE <= end:
            _, length, inner, lsn = head(chunk, at)
            stop = at + 1 + length
            if stop > end:
                break
            if inner != XLOG_DATA:
                at = other(chunk, at)
                continue
            tag = chunk[at + PAYLOAD]
            if tag == _RELATION:
                relation = pgoutput.decode(chunk[at + PAYLOAD : stop])
                assert isinstance(relation, messages.Relation)
                self.relations[relation.relation_id] = relation
            elif tag == _INSERT:
                number = int.from_bytes(chunk[at + PAYLOAD + 1 : at + PAYLOAD + 5], "big")
                rows = self.rows.setdefault(self.relations[number].name, [])
                rows.append(Row(chunk, at + _FIRST_COLUMN, stop, lsn))
            at = stop
        return at

    def encoder(self, table: str, **changed: Any) -> Encoder:  # noqa: ANN401 - a schema's fields
        """Return an encoder of the table as the stream describes it, or as `changed`."""
        relation = next(each for each in self.relations.values() if each.name == table)
        return _encoder(relation, **changed)

    def sequencer(self, batch: Batch) -> Sequencer:
        """Return a sequencer at the start of the recording, which fills the batch."""
        position = ResumePosition(
            end_lsn=LSN(0),
            commit_lsn=LSN(0),
            ordinal=0,
            open=False,
            seq=0,
            committed_at_us=0,
            schema_id=1,
            owner="benchmarks",
            at_us=0,
        )
        messages_to = batch.topic("messages", 1)[0]
        logical = LogicalMessages(MessageEncoder(_DATABASE, "bench"), messages_to, _dead(batch))
        return Sequencer(position, 1, batch, 1 << 62, logical)

    def feed(self, sequencer: Sequencer, batch: Batch, chunk: bytes, topic: str) -> None:
        """Sequence a chunk, and answer the sequencer's requests as the pipeline does."""
        at, step = 0, None
        while step is not Pause.MORE:
            at, step = sequencer.feed(chunk, at)
            if step is Pause.OTHER:
                at += 1 + int.from_bytes(chunk[at + 1 : at + HEADER_SIZE], "big")
            elif isinstance(step, messages.Relation):
                table = TableRoute(_encoder(step), batch.topic(topic, PARTITIONS), _dead(batch))
                sequencer.describe(step.relation_id, table)


def _dead(batch: Batch) -> DeadLetters:
    return DeadLetters(batch, "dead", PLACEHOLDER, MAX_MESSAGE_BYTES)


def record(config: Config, end_lsn: int) -> Recording:
    """Read the pipeline's slot up to `end_lsn`; nothing is confirmed."""
    recording = Recording()
    stream = Stream(config, BackgroundThread().wake_fd)
    try:
        stream.start()
        while stream.keepalive_lsn < end_lsn:
            time.sleep(_NAP_SECONDS)
            began = time.thread_time()
            chunk = stream.read()
            recording.receive_s += time.thread_time() - began
            if chunk:
                at = recording.take(chunk, stream.other)
                began = time.thread_time()
                stream.keep(chunk, at)
                recording.receive_s += time.thread_time() - began
                recording.chunks.append(chunk)
            stream.tick()
    finally:
        stream.close()
    return recording


def _encoder(relation: messages.Relation, **changed: Any) -> Encoder:  # noqa: ANN401 - as above
    columns = tuple(
        SchemaColumn(
            name=column.name,
            type_id=column.type_id,
            type="",
            type_modifier=column.type_modifier,
            nullable=None,
        )
        for column in relation.columns
    )
    fields: dict[str, Any] = {
        "schema_id": 1,
        "relation_id": relation.relation_id,
        "schema": relation.namespace,
        "table": relation.name,
        "topic": relation.name,
        "replica_identity": relation.replica_identity.value,
        "from_lsn": LSN(0),
        "key": tuple(column.name for column in relation.columns if column.key),
        "columns": columns,
    }
    return Encoder(SchemaRecord(**(fields | changed)), _DATABASE, "bench", PARTITIONS)
