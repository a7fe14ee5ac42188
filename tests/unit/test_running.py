"""What a follower's run reports about itself, without its session."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest

from cdc.config import Config, Log, Source
from cdc.errors import Exit, GapError, InvariantError, StoreLostError, UnavailableError
from cdc.events import LSN
from cdc.log.follower_reports import FollowerRecord, FollowerState
from lockstep.conformance.memory import STORES, MemorySink
from lockstep.jobs.apply import opening, positions, running
from lockstep.jobs.apply.opening import open_store
from lockstep.jobs.apply.running import FollowerRun
from lockstep.sinks.contract import Applied, Sink
from tests.fixtures.reported import reported


def made(session: object = None, *, quiet: bool = True) -> FollowerRun:
    config = Config(pipeline="shop", source=Source(dsn=""), log=Log(bootstrap_servers=""))
    return FollowerRun(config, "cache", "redis", session, quiet=quiet)  # type: ignore[arg-type]


class Topic:
    """The reports of all jobs, as the log would keep them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.records: list[FollowerRecord] = []
        monkeypatch.setattr(running, "Reports", lambda _: self)
        monkeypatch.setattr(running, "read", lambda _: self.newest())

    def write(self, record: FollowerRecord) -> None:
        self.records.append(record)

    def flush(self, _: float) -> None:
        """Do nothing: everything is there."""

    def newest(self) -> dict[str, FollowerRecord]:
        """Return the report that counts: none of a generation below the highest one reported."""
        best = max((each.generation for each in self.records), default=0)
        counted = [each for each in self.records if each.generation == best]
        return {"cache": counted[-1]} if counted else {}


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> Topic:
    return Topic(monkeypatch)


@pytest.fixture(autouse=True)
def fillable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a log that starts at its beginning, and no delay between two looks."""
    monkeypatch.setattr(opening, "refuse_unfillable", lambda *_: None)
    monkeypatch.setattr(opening, "SURE_SECONDS", 0.0)


@pytest.fixture
def sink(request: pytest.FixtureRequest) -> Iterator[MemorySink]:
    yield MemorySink(request.node.nodeid)
    STORES.pop(request.node.nodeid, None)


def move_to(sink: MemorySink, lsn: int, generation: int) -> None:
    """Move the store of a sink to a frontier, in a generation."""
    sink.start_over(generation)
    sink.open()
    sink.begin(lsn, [])
    sink.commit(Applied("shop", generation, 1, LSN(lsn), lsn, 0, lsn, {}))


@pytest.mark.parametrize(
    ("last_report", "stored", "generation"),
    [
        (None, None, 1),
        (None, (50, 1), 1),
        ((50, 1, "following"), None, 2),  # flushed while no job was there
        ((50, 2, "stopped"), None, 3),
        ((50, 2, "following"), (30, 2), 2),  # an older frontier of the same generation
        ((50, 3, "stopped"), (30, 1), 4),  # restored from before a rebuild
        ((50, 3, "rebuilding"), (60, 2), 2),  # a rebuild that is about to switch
        ((0, 3, "rebuilding"), (0, 3), 3),  # restarted by a job that died
        ((0, 3, "rebuilding"), None, 4),
    ],
)
def test_a_lost_store_gets_a_generation_whose_reports_count(
    topic: Topic,
    sink: MemorySink,
    last_report: tuple[int, int, str] | None,
    stored: tuple[int, int] | None,
    generation: int,
) -> None:
    """Clients that wait ignore reports of an older generation, and none claims what is missing."""
    if last_report is not None:
        topic.write(
            reported(lsn=LSN(last_report[0]), generation=last_report[1], state=last_report[2])
        )
    if stored is not None and stored[0]:
        move_to(sink, *stored)
    elif stored is not None:
        sink.start_over(stored[1])
    run = made(quiet=False)
    found = open_store(run, sink)
    assert (found.applied.generation, sink.current()) == (generation, generation)
    run.opened_at(found.applied)
    run.report()
    last = topic.records[-1]
    assert last.lsn == (stored[0] if stored and stored[1] == generation else 0)
    if last_report is None or last_report[2] != "rebuilding":
        assert topic.newest() == {"cache": last}
    assert found.applied.pipeline == "shop"


def test_a_store_that_is_lost_while_it_is_followed_gets_the_next_generation(
    topic: Topic, sink: MemorySink, request: pytest.FixtureRequest
) -> None:
    move_to(sink, 50, 3)
    STORES[request.node.nodeid].lost = True
    run = made(quiet=False)
    assert open_store(run, sink).applied.generation == 4
    assert [(each.state, each.generation, each.lsn) for each in topic.records] == [
        ("rebuilding", 4, 0)
    ]


@pytest.mark.parametrize(
    ("last_report", "reached", "lsn", "had"),
    [
        ((0, "rebuilding"), 80, 0, None),  # emptied, and filled by the cut up to 80
        ((0, "starting"), 80, 0, None),  # the same, after a follower that was stopped meanwhile
        ((40, "rebuilding"), 80, 0, 40),  # a switch of some tables, which are ahead
        ((40, "rebuilding"), 50, 50, None),  # the cut is complete, and was not reported
        ((50, "following"), 80, 50, None),  # killed within a cut: everything up to 50 is there
        ((40, "waiting"), 80, 50, None),
        (None, 80, 50, None),
    ],
)
def test_a_store_that_lacks_rows_of_its_frontier_reports_none_before_the_first_batch(
    topic: Topic,
    sink: MemorySink,
    monkeypatch: pytest.MonkeyPatch,
    last_report: tuple[int, FollowerState] | None,
    reached: int,
    lsn: int,
    had: int | None,
) -> None:
    """No wait may count it: also not before the store is open, or once this job has stopped."""
    for name in ("_expect_frontier", "_expect_complete", "absence"):
        monkeypatch.setattr(positions, name, Mock())
    move_to(sink, 50, 2)
    sink.begin(reached, [])
    if last_report is not None:
        topic.write(reported(lsn=LSN(last_report[0]), generation=2, state=last_report[1]))
    run = made(quiet=False)
    run.report()
    before = topic.records[-1]
    was_rebuilding = last_report is not None and last_report[1] == "rebuilding"
    assert (before.state == "rebuilding") == was_rebuilding
    positions.open_in_log(run, sink)
    for state in ("starting", "waiting", "stopped"):
        run.to(state)
        run.report()
        last = topic.records[-1]
        assert (last.generation, last.lsn, last.had_lsn) == (2, lsn, had)
    run.has_applied(Applied("shop", 2, 1, LSN(80), 80, 0, 80, {}), 1, set(), 0.1, None)
    assert (topic.records[-1].lsn, topic.records[-1].had_lsn) == (80, None)


def test_a_store_that_can_hold_a_shadow_build_is_repaired_and_never_emptied(
    topic: Topic, sink: MemorySink, request: pytest.FixtureRequest
) -> None:
    """Until the repair ends its report has no frontier, and says what the store had."""
    move_to(sink, 50, 3)
    store = STORES[request.node.nodeid]
    store.lost = True
    topic.write(reported(lsn=LSN(50), generation=3, state="following"))

    def repair(run: FollowerRun, found: Sink, error: StoreLostError) -> None:
        assert (found, STORES[request.node.nodeid]) == (sink, store)
        assert "was flushed" in error.what
        last = topic.records[-1]
        assert (last.state, last.generation, last.lsn, last.had_lsn) == ("rebuilding", 3, 0, 50)
        assert run.state == "rebuilding"
        move_to(sink, 50, 4)

    run = made(quiet=False)
    run.repair = repair
    assert open_store(run, sink).applied.generation == 4


def test_a_store_that_can_not_be_refilled_is_left_unchanged(
    topic: Topic,
    sink: MemorySink,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No wait counts its report; repaired by hand, it continues where it was."""

    def refuse(*_: object) -> None:
        raise GapError("the log is too short", hint="cdc rebuild")

    monkeypatch.setattr(opening, "refuse_unfillable", refuse)
    move_to(sink, 50, 3)
    store = STORES[request.node.nodeid]
    store.lost = True
    topic.write(reported(lsn=LSN(50), generation=3, state="following"))
    for _ in range(2):  # a restart finds the same
        run = made(lambda run: open_store(run, sink), quiet=False)
        assert run.run() is Exit.CONFIG
        assert STORES[request.node.nodeid] is store
        last = topic.records[-1]
        assert (last.state, last.generation, last.lsn, last.had_lsn) == ("halted", 3, 0, 50)
    store.lost = False
    run = made(quiet=False)
    assert open_store(run, sink).applied.lsn == 50
    run.opened_at(open_store(run, sink).applied)
    run.report()
    assert (topic.records[-1].lsn, topic.records[-1].had_lsn) == (50, None)


def test_a_store_that_lacks_something_at_one_check_only_is_not_lost(
    topic: Topic, sink: MemorySink, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_to(sink, 50, 3)
    topic.write(reported(lsn=LSN(50), generation=3, state="following"))
    store = STORES[request.node.nodeid]
    store.lost = True
    check = opening.open_once

    def repaired(*given: Any) -> Any:  # noqa: ANN401 - whatever it takes and gives
        try:
            return check(*given)
        finally:
            store.lost = False

    monkeypatch.setattr(opening, "open_once", repaired)
    assert open_store(made(quiet=False), sink).applied.lsn == 50
    assert STORES[request.node.nodeid] is store


def test_an_empty_place_of_a_reported_store_is_not_a_new_store(
    topic: Topic, request: pytest.FixtureRequest
) -> None:
    """As a volume that is not mounted: nothing is created there, and the follower waits for it."""

    class Mounted(MemorySink):
        def absent(self) -> str | None:
            return None if self.current() else "/lake"

    sink = Mounted(request.node.nodeid)
    topic.write(reported(lsn=LSN(50), generation=1, state="following"))
    with pytest.raises(UnavailableError, match="nothing at /lake"):
        open_store(made(quiet=False), sink)
    assert request.node.nodeid not in STORES
    topic.records.clear()  # a new follower
    assert open_store(made(quiet=False), sink).applied.generation == 1
    STORES.pop(request.node.nodeid)


def test_a_lost_shadow_build_is_restarted_under_its_number(
    sink: MemorySink, request: pytest.FixtureRequest
) -> None:
    """It is restarted under its number, which the process that generation it relies on."""
    move_to(sink, 50, 3)
    shadow = sink.at(4)
    shadow.open()
    store = STORES[request.node.nodeid]
    store.shadows[4].lost = True
    run = made()
    run.opened_at(Applied.beginning("shop", 4))
    assert open_store(run, shadow).applied == Applied.beginning("shop", 4)
    assert (STORES[request.node.nodeid], sink.current()) == (store, 3)


def test_a_canary_of_an_idle_database_shows_no_lag() -> None:
    """The last commit of an idle database is old; a new canary shows that there is no lag."""
    run, now_us = made(), time.time_ns() // 1_000
    old = Applied("shop", 1, 1, LSN(0x100), 7, now_us - 3_600_000_000, 3, {})
    states = []
    for canary in (now_us, None):
        run.has_applied(old, 1, set(), 0.1, canary)
        states.append(run.state)
    assert states == ["following", "catching_up"]


def test_a_report_shows_since_when_the_follower_fails(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first error on, not the newest, until a store is open or something is applied."""
    topic.write(reported(canary_at_us=7))
    clock = iter(range(100, 10_000))
    monkeypatch.setattr(running, "now_us", lambda: next(clock))
    monkeypatch.setattr(running, "BACKOFF_SECONDS", (0.001, 0.001))
    turns = iter(["away", "away", "open", "away", "batch"])
    at = Applied("shop", 1, 1, LSN(0x100), 7, 0, 3, {})

    def session(run: FollowerRun) -> None:
        match next(turns):
            case "open":
                run.to("following")
            case "batch":
                run.has_applied(at, 1, set(), 0.1, None)
                run.stop()
                return
        raise UnavailableError("away", hint="")

    run = made(session, quiet=False)
    assert run.run() is Exit.OK
    waited = [each for each in topic.records if each.state == "waiting"]
    first, again, *later = (each.failing_since_us for each in waited)
    assert first == again
    assert all(each and first and each > first for each in later)
    last = topic.records[-1]
    assert (last.failing_since_us, last.canary_at_us) == (None, 7)
    began = topic.records[1].moved_at_us
    assert last.began_at_us == began
    assert (last.moved_at_us or 0) > (began or 0)


def test_a_stop_logs_no_error_of_what_it_interrupted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def session(run: FollowerRun) -> None:
        run.stop()
        raise UnavailableError("broken off", hint="")

    with caplog.at_level(logging.DEBUG, "lockstep.jobs.follow"):
        assert made(session).run() is Exit.OK
    assert [record.getMessage() for record in caplog.records] == ["cache: stopped"]


def test_a_bugs_text_is_not_logged_but_its_place_is(caplog: pytest.LogCaptureFixture) -> None:
    """The text of a foreign error may contain a row's values."""
    value = "secret"

    def session(_: FollowerRun) -> None:
        try:
            pa.array([value]).cast(pa.int64())
        except pa.ArrowInvalid as error:
            raise ValueError(value) from error

    with caplog.at_level(logging.ERROR):
        failed = made(session).take_turn()
    assert isinstance(failed, InvariantError)
    assert value not in caplog.text
    for last_report in ("ArrowInvalid", "ValueError", ".cast(", "in session"):
        assert last_report in caplog.text
