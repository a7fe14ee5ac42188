"""Mirrors of many small tables: a cut costs what it changes, and files stay few."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from obstore.store import S3Store

from cdc.errors import ConfigError, StoreLostError
from lockstep.conformance.store import LINES, USERS, applied, apply, change, row
from lockstep.jobs.reading_as_of import read_as_of_arrow
from lockstep.sinks.contract import Changes
from lockstep.sinks.delta import rewrites as delta_rewrites
from lockstep.sinks.delta import table as delta_table
from lockstep.sinks.delta import upkeep as delta_upkeep
from lockstep.sinks.delta import vectors as delta_vectors
from lockstep.sinks.delta.actions import Files
from lockstep.sinks.delta.settings import DeltaSettings
from lockstep.sinks.delta.sink import DeltaSink
from tests.fixtures.daemon import wait_until


def users(seq: int, *ids: int) -> Changes:
    return Changes((USERS,), [change(USERS, seq, row(USERS, seq, each), each) for each in ids])


def lines(seq: int, *ids: int) -> Changes:
    return Changes(
        (LINES,), [change(LINES, seq, row(LINES, seq, each, each), each, each) for each in ids]
    )


def opened(path: Path, **settings: Any) -> DeltaSink:  # noqa: ANN401 - any setting
    sink = DeltaSink(DeltaSettings("shop", "mirror", "shop", str(path))._replace(**settings))
    sink.open()
    return sink


def seqs(path: Path, table: str = "users") -> dict[int, int]:
    """Return each row's seq by id, at the newest frontier."""
    name = f"public.{table}"
    rows = read_as_of_arrow(str(path), [name]).tables[name].to_pylist()
    return {each["id"]: each["_seq"] for each in rows}


def frontier(path: Path) -> int:
    return read_as_of_arrow(str(path), []).applied.seq


def test_a_cut_asks_nothing_of_mirrors_that_it_does_not_change(tmp_path: Path) -> None:
    """Not even whether they exist; readers find them at the version before."""
    sink = opened(tmp_path)
    apply(sink, 2, users(1, 1), lines(2, 1))
    away = tmp_path / "away"
    (tmp_path / "public.lines").rename(away)
    apply(sink, 3, users(3, 2))
    apply(sink, 4)
    assert (seqs(tmp_path), frontier(tmp_path)) == ({1: 1, 2: 3}, 4)
    assert not (tmp_path / "public.lines").exists()
    away.rename(tmp_path / "public.lines")
    assert seqs(tmp_path, "lines") == {1: 2}
    apply(sink, 5, lines(5, 1, 2))
    assert (seqs(tmp_path), seqs(tmp_path, "lines")) == ({1: 1, 2: 3}, {1: 5, 2: 5})
    sink.close()


@pytest.mark.parametrize("how", ["deleted", "restored"])
def test_a_mirror_that_is_lost_between_two_cuts_gets_no_further_version(
    tmp_path: Path, how: str
) -> None:
    sink = opened(tmp_path)
    for seq in (1, 2):
        apply(sink, seq, users(seq, seq))
    mirror = tmp_path / "public.users"
    log = sorted((mirror / "_delta_log").glob("*.json"))
    if how == "deleted":
        shutil.rmtree(mirror)
    else:
        log[-1].unlink()
    with pytest.raises(StoreLostError, match=r"missing|older version"):
        apply(sink, 3, users(3, 3))
    assert sorted((mirror / "_delta_log").glob("*.json")) == ([] if how == "deleted" else log[:-1])


def test_a_small_mirror_is_one_file_also_after_commits_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are kept in memory, or read again: after an `OPTIMIZE`, or if others need it."""
    monkeypatch.setattr(delta_table, "CHECKPOINT_EVERY", 5)
    sink = opened(tmp_path, optimize_minutes=0)
    mirror = tmp_path / "public.users"
    for seq in range(1, 13):
        if seq == 6:
            DeltaTable(mirror).alter.set_table_properties({"delta.appendOnly": "false"})
        if seq == 9:
            monkeypatch.setattr(delta_rewrites, "KEPT_BYTES", 1)
        apply(sink, seq, users(seq, seq % 5))
        assert len(DeltaTable(mirror).file_uris()) == 1
    assert seqs(tmp_path) == {0: 10, 1: 11, 2: 12, 3: 8, 4: 9}
    log = sorted((mirror / "_delta_log").glob("*.checkpoint.parquet"))
    last = DeltaTable(mirror).version()
    assert [int(each.name[:20]) // 5 for each in log] == list(range(1, last // 5 + 1))
    sink.close()


@pytest.mark.parametrize("partition", [False, True])
def test_small_files_stay_few_between_two_runs_of_upkeep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, partition: bool
) -> None:
    """Also for inserts that delta-rs appends; partitions have a file each."""
    monkeypatch.setattr(delta_upkeep, "MORE_SMALL_FILES", 8)
    folders = {"public.users": ("active",)} if partition else {}
    sink = opened(tmp_path, applier="delta-rs", partition=folders)
    most = 0
    for seq in range(1, 31):
        apply(sink, seq, users(seq, seq))
        most = max(most, len(DeltaTable(tmp_path / "public.users").file_uris()))
    assert most <= 10
    assert seqs(tmp_path) == {seq: seq for seq in range(1, 31)}
    sink.close()


def test_keys_of_small_tables_are_forgotten_above_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_vectors, "SMALL_KEYS_BYTES", 20)
    sink = opened(tmp_path, applier="vectors")
    for seq in range(1, 9):
        apply(sink, 2 * seq, users(2 * seq - 1, seq % 3), lines(2 * seq, seq % 3))
        known = [sink.appliers.joins_files(each) for each in sink.mirrors.values()]
        assert sum(known) <= 1
    assert seqs(tmp_path) == {0: 11, 1: 13, 2: 15}
    assert seqs(tmp_path, "lines") == {0: 12, 1: 14, 2: 16}
    sink.close()


def test_a_frontier_without_changes_is_written_late_but_is_written(tmp_path: Path) -> None:
    """At the latest after its time, at the end, or with the next cut, whichever is first."""
    sink = opened(tmp_path, idle_seconds=3_600)
    apply(sink, 1, users(1, 1))
    apply(sink, 2)
    apply(sink, 3)
    assert frontier(tmp_path) == 1
    apply(sink, 4, users(4, 1))
    assert (frontier(tmp_path), seqs(tmp_path)) == (4, {1: 4})
    apply(sink, 5)
    sink.close()
    assert frontier(tmp_path) == 5
    sink = opened(tmp_path, idle_seconds=0.2)
    apply(sink, 6)
    apply(sink, 7)
    wait_until(lambda: frontier(tmp_path) == 7, "the held frontier is not written")
    sink.close()
    killed = opened(tmp_path, idle_seconds=3_600)
    apply(killed, 8)
    apply(killed, 9)
    state = opened(tmp_path).open()
    assert state is not None
    assert state.applied == applied(8)
    killed.close()


def test_the_tables_of_a_lake_share_a_client() -> None:
    """Of an object store, whose connections take longest to make; each has its own files."""
    one, other = (Files(f"memory:///lake/{name}", {}) for name in ("public.one", "public.two"))
    assert one.store is other.store
    one.put("data", b"one")
    one.put("_delta_log/0", b"{}")
    assert (one.names(""), one.names("_delta_log")) == (["_delta_log/0", "data"], ["0"])
    other.put_new("data", b"another")
    assert [each.size("data") for each in (one, other)] == [3, 7]
    assert one.tag("data") != other.tag("data")
    assert one.tag("missing") is None
    inside, itself = (Files(f"s3://bucket{path}", {"region": "x"}) for path in ("/one", ""))
    assert inside.store is itself.store
    assert (inside.prefix, itself.prefix) == ("one/", "")


def test_a_lakes_options_are_those_of_delta_rs() -> None:
    """Its options of the HTTP client too, in any case; others are refused by their names."""
    options = {
        "AWS_REGION": "x",
        "AWS_ALLOW_HTTP": "true",
        "connect_timeout": "1s",
        "AWS_S3_ALLOW_UNSAFE_RENAME": "true",
    }
    store = Files("s3a://bucket/one", options).store
    assert isinstance(store, S3Store)
    assert (store.config["region"], store.client_options) == (
        "x",
        {"allow_http": "true", "connect_timeout": "1s"},
    )
    with pytest.raises(ConfigError, match="options aws_s3_locking_provider"):
        Files("s3a://bucket/one", {"AWS_S3_LOCKING_PROVIDER": "dynamodb"})
    with pytest.raises(ConfigError, match="hdfs://host"):
        Files("hdfs://host/one", {})
