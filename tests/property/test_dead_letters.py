"""For any row, limit and key: pointer and letter fit, and restore the same bytes."""

from __future__ import annotations

import itertools
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from cdc.decode.messages import (
    Delete,
    Insert,
    OldTuple,
    Relation,
    RelationColumn,
    ReplicaIdentity,
    Update,
)
from cdc.encode import oversize
from cdc.errors import ConfigError
from cdc.log import names
from cdc.log.dead_letters import DeadLetterAssembler
from tests.property.stream import PREFIX, Published, Session, begin, commit, frame, position
from tests.unit.test_dead import event, pointer

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.text(max_size=20),
    st.builds(lambda text, n: text * n, st.text(min_size=1, max_size=5), st.integers(1, 3_000)),
    st.lists(st.integers(0, 9), max_size=50),
    st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=3),
)
ROWS = st.dictionaries(st.text(max_size=6), VALUES, min_size=1, max_size=8)


@given(
    images=st.sampled_from(["c", "u", "d", "whole"]),
    before=ROWS,
    after=ROWS,
    keys=st.integers(0, 3),
    limit=st.sampled_from([1_200, 3_000, 12_000, 60_000]),
)
def test_any_event_is_read_back_complete(
    images: str, before: dict[str, Any], after: dict[str, Any], keys: int, limit: int
) -> None:
    op = "u" if images == "whole" else images
    value = event(
        op, before if images in {"d", "whole"} else None, None if images == "d" else after
    )
    row = before if op == "d" else after
    key = orjson.dumps({name: row[name] for name in sorted(row)[:keys]}) if keys else None
    try:
        split = oversize.split("t", key, value, limit)
    except ConfigError:
        # Only if the envelope, the key and placeholders leave no room.
        assert limit < 3_000
        return
    again = oversize.split("t", key, value, limit)
    assert (split.key, split.value) == (again.key, again.value)
    assert list(split.letter) == list(again.letter)
    assert oversize.fits(split.key, split.value, limit)
    assert split.key == (key and oversize.record_key(key, limit))
    if not split.letter:
        assert split.value == value
        return
    reported, complete = orjson.loads(split.value), orjson.loads(value)
    points = reported["source"].pop("dead")
    for image in ("before", "after"):
        for name in points["columns"]:
            if complete[image] and name in complete[image]:
                assert reported[image][name] == oversize.PLACEHOLDER.decode().strip('"')
                reported[image][name] = complete[image][name]
    assert reported == complete
    letters = DeadLetterAssembler()
    for each in split.letter:
        assert oversize.fits(*each, limit)
        letters.add(*each)
    assert letters.event(pointer(split.value)) == value


USERS = Relation(
    1,
    "public",
    "users",
    ReplicaIdentity.FULL,
    (RelationColumn(True, "id", 25, -1), RelationColumn(True, "body", 25, -1)),  # noqa: FBT003 - whether of the key
)


def message(op: str, row: int, size: int) -> bytes:
    """Return a frame about a row with a body of `size`; every third row's key is long too."""
    key = f"{row}-".encode() * (400 if row % 3 == 0 else 1)
    new, old = (key, b"x\x01" * size), OldTuple((key, b"old" * size))
    if op == "c":
        return frame(Insert(1, new))
    return frame(Update(1, old, new) if op == "u" else Delete(1, old))


def published(limit: int, frames: list[bytes], cuts: list[int]) -> list[Published]:
    """Return what a session with this limit publishes, fed in pieces."""
    session = Session(position(), {1: ("id",)}, limit=limit)
    session.feed([begin(), frame(USERS)])
    for low, high in zip([0, *cuts], [*cuts, len(frames)], strict=True):
        session.feed(frames[low:high])
    session.feed([commit()])
    return session.waiting()


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from("cud"), st.integers(0, 5), st.sampled_from([1, 400, 900, 1_500, 9_000])
        ),
        min_size=1,
        max_size=12,
    ),
    cut=st.integers(0, 12),
)
def test_a_log_with_a_limit_holds_the_events_of_one_without(
    steps: list[tuple[str, int, int]], cut: int
) -> None:
    """The same events in the same order, resolved with the letters, and each record fits."""
    frames = [message(*step) for step in steps]
    limit = 4_000
    complete = published(16 << 20, frames, [])
    limited = published(limit, frames, [min(cut, len(frames))])
    # However the stream is cut, the bytes are the same.
    assert limited == published(limit, frames, [])
    letters = DeadLetterAssembler()
    data = []
    for each in limited:
        assert oversize.fits(each.key, each.value or b"", limit)
        if each.topic == names.dead_topic(PREFIX):
            letters.add(each.key, each.value)
        else:
            data.append(each)
    reported = sorted(filter(None, (_resolved(each.value, letters) for each in data)), key=_seq)
    assert reported == sorted(filter(None, (each.value for each in complete)), key=_seq)
    assert letters.pending() == []
    # A tombstone follows its delete in the partition, under the delete's key.
    for before, each in itertools.pairwise(data):
        if each.value is None:
            assert (before.key, before.partition) == (each.key, each.partition)
            assert b'"op":"d"' in (before.value or b"")
    keys = {each.key: oversize.record_key(each.key, limit) for each in complete if each.key}
    assert {each.key for each in data if each.key} == set(keys.values())


def _resolved(value: bytes | None, letters: DeadLetterAssembler) -> bytes | None:
    if value is None or b'"dead":{' not in value:
        return value
    return letters.event(pointer(value))


def _seq(value: bytes) -> int:
    return int(orjson.loads(value)["source"]["seq"])
