"""Which cut of its mirror a follower with views takes next."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from cdc.config import Config, Log, Source
from cdc.config.followers import DeltaFollower, Follower
from cdc.config.views import View
from lockstep.conformance.store import applied
from lockstep.jobs.documents.mirror_cuts import MirrorCut
from lockstep.jobs.views.cuts import ViewCuts
from lockstep.sinks.contract import Applied, StoreState
from lockstep.sinks.delta.frontier_rows import FrontierRow
from lockstep.sinks.delta.frontiers import FrontierTable


class Mirror:
    """A mirror's frontiers, and the cuts of views that follow them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.frontiers = FrontierTable(str(path), {}, {"pipeline": "x", "follower": "lake"})
        self.frontiers.open(1)
        config = Config(
            pipeline="x",
            source=Source(dsn="postgresql://nobody"),
            log=Log(bootstrap_servers="localhost:1", prefix="x"),
            followers={
                "lake": Follower(delta=DeltaFollower(path=str(path))),
                "views": Follower(
                    delta=DeltaFollower(path=f"{path}-views"), mirror="lake", views=("v",)
                ),
            },
            views={"v": View(sql="SELECT id FROM t", key=("id",))},
        )
        self.views = ViewCuts(config, "views", lambda: pytest.fail("nothing is computed"))

    def reach(self, seq: int) -> Applied:
        """Advance to a seq; return the frontier of a store that has followed."""
        generation = self.frontiers.generation
        assert self.frontiers.commit(applied(seq, generation=generation), {"public.t": seq})
        return applied(seq)._replace(mirror_generation=generation)

    def rebuild(self, seq: int) -> None:
        """Switch to a second generation, at a seq."""
        at = applied(seq, generation=2)
        self.frontiers.switch(FrontierRow(2, at, {"public.t": 100 + seq}), seq)

    def lose(self, seq: int) -> None:
        """Delete the frontiers at a seq."""
        DeltaTable(self.path / "_frontiers").delete(f"seq = {seq}")
        self.frontiers.find()


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    return Mirror(tmp_path / "lake")


def _ends(cut: MirrorCut | None) -> tuple[int | None, int, bool, bool] | None:
    """Return the seqs at which a cut starts and ends, and whether it replaces, or repeats."""
    if cut is None:
        return None
    before = cut.before and cut.before.applied.seq
    return before, cut.after.applied.seq, cut.replaces, cut.repeats


def test_a_cut_to_another_generation_of_the_mirror_replaces_all_views(mirror: Mirror) -> None:
    """It starts at no frontier: that of the store may have other rows in the new generation."""
    at = mirror.reach(5)
    mirror.rebuild(5)
    assert mirror.views.cut(StoreState(at, 5)) is None
    later = mirror.reach(7)
    cut = mirror.views.cut(StoreState(at, 5))
    assert _ends(cut) == (None, 7, True, False)
    assert cut is not None
    assert cut.after.applied.mirror_generation == 2
    unknown = at._replace(mirror_generation=0)
    assert _ends(mirror.views.cut(StoreState(unknown, 5))) == (5, 7, False, False)
    mirror.reach(8)
    assert _ends(mirror.views.cut(StoreState(later, 7))) == (7, 8, False, False)


def test_an_interrupted_cut_ends_in_the_generation_in_which_it_was_started(mirror: Mirror) -> None:
    """What it has written has the seq of its end, and other rows of that seq have no effect."""
    at = mirror.reach(5)
    mirror.reach(6)
    mirror.rebuild(6)
    mirror.reach(7)
    cut = mirror.views.cut(StoreState(at, 6))
    assert _ends(cut) == (5, 6, False, True)
    assert cut is not None
    assert cut.after.versions == {"public.t": 6}
    assert _ends(mirror.views.cut(StoreState(cut.after.applied, 6))) == (None, 7, True, False)


def test_views_whose_frontier_the_mirror_lost_are_replaced(mirror: Mirror) -> None:
    """So they are if it is the frontier that an interrupted cut was to reach."""
    at = mirror.reach(5)
    mirror.reach(6)
    mirror.reach(7)
    mirror.lose(5)
    assert _ends(mirror.views.cut(StoreState(at, 5))) == (None, 7, True, False)
    assert _ends(mirror.views.cut(StoreState(at, 6))) == (None, 6, True, True)
    mirror.lose(6)
    for state in (StoreState(at, 6), StoreState(at, 6, replaces=True)):
        assert _ends(mirror.views.cut(state)) == (None, 7, True, False)
    mirror.lose(7)
    assert mirror.views.cut(StoreState(at, 7)) is None
    mirror.reach(8)
    assert _ends(mirror.views.cut(StoreState(at, 7))) == (None, 8, True, False)
