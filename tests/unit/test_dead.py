"""A row larger than its topic allows: the pointer in its place, the letter, and the way back."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
import pytest

from cdc.encode import oversize
from cdc.errors import CDCError, ConfigError, GapError
from cdc.log.batch import Batch
from cdc.log.dead_letters import DeadLetterAssembler, Pointer
from cdc.log.limits import record_limit
from cdc.verify.events import FoldEvent

LIMIT = 100_000
T = "shop.public.users"
KEY = b'{"id":7}'
HELD = oversize.PLACEHOLDER.decode().strip('"')


def event(op: str = "u", before: Any = None, after: Any = None, seq: int = 42) -> bytes:  # noqa: ANN401
    source = {
        "version": "0.1.0", "schema": "public", "table": "users", "ts_us": 5, "epoch": 1,
        "commit_lsn": "0/16E9058", "ordinal": 3, "seq": seq, "schema_id": 1,
    }  # fmt: skip
    return orjson.dumps(
        {"before": before, "after": after, "source": source, "op": op, "ts_ms": 1,
         "transaction": None}
    )  # fmt: skip


def pointer(value: bytes) -> Pointer:
    found = msgspec.json.decode(value, type=FoldEvent).source.dead
    assert found is not None
    return found


def resolved(split: oversize.Split) -> bytes:
    letters = DeadLetterAssembler()
    for key, value in split.letter:
        letters.add(key, value)
    complete = letters.event(pointer(split.value))
    assert list(letters.pending()) == []
    return complete


BIG = event(before={"id": 7}, after={"id": 7, "name": "Ada", "body": "x" * 300_000})


def test_the_pointer_leaves_out_the_large_value_alone() -> None:
    split = oversize.split(T, KEY, BIG, LIMIT)
    here, complete = orjson.loads(split.value), orjson.loads(BIG)
    points = here["source"].pop("dead")
    assert points["columns"] == ["body"]
    assert here["after"] == {"id": 7, "name": "Ada", "body": HELD}
    here["after"] = complete["after"]
    assert here == complete
    assert split.key == KEY
    assert resolved(split) == BIG


def test_a_reader_never_takes_a_pointer_for_a_delete() -> None:
    for op in ("c", "u", "r"):
        value = oversize.split(T, KEY, event(op, after={"id": 7, "body": "x" * LIMIT}), LIMIT).value
        assert orjson.loads(value)["after"] == {"id": 7, "body": HELD}
    value = oversize.split(T, KEY, event("d", before={"id": 7, "body": "x" * LIMIT}), LIMIT).value
    parsed = orjson.loads(value)
    assert (parsed["op"], parsed["after"], parsed["before"]) == ("d", None, {"id": 7, "body": HELD})


def test_a_row_exactly_at_the_limit_goes_as_it_is_and_one_byte_more_does_not() -> None:
    room = LIMIT - len(KEY) - len(event(after={"id": 7, "body": ""}))
    at, over = (event(after={"id": 7, "body": "x" * n}) for n in (room, room + 1))
    assert oversize.fits(KEY, at, LIMIT)
    assert not oversize.fits(KEY, over, LIMIT)
    assert oversize.split(T, KEY, at, LIMIT) == oversize.Split(KEY, at, [])
    split = oversize.split(T, KEY, over, LIMIT)
    assert resolved(split) == over
    assert oversize.fits(split.key, split.value, LIMIT)


def test_every_record_of_a_letter_fits_whatever_the_limit() -> None:
    for limit in (3_000, 100_000, 2 << 20):
        value = event(after={"id": 7, "body": "\x01ü€😀" * limit})
        split = oversize.split(T, KEY, value, limit)
        assert all(len(key) + len(part) <= limit for key, part in split.letter)
        assert oversize.fits(split.key, split.value, limit)
        assert resolved(split) == value


def test_a_wide_row_leaves_out_small_values_too() -> None:
    row = {f"c{i}": "x" * 500 for i in range(400)}
    value = event(after={"id": 7, **row, "n": 1})
    split = oversize.split(T, KEY, value, LIMIT)
    parsed = orjson.loads(split.value)
    assert parsed["after"] == {"id": 7, **dict.fromkeys(row, HELD), "n": 1}
    assert resolved(split) == value


def test_a_row_that_does_not_fit_without_its_values_is_refused() -> None:
    value = event(after={f"column_{i}": i for i in range(1_000)})
    with pytest.raises(ConfigError, match="too few") as caught:
        oversize.split(T, None, value, 5_000)
    assert "max.message.bytes" in caught.value.hint


def test_a_long_key_is_replaced_by_its_sum_in_every_event_of_the_row() -> None:
    name = "k" * (LIMIT // 4)
    key = orjson.dumps({"name": name})
    small, large = (event(after={"name": name, "body": "x" * n}) for n in (1, LIMIT))
    assert not oversize.fits(key, small, LIMIT)
    one, other = oversize.split(T, key, small, LIMIT), oversize.split(T, key, large, LIMIT)
    assert one == oversize.Split(oversize.record_key(key, LIMIT), small, [])
    assert one.key == other.key
    assert len(one.key or b"") < 100
    assert resolved(other) == large
    assert orjson.loads(other.letter[0][1])["key"] == (one.key or b"").decode()
    assert orjson.loads(other.value)["after"]["name"] == HELD


def test_a_table_without_a_key_and_a_logical_message() -> None:
    value = event("c", after={"id": 7, "body": "x" * LIMIT})
    split = oversize.split(T, None, value, LIMIT)
    assert split.key is None
    assert orjson.loads(split.letter[0][1])["key"] is None
    assert resolved(split) == value
    parsed = orjson.loads(event("m"))
    del parsed["before"], parsed["after"]
    message = {"prefix": "p", "transactional": True, "content": "x" * LIMIT}
    value = orjson.dumps({**parsed, "message": message})
    split = oversize.split("shop.cdc.messages", b'{"prefix":"p"}', value, LIMIT)
    assert orjson.loads(split.value)["message"] == {**message, "content": HELD}
    assert resolved(split) == value


def test_the_placeholder_is_the_configured_one() -> None:
    split = oversize.split(T, KEY, BIG, LIMIT, b'"?"')
    assert orjson.loads(split.value)["after"]["body"] == "?"


def test_columns_that_postgres_did_not_send_stay_unchanged() -> None:
    parsed = orjson.loads(BIG)
    parsed["after"]["bio"] = HELD
    parsed["source"]["unchanged"] = ["bio"]
    split = oversize.split(T, KEY, orjson.dumps(parsed), LIMIT)
    here = orjson.loads(split.value)
    assert here["source"]["dead"]["columns"] == ["body"]
    assert here["source"]["unchanged"] == ["bio"]


def test_the_head_describes_the_event_for_people() -> None:
    head = orjson.loads(oversize.split(T, KEY, BIG, LIMIT).letter[0][1])
    assert {name: head[name] for name in head if name != "sha256"} == {
        "format": 1, "id": "1-42", "reason": "size", "topic": T, "key": '{"id":7}',
        "schema": "public", "table": "users", "op": "u", "epoch": 1, "seq": 42,
        "commit_lsn": "0/16E9058", "ordinal": 3, "committed_at_us": 5, "columns": ["body"],
        "encoding": "zlib", "chunks": 5, "bytes": len(BIG),
    }  # fmt: skip


def test_what_surely_fits_is_not_looked_at() -> None:
    """Such a row's longest possible event fits, with the widest envelope."""
    limit = record_limit(16 << 20)
    small = oversize.plain_bytes(limit)
    longest = oversize.GROWTH * small + 2 * 1_600 * 128
    assert longest < limit
    assert oversize.plain_bytes(1_000) == 0


def test_a_topic_that_takes_no_rows_does_not_limit_them() -> None:
    batch = Batch()
    dead = oversize.DeadLetters(batch, "shop.cdc.dead", oversize.PLACEHOLDER, 16 << 20)
    before = batch.plain_bytes
    dead.limit_to({})
    dead.limit_to({"shop.cdc.messages": 1 << 20}, rows=False)
    assert batch.plain_bytes == before
    dead.limit_to({T: 1 << 20})
    assert batch.plain_bytes == oversize.plain_bytes(1 << 20) < before


# -- the way back ----------------------------------------------------------------------------------


def parts() -> list[tuple[bytes, bytes]]:
    return list(oversize.split(T, KEY, BIG, LIMIT).letter)


def test_a_letter_is_complete_with_its_last_chunk() -> None:
    letters = DeadLetterAssembler()
    for key, value in parts()[:-1]:
        assert letters.add(key, value) is None
    assert "1-42" not in letters
    head = letters.add(*parts()[-1])
    assert head is not None
    assert head.id == "1-42"


@pytest.mark.parametrize("missing", [0, 1, 3, -1])
def test_an_incomplete_letter_is_a_gap(missing: int) -> None:
    letters, records = DeadLetterAssembler(), parts()
    del records[missing]
    for key, value in records:
        letters.add(key, value)
    assert "1-42" not in letters
    with pytest.raises(GapError, match="not complete"):
        letters.take("1-42")


def test_a_letter_that_differs_from_what_was_written_is_a_gap() -> None:
    records = parts()
    other = oversize.split(T, KEY, BIG.replace(b"Ada", b"Eve"), LIMIT)
    swapped = [*records[:1], other.letter[1], *records[2:]]
    broken = [*records[:1], (records[1][0], b"nothing zlib knows"), *records[2:]]
    for tampered in (swapped, broken):
        letters = DeadLetterAssembler()
        for key, value in tampered:
            letters.add(key, value)
        with pytest.raises(GapError, match="dead letter 1-42"):
            letters.take("1-42")
    letters = DeadLetterAssembler()
    for key, value in records:
        letters.add(key, value)
    with pytest.raises(GapError, match="pointer"):
        letters.event(pointer(other.value))


@pytest.mark.parametrize(
    ("key", "value"),
    [(None, b"{}"), (b"{}", b"{}"), (b'{"id":"1-1","chunk":0}', b"{}"), (b"\xff", None),
     (b'{"id":"\xff","chunk":0}', b""),
     (b'{"id":"1-1","chunk":0}', b'{"format":2}'), (b'{"id":"1-1","chunk":0}', b"[]")],
)  # fmt: skip
def test_what_is_no_letter_is_refused(key: bytes | None, value: bytes | None) -> None:
    with pytest.raises(CDCError) as caught:
        DeadLetterAssembler().add(key, value)
    assert caught.value.hint
