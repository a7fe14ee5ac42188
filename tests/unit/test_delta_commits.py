"""Commits that are written directly to Delta's log."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from lockstep.sinks.delta import actions
from lockstep.sinks.delta.actions import Files
from lockstep.sinks.delta.lake import CommitInfo, ConflictError


def test_a_commit_right_after_ours_conflicts_with_our_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_deltalake(tmp_path, pa.table({"n": [1]}))
    table, files, about = DeltaTable(tmp_path), Files(str(tmp_path), {}), CommitInfo("", None, {})
    put_new = files.put_new

    def put(name: str, data: bytes) -> str | None:
        tag = put_new(name, data)
        write_deltalake(tmp_path, pa.table({"n": [2]}), mode="append")
        return tag

    monkeypatch.setattr(files, "put_new", put)
    actions.commit(files, table, [], "OPTIMIZE", about)
    assert table.version() == 1
    with pytest.raises(ConflictError):
        actions.commit(files, table, [], "OPTIMIZE", about)
    table.update_incremental()
    assert table.version() == 2
    actions.commit(files, table, [], "OPTIMIZE", about)
    assert table.version() == 3
