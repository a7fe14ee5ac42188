"""Documents follow a real mirror, frontier by frontier, into a store."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyspark.sql import SparkSession

from cdc.config import Config, Log, Source
from cdc.config.followers import DeltaFollower, Follower, RedisFollower
from cdc.errors import GapError, OvertakenError, UnavailableError
from cdc.events import LSN
from cdc.log import names
from cdc.log.records import FrontierRecord, encode
from lockstep.conformance.memory import STORES, MemorySink
from lockstep.jobs.apply import following_documents as following
from lockstep.jobs.apply.following_documents import DocumentsFollowing, apply
from lockstep.jobs.apply.running import FollowerRun
from lockstep.jobs.documents.mirror_cuts import MirrorCuts
from lockstep.sinks.contract import Applied, Change, Changes, Column, Generations, Version
from lockstep.sinks.delta.settings import DeltaSettings
from lockstep.sinks.delta.sink import DeltaSink
from lockstep.sinks.redis import sink as redis_sink
from tests.fixtures.daemon import wait_until
from tests.fixtures.servers import KafkaServer
from tests.property.test_documents import DOCUMENTS, KEYS, VERSIONS, World, expected

MONEY = Decimal("0.01")
# In memory, and with servers.
STORES_IN_TURN = [
    pytest.param({}, id="memory"),
    *(
        pytest.param(f"{name}_store", id=name, marks=pytest.mark.slow)
        for name in ("redis", "opensearch")
    ),
]


class Shop:
    """A pipeline without a log: rows are written to the mirror, documents are built from it."""

    def __init__(
        self,
        path: Path,
        *,
        soft: bool = False,
        applier: str = "delta-rs",
        store: Callable[[], Generations] | None = None,
    ) -> None:
        self.path, self.name = path, str(path)
        self.store = store or (lambda: MemorySink(self.name))
        self.config = Config(
            pipeline="x",
            source=Source(dsn="postgresql://nobody"),
            log=Log(bootstrap_servers="localhost:1", prefix="x"),
            followers={
                "lake": Follower(delta=DeltaFollower(path=str(path))),
                "cache": Follower(
                    redis=RedisFollower(url="redis://nowhere"), documents=DOCUMENTS, mirror="lake"
                ),
            },
        )
        self.known = {0: dict(VERSIONS)}
        self.mirror = DeltaSink(
            DeltaSettings("x", "lake", "x", str(path), soft=soft, applier=applier)
        )
        self.mirror.open()
        self.world: World = {name: {} for name in VERSIONS}
        self.seq = 0
        self.restarts = True  # before each cut
        self._open()

    def _open(self) -> None:
        if self.restarts:
            self.follower = MirrorCuts(self.config, "cache", self._in_force)
        self.sink = self.store()

    def _in_force(self, lsn: LSN) -> Mapping[str, Version]:
        newest = max(at for at in self.known if at <= lsn)
        return self.known[newest]

    @property
    def versions(self) -> dict[str, Version]:
        return self.known[max(self.known)]

    def alter(self, version: Version) -> None:
        """Start another version of a table, after the newest frontier."""
        self.known[self.seq + 1] = self.versions | {version.name: version}

    def cut(self, changes: Mapping[str, Mapping[tuple[Any, ...], dict[str, Any] | None]]) -> None:
        """Advance the mirror to the next frontier."""
        reported = []
        for name, rows in changes.items():
            version, made = self.versions[name], []
            for key, row in rows.items():
                self.seq += 1
                if row is None:
                    self.world[name].pop(key, None)
                else:
                    self.world[name][key] = self.seq, row
                made.append(
                    Change(
                        _key(name, key),
                        self.seq,
                        None if row is None else _encoded(row),
                        version.schema_id,
                        self.seq,
                        self.seq,
                        op="d" if row is None else "u",
                    )
                )
            reported.append(Changes((version,), made))
        self.mirror.begin(self.seq, [each.version for each in reported])
        for each in reported:
            self.mirror.write(each)
        self.mirror.commit(self.applied())

    def applied(self, *, generation: int = 1, later: int = 0) -> Applied:
        """Return the frontier at the newest seq, or one of a later LSN."""
        return Applied("x", generation, 1, LSN(self.seq + later), self.seq, self.seq, 1, {})

    def rebuild(self) -> None:
        """Build the mirror again, of the rows that it should have, up to the frontier it is at."""
        versions = self.versions
        with closing(self.mirror.at(2)) as built:
            built.open()
            built.begin(self.seq, list(versions.values()))
            for name, rows in self.world.items():
                version = versions[name]
                changes = [
                    Change(_key(name, key), seq, _encoded(row), version.schema_id, seq, seq)
                    for key, (seq, row) in rows.items()
                ]
                built.write(Changes((version,), changes))
            built.commit(self.applied(generation=2))
        self.mirror.switch(2)
        self.mirror.open()

    def follow(self, most_events: int | None = None) -> bool:
        """Advance the documents to the mirror's frontier."""
        self._open()
        with closing(self.sink):
            cut = self.follower.cut(self.sink.open(), most_events=most_events)
            if cut is not None:
                apply(self.follower, self.sink, cut, 1)
            return cut is not None

    def tear(self, chosen: Random) -> None:
        """Start to advance the documents to the mirror's frontier, and die after writing some."""
        self._open()
        with closing(self.sink):
            cut = self.follower.cut(self.sink.open())
            assert cut is not None
            applied = cut.after.applied
            versions = [each.version for each in self.follower.kinds(applied)]
            above = None if cut.replaces else cut.before.applied.seq if cut.before else 0
            self.sink.begin(applied.seq, versions, above)
            for changes in self.follower.changes(cut):
                some = [each for each in changes.changes if chosen.random() < 0.7]
                self.sink.write(changes._replace(changes=some))

    def give_up(self) -> None:
        """Compute the next cut, and write nothing of it, as where the store is away."""
        self._open()
        with closing(self.sink):
            cut = self.follower.cut(self.sink.open())
            assert cut is not None
            for _ in self.follower.changes(cut):
                pass

    def check(self) -> None:
        """Fail unless the documents are those of the rows."""
        self._open()
        with closing(self.sink):
            state = self.sink.open()
            assert state is not None
            assert (state.applied.seq, state.reached) == (self.seq, self.seq)
            for kind in self.follower.kinds(state.applied):
                stored = self.sink.contents(kind.version)
                found = {key.decode(): json.loads(row) for key, _, row in stored}
                assert found == json.loads(json.dumps(expected(kind.root.name, self.world)))


def _key(name: str, key: tuple[Any, ...]) -> bytes:
    return _encoded(dict(zip(KEYS[name], key, strict=True)))


def _encoded(row: dict[str, Any]) -> bytes:
    return msgspec.json.encode(row, enc_hook=str)


@pytest.fixture
def shop(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Shop]:
    given = getattr(request, "param", {})
    if isinstance(given, str):
        given = {"store": request.getfixturevalue(given).sink}
        # Otherwise Redis gets a cut in one call with its frontier, and nothing could be torn.
        monkeypatch.setattr(redis_sink, "SMALL_CHANGES", 0)
    made = Shop(tmp_path / "lake", **given)
    yield made
    made.mirror.close()
    STORES.pop(made.name, None)


def _row(chosen: Random, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    row: dict[str, Any] = {}
    for column in VERSIONS[name].columns:
        if column.type == "int8":
            row[column.name] = chosen.randint(1, 5)
        elif column.type == "numeric":
            row[column.name] = Decimal(chosen.randint(1, 5)).quantize(MONEY)
        else:
            row[column.name] = chosen.choice(["a", "b", "it's", "ü"])
        if column.name not in KEYS[name] and chosen.random() < 0.2:
            row[column.name] = None
    return tuple(row[each] for each in KEYS[name]), row


def _changes(chosen: Random, shop: Shop) -> dict[str, dict[tuple[Any, ...], dict[str, Any] | None]]:
    changes: dict[str, dict[tuple[Any, ...], dict[str, Any] | None]] = {}
    for _ in range(chosen.randint(1, 8)):
        name = chosen.choice(sorted(VERSIONS))
        key, row = _row(chosen, name)
        deleted = chosen.random() < 0.3 and key in shop.world[name]
        changes.setdefault(name, {})[key] = None if deleted else row
    return changes


@pytest.mark.parametrize(
    "shop",
    [{}, {"soft": True}, {"applier": "vectors"}],
    indirect=True,
    ids=["hard", "soft", "vectors"],
)
def test_documents_are_those_of_the_mirrors_frontier(shop: Shop) -> None:
    """Also if frontiers were skipped; deleted rows may stay in the mirror, marked."""
    chosen = Random(6)
    assert not shop.follow()
    for _ in range(10):
        shop.cut(_changes(chosen, shop))
        if chosen.random() < 0.7:
            assert shop.follow()
            shop.check()
    shop.follow()
    shop.check()
    assert not shop.follow()


@pytest.mark.parametrize(
    "shop", [{}, {"applier": "vectors"}], indirect=True, ids=["hard", "vectors"]
)
def test_a_follower_goes_on_after_cuts_that_it_could_not_write(shop: Shop) -> None:
    """The next cut starts where that one had started, and may end later."""
    chosen, given_up = Random(9), 0
    shop.restarts = False
    for _ in range(20):
        shop.cut(_changes(chosen, shop))
        while chosen.random() < 0.5:
            shop.give_up()
            given_up += 1
        if chosen.random() < 0.4:
            assert shop.follow()
            shop.check()
    assert given_up


def test_a_lag_is_worked_off_in_cuts_of_limited_size(shop: Shop) -> None:
    """At the mirror's own frontiers; one with more events than that is taken alone."""
    chosen, seqs = Random(7), [0]
    for many in (3, 2, 2, 2, 9, 1, 2):
        keys = dict(_row(chosen, "shop.people") for _ in range(40))
        some = dict(list(keys.items())[:many])
        shop.cut({"shop.people": some})
        seqs.append(shop.seq)
        if len(seqs) == 2:
            assert shop.follow(4)
    reached = []
    while shop.follow(4):
        with closing(shop.store()) as sink:
            state = sink.open()
            assert state is not None
            reached.append(state.applied.seq)
    assert reached == [seqs[3], seqs[4], seqs[5], seqs[7]]
    shop.check()


@pytest.mark.long("the other store", sample=["redis_store"])
@pytest.mark.parametrize("shop", ["redis_store", "opensearch_store"], indirect=True)
def test_executors_build_the_same_documents(
    shop: Shop, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every document at once; rows that are shown twice, that match nothing, and that are NULL."""
    monkeypatch.setattr(following, "EXECUTORS_FROM_BYTES", 0)
    chosen = Random(8)
    for _ in range(4):
        changes: dict[str, dict[tuple[Any, ...], dict[str, Any] | None]] = {}
        for name in chosen.choices(sorted(VERSIONS), k=40):
            key, row = _row(chosen, name)
            changes.setdefault(name, {})[key] = None if chosen.random() < 0.2 else row
        shop.cut(changes)
    started = list[SparkSession]()

    def session() -> SparkSession:
        started.append(spark)
        return spark

    sink = shop.store()
    with closing(sink):
        cut = shop.follower.cut(sink.open())
        assert cut is not None
        assert apply(shop.follower, sink, cut, 1, session) == sum(
            len(shop.world[document.table]) for document in DOCUMENTS.values()
        )
    assert started
    shop.check()
    shop.cut({"shop.people": {(1,): {"id": 1, "name": "later"}}})
    shop.follow()
    shop.check()


@pytest.mark.long("half a minute each; two copies that meet are in the first tier")
@pytest.mark.parametrize("restarts", [True, False], ids=["next-job", "same-job"])
@pytest.mark.parametrize("shop", ["redis_store", "opensearch_store"], indirect=True)
def test_documents_of_a_torn_cut_are_deleted_with_their_rows(shop: Shop, *, restarts: bool) -> None:
    """Also if the row is in neither of the frontiers between which the follower continues."""
    chosen, shop.restarts = Random(6), restarts
    for step in range(10):
        for _ in range(2):
            changes: dict[str, dict[tuple[Any, ...], dict[str, Any] | None]] = {}
            for name in chosen.choices(sorted(VERSIONS), k=6):
                key, row = _row(chosen, name)
                changes.setdefault(name, {})[key] = row
            for name, rows in shop.world.items():
                deleted = [key for key in rows if chosen.random() < 0.6]
                changes.setdefault(name, {}).update(dict.fromkeys(deleted))
            shop.cut(changes)
            if step % 3 != 2:
                shop.tear(chosen)
        while shop.follow():
            pass
        shop.check()


@pytest.mark.parametrize("shop", ["redis_store", "opensearch_store"], indirect=True)
def test_two_copies_apply_only_cuts_from_the_stores_frontier(shop: Shop) -> None:
    """One starts unknown to the other: what it wrote would be in neither end of the next cut."""
    people = {(n,): {"id": n, "name": "x"} for n in (1, 2, 3)}
    shop.cut({"shop.people": {(1,): people[1,]}})
    shop.follow()
    slow, late = shop.store(), shop.store()
    shop.cut({"shop.people": {(2,): people[2,]}})
    slow_cut = shop.follower.cut(slow.open())
    shop.cut({"shop.people": {(2,): None, (3,): people[3,]}})
    late_cut = shop.follower.cut(late.open())
    assert slow_cut is not None
    assert late_cut is not None
    applied = slow_cut.after.applied
    slow.begin(applied.seq, [each.version for each in shop.follower.kinds(applied)], 1)
    with pytest.raises(OvertakenError):
        apply(shop.follower, late, late_cut, 1)
    while shop.follow():  # a newly opened sink first ends the cut that was started
        pass
    for changes in shop.follower.changes(slow_cut):
        slow.write(changes)
    shop.check()
    with pytest.raises(OvertakenError):
        apply(shop.follower, slow, slow_cut, 1)
    slow.close()
    late.close()
    shop.check()


def test_a_column_is_added_to_every_document_and_removed_again(shop: Shop) -> None:
    """A mirror without the documents' frontier is a gap."""
    shop.cut({"shop.people": {(n,): {"id": n, "name": "x"} for n in (1, 2)}})
    shop.follow()
    people = shop.versions["shop.people"]
    age = Column("age", "int4", 23, -1, nullable=True)
    shop.alter(people._replace(schema_id=9, columns=(*people.columns, age)))
    shop.cut({"shop.people": {(2,): {"id": 2, "name": "x", "age": 7}}})
    shop.follow()
    found = STORES[shop.name].rows("documents.person")
    assert [found[b'{"id":%d}' % n]["age"] for n in (1, 2)] == [None, 7]
    shop.alter(people._replace(schema_id=10, columns=(people.columns[0], age)))
    shop.cut({"shop.people": {(1,): {"id": 1, "age": None}}})
    shop.follow()
    found = STORES[shop.name].rows("documents.person")
    assert all("name" not in each for each in found.values())
    shop.mirror.close()
    shutil.rmtree(shop.path)
    other = Shop(shop.path)
    other.seq = shop.seq
    other.cut({"shop.people": {(3,): {"id": 3, "name": "x"}}})
    with pytest.raises(GapError, match="cdc rebuild cache"):
        other.follow()
    other.mirror.close()


def _damage(shop: Shop) -> None:
    """Give the mirror and the documents other rows than they should have."""
    people = {(n,): {"id": n, "name": "wrong" if n == 1 else "x"} for n in (1, 2, 3, 4)}
    shop.cut({"shop.people": people})
    seq, _ = shop.world["shop.people"][1,]
    shop.cut({"shop.people": {(2,): None}})
    shop.follow()
    shop.world["shop.people"] |= {(1,): (seq, {"id": 1, "name": "right"})}
    shop.world["shop.people"] |= {(2,): (seq + 1, {"id": 2, "name": "x"})}
    del shop.world["shop.people"][4,]


@pytest.mark.parametrize("drops", [False, True], ids=["keeps-old", "drops-old"])
@pytest.mark.parametrize("shop", STORES_IN_TURN, indirect=True)
def test_documents_follow_a_mirror_that_was_rebuilt(shop: Shop, *, drops: bool) -> None:
    """Its rows differ at the frontier of the documents, which a store can't write again."""
    _damage(shop)
    shop.rebuild()
    if drops:
        shop.mirror.drop(1)
    assert not shop.follow()
    shop.mirror.begin(shop.seq, [])
    shop.mirror.commit(shop.applied(later=1))
    assert shop.follow()
    with closing(shop.store()) as sink:
        state = sink.open()
        assert state is not None
        assert (state.applied.lsn, state.applied.mirror_generation) == (shop.seq + 1, 1)
    shop.cut({"shop.people": {(5,): {"id": 5, "name": "y"}}})
    assert shop.follow()
    shop.check()
    shop.cut({"shop.people": {(5,): {"id": 5, "name": "z"}, (3,): None}})
    assert shop.follow()
    shop.check()


@pytest.mark.parametrize("shop", STORES_IN_TURN, indirect=True)
@pytest.mark.parametrize("switched", ["before", "meanwhile"])
def test_an_interrupted_cut_is_continued_around_a_rebuild_of_the_mirror(
    shop: Shop, switched: str
) -> None:
    """One that was started before it ends where it had, and the next one follows the rebuild."""
    _damage(shop)
    chosen, some = Random(3), {"shop.people": {(5,): {"id": 5, "name": "y"}}}
    if switched == "before":
        shop.rebuild()
        shop.cut(some)
        shop.tear(chosen)
    else:
        shop.cut(some)
        shop.tear(chosen)
        shop.rebuild()
    shop.cut({"shop.people": {(3,): None}})
    while shop.follow():
        pass
    shop.check()


def test_documents_of_a_mirror_of_unknown_generation_are_continued(shop: Shop) -> None:
    """An older release has not recorded it."""
    shop.cut({"shop.people": {(1,): {"id": 1, "name": "x"}}})
    shop.follow()
    store = STORES[shop.name]
    assert store.applied is not None
    store.applied = store.applied._replace(mirror_generation=0)
    shop.rebuild()
    shop.cut({"shop.people": {(2,): {"id": 2, "name": "x"}}})
    with closing(shop.store()) as sink:
        cut = shop.follower.cut(sink.open())
    assert cut is not None
    assert cut.before is not None
    assert shop.follow()
    shop.check()
    assert store.applied.mirror_generation == 2


def test_a_look_that_finds_nothing_new_opens_no_table(shop: Shop) -> None:
    """The next frontier is seen at once, and a mirror that is missing within seconds."""
    shop.cut({"shop.people": {(1,): {"id": 1, "name": "x"}}})
    shop.follow()

    def cpu(follower: MirrorCuts) -> float:
        began = time.process_time()
        assert follower.cut(state) is None
        return time.process_time() - began

    with closing(shop.store()) as sink:
        state = sink.open()
        opening = min(cpu(MirrorCuts(shop.config, "cache", lambda _: {})) for _ in range(5))
        assert shop.follower.cut(state) is None
        assert 5 * min(cpu(shop.follower) for _ in range(5)) < opening
        shop.cut({"shop.people": {(2,): {"id": 2, "name": "y"}}})
        cut = shop.follower.cut(state)
        assert cut is not None
        assert cut.after.applied.seq == shop.seq
    shop.follow()
    with closing(shop.store()) as sink:
        state = sink.open()
        assert shop.follower.cut(state) is None
        shutil.rmtree(shop.path)
        with pytest.raises(UnavailableError, match="has no frontiers"):
            wait_until(lambda: shop.follower.cut(state) is not None, "it is not missed")


def test_documents_of_another_log_are_not_continued(
    shop: Shop, kafka_server: KafkaServer, topic_prefix: str
) -> None:
    """Nor is their LSN reported as one of this log, which may already be past it."""
    shop.cut({"shop.people": {(1,): {"id": 1, "name": "x"}}})
    shop.follow()
    log = Log(bootstrap_servers=kafka_server.bootstrap, prefix=topic_prefix)
    config = msgspec.structs.replace(shop.config, log=log)
    began = FrontierRecord(
        pipeline="x", epoch=2, lsn=LSN(900), seq=0, committed_at_us=0, partitions=()
    )
    topic = names.frontier_topic(topic_prefix)
    admin = AdminClient({"bootstrap.servers": kafka_server.bootstrap})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result()
    producer = Producer({"bootstrap.servers": kafka_server.bootstrap})
    producer.produce(topic, encode(began))
    producer.flush()
    following = DocumentsFollowing(config, "cache", shop.store())
    run = FollowerRun(config, "cache", "redis", following)
    run.stop()
    with pytest.raises(GapError, match="where this log has") as error:
        following(run)
    assert "cdc rebuild cache" in error.value.hint
    assert run.applied is not None
    assert run.applied.lsn == 0
