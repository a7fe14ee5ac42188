"""A generation that does not read the log from its beginning: where it starts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from cdc.config import Config, Log, Source
from cdc.events import LSN
from cdc.log import reader
from cdc.log.frontier_search import Placed
from cdc.log.partitions import Partition
from cdc.log.records import FrontierRecord
from lockstep.conformance.memory import STORES, MemorySink
from lockstep.jobs.generations import builders
from lockstep.jobs.generations.builders import LogBuilder, frontier_of_now
from lockstep.sinks.contract import Applied

CONFIG = Config(pipeline="shop", source=Source(dsn=""), log=Log(bootstrap_servers=""))
USERS: Partition = ("shop.public.users", 0)


class GrowingLog:
    """A log to which an event and an older frontier are added once offsets were read."""

    def __init__(self) -> None:
        self.events, self.frontiers = 3, [3]
        self._steps = iter((self._grow, lambda: None))

    def _grow(self) -> None:
        self.events += 1
        self.frontiers.append(3)  # of a transaction that changed another table

    def end_offsets(self, _: Config, parts: Collection[Partition]) -> dict[Partition, int]:
        """Return the ends, and grow after the first call."""
        ends = {USERS: self.events, ("shop.cdc.frontier", 0): len(self.frontiers)}
        found = {each: ends.get(each, 0) for each in parts}
        next(self._steps)()
        return found

    def newest(self) -> Placed:
        seq = self.frontiers[-1]
        record = FrontierRecord(
            pipeline="shop", epoch=1, lsn=LSN(seq), seq=seq, committed_at_us=0, partitions=()
        )
        return Placed(record, len(self.frontiers) - 1, 0)

    def ends(self, placed: Placed) -> dict[Partition, int]:
        """Return what records name: up to seq 3 none remains that names the partition."""
        return {USERS: 4} if placed.record.seq == 4 else {}

    def close(self) -> None:
        """Do nothing."""

    def commit(self, _: float) -> None:
        """Add the frontier of the event: the daemon, while this process sleeps."""
        self.frontiers.append(4)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> GrowingLog:
    made = GrowingLog()
    resume = [SimpleNamespace(partitions={USERS[0]: 1})]
    monkeypatch.setattr(reader, "read_resume", lambda _: resume)
    monkeypatch.setattr(reader, "end_offsets", made.end_offsets)
    monkeypatch.setattr(builders, "FrontierFinder", lambda _: made)
    monkeypatch.setattr(builders, "time", Mock(monotonic=lambda: 0.0, sleep=made.commit))
    return made


def test_a_current_frontier_has_no_ends_above_it(log: GrowingLog) -> None:
    """A partition's end is not read after the frontier that it must be below."""
    found = frontier_of_now(CONFIG, 2)
    assert (found.generation, found.seq, found.ends[USERS[0]]) == (2, 4, (4,))
    assert log.events == 4


@pytest.fixture
def sink(request: pytest.FixtureRequest) -> Iterator[MemorySink]:
    yield MemorySink(request.node.nodeid)
    STORES.pop(request.node.nodeid, None)


def test_a_store_is_never_at_a_frontier_without_rows_unless_a_cut_is_under_way(
    sink: MemorySink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed right after it was emptied, it would seem to have everything up to there."""
    start = Applied("shop", 2, 1, LSN(50), 50, 0, 50, {})
    monkeypatch.setattr(builders, "frontier_of_now", lambda *_: start)
    builder: Any = LogBuilder(CONFIG, "cache", Mock(), Mock())
    builder._archive = Mock(start=lambda *_, **__: None)
    builder._is_shortened = lambda: True
    builder._wanted = lambda _: (["public.users"], True)
    builder._snapshot = Mock()
    builder._target = lambda _: SimpleNamespace(seq=80)
    builder.forward = lambda *_: start
    reached = list[int]()
    commit = sink.commit

    def checked(applied: Applied) -> None:
        state = sink.open()
        reached.append(state.reached if state else 0)
        commit(applied)

    monkeypatch.setattr(sink, "commit", checked)
    builder.refill(sink, 2, lambda: sink.start_over(2))
    assert reached == [80]
    state = sink.open()
    assert state is not None
    assert (state.applied, state.reached) == (start, 80)
