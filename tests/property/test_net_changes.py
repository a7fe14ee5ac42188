"""Net changes are the ordered reduction's, for any history and range; a spool loses none."""

from __future__ import annotations

from random import Random

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.jobs.cuts.changes import ChangeEvent, event, net
from lockstep.jobs.cuts.in_order import in_order
from lockstep.jobs.cuts.spool import PieceSpool
from lockstep.sinks.contract import Change
from tests.property.followed_world import CLICKS
from tests.property.test_reduce import Cuts, Following, Partitions, by_table, made

_CASES = {
    "seed": st.integers(0, 2**32),
    "transactions": st.integers(1, 14),
    "started": st.booleans(),
    "widened": st.booleans(),
}


@settings(max_examples=150)
@given(**_CASES)
def test_net_changes_are_those_of_the_ordered_reduction(
    *, seed: int, transactions: int, started: bool, widened: bool
) -> None:
    """Except for values of another key's row, which stay `unchanged`."""
    chance = Random(seed)
    world = made(chance, transactions, 1 << 24, started=started, widened=widened)
    for bounds, records, _ in Cuts(world, chance):
        for topic, partitions in by_table(records).items():
            if topic == CLICKS:
                continue  # without a key
            wanted = in_order(
                partitions, bounds, letter=Following.letters(records), rows=lambda *_: {}
            )
            events = [event(*each) for each in pairs(partitions)]
            chance.shuffle(events)
            floor = max((each.source.seq for each in events if each.op == "t"), default=0)
            found = net(events, floor)
            assert [each.source.seq for each in found if each.op == "t"] == [
                seq for seq in [wanted.truncated] if seq is not None
            ]
            rows = {each.key: each for each in found if each.op != "t"}
            assert len(rows) == len(wanted.changes)
            for change in wanted.changes:
                agree(rows[change.key], change)


def agree(found: ChangeEvent, wanted: Change) -> None:
    assert (found.source.seq, found.op, found.after is None) == (
        wanted.seq,
        wanted.op,
        wanted.row is None,
    )
    if found.after is None or wanted.row is None:
        return
    row, complete = orjson.loads(found.after), orjson.loads(wanted.row)
    assert {name: complete[name] for name in row} == row
    assert set(wanted.unchanged) <= set(found.source.unchanged)
    assert row.keys() | set(found.source.unchanged) >= complete.keys()


def pairs(partitions: Partitions) -> list[tuple[bytes | None, bytes]]:
    return [pair for keys, values in partitions for pair in zip(keys, values, strict=True)]


@settings(max_examples=100)
@given(
    pieces=st.lists(st.lists(st.tuples(st.none() | st.binary(max_size=4), st.binary()))),
    buckets=st.integers(1, 5),
)
def test_a_spool_returns_every_event_and_each_key_in_one_bucket_in_order(
    *, pieces: list[list[tuple[bytes | None, bytes]]], buckets: int
) -> None:
    with PieceSpool(buckets) as spool:
        for piece in pieces:
            spool.add([key for key, _ in piece], [value for _, value in piece])
        read = [
            [pair for keys, values in bucket for pair in zip(keys, values, strict=True)]
            for bucket in spool.buckets()
        ]
    given_ = [pair for piece in pieces for pair in piece]
    for key in {key for key, _ in given_}:
        homes = [bucket for bucket in read if any(each == key for each, _ in bucket)]
        assert len(homes) == 1
        assert [pair for pair in homes[0] if pair[0] == key] == [
            pair for pair in given_ if pair[0] == key
        ]
    assert sum(map(len, read)) == len(given_)
