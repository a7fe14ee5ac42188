"""DDL that writes no rows, applied to a stored table: what Postgres' own table shows.

The model is a table as Postgres has it: columns by number, each row with the values that were
written to it, and a missing value per column that is shown where a row has none.
"""

from __future__ import annotations

import tempfile
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final
from unittest import mock

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc import failpoints
from cdc.encode.alterations import altered, compare, stale
from cdc.events import LSN
from cdc.log.records import ALTERED, SchemaColumn, SchemaRecord
from lockstep.conformance.memory import STORES, MemorySink
from lockstep.jobs.apply.applying import Applying
from lockstep.jobs.cuts.altered import alterations, parts
from lockstep.jobs.cuts.reduce import Bounds, Events
from lockstep.jobs.cuts.schemas import version
from lockstep.sinks.contract import Applied, Sink, Version
from lockstep.sinks.delta.settings import DeltaSettings
from lockstep.sinks.delta.sink import DeltaSink
from lockstep.sinks.sql.sink import SqlSettings, SqlSink
from tests.property.reference import PLACEHOLDER

TOPIC: Final = "shop.public.t"
_NAMES: Final = ("a", "b", "c", "d")
_TEXT: Final = 25
Row = dict[str, Any]


@dataclass
class Column:
    name: str
    missing: str | None


@dataclass
class Model:
    """A table in Postgres, and what is in the log of it."""

    chance: Random
    columns: dict[int, Column] = field(default_factory=dict)  # that are not dropped
    rows: dict[int, dict[int, str | None]] = field(default_factory=dict)
    highest: int = 1
    versions: list[SchemaRecord] = field(default_factory=list)
    events: list[tuple[bytes, bytes]] = field(default_factory=list)
    messages: list[tuple[bytes, bytes]] = field(default_factory=list)
    seq: int = 0
    files: int = 1  # which the rows are in
    rewritten: dict[int, int] = field(default_factory=dict)  # each column's newest transaction

    def shown(self) -> dict[int, Row]:
        return {
            key: {
                "id": key,
                **{c.name: row.get(n, c.missing) for n, c in sorted(self.columns.items())},
            }
            for key, row in self.rows.items()
        }

    def step(self) -> None:
        self.chance.choice([self.write, self.write, self.write, self.delete, self.alter])()

    def alter(self) -> None:
        for _ in range(self.chance.randint(1, 3)):
            self.chance.choice([self.add, self.rename, self.exchange, self.drop, self.again])()
        if self.chance.random() < 0.7:  # else it is noticed at the next row
            self.describe()

    def add(self) -> None:
        free = [name for name in _NAMES if name not in {c.name for c in self.columns.values()}]
        if free:
            self.highest += 1
            missing = self.chance.choice([None, "x", 'q"\\'])
            self.columns[self.highest] = Column(self.chance.choice(free), missing)

    def rename(self) -> None:
        free = [name for name in _NAMES if name not in {c.name for c in self.columns.values()}]
        if free and self.columns:
            self.chance.choice(list(self.columns.values())).name = self.chance.choice(free)

    def exchange(self) -> None:
        if len(self.columns) > 1:
            one, other = self.chance.sample(list(self.columns.values()), 2)
            one.name, other.name = other.name, one.name

    def drop(self) -> None:
        if self.columns:
            del self.columns[self.chance.choice(list(self.columns))]

    def again(self) -> None:
        """Drop a column and add one of its name."""
        if self.columns:
            name = self.columns.pop(self.chance.choice(list(self.columns))).name
            self.highest += 1
            self.columns[self.highest] = Column(name, self.chance.choice([None, "again"]))

    def move(self) -> None:
        """Write all rows into other files, with the values that they lacked."""
        self.files += 1
        for row in self.rows.values():
            row |= {n: row.get(n, column.missing) for n, column in self.columns.items()}
        for column in self.columns.values():
            column.missing = None

    def rewrite(self, number: int) -> None:
        """Give all rows another value in a column of the same type, without an event."""
        self.move()
        self.rewritten[number] = self.files
        for row in self.rows.values():
            row[number] = f"{row[number]}!"

    def describe(self) -> None:
        """Write the table's version, if it is another one, as the daemon does."""
        assert self.describe_stale() == ""

    def describe_stale(self) -> str:
        """Write the version; return what it says about older values that are in no event."""
        columns = [SchemaColumn(
            name="id", type_id=23, type="int4", type_modifier=-1, nullable=False, attnum=1,
        )]  # fmt: skip
        columns += [
            SchemaColumn(
                name=c.name, type_id=_TEXT, type="text", type_modifier=-1, nullable=True, attnum=n,
                missing=None if c.missing is None else msgspec.json.encode(c.missing).decode(),
                rewritten_by=self.rewritten.get(n, 0),
            )
            for n, c in sorted(self.columns.items())
        ]  # fmt: skip
        new = SchemaRecord(
            schema_id=len(self.versions) + 1, relation_id=1, schema="public", table="t",
            topic=TOPIC, replica_identity="d", from_lsn=LSN(self.seq), key=("id",),
            columns=tuple(columns), attributes=self.highest, storage=str(self.files),
        )  # fmt: skip
        before = self.versions[-1] if self.versions else None
        if before and [(c.name, c.attnum) for c in before.columns] == [
            (c.name, c.attnum) for c in columns
        ]:
            assert compare(before, new) is None
            return stale(before, new)
        self.versions.append(new)
        if before is None:
            return ""
        alteration = compare(before, new)
        assert alteration is not None
        if not alteration.stale:
            content = msgspec.json.encode(alteration)
            self.messages.append(
                (
                    msgspec.json.encode({"prefix": ALTERED}),
                    msgspec.json.encode(
                        {"op": "m", "source": self.source(), "message": {"content": content}}
                    ),
                )
            )
        return alteration.stale

    def source(self) -> Row:
        self.seq += 1
        return {
            "seq": self.seq, "commit_lsn": f"0/{self.seq:X}", "ordinal": 1, "ts_us": self.seq,
            "schema_id": len(self.versions),
        }  # fmt: skip

    def write(self) -> None:
        """Insert a row; or update one, whose large values are not sent."""
        self.describe()
        key = self.chance.randrange(6)
        old = self.rows.get(key)
        given = {number: self.chance.choice([None, "1", "2"]) for number in self.columns}
        kept = [n for n in self.columns if old is not None and self.chance.random() < 0.4]
        for number in kept:
            assert old is not None
            given[number] = old.get(number, self.columns[number].missing)
        self.rows[key] = given
        row = self.shown()[key]
        source = self.source()
        if kept:
            source["unchanged"] = [self.columns[n].name for n in kept]
            row |= dict.fromkeys(source["unchanged"], PLACEHOLDER)
        self._event({"op": "c" if old is None else "u", "source": source, "after": row}, key)

    def delete(self) -> None:
        if self.rows:
            self.describe()
            key = self.chance.choice(list(self.rows))
            del self.rows[key]
            self._event({"op": "d", "source": self.source(), "before": {"id": key}}, key)

    def _event(self, event: Row, key: int) -> None:
        self.events.append((msgspec.json.encode({"id": key}), msgspec.json.encode(event)))


class Follower:
    """Applies cuts as a follower does, to one sink after another: each is killed sometimes."""

    def __init__(self, model: Model, sink: Any) -> None:  # noqa: ANN401 - makes sinks
        self.model, self.sink, self.above = model, sink, 0

    def take(self, *, kill: bool) -> None:
        """Take what the log has above the last cut; killed, it does so again."""
        if kill:
            with (
                closing(self.sink()) as sink,
                mock.patch("cdc.failpoints.reach", _kill),
                # Between the commit that alters a mirror and the one that changes it.
                mock.patch.object(DeltaSink, "apply", side_effect=KilledError),
                suppress(KilledError),
            ):
                sink.open()
                self._apply(sink)
        with closing(self.sink()) as sink:
            sink.open()
            self._apply(sink)
        self.above = self.model.seq

    def _apply(self, sink: Sink) -> None:
        model, bounds = self.model, Bounds(self.above, self.model.seq)
        known = {each.schema_id: version(each) for each in model.versions}

        def versions(_: str, ids: Any) -> tuple[Version, ...]:  # noqa: ANN401 - any collection
            return tuple(known[each] for each in sorted({*ids, max(known)}))

        def of(records: list[tuple[bytes, bytes]]) -> list[Events]:
            every = ([key for key, _ in records], [value for _, value in records])
            return next(parts([every], bounds), [([], [])])

        applying = Applying(sink, versions)
        every = alterations(of(model.messages)[0], lambda _: True, versions)
        events = of(model.events)
        if not every:
            table = applying.reduce(TOPIC, events, bounds, name="public.t", letter=_no_letter)
            applying.begin(bounds.upto, table.changes.versions)
            applying.write_table(table)
        for topic, its in every.items():
            applying.begin(bounds.upto, (), every.values())
            applying.alter(
                topic, lambda part: parts(events, part), bounds, its, letter=_no_letter
            )  # fmt: skip
        if model.chance.random() < 0.5:
            failpoints.reach("follow_written")
        lsn = LSN(bounds.upto)
        sink.commit(Applied("shop", 1, 1, lsn, bounds.upto, bounds.upto, bounds.upto, {}))


class KilledError(Exception):
    """The process was killed."""


def _kill(name: str) -> None:
    if name in {"follow_altered", "follow_written"}:
        raise KilledError


def _no_letter(_: object) -> bytes:
    raise AssertionError


def shown_of(rows: dict[int, Row], model: Model) -> dict[int, Row]:
    """Return rows without the columns that the source has dropped, which some stores keep."""
    names = ["id", *(column.name for column in model.columns.values())]
    return {key: {name: row.get(name) for name in names} for key, row in rows.items()}


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 40))
def test_the_rows_of_a_follower_are_the_tables(seed: int, steps: int) -> None:
    """Its columns too: a store of JSON documents has neither dropped nor unknown ones."""
    model = Model(Random(seed))
    STORES.pop("altered", None)
    follower = Follower(model, lambda: MemorySink("altered", complete_rows=seed % 2 == 0))
    for _ in range(steps):
        model.step()
        if model.chance.random() < 0.3 and model.seq > follower.above:
            model.describe()
            follower.take(kill=model.chance.random() < 0.4)
            rows = STORES["altered"].rows("public.t").values()
            assert {row["id"]: row for row in rows} == model.shown()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 40))
def test_the_rows_in_a_database_are_the_tables(seed: int, steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/copy.db"
        _follow(seed, steps, lambda: SqlSink(SqlSettings(url, "copy")), lambda: _sqlite(folder))


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 25))
def test_the_rows_of_a_mirror_are_the_tables(seed: int, steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = DeltaSettings("shop", "mirror", "shop", folder)
        _follow(seed, steps, lambda: DeltaSink(made), lambda: _delta(folder))


def test_a_renamed_column_without_values_replaces_a_dropped_one() -> None:
    """A mirror keeps what was dropped, and has no column yet that is NULL everywhere."""
    with tempfile.TemporaryDirectory() as folder:
        made = DeltaSettings("shop", "mirror", "shop", folder)
        model = Model(Random(1), columns={2: Column("a", None)}, highest=2)
        follower = Follower(model, lambda: DeltaSink(made))
        for _ in range(4):
            model.write()
        follower.take(kill=False)
        del model.columns[2]
        model.describe()
        model.columns[3], model.highest = Column("b", None), 3
        model.describe()
        model.columns[3].name = "a"
        model.describe()
        follower.take(kill=False)
        assert shown_of(_delta(folder), model) == model.shown()


def _follow(seed: int, steps: int, sink: Any, rows: Any) -> None:  # noqa: ANN401 - makes sinks, reads rows
    model = Model(Random(seed))
    follower = Follower(model, sink)
    for _ in range(steps):
        model.step()
        if model.chance.random() < 0.3 and model.seq > follower.above:
            model.describe()
            follower.take(kill=model.chance.random() < 0.4)
            assert shown_of(rows(), model) == model.shown()


def _sqlite(folder: str) -> dict[int, Row]:
    import sqlite3  # noqa: PLC0415 - of this test alone

    with closing(sqlite3.connect(f"{folder}/copy.db")) as connection:
        connection.row_factory = sqlite3.Row
        return {row["id"]: dict(row) for row in connection.execute("SELECT * FROM t")}


def _delta(folder: str) -> dict[int, Row]:
    from deltalake import DeltaTable  # noqa: PLC0415 - of this test alone

    path = Path(folder) / "public.t"
    return {row["id"]: row for row in DeltaTable(path).to_pyarrow_table().to_pylist()}


@given(seed=st.integers(0, 2**32), steps=st.integers(1, 30))
def test_a_row_altered_step_by_step_is_what_the_table_shows(seed: int, steps: int) -> None:
    model = Model(Random(seed))
    model.describe()
    stored: dict[int, Row] = {}
    done = 1
    for _ in range(steps):
        model.step()
        model.describe()
        while done < len(model.versions):
            alteration = compare(model.versions[done - 1], model.versions[done])
            assert alteration is not None
            stored = {
                key: altered(alteration, row, None, msgspec.json.decode, str)
                for key, row in stored.items()
            }
            done += 1
        shown = model.shown()
        assert {k: v for k, v in stored.items() if k in shown and v == shown[k]}.keys() >= {
            key for key in stored.keys() & shown.keys() if not _written(model, key)
        }
        stored = shown


@given(seed=st.integers(0, 2**32), steps=st.integers(0, 30), changes=st.integers(0, 2))
def test_values_that_a_rewrite_gave_a_column_are_stale(seed: int, steps: int, changes: int) -> None:
    """In whatever way the table is changed with it; not if its rows have only moved."""
    model = Model(Random(seed))
    model.describe()
    for _ in range(steps):
        model.step()
    model.add()
    model.describe()
    model.move()
    assert model.describe_stale() == ""
    number = model.chance.choice(list(model.columns))
    model.rewrite(number)
    for _ in range(changes):
        model.chance.choice([model.rename, model.exchange, model.drop, model.move])()
    found = model.describe_stale()
    if number in model.columns:
        assert (
            found == f"the table was rewritten when column {model.columns[number].name} was changed"
        )
    else:
        assert found == ""


def _written(model: Model, key: int) -> bool:
    """Return whether the newest event is of this key."""
    return bool(model.events) and model.events[-1][0] == msgspec.json.encode({"id": key})
