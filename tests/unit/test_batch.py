"""A batch counts events, not tombstones, by partition."""

from __future__ import annotations

import pytest

from cdc.log.batch import PARTITION_BYTES, Batch, Message


def message(key: bytes, value: bytes | None) -> Message:
    return {"key": key, "value": value}


def test_taken_messages_are_counted_once_and_tombstones_not_at_all() -> None:
    batch = Batch()
    first, second = batch.topic("t", 2)
    for value in (b"1", b"2", None):
        first.append(message(b"k", value))
    first.others += 1
    second.append(message(b"l", b"3"))
    assert batch.waiting() == [first, second]
    assert [m["value"] for m in first.take()] == [b"1", b"2", None]
    assert batch.waiting() == [second]
    first.append(message(b"k", b"4"))
    first.take()
    second.take()
    assert batch.close() == {("t", 0): 3, ("t", 1): 1}
    assert batch.close() == {}


def test_a_partition_that_got_no_event_has_moved_all_the_same() -> None:
    """Frontiers include the end of the dead-letter topic too."""
    batch = Batch()
    [letters] = batch.topic("dead", 1)
    letters.append(message(b"k", b"chunk"))
    letters.others += 1
    letters.take()
    assert batch.close() == {("dead", 0): 0}
    assert batch.close() == {}


def test_what_is_taken_is_not_emptied_by_what_follows() -> None:
    """The producer keeps the list it was given; the row path keeps appending to its own."""
    batch = Batch()
    [partition] = batch.topic("t", 1)
    append = partition.append
    append(message(b"k", b"1"))
    taken = partition.take()
    append(message(b"k", b"2"))
    assert [m["value"] for m in taken] == [b"1"]
    assert [m["value"] for m in partition.take()] == [b"2"]


def test_a_topics_partitions_are_made_once_and_may_become_more() -> None:
    batch = Batch()
    one = batch.topic("t", 1)
    assert batch.topic("t", 3)[0] is one[0]
    assert [(p.topic, p.number) for p in batch.topic("t", 2)] == [("t", 0), ("t", 1), ("t", 2)]
    assert batch.topic("u", 1)[0] is not one[0]


def test_a_batch_does_not_close_over_messages_that_wait() -> None:
    batch = Batch()
    batch.topic("t", 1)[0].append(message(b"k", b"1"))
    with pytest.raises(AssertionError, match="last message was taken"):
        batch.close()


def test_closing_begins_the_next_batchs_size() -> None:
    batch = Batch()
    batch.bytes = 5
    batch.close()
    assert batch.bytes == 0


def test_what_appends_is_looked_up_for_each_message_and_loses_none() -> None:
    """The row path keeps the topic's list, whose entries change when a partition is taken."""
    batch = Batch()
    partitions = batch.topic("t", 2)
    appends = partitions[0].appends
    assert partitions[1].appends is appends
    for value in (b"1", b"2"):
        appends[1](message(b"k", value))
    partitions[1].append(message(b"k", b"3"))
    assert batch.waiting() == [partitions[1]]
    assert [m["value"] for m in partitions[1].take()] == [b"1", b"2", b"3"]
    appends[1](message(b"k", b"4"))
    appends[0](message(b"k", b"5"))
    assert batch.waiting() == [partitions[1], partitions[0]]
    assert [m["value"] for each in batch.waiting() for m in each.take()] == [b"4", b"5"]
    assert batch.close() == {("t", 1): 4, ("t", 0): 1}


def test_a_partition_that_no_batch_touches_costs_none_anything() -> None:
    batch = Batch()
    batch.topic("many", 10_000)
    [one] = batch.topic("t", 1)
    one.append(message(b"k", b"1"))
    assert len(batch.waiting()) == 1
    one.take()
    assert list(batch.close()) == [("t", 0)]


def test_a_batch_is_thin_by_what_each_of_its_partitions_gets() -> None:
    batch = Batch()
    for each in batch.topic("few", 2):
        each.append(message(b"k", b"1"))
    batch.bytes = 2 * PARTITION_BYTES
    seen = [(batch.worth_sending, batch.thin)]
    for each in batch.topic("many", 1_000):
        each.append(message(b"k", b"1"))
    seen.append((batch.worth_sending, batch.thin))
    for each in batch.waiting():
        each.take()
    batch.handed_over()
    seen.append((batch.worth_sending, batch.thin))
    batch.bytes = 1_002 * PARTITION_BYTES
    seen.append((batch.worth_sending, batch.thin))
    assert seen == [(True, False), (False, True), (False, True), (True, False)]
