"""Which versions' files a reader knows, and of which tables it keeps anything."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from lockstep.sinks.delta import log
from lockstep.sinks.delta.actions import Files
from lockstep.sinks.delta.stored_files import StoredFiles

_SCHEMA = pa.schema([("n", pa.int64())])


def _write(path: Path, *rows: int) -> None:
    write_deltalake(path, pa.table({"n": rows}, schema=_SCHEMA), mode="append")


def _found(files: StoredFiles, path: Path, *rows: int) -> list[int] | None:
    found = files.find(DeltaTable(path), _SCHEMA, {"n": pa.array(sorted(rows), pa.int64())})
    return None if found is None else sorted(found["n"].to_pylist())


def test_the_versions_that_were_used_last_are_not_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a cut is repeated to a later end, and its beginning is two versions ago."""
    for number in range(11):
        _write(tmp_path, number)
    tables = {version: DeltaTable(tmp_path, version) for version in (5, 8, 10)}
    files, listed, added = StoredFiles(), list[int](), log.added

    def counted(table: DeltaTable) -> log.Added:
        listed.append(table.version())
        return added(table)

    monkeypatch.setattr(log, "added", counted)
    for version in (5, 8, 5, 10, 5, 10):
        assert len(files.follow(tables[version])) == version + 1
    assert listed == [5]


def test_a_restored_table_has_the_files_of_its_own_log(tmp_path: Path) -> None:
    """At a version that was read before the restore, and at a later one."""
    path, copy, files = tmp_path / "t", tmp_path / "copy", StoredFiles()
    _write(path, 1)
    shutil.copytree(path, copy)
    for number in (2, 3):
        _write(path, number)
        assert _found(files, path, 1, 2, 3) == [*range(1, number + 1)]
    shutil.rmtree(path)
    copy.rename(path)
    for number in (12, 13, 14, 15):
        _write(path, number)
    for version in (2, 1, 4, 3):
        table = DeltaTable(path, version)
        assert files.follow(table) == log.added(table)
    assert _found(files, path, 1, 2, 3, 12, 15) == [1, 12, 15]


def test_the_log_of_a_table_that_stays_open_is_read_once(tmp_path: Path) -> None:
    _write(tmp_path, 1)
    table, files = DeltaTable(tmp_path), StoredFiles()
    found = files.follow(table)
    shutil.rmtree(tmp_path / "_delta_log")
    assert files.follow(table) is found


def test_nothing_is_kept_of_a_table_that_another_one_has_replaced(tmp_path: Path) -> None:
    path, files = tmp_path / "t", StoredFiles()
    for number in (1, 2):
        _write(path, number, number)
        assert _found(files, path, number) == [number, number]
        (place,) = files.kept
        assert place[1] in files.follow(DeltaTable(path))
        shutil.rmtree(path)


def test_a_table_that_did_not_fit_is_tried_again_once_it_is_smaller(tmp_path: Path) -> None:
    _write(tmp_path, *range(10_000))
    files = StoredFiles(most_bytes=20_000)
    assert _found(files, tmp_path, 3) is None
    _write(tmp_path, 20_000)
    assert _found(files, tmp_path, 3) is None
    DeltaTable(tmp_path).delete("n > 9")
    assert _found(files, tmp_path, 3) == [3]


def test_a_table_is_found_by_the_name_that_delta_gives_it(tmp_path: Path) -> None:
    """Which is a URL of a local one: its path may have to be quoted there."""
    path = tmp_path / "a lake, 5 %"
    _write(path, 1)
    by_name = Files(DeltaTable(path).table_uri, {})
    assert by_name.tagged(0) == Files(str(path), {}).tagged(0)
    assert by_name.has(by_name.tagged(0)), "it has a tag"
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
