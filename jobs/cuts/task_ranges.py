"""Which partitions of the log each task of a large cut reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cdc.log.partitions import OffsetRange, Partition

# The events of a task that reads small partitions: starting one takes as long as some thousand.
_TASK_EVENTS: Final = 50_000


def by_task(
    parts: Mapping[Partition, tuple[OffsetRange, int]],
) -> list[dict[Partition, OffsetRange]]:
    """Return what each task reads: a large partition, or several small ones; the largest first.

    Each range is given with about how many events it has.
    """
    tasks: list[dict[Partition, OffsetRange]] = []
    left = 0
    for place, (wanted, events) in sorted(parts.items(), key=lambda part: -part[1][1]):
        if events > left:
            tasks.append({})
            left = _TASK_EVENTS
        tasks[-1][place] = wanted
        left -= events
    return tasks
