"""A file's bounds include every value in it, in the order that its readers compare by."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st

from lockstep.sinks.delta import actions, lake, layout, parts
from lockstep.sinks.delta.actions import Files, put_version
from lockstep.sinks.delta.lake import CommitInfo
from lockstep.sinks.delta.stats import Stats, with_deleted, without_values

# Characters around the limits at which text is cut and compared, including the last one.
TEXT = st.text(st.sampled_from("a\x7f\xe9\ud7ff\ue000\U0001f600\U0010ffff"), max_size=34)
VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int16(): st.integers(-(2**15), 2**15 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.string(): TEXT | TEXT.map(lambda text: "\U0010ffff" * 32 + text),
    pa.date32(): st.dates(),
    pa.timestamp("us"): st.datetimes(),
    pa.timestamp("us", "UTC"): st.datetimes(timezones=st.just(UTC)),
    pa.decimal128(38, 3): st.integers(-(10**38) + 1, 10**38 - 1).map(
        lambda units: Decimal(f"{units}e-3")
    ),
    pa.float64(): st.sampled_from([float("nan"), float("inf"), -0.0]) | st.floats(),
    pa.float32(): st.floats(width=32),
}


def read(bound: object, kind: pa.DataType) -> Any:  # noqa: ANN401 - any type's
    """Return a bound as a reader interprets it."""
    if pa.types.is_timestamp(kind):
        return datetime.fromisoformat(str(bound))
    return date.fromisoformat(str(bound)) if pa.types.is_date(kind) else bound


@pytest.mark.parametrize("kind", VALUES, ids=str)
@given(data=st.data())
def test_bounds_hold_every_value(kind: pa.DataType, data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.lists(st.none() | VALUES[kind], max_size=5), max_size=3))
    schema = pa.schema([("v", kind)])
    stats = Stats(schema)
    for group in groups:
        stats.add(pa.table({"v": pa.array(group, kind)}))
    reported = json.loads(stats.json(), parse_float=Decimal if pa.types.is_decimal(kind) else None)
    rows = [value for group in groups for value in group]
    values = [value for value in rows if value is not None]
    assert reported["numRecords"] == len(rows)
    assert reported["nullCount"] == {"v": len(rows) - len(values)}
    assert reported["minValues"].keys() == reported["maxValues"].keys()
    if not reported["minValues"]:
        odd = (date, str) if pa.types.is_timestamp(kind) or pa.types.is_string(kind) else float
        assert not values or isinstance(values[0], odd)
        return
    least, most = (read(reported[each]["v"], kind) for each in ("minValues", "maxValues"))
    for value in values:
        if isinstance(value, str):
            assert least.encode() <= value.encode() <= most.encode()
        else:
            assert least <= value <= most
    if pa.types.is_floating(kind):  # for readers to which -0 is less than 0
        assert least != 0 or math.copysign(1, least) < 0
        assert most != 0 or math.copysign(1, most) > 0


def test_only_the_first_columns_have_statistics() -> None:
    rows = pa.table({f"c{n}": [n] for n in range(40)})
    stats = Stats(rows.schema)
    stats.add(rows)
    reported = json.loads(stats.json())
    assert [len(reported[each]) for each in ("minValues", "maxValues", "nullCount")] == [32, 32, 32]


def test_an_upload_is_the_same_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """In more than one part, with an in-memory object store."""
    monkeypatch.setattr(parts, "GROUP_BYTES", 10 << 20)
    schema = pa.schema([("id", pa.int64())])
    files = Files("memory:///table", {})
    ids = pa.Array.from_buffers(
        pa.int64(), 2_500_000, [None, pa.py_buffer(Random(1).randbytes(20_000_000))]
    )
    with parts.Parts(files, schema) as written:
        for batch in pa.table([ids], schema=schema).to_batches(100_000):
            written.add(batch)
    [part] = written.done
    stored = files.read(part.path)
    assert len(stored) == part.bytes > actions.PART_BYTES
    assert pq.read_table(pa.BufferReader(stored))["id"].combine_chunks() == ids


def test_files_end_when_full_and_abandoned_ones_are_in_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "GROUP_BYTES", 10_000)
    monkeypatch.setattr(parts, "FILE_BYTES", 20_000)
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    table = lake.made(
        str(tmp_path),
        layout.struct([("id", "long"), ("text", "string")], "t"),
        {},
        properties={},
        facts={},
    )
    files = Files(str(tmp_path), {})
    held = []
    with parts.Parts(files, schema) as written:
        for first in range(0, 5_000, 100):
            ids = list(range(first, first + 100))
            texts = [f"{n * 2_654_435_761 % 2**32:x}" * 3 for n in ids]
            written.add(pa.record_batch([pa.array(ids), pa.array(texts)], schema=schema))
            held.append(written.bytes_held)
    assert max(held) < 10_000
    assert len(written.done) > 2
    assert all(part.bytes == (tmp_path / part.path).stat().st_size for part in written.done)
    put_version(files, 1, [part.action for part in written.done], {}, CommitInfo("a", 1, {}))
    table.update_incremental()
    assert sorted(table.to_pyarrow_table()["id"].to_pylist()) == list(range(5_000))

    with pytest.raises(RuntimeError), parts.Parts(files, schema) as given_up:  # noqa: PT012
        for _ in range(30):
            given_up.add(pa.record_batch([pa.array([1] * 100), pa.array(["x" * 9] * 100)], schema))
        raise RuntimeError
    with parts.Parts(files, schema) as empty:
        empty.add(pa.record_batch([pa.array([], pa.int64()), pa.array([], pa.string())], schema))
    assert not empty.done
    assert DeltaTable(tmp_path).to_pyarrow_table().num_rows == 5_000


def test_a_column_has_no_values_if_as_many_are_null_as_the_file_has_rows() -> None:
    """Also once rows are deleted: their number in the statistics is the file's own."""
    rows = pa.table({"id": [1, 2], "a": pa.nulls(2, pa.int64()), "b": [None, "x"]})
    stats = Stats(rows.schema)
    stats.add(rows)
    assert without_values(stats.json(), 2) == {"a"}
    assert without_values(with_deleted(stats.json(), 2), 2) == {"a"}
    assert without_values('{"numRecords":2,"nullCount":{"s":{"x":2}}}', 2) == set()
    assert without_values("", 2) == set()
