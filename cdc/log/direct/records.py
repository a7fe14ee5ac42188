"""Record batches, version 2: what a Produce request carries for one partition. No I/O.

https://kafka.apache.org/documentation/#recordbatch
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Final

import google_crc32c

from cdc.log.direct.wire import uvarint

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cdc.log.batch import Message

_HEAD: Final = struct.Struct("!qiibI")  # base offset, length, leader epoch, magic, CRC
# What the CRC covers: attributes, last offset delta, both timestamps, producer, sequence, count.
_COVERED: Final = struct.Struct("!hiqqqhii")
_MAGIC: Final = 2
_TRANSACTIONAL: Final = 0x10  # with the producer's time
_GZIP: Final = 0x01
_GZIP_FORMAT: Final = 31  # zlib's `wbits` for gzip, with the largest window
# Rows of a small batch are sent uncompressed. Only records of our own are larger, such as the
# schemas of many tables, and their topics' limits count the compressed size.
_PLAIN_BYTES: Final = 64 << 10
_AFTER_LENGTH: Final = 12  # where the bytes start that the length counts
# Parts of a record: attributes and a timestamp delta, both 0; a null key or value.
_FRONT: Final = b"\x00\x00"
_NULL: Final = b"\x01"
_NO_HEADERS: Final = b"\x00"
_RECORD_BYTES: Final = 24  # the most that a record has around its key and value


# Without its compiled part the checksum of a batch would take longer than sending it.
QUICK: Final = google_crc32c.implementation == "c"


def parts(messages: list[Message], most: int) -> Iterator[list[Message]]:
    """Yield the messages in order, in lists of at most `most` bytes or of one message."""
    part: list[Message] = []
    size = 0
    for message in messages:
        length = len(message["key"] or b"") + len(message["value"] or b"") + _RECORD_BYTES
        if part and size + length > most:
            yield part
            part, size = [], 0
        part.append(message)
        size += length
    if part:
        yield part


def batch(
    messages: Sequence[Message], producer_id: int, epoch: int, sequence: int, time_ms: int
) -> bytes:
    """Return the batch of `messages` (confluent-kafka's form), numbered from `sequence`."""
    parts: list[bytes] = []
    for offset, message in enumerate(messages):
        key, value = message["key"], message["value"]
        number = uvarint(offset << 1)
        keyed = _NULL if key is None else uvarint(len(key) << 1) + key
        head = _NULL if value is None else uvarint(len(value) << 1)
        value = value or b""
        size = len(_FRONT) + len(number) + len(keyed) + len(head) + len(value) + len(_NO_HEADERS)
        parts += (uvarint(size << 1), _FRONT, number, keyed, head, value, _NO_HEADERS)
    count, attributes, body = len(messages), _TRANSACTIONAL, b"".join(parts)
    if len(body) > _PLAIN_BYTES:
        attributes, body = attributes | _GZIP, zlib.compress(body, 1, wbits=_GZIP_FORMAT)
    fields = (attributes, count - 1, time_ms, time_ms, producer_id, epoch, sequence, count)
    covered = _COVERED.pack(*fields)
    checksum = google_crc32c.extend(google_crc32c.value(covered), body)
    length = _HEAD.size - _AFTER_LENGTH + len(covered) + len(body)
    return b"".join((_HEAD.pack(0, length, -1, _MAGIC, checksum), covered, body))
