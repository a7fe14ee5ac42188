"""A generation that does not read the log from its beginning: where it starts."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from cdc.config import Config, Log, Source
from cdc.events import LSN
from lockstep.conformance.memory import STORES, MemorySink
from lockstep.jobs.generations import builders
from lockstep.jobs.generations.builders import LogBuilder
from lockstep.sinks.contract import Applied

CONFIG = Config(pipeline="shop", source=Source(dsn=""), log=Log(bootstrap_servers=""))


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
