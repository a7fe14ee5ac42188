"""A session's frames, and the daemon's pure code without its I/O."""

from __future__ import annotations

from functools import lru_cache
from struct import pack
from typing import NamedTuple

import msgspec

from cdc.config.value_options import Values
from cdc.decode.frames import PADDING
from cdc.decode.messages import Begin, Commit, Message, Relation
from cdc.encode.encoder import Encoder
from cdc.encode.logical_messages import MessageEncoder
from cdc.encode.oversize import PLACEHOLDER, DeadLetters
from cdc.encode.routes import LogicalMessages, TableRoute
from cdc.events import LSN
from cdc.log import names
from cdc.log.batch import Batch
from cdc.log.client import MAX_MESSAGE_BYTES
from cdc.log.records import ALTERED, ResumePosition, SchemaRecord
from cdc.sequence.relation_request import RelationRequest
from cdc.sequence.relations import Relations
from cdc.sequence.sequencer import Sequencer
from cdc.sequence.state import Pause, Step
from cdc.source.lookups import TableFacts
from tests.property.pgoutput_writer import encode

PREFIX, DATABASE, EPOCH, PARTITIONS = "shop", "shop_db", 3, 4
TIME_US = 1_767_323_045_123_456
MANY = 1 << 40  # more events than any batch of these tests


def frame(message: Message | bytes, lsn: int = 0x1000) -> bytes:
    """Return a message or a payload as the walsender sends it: CopyData around XLogData."""
    payload = message if isinstance(message, bytes) else encode(message)
    return pack(">cIcQQq", b"d", 29 + len(payload), b"w", lsn, lsn, 0) + payload


def chunk(*frames: bytes) -> bytes:
    """Return frames as one read of the connection returns them."""
    return b"".join(frames) + PADDING


def begin(final_lsn: int = 0x2000, xid: int = 771, time_us: int = TIME_US) -> bytes:
    return frame(Begin(LSN(final_lsn), time_us, xid), final_lsn - 1)


def commit(commit_lsn: int = 0x2000, end_lsn: int = 0, time_us: int = TIME_US) -> bytes:
    return frame(Commit(LSN(commit_lsn), LSN(end_lsn or commit_lsn + 8), time_us), commit_lsn)


def position(  # as `cdc setup` writes it, except for the given arguments
    *,
    end_lsn: int = 0x100,
    commit_lsn: int = 0,
    ordinal: int = 0,
    is_open: bool = False,
    seq: int = 0,
    schema_id: int = 0,
    pending: tuple[tuple[str, int, int], ...] = (),
    committed_at_us: int = 0,
) -> ResumePosition:
    return ResumePosition(
        end_lsn=LSN(end_lsn),
        commit_lsn=LSN(commit_lsn),
        ordinal=ordinal,
        open=is_open,
        seq=seq,
        committed_at_us=committed_at_us,
        schema_id=schema_id,
        pending=pending,
        owner="test",
        at_us=0,
    )


class Published(NamedTuple):
    """One message of the batch, and its destination."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None


@lru_cache(maxsize=4_096)
def encoder_of(version: SchemaRecord, partitions: int = PARTITIONS) -> Encoder:
    """Return the version's encoder; compiling one takes longer than a complete short history."""
    return Encoder(version, DATABASE, PREFIX, partitions)


class Session:
    """The sequencer as the pipeline drives it: describe at relation messages, take at cuts."""

    def __init__(
        self,
        resume: ResumePosition,
        keys: dict[int, tuple[str, ...]],
        *,
        known: list[SchemaRecord] | None = None,
        max_events: int = MANY,
        values: Values | None = None,
        limit: int = MAX_MESSAGE_BYTES,
        epoch: int = EPOCH,
        partitions: int = PARTITIONS,
    ) -> None:
        """`keys` are the primary keys in the catalog, by relation id."""
        self.values = values or Values()
        self.batch = Batch()
        self.keys = keys
        self.relations = Relations(PREFIX, known or [], resume.schema_id)
        self.dead = DeadLetters(self.batch, names.dead_topic(PREFIX), PLACEHOLDER, limit)
        messages_to = self.batch.topic(names.messages_topic(PREFIX), 1)[0]
        logical = LogicalMessages(MessageEncoder(DATABASE, PREFIX), messages_to, self.dead)
        self.partitions = partitions
        self.sequencer = Sequencer(resume, epoch, self.batch, max_events, logical)
        self.new_versions: list[SchemaRecord] = []

    def feed(self, frames: list[bytes]) -> None:
        """Feed all frames, stopping where the sequencer asks."""
        complete, at = chunk(*frames), 0
        step: Step | Pause | None = None
        while step is not Pause.MORE:
            at, step = self.sequencer.feed(complete, at)
            if isinstance(step, Relation):
                self.describe(step)
            else:
                assert step in {Pause.MORE, Pause.FULL}, "what the pipeline would do itself"

    def route(self, relation: Relation) -> TableRoute:
        sequencer = self.sequencer
        facts = TableFacts(self.keys.get(relation.relation_id, ()), {})
        types, lsn = sequencer.types, sequencer.transaction_lsn
        request = RelationRequest(relation, facts, types, lsn, values=self.values)
        version, new = self.relations.version(request, replaying=sequencer.replaying)
        if new:
            self.new_versions.append(version)
        encoder = encoder_of(version, self.partitions)
        partitions = self.batch.topic(version.topic, encoder.partitions)
        return TableRoute(encoder, partitions, self.dead)

    def describe(self, relation: Relation) -> SchemaRecord:
        sequencer, table = self.sequencer, self.route(relation)
        sequencer.describe(relation.relation_id, table)
        alteration = self.relations.take_alteration()
        if alteration is not None and not sequencer.replaying:
            sequencer.note(ALTERED, msgspec.json.encode(alteration))
        return table.encoder.schema

    def waiting(self) -> list[Published]:
        """Take what is waiting, each partition's in order; dead letters last."""
        records = [
            Published(partition.topic, partition.number, message["key"], message["value"])
            for partition in self.batch.waiting()
            for message in partition.take()
        ]
        letters = self.batch.send_letters()
        return [*records, *(Published(at.topic, at.number, *record) for at, *record in letters)]
