"""An erased row is in no file of a lake, and the lake's follower and readers continue."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from cdc.errors import ConfigError, UnavailableError
from lockstep.conformance.store import CLICKS, LINES, USERS, applied, apply, change, row
from lockstep.jobs.reading_as_of import read_as_of_arrow
from lockstep.sinks.contract import Change, Changes
from lockstep.sinks.delta.erasing import Erased
from lockstep.sinks.delta.settings import DeltaSettings
from lockstep.sinks.delta.sink import DeltaSink

MARKER = "8d5f2c"
LOST, STAYS = 1, 2  # keys
HISTORY: dict[str, object] = {"history": frozenset({"public.users"})}
SOFT: dict[str, object] = {"soft": True}
PARTITIONED: dict[str, object] = {"partition": {"public.users": ["active"]}}
WAYS = (
    *(
        {"applier": applier, **how}
        for applier in ("vectors", "delta-rs")
        for how in (HISTORY, SOFT)
    ),
    {"applier": "vectors"},
    {"applier": "delta-rs", **PARTITIONED},
)


def lake(path: Path, **settings: object) -> DeltaSink:
    mine = DeltaSettings("shop", "lake", "shop", str(path))
    sink = DeltaSink(mine._replace(**{"optimize_minutes": 0, **settings}))  # type: ignore[arg-type]
    sink.open()
    return sink


def users(*changes: Change) -> Changes:
    return Changes((USERS,), list(changes))


def user(seq: int, key: int, **values: object) -> Change:
    return change(USERS, seq, row(USERS, seq, key, **values), key)


def lived(sink: DeltaSink) -> None:
    """Write two rows twice, and delete the one with the marker: seqs 1, 3 and 5."""
    apply(sink, 2, users(user(1, LOST, name=MARKER), user(2, STAYS)))
    apply(sink, 4, users(user(3, LOST, body=MARKER), user(4, STAYS)))
    apply(sink, 5, users(change(USERS, 5, None, LOST)))


def erased(*keys: int) -> Erased:
    asked = [change(USERS, 0, None, key).key or b"" for key in keys]
    return Erased(USERS.topic, pa.array([1, 3, 5], pa.int64()), USERS, asked)


def holding(path: Path) -> list[str]:
    """Return the files that have the marker."""
    found = []
    for each in sorted(path.rglob("*")):
        if each.is_file():
            data = each.read_bytes()
            if each.suffix == ".parquet":
                data += repr(pq.ParquetFile(each).read().to_pylist()).encode()
            if MARKER.encode() in data:
                found.append(each.name)
    return found


def rows(path: Path, seq: int) -> list[dict[str, Any]]:
    """Return the rows of users at a frontier, as `read_as_of` reads them."""
    found = read_as_of_arrow(str(path), ["public.users"], lsn=applied(seq).lsn)
    assert found.applied.seq == seq
    return sorted(found.tables["public.users"].to_pylist(), key=lambda each: each["_seq"])


@pytest.mark.parametrize("how", WAYS, ids=lambda how: "-".join(map(str, how.values())))
def test_an_erased_row_is_in_no_file_and_other_rows_keep_their_versions(
    tmp_path: Path, how: dict[str, object]
) -> None:
    with closing(lake(tmp_path, **how)) as sink:
        lived(sink)
        assert holding(tmp_path)
        before = [each for each in rows(tmp_path, 5) if each["id"] == STAYS]
        assert sink.erase(erased(), 5) == ["public.users"]
        assert holding(tmp_path) == []
        assert rows(tmp_path, 5) == before
        apply(sink, 6, users(user(6, STAYS)))
        assert [each["_seq"] for each in rows(tmp_path, 6)] == [2, 4, 6][
            0 if "history" in how else 2 :
        ]
    if "partition" in how:
        table = DeltaTable(tmp_path / "public.users")
        assert table.metadata().partition_columns == ["active"]


def test_a_row_that_is_no_event_s_is_erased_by_its_key(tmp_path: Path) -> None:
    """As a direct snapshot writes it; but not a row that got the key later."""
    with closing(lake(tmp_path, **HISTORY)) as sink:
        apply(sink, 4, users(user(2, LOST, name=MARKER), user(4, STAYS)))
        apply(sink, 6, users(change(USERS, 5, None, LOST), user(6, LOST)))
        sink.erase(erased(LOST), 5)
        assert holding(tmp_path) == []
        assert [(each["id"], each["_seq"]) for each in rows(tmp_path, 6)] == [(STAYS, 4), (LOST, 6)]


@pytest.mark.parametrize("applier", ["vectors", "delta-rs"])
@pytest.mark.parametrize("history", [False, True])
def test_a_follower_that_runs_meanwhile_continues(
    tmp_path: Path, applier: str, *, history: bool
) -> None:
    """Whether its next cut has changes of the mirror, or of another one only.

    A cut that needs files that were deleted is repeated.
    """
    how: dict[str, object] = {"applier": applier, **(HISTORY if history else {})}
    with closing(lake(tmp_path, **how)) as running, closing(lake(tmp_path, **how)) as other:
        lived(running)
        lines = Changes((LINES,), [change(LINES, 6, row(LINES, 6, 1, 1), 1, 1)])
        running.begin(6, [LINES])
        other.erase(erased(), 5)
        running.write(lines)
        running.commit(applied(6))
        assert holding(tmp_path) == []
        assert [each["id"] for each in rows(tmp_path, 6)] == [STAYS] * (1 + history)
        running.begin(7, [USERS])
        other.erase(erased(), 6)
        with suppress(UnavailableError):
            running.write(users(user(7, STAYS)))
            running.commit(applied(7))
        running.open()
        apply(running, 7, users(user(7, STAYS)))
        assert [each["_seq"] for each in rows(tmp_path, 7)] == ([2, 4, 7] if history else [7])


def test_a_lake_is_not_erased_before_its_delete_or_in_the_middle_of_a_cut(tmp_path: Path) -> None:
    with closing(lake(tmp_path, **HISTORY)) as sink:
        apply(sink, 2, users(user(1, LOST, name=MARKER), user(2, STAYS)))
        with pytest.raises(ConfigError, match="lake has not applied seq 5"):
            sink.erase(erased(), 5)
        apply(sink, 5, users(user(3, LOST, body=MARKER), change(USERS, 5, None, LOST)))
        _torn(sink, [users(user(6, STAYS))], 6)
        with pytest.raises(UnavailableError, match="in the middle of a cut"):
            sink.erase(erased(), 5)
    with closing(lake(tmp_path, **HISTORY)) as sink:
        apply(sink, 6, users(user(6, STAYS)))
        sink.erase(erased(), 5)
    assert holding(tmp_path) == []


def _torn(sink: DeltaSink, changes: Sequence[Changes], seq: int) -> None:
    """Write a cut, and no frontier: as a process that is killed there."""
    sink.begin(seq, [each.version for each in changes])
    for each in changes:
        sink.write(each)
    with patch.object(sink.frontiers, "commit", return_value=False):
        sink.commit(applied(seq))


def test_views_are_written_again_with_the_current_versions_only(tmp_path: Path) -> None:
    """All mirrors of the lake: of a view nothing shows which rows were made from the erased one."""
    with closing(lake(tmp_path, applier="vectors", **HISTORY)) as sink:
        lived(sink)
        clicks = Changes((CLICKS,), [change(CLICKS, 6, row(CLICKS, 6, name=MARKER))])
        apply(sink, 6, clicks)
        seen = row(CLICKS, 6, name=MARKER)
        apply(sink, 7, Changes((CLICKS,), [change(CLICKS, 7, None, before=seen)]))
        assert sink.erase(None, 5) == ["public.clicks", "public.users"]
        assert holding(tmp_path) == []
        assert [(each["id"], each["_seq"]) for each in rows(tmp_path, 7)] == [(STAYS, 4)]


def test_files_of_a_commit_that_never_came_are_deleted(tmp_path: Path) -> None:
    """Once they are an hour old: the follower may be writing younger ones."""
    with closing(lake(tmp_path)) as sink:
        lived(sink)
        for name, hours in (("old", 2), ("young", 0)):
            path = tmp_path / "public.users" / f"{name}.parquet"
            pq.write_table(pa.table({"name": [MARKER]}), path)
            at = path.stat().st_mtime - hours * 3_600
            os.utime(path, (at, at))
        sink.erase(erased(), 5)
        assert holding(tmp_path) == ["young.parquet"]
        assert len(rows(tmp_path, 5)) == 1


def test_checksums_that_spark_has_written_are_deleted(tmp_path: Path) -> None:
    """They may list a version's files with their bounds."""
    log = tmp_path / "public.users" / "_delta_log"
    with closing(lake(tmp_path)) as sink:
        lived(sink)
        for name in (f"{1:020}.crc", f".{1:020}.json.crc"):
            (log / name).write_text(MARKER)
        sink.erase(erased(), 5)
        assert holding(tmp_path) == []
        assert len(rows(tmp_path, 5)) == 1
