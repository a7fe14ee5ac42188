"""Webhooks on real servers: at least once, each key in order, whatever fails or is killed."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from cdc.cli.doctor import doctor
from cdc.cli.group import group
from cdc.cli.webhook import webhook
from cdc.deliver import undelivered, webhooks
from cdc.errors import ConfigError, GapError, UnavailableError
from cdc.log import group_records, names, topics
from cdc.log.consumer import LogConsumer
from cdc.log.groups import Group, group_id
from cdc.log.partitions import OffsetRange
from cdc.operate.status import read_status
from cdc.operate.webhooks import WebhooksReader
from tests.fixtures.commands import environment
from tests.fixtures.console import ConsoleUnderTest
from tests.fixtures.daemon import START_SECONDS, NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.receiver import Receiver

SECRET = "whsec_" + "QUJD" * 10
_STEADY_KEYS = 100
_STEADY_CHANGES = 1_000
# A key that is refused for so long is tried again a minute later at most.
_REFUSED = 120.0
_TABLE = "CREATE TABLE t (id int PRIMARY KEY, n int, card text)"
_MASKS: dict[str, object] = {"public.t": {"mask": {"card": {"fixed": "hidden"}}}}


def take(_: list[dict[str, Any]]) -> int:
    return 204


def slowly(_: list[dict[str, Any]]) -> int:
    time.sleep(0.005)
    return 204


def seqs(receiver: Receiver) -> set[int]:
    return {event["change"]["source"]["seq"] for event in receiver.delivered}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver(SECRET, take) as found:
        yield found


def hooked(pipeline: NewPipeline, receiver: Receiver, **more: object) -> PipelineUnderTest:
    """Return a pipeline with a webhook from the log's beginning, whose daemon runs."""
    settings = {
        "url": receiver.url,
        "secrets": [SECRET],
        "tables": ["public.t"],
        "start": "beginning",
        "allow": ["127.0.0.0/8"],
        **more,
    }
    line = pipeline(_TABLE, tables=_MASKS, webhooks={"hook": settings})
    line.start().wait_ready()
    line.database.execute("INSERT INTO t VALUES (0, 0, '4111')")
    wait_until(line.frontiers, "the log has no frontier")
    return line


def write(line: PipelineUnderTest, keys: int, times: int) -> int:
    """Update each key so many times, in order; return the number of changes."""
    with line.database.connect() as connection:
        for number in range(times):
            connection.execute(
                "INSERT INTO t SELECT g, %s, '4111' FROM generate_series(1, %s) g"
                " ON CONFLICT (id) DO UPDATE SET n = excluded.n",
                (number, keys),
            )
    return keys * times


def orders(events: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Return the seqs by key, repeated ones once, in the order in which they first arrived."""
    found = defaultdict[int, dict[int, None]](dict)
    for event in events:
        change = event["change"]
        found[change["after"]["id"]][change["source"]["seq"]] = None
    return {key: list(seqs) for key, seqs in found.items()}


def arrived(receiver: Receiver, wanted: int) -> bool:
    return len(receiver.messages) >= wanted


def receive_on(member: Group) -> None:
    """Receive until that raises, of partitions within the call that gets them, too."""
    while True:
        member.receive(10.0)


def delivering(line: PipelineUnderTest, log: Path) -> subprocess.Popen[bytes]:
    kept = environment()
    command = ("webhook", "run", "-c", str(line.config_file), "--json")
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "cdc.cli.main", *command], stdout=out, stderr=out, env=kept
        )


def test_a_receiver_that_fails_gets_every_change_each_keys_in_order(
    pipeline: NewPipeline, receiver: Receiver
) -> None:
    """Of 30 % of its answers, whatever they hold, the receiver says that they failed."""
    chance = random.Random(17)

    def answer(_: list[dict[str, Any]]) -> int:
        time.sleep(chance.random() * 0.02)
        return 500 if chance.random() < 0.3 else 204

    receiver.answer = answer
    line = hooked(pipeline, receiver, batch=10)
    count = write(line, 40, 20) + 1
    with closing(webhooks.WebhookRun(line.config, "hook")) as hook:
        deadline = time.monotonic() + 300
        hook.run(lambda: hook.counts.delivered >= count or time.monotonic() > deadline)
        assert hook.counts.held == 0
    found = orders(receiver.delivered)
    assert sum(map(len, found.values())) == count
    assert all(seqs == sorted(seqs) for seqs in found.values())
    cards = {event["change"]["after"]["card"] for event in receiver.delivered}
    assert cards == {"hidden"}, "masks hold"
    assert {event["table"] for event in receiver.delivered} == {"public.t"}
    ids = {(event["id"], event["change"]["source"]["seq"]) for event in receiver.delivered}
    assert len(ids) == count, "an event's id is the same whenever it is sent"


@pytest.mark.long("half a minute at a steady rate, and it wants the machine for itself")
def test_keys_that_are_not_refused_arrive_within_two_seconds(
    pipeline: NewPipeline, receiver: Receiver
) -> None:
    """While the receiver refuses 30 % of the keys, which then arrive in their order."""
    chance, refuses = random.Random(23), threading.Event()
    accepted: dict[int, float] = {}

    def answer(events: list[dict[str, Any]]) -> int:
        time.sleep(chance.random() * 0.05)
        keys = {event["change"]["after"]["id"] for event in events}
        if refuses.is_set() and any(key % 10 < 3 for key in keys):
            return 500
        for event in events:
            accepted.setdefault(event["change"]["source"]["seq"], time.time())
        return 204

    receiver.answer = answer
    line = hooked(pipeline, receiver)
    count = write(line, _STEADY_KEYS, 1) + 1
    with closing(webhooks.WebhookRun(line.config, "hook")) as hook:
        stopping = threading.Event()
        runs = threading.Thread(target=hook.run, args=(stopping.is_set,))
        runs.start()
        wait_until(lambda: len(accepted) == count, "the keys' first changes do not arrive")
        refuses.set()
        count += _write_steadily(line, chance)
        refuses.clear()
        wait_until(lambda: len(seqs(receiver)) == count, "refused keys do not arrive", _REFUSED)
        stopping.set()
        runs.join()
    changes = [event["change"] for event in receiver.delivered]
    found = orders(receiver.delivered)
    assert all(seqs == sorted(seqs) for seqs in found.values())
    late = sorted(
        accepted[change["source"]["seq"]] - change["source"]["ts_us"] / 1e6
        for change in changes
        if change["after"]["n"] and change["after"]["id"] % 10 >= 3
    )
    assert late[int(len(late) * 0.99)] <= 2.0


def _write_steadily(line: PipelineUnderTest, chance: random.Random) -> int:
    """Update keys at random, 50 a second, each in its own transaction; return the changes."""
    due = time.monotonic()
    with line.database.connect() as connection:
        for number in range(1, _STEADY_CHANGES + 1):
            key = chance.randint(1, _STEADY_KEYS)
            connection.execute("UPDATE t SET n = %s WHERE id = %s", (number, key))
            due += 0.02
            time.sleep(max(0.0, due - time.monotonic()))
    return _STEADY_CHANGES


def test_a_refused_key_is_given_up_and_decided_on_while_others_go_on(
    pipeline: NewPipeline, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = True

    def answer(events: list[dict[str, Any]]) -> int:
        return 400 if refusing and any(e["change"]["after"]["id"] == 3 for e in events) else 204

    receiver.answer = answer
    line = hooked(pipeline, receiver, attempts=3)
    write(line, 10, 2)
    with closing(webhooks.WebhookRun(line.config, "hook")) as hook:
        hook.run(lambda: hook.counts.delivered == 19 and hook.counts.given_up == 2)
        assert hook.counts.failing == 0
    given_up = list(undelivered.read(line.config, "webhook.hook"))
    assert [each.why for each in given_up] == ["HTTP 400", "HTTP 400"]
    assert [each.state for each in given_up] == ["undelivered"] * 2
    monkeypatch.setenv("LOCKSTEP_CONFIG", str(line.config_file))
    runner = CliRunner()
    listed = runner.invoke(webhook, ["undelivered", "hook", "--json"])
    assert [each["id"] for each in json.loads(listed.stdout)] == [each.id for each in given_up]
    assert runner.invoke(webhook, ["status"]).exit_code == 1
    assert runner.invoke(webhook, ["send", "hook"]).exit_code == 1, "it still refuses them"
    refusing = False
    first, second = given_up
    assert runner.invoke(webhook, ["send", "hook", first.id]).exit_code == 0
    assert runner.invoke(webhook, ["discard", "hook", second.id, "--yes"]).exit_code == 0
    decided = {each.id: each for each in undelivered.read(line.config, "webhook.hook")}
    assert decided[first.id].state == "sent again"
    assert decided[second.id].state == "discarded"
    assert decided[second.id].decided_by
    assert receiver.delivered[-1]["id"] == first.id
    with pytest.raises(ConfigError, match="no undelivered event"):
        undelivered.chosen(line.config, "webhook.hook", (first.id,))


def test_killed_processes_and_members_that_come_lose_nothing(
    pipeline: NewPipeline, receiver: Receiver, tmp_path: Path
) -> None:
    receiver.answer = slowly
    line = hooked(pipeline, receiver, batch=5)
    count, logs = 1, [tmp_path / f"log-{number}" for number in range(5)]
    running = {logs[0]: delivering(line, logs[0])}
    try:
        for turn in range(4):
            # Before it is written: what follows has at least 60 messages, all of which may arrive.
            wanted = len(receiver.messages) + 20
            count += write(line, 30, 10)
            wait_until(partial(arrived, receiver, wanted), "nothing is delivered")
            running[logs[turn + 1]] = delivering(line, logs[turn + 1])
            if turn % 2:
                killed = running.pop(next(iter(running)))
                killed.kill()
                killed.wait()
        wait_until(lambda: len(seqs(receiver)) == count, f"not all {count} arrive")
        # Before that SIGTERM ends it as it ends any process.
        wait_until(
            lambda: all("delivering hook" in log.read_text() for log in running), "not all run"
        )
        for each in running.values():
            each.send_signal(signal.SIGTERM)
        assert [each.wait(START_SECONDS) for each in running.values()] == [0] * len(running)
    finally:
        for each in running.values():
            each.kill()
            each.wait()


def test_nothing_is_given_up_while_a_receiver_is_away(
    pipeline: NewPipeline, receiver: Receiver
) -> None:
    receiver.answer = lambda _: 503
    line = hooked(pipeline, receiver, attempts=2)
    write(line, 30, 1)
    with closing(webhooks.WebhookRun(line.config, "hook")) as hook:
        hook.run(lambda: bool(hook.counts.away))
        tried = len(receiver.messages)
        receiver.answer = take
        hook.run(lambda: hook.counts.delivered + hook.counts.given_up == 31)
        assert tried < 31 * 2
        assert not hook.counts.away


@pytest.mark.long("two minutes; test_alerts has a webhook that does not deliver")
def test_the_verdict_names_what_keeps_a_webhook_from_delivering(
    pipeline: NewPipeline, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `cdc status`, the console and the doctor show it."""
    line = hooked(pipeline, receiver, attempts=2)
    shown = ConsoleUnderTest(line.config_file, tmp_path / "console.log")

    def judged() -> str:
        return read_status(line.config).verdict.level.value

    def named(level: str, says: str) -> None:
        """Wait until a cause has these words; the daemon soon adds one about deleted events."""

        def caused() -> bool:
            found = read_status(line.config).verdict
            return found.level.value == level and any(says in each.what for each in found.causes)

        def shows() -> bool:
            found = shown.verdict()
            words = [each["what"] for each in found.get("causes", ())]
            return found["level"] == level and any(says in each for each in words)

        wait_until(caused, f"it is not {says}")
        wait_until(shows, f"the console does not show {says}")

    running = list[subprocess.Popen[bytes]]()
    try:
        named("failed", "hook has never run")
        running.append(delivering(line, tmp_path / "log"))
        wait_until(lambda: judged() == "ok", "it delivers")
        wait_until(lambda: delivered_all(line), "its offsets do not reach the log's end")
        receiver.answer = lambda _: 503
        write(line, 20, 1)
        named("degraded", "the receiver of the webhook hook is away: HTTP 503")
        receiver.answer = lambda events: 400 if any(is_of(3, each) for each in events) else 204
        named("failed", "hook has given up 1 events")
        [fields] = shown.get("/api/status")[1]["measured"]["status"]["webhooks"]
        assert (fields["undelivered"], fields["command"]) == (1, "cdc webhook undelivered hook")
        undelivered.discard(line.config, "webhook.hook", ())
        wait_until(lambda: judged() == "ok", "it goes on")
        running[0].send_signal(signal.SIGTERM)
        assert running[0].wait(START_SECONDS) == 0
        named("failed", "hook does not run")
        write(line, 20, 1)
        topic = names.data_topic(line.config.prefix, "public", "t")
        client = topics.admin(line.config)
        ends = {at: held.end for at, held in held_by(line, topic).items()}
        asked = [TopicPartition(*at, end) for at, end in ends.items()]
        for done in client.delete_records(asked).values():
            done.result(timeout=120)
        # The daemon, too, halts when it finds out, and is a cause of its own.
        reported = "retention has deleted"
        wait_until(lambda: reported in str(read_status(line.config).verdict.causes), reported, 90)
        wait_until(
            lambda: reported in str(shown.verdict().get("causes")), "the console differs", 90
        )
        monkeypatch.setenv("LOCKSTEP_CONFIG", str(line.config_file))
        found = CliRunner().invoke(doctor, ["--json"], standalone_mode=False)
        checked = [each for each in json.loads(found.stdout)["findings"] if "hook" in each["what"]]
        assert {(each["check"], each["severity"]) for each in checked} == {
            ("webhook", "ok"),  # its secret and url
            ("webhook", "error"),  # the gap
        }
    finally:
        shown.close()
        for each in running:
            each.kill()
            each.wait()


def delivered_all(line: PipelineUnderTest) -> bool:
    [found] = read_status(line.config).webhooks
    return found.state == "delivering" and found.group is not None and not found.group.lag


def is_of(key: int, event: dict[str, Any]) -> bool:
    return bool(event["change"]["after"]["id"] == key)


def held_by(line: PipelineUnderTest, topic: str) -> dict[tuple[str, int], OffsetRange]:
    """Return the offsets that each partition of a topic holds, once all is committed."""
    wait_until(lambda: line.frontiers()[-1].seq == 1 + 40, "the log does not have it all")
    count = line.resume()[0].partitions[topic]
    with closing(LogConsumer(line.config)) as reading:
        return reading.confirmed([(topic, number) for number in range(count)])


def test_a_status_that_is_read_again_makes_no_further_client(
    pipeline: NewPipeline, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = hooked(pipeline, receiver)
    with closing(webhooks.WebhookRun(line.config, "hook")) as hook:
        hook.run(lambda: hook.counts.delivered == 1)
    write(line, 5, 1)
    wait_until(lambda: line.frontiers()[-1].seq == 6, "the log does not have it all")
    made = list[str]()

    def counted(name: str, client: Callable[..., Any]) -> Callable[..., Any]:
        def make(given: dict[str, Any]) -> object:
            made.append(name)
            return client(given)

        return make

    monkeypatch.setattr("cdc.log.topics.AdminClient", counted("admin", AdminClient))
    monkeypatch.setattr("cdc.log.consumer.Consumer", counted("consumer", Consumer))
    with closing(WebhooksReader(line.config)) as reader:
        [status] = reader.read()
        assert status.group
        assert status.group.lag >= 5
        assert status.lag_seconds is not None
        before = sorted(made)
        assert before == ["admin", "admin", "consumer", "consumer"]
        for _ in range(3):
            [found] = reader.read()
            assert found.group
            # A marker of a transaction that is tried again may follow.
            assert found.group.committed == status.group.committed
            assert found.group.lag >= status.group.lag
        assert sorted(made) == before


def test_a_group_whose_offsets_or_topic_are_lost_is_a_gap_and_never_a_new_one(
    pipeline: NewPipeline, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = hooked(pipeline, receiver)
    topic = names.data_topic(line.config.prefix, "public", "t")
    with closing(webhooks.WebhookRun(line.config, "hook")) as hook:
        hook.run(lambda: hook.counts.delivered == 1)
    admin = topics.admin(line.config)
    name = group_id(line.config, group_records.webhook_group("hook"))
    admin.delete_consumer_groups([name])[name].result()
    with (
        closing(Group(line.config, "webhook.hook", [topic])) as member,
        pytest.raises(GapError, match=r"offsets\.retention\.minutes"),
    ):
        receive_on(member)
    monkeypatch.setenv("LOCKSTEP_CONFIG", str(line.config_file))
    sought = CliRunner().invoke(group, ["seek", "webhook.hook", "--to", "beginning"])
    assert sought.exit_code == 0, sought.output
    with closing(webhooks.WebhookRun(line.config, "hook")) as hook:
        hook.run(lambda: hook.counts.delivered == 1)
        with pytest.raises(UnavailableError, match="has members"):
            Group(line.config, "webhook.hook", [topic, names.messages_topic(line.config.prefix)])
    assert group_records.read(line.config)["webhook.hook"].topics.keys() == {topic}
    for lsn, code in (("0/1", 1), (str(line.frontiers()[-1].lsn), 0)):
        found = CliRunner().invoke(group, ["seek", "webhook.hook", "--to", lsn])
        assert found.exit_code == code, (lsn, found.output)


def test_a_table_that_a_webhook_reads_no_longer_is_no_gap(
    pipeline: NewPipeline, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its topic may lag, lose what was not received, or be deleted."""
    line = hooked(pipeline, receiver)
    kept, left = (names.data_topic(line.config.prefix, "public", name) for name in "tu")
    admin = topics.admin(line.config)
    admin.create_topics([NewTopic(left, 1, 1)])[left].result(60)
    with closing(Group(line.config, "webhook.hook", [kept, left], "beginning")):
        pass
    with closing(webhooks.WebhookRun(line.config, "hook")) as hook:
        hook.run(lambda: hook.counts.delivered == 1)
    admin.delete_topics([left])[left].result(60)
    monkeypatch.setenv("LOCKSTEP_CONFIG", str(line.config_file))
    for _ in range(2):
        with closing(WebhooksReader(line.config)) as reader:
            wait_until(lambda: left not in admin.list_topics(timeout=60).topics, "the topic stays")
            [status] = reader.read()
            assert status.group
            assert not status.group.gap
            assert {topic for topic, _ in status.group.committed} == {kept}
        sought = CliRunner().invoke(group, ["seek", "webhook.hook", "--to", "beginning"])
        assert sought.exit_code == 0, sought.output
    assert group_records.read(line.config)["webhook.hook"].topics.keys() == {kept}
