"""The index of a topic's keys, on a real log: it finds all versions, and is never believed."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from confluent_kafka import Producer

from cdc.config import Config
from cdc.console import key_indexer, key_search
from cdc.console.key_indexer import KeyIndexer
from cdc.console.key_search import KeySearch
from cdc.encode.partition import partition_of
from cdc.log import topics
from cdc.log.partitions import OffsetRange
from tests.fixtures.console import ConsoleUnderTest
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until

TABLES = ("CREATE TABLE users (id int PRIMARY KEY, name text)",)
ROWS = 150_000
PATH = "/api/explain?table=public.users&key=7"


@pytest.fixture
def written(pipeline: NewPipeline) -> PipelineUnderTest:
    """A row whose versions are at the beginning, in the middle and at the end of a long topic."""
    made = pipeline(*TABLES, source={"canary_seconds": 0})
    made.start().wait_ready()
    third = ROWS // 3
    made.database.execute(
        "INSERT INTO users VALUES (7, 'a')",
        f"INSERT INTO users SELECT g, 'x' FROM generate_series(1001, {1000 + third}) g",
        "UPDATE users SET name = 'b' WHERE id = 7",
        "UPDATE users SET name = 'y' WHERE id > 1000",
        "UPDATE users SET name = 'c' WHERE id = 7",
        "UPDATE users SET name = 'z' WHERE id > 1000",
    )
    logged(made, 3 + 3 * third)
    return made


def logged(made: PipelineUnderTest, seq: int) -> None:
    wait_until(lambda: made.resume()[1].seq >= seq, "the changes are not in the log")


@contextmanager
def indexing(config: Config) -> Generator[KeyIndexer]:
    with closing(KeyIndexer(config)) as indexer:
        indexer.start()
        yield indexer


def search(made: PipelineUnderTest, indexer: KeyIndexer, key: str = "7") -> dict[str, Any]:
    return KeySearch(made.config, "public.users", key, "", indexer).run()


def complete(made: PipelineUnderTest, indexer: KeyIndexer) -> dict[str, Any]:
    """Return an answer once everything is indexed."""
    wait_until(
        lambda: search(made, indexer)["searched"]["indexed"] == 100, "it is not indexed", 120
    )
    return search(made, indexer)


def seqs(answer: dict[str, Any]) -> list[int]:
    return [each["seq"] for each in answer["versions"]]


def paged(shown: ConsoleUnderTest) -> tuple[list[int], int]:
    """Return all versions' seqs, and how many events were read; one page, unless it is busy."""
    found, read, before = list[int](), 0, ""
    while True:
        _, answer = shown.get(f"{PATH}&before={before}")
        found, read = seqs(answer) + found, read + answer["searched"]["events"]
        before = answer["searched"]["before"]
        if answer["searched"]["complete"]:
            return found, read


def test_a_key_anywhere_in_a_long_topic_is_found_by_reading_little(
    written: PipelineUnderTest, tmp_path: Path
) -> None:
    shown = ConsoleUnderTest(written.config_file, tmp_path / "console.log")
    third = ROWS // 3
    wanted = [1, third + 2, 2 * third + 3]
    try:
        wait_until(
            lambda: shown.get(PATH)[1]["searched"]["indexed"] == 100, "it is not indexed", 120
        )
        found, read = paged(shown)
        assert found == wanted
        assert read < 5_000
        # What comes later is found at once, by reading what is not indexed yet.
        written.database.execute("TRUNCATE users", "INSERT INTO users VALUES (7, 'd')")
        logged(written, ROWS + 5)
        found, read = paged(shown)
        assert found == [*wanted, ROWS + 4, ROWS + 5]
        assert read < 5_000
    finally:
        shown.close()
    files = sorted(Path(written.config.console.index_dir or "").rglob("*.index"))
    assert sum(each.stat().st_size for each in files) < 5 * ROWS
    sizes = [each.stat().st_size for each in files]
    again = ConsoleUnderTest(written.config_file, tmp_path / "again.log")
    try:
        # It continues: nothing of the complete runs is read again.
        wait_until(
            lambda: again.get(PATH)[1]["searched"]["indexed"] == 100, "it does not continue", 60
        )
        assert paged(again)[0] == [*wanted, ROWS + 4, ROWS + 5]
        assert [each.stat().st_size for each in files] == sizes
    finally:
        again.close()


def test_a_search_of_what_is_not_indexed_yet_says_how_far_it_is(
    written: PipelineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_search, "SECONDS", 0.0)  # one chunk each
    monkeypatch.setattr(key_indexer, "AWAITED_SHARE", 0.01)
    monkeypatch.setattr(key_indexer, "SHARE", 0.01)
    with indexing(written.config) as indexer:
        first = search(written, indexer)
        assert not first["searched"]["complete"]
        assert first["searched"]["indexed"] == 0
        wait_until(lambda: search(written, indexer)["searched"]["indexed"] > 0, "no part", 60)
        found, before = list[int](), ""
        while True:
            answer = KeySearch(written.config, "public.users", "7", before, indexer).run()
            found = seqs(answer) + found
            if answer["searched"]["complete"]:
                break
            assert answer["searched"]["before"] != before
            before = answer["searched"]["before"]
        assert found == [1, ROWS // 3 + 2, 2 * (ROWS // 3) + 3]


def produce(made: PipelineUnderTest, topic: str, first: int, key: bytes, count: int) -> None:
    """Write events as the daemon does, many of other rows and at last one of a key."""
    log = made.config.log
    producer = Producer({"bootstrap.servers": log.bootstrap_servers})
    number = partition_of(key, log.partitions)
    for seq in range(first, first + count):
        its = key if seq == first else b'{"id":%d}' % (seq + 10**6)
        source = {"seq": seq, "commit_lsn": f"0/{seq:X}", "ts_us": seq}
        value = {"op": "c", "source": source, "after": {"id": seq}}
        producer.produce(topic, msgspec.json.encode(value), its, number)
        producer.poll(0)
    assert producer.flush(60) == 0


def create_again(made: PipelineUnderTest, seq: int) -> None:
    """Delete the topic of users, and write a long one of its name, at first an event of row 7."""
    topic, admin = f"{made.config.prefix}.public.users", topics.admin(made.config)
    topics.delete(admin, [topic])
    for _ in topics.create(admin, made.config, [topics.data_topic(made.config, "public", "users")]):
        pass
    produce(made, topic, seq, b'{"id":7}', 70_000)


def test_a_topic_that_was_created_again_is_not_searched_by_the_index_of_the_old_one(
    written: PipelineUnderTest,
) -> None:
    with indexing(written.config) as indexer:
        complete(written, indexer)
    written.daemon.term()
    create_again(written, 5)
    # That indexer builds no more: all that it has is of the old topic.
    answer = search(written, indexer)
    assert answer["searched"]["indexed"] == 0
    assert set(seqs(answer)) <= {5}
    with indexing(written.config) as indexer:  # it finds the files of the old one
        assert seqs(complete(written, indexer)) == [5]
        create_again(written, 6)
        assert set(seqs(search(written, indexer))) <= {6}
        assert seqs(complete(written, indexer)) == [6]


def test_records_that_were_deleted_are_not_found_and_leave_the_index(
    written: PipelineUnderTest,
) -> None:
    config, topic = written.config, f"{written.config.prefix}.public.users"
    number = partition_of(b'{"id":7}', config.log.partitions)
    with indexing(config) as indexer:
        complete(written, indexer)
        index = indexer.indexes[topic].partitions[topic, number]
        was = index.bytes_on_disk
        ends = {(topic, each): -1 for each in range(config.log.partitions)}
        topics.delete_records(topics.admin(config), ends)
        answer = search(written, indexer)
        assert (answer["count"], answer["searched"]["complete"]) == (0, True)
        written.database.execute("UPDATE users SET name = 'd' WHERE id = 7")
        logged(written, ROWS + 4)
        assert seqs(search(written, indexer)) == [ROWS + 4]
        wait_until(lambda: index.indexed(OffsetRange(0, 1 << 40)) < 20_000, "it stays")
        assert index.bytes_on_disk <= was


def test_indexing_takes_a_share_of_the_time(
    written: PipelineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_indexer, "AWAITED_SHARE", 0.1)
    monkeypatch.setattr(key_indexer, "SHARE", 0.1)
    with indexing(written.config) as indexer:
        search(written, indexer)
        wait_until(lambda: indexer.indexes, "it does not begin")
        began, cpu = time.monotonic(), time.process_time()
        time.sleep(3.0)
        assert (time.process_time() - cpu) / (time.monotonic() - began) < 0.35
