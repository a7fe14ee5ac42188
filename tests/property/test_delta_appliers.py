"""Every applier leaves the same rows: compared with each other and with a model."""

from __future__ import annotations

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

from lockstep.conformance.store import VALUES, applied
from lockstep.jobs.apply.delta_merge import SparkMerge
from lockstep.jobs.reading_as_of import read_as_of_arrow
from lockstep.sinks.contract import Change, Changes, Column, Version
from lockstep.sinks.delta import rewrites
from lockstep.sinks.delta.settings import DeltaSettings
from lockstep.sinks.delta.sink import DeltaSink
from tests.fixtures.seeds import examples, first_seed

Row = dict[str, Any]
BIG = (
    Column("id", "int4", 23, -1, nullable=False),
    Column("at", "date", 1082, -1, nullable=True),
    Column("body", "text", 25, -1, nullable=True),
    Column("many", "_int4", 1007, -1, nullable=True),
    Column("n", "numeric", 1700, (10 << 16 | 2) + 4, nullable=True),
    Column("f", "float8", 701, -1, nullable=True),
)
TABLES = {
    "plain": Version(1, "public", "plain", "shop.public.plain", ("id",), BIG, VALUES),
    # A key of two columns, of which one may be NULL or outside the calendar.
    "odd": Version(2, "public", "odd", "shop.public.odd", ("at", "id"), BIG, VALUES),
    "array": Version(3, "public", "array", "shop.public.array", ("many",), BIG, VALUES),
    # To Postgres 0 and -0 are the same key.
    "zero": Version(4, "public", "zero", "shop.public.zero", ("f",), BIG, VALUES),
    "pair": Version(5, "public", "pair", "shop.public.pair", ("f", "at"), BIG, VALUES),
}
WIDER = (*BIG[:4], Column("n", "numeric", 1700, (12 << 16 | 2) + 4, nullable=True), BIG[5],
         Column("later", "int8", 20, -1, nullable=True))  # fmt: skip
ODD_DAYS = (None, "infinity", "0044-03-15 BC", 20_000, -1)
# Two for every commit: one with each limit of rewrites.
ROUNDS = examples(6)


class Play:
    """Random cuts of a table, and the rows that result."""

    def __init__(self, chance: Random, version: Version) -> None:
        self.chance, self.version = chance, version
        self.seq = 0
        self.model: dict[bytes, Row] = {}

    def cut(self) -> Changes:
        """Return changes of distinct keys, and apply them to the model."""
        chance = self.chance
        truncated = None
        if chance.random() < 0.08:
            self.seq += 1
            truncated = self.seq
            self.model.clear()
        changes: dict[bytes, Change] = {}
        for _ in range(chance.randint(1, 12)):
            row = self.row()
            key = self.key(row)
            if key in changes:
                continue
            if "f" in self.version.key and row["f"] == 0:
                other = self.key(row | {"f": -row["f"]})
                if other in changes:
                    continue
                if other in self.model:
                    changes[other] = self.delete(other)
            changes[key] = self.change(key, row)
        return Changes((self.version,), list(changes.values()), truncated)

    def key(self, row: Row) -> bytes:
        return msgspec.json.encode({name: row[name] for name in self.version.key})

    def row(self) -> Row:
        chance = self.chance
        # In a key, the table has a multidimensional array as text, and the model as lists.
        grid = [2] if "many" in self.version.key else [[1], [2]]
        many = chance.choice([None, [1, None], grid, [], "[0:1]={1,2}"])
        row: Row = {
            "id": chance.randint(1, 20),
            "at": chance.choice(ODD_DAYS),
            "body": chance.choice([None, "", "x" * 50, f"b{self.seq}"]),
            "many": many,
            "n": chance.choice([None, "NaN", f"{self.seq}.25"]),
            "f": chance.choice([None, 0.0, -0.0, 1.5, "NaN"]),
        }
        if any(column.name == "later" for column in self.version.columns):
            row["later"] = self.seq
        return row

    def change(self, key: bytes, row: Row) -> Change:
        chance = self.chance
        self.seq += 1
        place = self.place()
        if chance.random() < 0.3:
            return self.delete(key)
        unchanged: tuple[str, ...] = ()
        reported = dict(row)
        if key in self.model and chance.random() < 0.5:
            large = [name for name in ("body", "many") if name not in self.version.key]
            unchanged = tuple(chance.sample(large, chance.randint(1, len(large))))
            for name in unchanged:
                row[name] = self.model[key][name]
                reported[name] = "__debezium_unavailable_value"
        self.model[key] = row
        return Change(key, self.seq, msgspec.json.encode(reported), *place, unchanged, op="u")

    def delete(self, key: bytes) -> Change:
        self.seq += 1
        self.model.pop(key, None)
        return Change(key, self.seq, None, *self.place(), op="d")

    def place(self) -> tuple[int, int, int]:
        return self.version.schema_id, 1_000 + self.seq, 1_700_000_000_000_000 + self.seq


def seen(path: str, table: str, *but: str) -> list[str]:
    """Return what a reader sees, without files, order and some columns; a map has no order."""
    rows = read_as_of_arrow(path, [f"public.{table}"]).tables[f"public.{table}"].to_pylist()
    for row in rows:
        row["_exact"] = sorted(row["_exact"] or ())
        for name in but:
            del row[name]
    return sorted(repr(sorted(row.items(), key=lambda each: each[0])) for row in rows)


def same_as_model(path: str, play: Play) -> None:
    """Assert that the store's rows, in the log's form, are the model's."""
    sink = DeltaSink(DeltaSettings("shop", "mirror", "shop", path))
    sink.open()
    found = {key: msgspec.json.decode(row) for key, _, row in sink.contents(play.version)}
    sink.close()
    assert found.keys() == play.model.keys()
    for key, row in play.model.items():
        for name in play.version.columns:
            wanted = row.get(name.name)
            if name.name == "many" and isinstance(wanted, list) and wanted and wanted[0] == [1]:
                wanted = "{{1},{2}}"
            assert found[key][name.name] == wanted, (key, name.name)


# The other kinds of keys are in the sample of test_delta_positions.
@pytest.mark.long("keys of other kinds", sample=["plain", "array", "zero"])
@pytest.mark.parametrize("table", TABLES)
def test_appliers_leave_the_same_rows(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes, deletes, unchanged columns, truncates, a wider version; a new sink now and then.

    `auto` also with a mirror that grows out of the rewritten ones, and shrinks again.
    """
    first = first_seed("LOCKSTEP_DELTA_ROUNDS")
    for seed in range(first, first + ROUNDS):
        monkeypatch.setattr(rewrites, "MOST_BYTES", 3_500 if seed % 2 else 1 << 20)
        with TemporaryDirectory() as lake:
            play_on(Path(lake), Random(seed), TABLES[table], "delta-rs", "auto", "vectors")


def play_on(lake: Path, chance: Random, version: Version, *hows: str, turns: int = 8) -> None:
    """Play cuts into a lake of each applier; after each, all are equal to the model."""
    play = Play(chance, version)
    sinks = {how: opened(lake, how) for how in hows}
    for turn in range(turns):
        if turn == turns // 2:
            play.version = version._replace(schema_id=version.schema_id + 10, columns=WIDER)
        cut = play.cut()
        for how in hows:
            if chance.random() < 0.2:
                sinks[how].close()
                sinks[how] = opened(lake, how)
            sinks[how].begin(play.seq, [play.version])
            sinks[how].write(cut)
            sinks[how].commit(applied(play.seq))
        one, *others = (seen(str(lake / how), version.table) for how in hows)
        for other in others:
            assert other == one
        same_as_model(str(lake / hows[-1]), play)
    for sink in sinks.values():
        sink.close()


def opened(lake: Path, how: str) -> DeltaSink:
    """Return the sink of one applier."""
    settings = DeltaSettings("shop", "mirror", "shop", str(lake / how), applier=how)
    if how == "spark":
        settings = settings._replace(large=SparkMerge({}))
    sink = DeltaSink(settings)
    sink.open()
    return sink
