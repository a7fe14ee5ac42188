"""What is fuzzed: a check of any bytes, and inputs to start from.

A check returns, or raises for a bug: an exception that is no CDCError, or a broken guarantee about
what was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from cdc import events
from cdc.decode import pgoutput
from cdc.decode.messages import Commit, LogicalMessage
from cdc.errors import CDCError
from cdc.events import LSN
from cdc.log import names, records
from cdc.log.follower_reports import FollowerRecord
from tests.fuzz import rows, sequences
from tests.golden.reading import RECORDINGS, load
from tests.property.pgoutput_writer import encode


class Target(NamedTuple):
    check: Callable[[bytes], None]
    seeds: Callable[[], Iterator[bytes]]
    sample: int  # how many inputs take one or two seconds


# -- cdc.decode.pgoutput: every flavour of the protocol --------------------------------------------

_IN_STREAM, _PARALLEL = 1, 2


def _decode(data: bytes) -> None:
    """Decode in the flavour that the first byte names; encoding the result gives the same bytes."""
    flavour, payload = data[:1], data[1:]
    in_stream = bool(flavour and flavour[0] & _IN_STREAM)
    parallel = bool(flavour and flavour[0] & _PARALLEL)
    try:
        message = pgoutput.decode(payload, in_stream=in_stream, parallel=parallel)
    except CDCError:
        return
    again = encode(message)
    assert pgoutput.decode(again, in_stream=in_stream, parallel=parallel) == message
    # These have two spellings: this schema's name, and a prefix that is not UTF-8.
    escaped = isinstance(message, LogicalMessage) and "\\x" in message.prefix
    assert again == payload or escaped or b"pg_catalog\0" in payload


def recorded() -> Iterator[tuple[int, bytes]]:
    """Yield every recorded payload with its flavour."""
    for path in sorted(RECORDINGS.glob("*.jsonl")):
        recording = load(path)
        parallel = _PARALLEL if recording.scenario == "parallel" else 0
        for payloads in recording.payloads.values():
            in_stream = 0
            for payload in payloads:
                yield in_stream | parallel, payload
                in_stream = {b"S": _IN_STREAM, b"E": 0}.get(payload[:1], in_stream)


def _decode_seeds() -> Iterator[bytes]:
    yield from sorted({bytes([flavour]) + payload for flavour, payload in recorded()})


# -- cdc.log.records: the records in our own topics ------------------------------------------------

_RECORDS: Final[tuple[records.Record | FollowerRecord, ...]] = (
    records.ResumeIdentity(
        pipeline="p", epoch=1, system_identifier="7", timeline=1, database="d", slot="s",
        publication=records.PinnedPublication(name="p", oid=1, tables={"a.b": 2}),
        partitions={"t": 4},
    ),
    records.ResumePosition(
        end_lsn=LSN(9), commit_lsn=LSN(8), ordinal=3, open=False, seq=42, committed_at_us=1,
        schema_id=5, pending=(("t", 0, 3),), owner="host:1:9f", at_us=1,
    ),
    records.FrontierRecord(
        pipeline="p", epoch=1, lsn=LSN(9), seq=42, committed_at_us=1,
        partitions=(("t", 0, 1_017, 3),),
    ),
    records.SchemaRecord(
        schema_id=1, relation_id=2, schema="a", table="b", topic="t", replica_identity="d",
        from_lsn=LSN(1), key=("id",), columns=(records.SchemaColumn(
            name="id", type_id=20, type="int8", type_modifier=-1, nullable=False),),
    ),
    FollowerRecord(
        pipeline="p", follower="f", store="redis", generation=1, state="following", epoch=1,
        lsn=LSN(9), seq=42, committed_at_us=1, place=3, batch_seconds=0.5, owner="host:1", at_us=1,
    ),
)  # fmt: skip


def _records(data: bytes) -> None:
    kind = type(_RECORDS[data[0] % len(_RECORDS) if data else 0])
    try:
        found = records.decode(kind, data[1:], "topic")
    except CDCError:
        return
    assert records.decode(kind, records.encode(found), "topic") == found


def _records_seeds() -> Iterator[bytes]:
    for number, record in enumerate(_RECORDS):
        yield bytes([number]) + records.encode(record)


# -- cdc.log.names: names become topics and are read back ------------------------------------------

# Longer than Postgres' own limit on a name, in bytes.
_NAME_BYTES: Final = 160


def _names(data: bytes) -> None:
    """Use the bytes as a schema's and a table's name, and as a topic of another program."""
    text = data[:_NAME_BYTES].decode("utf-8", "ignore").replace("\0", "")
    schema, _, table = text.partition("\n")
    assert events.unescape(names.escape(schema)) == schema
    try:
        topic = names.data_topic("p", schema, table)
    except CDCError:
        pass
    else:
        assert names.table_of("p", topic) == (schema, table)
    try:
        names.table_of("p", f"p.{text}")
    except CDCError:
        return


def _names_seeds() -> Iterator[bytes]:
    unusual = 'Schéma ". \\\nTablé 🐘'.encode()
    yield from (b"public\nusers", b"cdc\n_x41", unusual, b"_\n_x", b"a.b\nc", b"a._xFF_xC3_xA9")


# -- a planted bug, to show that the search finds one ----------------------------------------------

PLANTED: Final = "planted"


def _planted(data: bytes) -> None:
    """Fail at a complete Commit; from its first byte the search gets there field by field."""
    try:
        message = pgoutput.decode(data)
    except CDCError:
        return
    assert not isinstance(message, Commit), "the planted bug"


def _planted_seeds() -> Iterator[bytes]:
    yield b"C"


TARGETS: Final = {
    "decode": Target(_decode, _decode_seeds, 50_000),
    "sequence": Target(sequences.check, sequences.seeds, 2_000),
    "rows": Target(rows.check, rows.seeds, 5_000),
    "records": Target(_records, _records_seeds, 50_000),
    "names": Target(_names, _names_seeds, 10_000),
    PLANTED: Target(_planted, _planted_seeds, 20_000),
}
