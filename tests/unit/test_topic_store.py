"""A follower in topics without Kafka: its settings, its records, and a cut before it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from random import Random
from typing import Any

import msgspec
import pytest

from cdc.config import Config, Log, Source
from cdc.config.followers import Follower, TopicFollower
from cdc.errors import ConfigError
from cdc.events import LSN
from lockstep.conformance.store import USERS, applied
from lockstep.jobs.apply import stores
from lockstep.sinks.contract import Altered, AlteredColumn
from lockstep.sinks.topic.cluster import TopicSettings
from lockstep.sinks.topic.records import (
    FRONTIER,
    STARTED,
    Started,
    TopicFrontier,
    TopicTable,
    decoded,
    encode,
)
from lockstep.sinks.topic.rows import TopicRow, TopicRows

T = "public.users"


@pytest.fixture
def rows() -> Iterator[TopicRows]:
    with closing(TopicRows()) as made:
        yield made


def put(rows: TopicRows, *changes: tuple[bytes, int, bytes | None]) -> None:
    rows.put(TopicRow(T, key, seq, 1, value) for key, seq, value in changes)


def result(rows: TopicRows) -> list[tuple[bytes, int, bytes | None]]:
    return [(each.key, each.seq, each.value) for each in rows.changes()]


def test_the_newest_change_of_a_key_is_in_front_of_its_stored_row(rows: TopicRows) -> None:
    rows.load(T, [(b"a", 1, b"1"), (b"b", 2, b"2"), (b"c", 3, b"3"), (b"c", 4, None)])
    put(rows, (b"a", 9, b"9"), (b"d", 6, b"6"), (b"b", 7, None), (b"a", 5, b"5"))
    assert rows.rows(T, [b"a", b"b", b"c", b"d", b"e"]) == {b"a": b"9", b"d": b"6"}
    assert sorted(rows.all(T)) == [(b"a", 9, b"9"), (b"d", 6, b"6")]
    assert result(rows) == [(b"d", 6, b"6"), (b"b", 7, None), (b"a", 9, b"9")]
    assert rows.rows("public.lines", [b"a"]) == {}
    rows.end_cut()
    assert rows.rows(T, [b"a", b"b"]) == {b"a": b"1", b"b": b"2"}


def test_a_truncate_leaves_what_has_its_seq_or_a_later_one(rows: TopicRows) -> None:
    rows.load(T, [(b"a", 1, b"1"), (b"b", 2, b"2")])
    put(rows, (b"c", 3, b"3"), (b"d", 5, b"5"))
    rows.clear(T, 5, 5)
    put(rows, (b"a", 5, b"new"))
    assert sorted(rows.all(T)) == [(b"a", 5, b"new"), (b"d", 5, b"5")]
    assert {(key, value) for key, _, value in result(rows)} == {
        (b"a", b"new"), (b"b", None), (b"c", None), (b"d", b"5"),
    }  # fmt: skip
    rows.clear(T, 1)
    assert not rows.has(T)


def test_what_another_copy_has_written_is_left_out(rows: TopicRows) -> None:
    rows.load(T, [(b"a", 1, b"1")])
    put(rows, (b"b", 3, b"3"))
    rows.clear(T, 4, 4)
    put(rows, (b"c", 6, b"6"))
    rows.applied_up_to(4)
    assert result(rows) == [(b"c", 6, b"6")]


def test_altered_rows_keep_their_order_with_later_ones(rows: TopicRows) -> None:
    """Keys may exchange their places: a row is read before any is written."""
    columns = tuple(each._replace(name=f"{each.name}_") for each in USERS.columns)
    version = USERS._replace(schema_id=2, key=("id_",), columns=columns)
    altered = Altered(
        5, USERS, version, tuple(AlteredColumn(f"{c.name}_", c.name) for c in USERS.columns)
    )
    rows.load(T, [(b'{"id":1}', 1, b'{"id":1,"name":"a"}'), (b'{"id":2}', 2, b'{"id":2}')])
    put(rows, (b'{"id":3}', 4, b'{"id":3}'), (b'{"id_":4}', 7, b'{"id_":4}'))
    rows.alter(altered)
    assert sorted(rows.all(T)) == [
        (b'{"id_":1}', 5, b'{"id_":1,"name_":"a"}'),
        (b'{"id_":2}', 5, b'{"id_":2}'),
        (b'{"id_":3}', 5, b'{"id_":3}'),
        (b'{"id_":4}', 7, b'{"id_":4}'),
    ]
    assert {key for key, _, value in result(rows) if value is None} == {
        b'{"id":1}', b'{"id":2}', b'{"id":3}',
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_random_cuts_end_as_a_model(rows: TopicRows, seed: int) -> None:
    """With each cut kept, or loaded afterwards as its consumer would read it."""
    chance, seq = Random(seed), 0
    model: dict[bytes, tuple[int, bytes]] = {}
    for _ in range(30):
        for _ in range(chance.randint(1, 6)):
            seq += 1
            key = b"%d" % chance.randint(0, 8)
            if chance.random() < 0.15:
                rows.clear(T, seq, seq)
                model.clear()
            elif chance.random() < 0.3:
                put(rows, (key, seq, None))
                model.pop(key, None)
            else:
                value = b"%d" % seq
                put(rows, (key, seq, value))
                model[key] = seq, value
        assert {key: (at, value) for key, at, value in rows.all(T)} == model
        made = result(rows)
        assert len({key for key, *_ in made}) == len(made)
        if seed % 2:
            rows.keep(T)
        rows.end_cut()
        if not seed % 2:
            rows.load(T, made)
        assert {key: (at, value) for key, at, value in rows.all(T)} == model


def test_records_are_read_as_they_were_written() -> None:
    table = TopicTable("x.public.users", "id", ("id",), (4, 0))
    new = TopicFrontier(pipeline="shop", follower="copy", generation=1, token="t", tables={})
    later = new.at(applied(7), {T: table.at({("x.public.users", 1): 9})})
    found = decoded("own", {FRONTIER: encode(later), STARTED: encode(Started("t", 8))})
    assert found is not None
    assert encode(found) == encode((later, Started("t", 8)))
    assert found[0].state == applied(7)
    assert later.tables[T].ends == (4, 9)
    assert (later.state, later.lsn) == (applied(7), str(LSN(applied(7).lsn)))
    assert (new.state.pipeline, new.state.seq) == ("", 0)
    assert decoded("own", {FRONTIER: encode(new)}) == (new, Started("t", 0))
    assert decoded("own", {STARTED: encode(Started("t", 8))}) is None
    with pytest.raises(ConfigError, match="own holds other records"):
        decoded("own", {FRONTIER: msgspec.json.encode({"seq": 1})})


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, ("log:9092", "shop-copy", 4, 3, {"security.protocol": "ssl", "linger.ms": 5})),
        (
            {"partitions": 9, "replication_factor": 1, "kafka": {"linger.ms": 7}},
            ("log:9092", "shop-copy", 9, 1, {"security.protocol": "ssl", "linger.ms": 7}),
        ),
        (
            {"bootstrap_servers": "far:9092", "prefix": "x", "kafka": {"client.id": "me"}},
            ("far:9092", "x", 4, 3, {"client.id": "me"}),
        ),
    ],
)
def test_it_has_the_logs_brokers_and_settings_unless_it_names_its_own(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], wanted: tuple[Any, ...]
) -> None:
    made = list[TopicSettings]()
    monkeypatch.setattr("lockstep.sinks.topic.sink.TopicSink", made.append)
    config = Config(
        pipeline="shop",
        source=Source(dsn="postgresql://nobody"),
        log=Log(
            bootstrap_servers="log:9092",
            replication_factor=3,
            kafka={"security.protocol": "ssl", "linger.ms": 5},
        ),
        followers={"copy": Follower(topic=TopicFollower(**options))},
    )
    stores.sink(config, "copy", config.followers["copy"])
    log = made[0].config.log
    assert wanted == (
        log.bootstrap_servers,
        made[0].config.prefix,
        log.partitions,
        log.replication_factor,
        log.kafka,
    )
    assert (made[0].pipeline, made[0].follower) == ("shop", "copy")
