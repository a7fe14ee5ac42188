"""The index of a partition's keys: what it names, what it keeps, and what it does not believe."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import pytest

from cdc.config import Config
from cdc.console import key_indexer
from cdc.console.key_index import BLOCK, RUN, Anchor, Entries, PartitionIndex, hashed
from cdc.console.key_indexer import KeyIndexer
from cdc.errors import UnavailableError
from cdc.log import topics
from cdc.log.partitions import OffsetRange
from cdc.log.topics import Described

TOPIC = "shop.public.t"


def key(number: int) -> bytes:
    return b'{"id":%d}' % number


def entries(span: OffsetRange, *, of: int = 1, anchor: bool = True) -> Entries:
    """Return those of a key at each offset, the same one `of` times in a row."""
    found = Entries()
    for offset in range(*span):
        found.add(offset, key(offset // of))
    if anchor:
        found.anchor = Anchor(span.end - 1, span.end)
    return found


def built(path: Path, held: OffsetRange, name: bytes = b"it") -> PartitionIndex:
    """Return an index of a partition that has the key of its number at each offset."""
    index = PartitionIndex(path, name)
    complete(index, held)
    return index


def complete(index: PartitionIndex, held: OffsetRange) -> list[OffsetRange]:
    """Index what is missing; return what was, in this order."""
    taken = list[OffsetRange]()
    while (missing := index.missing(held)) is not None:
        taken.append(missing)
        index.add(missing, entries(missing))
    return taken


def named(index: PartitionIndex, number: int, held: OffsetRange) -> list[OffsetRange]:
    runs = range(held.start - held.start % RUN, held.end, RUN)
    found = [index.find(run, {hashed(key(number))}) for run in runs]
    return [block for each in found if each for block in each.blocks]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "0.index"


HELD = OffsetRange(100, 3 * RUN + 1_000)


def test_the_newest_is_indexed_first_and_each_offset_once(path: Path) -> None:
    taken = complete(PartitionIndex(path, b"it"), HELD)
    assert taken == [
        OffsetRange(3 * RUN, 3 * RUN + 1_000),
        OffsetRange(2 * RUN, 3 * RUN),
        OffsetRange(RUN, 2 * RUN),
        OffsetRange(100, RUN),
    ]


@pytest.mark.parametrize("number", [100, RUN - 1, RUN, 2 * RUN + 77, 3 * RUN, 3 * RUN + 999])
def test_a_key_is_in_its_block_and_in_few_others(path: Path, number: int) -> None:
    index = built(path, HELD)
    found = named(index, number, HELD)
    assert any(block.start <= number < block.end for block in found)
    assert sum(block.end - block.start for block in found) <= 3 * BLOCK


def test_it_is_four_bytes_an_event(path: Path) -> None:
    index = built(path, OffsetRange(0, 10 * RUN))
    assert index.bytes_on_disk == path.stat().st_size
    assert path.stat().st_size < 10 * RUN * 4.1
    assert index.indexed(OffsetRange(0, 10 * RUN)) == 10 * RUN
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_row_that_changes_all_the_time_takes_an_entry_a_block(path: Path) -> None:
    index = PartitionIndex(path, b"it")
    index.add(OffsetRange(0, RUN), entries(OffsetRange(0, RUN), of=RUN))
    assert path.stat().st_size < RUN // BLOCK * 4 + 200
    found = index.find(0, {hashed(key(0))})
    assert found is not None
    assert found.blocks[0].start == 0
    assert found.blocks[-1].end == RUN
    # What is read at once is limited.
    assert max(block.end - block.start for block in found.blocks) <= 4_096


def test_near_blocks_are_read_at_once_and_far_ones_are_not(path: Path) -> None:
    index, found = PartitionIndex(path, b"it"), Entries()
    for offset in (0, 3 * BLOCK, 10_000):
        found.add(offset, key(1))
    index.add(OffsetRange(0, RUN), found)
    at = 10_000 - 10_000 % BLOCK
    assert named(index, 1, OffsetRange(0, RUN)) == [
        OffsetRange(0, 4 * BLOCK),
        OffsetRange(at, at + BLOCK),
    ]


def test_truncates_are_found_with_and_without_a_key_of_their_own(path: Path) -> None:
    index, found = PartitionIndex(path, b"it"), Entries()
    found.add(5, None)
    found.add(9_000, b'"truncate"')
    index.add(OffsetRange(0, RUN), found)
    there = index.find(0, {hashed(None)})
    assert there is not None
    assert len(there.blocks) == 2


def test_another_process_continues_and_reads_the_newest_run_again(path: Path) -> None:
    built(path, HELD)
    again = PartitionIndex(path, b"it")
    assert again.indexed(HELD) == 3 * RUN - 100
    assert complete(again, HELD) == [OffsetRange(3 * RUN, HELD.end)]
    assert named(again, RUN + 5, HELD) != []


def test_what_grows_is_added_to(path: Path) -> None:
    index = built(path, HELD)
    later = OffsetRange(100, HELD.end + 500)
    assert complete(index, later) == [OffsetRange(HELD.end, later.end)]
    assert complete(index, OffsetRange(100, 4 * RUN)) == [OffsetRange(later.end, 4 * RUN)]
    assert complete(index, OffsetRange(100, 4 * RUN)) == []
    assert PartitionIndex(path, b"it").indexed(OffsetRange(100, 4 * RUN)) == 4 * RUN - 100


def test_where_much_came_the_newest_is_first(path: Path) -> None:
    index = built(path, HELD)
    much = OffsetRange(100, 20 * RUN + 7)
    assert index.missing(much) == OffsetRange(20 * RUN, much.end)
    assert index.find(3 * RUN, {0}) is None  # it is read again
    complete(index, much)
    assert index.indexed(much) == much.end - much.start


@pytest.mark.parametrize("at", [0, 40, 5_000, -1])
def test_a_damaged_file_is_not_believed(path: Path, at: int) -> None:
    built(path, HELD)
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)
    index = PartitionIndex(path, b"it")
    for number in range(100, HELD.end, 501):
        found = index.find(number - number % RUN, {hashed(key(number))})
        if found is not None:
            assert any(block.start <= number < block.end for block in found.blocks)
    assert index.indexed(HELD) < 3 * RUN - 100
    complete(index, HELD)
    assert PartitionIndex(path, b"it").indexed(HELD) == 3 * RUN - 100


def test_a_file_that_is_damaged_while_it_is_used_is_not_believed_either(path: Path) -> None:
    index = built(path, HELD)
    path.write_bytes(path.read_bytes()[:-10])
    assert index.find(0, {0}) is None  # it was written last
    assert index.find(RUN, {0}) is not None
    path.unlink()
    assert index.find(RUN, {0}) is None
    assert index.missing(HELD) == OffsetRange(RUN, 2 * RUN)


def test_a_file_of_another_partition_is_replaced(path: Path) -> None:
    built(path, HELD)
    other = PartitionIndex(path, b"other")
    assert other.indexed(HELD) == 0
    assert path.stat().st_size < 100
    assert built(path, HELD).find(0, {0}) is not None


def test_a_run_of_another_partition_is_no_run_of_this_one(path: Path, tmp_path: Path) -> None:
    built(path, HELD)
    other = tmp_path / "1.index"
    built(other, HELD, b"ot")
    header, rest = len(b"it little\n"), other.read_bytes()
    path.write_bytes(path.read_bytes()[:header] + rest[header:])
    index = PartitionIndex(path, b"it")
    assert [index.find(run, {0}) for run in (0, RUN, 2 * RUN)] == [None, None, None]


def test_what_retention_has_deleted_is_deleted_here(path: Path) -> None:
    held = OffsetRange(0, 100 * RUN)
    index = built(path, held)
    was = path.stat().st_size
    index.forget_before(90 * RUN + 5)
    assert path.stat().st_size < was / 8
    assert index.find(89 * RUN, {0}) is None
    assert index.indexed(held) == 10 * RUN
    assert named(index, 95 * RUN, OffsetRange(90 * RUN, held.end)) != []
    assert PartitionIndex(path, b"it").indexed(held) == 10 * RUN


def test_the_anchor_is_the_newest_record_that_is_indexed(path: Path) -> None:
    index = PartitionIndex(path, b"it")
    assert index.anchor() is None
    index.add(OffsetRange(RUN, RUN + 5), entries(OffsetRange(RUN, RUN + 5)))
    index.add(OffsetRange(0, RUN), entries(OffsetRange(0, RUN)))
    assert index.anchor() == (RUN + 4, RUN + 5)
    assert PartitionIndex(path, b"it").anchor() == (RUN - 1, RUN)
    # What has markers alone has none.
    index.add(OffsetRange(RUN + 5, 2 * RUN), Entries())
    assert index.anchor() == (RUN + 4, RUN + 5)
    assert PartitionIndex(path, b"it").anchor() == (RUN + 4, RUN + 5)


def test_a_file_that_cannot_be_written_is_an_error_and_loses_nothing(path: Path) -> None:
    index = built(path, HELD)
    kept = path.read_bytes()
    path.unlink()
    with pytest.raises(FileNotFoundError):
        index.add(
            OffsetRange(3 * RUN + 1_000, 4 * RUN), entries(OffsetRange(3 * RUN + 1_000, 4 * RUN))
        )
    path.write_bytes(kept)
    assert index.missing(OffsetRange(100, 4 * RUN)) == OffsetRange(3 * RUN + 1_000, 4 * RUN)
    complete(index, OffsetRange(100, 4 * RUN))
    assert index.indexed(OffsetRange(100, 4 * RUN)) == 4 * RUN - 100


# --- which topics are indexed ---


def config(tmp_path: Path, **console: object) -> Config:
    plain = {
        "pipeline": "shop",
        "source": {"dsn": "postgresql://x@localhost/x"},
        "log": {"bootstrap_servers": "localhost:1"},
        "console": {"index_dir": str(tmp_path / "index"), **console},
    }
    return msgspec.convert(plain, Config)


class Brokers:
    """What the thread asks: which topics there are. It reads nothing."""

    def __init__(self) -> None:
        self.tables = {f"shop.public.{name}": name * 3 for name in "abc"}
        self.advanced = list[str]()
        self.is_away = False

    def describe(self, _: object, wanted: list[str]) -> dict[str, Described]:
        if self.is_away:
            raise UnavailableError("no broker answers", hint="wait")
        return {each: Described(1, self.tables[each]) for each in wanted if each in self.tables}

    def existing(self, *_: object) -> dict[str, int]:
        return dict.fromkeys([*self.tables, "shop.cdc.frontier"], 1)


class Connection:
    def __init__(self, *_: object, **__: object) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def brokers(monkeypatch: pytest.MonkeyPatch) -> Brokers:
    found = Brokers()

    def advance(index: key_indexer.TopicIndex, *_: object) -> bool:
        found.advanced += [topic for topic, _ in index.partitions]
        return False

    monkeypatch.setattr(topics, "describe", found.describe)
    monkeypatch.setattr(topics, "existing", found.existing)
    monkeypatch.setattr(topics, "admin", lambda _: None)
    monkeypatch.setattr(key_indexer.KeyIndexer, "identity", {"pipeline": "shop"})
    monkeypatch.setattr(key_indexer.TopicIndex, "advance", advance)
    monkeypatch.setattr(key_indexer, "LogConsumer", Connection)
    monkeypatch.setattr(key_indexer, "FAILED_SECONDS", 0.01)
    monkeypatch.setattr(key_indexer, "FOLLOW_SECONDS", 0.01)
    return found


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def running(made: Config) -> KeyIndexer:
    indexer = KeyIndexer(made)
    indexer.start()
    return indexer


def test_a_topic_is_indexed_from_its_first_search_on(tmp_path: Path, brokers: Brokers) -> None:
    with closing(running(config(tmp_path))) as indexer:
        time.sleep(0.05)
        assert brokers.advanced == []  # what nobody asks about costs nothing
        assert indexer.asked("shop.public.a") is None
        until(lambda: indexer.asked("shop.public.a") and brokers.advanced)
        assert set(brokers.advanced) == {"shop.public.a"}


def test_the_configuration_names_topics_that_are_indexed_from_the_start(
    tmp_path: Path, brokers: Brokers
) -> None:
    with closing(running(config(tmp_path, index=["public.b", "other.*"]))):
        until(lambda: brokers.advanced)
        assert set(brokers.advanced) == {"shop.public.b"}


def test_a_restart_continues_what_was_searched_within_a_week(
    tmp_path: Path, brokers: Brokers
) -> None:
    with closing(running(config(tmp_path))) as indexer:
        for topic in ("shop.public.a", "shop.public.b"):
            indexer.asked(topic)
        until(lambda: len(set(brokers.advanced)) == 2)
    folder = tmp_path / "index" / "shop"
    old = time.time() - 8 * 86_400
    os.utime(folder / "shop.public.a" / "asked", (old, old))
    brokers.advanced.clear()
    with closing(running(config(tmp_path))):
        until(lambda: brokers.advanced)
        assert set(brokers.advanced) == {"shop.public.b"}
        assert not (folder / "shop.public.a").exists()


def test_an_index_of_a_topic_that_was_created_again_is_not_used(
    tmp_path: Path, brokers: Brokers
) -> None:
    with closing(running(config(tmp_path))) as indexer:
        until(lambda: indexer.asked("shop.public.a"))
        before = indexer.asked("shop.public.a")
        brokers.tables["shop.public.a"] = "another"
        until(lambda: (found := indexer.asked("shop.public.a")) and found is not before)
        del brokers.tables["shop.public.a"]
        assert indexer.asked("shop.public.a") is None


def test_only_the_topics_that_were_searched_last_are_indexed(
    tmp_path: Path, brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_indexer, "MOST_TOPICS", 2)
    folder = tmp_path / "index" / "shop"
    with closing(running(config(tmp_path))) as indexer:
        for name in "abc":
            until(partial(indexer.asked, f"shop.public.{name}"))
        until(lambda: not (folder / "shop.public.a").exists())
        assert (folder / "shop.public.c").exists()


def test_a_second_console_does_not_use_the_files_of_the_first(
    tmp_path: Path, brokers: Brokers
) -> None:
    with closing(running(config(tmp_path))) as first:
        until(lambda: first.asked("shop.public.a"))
        with closing(running(config(tmp_path))) as second:
            until(lambda: second.asked("shop.public.a"))
            own = second.folder
            assert own is not None
            assert own != tmp_path / "index" / "shop"
        assert not own.exists()
    with closing(running(config(tmp_path))) as later:
        until(lambda: later.folder == tmp_path / "index" / "shop")


def test_where_no_file_can_be_written_the_index_is_of_this_console(
    tmp_path: Path, brokers: Brokers
) -> None:
    (tmp_path / "index").write_text("not a folder")
    with closing(running(config(tmp_path))) as indexer:
        until(lambda: indexer.asked("shop.public.a"))
        assert indexer.is_temporary


def test_brokers_that_are_away_are_asked_again(tmp_path: Path, brokers: Brokers) -> None:
    brokers.is_away = True
    with closing(running(config(tmp_path))) as indexer:
        assert indexer.asked("shop.public.a") is None
        until(lambda: indexer.error == "no broker answers")
        brokers.is_away = False
        until(lambda: indexer.asked("shop.public.a") and not indexer.error)
