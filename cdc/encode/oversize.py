"""Split an event that is too large for its topic: a pointer there, the full event as a dead letter.

Pure, and the same event gives the same pointer whatever the compression library: the chunks are
pieces of the uncompressed event. The pointer is an ordinary event, with key, op and position of the
original; only large values are replaced by the placeholder that Debezium's readers know as
"not available", and named in `source.dead`. So nothing is dropped, nothing waits, and no reader
takes it for a delete. `cdc.log.dead_letters` reads letters back; docs/EVENTS.md is the contract.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec import Raw
from msgspec.structs import replace
from orjson import dumps

from cdc.encode.dead_letter import DeadLetterRecords
from cdc.errors import ConfigError
from cdc.log.batch import Batch
from cdc.log.dead_letters import DeadLetterHead, Pointer

if TYPE_CHECKING:
    from collections.abc import Sequence

# One chunk of an event, before compression: the broker's default limit takes it.
PIECE_BYTES: Final = 768 << 10
# In a pointer, values of up to this many bytes of JSON stay where they are.
KEPT_BYTES: Final = 1_024
# A key longer than the limit divided by this is replaced by its checksum, in all its events.
_KEY_SHARE: Final = 4
# JSON may be this many times as long as the text Postgres sends: 13.5 times where `1,` in an array
# of numerics becomes `{"scale":0,"value":"AQ=="},`. Next are 9 times, `{"base64":"/w=="},` of a
# byte that is not UTF-8, and 7, a control character in an hstore's JSON.
GROWTH: Final = 14
# The envelope may be this long if no column has a value (names of 1,600 columns, twice).
_ENVELOPE_BYTES: Final = 512 << 10

# The JSON that replaces a large value, unless `values` in the configuration sets another.
PLACEHOLDER: Final = b'"__debezium_unavailable_value"'

_IMAGES: Final[tuple[str, ...]] = ("before", "after", "message")


class Split(NamedTuple):
    """What replaces the event, and the dead letter's records in their order."""

    key: bytes | None
    value: bytes
    letter: Sequence[tuple[bytes, bytes]]  # key and value


class _Source(msgspec.Struct):
    schema: str
    table: str
    epoch: int
    seq: int
    commit_lsn: str
    ordinal: int
    ts_us: int


class _Event(msgspec.Struct):
    op: str
    source: _Source


_decode: Final = msgspec.json.Decoder(_Event).decode


def plain_bytes(limit: int) -> int:
    """Return how long a row may be as Postgres sends it so that its event surely fits."""
    return max(0, (limit - _ENVELOPE_BYTES) // GROWTH)


def fits(key: bytes | None, value: bytes, limit: int) -> bool:
    """Return whether the record fits into its topic as it is; `limit` is `record_limit`'s."""
    size = 0 if key is None else len(key)
    return size * _KEY_SHARE <= limit and size + len(value) <= limit


def record_key(key: bytes, limit: int) -> bytes:
    """Return the key of the record, tombstones too: `key`, or its checksum if it is too long.

    It depends on the key alone, so that every event of a row has the same one.
    """
    if len(key) * _KEY_SHARE <= limit:
        return key
    return b'{"sha256":"%b"}' % hashlib.sha256(key).hexdigest().encode()


def split(
    topic: str, key: bytes | None, value: bytes, limit: int, placeholder: bytes = PLACEHOLDER
) -> Split:
    """Return what replaces an event that does not fit.

    Raises ConfigError if not even the pointer fits.
    """
    short = None if key is None else record_key(key, limit)
    if fits(short, value, limit):
        return Split(short, value, [])
    event = msgspec.json.decode(value, type=dict[str, Raw])
    images = {name: _members(event[name]) for name in _IMAGES if name in event}
    # Without its key a row can't be found: those columns stay, unless the key is too long itself.
    kept = set(msgspec.json.decode(key, type=dict[str, Raw])) if key and short == key else set()
    piece = min(PIECE_BYTES, limit * 3 // 4)
    head = _head(topic, short, value, -(-len(value) // piece))
    for least in (KEPT_BYTES, len(placeholder)):
        head = replace(head, columns=_columns(images, kept, least))
        pointer = _pointer(event, images, head, placeholder)
        if fits(short, pointer, limit):
            return Split(short, pointer, DeadLetterRecords(head, value, piece))
    raise ConfigError(
        f"topic {topic} takes records of {limit} bytes, too few for a row without its values",
        hint="raise max.message.bytes of the topic, and message.max.bytes of the brokers",
    )


class DeadLetters:
    """Fits records into their topics; what is too large goes into the batch as a dead letter."""

    def __init__(self, batch: Batch, topic: str, placeholder: bytes, limit: int) -> None:
        """`limit` is for the topics that `limit_to` has not been called for."""
        self._batch = batch
        self._partition = batch.topic(topic, 1)[0]
        self._placeholder = placeholder
        self._limit = limit
        self._limits: dict[str, int] = {}
        batch.plain_bytes = plain_bytes(limit)
        self.written = 0  # letters since `take`

    def knows(self, topic: str) -> bool:
        """Whether the topic's own limit is known."""
        return topic in self._limits

    def limit_to(self, limits: dict[str, int], *, rows: bool = True) -> None:
        """Note how long a key and a value may be together in these topics.

        Without `rows` they take no rows of tables, so how long a row may be stays as it is.
        """
        self._limits |= limits
        if rows:
            plain = map(plain_bytes, limits.values())
            self._batch.plain_bytes = min((self._batch.plain_bytes, *plain))

    def fit(self, topic: str, key: bytes | None, value: bytes) -> tuple[bytes | None, bytes]:
        """Return the key and the value that go into the topic."""
        limit = self._limits.get(topic, self._limit)
        if fits(key, value, limit):
            return key, value
        key, value, letter = split(topic, key, value, limit, self._placeholder)
        if letter:
            self._batch.letters.append((self._partition, letter))
            self.written += 1
        return key, value

    def take(self) -> int:
        """Return how many letters there were since the last call."""
        written, self.written = self.written, 0
        return written


def _columns(images: dict[str, dict[str, Raw]], kept: set[str], least: int) -> tuple[str, ...]:
    """Return the columns that are longer than `least` in any image, in the images' order."""
    found = {
        name: None
        for image in images.values()
        for name, value in image.items()
        if memoryview(value).nbytes > least and name not in kept
    }
    return tuple(found)


def _head(topic: str, key: bytes | None, value: bytes, chunks: int) -> DeadLetterHead:
    event = _decode(value)
    source = event.source
    return DeadLetterHead(
        id=f"{source.epoch}-{source.seq}",
        reason="size",
        topic=topic,
        key=key.decode() if key is not None and len(key) <= KEPT_BYTES else None,
        schema=source.schema,
        table=source.table,
        op=event.op,
        epoch=source.epoch,
        seq=source.seq,
        commit_lsn=source.commit_lsn,
        ordinal=source.ordinal,
        committed_at_us=source.ts_us,
        columns=(),
        chunks=chunks,
        bytes=len(value),
        sha256=hashlib.sha256(value).hexdigest(),
    )


def _pointer(
    event: dict[str, Raw],
    images: dict[str, dict[str, Raw]],
    head: DeadLetterHead,
    placeholder: bytes,
) -> bytes:
    """Return the event with the head's columns replaced and the pointer in its source."""
    parts = {name: bytes(raw) for name, raw in event.items() if name not in images}
    for name, image in images.items():
        columns = {c: placeholder if c in head.columns else bytes(v) for c, v in image.items()}
        parts[name] = _object(columns) if image else bytes(event[name])
    dead = Pointer(**{name: getattr(head, name) for name in Pointer.__struct_fields__})
    parts["source"] = b'%b,"dead":%b}' % (parts["source"][:-1], msgspec.json.encode(dead))
    return _object({name: parts[name] for name in event})


def _members(raw: Raw) -> dict[str, Raw]:
    return msgspec.json.decode(raw, type=dict[str, Raw] | None) or {}


def _object(members: dict[str, bytes]) -> bytes:
    return b"{%b}" % b",".join(b"%b:%b" % (dumps(name), value) for name, value in members.items())
