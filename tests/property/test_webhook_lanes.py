"""Webhooks' order: whatever a receiver refuses, each key's events arrive in order, once done."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.deliver.lanes import KeyedEvent, Lane, Lanes, Sending
from cdc.log.groups import GroupProgress


def event(lane: int, offset: int) -> KeyedEvent:
    return KeyedEvent(lane, "t", 0, offset, b"{}")


def taken(lanes: Lanes, now: float) -> Iterator[Sending]:
    """Yield all that may be sent now."""
    for alone in (True, False):
        while (sending := lanes.take(now, alone=alone)) is not None:
            yield sending


@given(
    keys=st.lists(st.integers(0, 6), max_size=60),
    batch=st.integers(1, 8),
    refused=st.sets(st.integers(0, 6)),
    chance=st.randoms(use_true_random=False),
)
def test_keys_keep_their_order_and_a_refused_one_holds_up_no_other(
    keys: list[int], batch: int, refused: set[int], chance: Random
) -> None:
    """Requests end in any order and fail by chance; those with an event of `refused` always do."""
    lanes, running, arrived = Lanes(batch), list[Sending](), defaultdict[int, list[int]](list)
    for offset, key in enumerate(keys):
        lanes.add(event(key, offset))
    now, never = 0.0, sum(key in refused for key in keys)
    while lanes.held > never:
        running += taken(lanes, now)
        if not running:
            assert lanes.next_at is not None, "what is not sent waits"
            now = lanes.next_at
            continue
        sending = running.pop(chance.randrange(len(running)))
        assert len(sending.events) <= batch
        if any(each.lane in refused for each in sending.events) or chance.random() < 0.3:
            lanes.failed(sending, now)
            continue
        for each in sending.events:
            arrived[keys[each.offset]].append(each.offset)
        lanes.delivered(sending)
    expected = defaultdict[int, list[int]](list)
    for offset, key in enumerate(keys):
        if key not in refused:
            expected[key].append(offset)
    assert arrived == expected


@given(
    keys=st.lists(st.integers(0, 4), max_size=40),
    batch=st.integers(1, 8),
    refused=st.sets(st.integers(0, 4)),
    attempts=st.integers(1, 3),
    chance=st.randoms(use_true_random=False),
)
def test_what_is_given_up_is_sent_no_more_and_the_keys_next_event_follows(
    keys: list[int], batch: int, refused: set[int], attempts: int, chance: Random
) -> None:
    """Every event of `refused` fails until it is given up; no key is in two requests at once."""
    lanes, running, done = Lanes(batch), list[Sending](), list[int]()
    for offset, key in enumerate(keys):
        lanes.add(event(key, offset))
    now = 0.0
    while lanes.held:
        running += taken(lanes, now)
        if not running:
            assert lanes.next_at is not None, "what is not sent waits"
            now = lanes.next_at
            continue
        in_flight = [each.lane for sending in running for each in dict.fromkeys(sending.events)]
        offsets = [each.offset for sending in running for each in sending.events]
        assert len(offsets) == len(in_flight) == len(set(offsets))
        sending = running.pop(chance.randrange(len(running)))
        assert sending.events, "a request has events"
        if not any(each.lane in refused for each in sending.events):
            done += [each.offset for each in sending.events]
            lanes.delivered(sending)
        elif lanes.failed(sending, now) >= attempts:
            done += [each.offset for each in sending.events]
            lanes.give_up(sending)
    assert not list(taken(lanes, now + 1_000.0)), "nothing is left to be sent"
    assert sorted(done) == list(range(len(keys)))
    for key in set(keys):
        mine = [offset for offset in done if keys[offset] == key]
        assert mine == sorted(mine)


@given(
    keys=st.lists(st.integers(0, 6), max_size=40),
    later=st.lists(st.integers(0, 6), max_size=40),
    batch=st.integers(1, 8),
    never=st.sets(st.integers(0, 6)),
)
def test_a_receiver_that_is_away_is_tried_with_each_key_in_turn(
    keys: list[int], later: list[int], batch: int, never: set[int]
) -> None:
    """Those of `never` are not answered, so the receiver stays away as long as they are tried."""
    lanes, done, now = Lanes(batch), list[int](), 0.0
    for offset, key in enumerate(keys):
        lanes.add(event(key, offset))
    for offset, key in enumerate(later, len(keys)):
        probe = lanes.probe(now)  # most come while it is away
        if probe is not None:
            lanes.postponed(probe, now)
        lanes.add(event(key, offset))
    for _ in range(2 * (len(keys) + len(later)) * 8):
        now += 30.0
        probe = lanes.probe(now)
        if probe is None:
            break
        assert len({each.lane for each in probe.events}) == 1
        if probe.lane.events[0].lane in never:
            lanes.postponed(probe, now + 30.0)
        else:
            done += [each.offset for each in probe.events]
            lanes.delivered(probe)
    every = [*keys, *later]
    assert sorted(done) == [offset for offset, key in enumerate(every) if key not in never]
    assert all(sorted(mine) == mine for key in set(every) if (mine := _of(done, every, key)))


def _of(done: list[int], keys: list[int], key: int) -> list[int]:
    return [offset for offset in done if keys[offset] == key]


@given(st.lists(st.integers(0, 40), unique=True), st.randoms(use_true_random=False))
def test_what_is_committed_never_passes_what_is_not_acknowledged(
    offsets: list[int], chance: Random
) -> None:
    offsets.sort()
    progress, left = GroupProgress(0), set(offsets)
    for offset in offsets:
        progress.receive(offset)
    order = list(offsets)
    chance.shuffle(order)
    for offset in order:
        progress.acknowledge(offset)
        progress.acknowledge(offset)
        left.discard(offset)
        assert progress.committed == min(left, default=offsets[-1] + 1)
    progress.skip(50)
    assert progress.committed == 50


def test_what_fails_is_counted_while_the_run_adds_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reports are written by another thread."""
    lanes = Lanes(1)
    for offset in range(3):
        lanes.add(event(offset, offset))

    def failures(_: Lane) -> int:
        lanes.add(event(len(lanes), len(lanes)))
        return 1

    monkeypatch.setattr(Lane, "failures", property(failures, lambda *_: None))
    assert lanes.failing == 3
