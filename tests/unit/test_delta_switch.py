"""The switch of a lake's generations is finished after a kill, and while its follower runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from deltalake import DeltaTable

from cdc.errors import ConfigError, StoreLostError, SwitchedError
from cdc.events import LSN
from lockstep.conformance.store import LINES, USERS, applied, change, row
from lockstep.jobs.generations import repairing
from lockstep.jobs.generations.rebuilding import Rebuild
from lockstep.jobs.reading_as_of import read_as_of_arrow
from lockstep.sinks.contract import Applied, Changes
from lockstep.sinks.delta import generations as delta_generations
from lockstep.sinks.delta import lake as delta_lake
from lockstep.sinks.delta import sink as delta_sink
from lockstep.sinks.delta.frontier_tail import FrontierTail
from lockstep.sinks.delta.settings import DeltaSettings
from lockstep.sinks.delta.sink import DeltaSink
from tests.unit.test_rebuild import TABLES, KilledError, Log

USERS_ALONE = frozenset({USERS.name})


def is_users(schema: str, table: str) -> bool:
    return f"{schema}.{table}" == USERS.name


class Lake:
    """A lake of the log's tables, its follower, and what readers see."""

    def __init__(self, path: Path) -> None:
        self.path, self.log = path, Log()
        self.log.grow(9)
        self.follower = self.sink()
        self.log.forward(self.follower, 1, None)

    def sink(self, is_direct: Callable[[str, str], bool] | None = None) -> DeltaSink:
        return DeltaSink(
            DeltaSettings("shop", "mirror", "shop", str(self.path), is_direct=is_direct)
        )

    def rebuild(self, reported: int = 0) -> Rebuild:
        return Rebuild(self.sink(), self.log, lambda _: None, reported=reported)

    def check(self, at: Applied) -> None:
        """Expect readers to see all tables as they are in the log at a frontier."""
        read = read_as_of_arrow(str(self.path), list(TABLES))
        for name, version in TABLES.items():
            found = {
                msgspec.json.encode({key: row[key] for key in version.key}): row["name"]
                for row in read.tables[name].to_pylist()
            }
            wanted = {
                key: row["name"]
                for key, row in self.log.rows(version, at).items()
                if isinstance(row, dict)
            }
            assert found == wanted

    def follow(self) -> Applied:
        """Apply the rest of the log, as a follower that is started does."""
        sink = self.sink()
        state = sink.open()
        assert state is not None
        at = self.log.forward(sink, state.applied.generation, None)
        sink.close()
        return at


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "lake")


Moves = Callable[[int], None]


@pytest.fixture
def dies(monkeypatch: pytest.MonkeyPatch) -> Moves:
    """Return what makes a process die before it replaces its n-th mirror; 0: none does."""
    moved = delta_generations.move
    left = 0

    def move(*given: Any) -> int:  # noqa: ANN401 - as the real one
        nonlocal left
        left -= 1
        if left == 0:
            raise KilledError
        return moved(*given)

    def die(number: int) -> None:
        nonlocal left
        left = number

    monkeypatch.setattr(delta_generations, "move", move)
    return die


def killed(lake: Lake, dies: Moves, tables: frozenset[str] | None = None) -> None:
    dies(2)
    with pytest.raises(KilledError):
        lake.rebuild().run(tables)
    dies(0)
    lake.check(applied(9))


def test_a_rebuild_that_died_during_its_switch_is_repeated(lake: Lake, dies: Moves) -> None:
    """Nothing is new in the log since, so that the old generation would be compared."""
    killed(lake, dies)
    outcome = lake.rebuild().run()
    assert (outcome.generation, outcome.former) == (2, 1)
    lake.check(applied(9))
    lake.log.grow(5)
    assert lake.follow().seq == 14
    lake.check(applied(14))
    assert lake.rebuild().drop_old() == [1]


def test_a_follower_finishes_a_switch_that_died(lake: Lake, dies: Moves) -> None:
    killed(lake, dies)
    with pytest.raises(ConfigError, match="generation 2 was interrupted"):
        lake.rebuild().drop_old()
    lake.log.grow(5)
    assert lake.follow() == applied(14, generation=2)
    lake.check(applied(14))
    assert lake.rebuild().drop_old() == [1]
    lake.check(applied(14))


def test_a_rebuild_replaces_a_build_that_was_deleted_during_its_switch(
    lake: Lake, dies: Moves
) -> None:
    killed(lake, dies)
    lake.sink().drop(2)
    with pytest.raises(SwitchedError) as described:
        lake.sink().open()
    assert "cdc rebuild mirror" in described.value.hint
    # As after the report that precedes a switch.
    assert lake.rebuild(reported=2).run().generation == 3
    lake.check(applied(9))
    lake.log.grow(5)
    assert lake.follow().seq == 14
    lake.check(applied(14))


@pytest.mark.parametrize("later", [0, 5])
def test_the_repair_of_one_mirror_that_died_during_its_switch_is_finished(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, later: int
) -> None:
    """The lost mirror is there again, in a generation that `_frontiers` does not have."""
    shutil.rmtree(lake.path / USERS.name)
    lake.log.grow(later)
    with monkeypatch.context() as patched:
        patched.setattr(delta_lake, "append", _die)
        with pytest.raises(KilledError):
            lake.rebuild().run(USERS_ALONE, is_lost=True)
    assert lake.sink().current() == 1
    lake.log.grow(5)
    assert lake.follow() == applied(14 + later, generation=2)
    lake.check(applied(14 + later))


def _die(*_: object) -> None:
    raise KilledError


@pytest.fixture
def during(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], None]], None]:
    """Return what makes a function run before each mirror is replaced; it gets its name."""

    def before_each(do: Callable[[str], None]) -> None:
        moved = delta_generations.move

        def move(settings: DeltaSettings, generation: int, mirror: str, version: int) -> int:
            do(mirror)
            return moved(settings, generation, mirror, version)

        monkeypatch.setattr(delta_generations, "move", move)

    return before_each


Before = Callable[[Callable[[str], None]], None]


def test_an_idle_frontier_during_the_switch_delays_nothing(lake: Lake, during: Before) -> None:
    later = iter(range(1, 9))

    def idle(_: str) -> None:
        at = applied(9)
        lake.follower.begin(9, [])
        lake.follower.commit(at._replace(lsn=LSN(at.lsn + next(later))))

    during(idle)
    assert lake.rebuild().run().generation == 2
    assert lake.sink().current() == 2
    lake.check(applied(9))
    with pytest.raises(SwitchedError):
        lake.follower.begin(10, [USERS])


@pytest.mark.parametrize("tables", [None, USERS_ALONE])
def test_a_cut_during_the_switch_is_applied_after_it(
    lake: Lake, during: Before, tables: frozenset[str] | None
) -> None:
    """A cut of a mirror that is not replaced yet, or of one that is not rebuilt."""

    def cut(mirror: str) -> None:
        versions = [TABLES[mirror], *([LINES] if tables else [])]
        for version in versions:
            seq = len(lake.log.changes) + 1
            ids = [1 for _ in version.key]
            made = change(version, seq, row(version, seq, *ids), *ids)
            lake.log.changes.append((version, made))
            lake.follower.begin(seq, [version])
            lake.follower.write(Changes((version,), [made]))
            lake.follower.commit(applied(seq))

    during(cut)
    outcome = lake.rebuild().run(tables)
    assert len(lake.log.changes) == 11
    if tables is None:
        assert outcome.applied == applied(9, generation=2)
        lake.check(applied(9))
    else:  # at no frontier until the next batch
        lake.check(applied(11))
    lake.log.grow(1)
    assert lake.follow() == applied(12, generation=2)
    lake.check(applied(12))


def test_a_follower_finishes_the_switch_of_a_rebuild_that_is_not_dead(
    lake: Lake, during: Before
) -> None:
    """It deletes the build, and continues, before the rebuild has replaced its last mirror."""
    seen: list[str] = []

    def finish(mirror: str) -> None:
        seen.append(mirror)
        if len(seen) == 2:
            lake.log.grow(5)
            assert lake.follow() == applied(14, generation=2)

    during(finish)
    outcome = lake.rebuild().run()
    assert (outcome.generation, len(seen)) == (2, 4)
    lake.check(applied(14))
    assert lake.follow() == applied(14, generation=2)


def test_a_mirror_that_another_process_replaces_first_is_not_replaced_again(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower may have written later rows to it since."""
    copied = delta_lake.copied
    seen: list[str] = []

    def late(*given: Any) -> DeltaTable:  # noqa: ANN401 - as the real one
        seen.append(given[2])
        if len(seen) == 1:
            lake.sink().switch(2)
            lake.log.grow(5)
            lake.follow()
        return copied(*given)

    monkeypatch.setattr(delta_lake, "copied", late)
    assert lake.rebuild().run().generation == 2
    assert len(seen) == 3
    lake.check(applied(14))
    lake.log.grow(5)
    assert lake.follow() == applied(19, generation=2)
    lake.check(applied(19))


@pytest.mark.parametrize("tables", [None, USERS_ALONE])
def test_a_table_that_was_copied_directly_is_built_again(
    lake: Lake, tables: frozenset[str] | None
) -> None:
    """Its rows are read again through the log, into a mirror that no snapshot has filled."""
    if tables is not None:
        shutil.rmtree(lake.path / USERS.name)
    sink = lake.sink(is_users)
    rebuild = Rebuild(sink, lake.log, lambda _: None)
    assert rebuild.run(tables, is_lost=tables is not None).generation == 2
    lake.check(applied(9))


def test_a_new_mirror_of_a_table_that_was_copied_directly_is_refused(tmp_path: Path) -> None:
    """It would lack the first rows."""
    sink = DeltaSink(
        DeltaSettings("shop", "mirror", "shop", str(tmp_path / "other"), is_direct=is_users)
    )
    sink.open()
    with pytest.raises(ConfigError, match="were copied directly"):
        sink.begin(1, [USERS])
    sink.close()


def test_a_repair_keeps_the_frontiers_that_readers_use(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repaired mirror is newer than the others; documents are at the old frontier."""
    shutil.rmtree(lake.path / USERS.name)
    lake.log.grow(5)
    sink = lake.sink()
    monkeypatch.setattr(repairing, "LogBuilder", lambda *_: lake.log)
    monkeypatch.setattr(repairing, "switching", lambda *_: None)
    config, run = Mock(), Mock()
    config.followers = {"mirror": Mock(documents=())}
    run.read_report.return_value = None
    run.stopping.is_set.return_value = False
    lost = StoreLostError("it is missing", tables=USERS_ALONE)
    repairing.Repair(config, "mirror", Mock())(run, sink, lost)
    assert sink.current() == 2

    def expect_frontiers(*seqs: int) -> None:
        tail = FrontierTail(str(lake.path), {})
        newest = tail.newest()
        assert newest is not None
        assert newest.applied.seq == seqs[-1]
        for seq in seqs:
            assert tail.at(applied(seq)) is not None

    expect_frontiers(9)
    assert lake.follow() == applied(14, generation=2)
    lake.check(applied(14))
    sink.open()
    sink.tidy()
    expect_frontiers(9, 14)
    monkeypatch.setattr(delta_sink, "UNREAD_SECONDS", -1.0)
    sink.open()
    sink.tidy()
    expect_frontiers(14)
    assert list(sink.generations()) == [2]
    sink.open()
    assert sink.frontiers.unwanted == (0, 0)
    lake.check(applied(14))
    sink.close()
