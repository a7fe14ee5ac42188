"""A partition of a topic, and a range of its offsets."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

Partition: TypeAlias = "tuple[str, int]"  # the topic's name, and the partition's number


class Range(NamedTuple):
    """Offsets of one partition: from `start` to before `end`."""

    start: int
    end: int
