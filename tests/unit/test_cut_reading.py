"""A cut that is read ahead gives what it would give in its turn, and its errors then."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from cdc.errors import GapError
from cdc.events import LSN
from cdc.log import names
from cdc.log.ranges import RangeReader, Records
from lockstep.jobs.apply.reading import CutReading, Most
from lockstep.jobs.cuts.cutting import Cut, CutPart
from tests.unit.test_control_doctor import CONFIG

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cdc.log.partitions import OffsetRange, Partition

MOST = Most(100, 100_000)
USERS, CLICKS = (names.data_topic(CONFIG.prefix, "public", each) for each in ("users", "clicks"))


def event(seq: int) -> bytes:
    source = {"seq": seq, "commit_lsn": "0/1", "ordinal": 0, "schema_id": 1, "ts_us": 1}
    return msgspec.json.encode({"op": "u", "source": source, "after": {"id": 1, "seq": seq}})


def cut(above: int, events: int, topic: str = USERS) -> Cut:
    part = CutPart(topic, 0, above, above + events, events)
    return Cut(above, 1, LSN(1), above + events, 1, 1, (part,))


class Log:
    """A log whose partition 0 has an event at each offset; some are there twice."""

    def __init__(self, twice: int = 0) -> None:
        self.twice, self.reads, self.is_closed = twice, list[int](), False
        self.may_read = threading.Event()
        self.may_read.set()

    def read(
        self, ranges: Mapping[Partition, OffsetRange], _: int | None = None
    ) -> dict[Partition, Records]:
        assert self.may_read.wait(10)
        assert not self.is_closed
        found = {}
        for place, wanted in ranges.items():
            self.reads.append(wanted.start)
            values = [event(at + 1) for at in range(wanted.start, wanted.end + self.twice)]
            key: bytes | None = b'{"id":1}' if place[0] == USERS else None
            found[place] = Records([key] * len(values), values, sum(map(len, values)))
        return found

    def expect_complete(self, _: Partition, __: OffsetRange) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


def reading(log: Log, *histories: str) -> CutReading:
    return CutReading(CONFIG, cast("RangeReader", log), histories)


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log()
    yield made
    made.may_read.set()


def plain(found: Any) -> tuple[Any, ...]:  # noqa: ANN401 - of both ways
    return found.is_large, found.records, found.by_topic, found.newest


def test_a_cut_that_is_read_ahead_is_the_same_and_is_read_once(log: Log) -> None:
    first, second = cut(0, 3), cut(3, 4)
    ours = reading(log)
    in_turn = [plain(ours.read(each, MOST)) for each in (first, second)]
    log.reads.clear()
    ours.start(second, MOST)
    assert plain(ours.read(second, MOST)) == in_turn[1]
    assert log.reads == [3]
    assert [change.seq for change in in_turn[1][3][USERS].changes] == [7]
    ours.close()
    assert log.is_closed


def test_reading_ahead_does_not_wait(log: Log) -> None:
    ours = reading(log)
    log.may_read.clear()
    ours.start(cut(0, 3), MOST)
    assert log.reads == []
    log.may_read.set()
    ours.close()
    assert log.reads == [0]


def test_what_is_wrong_with_a_cut_is_raised_in_its_turn() -> None:
    log = Log(twice=1)
    ours, wanted = reading(log), cut(0, 3)
    ours.start(wanted, MOST)
    with pytest.raises(GapError, match="holds 4 events from offset 0 to 2"):
        ours.read(wanted, MOST)
    ours.close()


def test_the_log_is_closed_after_what_is_read_ahead(log: Log) -> None:
    ours = reading(log)
    log.may_read.clear()
    ours.start(cut(0, 3), MOST)
    closing = threading.Thread(target=ours.close)
    closing.start()
    assert not log.is_closed
    log.may_read.set()
    closing.join(10)
    assert log.is_closed


def test_histories_and_tables_without_a_key_are_for_their_turn(log: Log) -> None:
    ours = reading(log, "public.users")
    assert ours.read(cut(0, 3), MOST).newest == {}
    assert ours.read(cut(3, 3, CLICKS), MOST).newest == {}
    ours.close()


def test_of_a_large_cut_only_messages_are_read(log: Log) -> None:
    ours = reading(log)
    found = ours.read(cut(0, 101), MOST)
    assert (found.is_large, dict(found.records), log.reads) == (True, {}, [])
    ours.close()
