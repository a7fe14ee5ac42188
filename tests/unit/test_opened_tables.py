"""Tables that stay open at the versions that cuts span."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from lockstep.sinks.delta import opened_tables
from lockstep.sinks.delta.opened_tables import OpenedTables


def _written(path: Path, first: int, versions: int) -> None:
    for version in range(versions):
        write_deltalake(path, pa.table({"n": [first + version]}), mode="append")


def _rows(table: DeltaTable) -> list[int]:
    rows: list[int] = table.to_pyarrow_table()["n"].to_pylist()
    return sorted(rows)


def test_tables_are_at_both_versions_of_each_cut(tmp_path: Path) -> None:
    """Forwards and back, with versions of cuts before among them."""
    path = tmp_path / "t"
    _written(path, 0, 12)
    for seed in range(20):
        chance, tables = Random(seed), OpenedTables({})
        for _ in range(20):
            cut = sorted(chance.sample(range(12), 2))
            found = [tables.at(str(path), version) for version in cut]
            assert [each.version() for each in found] == cut, seed
            rows = [*range(cut[0] + 1)], [*range(cut[1] + 1)]
            assert tuple(map(_rows, found)) == rows, seed


def test_the_next_cut_loads_no_version_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tables, loaded = tmp_path / "t", OpenedTables({}), list[int]()
    _written(path, 0, 8)

    def table(path: str, version: int, **options: object) -> DeltaTable:
        assert options == {"storage_options": None}
        loaded.append(version)
        return DeltaTable(path, version)

    monkeypatch.setattr(opened_tables, "DeltaTable", table)
    for version in (1, 2, 4, 7):
        for each in (version - 1, version):
            assert tables.at(str(path), each).version() == each
    assert loaded == [0, 1]


def test_another_table_in_its_place_is_opened_from_its_beginning(tmp_path: Path) -> None:
    path, tables = tmp_path / "t", OpenedTables({})
    _written(path, 0, 3)
    for version in (1, 2):
        tables.at(str(path), version)
    shutil.rmtree(path)
    _written(path, 100, 6)
    assert _rows(tables.at(str(path), 2)) == [100, 101, 102]
    assert _rows(tables.at(str(path), 4)) == [100, 101, 102, 103, 104]
    shutil.rmtree(path)
    _written(path, 200, 6)
    assert _rows(tables.at(str(path), 5)) == [*range(200, 206)]
