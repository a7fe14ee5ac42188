"""Some schedules in every test run; and the simulator finds planted bugs.

LOCKSTEP_SCHEDULES is their number, LOCKSTEP_SEED the first one; `make campaign` runs 100,000.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast
from unittest import mock

import pytest
from confluent_kafka import KafkaException

from cdc.daemon.pipeline import Pipeline
from cdc.decode.frames import PADDING
from cdc.log import absence, reader, resume
from cdc.log.frontiers import FrontierCounts
from cdc.log.producer_pool import ProducerPool
from cdc.log.publisher import Publisher
from cdc.sequence.sequencer import Sequencer
from cdc.snapshot.initial import due
from cdc.source.stream import Stream
from tests.fixtures.seeds import first_seed
from tests.simulation.run import BrokenError, run
from tests.simulation.world import World

_SCHEDULES = int(os.environ.get("LOCKSTEP_SCHEDULES", "500"))
_FIRST = first_seed("LOCKSTEP_SCHEDULES")
# Every planted mistake shows within this many schedules.
_ENOUGH = 1_500


def test_whatever_happens_the_log_is_the_stream_up_to_some_point() -> None:
    outcome = run(_FIRST, _SCHEDULES)
    assert outcome.schedules == _SCHEDULES
    assert outcome.sessions > _SCHEDULES, "nothing ever went wrong"


def test_a_schedule_is_the_same_every_time() -> None:
    assert run(40, 40) == run(40, 40)


# -- the simulator finds planted bugs --------------------------------------------------------------

_commit_batch, _begin, _poll_commits = (
    Pipeline.commit_batch,
    Sequencer.begin,
    Pipeline.poll_commits,
)
_commit, _keep, _acknowledged = ProducerPool.commit, Stream.keep, FrontierCounts.acknowledged
_start, _frontiers = Pipeline.start, FrontierCounts.__init__


def _confirm_before_the_commit(self: Pipeline, *idle: Any) -> None:  # noqa: ANN401 - passed on
    _commit_batch(self, *idle)
    self.stream.confirm(self.producers.in_flight[-1].position.end_lsn)


def _commit_in_any_order(self: ProducerPool, *batch: Any) -> None:  # noqa: ANN401 - passed on
    waiting, self.in_flight = self.in_flight, deque()
    _commit(self, *batch)
    waiting += self.in_flight
    self.in_flight = waiting


def _skip_one_more(self: Sequencer, *begin: Any) -> None:  # noqa: ANN401 - passed on
    _begin(self, *begin)
    self._skip += 0 < self._skip < 1_000


def _skip_one_less(self: Sequencer, *begin: Any) -> None:  # noqa: ANN401 - passed on
    _begin(self, *begin)
    self._skip -= 0 < self._skip < 1_000


def _forget_what_is_pending(self: FrontierCounts, *resume: Any) -> None:  # noqa: ANN401 - passed on
    _frontiers(self, *resume)
    self._pending.clear()


def _report_ends_too_low(self: FrontierCounts, position: Any, ends: dict[Any, int]) -> None:  # noqa: ANN401
    _acknowledged(self, position, {place: max(end - 1, -1) for place, end in ends.items()})


def _trust_a_commit_without_answer(self: Publisher) -> None:
    with suppress(KafkaException):
        self.producer.commit_transaction(1.0)
    self.started = False


def _fence_one_producer_only(self: ProducerPool) -> None:
    self.producers[0].large.open()
    for pooled in self.producers[1:]:
        broker, producer = World.current.broker, cast("Any", pooled.large).producer
        producer.epoch = broker.epochs.setdefault(producer.writer, 1)


def _read_the_resume_record_before_fencing(self: Pipeline) -> None:
    stale = World.current.resume()
    with (
        mock.patch.object(reader, "read_resume", return_value=stale),
        mock.patch.object(due, "expect_done"),
    ):
        _start(self)


def _lose_the_rest_of_a_chunk(self: Stream, chunk: bytes, at: int) -> None:
    _keep(self, chunk, at if len(chunk) - at < 90 else len(chunk) - len(PADDING))


def _confirm_the_keepalive(self: Pipeline) -> None:
    _poll_commits(self)
    self.stream.confirm(self.stream.keepalive_lsn)


_MUTANTS: list[tuple[type, str, Callable[..., Any]]] = [
    (Pipeline, "commit_batch", _confirm_before_the_commit),
    (ProducerPool, "commit", _commit_in_any_order),
    (Sequencer, "begin", _skip_one_more),
    (Sequencer, "begin", _skip_one_less),
    (FrontierCounts, "__init__", _forget_what_is_pending),
    (FrontierCounts, "acknowledged", _report_ends_too_low),
    (Publisher, "commit", _trust_a_commit_without_answer),
    (Pipeline, "start", _read_the_resume_record_before_fencing),
    (Stream, "keep", _lose_the_rest_of_a_chunk),
    (Pipeline, "poll_commits", _confirm_the_keepalive),
]


# -- wrong answers to lookups: the effect of trusting a single answer ------------------------------


def test_it_finds_what_one_answer_hid_when_it_was_believed() -> None:
    """An unknown topic was read as a missing one: no snapshot was due, so it streamed."""
    believed = mock.patch.object(absence, "absent", return_value={"the topic"})
    alone = mock.patch.object(due, "expect_done", return_value=None)
    with believed, alone, pytest.raises(BrokenError, match=r"initial snapshot|resume record"):
        run(0, _ENOUGH)


def test_it_finds_what_one_stale_end_hid_when_it_was_believed() -> None:
    """An outdated end gives an outdated resume record: its changes were published again."""
    believed = mock.patch.object(absence, "confirmed", lambda _, first: first)
    alone = mock.patch.object(resume, "expect_not_older", return_value=None)
    with believed, alone, pytest.raises(BrokenError):
        run(0, _ENOUGH)


def test_it_finds_what_a_writer_that_was_not_fenced_committed_later() -> None:
    """Its open transaction hid the newest resume record, and was not waited for."""
    unfenced = mock.patch.object(ProducerPool, "open", _fence_one_producer_only)
    hasty = mock.patch.object(reader, "read_last_resume", reader.read_resume)
    with unfenced, hasty, pytest.raises(BrokenError):
        run(0, _ENOUGH)


@pytest.mark.parametrize("mutant", _MUTANTS, ids=lambda one: one[2].__name__.strip("_"))
def test_it_finds(mutant: tuple[type, str, Callable[..., Any]]) -> None:
    owner, name, wrong = mutant
    with mock.patch.object(owner, name, wrong), pytest.raises(BrokenError):
        run(0, _ENOUGH)
