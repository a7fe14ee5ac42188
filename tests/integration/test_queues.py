"""Work queues: each change is given out until it is acknowledged or given up."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import NamedTuple

import orjson
import pytest
from click.testing import CliRunner
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

import lockstep
from cdc.cli.queue import queue
from cdc.deliver import undelivered
from cdc.errors import CDCError, ConfigError, UnavailableError
from cdc.log import names, topics
from cdc.log.group_records import UndeliveredRecord
from tests.fixtures.commands import environment
from tests.fixtures.console import ConsoleUnderTest
from tests.fixtures.daemon import START_SECONDS, NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.topic_settings import set_limit

_TABLE = "CREATE TABLE t (id int PRIMARY KEY, n int)"
_GROUP = "queue.work"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What ends with the test."""
    with ExitStack() as found:
        yield found


def started(pipeline: NewPipeline, rows: int) -> PipelineUnderTest:
    line = pipeline(_TABLE, log={"partitions": 2})
    line.start().wait_ready()
    insert(line, 1, rows)
    return line


def insert(line: PipelineUnderTest, first: int, last: int, by: int = 1) -> None:
    """Insert rows, `by` in each transaction, and wait until the log has them."""
    with line.database.connect() as connection:
        for number in range(first, last + 1, by):
            connection.execute(
                "INSERT INTO t SELECT g, g FROM generate_series(%s::int, %s::int) g",
                (number, min(last, number + by - 1)),
            )
            connection.commit()
    wait_until(lambda: any(each.seq >= last for each in line.frontiers()), "no rows in the log")


@pytest.mark.commit("the path of a queue")
def test_a_change_comes_again_until_it_is_acknowledged_or_given_up(
    pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = started(pipeline, 20)
    attempts = Counter[int]()
    with (
        lockstep.Client(line.config) as client,
        client.queue(["public.t"], "work", "beginning", attempts=3) as work,
    ):
        deadline = time.monotonic() + START_SECONDS
        # A batch of few changes may be given out three times before another partition's first, and
        # before what was released comes again.
        while (
            len(attempts) < 20 or attempts[8] < 2 or not list(undelivered.read(line.config, _GROUP))
        ) and time.monotonic() < deadline:
            for delivery in work.receive(0.5):
                attempts[delivery.change.seq] += 1
                assert delivery.attempt == attempts[delivery.change.seq]
                if delivery.change.seq == 7:
                    continue  # it is released when the next ones are asked for
                if delivery.change.seq == 8 and delivery.attempt == 1:
                    work.release(delivery)
                else:
                    work.acknowledge(delivery)
    assert attempts == {seq: {7: 3, 8: 2}.get(seq, 1) for seq in range(1, 21)}
    [given_up] = undelivered.read(line.config, _GROUP)
    assert (given_up.id, given_up.attempts) == (f"{line.config.pipeline}-1-7", 3)
    with (
        lockstep.Client(line.config) as client,
        client.queue(["public.t"], "work", "beginning") as work,
    ):
        insert(line, 21, 21)
        [again] = next_of(work)
        assert again.change.seq == 21, "what is done or given up does not come again"
        work.acknowledge(again)
    monkeypatch.setenv("LOCKSTEP_CONFIG", str(line.config_file))
    shown = CliRunner().invoke(queue, ["undelivered", "work", "--json"])
    [shown_event] = orjson.loads(shown.stdout)
    assert shown_event["event"]["after"] == {"id": 7, "n": 7}
    assert CliRunner().invoke(queue, ["discard", "work", given_up.id, "--yes"]).exit_code == 0
    [listed] = orjson.loads(CliRunner().invoke(queue, ["list", "--json"]).stdout)
    assert (listed["queue"], listed["undelivered"]) == ("work", 0)


def test_a_change_is_not_used_up_while_another_one_cannot_be_noted(pipeline: NewPipeline) -> None:
    """Each delivery that Kafka counts reaches a handler, and no note is lost."""
    line = started(pipeline, 2)
    attempts = Counter[int]()
    with (
        lockstep.Client(line.config) as client,
        client.queue(["public.t"], "work", "beginning", attempts=1) as work,
    ):

        def handle() -> bool:
            """Return whether the member could note what it gives up."""
            with suppress(CDCError):
                for delivery in work.receive(0.5):
                    attempts[delivery.change.seq] += 1
                    assert delivery.attempt == attempts[delivery.change.seq]
                    if delivery.change.seq > 2:
                        work.acknowledge(delivery)
                return True
            return False

        wait_until(lambda: handle() and len(attempts) == 2, "two changes are not delivered")
        notes = topics.groups_topic(line.config).name
        set_limit(line.bootstrap, notes, 100)
        insert(line, 3, 40, by=2)
        for _ in range(3):
            wait_until(lambda: not handle(), "notes are accepted")
        set_limit(line.bootstrap, notes, 1_000_000)
        wait_until(lambda: handle() and len(attempts) == 40, "changes are not delivered")
        wait_until(lambda: handle() and work.is_done, "changes are not done")
    assert set(attempts.values()) == {1}
    noted = sorted(each.id for each in undelivered.read(line.config, _GROUP))
    assert noted == [f"{line.config.pipeline}-1-{seq}" for seq in (1, 2)]


def test_what_was_given_up_is_given_out_again_on_request(
    pipeline: NewPipeline, stack: ExitStack, tmp_path: Path
) -> None:
    """By the console, to the queue that gave it up alone, and as often as each change is."""
    line = started(pipeline, 3)
    client = stack.enter_context(lockstep.Client(line.config))
    work, other = (
        stack.enter_context(client.queue(["public.t"], name, "beginning", attempts=2))
        for name in ("work", "other")
    )
    _until_given_up(line, work, 1)
    seen = _all_acknowledged(other, 3)
    [given_up] = undelivered.read(line.config, _GROUP)
    shown = ConsoleUnderTest(line.config_file, tmp_path / "console.log", "--allow-actions")
    stack.callback(shown.close)
    command = f"cdc queue retry work {given_up.id}"

    def retry() -> None:
        number = shown.act("retry", "work", given_up.id, command)[1]["number"]
        wait_until(lambda: _exit_code(shown, number) == 0, "it does not end well")

    retry()
    [decided] = undelivered.read(line.config, _GROUP)
    assert (decided.state, decided.attempts) == ("sent again", 2)
    assert decided.decided_by.endswith("by the console, 127.0.0.1")
    # It is given up again, and noted so.
    _until_given_up(line, work, 1)
    [again] = undelivered.read(line.config, _GROUP)
    assert (again.id, again.state, again.attempts) == (given_up.id, "undelivered", 4)
    assert again.decided_by == ""
    retry()
    [delivery] = next_of(work)
    assert (delivery.change.seq, delivery.change.key, delivery.attempt) == (1, {"id": 1}, 1)
    assert delivery.change.after == {"id": 1, "n": 1}
    assert (delivery.change.partition, delivery.change.offset) == (
        (given_up.topic, given_up.partition),
        given_up.offset,
    )
    work.acknowledge(delivery)
    insert(line, 4, 4)
    assert [each.change.seq for each in next_of(work)] == [4], "it is done"
    assert sorted(seen + _all_acknowledged(other, 1)) == [1, 2, 3, 4], "the other queue gets none"


def _exit_code(shown: ConsoleUnderTest, number: int) -> int | None:
    listed = shown.get("/api/status")[1]["actions"]
    code = next(each["exit_code"] for each in listed if each["number"] == number)
    return None if code is None else int(code)


def _until_given_up(line: PipelineUnderTest, work: lockstep.Queue, seq: int) -> None:
    """Acknowledge everything but one change, until that one is given up."""

    def given_up() -> bool:
        for delivery in work.receive(0.5):
            if delivery.change.seq != seq:
                work.acknowledge(delivery)
        return any(each.state == "undelivered" for each in undelivered.read(line.config, _GROUP))

    wait_until(given_up, f"seq {seq} is not given up")


def _all_acknowledged(work: lockstep.Queue, count: int) -> list[int]:
    """Acknowledge so many changes; return their seqs."""
    found = list[int]()
    while len(found) < count:
        for delivery in next_of(work):
            found.append(delivery.change.seq)
            work.acknowledge(delivery)
    return found


def next_of(work: lockstep.Queue) -> list[lockstep.Delivery]:
    """Return the next deliveries."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if found := work.receive(0.5):
            return found
    pytest.fail("nothing is delivered")


def test_a_slow_change_holds_up_no_later_one(pipeline: NewPipeline) -> None:
    line = started(pipeline, 2)
    released, over, handled = threading.Event(), threading.Event(), list[int]()

    def handle(delivery: lockstep.Delivery) -> None:
        if delivery.change.seq == 1:
            assert released.wait(120)
        elif delivery.change.seq == 2 and delivery.attempt == 1:
            raise ValueError("it comes again")
        handled.append(delivery.change.seq)

    with lockstep.Client(line.config) as client, ThreadPoolExecutor(1) as pool:
        done = pool.submit(
            client.work, ["public.t"], "work", handle, over.is_set, "beginning", lock_seconds=60
        )
        try:
            wait_until(lambda: 2 in handled or done.done(), "nothing is delivered")
            insert(line, 3, 102)
            everything = set(range(2, 103))
            wait_until(lambda: set(handled) == everything or done.done(), "some wait")
            released.set()
            wait_until(lambda: 1 in handled, "the slow one does not end")
        finally:
            released.set()
            over.set()
        done.result(60)
    # The slow one is given out again if all of it took longer than its lock.
    assert set(handled) == {1, *everything}
    assert len(handled) - handled.count(1) == len(everything), "each was done once"


def test_a_queue_starts_at_its_start_and_keeps_its_tables(pipeline: NewPipeline) -> None:
    line = started(pipeline, 30)
    lsn = next(each.lsn for each in line.frontiers() if each.seq >= 10)
    reached = next(each.seq for each in line.frontiers() if each.seq >= 10)
    with lockstep.Client(line.config) as client:
        for name, start, first in (("now", "now", 31), ("lsn", lsn, reached + 1)):
            client.queue(["public.t"], name, start).close()
            if name == "now":
                insert(line, 31, 35)
            found = list[int]()
            with client.queue(["public.t"], name, start) as work:
                while len(found) < 35 - first + 1:
                    for delivery in next_of(work):
                        found.append(delivery.change.seq)
                        work.acknowledge(delivery)
            assert sorted(found) == list(range(first, 36))
        with pytest.raises(ConfigError, match="attempts of a queue is 99"):
            client.queue(["public.t"], "now", attempts=99)


class Seen(NamedTuple):
    """A change that was given out, as its member noted it before anything else."""

    seq: int
    partition: int
    offset: int
    attempt: int


_PROCESS = """
import os, sys, time
import lockstep
config, path = sys.argv[1:]
seen = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def handle(delivery):
    change = delivery.change
    line = f"{change.seq} {change.partition[1]} {change.offset} {delivery.attempt}\\n"
    os.write(seen, b"got " + line.encode())
    time.sleep(0.01)  # so that members are killed at work
    if change.seq % 1_000 == 7:
        raise ValueError("it can never be done")
    os.write(seen, b"done " + line.encode())
with lockstep.Client(config) as client:
    client.work(["public.t"], "work", handle, start="beginning", lock_seconds=15, workers=2)
"""


@pytest.mark.long("minutes: Kafka gives back what a killed member had after its lock")
@pytest.mark.timeout(1_500)
@pytest.mark.parametrize("count", [10_000, 100_000], ids=str)
def test_killed_members_lose_nothing_and_the_limit_is_kept(
    count: int, pipeline: NewPipeline, tmp_path: Path
) -> None:
    """The daemon is killed too, between writing a Kafka transaction and committing it."""
    line = pipeline(_TABLE, log={"partitions": 3, "direct": "off"})
    for part in range(4):
        # The last one lives; the others die with a batch that is written and not committed.
        daemon = line.start("after_flush:5" if part < 3 else "")
        daemon.wait_ready()
        with line.database.connect() as connection:
            for number in range(part * count // 4, (part + 1) * count // 4, 20):
                connection.execute(
                    "INSERT INTO t SELECT g, g FROM generate_series(%s::int, %s::int) g",
                    (number, number + 19),
                )
                connection.commit()
                time.sleep(0.004)  # several batches
        if part < 3:
            daemon.wait_exit()
    wait_until(lambda: bool(line.frontiers()), "the log has no frontier")
    assert aborted(line), "something was written and not committed"
    chance, members, files = random.Random(17), list[subprocess.Popen[bytes]](), list[Path]()
    deadline = time.monotonic() + 240 + count / 100
    try:
        kills = 0
        while True:
            while len(members) < 3:
                files.append(tmp_path / f"seen-{len(files)}")
                members.append(joined(line, files[-1]))
            time.sleep(chance.uniform(0.3, 1.0))
            done = {each.seq for each in noted(files, "done")}
            given_up = {int(each.id.rsplit("-", 1)[1]) for each in left(line)}
            if done | given_up >= set(range(1, count + 1)):
                break
            assert time.monotonic() < deadline, f"{count - len(done | given_up)} are missing"
            if kills < 12 and len(done) * 16 > kills * count:
                kills += 1
                victim = members.pop(chance.randrange(len(members)))
                victim.kill()
                victim.wait()
    finally:
        for each in members:
            each.kill()
            each.wait()
    assert kills >= 5, "members were killed while there was work"
    got = noted(files, "got")
    # Kafka takes a delivery back if the member's session ends first: its number comes again.
    deliveries = Counter(each.seq for each in got)
    assert max(deliveries.values()) <= 5 + kills, "a change comes again only after a kill"
    assert max(each.attempt for each in got) <= 5, "the limit is kept"
    places = {(each.seq, each.partition, each.offset) for each in got}
    assert len(places) == len({each.seq for each in got}), "an aborted copy was given out"
    never = {seq for seq in range(1, count + 1) if seq % 1_000 == 7}
    assert never <= given_up
    assert not never & done
    # Others are given up only if members were killed with them each time.
    assert len(given_up - never - done) < count / 100


def aborted(line: PipelineUnderTest) -> bool:
    """Return whether a reader that does not ask for committed records sees a seq twice."""
    topic, found = names.data_topic(line.config.prefix, "public", "t"), Counter[int]()
    for number in range(line.resume()[0].partitions[topic]):
        for value in uncommitted(line, topic, number):
            found[orjson.loads(value)["source"]["seq"]] += 1
    return max(found.values()) > 1


def uncommitted(line: PipelineUnderTest, topic: str, number: int) -> list[bytes]:
    """Return what a partition has, of aborted transactions too."""
    reading = {
        "bootstrap.servers": line.config.log.bootstrap_servers,
        "group.id": "none",
        "isolation.level": "read_uncommitted",
        "enable.partition.eof": True,
    }
    with closing(Consumer(reading)) as client:
        client.assign([TopicPartition(topic, number, OFFSET_BEGINNING)])
        found = list[bytes]()
        while True:
            for message in client.consume(1_000, timeout=5.0):
                if message.error() is not None:
                    return found
                found.append(message.value() or b"")


def joined(line: PipelineUnderTest, path: Path) -> subprocess.Popen[bytes]:
    kept = environment()
    command = [sys.executable, "-c", _PROCESS, str(line.config_file), str(path)]
    return subprocess.Popen(command, env=kept, stdin=subprocess.DEVNULL)


def left(line: PipelineUnderTest) -> list[UndeliveredRecord]:
    """Return what was given up; nothing while the topic is being created."""
    with suppress(UnavailableError):
        return list(undelivered.read(line.config, _GROUP))
    return []


def noted(files: list[Path], kind: str) -> list[Seen]:
    """Return what members have noted; a line that a kill cut short is none."""
    found = []
    for path in files:
        text = path.read_text() if path.exists() else ""
        found += [
            Seen(*map(int, each.split()[1:]))
            for each in text.splitlines(keepends=True)
            if each.startswith(f"{kind} ") and each.endswith("\n")
        ]
    return found
