"""Record batches and varints: any value, read back, is what was written."""

from __future__ import annotations

import gzip
import struct
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cdc.log.direct import records, wire
from cdc.log.direct.wire import AnswerReader

_TEXT = st.none() | st.binary(max_size=300)
_MESSAGES = st.lists(
    st.fixed_dictionaries({"key": _TEXT, "value": _TEXT}), min_size=1, max_size=200
)
_FRAME = struct.Struct("!qiibIhiqqqhii")


def crc32c(data: bytes) -> int:
    """Compute Castagnoli's polynomial bit by bit: no code of the module under test."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def varint(reader: AnswerReader) -> int:
    """Read a signed varint: zigzag, so that small negatives are short."""
    value = reader.uvarint()
    return (value >> 1) ^ -(value & 1)


def nullable(reader: AnswerReader) -> bytes | None:
    size = varint(reader)
    return None if size == -1 else reader.take(size)


def read(batch: bytes) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Return a batch's head and records; the length and the checksum must be right."""
    (offset, length, leader, magic, crc, attributes, last, first_ms, most_ms, who, epoch, number,
     count) = _FRAME.unpack_from(batch)  # fmt: skip
    assert (offset, leader, magic, attributes & ~1) == (0, -1, 2, 0x10)
    assert length == len(batch) - 12
    assert first_ms == most_ms
    assert crc == crc32c(batch[21:])
    body = batch[_FRAME.size :]
    reader = AnswerReader(gzip.decompress(body) if attributes & 1 else body)
    messages = []
    for at in range(count):
        inner = AnswerReader(reader.take(varint(reader)))
        assert (inner.take(1), varint(inner), varint(inner)) == (b"\0", 0, at)
        key, value = nullable(inner), nullable(inner)
        assert varint(inner) == 0
        inner.end()
        messages.append({"key": key, "value": value})
    reader.end()
    assert last == count - 1
    return {"id": who, "epoch": epoch, "number": number, "time_ms": first_ms}, messages


@given(_MESSAGES, st.integers(0, 2**62), st.integers(0, 2**15 - 1), st.integers(0, 2**31 - 1))
def test_a_batch_read_back_is_what_was_written(
    messages: list[dict[str, Any]], producer_id: int, epoch: int, number: int
) -> None:
    head, found = read(records.batch(messages, producer_id, epoch, number, 1_700_000_000_000))
    assert found == messages
    assert head == {
        "id": producer_id,
        "epoch": epoch,
        "number": number,
        "time_ms": 1_700_000_000_000,
    }


@given(_MESSAGES, st.integers(1, 2_000))
def test_parts_are_the_messages_in_order_none_empty_none_larger_than_need_be(
    messages: list[dict[str, Any]], most: int
) -> None:
    parts = list(records.parts(messages, most))
    assert [message for part in parts for message in part] == messages
    for part in parts:
        assert part
        data = len(records.batch(part, 1, 1, 0, 0)) - _FRAME.size
        assert len(part) == 1 or data <= most


@given(st.integers(100_000, 300_000), st.integers(1, 3))
def test_a_batch_of_large_records_is_compressed(size: int, count: int) -> None:
    messages = [{"key": b"k", "value": b"x" * size}] * count
    data = records.batch(messages, 1, 2, 3, 4)
    assert len(data) < size / 50
    assert read(data)[1] == messages


@given(st.integers(0, 2**64 - 1))
def test_a_varint_read_back_is_what_was_written(value: int) -> None:
    reader = AnswerReader(wire.uvarint(value))
    found = reader.uvarint()
    reader.end()
    assert found == value


@given(st.none() | st.text(max_size=300))
def test_a_string_read_back_is_what_was_written(text: str | None) -> None:
    try:
        data = wire.string(text)
    except UnicodeEncodeError:
        return  # half of a surrogate pair is not valid text
    reader = AnswerReader(data)
    assert reader.string() == text
    reader.end()
