"""Read the same rows twice: as inserts through the slot, and by COPY as a snapshot does.

The slot is read by SQL and nothing is sent to Kafka. The same output plugin, session settings and
code produce the records that the daemon and a snapshot's task would send.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import orjson
import psycopg
from msgspec.structs import replace

from cdc.config import Config, Log, Snapshot, Source, TableRule
from cdc.config.keyring import KeyringConfig
from cdc.config.value_options import Values
from cdc.decode import frames
from cdc.decode.messages import Relation
from cdc.encode.encoder import Encoder
from cdc.encode.masks import ColumnMask, column_mask
from cdc.encode.oversize import DeadLetters
from cdc.encode.routes import TableRoute
from cdc.events import LSN
from cdc.keyring.ciphers import Ciphers
from cdc.keyring.opening import ciphers_of
from cdc.log.batch import Batch
from cdc.log.records import SchemaRecord
from cdc.sequence.relation_request import RelationRequest
from cdc.sequence.relations import Relations
from cdc.snapshot.initial import plan as plans
from cdc.snapshot.initial.rows import RangeRows, transaction
from cdc.snapshot.initial.task import masks, prove, range_query
from cdc.source.connection import connect, take_any_text
from cdc.source.copy_stream import CopyStream
from cdc.source.described import DescribedTable, describe_tables
from cdc.source.lookups import look_up
from cdc.source.pinned import connect_for_rows, pinned
from tests.property.stream import DATABASE, EPOCH, PARTITIONS, Session, frame, position

SLOT = "both"
PIPELINE = "both"
PUBLICATION = "lockstep_both"
PAGE = 8_192
TWO_PAGES = Snapshot(range_bytes=2 * PAGE)  # so that most tables have several ranges
TAKEN_AT_US = 1_767_323_045_123_456

# Source fields in which a snapshot's row and an insert differ: snapshot flag, times, position.
_PLACE = {"snapshot", "ts_ms", "ts_us", "ts_ns", "txId", "commit_lsn", "lsn", "ordinal", "seq"}


class Sent(NamedTuple):
    """A record without the fields of `_PLACE`."""

    topic: str
    partition: int
    key: bytes | None
    row: bytes  # everything before `source`
    source: dict[str, Any]


class BothWays:
    """A publication and a slot; `compare` compares a COPY's rows with the slot's inserts."""

    def __init__(
        self, dsn: str, rules: dict[str, TableRule] | None = None, publication: str = "ALL TABLES",
        keyring: KeyringConfig = KeyringConfig(),  # noqa: B008 - a frozen value
    ) -> None:  # fmt: skip
        """`publication` is what follows FOR in CREATE PUBLICATION."""
        source = Source(dsn=dsn, tables=("*.*",))
        log = Log(bootstrap_servers="localhost:1", partitions=PARTITIONS, prefix="shop")
        self.config = Config(
            pipeline=PIPELINE, source=source, log=log, tables=rules or {}, keyring=keyring
        )
        self.sql = connect(self.config)
        self.write(f"CREATE PUBLICATION {PUBLICATION} FOR {publication}")
        self.sql.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [SLOT])

    def write(self, *statements: str) -> None:
        """Run statements as an application would, each in its own transaction."""
        with psycopg.connect(self.config.source.dsn, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def with_values(self, values: Values) -> Config:
        """Use these value options from here on."""
        fields = {name: getattr(self.config, name) for name in self.config.__struct_fields__}
        self.config = Config(**fields | {"values": values})
        return self.config

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self.sql:
            self.sql.execute("SELECT pg_drop_replication_slot(%s)", [SLOT])

    def compare(self, *options: Values) -> list[Sent]:
        """Fail unless both ways give the same records, under each of the options; return them."""
        options = options or (Values(),)
        self.with_values(options[0])
        inserts = self._frames()
        rows: list[Sent] = []
        for values in options:
            self.with_values(values)
            versions, rows = self.copied()
            inserted = _Streamed(self, versions)
            inserted.feed(inserts)
            known = {version.table for version in versions}
            # Partitions are described too, in addition to the table that their rows are sent as.
            otherwise = [v for v in inserted.new_versions if v.table in known]
            assert otherwise == []
            streamed = [_sent(*each, "c", "false") for each in inserted.waiting()]
            streamed.sort(key=_order)
            differ = [(a, b) for a, b in zip(rows, streamed, strict=False) if a != b]
            assert differ == [], values
            assert len(rows) == len(streamed)
        return rows

    def copy_query(self, query: str) -> int:
        """Return the number of messages of a COPY."""
        count = 0
        with CopyStream(self.sql, query) as copying:
            while chunk := copying.read():
                at = 0
                while at < frames.content_end(chunk) and chunk[at] == frames.COPY_DATA:
                    stop = at + 1 + frames.length(chunk, at)[0]
                    if stop > frames.content_end(chunk) or chunk[at + 5 : stop] == b"\xff\xff":
                        break
                    at, count = stop, count + 1
                copying.taken(chunk, at)
        return count

    def copied(self) -> tuple[list[SchemaRecord], list[Sent]]:
        """Return the tables' versions, and every current row."""
        relations = Relations(self.config.prefix, [], 0)
        versions, sent = [], []
        with connect_for_rows(self.config) as rows, connect(self.config) as exporting:
            exporting.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            found = exporting.execute("SELECT pg_export_snapshot()").fetchone()
            assert found is not None
            with pinned(rows, found[0]):
                for table in describe_tables(rows, PUBLICATION):
                    version, _ = plans.version(self.config, relations, table, LSN(1))
                    versions.append(version)
                    sent += self._copy(rows, table, version)
        return versions, sorted(sent, key=_order)

    def _copy(
        self, rows: psycopg.Connection, table: DescribedTable, version: SchemaRecord
    ) -> list[Sent]:
        seqs = plans.Seqs(1)
        config = replace(self.config, snapshot=TWO_PAGES)
        planned = plans.cut(config, table, version, PARTITIONS, PAGE, seqs)
        batch = Batch()
        chosen = masks(self.config, rows, version)
        ciphers = ciphers_of(self.config)
        to = _table(batch, version, chosen, Session(position(), {}).dead, ciphers)
        event = to.encoder.copied_format(LSN(7), *transaction(EPOCH, LSN(7), TAKEN_AT_US))
        sent, seqs_seen = [], set()
        for each in [each for number, heap in enumerate(planned) for each in heap.ranges(number)]:
            heap = planned[each.table]
            prove(rows, heap)
            reading = RangeRows(to, event, each, batch)
            rows.execute("SAVEPOINT copied")
            take_any_text(rows, self.config, local=True)
            with CopyStream(rows, range_query(heap, each)) as copying:
                while chunk := copying.read():
                    copying.taken(chunk, reading.feed(chunk))
            rows.execute("ROLLBACK TO copied")  # which resets the encoding
            for partition in batch.waiting():
                for message in partition.take():
                    value = message["value"]
                    seq = orjson.loads(value)["source"]["seq"]
                    assert each.first_seq <= seq < each.first_seq + each.capacity
                    seqs_seen.add(seq)
                    place = (partition.topic, partition.number, message["key"])
                    sent.append(_sent(*place, value, "r", "true"))
        assert len(seqs_seen) == len(sent)
        return sent

    def _frames(self) -> list[bytes]:
        with connect(self.config) as slot:
            take_any_text(slot, self.config)
            payloads = slot.execute(
                "SELECT lsn - '0/0', data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL,"
                " 'proto_version', '1', 'publication_names', %s)",
                [SLOT, PUBLICATION],
                binary=True,
            ).fetchall()
        return [frame(bytes(data), int(lsn)) for lsn, data in payloads]


class _Streamed(Session):
    """The daemon's stream processing, with descriptions from the catalog and configuration."""

    def __init__(self, both: BothWays, versions: list[SchemaRecord]) -> None:
        super().__init__(
            position(schema_id=len(versions)), {}, known=versions, values=both.config.values
        )
        self._both = both

    def describe(self, relation: Relation) -> SchemaRecord:
        config, sql = self._both.config, self._both.sql
        facts, reported = look_up(sql, PUBLICATION, [relation.relation_id])[relation.relation_id]
        named = (relation.namespace, relation.name)
        selection = config.selection.of(named, *reported.ancestors)
        types, lsn = self.sequencer.types, self.sequencer.transaction_lsn
        request = RelationRequest(relation, facts, types, lsn, reported, selection, config.values)
        version, new = self.relations.version(request, replaying=False)
        if new:
            self.new_versions.append(version)
        chosen = [column_mask(selection, column.name) for column in version.columns]
        table = _table(self.batch, version, chosen, self.dead, ciphers_of(config))
        self.sequencer.describe(relation.relation_id, table)
        return version


def _table(
    batch: Batch,
    version: SchemaRecord,
    chosen: list[ColumnMask | None],
    dead: DeadLetters,
    ciphers: Ciphers | None,
) -> TableRoute:
    encoder = Encoder(version, DATABASE, "shop", PARTITIONS, chosen, ciphers)
    return TableRoute(encoder, batch.topic(version.topic, encoder.partitions), dead)


def _order(sent: Sent) -> tuple[str, int, bytes, bytes]:
    return sent.topic, sent.partition, sent.key or b"", sent.row


def _sent(
    topic: str, partition: int, key: bytes | None, value: bytes | None, op: str, snapshot: str
) -> Sent:
    assert value is not None
    row, _, rest = value.partition(b',"source":')
    event = orjson.loads(b'{"source":' + rest)
    source = event["source"]
    assert (event["op"], source["snapshot"], event["transaction"]) == (op, snapshot, None)
    assert list(event) == ["source", "op", "ts_ms", "ts_us", "ts_ns", "transaction"]
    facts = {name: each for name, each in source.items() if name not in _PLACE}
    assert set(source) - set(facts) == _PLACE
    return Sent(topic, partition, key, row, facts)
