"""Lanes: flushes in turn, commits in turn, and an error that also fails what follows it.

Real workers with writers that wait where the test says: each step of each lane is released by name,
so that every order in which the two threads may run can be tested.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from cdc.config.model import Log
from cdc.errors import CDCError, FencedError, InvariantError, UnavailableError
from cdc.log import producer_pool as lanes_module
from cdc.log.producer_pool import InFlight, Lanes, wants_direct
from cdc.log.publisher import DIRECT, LANES
from cdc.operate.metrics import Cut
from cdc.runtime.background import Worker
from tests.fixtures.daemon import wait_until
from tests.property.stream import position

# Each step takes a moment; the rest is for a busy machine.
_SECONDS = 60.0
_STEPS = ("flush", "commit")
_OVER = InvariantError("the test is over")


class Gate:
    """One step of one lane, which each time waits for a separate `open`, in any order.

    Both ways go through queues: no arrival and no opening can be overtaken by the next one.
    """

    def __init__(self) -> None:
        self._arrivals: SimpleQueue[None] = SimpleQueue()
        self._openings: SimpleQueue[Exception | None] = SimpleQueue()

    def open(self, error: Exception | None = None) -> None:
        """Release the step once, this time or the next; with an error it fails."""
        self._openings.put(error)

    def reached(self, seconds: float = _SECONDS) -> bool:
        """Return whether the step starts to wait within this time; each arrival counts once."""
        try:
            self._arrivals.get(timeout=seconds)
        except Empty:
            return False
        return True

    def go_through(self) -> None:
        self._arrivals.put(None)
        error = self._openings.get(timeout=_SECONDS)
        if error:
            raise error


class FakePublisher:
    """A writer whose flush and commit wait at the gates of the world that it belongs to."""

    begun = False

    def __init__(self, world: World, lane: int | str, *, transaction_seconds: int = 60) -> None:
        assert transaction_seconds
        self.world = world
        self.lane = lane
        self.abandoned = False

    def _step(self, what: str) -> None:
        name = f"{what} {self.lane}"
        if self.world.over:
            raise _OVER
        self.world.gate(name).go_through()
        self.world.done.append(name)

    def open(self) -> None:
        self.world.done.append(f"open {self.lane}")

    def flush(self) -> None:
        self._step("flush")

    def commit(self) -> None:
        self._step("commit")

    def abort(self) -> None:
        self.world.done.append(f"abort {self.lane}")

    def abandon(self) -> None:
        self.abandoned = True


class World:
    """One test's lanes, and their steps in the order in which these ended."""

    log = SimpleNamespace(direct="off")  # this also stands in for the writers' configuration

    def __init__(self) -> None:
        self.done: list[str] = []
        self.over = False
        self._gates = {f"{what} {lane}": Gate() for lane in range(LANES) for what in _STEPS}
        self._workers: list[Worker] = []
        self.lanes = self.use(2)

    def use(self, lanes: int) -> Lanes:
        workers = [Worker() for _ in range(lanes)]
        self._workers += workers
        self.lanes = Lanes(self, workers)  # type: ignore[arg-type]
        return self.lanes

    def gate(self, name: str) -> Gate:
        return self._gates[name]

    def cut(self, seq: int) -> InFlight:
        """Start the commit of a batch; its seq names it."""
        self.lanes.commit(position(seq=seq), Cut(1, 10, None), time.monotonic())
        return self.lanes.in_flight[-1]

    def end(self) -> None:
        """Wait until no worker has anything to do: none acts once the test is over."""
        self.over = True
        for gate in self._gates.values():
            gate.open(_OVER)  # one for a step that waits; a later one sees that it is over
        for worker in self._workers:
            worker.submit(_nothing).result(_SECONDS)


def _nothing() -> None:
    return


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(lanes_module, "Publisher", FakePublisher)
    found = World()
    yield found
    found.end()


def free(lanes: Lanes) -> bool:
    return lanes.free


def settling(lanes: Lanes) -> bool:
    return lanes.settling


def seqs(batches: Iterator[InFlight]) -> list[int]:
    return [batch.position.seq for batch in batches]


def ended(batch: InFlight) -> None:
    wait_until(batch.ended.done, "the commit does not end", _SECONDS, pause=0.001)


def flushed(batch: InFlight) -> None:
    wait_until(batch.flushed.done, "the flush does not end", _SECONDS, pause=0.001)


# -- turns -----------------------------------------------------------------------------------------


def test_a_start_opens_every_lane_before_any_is_used(world: World) -> None:
    world.lanes.open()
    # Including those of small batches, which an older daemon may have.
    assert world.done == ["open 0", "open 1", *(f"open {name}" for name in DIRECT)]
    assert free(world.lanes)
    assert not settling(world.lanes)


def test_lanes_take_turns_and_the_next_is_free_once_the_flush_before_is_noted(world: World) -> None:
    lanes = world.lanes
    writers: list[Any] = [lanes.current]
    first = world.cut(1)
    writers.append(lanes.current)
    assert [writer.lane for writer in writers] == [0, 1]
    assert not free(lanes), "its records could mix with the first batch's"
    world.gate("flush 0").open()
    flushed(first)
    assert not free(lanes), "the batch's ends are not in the frontiers yet"
    assert settling(lanes)
    assert seqs(lanes.acknowledged()) == [1]
    assert free(lanes)
    assert not settling(lanes)
    world.cut(2)
    assert not free(lanes), "both are on their way"
    for step in ("commit 0", "flush 1", "commit 1"):
        world.gate(step).open()
    ended(first)
    assert seqs(lanes.committed()) == [1]
    assert lanes.current is writers[0]


def test_who_has_ended_last_is_next_and_the_rest_wait_for_a_time_of_need(world: World) -> None:
    lanes = world.use(4)
    for seq in range(1, 6):
        batch = world.cut(seq)
        writer: Any = batch.publisher
        lane = writer.lane
        for step in ("flush", "commit"):
            world.gate(f"{step} {lane}").open()
        ended(batch)
        assert seqs(lanes.acknowledged()) == seqs(lanes.committed()) == [seq]
    assert [step for step in world.done if "flush" in step] == [
        f"flush {lane}" for lane in (0, 1, 0, 1, 0)
    ]


def test_a_third_batch_waits_for_the_first_ones_commit(world: World) -> None:
    lanes = world.lanes
    batches = [world.cut(1)]
    world.gate("flush 0").open()
    flushed(batches[0])
    assert seqs(lanes.acknowledged()) == [1]
    batches.append(world.cut(2))
    world.gate("flush 1").open()
    flushed(batches[1])
    assert seqs(lanes.acknowledged()) == [2]
    assert not free(lanes), "the writer whose turn it is still commits"
    world.gate("commit 0").open()
    ended(batches[0])
    assert settling(lanes)
    assert seqs(lanes.committed()) == [1]
    assert free(lanes)
    assert not settling(lanes)


def test_a_later_batch_never_commits_before_an_earlier_one(world: World) -> None:
    """The second is flushed and ready, while the first one's commit takes long."""
    lanes = world.lanes
    first = world.cut(1)
    world.gate("flush 0").open()
    flushed(first)
    assert seqs(lanes.acknowledged()) == [1]
    second = world.cut(2)
    world.gate("flush 1").open()
    flushed(second)
    world.gate("commit 1").open()
    assert world.gate("commit 0").reached()
    assert not world.gate("commit 1").reached(0.05), "the second commit has begun"
    assert world.done == ["flush 0", "flush 1"]
    world.gate("commit 0").open()
    ended(second)
    assert world.done == ["flush 0", "flush 1", "commit 0", "commit 1"]
    assert seqs(lanes.acknowledged()) == [2]
    assert seqs(lanes.committed()) == [1, 2]
    assert not lanes.in_flight


@pytest.mark.parametrize("count", [2, LANES])
def test_a_hundred_batches_in_turn_flush_and_commit_in_their_order(
    count: int, world: World
) -> None:
    """The loop's own order of calls, with all threads running freely."""
    lanes = world.use(count)
    gates = [world.gate(f"{what} {lane}") for lane in range(count) for what in _STEPS]
    noted: dict[str, list[int]] = {"acknowledged": [], "committed": []}
    seq = 0
    turns = []

    def turn() -> bool:
        nonlocal seq
        noted["acknowledged"] += seqs(lanes.acknowledged())
        noted["committed"] += seqs(lanes.committed())
        assert len(lanes.in_flight) <= count
        if free(lanes) and seq < 100:
            seq += 1
            writer: Any = world.cut(seq).publisher
            turns.append(writer.lane)
        for gate in gates:
            if gate.reached(0):
                gate.open()
        return len(noted["committed"]) == 100

    wait_until(turn, "it does not end", _SECONDS, pause=0.0005)
    assert noted["acknowledged"] == noted["committed"] == list(range(1, 101))
    for what in _STEPS:
        order = [f"{what} {lane}" for lane in turns]
        assert [step for step in world.done if what in step] == order


# -- what the loop has noted, whatever the threads do in between -----------------------------------


def test_a_commit_is_told_only_after_its_acknowledgement(world: World) -> None:
    """Flush and commit both end between two checks of the loop: neither end must be skipped."""
    lanes = world.lanes
    first = world.cut(1)
    assert seqs(lanes.acknowledged()) == []
    world.gate("flush 0").open()
    world.gate("commit 0").open()
    ended(first)
    assert seqs(lanes.committed()) == []
    assert settling(lanes), "nobody would look again"
    assert seqs(lanes.acknowledged()) == [1]
    assert seqs(lanes.committed()) == [1]
    assert seqs(lanes.acknowledged()) == []
    assert free(lanes)


def test_both_batches_ended_at_once_are_told_once_each_and_in_order(world: World) -> None:
    lanes = world.lanes
    first = world.cut(1)
    world.gate("flush 0").open()
    flushed(first)
    assert seqs(lanes.acknowledged()) == [1]
    second = world.cut(2)
    for name in ("commit 0", "flush 1", "commit 1"):
        world.gate(name).open()
    ended(second)
    assert seqs(lanes.committed()) == [1], "the second's ends are not noted"
    assert seqs(lanes.acknowledged()) == [2]
    assert seqs(lanes.committed()) == [2]


# -- errors ----------------------------------------------------------------------------------------

_LOST = UnavailableError("the broker is gone", hint="wait")


def test_a_batch_that_cannot_be_sent_is_aborted_and_says_why(world: World) -> None:
    first = world.cut(1)
    world.gate("flush 0").open(_LOST)
    ended(first)
    assert world.done == ["abort 0"]
    assert settling(world.lanes)
    assert not free(world.lanes), "the next would be written on ground that is gone"
    with pytest.raises(UnavailableError, match="the broker is gone"):
        seqs(world.lanes.acknowledged())


@pytest.mark.parametrize("error", [_LOST, FencedError("fenced", hint="another writes")], ids=str)
def test_what_follows_a_commit_that_failed_is_aborted_and_never_committed(
    world: World, error: CDCError
) -> None:
    lanes = world.lanes
    first = world.cut(1)
    world.gate("flush 0").open()
    flushed(first)
    assert seqs(lanes.acknowledged()) == [1]
    second = world.cut(2)
    world.gate("flush 1").open()
    flushed(second)
    world.gate("commit 1").open()
    world.gate("commit 0").open(error)
    ended(second)
    assert world.done == ["flush 0", "flush 1", "abort 1"]
    for batch in (first, second):
        assert batch.ended.exception() is error
    assert seqs(lanes.acknowledged()) == [2]
    with pytest.raises(type(error)):
        seqs(lanes.committed())


def test_what_follows_a_batch_that_could_not_be_sent_is_aborted(world: World) -> None:
    """Its own flush succeeded, and started before the first one's was known to have failed."""
    first = world.cut(1)
    second = world.cut(2)  # the loop never does this: it checks `free`
    world.gate("flush 1").open()
    flushed(second)
    world.gate("flush 0").open(_LOST)
    ended(first)
    ended(second)
    assert sorted(world.done) == ["abort 0", "abort 1", "flush 1"]


def test_a_second_batch_that_cannot_be_sent_leaves_the_first_alone(world: World) -> None:
    lanes = world.lanes
    first = world.cut(1)
    world.gate("flush 0").open()
    flushed(first)
    assert seqs(lanes.acknowledged()) == [1]
    second = world.cut(2)
    world.gate("flush 1").open(_LOST)
    ended(second)
    world.gate("commit 0").open()
    ended(first)
    assert world.done == ["flush 0", "abort 1", "commit 0"]
    with pytest.raises(UnavailableError):
        seqs(lanes.acknowledged())
    assert seqs(lanes.committed()) == [1], "it is in the log, and may be confirmed"


def test_abandoned_lanes_tell_both_writers(world: World) -> None:
    world.lanes.abandon()
    writers: list[Any] = [lane.large for lane in world.lanes._lanes]
    assert [writer.abandoned for writer in writers] == [True, True]


@pytest.mark.parametrize(
    ("direct", "copies", "wanted"),
    [("auto", 1, False), ("auto", 2, True), ("on", 1, True), ("off", 3, False)],
)
def test_small_batches_have_writers_of_their_own_where_topics_have_more_than_one_copy(
    direct: Literal["auto", "on", "off"], copies: int, *, wanted: bool
) -> None:
    made = Log(bootstrap_servers="nowhere", direct=direct, replication_factor=copies)
    assert wants_direct(made) is wanted
