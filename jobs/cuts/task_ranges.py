"""Which partitions of the log each task of a large cut reads."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cdc.log.partitions import OffsetRange, Partition

# The events of a task that reads small partitions: starting one takes as long as some thousand.
_TASK_EVENTS: Final = 50_000


class _Read(NamedTuple):
    """Ranges that one task reads, and about how many events they have."""

    events: int
    ranges: dict[Partition, OffsetRange]


def by_task(
    parts: Mapping[Partition, tuple[OffsetRange, int]],
) -> list[dict[Partition, OffsetRange]]:
    """Return what each task reads: a large partition, or several small ones; the largest first.

    Each range is given with about how many events it has. A task reads small topics completely,
    those that are next to each other by name; or of one larger topic some partitions, by their
    numbers. So a file that it writes of them is needed for few others.
    """
    tasks: list[_Read] = []
    small: list[_Read] = []
    for _, places in groupby(sorted(parts), key=lambda place: place[0]):
        each = [_Read(parts[place][1], {place: parts[place][0]}) for place in places]
        topic = _joined(each)
        if topic.events <= _TASK_EVENTS:
            small.append(topic)
        else:
            tasks += [one for one in each if one.events > _TASK_EVENTS]
            tasks += _packed(one for one in each if one.events <= _TASK_EVENTS)
    tasks += _packed(small)
    return [task.ranges for task in sorted(tasks, key=attrgetter("events"), reverse=True)]


def _packed(every: Iterable[_Read]) -> list[_Read]:
    """Return small ones joined in their order, as many as one task may read."""
    groups: list[list[_Read]] = []
    left = 0
    for each in every:
        if not groups or each.events > left:
            groups.append([])
            left = _TASK_EVENTS
        groups[-1].append(each)
        left -= each.events
    return [_joined(group) for group in groups]


def _joined(every: Iterable[_Read]) -> _Read:
    events = 0
    ranges: dict[Partition, OffsetRange] = {}
    for each in every:
        events += each.events
        ranges |= each.ranges
    return _Read(events, ranges)
