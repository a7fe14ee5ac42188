"""What a client delivers again after it was reset is in no range twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import islice

import pytest
from confluent_kafka import TopicPartition

from cdc.log.partitions import OffsetRange
from cdc.log.ranges import RangeReader
from tests.unit.test_control_doctor import CONFIG


class Record:
    def __init__(self, offset: int) -> None:
        self._offset = offset

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return 0

    def error(self) -> None:
        return None

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes:
        return b"k"

    def value(self) -> bytes:
        return b"%d" % self._offset


class ResetClient:
    """Delivers a range's first records, and then the partition from its beginning."""

    def __init__(self, _: object) -> None:
        self._delivered: Iterator[int] = iter(())

    def list_topics(self, *_: object, **__: object) -> None:
        return None

    def offsets_for_times(self, *_: object, **__: object) -> list[TopicPartition]:
        return []

    def assign(self, given: list[TopicPartition]) -> None:
        [at] = given
        self._delivered = iter([at.offset, at.offset + 1, *range(20)])

    def consume(self, most: int, timeout: float) -> list[Record]:
        assert timeout
        return [Record(offset) for offset in islice(self._delivered, min(most, 3))]

    def unassign(self) -> None:
        self._delivered = iter(())

    def close(self) -> None:
        return None


def test_a_range_has_each_record_once_after_the_client_was_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cdc.log.consumer.Consumer", ResetClient)
    with closing(RangeReader(CONFIG)) as reader:
        for start, end in ((0, 5), (5, 10), (12, 14)):
            found = reader.read({("t", 0): OffsetRange(start, end)})
            assert found is not None
            assert found["t", 0].values == [b"%d" % offset for offset in range(start, end)]
