"""The producer pool: flushes and commits in turn; an error also fails what follows it.

Real workers with writers that wait where the test says: each step of each producer is released by
name, so that every order in which the two threads may run can be tested.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest

from cdc.config.keyring import KeyringConfig
from cdc.config.model import Log
from cdc.errors import CDCError, FencedError, InvariantError, UnavailableError
from cdc.log import producer_pool as pool_module
from cdc.log.batch import Batch, BatchContents
from cdc.log.direct.publisher import DirectPublisher
from cdc.log.producer_pool import WIDE_BYTES, WIDE_PARTITIONS, InFlight, ProducerPool, sends_small
from cdc.log.publisher import DIRECT, PRODUCERS
from cdc.runtime.background import BackgroundThread
from tests.fixtures.daemon import wait_until
from tests.property.stream import position

# Each step takes a moment; the rest is for a busy machine.
_SECONDS = 60.0
_STEPS = ("flush", "commit")
_GATES = (*_STEPS, "close")
_OVER = InvariantError("the test is over")


class Gate:
    """One step of one producer, which each time waits for a separate `open`, in any order.

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

    started = False

    def __init__(self, world: World, name: int | str, *, transaction_seconds: int = 60) -> None:
        assert transaction_seconds
        self.world = world
        self.name = name
        self.abandoned = False

    def _step(self, what: str) -> None:
        name = f"{what} {self.name}"
        if self.world.over:
            raise _OVER
        self.world.gate(name).go_through()
        self.world.done.append(name)

    def open(self) -> None:
        self.world.done.append(f"open {self.name}")

    def flush(self) -> None:
        self._step("flush")

    def commit(self) -> None:
        self._step("commit")

    def begin(self) -> None:
        self.started = True

    def abort(self) -> None:
        self.world.done.append(f"abort {self.name}")

    def abandon(self) -> None:
        self.abandoned = True

    def close(self) -> None:
        self._step("close")


class World:
    """One test's pool, and their steps in the order in which these ended."""

    # This also stands in for the writers' configuration.
    log = SimpleNamespace(direct="off", replication_factor=1)
    keyring = KeyringConfig()

    def __init__(self) -> None:
        self.done: list[str] = []
        self.over = False
        self._gates = {f"{what} {number}": Gate() for number in range(PRODUCERS) for what in _GATES}
        self._workers: list[BackgroundThread] = []
        self.pool = self.use(2)

    def use(self, count: int) -> ProducerPool:
        workers = [BackgroundThread() for _ in range(count)]
        self._workers += workers
        self.pool = ProducerPool(self, workers)  # type: ignore[arg-type]
        return self.pool

    def gate(self, name: str) -> Gate:
        return self._gates[name]

    def commit(self, seq: int) -> InFlight:
        """Start the commit of a batch; its seq names it."""
        self.pool.commit(position(seq=seq), BatchContents(1, 10, None), time.monotonic())
        return self.pool.in_flight[-1]

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
    monkeypatch.setattr(pool_module, "Publisher", FakePublisher)
    found = World()
    yield found
    found.end()


def free(pool: ProducerPool) -> bool:
    return pool.free


def has_results(pool: ProducerPool) -> bool:
    return pool.has_results


def seqs(batches: Iterator[InFlight]) -> list[int]:
    return [batch.position.seq for batch in batches]


def ended(batch: InFlight) -> None:
    wait_until(batch.ended.done, "the commit does not end", _SECONDS, pause=0.001)


def flushed(batch: InFlight) -> None:
    wait_until(batch.flushed.done, "the flush does not end", _SECONDS, pause=0.001)


# -- turns -----------------------------------------------------------------------------------------


def test_a_start_opens_every_producer_before_any_is_used(world: World) -> None:
    world.pool.open()
    # Including those of small batches, which an older daemon may have.
    assert world.done == ["open 0", "open 1", *(f"open {name}" for name in DIRECT)]
    assert free(world.pool)
    assert not has_results(world.pool)


def test_producers_take_turns_and_the_next_is_free_once_the_last_flush_is_noted(
    world: World,
) -> None:
    pool = world.pool
    writers: list[Any] = [pool.current]
    first = world.commit(1)
    writers.append(pool.current)
    assert [writer.name for writer in writers] == [0, 1]
    assert not free(pool), "its records could mix with the first batch's"
    world.gate("flush 0").open()
    flushed(first)
    assert not free(pool), "the batch's ends are not in the frontiers yet"
    assert has_results(pool)
    assert seqs(pool.acknowledged()) == [1]
    assert free(pool)
    assert not has_results(pool)
    world.commit(2)
    assert not free(pool), "both are in flight"
    for step in ("commit 0", "flush 1", "commit 1"):
        world.gate(step).open()
    ended(first)
    assert seqs(pool.committed()) == [1]
    assert pool.current is writers[0]


def test_the_producer_that_ended_last_is_next_and_the_rest_stay_idle(world: World) -> None:
    pool = world.use(4)
    for seq in range(1, 6):
        batch = world.commit(seq)
        writer: Any = batch.publisher
        number = writer.name
        for step in ("flush", "commit"):
            world.gate(f"{step} {number}").open()
        ended(batch)
        assert seqs(pool.acknowledged()) == seqs(pool.committed()) == [seq]
    assert [step for step in world.done if "flush" in step] == [
        f"flush {number}" for number in (0, 1, 0, 1, 0)
    ]


def test_a_third_batch_waits_for_the_commit_of_the_first(world: World) -> None:
    pool = world.pool
    batches = [world.commit(1)]
    world.gate("flush 0").open()
    flushed(batches[0])
    assert seqs(pool.acknowledged()) == [1]
    batches.append(world.commit(2))
    world.gate("flush 1").open()
    flushed(batches[1])
    assert seqs(pool.acknowledged()) == [2]
    assert not free(pool), "the writer whose turn it is still commits"
    world.gate("commit 0").open()
    ended(batches[0])
    assert has_results(pool)
    assert seqs(pool.committed()) == [1]
    assert free(pool)
    assert not has_results(pool)


def test_a_later_batch_never_commits_before_an_earlier_one(world: World) -> None:
    """The second is flushed and ready, while the first one's commit takes long."""
    pool = world.pool
    first = world.commit(1)
    world.gate("flush 0").open()
    flushed(first)
    assert seqs(pool.acknowledged()) == [1]
    second = world.commit(2)
    world.gate("flush 1").open()
    flushed(second)
    world.gate("commit 1").open()
    assert world.gate("commit 0").reached()
    assert not world.gate("commit 1").reached(0.05), "the second commit has started"
    assert world.done == ["flush 0", "flush 1"]
    world.gate("commit 0").open()
    ended(second)
    assert world.done == ["flush 0", "flush 1", "commit 0", "commit 1"]
    assert seqs(pool.acknowledged()) == [2]
    assert seqs(pool.committed()) == [1, 2]
    assert not pool.in_flight


@pytest.mark.parametrize("count", [2, PRODUCERS])
def test_a_hundred_batches_in_turn_flush_and_commit_in_their_order(
    count: int, world: World
) -> None:
    """The loop's own order of calls, with all threads running freely."""
    pool = world.use(count)
    gates = [world.gate(f"{what} {number}") for number in range(count) for what in _STEPS]
    noted: dict[str, list[int]] = {"acknowledged": [], "committed": []}
    seq = 0
    turns = []

    def turn() -> bool:
        nonlocal seq
        noted["acknowledged"] += seqs(pool.acknowledged())
        noted["committed"] += seqs(pool.committed())
        assert len(pool.in_flight) <= count
        if free(pool) and seq < 100:
            seq += 1
            writer: Any = world.commit(seq).publisher
            turns.append(writer.name)
        for gate in gates:
            if gate.reached(0):
                gate.open()
        return len(noted["committed"]) == 100

    wait_until(turn, "it does not end", _SECONDS, pause=0.0005)
    assert noted["acknowledged"] == noted["committed"] == list(range(1, 101))
    for what in _STEPS:
        order = [f"{what} {number}" for number in turns]
        assert [step for step in world.done if what in step] == order


# -- what the loop has noted, whatever the threads do in between -----------------------------------


def test_a_commit_is_reported_only_after_its_acknowledgement(world: World) -> None:
    """Flush and commit both end between two checks of the loop: neither end must be skipped."""
    pool = world.pool
    first = world.commit(1)
    assert seqs(pool.acknowledged()) == []
    world.gate("flush 0").open()
    world.gate("commit 0").open()
    ended(first)
    assert seqs(pool.committed()) == []
    assert has_results(pool), "the loop would not poll again"
    assert seqs(pool.acknowledged()) == [1]
    assert seqs(pool.committed()) == [1]
    assert seqs(pool.acknowledged()) == []
    assert free(pool)


def test_both_batches_ended_at_once_are_reported_once_each_and_in_order(world: World) -> None:
    pool = world.pool
    first = world.commit(1)
    world.gate("flush 0").open()
    flushed(first)
    assert seqs(pool.acknowledged()) == [1]
    second = world.commit(2)
    for name in ("commit 0", "flush 1", "commit 1"):
        world.gate(name).open()
    ended(second)
    assert seqs(pool.committed()) == [1], "the second's ends are not noted"
    assert seqs(pool.acknowledged()) == [2]
    assert seqs(pool.committed()) == [2]


# -- errors ----------------------------------------------------------------------------------------

_LOST = UnavailableError("the broker is down", hint="wait")


def test_a_batch_that_cannot_be_sent_is_aborted_and_raises_why(world: World) -> None:
    first = world.commit(1)
    world.gate("flush 0").open(_LOST)
    ended(first)
    assert world.done == ["abort 0"]
    assert has_results(world.pool)
    assert not free(world.pool), "the next would follow a batch that was not sent"
    with pytest.raises(UnavailableError, match="the broker is down"):
        seqs(world.pool.acknowledged())


def test_a_batch_whose_keys_are_not_on_disk_is_aborted_and_raises_why(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_durable() -> None:
        raise UnavailableError("the disk is full", hint="free some space")

    ciphers = SimpleNamespace(make_durable=make_durable)
    monkeypatch.setattr(pool_module, "ciphers_of", lambda _: ciphers)
    world.use(2)
    first = world.commit(1)
    world.gate("flush 0").open()
    ended(first)
    assert world.done == ["flush 0", "abort 0"]
    with pytest.raises(UnavailableError, match="the disk is full"):
        first.ended.result(_SECONDS)


@pytest.mark.parametrize("error", [_LOST, FencedError("fenced", hint="another writes")], ids=str)
def test_what_follows_a_commit_that_failed_is_aborted_and_never_committed(
    world: World, error: CDCError
) -> None:
    pool = world.pool
    first = world.commit(1)
    world.gate("flush 0").open()
    flushed(first)
    assert seqs(pool.acknowledged()) == [1]
    second = world.commit(2)
    world.gate("flush 1").open()
    flushed(second)
    world.gate("commit 1").open()
    world.gate("commit 0").open(error)
    ended(second)
    assert world.done == ["flush 0", "flush 1", "abort 1"]
    for batch in (first, second):
        assert batch.ended.exception() is error
    assert seqs(pool.acknowledged()) == [2]
    with pytest.raises(type(error)):
        seqs(pool.committed())


def test_what_follows_a_batch_that_could_not_be_sent_is_aborted(world: World) -> None:
    """Its own flush succeeded, and started before the first one's was known to have failed."""
    first = world.commit(1)
    second = world.commit(2)  # the loop never does this: it checks `free`
    world.gate("flush 1").open()
    flushed(second)
    world.gate("flush 0").open(_LOST)
    ended(first)
    ended(second)
    assert sorted(world.done) == ["abort 0", "abort 1", "flush 1"]


def test_a_second_batch_that_cannot_be_sent_leaves_the_first_alone(world: World) -> None:
    pool = world.pool
    first = world.commit(1)
    world.gate("flush 0").open()
    flushed(first)
    assert seqs(pool.acknowledged()) == [1]
    second = world.commit(2)
    world.gate("flush 1").open(_LOST)
    ended(second)
    world.gate("commit 0").open()
    ended(first)
    assert world.done == ["flush 0", "abort 1", "commit 0"]
    with pytest.raises(UnavailableError):
        seqs(pool.acknowledged())
    assert seqs(pool.committed()) == [1], "it is in the log, and may be confirmed"


def test_an_abandoned_pool_abandons_both_writers(world: World) -> None:
    world.pool.abandon()
    writers: list[Any] = [number.large for number in world.pool.producers]
    assert [writer.abandoned for writer in writers] == [True, True]


def test_an_abandoned_pool_ends_the_open_transaction_of_a_batch_that_was_sent_in_part(
    world: World,
) -> None:
    """On its worker, since that may block; what is in flight ends its own."""
    pool = world.pool
    pool.begin(None)
    first = world.commit(1)
    pool.begin(None)
    world.gate("flush 0").open()
    flushed(first)
    pool.abandon()
    assert "close 1" not in world.done
    assert world.gate("close 1").reached()
    for step in ("close 1", "commit 0"):
        world.gate(step).open()
    ended(first)
    wait_until(lambda: "close 1" in world.done, "it is not closed", _SECONDS, pause=0.001)
    assert "close 0" not in world.done


@pytest.mark.parametrize(
    ("direct", "copies", "wanted"),
    [("auto", 1, False), ("auto", 2, True), ("on", 1, True), ("off", 3, False)],
)
def test_small_batches_are_written_directly_where_topics_have_more_than_one_copy(
    direct: Literal["auto", "on", "off"], copies: int, *, wanted: bool
) -> None:
    made = Log(bootstrap_servers="nowhere", direct=direct, replication_factor=copies)
    assert sends_small(made) is wanted


def filled(partitions: int, size: int) -> Batch:
    """Return a batch with a message in each of so many partitions, of `size` bytes in all."""
    batch = Batch()
    for partition in batch.topic("t", partitions):
        partition.append({"key": b"k", "value": b"v"})
    batch.bytes = size
    return batch


@pytest.mark.parametrize(
    ("partitions", "size", "directly"),
    [
        (WIDE_PARTITIONS, 100 * WIDE_PARTITIONS, False),  # small, and topics have one copy
        (WIDE_PARTITIONS, 60_000 * WIDE_PARTITIONS, True),
        (WIDE_PARTITIONS - 1, 60_000 * WIDE_PARTITIONS, False),  # few partitions
        (WIDE_PARTITIONS, 70_000 * WIDE_PARTITIONS, False),  # much for each
        (10 * WIDE_PARTITIONS, WIDE_BYTES + 1, False),  # much in all
    ],
)
def test_a_batch_with_little_for_each_of_many_partitions_is_written_directly(
    partitions: int, size: int, *, directly: bool, world: World
) -> None:
    for producer in world.pool.producers:
        producer.direct = cast("DirectPublisher", FakePublisher(world, "direct"))
    world.pool.begin(filled(partitions, size))
    assert (world.pool.current is not world.pool.large) is directly


def test_a_batch_that_may_grow_is_left_to_librdkafka(world: World) -> None:
    for producer in world.pool.producers:
        producer.direct = cast("DirectPublisher", FakePublisher(world, "direct"))
    world.pool.begin(None)
    assert world.pool.current is world.pool.large
