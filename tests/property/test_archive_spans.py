"""The rows of a file of the archive are found by span, each once, in the order of their offsets."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from lockstep.jobs.archiving import layout, stored
from lockstep.jobs.archiving.writing import as_parquet

spans = st.tuples(st.integers(1, 3), st.sampled_from("abcd"), st.integers(0, 2))


@given(st.lists(spans, max_size=200))
def test_each_span_is_one_slice_of_its_own_rows(rows: list[stored.Key]) -> None:
    wanted: dict[stored.Key, list[int]] = {}
    for offset, span in enumerate(rows):
        wanted.setdefault(span, []).append(offset)
    empty = dict.fromkeys(layout.SCHEMA.names)
    named = [
        {**empty, "cut": cut, "topic": topic, "partition": partition, "offset": offset}
        for offset, (cut, topic, partition) in reversed(list(enumerate(rows)))
    ]
    table, index = stored.sorted_rows(as_parquet(pa.Table.from_pylist(named, schema=layout.SCHEMA)))
    found = {span: table.slice(*slot)["offset"].to_pylist() for span, slot in index.items()}
    assert found == wanted
