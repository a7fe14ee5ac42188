"""A search by the index finds what reading everything finds, whatever happened to log and files."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock
from zlib import crc32

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cdc.config import Config
from cdc.console import key_index, key_search
from cdc.console.key_indexer import TopicIndex
from cdc.console.key_search import KeySearch, versions
from cdc.log.partitions import OffsetRange, Partition
from cdc.log.topics import Described

TOPIC = "shop.public.t"
KEYS = [b'{"id":%d}' % number for number in range(24)]
CONFIG = msgspec.convert(
    {
        "pipeline": "shop",
        "source": {"dsn": "postgresql://x@localhost/x"},
        "log": {"bootstrap_servers": "localhost:1"},
    },
    Config,
)


class Record(NamedTuple):
    """As confluent-kafka's messages."""

    its_offset: int
    its_key: bytes | None
    its_value: bytes | None
    at_ms: int

    def offset(self) -> int:
        return self.its_offset

    def key(self) -> bytes | None:
        return self.its_key

    def value(self) -> bytes | None:
        return self.its_value

    def timestamp(self) -> tuple[int, int]:
        return 0, self.at_ms


class Log:
    """Two partitions of a topic, and the consumer that reads them."""

    def __init__(self) -> None:
        self.id = "1"
        self.records: dict[Partition, dict[int, Record]] = {(TOPIC, 0): {}, (TOPIC, 1): {}}
        self.starts = dict.fromkeys(self.records, 0)
        self.ends = dict.fromkeys(self.records, 0)
        self.seq = 0
        self.read = 0

    def append(self, partition: Partition, key: bytes | None, *, is_delete: bool = False) -> None:
        self.seq += 1
        op = "t" if key is None else "d" if is_delete else "u"
        source = {"seq": self.seq, "commit_lsn": f"0/{self.seq:X}", "ts_us": self.seq}
        after = {"n": self.seq} if op == "u" else None
        value = msgspec.json.encode({"op": op, "source": source, "after": after})
        for each in (value, None) if is_delete else (value,):
            end = self.ends[partition]
            self.records[partition][end] = Record(end, key, each, self.seq)
            self.ends[partition] += 1

    def cut(self, partition: Partition, end: int) -> None:
        """Lose the end, as by an unclean election."""
        self.ends[partition] = end
        kept = self.records[partition].items()
        self.records[partition] = {at: each for at, each in kept if at < end}

    # --- the consumer ---

    def look_up(self, partitions: Any) -> dict[Partition, OffsetRange]:  # noqa: ANN401 - any collection
        return {each: OffsetRange(self.starts[each], self.ends[each]) for each in partitions}

    def pieces(self, ranges: dict[Partition, OffsetRange]) -> Any:  # noqa: ANN401 - an iterator
        for each, span in ranges.items():
            assert self.starts[each] <= span.start < span.end <= self.ends[each]
            found = [self.records[each][at] for at in range(*span) if at in self.records[each]]
            self.read += len(found)
            for first in range(0, len(found), 3):
                yield each, found[first : first + 3]

    def everything(self, key: bytes, partition: Partition) -> list[tuple[Partition, int, bytes]]:
        return [
            (place, at, each.its_value)
            for place in {partition, (TOPIC, 0)}
            for at, each in self.records[place].items()
            if each.its_value is not None
            and (each.its_key == key or (place[1] == 0 and each.its_key is None))
        ]


class Indexer:
    """What a search asks for an index."""

    def __init__(self, log: Log, index: TopicIndex) -> None:
        self._log, self._index = log, index

    def asked(self, _: str) -> TopicIndex | None:
        return self._index if self._index.topic_id == self._log.id else None


def partition_of(key: bytes) -> Partition:
    return TOPIC, KEYS.index(key) % 2


def few(key: bytes | None) -> int:
    """Return one of 16 hashes, so that keys are taken for others."""
    return (crc32(key or b"") % 16) << 2


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.log = Log()
        self.folder = Path(tempfile.mkdtemp())
        small: dict[str, Any] = {
            "RUN": 16,
            "BLOCK": 4,
            "_BLOCKS": 3,
            "_NEAR": 0,
            "_JUMP": 2,
            "_LEAST_WASTE": 200,
            "hashed": few,
        }
        self.patches = [
            mock.patch.multiple(key_index, **small),
            mock.patch.multiple(key_search, hashed=few, MOST_HITS=4, FIRST=200),
        ]
        for each in self.patches:
            each.start()
        self.restart()

    def teardown(self) -> None:
        for each in self.patches:
            each.stop()
        shutil.rmtree(self.folder)

    @rule(
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=12),
        times=st.integers(1, 6),
        is_delete=st.booleans(),
        markers=st.integers(0, 20),
    )
    def write(self, keys: list[bytes], times: int, *, is_delete: bool, markers: int) -> None:
        for key in keys * times:
            self.log.append(partition_of(key), key, is_delete=is_delete)
        self.log.ends[partition_of(keys[0])] += markers

    @rule()
    def truncate(self) -> None:
        self.log.append((TOPIC, 0), None)

    @rule(number=st.integers(0, 1), share=st.floats(0, 1))
    def retain(self, number: int, share: float) -> None:
        """Retention, or an erasure, deletes a partition's beginning."""
        each = (TOPIC, number)
        start = self.log.starts[each]
        self.log.starts[each] = start + int(share * (self.log.ends[each] - start))
        kept = self.log.records[each].items()
        self.log.records[each] = {at: it for at, it in kept if at >= self.log.starts[each]}

    @rule(number=st.integers(0, 1), drops=st.sets(st.integers(0, 60)))
    def compact(self, number: int, drops: set[int]) -> None:
        for each in drops:
            self.log.records[TOPIC, number].pop(self.log.starts[TOPIC, number] + each, None)

    @rule(number=st.integers(0, 1), share=st.floats(0, 1), more=st.integers(0, 100))
    def lose_the_end(self, number: int, share: float, more: int) -> None:
        each = (TOPIC, number)
        start, end = self.log.starts[each], self.log.ends[each]
        self.log.cut(each, end - int(share * (end - start)))
        for at in range(more):
            self.log.append(each, KEYS[number + 2 * (at % 7)])
        self.search_all()

    @rule()
    def recreate(self) -> None:
        seq, topic_id = self.log.seq, int(self.log.id)
        self.log = Log()
        self.log.seq, self.log.id = seq, str(topic_id + 1)
        for at in range(60):
            self.log.append((TOPIC, at % 2), KEYS[at % 24])

    @rule(steps=st.integers(1, 12))
    def advance(self, steps: int) -> None:
        if self.index.topic_id != self.log.id:
            self.restart()
        for _ in range(steps):
            self.index.advance(self.log)  # type: ignore[arg-type]
        self.search_all()

    @rule()
    def restart(self) -> None:
        described = Described(2, self.log.id)
        self.index = TopicIndex(self.folder / TOPIC, TOPIC, described, {"pipeline": "shop"})

    @rule(number=st.integers(0, 1), at=st.floats(0, 1), bit=st.integers(0, 7))
    def damage(self, number: int, at: float, bit: int) -> None:
        path = self.folder / TOPIC / f"{number}.index"
        data = bytearray(path.read_bytes())
        data[int(at * (len(data) - 1))] ^= 1 << bit
        path.write_bytes(data)
        self.search_all()

    @rule(number=st.integers(0, 1), share=st.floats(0, 1), zeros=st.integers(0, 50))
    def cut_the_file(self, number: int, share: float, zeros: int) -> None:
        path = self.folder / TOPIC / f"{number}.index"
        data = path.read_bytes()
        path.write_bytes(data[: int(share * len(data))] + bytes(zeros))

    @rule()
    def exchange_the_files(self) -> None:
        first, second = (self.folder / TOPIC / f"{number}.index" for number in (0, 1))
        one = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(one)
        self.restart()
        self.search_all()

    def search_all(self) -> None:
        for key in KEYS:
            self.search(key, is_slow=False)

    @rule(key=st.sampled_from(KEYS), is_slow=st.booleans())
    def search(self, key: bytes, *, is_slow: bool) -> None:
        place = partition_of(key)
        everything = self.log.everything(key, place)
        found, before = list[int](), ""
        with mock.patch.object(key_search, "SECONDS", 0.0 if is_slow else 60.0):
            while True:
                searching = KeySearch(
                    CONFIG,
                    "public.t",
                    "",
                    before,
                    Indexer(self.log, self.index),  # type: ignore[arg-type]
                )
                answer = searching.search(self.log, {key}, TOPIC, {place, (TOPIC, 0)})  # type: ignore[arg-type]
                searched = answer["searched"]
                left = limits(searched["before"], self.log)
                upper = limits(before, self.log) if before else dict(self.log.ends)
                page = [
                    value
                    for where, at, value in everything
                    if left.get(where, 0) <= at < upper.get(where, 0)
                ]
                wanted = versions(page, is_first=searched["complete"])
                assert answer["versions"] == wanted
                found += [each["seq"] for each in wanted]
                if searched["complete"]:
                    break
                assert searched["before"] != before
                before = searched["before"]
        updates = {value for _, _, value in everything if b'"op":"t"' not in value}
        assert len(found) >= len(updates)

    @invariant()
    def the_index_is_small(self) -> None:
        held = sum(self.log.ends.values()) - sum(self.log.starts.values())
        for each in self.index.partitions.values():
            assert each.bytes_on_disk <= 4 * (4 * held + 1_000)


def limits(before: str, log: Log) -> dict[Partition, int]:
    """Return the offset before which each partition is left, of those of which something is."""
    pairs = (each.split(":") for each in before.split(",") if each)
    return {(TOPIC, int(number)): int(offset) for number, offset in pairs}


Histories.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase
