"""Whatever the row, the limit and the key: pointer and letter fit, and give back the same bytes."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from cdc.errors import ConfigError
from cdc.log import dead
from cdc.log.letters import Letters
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
def test_any_event_comes_back_whole(
    images: str, before: dict[str, Any], after: dict[str, Any], keys: int, limit: int
) -> None:
    op = "u" if images == "whole" else images
    value = event(
        op, before if images in {"d", "whole"} else None, None if images == "d" else after
    )
    row = before if op == "d" else after
    key = orjson.dumps({name: row[name] for name in sorted(row)[:keys]}) if keys else None
    try:
        split = dead.split("t", key, value, limit)
    except ConfigError:
        # Only where the envelope, the key and placeholders leave no room.
        assert limit < 3_000
        return
    assert split == dead.split("t", key, value, limit)
    assert dead.fits(split.key, split.value, limit)
    assert split.key == (key and dead.record_key(key, limit))
    if not split.letter:
        assert split.value == value
        return
    told, whole = orjson.loads(split.value), orjson.loads(value)
    points = told["source"].pop("dead")
    for image in ("before", "after"):
        for name in points["columns"]:
            if whole[image] and name in whole[image]:
                assert told[image][name] == dead.PLACEHOLDER.decode().strip('"')
                told[image][name] = whole[image][name]
    assert told == whole
    letters = Letters()
    for each in split.letter:
        assert dead.fits(*each, limit)
        letters.add(*each)
    assert letters.whole(pointer(split.value)) == value
