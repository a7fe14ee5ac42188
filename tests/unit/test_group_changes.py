"""A group's changes as an iterator: each comes once, however often a loop over them ends early."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest

from cdc.deliver import group_changes
from cdc.deliver.group_changes import GroupChanges
from cdc.log.groups import Received
from cdc.log.partitions import Partition
from tests.unit.test_control_doctor import CONFIG

_TOPIC = f"{CONFIG.prefix}.public.t"


def received(seq: int, partition: int = 0) -> Received:
    source = b'{"seq": %d, "commit_lsn": "0/1", "ts_us": 0}' % seq
    return Received((_TOPIC, partition), seq, b"{}", b'{"op": "c", "source": %s}' % source)


class Member:
    """A member of a group that receives these lists; before the second, a partition leaves it."""

    lists: list[list[Received]]

    def __init__(
        self,
        *_: object,
        released: Callable[[set[Partition]], None] = lambda _: None,
    ) -> None:
        self._released = released

    def receive(self, _: float) -> list[Received]:
        if len(self.lists) == 1:
            self._released({(_TOPIC, 1)})
        return self.lists.pop(0)


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> GroupChanges:
    monkeypatch.setattr(group_changes, "Group", Member)
    monkeypatch.setattr(group_changes, "topics_of", lambda *_: [_TOPIC])
    Member.lists = [[received(1), received(2, 1), received(3), received(4, 1)], [received(5)]]
    return GroupChanges(CONFIG, ["public.t"], "one")


def test_a_loop_goes_on_where_the_one_before_ended(changes: GroupChanges) -> None:
    found = [change.seq for _ in range(5) for change in islice(changes, 1)]
    assert found == [1, 2, 3, 4, 5]


def test_what_a_loop_has_left_is_received_but_for_what_another_member_has(
    changes: GroupChanges,
) -> None:
    assert [change.seq for change in islice(changes, 1)] == [1]
    assert [change.seq for change in changes.receive(0.0)] == [3, 5]
