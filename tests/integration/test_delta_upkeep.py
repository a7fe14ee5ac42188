"""Upkeep keeps every retained frontier, and a bounded amount of everything else."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from deltalake import DeltaTable

from cdc.config import Config, Log, Source
from cdc.config.followers import DeltaFollower, Follower, RedisFollower
from cdc.errors import ConfigError, GapError
from lockstep.conformance.store import LINES, USERS, applied, apply, change, row
from lockstep.jobs.documents.mirror_cuts import MirrorCuts
from lockstep.jobs.generations.rebuilding import Rebuild
from lockstep.jobs.reading_as_of import read_as_of_arrow
from lockstep.sinks.contract import Applied, Changes, StoreState
from lockstep.sinks.delta import frontiers as delta_frontiers
from lockstep.sinks.delta import lake
from lockstep.sinks.delta import table as delta_table
from lockstep.sinks.delta.frontiers import FrontierTable
from lockstep.sinks.delta.settings import DeltaSettings
from lockstep.sinks.delta.sink import DeltaSink

KEPT_HOURS = 3
KEPT = ("logRetentionDuration", "deletedFileRetentionDuration", "enableExpiredLogCleanup")


def users(seq: int, *ids: int) -> Changes:
    return Changes((USERS,), [change(USERS, seq, row(USERS, seq, each), each) for each in ids])


class Aged:
    """A lake whose clock is set: what it holds counts as older wherever age is checked."""

    def __init__(self, path: Path, patched: pytest.MonkeyPatch) -> None:
        self.path, self.ahead = path, timedelta()
        patched.setattr(delta_frontiers, "now", lambda: datetime.now(UTC) + self.ahead)

    def sink(self, **settings: object) -> DeltaSink:
        mine = DeltaSettings("shop", "lake", "shop", str(self.path))
        sink = DeltaSink(mine._replace(**{"optimize_minutes": 0, **settings}))  # type: ignore[arg-type]
        sink.open()
        return sink

    def older(self, hours: float) -> None:
        """Advance the time: the clock for rows, and the timestamps of `_frontiers` files."""
        self.ahead += timedelta(hours=hours)
        for each in (self.path / "_frontiers").rglob("*"):
            at = each.stat().st_mtime - hours * 3_600
            os.utime(each, (at, at))

    def ids(self, seq: int) -> set[int]:
        found = read_as_of_arrow(str(self.path), ["public.users"], lsn=applied(seq).lsn)
        assert found.applied.seq == seq
        return set(found.tables["public.users"]["id"].to_pylist())


@pytest.fixture
def aged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Aged:
    return Aged(tmp_path, monkeypatch)


@pytest.mark.long("without restarts", sample=["True"])
@pytest.mark.parametrize("restarts", [False, True])
def test_the_table_of_frontiers_stays_bounded(
    aged: Aged, monkeypatch: pytest.MonkeyPatch, *, restarts: bool
) -> None:
    """Over many batches, with and without restarts, with an occasional `tidy` or none."""
    monkeypatch.setattr(delta_frontiers, "MOST_FILES", 10)
    # delta-rs timestamps removed files, and its clock can't be set.
    monkeypatch.setattr(delta_frontiers, "KEPT_HOURS", 0)
    at, log = aged.path / "_frontiers", aged.path / "_frontiers" / "_delta_log"
    frontiers, most = None, (0, 0)  # files and log files
    for seq in range(1, 121):
        if frontiers is None or (restarts and seq % 7 == 0):
            frontiers = FrontierTable(str(aged.path), {}, {"pipeline": "shop", "follower": "lake"})
            frontiers.open(1)
        frontiers.begin(seq)
        frontiers.commit(applied(seq), {"public.users": seq})
        aged.older(0.1)
        if not restarts and seq % 40 == 0:
            frontiers.tidy(KEPT_HOURS)
            assert min(_seqs(at)) == seq - 29  # the last one that is older, and all since
        files = len(list(at.glob("*.parquet"))), len(list(log.iterdir()))
        most = max(most[0], files[0]), max(most[1], files[1])
    assert most[0] <= 14
    assert most[1] <= 75
    assert max(_seqs(at)) == 120
    assert len(_seqs(at)) == (120 if restarts else 30)


def _seqs(path: Path) -> list[int]:
    return sorted(DeltaTable(path).to_pyarrow_table()["seq"].to_pylist())


def test_a_frontier_is_kept_by_its_write_time_and_then_reported_as_missing(aged: Aged) -> None:
    """The source's time does not count: a follower catching up with an old log writes now."""
    sink = aged.sink(vacuum_hours=KEPT_HOURS)

    def applied_at(seq: int) -> Applied:
        return applied(seq)._replace(committed_at_us=seq)  # half a century ago

    def cut(seq: int) -> None:
        sink.begin(seq, [USERS])
        sink.write(users(seq, seq))
        sink.commit(applied_at(seq))

    documents = MirrorCuts(_config(aged.path), "cache", lambda _: {})
    for seq in range(1, 6):
        cut(seq)
    sink.tidy()
    for seq in range(1, 6):
        assert aged.ids(seq) == set(range(1, seq + 1))
        assert (documents.cut(StoreState(applied_at(seq), seq)) is None) == (seq == 5)
    aged.older(KEPT_HOURS + 1)
    for seq in range(6, 8):
        cut(seq)
    sink.tidy()
    assert [aged.ids(seq) == set(range(1, seq + 1)) for seq in (5, 6, 7)] == [True] * 3
    with pytest.raises(ConfigError, match="no frontier so old"):
        aged.ids(4)
    with pytest.raises(GapError, match="no longer has"):
        documents.cut(StoreState(applied_at(4), 4))
    assert documents.cut(StoreState(applied_at(5), 5)) is not None
    # The newest frontier is the current state, and kept at any age.
    aged.older(100)
    sink.tidy()
    assert aged.ids(7) == set(range(1, 8))
    sink.close()


def test_an_old_generation_stays_complete_until_it_is_dropped(aged: Aged) -> None:
    sink = aged.sink(vacuum_hours=KEPT_HOURS)
    for seq in range(1, 4):
        apply(sink, seq, users(seq, seq))
    shadow = sink.at(2)
    shadow.open()
    apply(shadow, 3, users(3, 1, 2, 3, 9))
    sink.switch(2)
    sink.open()
    for seq in range(4, 8):
        aged.older(KEPT_HOURS)
        apply(sink, seq, users(seq, seq))
        sink.tidy()
    assert sorted(sink.generations()) == [1, 2]
    old = sink.at(1)
    old.open()
    assert len(list(old.contents(USERS))) == 3
    rows = DeltaTable(aged.path / "_frontiers").to_pyarrow_table().to_pylist()
    kept = sorted((each["generation"], each["seq"]) for each in rows)
    assert kept == [(1, 1), (1, 2), (1, 3), (2, 6), (2, 7)]
    sink.drop(1)
    sink.tidy()
    assert aged.ids(7) == {1, 2, 3, 4, 5, 6, 7, 9}
    for each in (shadow, old, sink):
        each.close()


def test_the_generation_that_readers_still_use_is_not_dropped(aged: Aged) -> None:
    """After a rebuild of one table the other is at another frontier until the next batch."""
    sink = aged.sink()
    lines = Changes((LINES,), [change(LINES, 2, row(LINES, 2, 1, 1), 1, 1)])
    apply(sink, 2, users(1, 1), lines)
    shadow = sink.at(2, frozenset({"public.users"}))
    shadow.open()
    apply(shadow, 3, users(3, 1, 5))
    sink.switch(2)
    rebuild = Rebuild(sink, Mock(), print)
    assert sink.still_read() == 1
    with pytest.raises(ConfigError, match="at no frontier yet: readers still use generation 1"):
        rebuild.drop_old()
    assert aged.ids(2) == {1}
    sink.open()
    apply(sink, 4, users(4, 2))
    assert sink.still_read() is None
    assert rebuild.drop_old() == [1]
    assert aged.ids(4) == {1, 2, 5}
    for each in (shadow, sink):
        each.close()


@pytest.mark.parametrize("applier", ["delta-rs", "vectors"])
@pytest.mark.parametrize(("hours", "kept"), [(0.5, 1 + 168), (2_000, 2_000 + 168), (0, 876_000)])
def test_files_and_log_are_kept_as_long_as_configured(
    aged: Aged, applier: str, hours: float, kept: int
) -> None:
    """Half an hour is not rounded to 0; Delta's own 7 and 30 days are no limits; 0 keeps all."""
    sink = aged.sink(vacuum_hours=hours, applier=applier)
    for seq in (1, 2, 3):
        apply(sink, seq, users(seq, 1, seq))
        sink.tidy()
    assert [aged.ids(seq) for seq in (1, 2, 3)] == [{1}, {1, 2}, {1, 2, 3}]
    table = DeltaTable(aged.path / "public.users")
    about = table.metadata().configuration
    assert {name: about[f"delta.{name}"] for name in KEPT} == {
        "logRetentionDuration": f"interval {kept} hours",
        "deletedFileRetentionDuration": f"interval {kept} hours",
        "enableExpiredLogCleanup": "false",
    }
    # No other table feature was enabled that a reader would have to support.
    vectors = ["deletionVectors"] if applier == "vectors" else None
    assert table.protocol().reader_features == vectors
    sink.close()


def test_upkeep_runs_although_no_process_lives_as_long_as_its_interval(
    aged: Aged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `cdc follow --once` every few minutes: due upkeep runs once, not in each process."""
    done = list[int]()
    tidy = DeltaSink.tidy

    def counted(sink: DeltaSink) -> None:
        done.append(seq)
        tidy(sink)

    monkeypatch.setattr(DeltaSink, "tidy", counted)
    clock = SimpleNamespace(time=lambda: time.time() + aged.ahead.total_seconds())
    monkeypatch.setattr("lockstep.sinks.delta.upkeep.time", clock)
    for seq in range(1, 10):
        aged.ahead = timedelta(minutes=22 * seq)
        sink = aged.sink(optimize_minutes=60)
        apply(sink, seq, users(seq, seq))
        sink.close()
    assert done == [3, 6, 9]


def test_checkpoints_are_written_for_any_number_of_commits_per_batch(
    aged: Aged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For deletion vectors we write them; a batch commits a change, and then the tidying up."""
    monkeypatch.setattr(delta_table, "CHECKPOINT_EVERY", 5)
    sink = aged.sink(applier="vectors")
    for seq in range(1, 31):
        apply(sink, seq, users(seq, seq % 3))
    log = aged.path / "public.users" / "_delta_log"
    made = sorted(int(each.name[:20]) for each in log.glob("*.checkpoint.parquet"))
    assert [each // 5 for each in made] == list(
        range(1, sink.mirror("public.users").table.version() // 5 + 1)
    )
    sink.close()


def test_a_mirror_stays_the_followers_after_commits_of_others(aged: Aged) -> None:
    apply(aged.sink(), 1, users(1, 1))
    table = DeltaTable(aged.path / "public.users")
    for _ in range(51):
        table.alter.set_table_properties({"delta.appendOnly": "false"})
    apply(aged.sink(), 2, users(2, 2))
    table.update_incremental()
    for number in range(2):  # and now the log no longer has our commits
        table.alter.set_table_properties({"delta.appendOnly": "false"})
        table.create_checkpoint()
        for each in (aged.path / "public.users" / "_delta_log").iterdir():
            os.utime(each, (number, number))
        table.cleanup_metadata()
    assert lake.newest_facts(table) == {}
    apply(aged.sink(), 3, users(3, 3))
    assert aged.ids(3) == {1, 2, 3}


def _config(path: Path) -> Config:
    """Return a pipeline whose documents are built from the lake."""
    return Config(
        pipeline="shop",
        source=Source(dsn="postgresql://nobody"),
        log=Log(bootstrap_servers="localhost:1", prefix="shop"),
        followers={
            "lake": Follower(delta=DeltaFollower(path=str(path))),
            "cache": Follower(redis=RedisFollower(url="redis://nowhere"), mirror="lake"),
        },
    )
