"""The requests that a transactional producer needs: encoded, and their answers decoded. No I/O.

One version of each, all flexible except SaslHandshake; if a broker lacks one, librdkafka is used.
Produce 12 and EndTxn 5 are those of transactions V2: the broker adds partitions as they are
written, and each end of a transaction raises the producer's epoch.

https://kafka.apache.org/protocol
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.log.direct.wire import (
    NO_TAGS,
    AnswerReader,
    MalformedError,
    array,
    compact,
    string,
    uvarint,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


class Api(NamedTuple):
    """A request's number and the version of it that we speak."""

    key: int
    version: int


PRODUCE: Final = Api(0, 12)
METADATA: Final = Api(3, 12)
FIND_COORDINATOR: Final = Api(10, 4)
SASL_HANDSHAKE: Final = Api(17, 1)
API_VERSIONS: Final = Api(18, 3)
INIT_PRODUCER_ID: Final = Api(22, 4)
END_TXN: Final = Api(26, 5)
SASL_AUTHENTICATE: Final = Api(36, 2)

# What brokers must support; the two requests of SASL are sent only if SASL is used.
NEEDED: Final = (PRODUCE, METADATA, FIND_COORDINATOR, INIT_PRODUCER_ID, END_TXN)
TRANSACTION_VERSION: Final = "transaction.version"
TRANSACTIONS_V2: Final = 2

_TRANSACTION: Final = 1  # the kind of coordinator
_ALL_IN_SYNC: Final = -1
_FINALIZED_FEATURES: Final = 2  # a tag
_INT16: Final = struct.Struct("!h")
_INT32: Final = struct.Struct("!i")
_PRODUCER: Final = struct.Struct("!qh")
_HEADER: Final = struct.Struct("!hhi")


class Producer(NamedTuple):
    """A producer's id and epoch; one with a lower epoch is fenced."""

    id: int
    epoch: int


NOBODY: Final = Producer(-1, -1)


class Broker(NamedTuple):
    """Where a broker listens."""

    host: str
    port: int


class Error(NamedTuple):
    """A code that is not 0, and the broker's message if there is one."""

    code: int
    message: str | None = None


class Features(NamedTuple):
    """A broker's versions of each request, and the cluster's finalized features."""

    versions: Mapping[int, tuple[int, int]]
    finalized: Mapping[str, int]


class Leaders(NamedTuple):
    """The partitions' leaders; `errors` of those without (partition -1: of the topic)."""

    nodes: Mapping[int, Broker]
    leaders: Mapping[tuple[str, int], int]
    errors: Mapping[tuple[str, int], int]


class Written(NamedTuple):
    """A partition's answer: an error, or the offset of the batch's first record (-1: unknown)."""

    topic: str
    partition: int
    code: int
    base_offset: int
    message: str | None


class Authenticated(NamedTuple):
    """A step of SASL: what the broker answers, and how long a login lasts (0: forever)."""

    token: bytes
    lifetime_ms: int


def api_versions() -> bytes:
    return string("lockstep") + string("1") + NO_TAGS


def read_api_versions(reader: AnswerReader) -> Features | Error:
    code = reader.int16()
    if code:
        return Error(code)  # UNSUPPORTED_VERSION comes in version 0
    ranges = reader.array(lambda: (reader.int16(), (reader.int16(), reader.int16()), reader.tags()))
    reader.int32()  # throttled for
    finalized: dict[str, int] = {}
    if feature_bytes := reader.tags().get(_FINALIZED_FEATURES):
        inner = AnswerReader(feature_bytes)
        finalized = dict(inner.array(lambda: _finalized(inner)))
    reader.end()
    return Features({key: versions for key, versions, _ in ranges}, finalized)


def _finalized(reader: AnswerReader) -> tuple[str, int]:
    name, level = reader.string() or "", reader.int16()
    reader.int16()  # the lowest level
    reader.tags()
    return name, level


def metadata(topics: list[str]) -> bytes:
    names = [bytes(16) + string(name) + NO_TAGS for name in topics]
    create_topics = with_operations = b"\x00"
    return array(names) + create_topics + with_operations + NO_TAGS


def read_metadata(reader: AnswerReader) -> Leaders:
    reader.int32()  # throttled for
    nodes = dict(reader.array(lambda: _broker(reader)))
    reader.string()  # the cluster's id
    reader.int32()  # the controller
    leaders: dict[tuple[str, int], int] = {}
    errors: dict[tuple[str, int], int] = {}
    for topic, code, partitions in reader.array(lambda: _topic(reader)):
        if code:
            errors[topic, -1] = code
        for number, partition_code, leader in partitions:
            if partition_code and leader < 0:
                errors[topic, number] = partition_code
            else:
                leaders[topic, number] = leader
    reader.tags()
    reader.end()
    return Leaders(nodes, leaders, errors)


def _broker(reader: AnswerReader) -> tuple[int, Broker]:
    node_id, host, port = reader.int32(), reader.string() or "", reader.int32()
    reader.string()  # rack
    reader.tags()
    return node_id, Broker(host, port)


def _topic(reader: AnswerReader) -> tuple[str, int, list[tuple[int, int, int]]]:
    code, name = reader.int16(), reader.string() or ""
    reader.take(16)  # the topic's id
    reader.take(1)  # whether it is internal
    partitions = reader.array(lambda: _partition(reader))
    reader.int32()  # authorized operations
    reader.tags()
    return name, code, partitions


def _partition(reader: AnswerReader) -> tuple[int, int, int]:
    code, number, leader = reader.int16(), reader.int32(), reader.int32()
    reader.int32()  # the leader's epoch
    for _ in ("replicas", "in sync", "offline"):
        reader.array(reader.int32)
    reader.tags()
    return number, code, leader


def find_coordinator(transactional_id: str) -> bytes:
    return bytes([_TRANSACTION]) + array([string(transactional_id)]) + NO_TAGS


def read_find_coordinator(reader: AnswerReader) -> Broker | Error:
    reader.int32()  # throttled for
    found = reader.array(lambda: _coordinator(reader))
    reader.tags()
    reader.end()
    if len(found) != 1:
        raise MalformedError(f"{len(found)} coordinators for one transactional id")
    return found[0]


def _coordinator(reader: AnswerReader) -> Broker | Error:
    reader.string()  # the transactional id
    reader.int32()  # its node id
    host, port, code = reader.string() or "", reader.int32(), reader.int16()
    message = reader.string()
    reader.tags()
    return Error(code, message) if code else Broker(host, port)


def init_producer_id(transactional_id: str, timeout_ms: int) -> bytes:
    """Ask for an epoch above every other's: producers with a lower one are fenced."""
    return string(transactional_id) + _INT32.pack(timeout_ms) + _PRODUCER.pack(*NOBODY) + NO_TAGS


def produce(
    transactional_id: str, batches: Mapping[str, list[tuple[int, bytes]]], timeout_ms: int
) -> bytes:
    """Write record batches, by topic and partition, in one request."""
    # Joined once: thousands of batches may be megabytes.
    parts = [string(transactional_id), _INT16.pack(_ALL_IN_SYNC), _INT32.pack(timeout_ms)]
    parts.append(uvarint(len(batches) + 1))
    for topic, partitions in batches.items():
        parts += (string(topic), uvarint(len(partitions) + 1))
        for number, batch in partitions:
            parts += (_INT32.pack(number), uvarint(len(batch) + 1), batch, NO_TAGS)
        parts.append(NO_TAGS)
    parts.append(NO_TAGS)
    return b"".join(parts)


_WRITTEN: Final = struct.Struct("!ihqqq")
_NOTHING_MORE: Final = b"\x01\x00\x00"  # no refused records, no message, no tags


def read_produce(reader: AnswerReader) -> list[Written]:
    topics = reader.array(lambda: _written_topic(reader))
    reader.int32()  # throttled for
    reader.tags()
    reader.end()
    return [written for topic in topics for written in topic]


def _written_topic(reader: AnswerReader) -> list[Written]:
    topic = reader.string() or ""
    written = reader.array(lambda: _written(reader, topic))
    reader.tags()
    return written


def _written(reader: AnswerReader, topic: str) -> Written:
    # Its partition, error, base offset, the broker's time and the log's start.
    number, code, base_offset, _, _ = reader.unpack(_WRITTEN)
    if reader.skip(_NOTHING_MORE):
        return Written(topic, number, code, base_offset, None)
    reader.array(lambda: (reader.int32(), reader.string(), reader.tags()))  # refused records
    message = reader.string()
    reader.tags()  # the leader it knows: Metadata has it too
    return Written(topic, number, code, base_offset, message)


def end_txn(transactional_id: str, producer: Producer, *, commit: bool) -> bytes:
    return string(transactional_id) + _PRODUCER.pack(*producer) + bytes([commit]) + NO_TAGS


def read_producer(reader: AnswerReader) -> Producer | Error:
    """Return the producer of the next transaction: InitProducerId and EndTxn answer alike."""
    reader.int32()  # throttled for
    code, following = reader.int16(), Producer(reader.int64(), reader.int16())
    reader.tags()
    reader.end()
    return Error(code) if code else following


def sasl_handshake(mechanism: str) -> bytes:
    """Version 1, which is not a flexible one."""
    name = mechanism.encode()
    return _INT16.pack(len(name)) + name


def read_sasl_handshake(reader: AnswerReader) -> Error | None:
    """Return why the broker does not accept the mechanism."""
    code = reader.int16()
    return Error(code) if code else None


def sasl_authenticate(token: bytes) -> bytes:
    return compact(token) + NO_TAGS


def read_sasl_authenticate(reader: AnswerReader) -> Authenticated | Error:
    code, message, token = reader.int16(), reader.string(), reader.compact()
    lifetime_ms = reader.int64()
    reader.tags()
    reader.end()
    return Error(code, message) if code else Authenticated(token or b"", lifetime_ms)


def response_header(reader: AnswerReader, api: Api) -> int:
    """Return the correlation id; ApiVersions' answer never has tagged fields in its header."""
    correlation_id = reader.int32()
    if api.key not in (API_VERSIONS.key, SASL_HANDSHAKE.key):
        reader.tags()
    return correlation_id


def frame(api: Api, correlation_id: int, client_id: bytes, body: bytes) -> bytes:
    """Return a request as it is sent; SaslHandshake's header is the older one, without tags."""
    head = _HEADER.pack(api.key, api.version, correlation_id)
    head += _INT16.pack(len(client_id)) + client_id
    head += b"" if api == SASL_HANDSHAKE else NO_TAGS
    return b"".join((_INT32.pack(len(head) + len(body)), head, body))
