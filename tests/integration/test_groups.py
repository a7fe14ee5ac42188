"""Groups of readers: each sees every change, its members share them, and nothing is skipped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing

import pytest
from click.testing import CliRunner
from confluent_kafka import TopicPartition

import lockstep
from cdc.cli.group import group
from cdc.errors import ConfigError, UnavailableError
from cdc.log import group_records, names
from cdc.log.groups import BEGINNING, Group
from cdc.operate.compaction import LagsReader
from tests.fixtures.daemon import START_SECONDS, NewPipeline, PipelineUnderTest, wait_until

_TABLE = "CREATE TABLE t (id int PRIMARY KEY, n int)"


def started(pipeline: NewPipeline, rows: int) -> PipelineUnderTest:
    line = pipeline(_TABLE)
    line.start().wait_ready()
    line.database.execute(f"INSERT INTO t SELECT g, g FROM generate_series(1, {rows}) g")
    wait_until(lambda: any(each.seq >= rows for each in line.frontiers()), "no rows in the log")
    return line


def read(
    client: lockstep.Client,
    group: str,
    done: Callable[[list[lockstep.GroupChange]], bool],
    *,
    every: int = 1,
) -> list[lockstep.GroupChange]:
    """Return the changes that a member receives until `done`; it acknowledges each `every`th."""
    found: list[lockstep.GroupChange] = []
    deadline = time.monotonic() + START_SECONDS
    with client.changes(["public.t"], group, "beginning") as changes:
        while not done(found) and time.monotonic() < deadline:
            for change in changes.receive(0.2):
                found.append(change)
                if change.seq % every == 0:
                    changes.acknowledge(change)
    return found


def test_each_group_sees_all_and_what_is_not_acknowledged_comes_again(
    pipeline: NewPipeline,
) -> None:
    line = started(pipeline, 50)
    with lockstep.Client(line.config) as client:
        first = read(client, "one", lambda found: len(found) == 50, every=2)
        unacknowledged = {
            min(each.seq for each in first if each.partition == partition and each.seq % 2)
            for partition in {each.partition for each in first if each.seq % 2}
        }
        again = read(client, "one", lambda found: {each.seq for each in found} >= unacknowledged)
        other = read(client, "two", lambda found: len(found) == 50)
    assert sorted(each.seq for each in first) == list(range(1, 51))
    assert {each.seq for each in other} == {each.seq for each in first}
    assert {each.seq for each in again} >= unacknowledged, "read until its deadline"
    change = next(each for each in first if each.key == {"id": 7})
    assert (change.table, change.op, change.after) == ("public.t", "c", {"id": 7, "n": 7})


def test_members_share_the_changes_and_a_late_one_takes_its_part(pipeline: NewPipeline) -> None:
    line = started(pipeline, 20)
    seen: dict[str, set[int]] = {"a": set(), "b": set()}

    over = threading.Event()

    def member(name: str) -> None:
        with (
            lockstep.Client(line.config) as client,
            client.changes(["public.t"], "shared", "beginning") as changes,
        ):
            while not over.is_set():
                for change in changes.receive(0.1):
                    seen[name].add(change.seq)
                    changes.acknowledge(change)

    threads = [threading.Thread(target=member, args=(name,)) for name in seen]
    try:
        threads[0].start()
        wait_until(lambda: len(seen["a"]) == 20, "the first member does not read")
        threads[1].start()
        number, deadline = 20, time.monotonic() + START_SECONDS
        while not seen["b"]:
            assert time.monotonic() < deadline, "the second member gets no partition"
            line.database.execute(
                f"INSERT INTO t SELECT g, g FROM generate_series({number + 1}, {number + 20}) g"
            )
            number += 20
            time.sleep(0.1)
        wait_until(lambda: seen["a"] | seen["b"] == set(range(1, number + 1)), "some are missing")
    finally:
        over.set()
        for thread in threads:
            thread.join(60)


def test_a_removed_group_holds_no_compaction_and_starts_again_if_it_comes_back(
    pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = started(pipeline, 10)
    monkeypatch.setenv("LOCKSTEP_CONFIG", str(line.config_file))
    topic = frozenset({names.data_topic(line.config.prefix, "public", "t")})

    def command(*given: str) -> str:
        ran = CliRunner().invoke(group, given)
        return ran.output if ran.exit_code == 0 else f"refused: {ran.exception}"

    with lockstep.Client(line.config) as client, closing(LagsReader(line.config)) as lags:
        read(client, "one", bool, every=100)
        assert lags.lagging(0.0, topic) == ["group one"]
        with client.changes(["public.t"], "one", "beginning") as changes:
            wait_until(lambda: bool(changes.receive(0.2)), "the member receives nothing")
            assert "has members" in command("remove", "one")
        assert "is removed" in command("remove", "one")
        assert lags.lagging(0.0, topic) == []
        assert command("list") == "no group has read the log\n"
        assert "no group one has read the log" in command("remove", "one")
        assert len(read(client, "one", lambda found: len(found) == 10)) == 10


@pytest.mark.parametrize(
    ("key", "why"),
    [(b'{"pipeline": "%s", "queue": "q"}', "of format 99"), (b"{", "a key that can't be read")],
)
def test_a_record_that_cannot_be_read_hides_no_later_one(
    pipeline: NewPipeline, key: bytes, why: str
) -> None:
    """Each reading reports it: without the group that comes after it, compaction would go on."""
    line = started(pipeline, 10)
    topic = frozenset({names.data_topic(line.config.prefix, "public", "t")})
    named = key.replace(b"%s", line.config.pipeline.encode())
    group_records.write_all(line.config, [(named, b'{"format": 99}')])
    group_records.write(
        line.config,
        group_records.GroupRecord(pipeline=line.config.pipeline, group="late", topics={}),
    )
    with closing(LagsReader(line.config)) as lags:
        for _ in range(2):
            with pytest.raises(ConfigError, match=why):
                lags.lagging(0.0, topic)


def test_a_member_whose_offset_the_broker_lacked_joins_again(pipeline: NewPipeline) -> None:
    """As while an unclean leader has less than the one before: the client would read no more."""
    line = started(pipeline, 20)
    topic = names.data_topic(line.config.prefix, "public", "t")
    with closing(Group(line.config, "g", [topic], BEGINNING)) as member:
        wait_until(lambda: member.receive(0.2), "nothing is received")
        for each in member.partitions:
            vars(member)["_client"].seek(TopicPartition(*each, 1_000_000))
        with pytest.raises(UnavailableError, match="join the group again"):
            wait_until(
                lambda: member.receive(0.2), "the member receives nothing, and no error", 60.0
            )
    with lockstep.Client(line.config) as client:
        again = read(client, "g", lambda found: len(found) == 20)
    assert {each.seq for each in again} == set(range(1, 21))
