"""Mirrors read alike by delta-spark, delta-rs, polars and Delta Kernel."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from deltalake import DeltaTable

from lockstep.conformance.store import USERS, VALUES, WIDER, applied, apply, change, row
from lockstep.sinks.contract import Altered, AlteredColumn, Change, Changes, Column, Version
from lockstep.sinks.delta import actions, vectors
from lockstep.sinks.delta.settings import DeltaSettings
from lockstep.sinks.delta.sink import DeltaSink
from tests.fixtures.delta_readers import READERS
from tests.integration.test_delta_buckets import filled, write
from tests.property import test_delta_appliers as by_key
from tests.property.test_delta_positions import LOOSE, Rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

KINDS = (
    *(("yes", "bool", 16), ("small", "int2", 21), ("large", "int8", 20), ("single", "float4", 700)),
    *(("naive", "timestamp", 1114), ("instant", "timestamptz", 1184), ("data", "bytea", 17)),
    *(("uuid", "uuid", 2950), ("strings", "_text", 1009), ("days", "_date", 1182)),
)
TYPES = Version(
    30,
    "public",
    "types",
    "shop.public.types",
    ("large",),
    tuple(Column(name, kind, oid, -1, nullable=name != "large") for name, kind, oid in KINDS),
    VALUES,
)
# Names that Parquet refuses: such a table has mapped columns.
MAPPED = USERS._replace(
    schema_id=31,
    table="mapped",
    topic="shop.public.mapped",
    columns=tuple(
        each._replace(name="a name, with spaces" if each.name == "name" else each.name)
        for each in USERS.columns
    ),
)
HISTORIES = frozenset({"public.past"})
PAST = by_key.TABLES["odd"]._replace(schema_id=32, table="past", topic="shop.public.past")


def types_row(number: int) -> dict[str, Any]:
    """Return a row of the log with the least, the greatest, or usual values."""
    instant = (-62_135_596_800_000_000, 253_402_300_799_999_999, 1_700_000_000_123_456)[number % 3]
    return {
        "yes": bool(number % 2),
        "small": (-(2**15), 2**15 - 1, 7)[number % 3],
        "large": number,
        "single": (None, "NaN", -0.5)[number % 3],
        "naive": instant,
        "instant": "2024-02-29T23:59:59.123456Z" if number % 3 else None,
        "data": b64encode(bytes(range(number))).decode(),
        "uuid": "9f3c2c26-5c1a-4b6e-8a55-0d4a2a7c0f11",
        "strings": (None, [], ["é", None, ""])[number % 3],
        "days": (None, [0, -719_162], [None])[number % 3],
    }


def types(seq: int) -> Changes:
    """Return three new rows, and a deletion of one before them."""
    rows = [
        Change(
            msgspec.json.encode({"large": number}),
            seq,
            msgspec.json.encode(types_row(number)),
            *(TYPES.schema_id, 1_000 + seq, 1_700_000_000_000_000),
        )
        for number in range(3 * seq, 3 * seq + 3)
    ]
    old = msgspec.json.encode({"large": 3 * seq - 2})
    return Changes((TYPES,), [*rows, Change(old, seq, None, TYPES.schema_id, 0, 0, op="d")])


def mapped(seq: int) -> Changes:
    rows = [row(USERS, seq, number) for number in range(seq, seq + 4)]
    for each in rows:
        each["a name, with spaces"] = each.pop("name")
    return Changes((MAPPED,), [change(MAPPED, seq, each, each["id"]) for each in rows])


class Lake:
    """Mirrors of all kinds, written by one sink."""

    def __init__(self, path: Path, seed: int, **settings: Any) -> None:  # noqa: ANN401 - any setting
        self.path, self.chance, self.seq = path, Random(seed), 0
        self.settings = DeltaSettings("shop", "lake", "shop", str(path))._replace(**settings)
        self.sink = self.opened()

    def opened(self) -> DeltaSink:
        sink = DeltaSink(self.settings)
        sink.open()
        return sink

    def fill(self, names: frozenset[str], turns: int = 6) -> None:
        """Play cuts of the tables; a wider version of some, a restart, and the DDL of one."""
        chance = self.chance
        plays: list[by_key.Play | Rows] = [
            *(by_key.Play(chance, each) for each in by_key.TABLES.values()),
            *(Rows(chance, each) for each in (LOOSE, PAST)),
        ]
        for turn in range(turns):
            if turn == turns // 2:
                for each in plays:
                    before = each.version
                    at = before.schema_id + 100
                    each.version = before._replace(schema_id=at, columns=by_key.WIDER)
                self.sink.close()
                self.sink = self.opened()
            self.seq += 1_000
            for each in plays:
                each.seq = self.seq
            cuts = [each.cut() for each in plays]
            cuts += [types(self.seq // 1_000), mapped(self.seq), self.users()]
            apply(self.sink, self.seq + 999, *(cut for cut in cuts if cut.version.table in names))
        if "users" in names:
            self.alter()
        self.sink.close()

    def users(self) -> Changes:
        ids = self.chance.sample(range(20), 6)
        new = [change(USERS, self.seq, row(USERS, self.seq, each), each) for each in ids]
        return Changes((USERS,), new)

    def alter(self) -> None:
        """Rename a column, and add one with a default."""
        renamed = tuple(
            each._replace(name="renamed" if each.name == "name" else each.name)
            for each in WIDER.columns
        )
        version = WIDER._replace(columns=renamed)
        columns = [
            AlteredColumn(each.name, "name" if each.name == "renamed" else each.name)
            for each in renamed[:-1]
        ]
        at = self.seq + 1_000
        self.sink.begin(at, [version])
        altered = Altered(at, USERS, version, (*columns, AlteredColumn("age", None, b"7")))
        self.sink.alter(altered)
        self.sink.commit(applied(at))


def mirrors(path: Path) -> Iterator[Path]:
    """Yield the mirrors and the table of frontiers, which readers read too."""
    for each in sorted(path.iterdir()):
        if (each / "_delta_log").is_dir():
            yield each


def read_alike(spark: SparkSession, path: Path) -> int:
    """Assert that all readers return the same rows; return how many."""
    rows = 0
    for each in mirrors(path):
        newest = DeltaTable(each).version()
        # polars supports no mapped columns, and says so.
        readers = [name for name in READERS if each.name != "public.mapped" or name != "polars"]
        found = {name: READERS[name](spark, str(each), newest) for name in readers}
        one = found["delta-rs"]
        rows += len(one)
        for name, its in found.items():
            assert its == one, f"{each.name} by {name}"
    return rows


EVERY = frozenset({*by_key.TABLES, "loose", "past", "types", "mapped", "users"})


@pytest.mark.commit("the Delta protocol by other readers")
def test_a_mirror_reads_alike_by_all_readers(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With deletion vectors, a history, rows without a key, many types, and altered rows."""
    monkeypatch.setattr(vectors, "FILES_OF_A_SIZE", 4)
    Lake(tmp_path, 7, history=HISTORIES, applier="vectors").fill(EVERY)
    assert {each.name for each in mirrors(tmp_path)} == {
        "_frontiers",
        *(f"public.{name}" for name in EVERY),
    }
    assert read_alike(spark, tmp_path) > 100
    deleted = [
        each.name
        for each in mirrors(tmp_path)
        if actions.VECTORS in (DeltaTable(each).protocol().reader_features or ())
    ]
    assert "public.plain" in deleted
    assert "public.past" in deleted


def test_a_mirror_of_large_cuts_reads_alike_by_all_readers(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Whose files tasks have written, and whose rows they have marked as deleted."""
    sink = filled(tmp_path)
    write(sink, 300, [change(USERS, 200 + n, None, n) for n in range(1, 90, 2)])
    sink.commit(applied(300))
    apply(sink, 400, Changes((USERS,), [change(USERS, 400, row(USERS, 400, 2), 2)]))
    sink.close()
    assert read_alike(spark, tmp_path) > 50
