"""What `cdc view plan` finds: for each view and follower one state, why, and what to do."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from cdc.config import Config, Log, Source
from cdc.config.followers import DeltaFollower, Follower
from cdc.config.views import View
from lockstep.jobs.views import types
from lockstep.jobs.views.definitions import Definition
from lockstep.jobs.views.planning import ViewStep, plans_of, steps
from lockstep.jobs.views.plans import ViewPlan
from lockstep.sinks.contract import Version

_ITEMS = "public.items"


def _tables(*columns: str) -> dict[str, Version]:
    every = tuple(types.TEXT.column(name) for name in ("id", *columns))
    return {_ITEMS: Version(1, "public", "items", f"x.{_ITEMS}", ("id",), every, {})}


def _config(views: Mapping[str, View], *named: str) -> Config:
    delta, lake = DeltaFollower(path="/views"), DeltaFollower(path="/lake")
    return Config(
        pipeline="x",
        source=Source(dsn="postgresql://nobody"),
        log=Log(bootstrap_servers="localhost:1", prefix="x"),
        followers={
            "lake": Follower(delta=lake),
            "answers": Follower(delta=delta, mirror="lake", views=named or tuple(views)),
        },
        views=dict(views),
    )


def _view(sql: str, *key: str) -> View:
    return View(sql=sql, key=key or ("id",))


def _definition(views: Mapping[str, View], name: str, *columns: str) -> Definition:
    found = plans_of(_config(views), _tables(*columns))[name]
    assert isinstance(found, ViewPlan)
    return found.definition


def _steps(config: Config, stored: Mapping[str, Definition], *columns: str) -> list[ViewStep]:
    return steps(config, plans_of(config, _tables(*columns)), {"answers": stored})


BEFORE = {"v": _view("SELECT id, name FROM items")}


def test_what_a_store_holds_by_the_declared_definition_is_unchanged() -> None:
    """However its SQL is written."""
    again = {"v": _view("select id,  name -- both\nFROM public.items")}
    stored = {"v": _definition(BEFORE, "v", "name")}
    for views in (BEFORE, again):
        found = _steps(_config(views), stored, "name")
        assert found == [ViewStep("v", "answers", "unchanged", "", "")]


def test_a_view_that_no_store_holds_is_new() -> None:
    found = _steps(_config(BEFORE), {}, "name")
    assert found == [ViewStep("v", "answers", "new", "its first build", "cdc view apply")]


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        (_view("SELECT id, name FROM items WHERE id <> 'a'"), "its query"),
        (_view("SELECT id, name, 1 AS one FROM items"), "its columns, query"),
        (_view("SELECT id, name FROM items", "id", "name"), "its key"),
    ],
)
def test_a_changed_view_names_what_of_it_has_changed(declared: View, why: str) -> None:
    stored = {"v": _definition(BEFORE, "v", "name")}
    found = _steps(_config({"v": declared}), stored, "name")
    assert found == [ViewStep("v", "answers", "changed", why, "cdc view apply")]


def test_a_view_is_changed_by_another_that_it_names() -> None:
    top, base = _view("SELECT id FROM base"), _view("SELECT id FROM items WHERE id <> 'a'")
    before = {"base": _view("SELECT id FROM items"), "top": top}
    stored = {"top": _definition(before, "top")}
    (found,) = _steps(_config({"base": base, "top": top}, "top"), stored)
    assert (found.state, found.why) == ("changed", "its query")


def test_a_stored_view_that_its_follower_does_not_name_is_dropped() -> None:
    """The command names the follower where others may hold the view."""
    other = {"w": _view("SELECT id FROM items")}
    stored = {
        "v": _definition(BEFORE, "v", "name"),
        "w": _definition(other, "w", "name"),
    }
    dropped, unchanged = sorted(_steps(_config(other), stored, "name"))
    assert unchanged.state == "unchanged"
    assert dropped == ViewStep("v", "answers", "dropped", "it is not declared", "cdc view drop v")
    found = _steps(_config(BEFORE | other, "w"), stored, "name")
    command = "cdc view drop v --follower answers"
    assert found[1] == ViewStep("v", "answers", "dropped", "answers does not name it", command)


def test_a_view_whose_rows_were_being_deleted_is_never_unchanged() -> None:
    stored = {"v": _definition(BEFORE, "v", "name").as_dropped()}
    (found,) = _steps(_config(BEFORE), stored, "name")
    assert (found.state, found.why) == ("changed", "its rows were being deleted")
    other = {"w": _view("SELECT id FROM items")}
    found = next(each for each in _steps(_config(other), stored, "name") if each.view == "v")
    assert (found.state, found.why) == ("dropped", "cdc view drop was interrupted")


def test_a_view_is_not_unchanged_until_the_store_is_at_the_cut_of_its_rows() -> None:
    """Its definition is in the store before them."""
    made = _definition(BEFORE, "v", "name").at(4, None)
    (found,) = _steps(_config(BEFORE), {"v": made.seen_at(3)}, "name")
    assert (found.state, found.why) == ("changed", "its computation has not ended")
    assert _steps(_config(BEFORE), {"v": made.seen_at(4)}, "name")[0].state == "unchanged"
    dropped = made.as_dropped()
    assert dropped.seen_at(3) == dropped


def test_a_view_that_is_computed_again_is_not_unchanged_until_it_is() -> None:
    made = _definition(BEFORE, "v", "name").at(4, None)
    due = made.as_due(["a", "b"])
    (found,) = _steps(_config(BEFORE), {"v": due}, "name")
    assert (found.state, found.why) == ("changed", "cdc view rebuild has asked for it")
    assert not due.has_answered("a", 9)
    done = made.at(7, due)
    assert [done.has_answered("a", seq) for seq in (6, 7, 8)] == [False, True, True]
    assert _steps(_config(BEFORE), {"v": done}, "name")[0].state == "unchanged"


def test_a_definition_names_the_newest_requests_once() -> None:
    found = _definition(BEFORE, "v", "name")
    for number in range(20):
        found = found.as_due([str(number)]).as_due([str(number)])
    assert found.requests == tuple(map(str, range(4, 20)))


def test_a_refused_view_says_why() -> None:
    (found,) = _steps(_config({"v": _view("SELECT id, lower(name) AS n FROM items")}), {}, "name")
    assert (found.state, found.command) == ("refused", "cdc view check v")
    assert "lower" in found.why
