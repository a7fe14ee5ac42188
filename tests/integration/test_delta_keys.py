"""A mirror's keys: a changed key, and keys in files that other writers wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdc.errors import ConfigError
from lockstep.conformance.store import (
    CLICKS,
    LINES,
    USERS,
    Row,
    applied,
    apply,
    change,
    key,
    row,
)
from lockstep.sinks.contract import Change, Changes, Column
from lockstep.sinks.delta import actions as delta_actions
from lockstep.sinks.delta import lake as delta_lake
from lockstep.sinks.delta import work as delta_work
from lockstep.sinks.delta.lake import CommitInfo
from tests.integration.test_delta_sink import APPLIERS, Lake, lines, users


@pytest.mark.parametrize("applier", APPLIERS)
def test_another_key_is_refused_until_the_table_is_emptied(tmp_path: Path, applier: str) -> None:
    """Rows of two keys are never mixed; a shadow build may have the new key."""
    lake = Lake(tmp_path)
    named = USERS._replace(schema_id=9, key=("name",))

    def new(seq: int, name: str, number: int | None = None) -> Change:
        """Return a change with the new key."""
        reported = None if number is None else row(named, seq, name=name, id=number)
        return change(USERS, seq, reported, 0)._replace(
            schema_id=9, key=json.dumps({"name": name}, separators=(",", ":")).encode()
        )

    sink = lake.sink(applier=applier)
    apply(sink, 2, users(2, 7, 8))
    refused = [
        Changes((named,), [new(3, "n2", 7)]),
        Changes((USERS, named), [*users(3, 7).changes, new(4, "n3", 7)]),
    ]
    assert sink.rows(named, [b'{"name":"n2"}']) == {}
    for each in refused:
        with pytest.raises(ConfigError, match=r"public\.users has another key now \(name\)"):
            apply(sink, 4, each)
    shadow = sink.at(2)
    shadow.open()
    shadow.begin(5, [named])
    shadow.write(Changes((named,), [new(5, "n5", 7)]))
    shadow.commit(applied(5, generation=2))
    shadow.close()
    mixed = [*refused[1].changes, new(6, "a", 7), new(7, "b", 8)]
    sink = lake.sink(applier=applier)
    sink.begin(7, [USERS, named])
    sink.write(Changes((USERS, named), mixed[:2]))
    sink.write(Changes((USERS, named), mixed[2:], truncated=5))
    sink.commit(applied(7))
    assert lake.ids() == {7: 6, 8: 7}
    for again in (sink, lake.sink(applier=applier)):
        seq = 8 + 2 * (again is not sink)
        apply(again, seq + 1, Changes((named,), [new(seq, "a", 7), new(seq + 1, "b")]))
        assert lake.ids() == {7: seq}
    with pytest.raises(ConfigError, match=r"another key now \(id\)"):
        apply(sink, 12, users(12, 1))


@pytest.mark.parametrize("applier", ["delta-rs", "vectors"])
def test_a_row_without_a_key_is_found_after_its_column_was_dropped(
    tmp_path: Path, applier: str
) -> None:
    """It keeps the column's value, which no later event has; also one that is in `_exact`."""
    sink = Lake(tmp_path).sink(applier=applier)
    at = Column("at", "date", 1082, -1, nullable=True)
    dated = CLICKS._replace(columns=(*CLICKS.columns[:2], at))
    later = dated._replace(schema_id=9, columns=dated.columns[:2])
    rows: list[Row] = [{"id": n, "name": "c"} for n in (1, 2, 3)]
    days = (20_000, "infinity", None)
    first = [
        change(dated, seq, each | {"at": day}, op="c")
        for seq, (each, day) in enumerate(zip(rows, days, strict=True), 1)
    ]
    apply(sink, 3, Changes((dated,), first))
    new = [change(later, 4, {"id": 1, "name": "new"}, before=rows[0])]
    new += [change(later, 5 + n, None, before=rows[1 + n]) for n in range(2)]
    apply(sink, 6, Changes((later,), new))
    (left,) = (json.loads(text) for _, _, text in sink.contents(later))
    assert left == {"id": 1, "name": "new"}


def test_a_generation_brings_its_key_along(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    sink = lake.sink()
    apply(sink, 2, users(2, 7, 8))
    named = USERS._replace(schema_id=9, key=("name",))
    reported = change(USERS, 3, row(USERS, 3, 7, name="n"), 7)
    changes = Changes((named,), [reported._replace(schema_id=9, key=b'{"name":"n"}')])
    shadow = sink.at(2)
    shadow.open()
    for seq in (3, 4):
        each = shadow if seq == 3 else lake.sink()
        each.begin(seq, [named])
        each.write(changes._replace(changes=[changes.changes[0]._replace(seq=seq)]))
        each.commit(applied(seq, generation=2))
        sink.switch(2)
        assert lake.ids() == {7: seq}


def test_files_that_another_spark_has_rewritten_are_read(tmp_path: Path) -> None:
    """Its own settings write timestamps as INT96: no time zone, and as nanoseconds up to 2262."""
    lake = Lake(tmp_path)
    at = USERS.columns[1]._replace(name="at", type="timestamptz", type_id=1184)
    times = USERS._replace(key=("id", "at"), columns=(USERS.columns[0], at, *USERS.columns[2:]))

    def reported(seq: int, number: int, **more: Any) -> Change:  # noqa: ANN401
        identity = {"id": number, "at": f"{2000 + 3 * number}-01-02T03:04:05.678901Z"}
        complete = change(times, seq, row(times, seq, number, 0, **identity), number, 0, **more)
        return complete._replace(key=json.dumps(identity, separators=(",", ":")).encode())

    apply(
        lake.sink(applier="vectors"), 99, Changes((times,), [reported(n, n) for n in range(1, 99)])
    )
    table = lake.table()
    [old] = pa.table(table.get_add_actions())["path"].to_pylist()
    rows = pq.read_table(lake.path / "public.users" / old)
    again = lake.path / "public.users" / "again.parquet"
    pq.write_table(rows, again, use_deprecated_int96_timestamps=True, store_schema=False)
    add = {
        "path": again.name,
        "partitionValues": {},
        "size": again.stat().st_size,
        "modificationTime": 0,
        "dataChange": False,
    }
    removal = {"path": old, "deletionTimestamp": 0, "dataChange": False}
    files = delta_actions.Files(str(lake.path / "public.users"), {})
    delta_actions.commit(
        files, table, [{"remove": removal}, {"add": add}], "OPTIMIZE", CommitInfo("spark", None, {})
    )
    sink = lake.sink(applier="vectors")
    deleted = reported(200, 98)._replace(row=None, op="d")
    newer = [reported(n + 100, n, unchanged=("body",)) for n in (97, 2)]
    apply(sink, 200, Changes((times,), [*newer, deleted]))
    assert lake.ids() == {n: n + 100 * (n in {2, 97}) for n in range(1, 98)}
    assert b'"body":"long 97"' in next(
        each for at, _, each in sink.contents(times) if b":97," in at
    )


@pytest.mark.parametrize("soft", [False, True])
def test_keys_are_looked_for_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, soft: bool
) -> None:
    """In all files, and with keys of several columns; deleted rows are not found."""
    monkeypatch.setattr(delta_work, "LOOKED_BYTES", 1)
    sink = Lake(tmp_path).sink(applier="delta-rs", soft=soft)
    for seq in (10, 20, 30):
        apply(sink, seq, lines(seq, *range(seq, seq + 5)))
    apply(sink, 31, Changes((LINES,), [change(LINES, 31, None, 11, 11)]))
    wanted = [12, 11, 34, 99, 20]
    found = sink.rows(LINES, [key(LINES, n, n) for n in wanted])
    rows = {n: row(LINES, n // 10 * 10, n, n) for n in (12, 34, 20)}
    assert {at: json.loads(each) for at, each in found.items()} == {
        key(LINES, n, n): each for n, each in rows.items()
    }
    newer = [change(LINES, 40, row(LINES, 40, n, n), n, n, unchanged=("body",)) for n in (34, 12)]
    apply(sink, 40, Changes((LINES,), [*newer, change(LINES, 39, row(LINES, 39, 50, 50), 50, 50)]))
    assert {
        n: json.loads(sink.rows(LINES, [key(LINES, n, n)])[key(LINES, n, n)])["body"]
        for n in (12, 34, 50)
    } == {12: "long 10", 34: "long 30", 50: "long 39"}


@pytest.mark.parametrize("applier", APPLIERS)
def test_one_of_two_rows_whose_keys_have_no_value_in_delta_ends(
    tmp_path: Path, applier: str
) -> None:
    """Both are NULL in the column, and share a seq, as rows of a direct snapshot do."""
    lake = Lake(tmp_path)
    at = Column("at", "date", 1082, -1, nullable=False)
    days = CLICKS._replace(columns=(at, *CLICKS.columns[1:2]), key=("at",))

    def of(seq: int, day: str, name: str) -> Change:
        made = change(CLICKS, seq, {"id": 0, "name": name})
        value = json.dumps({"at": day, "name": name}).encode()
        return made._replace(row=value, key=json.dumps({"at": day}).encode(), op="c")

    sink = lake.sink(applier=applier, history=frozenset({days.name}))
    apply(sink, 1, Changes((days,), [of(1, day, "first") for day in ("infinity", "-infinity")]))
    apply(sink, 2, Changes((days,), [of(2, "infinity", "second")]))
    names = ["name", "_exact", "_current"]
    rows = delta_lake.read(lake.table("clicks"), names).to_pylist()
    current = {dict(each["_exact"])["at"]: each["name"] for each in rows if each["_current"]}
    assert current == {"infinity": "second", "-infinity": "first"}
    assert len(rows) == 3
