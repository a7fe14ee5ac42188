"""OpenSearch is killed during writes, and comes back with what it had acknowledged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from threading import Timer

import pytest

from cdc.errors import SwitchedError, UnavailableError
from cdc.playground.servers.stack import LocalStack
from lockstep.conformance.store import USERS, applied, change, key, row
from lockstep.sinks.contract import Change, Changes
from lockstep.sinks.opensearch.sink import OpenSearchSink
from tests.fixtures.store_opensearch import OpenSearchStore

pytestmark = pytest.mark.long("a minute; the followers campaign kills servers")

_PATIENCE_SECONDS = 180


@pytest.fixture
def server(stack_home: Path) -> Iterator[LocalStack]:
    """A server for this test only."""
    stack = LocalStack(stack_home, tied=True)
    stack.up(["opensearch"])
    yield stack
    stack.down()


def cut(seq: int, size: int = 2_000) -> Changes:
    """Return changes up to `seq`, some of them deletes."""
    chance = Random(seq)
    changes = list[Change]()
    for number in chance.sample(range(2 * size), size):
        deleted = chance.random() < 0.2
        at = seq - size + len(changes) + 1
        changes.append(change(USERS, at, None if deleted else row(USERS, at, number), number))
    return Changes((USERS,), changes)


@pytest.mark.slow
def test_a_server_killed_in_the_middle_of_cuts_ends_equal(server: LocalStack) -> None:
    """As the follower does: after UnavailableError the sink is opened and the cut written again."""
    url = server.endpoints().opensearch_url
    assert url is not None
    store = OpenSearchStore(url)
    cuts = [cut(2_000 * n) for n in range(1, 6)]
    timers = list[Timer]()
    sink, at, failures = store.sink(), 0, 0
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while at < len(cuts):
        assert time.monotonic() < deadline
        try:
            reached = opened_at(sink)
            # A started cut must be reached before the store is at a frontier again.
            assert reached <= 2_000 * (at + 1)
            for each in cuts[at:]:
                if at == 2 and not timers:
                    timers.append(Timer(0.1, server["opensearch"].kill))
                    timers[-1].start()
                seq = 2_000 * (at + 1)
                sink.begin(seq, [USERS])
                sink.write(each)
                sink.commit(applied(seq))
                at += 1
        except (UnavailableError, SwitchedError):
            failures += 1
            if timers and not timers[-1].is_alive():
                server.start("opensearch")
            time.sleep(0.2)
    sink.close()
    assert failures
    wanted = {}
    for each in cuts:
        for made in each.changes:
            wanted[made.key] = made.row
    fresh = store.sink()
    state = fresh.open()
    assert state is not None
    assert (state.applied, state.reached) == (applied(10_000), 10_000)
    found = {at: made for at, _, made in fresh.contents(USERS)}
    assert found == {at: made for at, made in wanted.items() if made is not None}
    assert key(USERS, 0) in wanted
    fresh.close()


def opened_at(sink: OpenSearchSink) -> int:
    state = sink.open()
    return state.reached if state else 0
