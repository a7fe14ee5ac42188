"""A lake under faults: kills between commits, two writers, others' OPTIMIZE, old files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake

from cdc.errors import CDCError, ConfigError, StoreLostError, SwitchedError, UnavailableError
from cdc.events import LSN
from lockstep.conformance.store import CLICKS, LINES, USERS, applied, apply, change, key, row
from lockstep.jobs.reading_as_of import read_as_of_arrow
from lockstep.sinks.contract import Altered, AlteredColumn, Change, Changes, Column, Version
from lockstep.sinks.delta import generations as delta_generations
from lockstep.sinks.delta import layout as delta_layout
from lockstep.sinks.delta.frontiers import FrontierTable
from lockstep.sinks.delta.settings import DeltaSettings
from lockstep.sinks.delta.sink import DeltaSink
from lockstep.sinks.delta.table import Mirror

APPLIERS = ("delta-rs", "vectors", "auto")


class Lake:
    """A folder of mirrors and their writers."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def sink(self, **settings: Any) -> DeltaSink:  # noqa: ANN401 - any setting
        sink = DeltaSink(
            DeltaSettings("shop", "mirror", "shop", str(self.path))._replace(**settings)
        )
        sink.open()
        return sink

    def table(self, name: str = "users") -> DeltaTable:
        return DeltaTable(self.path / f"public.{name}")

    def ids(self, name: str = "users", **when: Any) -> dict[int, int]:  # noqa: ANN401
        """Return each row's seq by id, as of a frontier."""
        found = read_as_of_arrow(str(self.path), [f"public.{name}"], **when)
        rows = found.tables[f"public.{name}"].to_pylist()
        return {each["id"]: each["_seq"] for each in rows}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def users(seq: int, *ids: int) -> Changes:
    return Changes((USERS,), [change(USERS, seq, row(USERS, seq, each), each) for each in ids])


def lines(seq: int, *ids: int) -> Changes:
    return Changes(
        (LINES,), [change(LINES, seq, row(LINES, seq, each, each), each, each) for each in ids]
    )


@pytest.mark.parametrize("applier", APPLIERS)
def test_killed_between_two_mirrors_readers_see_the_frontier_before(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, applier: str
) -> None:
    """The next writer, whose cut differs, applies each change exactly once."""
    apply(lake.sink(applier=applier), 2, users(1, 1, 2), lines(2, 1))
    dying = lake.sink(applier=applier)
    monkeypatch.setattr(FrontierTable, "commit", _die)
    with pytest.raises(UnavailableError):
        apply(dying, 4, users(3, 1), lines(4, 1))
    monkeypatch.undo()
    assert (lake.ids(), lake.ids("lines")) == ({1: 1, 2: 1}, {1: 2})
    next_ = DeltaSink(DeltaSettings("shop", "mirror", "shop", str(lake.path), applier=applier))
    opened = next_.open()
    assert opened is not None
    assert (opened.applied.seq, opened.reached) == (2, 4)
    # A longer cut gets the rows as they were before the torn one.
    assert b'"n1"' in next_.rows(USERS, [key(USERS, 1)])[key(USERS, 1)]
    assert apply(next_, 5, users(3, 1), lines(4, 1), users(5, 2)) == 1
    assert (lake.ids(), lake.ids("lines")) == ({1: 3, 2: 5}, {1: 4})
    assert lake.ids(lsn=applied(2).lsn) == {1: 1, 2: 1}


def test_a_frontier_never_has_rows_of_an_older_generation(lake: Lake) -> None:
    """A mirror joins at its table's first event in the log, whatever it held until then."""
    old = lake.sink()
    apply(old, 50, users(10, 1), lines(50, 1, 2))
    old.start_over(2)
    new = lake.sink()
    for seq in (10, 20):
        new.begin(seq, [USERS])
        new.write(users(seq, 1))
        new.commit(applied(seq, generation=2))
        assert lake.ids() == {1: seq}
        with pytest.raises(ConfigError, match="no mirror"):
            lake.ids("lines")
        assert new.rows(LINES, [key(LINES, 1, 1)]) == {}
    new.begin(30, [LINES])
    new.write(lines(30, 3))
    new.commit(applied(30, generation=2))
    assert (lake.ids(), lake.ids("lines")) == ({1: 20}, {3: 30})


@pytest.mark.parametrize("late", [False, True])
def test_a_switch_in_the_midst_of_a_cut_shows_no_state_that_never_was(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, *, late: bool
) -> None:
    """A mirror that is not rebuilt may be ahead of the frontier, or get ahead during the switch."""
    follower = lake.sink()
    apply(follower, 2, users(1, 1), lines(2, 1))
    shadow = follower.at(2, frozenset({"public.users"}))
    shadow.open()
    apply(shadow, 2, users(1, 1))
    moved = delta_generations.move
    follower.begin(4, [LINES])
    follower.write(lines(4, 1, 2))

    def in_the_midst() -> None:
        with monkeypatch.context() as killed:
            killed.setattr(FrontierTable, "commit", _die)
            with pytest.raises(UnavailableError):
                follower.commit(applied(4))

    def moved_late(*given: Any) -> int:  # noqa: ANN401 - as the real one
        in_the_midst()
        return moved(*given)

    if late:
        monkeypatch.setattr(delta_generations, "move", moved_late)
    else:
        in_the_midst()
    follower.switch(2)
    assert (lake.ids(), lake.ids("lines")) == ({1: 1}, {1: 2})
    opened = follower.open()
    assert opened is not None
    assert (opened.applied.seq, opened.reached) == (2, 4)
    apply(follower, 4, users(3, 1), lines(4, 1, 2))
    assert (lake.ids(), lake.ids("lines")) == ({1: 3}, {1: 4, 2: 4})
    shadow.close()


def test_a_mirror_that_is_built_again_where_none_is_keeps_partitions_and_names(
    lake: Lake,
) -> None:
    odd = USERS._replace(
        columns=tuple(
            each._replace(name="a b") if each.name == "body" else each for each in USERS.columns
        )
    )

    def rows(seq: int) -> Changes:
        made = change(odd, seq, row(USERS, seq, 1), 1)
        named = made.row and made.row.replace(b'"body"', b'"a b"')
        return Changes((odd,), [made._replace(row=named)])

    follower = lake.sink(partition={"public.users": ("active",)})
    apply(follower, 1, rows(1))
    path = lake.path / "public.users"
    before = DeltaTable(path)
    shutil.rmtree(path)
    shadow = follower.at(2, frozenset({"public.users"}))
    shadow.open()
    apply(shadow, 1, rows(1))
    follower.switch(2)
    after = DeltaTable(path)
    assert after.metadata().partition_columns == ["active"]
    mode = "delta.columnMapping.mode"
    assert after.metadata().configuration[mode] == before.metadata().configuration[mode] == "name"
    assert after.protocol().reader_features == before.protocol().reader_features
    assert lake.ids() == {1: 1}
    follower.open()
    apply(follower, 2, rows(2))
    assert lake.ids() == {1: 2}
    shadow.close()


def _die(*_: object) -> None:
    raise UnavailableError("killed", hint="")


@pytest.mark.parametrize("applier", APPLIERS)
def test_a_copy_that_lags_restores_no_deleted_row(lake: Lake, applier: str) -> None:
    """It commits its cut after the other copy has written two."""
    apply(lake.sink(applier=applier), 1, users(1, 1, 2))
    late, other = lake.sink(applier=applier), lake.sink(applier=applier)
    late.begin(2, [USERS])
    late.write(users(2, 3))
    apply(other, 2, users(2, 3))
    apply(other, 4, Changes((USERS,), [change(USERS, 4, None, 3)]))
    late.commit(applied(2))
    assert lake.ids() == {1: 1, 2: 1}
    assert lake.ids(lsn=applied(2).lsn) == {1: 1, 2: 1, 3: 2}
    # One half of a later cut is written before the other copy's cut, the other half after it.
    late.begin(6, [USERS])
    late.write(Changes((USERS,), [change(USERS, 6, row(USERS, 6, 3), 3)]))
    apply(other, 5, users(5, 1))
    late.write(users(5, 1))
    late.commit(applied(6))
    assert lake.ids() == {1: 5, 2: 1, 3: 6}


@pytest.mark.parametrize("applier", APPLIERS)
def test_two_writers_at_once_leave_what_one_does(lake: Lake, applier: str) -> None:
    """Each has its own cuts; what a reader sees at any frontier equals the model."""
    chance = Random(3)
    changes, states = list[Change](), {0: dict[int, int]()}
    for seq in range(1, 41):
        number = chance.randint(1, 6)
        has_ended = chance.random() < 0.3
        changes.append(change(USERS, seq, None if has_ended else row(USERS, seq, number), number))
        state = dict(states[seq - 1])
        state.pop(number, None)
        states[seq] = state if has_ended else state | {number: seq}
    first = lake.sink(applier=applier)
    apply(first, 1, Changes((USERS,), changes[:1]))

    def run(steps: list[int]) -> None:
        sink = lake.sink(applier=applier)
        at = 1
        for step in steps:
            last: dict[bytes | None, Change] = {each.key: each for each in changes[at : at + step]}
            at = min(at + step, 40)
            for _ in range(50):
                try:
                    apply(sink, at, Changes((USERS,), list(last.values())))
                    break
                except UnavailableError:
                    sink.open()
        sink.close()

    with ThreadPoolExecutor(2) as pool:
        for each in (pool.submit(run, [4] * 10), pool.submit(run, [7, 1, 5, 13, 2, 11])):
            each.result()
    assert lake.ids() == states[40]
    for seq in range(1, 41):
        found = read_as_of_arrow(str(lake.path), ["public.users"], lsn=applied(seq).lsn)
        rows = {each["id"]: each["_seq"] for each in found.tables["public.users"].to_pylist()}
        assert rows == states[found.applied.seq]


def test_a_concurrent_write_of_a_copy_is_no_loss(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy starts and ends a cut after this writer read the frontiers, before the mirror."""
    quick, slow = lake.sink(), lake.sink()
    apply(quick, 1, users(1, 1))
    begin = slow.frontiers.begin

    def and_then(reached: int, above: int | None) -> None:
        begin(reached, above)
        apply(quick, 9, users(9, 1, 2))

    monkeypatch.setattr(slow.frontiers, "begin", and_then)
    apply(slow, 5, users(5, 1, 2))
    assert lake.ids() == {1: 9, 2: 9}


@pytest.mark.parametrize("applier", APPLIERS)
def test_others_may_optimize_at_any_time(lake: Lake, applier: str) -> None:
    sink = lake.sink(applier=applier)
    for seq in range(1, 12):
        apply(sink, seq, users(seq, seq, 100))
        if seq % 3 == 0:
            table = lake.table()
            table.optimize.compact()
            table.create_checkpoint()
    assert lake.ids() == {seq: seq for seq in range(1, 12)} | {100: 11}


@pytest.mark.parametrize("applier", APPLIERS)
def test_upkeep_leaves_every_frontier_that_is_kept(lake: Lake, applier: str) -> None:
    """Small files are compacted, and files that no frontier needs are deleted."""
    sink = lake.sink(applier=applier, optimize_minutes=1e-9, vacuum_hours=1)
    for seq in range(1, 30):
        apply(sink, seq, users(seq, seq % 5), lines(seq, seq))
    sizes = pa.table(lake.table("lines").get_add_actions()).num_rows
    assert sizes < 20
    for seq in range(1, 30):
        assert set(lake.ids("lines", lsn=applied(seq).lsn)) == set(range(1, seq + 1))
    assert lake.ids() == {
        number: max(s for s in range(1, 30) if s % 5 == number) for number in range(5)
    }


def test_mirrors_that_direct_mode_wrote_are_adopted(lake: Lake) -> None:
    """Its rows are as of the consistent point; until they are complete, the follower waits."""
    rows = pa.table(
        {
            "id": pa.array([1, 2], pa.int64()),
            "name": ["a", "b"],
            "body": ["x", None],
            "amount": pa.array([None, None], pa.decimal128(10, 2)),
            "active": [True, None],
            "_seq": pa.array([10, 11], pa.int64()),
            "_commit_lsn": pa.array([7, 7], pa.int64()),
            "_committed_at": pa.array([1, 1], pa.timestamp("us", "UTC")),
            "_exact": pa.array([[("amount", "NaN")], None], pa.map_(pa.string(), pa.string())),
        }
    )

    def written(frontier: str | None, pipeline: str = "shop") -> None:
        facts = {"pipeline": pipeline, "generation": 1, "frontier": frontier}
        output = CommitProperties(custom_metadata={"userMetadata": delta_layout.metadata(**facts)})
        path = lake.path / "public.users"
        write_deltalake(path, rows, mode="overwrite", commit_properties=output)

    is_direct: Callable[[str, str], bool] = lambda _, table: table == "users"  # noqa: E731
    with pytest.raises(ConfigError, match="directly into Delta"):
        lake.sink(is_direct=is_direct).begin(12, [USERS])
    written(None)
    with pytest.raises(UnavailableError, match="not complete yet"):
        lake.sink(is_direct=is_direct).begin(12, [USERS])
    written(str(LSN(7)), "another")
    with pytest.raises(ConfigError, match="is no mirror"):
        lake.sink(is_direct=is_direct).begin(12, [USERS])
    written(str(LSN(7)))
    sink = lake.sink(is_direct=is_direct)
    apply(sink, 12, lines(12, 1))
    assert lake.ids() == {1: 10, 2: 11}
    kept = row(USERS, 13, 2, amount=None)
    reported = change(USERS, 13, kept, 2, unchanged=("body",))
    apply(sink, 13, Changes((USERS,), [reported]))
    assert lake.ids() == {1: 10, 2: 13}
    found = {at: json.loads(text) for at, _, text in sink.contents(USERS)}
    assert found[key(USERS, 1)]["amount"] == "NaN"
    assert found[key(USERS, 2)]["body"] is None


def test_a_mirror_that_goes_missing_between_two_cuts_is_no_bug(lake: Lake) -> None:
    """The cut may or may not read that mirror; the next session finds what is lost."""
    sink = lake.sink()
    apply(sink, 4, users(1, 1, 2), lines(2, 1))
    shutil.rmtree(lake.path / "public.lines")
    with suppress(StoreLostError, UnavailableError):  # a cut reads only the mirrors that it changes
        apply(sink, 6, users(5, 3))
    with pytest.raises(StoreLostError, match=r"public\.lines"):
        lake.sink()


def test_frontiers_of_another_lake_are_noticed_and_missing_ones_are_not_made_again(
    lake: Lake, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With the same number of commits, between two cuts of a session."""
    sink = lake.sink()
    for seq in (1, 2):
        apply(sink, seq, users(seq, seq))
    folder = tmp_path_factory.mktemp("another")
    another = DeltaSink(DeltaSettings("shop", "mirror", "shop", str(folder)))
    another.open()
    for seq in (1, 2):
        apply(another, seq, users(seq, seq))
    frontiers = lake.path / "_frontiers"
    frontiers.rename(lake.path / "away")
    with pytest.raises(StoreLostError):
        apply(sink, 3, users(3, 3))
    assert not frontiers.exists()
    (folder / "_frontiers").rename(frontiers)
    with pytest.raises(StoreLostError):
        apply(sink, 3, users(3, 3))


def test_another_copys_commits_are_read_before_the_next_cut(lake: Lake) -> None:
    one, other = lake.sink(), lake.sink()
    apply(one, 1, users(1, 1))
    apply(other, 2, users(2, 2))
    apply(one, 2, users(2, 2))
    apply(one, 3, users(3, 3))
    assert lake.ids() == {1: 1, 2: 2, 3: 3}


def test_a_missing_or_older_mirror_is_a_lost_store(lake: Lake) -> None:
    sink = lake.sink()
    apply(sink, 1, users(1, 1), lines(1, 1))
    apply(sink, 2, users(2, 1))
    (lake.path / "public.lines").rename(lake.path / "away")
    with pytest.raises(StoreLostError):
        lake.sink()
    with pytest.raises(StoreLostError):
        apply(sink, 3, lines(3, 1))
    lost = DeltaSink(DeltaSettings("shop", "mirror", "shop", str(lake.path)))
    with pytest.raises(StoreLostError):
        lost.open()
    lost.start_over(2)
    again = lake.sink()
    apply(again, 1, users(1, 7))
    assert lake.ids() == {7: 1}
    with pytest.raises(SwitchedError):
        apply(sink, 3, users(3, 1))


def replaced(path: Path, by: Path) -> None:
    """Put a copy of a lake in its place."""
    shutil.rmtree(path)
    shutil.copytree(by, path)


@pytest.mark.parametrize("applier", APPLIERS)
def test_a_lake_that_is_restored_under_an_open_process_gets_its_changes_again(
    lake: Lake, tmp_path_factory: pytest.TempPathFactory, applier: str
) -> None:
    """None of them is stale for a row that only the versions since the copy had."""
    sink, kept = lake.sink(applier=applier), tmp_path_factory.mktemp("kept") / "lake"
    apply(sink, 2, users(1, 1, 2), users(2, 3))
    shutil.copytree(lake.path, kept)
    cuts = {3: users(3, 2, 4), 4: users(4, 4, 5), 5: users(5, 1)}
    for seq, cut in cuts.items():
        apply(sink, seq, cut)
    expected = lake.ids()
    replaced(lake.path, kept)
    state = sink.open()
    assert state is not None
    assert state.applied.seq == 2
    for seq, cut in cuts.items():
        apply(sink, seq, cut)
    assert lake.ids() == expected == {1: 5, 2: 3, 3: 2, 4: 4, 5: 4}


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("applier", APPLIERS)
def test_a_version_of_a_restored_lake_is_not_the_one_of_the_same_number(
    lake: Lake, tmp_path_factory: pytest.TempPathFactory, applier: str, *, reopened: bool
) -> None:
    """Another copy of the follower has written as many versions, with other cuts."""
    sink, kept = lake.sink(applier=applier), tmp_path_factory.mktemp("kept") / "lake"
    apply(sink, 1, users(1, 1, 2))
    shutil.copytree(lake.path, kept)
    apply(sink, 4, users(2, 1), users(3, 3), users(4, 4))
    version = lake.table().version()
    replaced(lake.path, kept)
    other = lake.sink(applier=applier)
    apply(other, 3, users(2, 1), users(3, 3))
    while lake.table().version() < version:
        lake.table().alter.set_table_properties({"delta.appendOnly": "false"})
    assert lake.table().version() == version
    if not reopened and applier != "delta-rs":
        with pytest.raises(StoreLostError, match="users was replaced or restored"):
            apply(sink, 5, users(4, 4), users(5, 2))
    sink.open()
    apply(sink, 5, users(4, 4), users(5, 2))
    assert lake.ids() == {1: 2, 2: 5, 3: 3, 4: 4}


@pytest.mark.parametrize("applier", APPLIERS)
def test_a_column_whose_name_only_changes_its_case_is_the_same_one(
    lake: Lake, applier: str
) -> None:
    """Delta's column names ignore case; rows written before keep the column's values."""
    columns = (
        each._replace(name="Name") if each.name == "name" else each for each in USERS.columns
    )
    spelled = USERS._replace(schema_id=9, columns=tuple(columns))

    def new(seq: int, number: int, **more: Any) -> Change:  # noqa: ANN401
        reported = row(USERS, seq, number)
        reported["Name"] = reported.pop("name")
        return change(spelled, seq, reported, number, **more)

    sink = lake.sink(applier=applier)
    apply(sink, 3, users(1, 1, 2, 3))
    both = [*users(4, 2).changes, new(5, 3), new(6, 4, unchanged=("Name",))]
    apply(sink, 6, Changes((USERS, spelled), both))
    apply(lake.sink(applier=applier), 7, Changes((spelled,), [new(7, 1, unchanged=("Name",))]))
    found = read_as_of_arrow(str(lake.path), ["public.users"]).tables["public.users"]
    assert "name" not in found.column_names
    names = dict(zip(found["id"].to_pylist(), found["Name"].to_pylist(), strict=True))
    assert names == {1: "n1", 2: "n4", 3: "n5", 4: None}
    assert lake.ids(lsn=applied(3).lsn) == {1: 1, 2: 1, 3: 1}


def test_a_fixed_mask_keeps_the_type_that_its_rows_showed(lake: Lake) -> None:
    """Deletes carry no type: neither they nor the next row may cause a rewrite of the mirror."""

    def masked(version: Version) -> Version:
        columns = (
            each._replace(mask="fixed") if each.name == "amount" else each
            for each in version.columns
        )
        return version._replace(columns=tuple(columns))

    def reported(version: Version, seq: int, *number: int, **more: Any) -> Change:  # noqa: ANN401
        return change(version, seq, row(version, seq, *number, amount=0), *number, **more)

    sink, table, clicks = lake.sink(), masked(USERS), masked(CLICKS)
    apply(sink, 2, Changes((table,), [reported(table, 1, 1), reported(table, 2, 2)]))
    before = lake.table().version()
    apply(sink, 3, Changes((table,), [change(table, 3, None, 1)]))
    apply(sink, 4, Changes((table,), [reported(table, 4, 2)]))
    assert lake.table().version() == before + 2
    found = read_as_of_arrow(str(lake.path), ["public.users"]).tables["public.users"]
    assert (str(found["amount"].type), found["amount"].to_pylist()) == ("int64", [0])
    # Without a key, a delete's old row finds the stored one; an insert next to it has none.
    apply(sink, 5, Changes((clicks,), [reported(clicks, 5)]))
    old = row(clicks, 5, amount=0)
    newer = [reported(clicks, 6), change(clicks, 7, None, before=old)]
    apply(sink, 7, Changes((clicks,), newer))
    assert lake.ids("clicks") == {6: 6}


def test_time_and_lsn_choose_a_frontier(lake: Lake) -> None:
    sink = lake.sink()
    for seq in (10, 20, 30):
        apply(sink, seq, users(seq, 1))
    between = datetime.fromtimestamp((applied(20).committed_at_us + 5) / 1e6, UTC)
    found = read_as_of_arrow(str(lake.path), ["public.users"], time=between)
    assert found.applied.seq == 20
    with pytest.raises(ConfigError, match="no time zone"):
        lake.ids(time=between.replace(tzinfo=None))
    assert lake.ids(lsn=str(applied(29).lsn)) == {1: 20}
    with pytest.raises(ConfigError, match="so old"):
        lake.ids(lsn=LSN(1))


def test_a_mirror_that_cannot_be_written_holds_back_the_frontier_and_says_so(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other tables get the cut; of two errors the one that needs a person is reported."""
    sink, there = lake.sink(), Mirror.apply
    apply(sink, 1, users(1, 1), lines(1, 1))
    errors: dict[str, CDCError] = {"public.lines": ConfigError("it is locked", hint="ask")}

    def refuse(self: Mirror, *given: Any) -> None:  # noqa: ANN401 - as it is
        if self.name in errors:
            raise errors[self.name]
        there(self, *given)

    monkeypatch.setattr(Mirror, "apply", refuse)
    with pytest.raises(ConfigError, match=r"^public\.lines: it is locked"):
        apply(sink, 2, users(2, 2), lines(2, 2))
    assert sorted(lake.table().to_pyarrow_table()["id"].to_pylist()) == [1, 2], "it has the cut"
    assert lake.ids() == {1: 1}, "readers see the frontier that all tables have"
    errors["public.users"] = UnavailableError("storage is slow", hint="wait")
    errors["public.lines"] = ConfigError("it is locked", hint="ask")
    with pytest.raises(ConfigError, match=r"^public\.lines: it is locked"):
        apply(lake.sink(), 3, users(3, 3), lines(3, 3))
    errors.clear()
    apply(lake.sink(), 3, users(3, 2, 3), lines(3, 2, 3))
    assert lake.ids() == {1: 1, 2: 3, 3: 3}
    assert {each["id"] for each in lake.table("lines").to_pyarrow_table().to_pylist()} == {1, 2, 3}


def test_a_column_without_values_comes_before_another_is_renamed(lake: Lake) -> None:
    """No row was written in between: the mirror lacks the new column when it is altered again."""
    sink = lake.sink()
    apply(sink, 1, users(1, 1))
    (named, *others), empty = USERS.columns[1:], Column("note", "text", 25, -1, nullable=True)
    came = USERS._replace(schema_id=8, columns=(*USERS.columns, empty))
    moved = named._replace(name="called")
    renamed = came._replace(schema_id=9, columns=(USERS.columns[0], moved, *others, empty))
    same = [AlteredColumn(each.name, each.name) for each in came.columns if each != named]
    every = (
        Altered(
            2, USERS, came, (*same[:-1], AlteredColumn(named.name, named.name),
            AlteredColumn("note", None)),
        ),
        Altered(3, came, renamed, (*same, AlteredColumn("called", named.name))),
    )  # fmt: skip
    before = lake.table().to_pyarrow_table()[named.name].to_pylist()
    sink.begin(3, [renamed])
    for altered in every:
        sink.alter(altered)
    sink.commit(applied(3))
    after = lake.table().to_pyarrow_table()
    assert after["called"].to_pylist() == before
    assert named.name not in after.column_names
    apply(sink, 4, Changes((renamed,), [change(renamed, 4, {"id": 2, "note": "n"}, 2)]))
    assert set(lake.table().to_pyarrow_table()["note"].to_pylist()) == {None, "n"}
    sink.close()


@pytest.mark.parametrize("name", ["_seq", "_exact", "_SEQ"])
def test_a_column_with_the_name_of_one_of_ours_changes_no_mirror(lake: Lake, name: str) -> None:
    """It came and was renamed between two cuts: ours would have got the new name, or its values."""
    sink = lake.sink()
    apply(sink, 1, users(1, 1))
    theirs = Column(name, "int4", 23, -1, nullable=True)
    named = USERS._replace(schema_id=8, columns=(*USERS.columns, theirs))
    renamed = named._replace(schema_id=9, columns=(*USERS.columns, theirs._replace(name="sq")))
    same = [AlteredColumn(column.name, column.name) for column in USERS.columns]
    version = lake.table().version()
    came = Altered(2, USERS, named, (*same, AlteredColumn(name, None)))
    went = Altered(3, named, renamed, (*same, AlteredColumn("sq", name)))
    for every in ([came], [went], [came, went]):
        sink.close()
        sink = lake.sink()
        sink.begin(3, [renamed])
        for altered in every:
            sink.alter(altered)
        with pytest.raises(ConfigError, match="treats as one") as error:
            sink.commit(applied(3))
        assert "leave the table out" in error.value.hint
    assert lake.table().version() == version
    assert lake.ids() == {1: 1}
    sink.close()
