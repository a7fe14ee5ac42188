"""Compacted topics as a store: what a consumer sees, killed and frozen writers, other owners."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
from confluent_kafka import Message, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    NewTopic,
)

from cdc import failpoints
from cdc.config.followers import Follower, TopicFollower
from cdc.errors import ConfigError, FencedError, OvertakenError, StoreLostError
from lockstep.conformance.store import LINES, USERS, applied, apply, change, key, row
from lockstep.jobs.apply import stores
from lockstep.sinks.contract import Altered, AlteredColumn, Changes, Sink
from lockstep.sinks.topic.cluster import FollowerTopics
from tests.fixtures.store_topic import TopicStore, records
from tests.fixtures.topic_settings import set_topic

Row = dict[str, Any]
CUTS = 12


@pytest.fixture
def sink(topic_store: TopicStore) -> Iterator[Sink]:
    made = topic_store.sink()
    assert made.open() is None
    yield made
    made.close()


def users(seq: int, *ids: int, truncated: int | None = None) -> Changes:
    new = [change(USERS, seq, row(USERS, seq, each), each) for each in ids]
    return Changes((USERS,), new, truncated)


def deleted(seq: int, number: int) -> Changes:
    return Changes((USERS,), [change(USERS, seq, None, number)])


def of_users(store: TopicStore) -> list[Message]:
    return records(store.bootstrap, f"{store.prefix}.public.users")


def headers(message: Message) -> dict[str, bytes]:
    found: Any = message.headers()
    return dict(found)


def test_a_consumer_gets_each_key_once_a_cut_with_its_seq_and_lsn(
    sink: Sink, topic_store: TopicStore
) -> None:
    sink.begin(9, [USERS])
    sink.write(users(1, 1, 2, 3))
    sink.write(users(5, 2))
    sink.write(deleted(6, 3))
    assert of_users(topic_store) == []
    sink.commit(applied(9))
    found = {each.key(): each for each in of_users(topic_store)}
    assert len(found) == len(of_users(topic_store)) == 3
    newest = found[key(USERS, 2)]
    assert msgspec.json.decode(newest.value() or b"") == row(USERS, 5, 2)
    assert found[key(USERS, 3)].value() is None
    assert headers(newest) == {
        "lockstep.seq": b"5",
        "lockstep.lsn": b"0/16E9005",
        "lockstep.follower": b"shop/copy",
    }


def test_a_truncate_is_a_tombstone_for_each_row_that_is_there(
    sink: Sink, topic_store: TopicStore
) -> None:
    """Also for rows that another process wrote, and for earlier ones of the same cut."""
    apply(sink, 3, users(3, 1, 2, 3))
    apply(sink, 4, deleted(4, 3))
    with closing(topic_store.sink()) as other:
        other.open()
        other.begin(8, [USERS])
        other.write(users(5, 2, 7))
        other.write(users(7, 1, truncated=6))
        other.commit(applied(8))
    assert topic_store.rows("public.users") == {key(USERS, 1): row(USERS, 7, 1)}
    tombstones = {e.key(): headers(e) for e in of_users(topic_store) if e.value() is None}
    assert tombstones.keys() == {key(USERS, n) for n in (2, 3, 7)}
    assert tombstones[key(USERS, 2)] == {
        "lockstep.seq": b"6",
        "lockstep.follower": b"shop/copy",
    }


# --- killed, frozen, and two at once ---


def cut_of(number: int) -> list[Changes]:
    """Return the changes of a cut, always the same ones."""
    chance, seq = random.Random(number), 100 * number
    cuts = []
    for version in (USERS, LINES):
        truncated = seq if chance.random() < 0.2 else None
        changes = []
        for at in chance.sample(range(12), 5):
            seq += 1
            values = (at,) if version is USERS else (at % 3, at)
            new = None if chance.random() < 0.3 else row(version, seq, *values)
            changes.append(change(version, seq, new, *values))
        cuts.append(Changes((version,), changes, truncated))
    return cuts


def play(store: TopicStore, last: int) -> None:
    """Continue with the cuts after the store's frontier."""
    with closing(store.sink()) as sink:
        state = sink.open()
        done = state.applied.seq // 100 if state else 0
        for number in range(done + 1, last + 1):
            apply(sink, 100 * number + 99, *cut_of(number))


def states(store: TopicStore) -> Iterator[tuple[int, dict[str, dict[bytes, Row]]]]:
    """Yield the seq and the rows of each state that the own topic names, as a reader would."""
    held = {name: records(store.bootstrap, f"{store.prefix}.{name}") for name in TABLES}
    for record in records(store.bootstrap, f"{store.prefix}.cdc.follower"):
        if record.key() != b"frontier":
            continue
        frontier = msgspec.json.decode(record.value() or b"")
        state: dict[str, dict[bytes, Row]] = {name: {} for name in TABLES}
        for name, table in frontier["tables"].items():
            for each in held[name]:
                number, at, offset = each.partition(), each.key(), each.offset()
                assert number is not None
                assert offset is not None
                assert isinstance(at, bytes)
                if offset < table["ends"][number]:
                    value = each.value()
                    state[name].pop(at, None)
                    if value is not None:
                        state[name][at] = msgspec.json.decode(value)
        yield frontier["seq"], state


TABLES = ("public.users", "public.lines")


def model(last: int) -> dict[str, dict[bytes, Row]]:
    state: dict[str, dict[bytes, Row]] = {name: {} for name in TABLES}
    for number in range(1, last + 1):
        for changes in cut_of(number):
            rows = state[changes.version.name]
            if changes.truncated is not None:
                rows.clear()
            for each in changes.changes:
                assert each.key is not None
                rows.pop(each.key, None)
                if each.row is not None:
                    rows[each.key] = msgspec.json.decode(each.row)
    return state


def test_killed_in_its_transactions_it_loses_and_repeats_nothing(topic_store: TopicStore) -> None:
    """No record is in a topic twice, and each frontier is a state of the model."""
    code = (
        "from tests.fixtures.store_topic import TopicStore;"
        "from tests.integration.test_topic_sink import play;"
        f"play(TopicStore({topic_store.bootstrap!r}, {topic_store.prefix!r}), {CUTS})"
    )
    for failpoint in ("topic_sent:2", "topic_flushed:1", "topic_flushed:4", "topic_sent:3"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "LOCKSTEP_FAILPOINT": failpoint},
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    play(topic_store, CUTS)
    found = dict(states(topic_store))
    assert sorted(found) == [0, *(100 * number + 99 for number in range(1, CUTS + 1))]
    for seq, state in found.items():
        assert state == model(seq // 100), f"at seq {seq}"
    for name in TABLES:
        written = Counter(
            (each.key(), headers(each)["lockstep.seq"])
            for each in records(topic_store.bootstrap, f"{topic_store.prefix}.{name}")
        )
        assert set(written.values()) == {1}


@pytest.mark.parametrize("above", [None, 3])
def test_a_copy_that_sleeps_in_its_transaction_is_fenced(
    topic_store: TopicStore, sink: Sink, monkeypatch: pytest.MonkeyPatch, above: int | None
) -> None:
    """It finds what the other has written, and writes the rest; a difference it does not write."""
    apply(sink, 3, users(3, 1, 2, 3))
    other, slept = topic_store.sink(), list[str]()
    reach, upto = failpoints.reach, 5 if above is None else 7

    def sleep(name: str) -> None:
        if name == "topic_sent" and not slept:
            slept.append(name)
            other.open()
            other.begin(upto, [USERS], above)
            other.write(users(5, 1))
            other.commit(applied(upto))
        reach(name)

    sink.begin(7, [USERS], above)
    sink.write(users(5, 1))
    sink.write(users(7, 2))
    monkeypatch.setattr(failpoints, "reach", sleep)
    if above is not None:
        with pytest.raises(OvertakenError, match="another cut"):
            sink.commit(applied(7))
    else:
        sink.commit(applied(7))
    other.close()
    assert slept
    seqs = [int(headers(each)["lockstep.seq"]) for each in of_users(topic_store)]
    assert sorted(seqs) == ([3, 3, 3, 5, 7] if above is None else [3, 3, 3, 5])
    everything = records(
        topic_store.bootstrap, f"{topic_store.prefix}.public.users", "read_uncommitted"
    )
    assert len(everything) > len(seqs), "the other copy has aborted a transaction"


def test_a_cut_that_takes_longer_than_its_transaction_may_names_the_setting(
    topic_store: TopicStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brokers end such a transaction, and fence its writer as another copy does."""
    hasty = TopicFollower(prefix=topic_store.prefix, kafka={"transaction.timeout.ms": 1_000})
    slow, fenced = [1.1, 0.0, 1.1, 1.1], list[float]()

    def sent_slowly(name: str) -> None:
        if name == "topic_sent" and len(fenced) < len(slow):
            fenced.append(slow[len(fenced)])
            time.sleep(fenced[-1])
            raise FencedError("sending a batch: this instance has been fenced", hint="")

    with closing(stores.sink(topic_store.config, "copy", Follower(topic=hasty))) as sink:
        sink.open()
        sink.begin(2, [USERS])
        sink.write(users(2, 1))
        with monkeypatch.context() as patched:
            patched.setattr(failpoints, "reach", sent_slowly)
            with pytest.raises(ConfigError, match="than the 1 s after which brokers end") as error:
                sink.commit(applied(2))
        assert fenced == slow, "a copy that was frozen once tries again"
        assert "transaction.max.timeout.ms" in error.value.hint
        sink.commit(applied(2))
    assert topic_store.rows("public.users") == {key(USERS, 1): row(USERS, 2, 1)}


# --- whose topics they are ---


def produce(store: TopicStore, topic: str, **more: Any) -> None:  # noqa: ANN401 - confluent's
    admin = AdminClient({"bootstrap.servers": store.bootstrap})
    if topic not in store.topics():
        made = NewTopic(topic, 2, 1, config={"cleanup.policy": "compact"})
        admin.create_topics([made])[topic].result(timeout=60)
    producer = Producer({"bootstrap.servers": store.bootstrap})
    producer.produce(topic, b"{}", b"x", 0, **more)
    assert producer.flush(60) == 0


def test_topics_of_others_are_not_written_to(topic_store: TopicStore, sink: Sink) -> None:
    """Nor is a prefix that another follower or a pipeline has; an empty topic is taken."""
    prefix = topic_store.prefix
    admin = AdminClient({"bootstrap.servers": topic_store.bootstrap})
    empty = NewTopic(f"{prefix}.public.lines", 5, 1, config={"cleanup.policy": "compact"})
    admin.create_topics([empty])[empty.topic].result(timeout=60)
    line = Changes((LINES,), [change(LINES, 1, row(LINES, 1, 1, 1), 1, 1)])
    apply(sink, 1, line)
    assert topic_store.rows("public.lines") == {key(LINES, 1, 1): row(LINES, 1, 1, 1)}
    produce(topic_store, f"{prefix}.public.users")
    with pytest.raises(ConfigError, match="has records of something else"):
        sink.begin(2, [USERS])
    topic_store.delete(f"{prefix}.public.users")
    produce(topic_store, f"{prefix}.public.users", headers={"lockstep.follower": b"shop/another"})
    with pytest.raises(ConfigError, match="has records of shop/another"):
        sink.begin(2, [USERS])
    with (
        closing(TopicStore(topic_store.bootstrap, prefix, "another").sink()) as other,
        pytest.raises(ConfigError, match="are those of follower copy of pipeline shop"),
    ):
        other.open()
    produce(topic_store, f"{prefix}.cdc.resume")
    with pytest.raises(ConfigError, match="prefix of a pipeline"):
        sink.open()


# --- what may be lost ---


def test_lost_topics_are_noticed_and_no_row_outlives_them(
    topic_store: TopicStore, sink: Sink
) -> None:
    """Deleted topics and records; rows without the frontier record get tombstones."""
    prefix = topic_store.prefix
    admin = AdminClient({"bootstrap.servers": topic_store.bootstrap})
    line = Changes((LINES,), [change(LINES, 1, row(LINES, 1, 1, 1), 1, 1)])
    apply(sink, 1, users(1, 1, 2), line)
    topic_store.delete(f"{prefix}.public.lines")
    apply(sink, 2, users(2, 1))
    with pytest.raises(StoreLostError, match=r"public\.lines does not exist"):
        sink.begin(3, [LINES])
    with pytest.raises(StoreLostError, match=r"public\.lines does not exist"):
        sink.open()
    sink.start_over(2)
    assert sink.open() is None
    assert (sink.current(), topic_store.rows("public.users")) == (2, {})
    apply(sink, 3, users(3, 1, 2), line)
    # From a compacted topic no records can be deleted.
    set_topic(topic_store.bootstrap, f"{prefix}.public.users", "cleanup.policy", "compact,delete")
    users_topic = TopicPartition(f"{prefix}.public.users", 0, 1)
    ends = {each.partition() for each in of_users(topic_store)}
    users_topic.partition = min(n for n in ends if n is not None)
    admin.delete_records([users_topic])[users_topic].result(timeout=60)
    with pytest.raises(StoreLostError, match="records were deleted"):
        sink.open()
    topic_store.delete(f"{prefix}.cdc.follower")
    with pytest.raises(StoreLostError, match="frontier record"):
        sink.open()
    sink.start_over(3)
    assert topic_store.rows("public.users") == {}
    apply(sink, 1, users(1, 5))
    assert topic_store.rows("public.users") == {key(USERS, 5): row(USERS, 1, 5)}


def test_a_topic_from_which_kafka_would_delete_rows_is_refused(
    topic_store: TopicStore, sink: Sink
) -> None:
    apply(sink, 1, users(1, 1))
    topic = f"{topic_store.prefix}.public.users"
    set_topic(topic_store.bootstrap, topic, "cleanup.policy", "compact,delete")
    with pytest.raises(ConfigError, match="would delete rows"):
        sink.open()


def test_a_row_that_is_larger_than_its_topic_takes_is_refused_by_its_seq(
    topic_store: TopicStore, sink: Sink
) -> None:
    """And nothing of the cut is there; a row that just fits is."""
    most = (16 << 20) - 4_096
    fits = row(USERS, 2, 1)
    fits["body"] = "x" * (most - len(msgspec.json.encode(fits)) - len(key(USERS, 1)) + 6)
    apply(sink, 2, Changes((USERS,), [change(USERS, 2, fits, 1)]))
    assert topic_store.rows("public.users") == {key(USERS, 1): fits}
    larger = fits | {"name": f"{fits['name']}yy"}
    sink.begin(4, [USERS])
    with pytest.raises(ConfigError, match=r"a row of public\.users, of seq 4, is larger"):
        sink.write(Changes((USERS,), [*users(3, 5).changes, change(USERS, 4, larger, 1)]))
    sink.close()
    assert topic_store.rows("public.users") == {key(USERS, 1): fits}


# --- changed tables ---


def test_another_key_is_refused_unless_there_are_no_rows(
    topic_store: TopicStore, sink: Sink
) -> None:
    other = USERS._replace(schema_id=9, key=("name",))
    new = change(USERS, 3, row(USERS, 3, 1), 1)._replace(schema_id=9, key=b'{"name":"n3"}')
    apply(sink, 1, users(1, 1))
    with pytest.raises(ConfigError, match=r"public\.users has another key now \(name\)"):
        apply(sink, 3, Changes((other,), [new]))
    apply(sink, 3, Changes((other,), [new], truncated=2))
    assert topic_store.rows("public.users") == {b'{"name":"n3"}': row(USERS, 3, 1)}
    with pytest.raises(ConfigError, match=r"public\.users has another key now \(id\)"):
        apply(sink, 4, users(4, 2))


@pytest.mark.parametrize("by_another", [False, True])
def test_deleted_rows_stay_deleted_after_kafka_has_removed_their_tombstones(
    topic_store: TopicStore, sink: Sink, monkeypatch: pytest.MonkeyPatch, *, by_another: bool
) -> None:
    """Rows that were read once are altered a day after some of them were deleted."""
    apply(sink, 1, users(1, 1, 2, 3))
    assert len(sink.rows(USERS, [key(USERS, 1), key(USERS, 2)])) == 2
    with closing(topic_store.sink()) as other:
        other.open()
        apply(other if by_another else sink, 3, deleted(2, 1), users(3, 3))
    read = FollowerTopics.records

    def compacted(topics: FollowerTopics, ranges: Any) -> Iterator[list[Any]]:  # noqa: ANN401
        newest = {each[0]: each for found in read(topics, ranges) for each in found}
        yield [each for each in newest.values() if each[2] is not None]

    monkeypatch.setattr(FollowerTopics, "records", compacted)
    wider = USERS._replace(schema_id=9)
    columns = tuple(AlteredColumn(each.name, each.name) for each in USERS.columns)
    sink.open()
    sink.begin(5, [USERS, wider])
    assert hasattr(sink, "alter")
    sink.alter(Altered(4, USERS, wider, (*columns, AlteredColumn("added", None, b"7"))))
    sink.commit(applied(5))
    assert topic_store.rows("public.users") == {
        key(USERS, 2): row(USERS, 1, 2) | {"added": 7},
        key(USERS, 3): row(USERS, 3, 3) | {"added": 7},
    }


def test_renamed_columns_have_their_names_in_older_rows(
    topic_store: TopicStore, sink: Sink
) -> None:
    """A renamed key is a tombstone and a new record; rows that are written later are not older."""
    apply(sink, 2, users(1, 1, 2), users(2, 3))
    columns = tuple(
        each._replace(name={"id": "number", "name": "title"}.get(each.name, each.name))
        for each in USERS.columns
    )
    renamed = USERS._replace(schema_id=9, key=("number",), columns=columns)
    names = {"number": "id", "title": "name"}
    altered = Altered(
        5, USERS, renamed,
        (*(AlteredColumn(each.name, names.get(each.name, each.name)) for each in columns),
         AlteredColumn("added", None, b"7")),
    )  # fmt: skip

    def renamed_row(seq: int, number: int) -> Row:
        old = row(USERS, seq, number)
        return {{"id": "number", "name": "title"}.get(n, n): each for n, each in old.items()}

    later = change(USERS, 6, row(USERS, 6, 3), 3)._replace(
        schema_id=9, key=b'{"number":3}', row=msgspec.json.encode(renamed_row(6, 3))
    )
    sink.begin(6, [USERS, renamed])
    sink.write(users(4, 2))
    assert hasattr(sink, "alter")
    sink.alter(altered)
    sink.write(Changes((renamed,), [later]))
    sink.commit(applied(6))
    assert topic_store.rows("public.users") == {
        b'{"number":1}': renamed_row(1, 1) | {"added": 7},
        b'{"number":2}': renamed_row(4, 2) | {"added": 7},
        b'{"number":3}': renamed_row(6, 3),
    }
