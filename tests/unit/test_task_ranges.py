"""What the tasks of a large cut read: balanced, and so that a proof loads few of their files."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.log.partitions import OffsetRange, Partition
from lockstep.jobs.archiving.stored import Place
from lockstep.jobs.cuts.task_ranges import by_task

TASK_EVENTS = 50_000
Parts = dict[Partition, tuple[OffsetRange, int]]


def parts_of(events: dict[Partition, int]) -> Parts:
    chance = Random(0)
    shuffled = chance.sample(sorted(events), len(events))
    return {place: (OffsetRange(7, 8 + events[place]), events[place]) for place in shuffled}


def place_of(task: dict[Partition, OffsetRange]) -> Place:
    """Return the file that a task writes, as its add action states its bounds."""
    topics, numbers = zip(*task, strict=True)
    return Place(
        "part", None, 1, 1, min(topics), max(topics), min(numbers), max(numbers), 0, len(task)
    )


def loads(parts: Parts) -> int:
    """Return how many files are loaded, one for each span that may be in it."""
    files = [place_of(task) for task in by_task(parts)]
    return sum(file.may_have(*place) for file in files for place in parts)


@pytest.mark.parametrize(
    "events",
    [
        {(f"shop.public.t{number}", 0): 500 + number for number in range(1_000)},
        {(f"shop.public.t{number % 100}", number // 100): 999 for number in range(1_200)},
        {("shop.public.one", number): 20_000 for number in range(64)},
        {("shop.public.one", number): 90_000 for number in range(64)},
        {(f"shop.public.t{number % 30}", number // 30): 6_000 for number in range(600)},
    ],
    ids=["many-tables", "tables-with-partitions", "small-partitions", "large-ones", "in-between"],
)
def test_a_proof_loads_few_files_for_each_span(events: dict[Partition, int]) -> None:
    assert loads(parts_of(events)) <= 2 * len(events)


sizes = st.integers(0, 2 * TASK_EVENTS) | st.integers(0, 5_000)
places = st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 20))


@given(st.dictionaries(places, sizes, max_size=60))
def test_tasks_read_each_range_once_and_are_balanced(events: dict[Partition, int]) -> None:
    parts = parts_of(events)
    tasks = by_task(parts)
    assert Counter(place for task in tasks for place in task) == Counter(list(parts))
    assert all(task[place] == parts[place][0] for task in tasks for place in task)
    totals = [sum(parts[place][1] for place in task) for task in tasks]
    assert totals == sorted(totals, reverse=True)
    for task, total in zip(tasks, totals, strict=True):
        assert total <= TASK_EVENTS or len(task) == 1
    # Of each larger topic one task may be small, and one of all small topics.
    of_topic = Counter[str]()
    for (topic, _), many in events.items():
        of_topic[topic] += many
    larger = sum(many > TASK_EVENTS for many in of_topic.values())
    assert len(tasks) <= 2 * sum(totals) / TASK_EVENTS + larger + 1
    # Its own, one with small partitions of its topic, and one with the topics around it.
    assert loads(parts) <= 3 * len(parts)
