"""Altered bits of the topics' records, in the files of a real broker, are named by every reader."""

from __future__ import annotations

import re
import struct
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from shutil import rmtree
from typing import TYPE_CHECKING, NamedTuple

import pytest
from confluent_kafka.admin import ConfigResource, ResourceType  # type: ignore[attr-defined]
from msgspec.structs import replace

import lockstep
from cdc.console import key_search
from cdc.console.key_indexer import KeyIndexer
from cdc.console.key_search import KeySearch
from cdc.deliver import undelivered, webhooks
from cdc.encode.partition import partition_of
from cdc.errors import CDCError, UnreadableError
from cdc.events import LSN
from cdc.log import acknowledged, names, reader, records, topics
from cdc.log.row_keys import log_keys
from cdc.operate.followers import ARCHIVE
from cdc.operate.status import read_status
from cdc.verify.topics import prove as proof_of
from lockstep.jobs.apply.running import FollowerRun
from lockstep.jobs.archiving import cuts, proving
from lockstep.jobs.archiving.running import Archiving, opened
from lockstep.jobs.compacting.running import Compaction
from lockstep.jobs.following_stores import run_of
from lockstep.jobs.reading_as_of import read_as_of_arrow
from lockstep.jobs.spark.starting import SparkStart
from tests.fixtures.archived import Archived
from tests.fixtures.console import ConsoleUnderTest
from tests.fixtures.daemon import START_SECONDS, NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.followed import small_cuts
from tests.fixtures.read_back import read_to_end
from tests.fixtures.receiver import Receiver
from tests.fixtures.seeds import first_seed
from tests.fixtures.store_sqlite import SqliteStore
from tests.integration.test_webhooks import SECRET, seqs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc.config import Config

ALTERATIONS = 50
# Of a batch in a broker's file: where its length is, its attributes, and its first record.
_LENGTH, _ATTRIBUTES, _RECORDS = 8, 21, 61
_IS_CONTROL = 0x20
_DIGIT = re.compile(rb'":"?[a-z]?([0-9])')


@pytest.fixture
def written(pipeline: NewPipeline, tmp_path: Path) -> PipelineUnderTest:
    """Return a pipeline whose log is complete: rows, logical messages, a dead letter."""
    made = pipeline(
        "CREATE TABLE users (id int PRIMARY KEY, name text)",
        log={"kafka": {"message.max.bytes": 60_000, "compression.type": "none"}},
        followers={
            "copy": {"sql": {"url": f"sqlite:///{tmp_path}/copy.db"}, "tables": ["public.users"]}
        },
    )
    made.start().wait_ready()
    for number in range(5):
        low = 100 * number
        made.database.execute(
            f"INSERT INTO users SELECT g, 'n' || g FROM generate_series({low}, {low + 20}) g",
            f"INSERT INTO users VALUES (-{number + 1}, repeat('y', 100000))",
            f"DELETE FROM users WHERE id % 9 = {number}",
        )
        Archived(made).log_reach()
    assert made.daemon.term() == 0
    return made


@pytest.fixture
def snapshotted(pipeline: NewPipeline) -> PipelineUnderTest:
    """Return a pipeline with the rows of an initial snapshot: many ranges, a dead letter."""
    made = pipeline(
        "CREATE TABLE users (id int PRIMARY KEY, name text)",
        "INSERT INTO users SELECT g, 'n' || g FROM generate_series(1, 3000) g",
        "INSERT INTO users VALUES (0, repeat('y', 100000))",
        log={"kafka": {"message.max.bytes": 60_000, "compression.type": "none"}},
        snapshot={"mode": "initial", "runner": "local", "range_bytes": 16_384, "max_parallel": 3},
    )
    made.start().wait_ready()
    made.database.execute("ALTER TABLE users ADD COLUMN more int", "UPDATE users SET more = 1")
    Archived(made).log_reach()
    assert made.daemon.term() == 0
    return made


def batches(text: bytes) -> list[tuple[int, int]]:
    """Return where the records of each batch are in a broker's file."""
    found, at = [], 0
    while at < len(text):
        end = at + _LENGTH + 4 + struct.unpack_from(">i", text, at + _LENGTH)[0]
        if not struct.unpack_from(">h", text, at + _ATTRIBUTES)[0] & _IS_CONTROL:
            found.append((at + _RECORDS, end))
        at = end
    return found


def files(made: PipelineUnderTest, *more: str) -> list[Path]:
    """Return the broker's files with records that a proof covers, and those of topics in `more`."""
    client = topics.admin(made.config)
    [node, *_] = client.describe_cluster().result().nodes
    asked = ConfigResource(ResourceType.BROKER, str(node.id))
    folder = Path(str(client.describe_configs([asked])[asked].result()["log.dirs"].value))
    if not folder.is_dir():
        pytest.skip("the broker's files are on another machine")
    prefix = made.config.prefix
    own = (names.frontier_topic, names.messages_topic, names.dead_topic)
    covered = [f"{prefix}.public.users", *(name(prefix) for name in own), *more]
    found = [path for each in covered for path in sorted(folder.glob(f"{each}-*/*.log"))]
    return [path for path in found if batches(path.read_bytes())]


def users_file(made: PipelineUnderTest) -> Path:
    """Return a file with rows."""
    topic = f"{made.config.prefix}.public.users"
    return next(each for each in files(made) if each.parent.name.startswith(f"{topic}-"))


def crc32c(data: bytes) -> int:
    """Return the checksum that Kafka's batches have."""
    found = 0xFFFFFFFF
    for byte in data:
        found ^= byte
        for _ in range(8):
            found = found >> 1 ^ 0x82F63B78 * (found & 1)
    return found ^ 0xFFFFFFFF


def altered(text: bytes, chance: Random) -> bytes:
    """Return a file with one bit of a record flipped; or with another digit and a right checksum.

    The digit is in a key or a value: the program that wrote it had no other kind of numbers.
    """
    changed, (start, end) = bytearray(text), chance.choice(batches(text))
    digits = [match.start(1) for match in _DIGIT.finditer(text, start, end)]
    if not digits or chance.random() < 0.5:
        changed[chance.randrange(start, end)] ^= 1 << chance.randrange(8)
        return bytes(changed)
    changed[chance.choice(digits)] ^= 1  # 0 becomes 1, 9 becomes 8
    checked = start - _RECORDS + _ATTRIBUTES
    struct.pack_into(">I", changed, checked - 4, crc32c(bytes(changed[checked:end])))
    return bytes(changed)


class Damaged(NamedTuple):
    """A broker's file of which one bit differs from what was written."""

    path: Path
    text: bytes
    offset: int  # of the batch

    @classmethod
    def made(cls, path: Path, chance: Random, *, last: bool = False) -> Damaged:
        """Flip a bit of a record, of any batch or of the last one.

        In a value, or in what a client computes with before it has a record: lengths, offsets.
        """
        text = path.read_bytes()
        start, end = batches(text)[-1] if last else chance.choice(batches(text))
        changed = bytearray(text)
        changed[chance.randrange(start, end)] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
        return cls(path, text, struct.unpack_from(">q", text, start - _RECORDS)[0])

    @property
    def topic(self) -> str:
        return self.path.parent.name.rpartition("-")[0]

    @property
    def number(self) -> int:
        return int(self.path.parent.name.rpartition("-")[2])

    def repair(self) -> None:
        self.path.write_bytes(self.text)

    def expect_named(self, error: CDCError | None) -> None:
        """The error names topic, partition and offset, and what to do."""
        assert isinstance(error, UnreadableError), error
        assert f"reading {self.topic} [{self.number}]" in error.what
        assert re.search(rf"at offsets? {self.offset}\b", error.what), error.what
        assert "the broker's files are damaged" in error.hint
        assert "a replica with sound files" in error.hint


def test_every_altered_bit_of_a_record_is_named(written: PipelineUnderTest) -> None:
    """Whether or not the broker's checksum was made again, and a client can decode the record."""
    assert proof_of(written.config).findings == ()
    chance, found = Random(first_seed()), files(written)
    assert {path.parent.name.rpartition(".")[2].partition("-")[0] for path in found} == {
        "users", "frontier", "messages", "dead",
    }  # fmt: skip
    for _ in range(ALTERATIONS):
        path = chance.choice(found)
        topic, text = path.parent.name.rpartition("-")[0], path.read_bytes()
        path.write_bytes(altered(text, chance))
        findings = proof_of(written.config).findings
        # An altered frontier may show by the records that it states otherwise.
        named = topic if "frontier" not in topic else written.config.prefix
        assert any(named in each for each in findings), (topic, findings)
        path.write_bytes(text)
    assert proof_of(written.config).findings == ()


def test_a_follower_applies_nothing_of_a_damaged_batch(
    written: PipelineUnderTest, tmp_path: Path
) -> None:
    """It waits, names partition and offset, and continues once the batch is sound again."""
    path, chance = users_file(written), Random(first_seed())
    until = written.frontiers()[-1].lsn

    def turn() -> CDCError | None:
        spark = SparkStart(lambda: pytest.fail("no Spark"), set())
        return run_of(spark, written.config, "copy", until).take_turn()

    for _ in range(5):
        damaged = Damaged.made(path, chance)
        damaged.expect_named(turn())
        damaged.repair()
    assert turn() is None
    stored = SqliteStore(tmp_path / "copy.db").query("SELECT id, name FROM users ORDER BY id")
    [expected] = written.query(
        "SELECT jsonb_agg(jsonb_build_array(id, name) ORDER BY id) FROM users"
    )
    assert [[each["id"], each["name"]] for each in stored] == expected


@pytest.mark.slow
def test_executors_apply_nothing_of_a_damaged_batch(
    spark: SparkSession,
    written: PipelineUnderTest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the driver: they name partition and offset, and the cut is repeated."""
    small_cuts(monkeypatch, 5)
    mirror = {"delta": {"path": str(tmp_path / "lake")}, "tables": ["public.users"]}
    written.config_file = written.write("mirror.yaml", followers={"mirror": mirror})
    until = written.frontiers()[-1].lsn

    def turn() -> CDCError | None:
        start = SparkStart(lambda: spark, {"mirror"})
        return run_of(start, written.config, "mirror", until).take_turn()

    damaged = Damaged.made(users_file(written), Random(first_seed()))
    damaged.expect_named(turn())
    damaged.repair()
    assert turn() is None
    found = read_as_of_arrow(str(tmp_path / "lake"), ["public.users"]).tables["public.users"]
    [expected] = written.query("SELECT jsonb_object_agg(id, name) FROM users")
    assert dict(zip(map(str, found["id"].to_pylist()), found["name"].to_pylist(), strict=True)) == (
        expected
    )


@pytest.fixture
def archived(written: PipelineUnderTest, tmp_path: Path) -> Archived:
    """Return the archive of that log, which is still empty."""
    archive = {"path": str(tmp_path / "archive"), "every_seconds": 0, "max_events": 20}
    written.config_file = written.write("archive.yaml", archive=archive)
    return Archived(written)


def take_turn(archived: Archived, until: LSN) -> CDCError | None:
    """Archive the log; return the error that prevented it."""
    work = Archiving(archived.config, archived.spark, until)
    return FollowerRun(archived.config, ARCHIVE, "delta", work).take_turn()


def expect_complete(archived: Archived) -> None:
    """Everything can be archived, once, and proved."""
    assert take_turn(archived, archived.frontier()) is None
    assert archived.stored() == archived.logged(archived.position())
    proof = proving.prove(archived.config, opened(archived.config))
    assert (proof.findings, proof.events) == ((), proof.seq)


def test_the_archive_takes_nothing_of_a_damaged_batch(archived: Archived, tmp_path: Path) -> None:
    """Of any topic it reads; it waits, and continues once the batch is sound again."""
    chance, prefix, until = Random(first_seed()), archived.config.prefix, archived.frontier()
    found = files(archived.pipeline, names.schema_topic(prefix))
    assert {path.parent.name.removeprefix(f"{prefix}.").rpartition("-")[0] for path in found} == {
        "public.users", "cdc.frontier", "cdc.messages", "cdc.dead", "cdc.schema",
    }  # fmt: skip
    for path in found:
        rmtree(tmp_path / "archive", ignore_errors=True)
        damaged = Damaged.made(path, chance)
        damaged.expect_named(take_turn(archived, until))
        # Frontiers before the damaged one are archived.
        applied = archived.position().applied
        ends = applied.end_of | {(names.frontier_topic(prefix), 0): applied.place}
        assert ends.get((damaged.topic, damaged.number), 0) <= damaged.offset
        damaged.repair()
        expect_complete(archived)


@pytest.mark.slow
def test_executors_name_a_damaged_batch_and_the_cuts_before_it_are_archived(
    spark: SparkSession, archived: Archived, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read it while the cut before is written: its error waits for its turn."""
    monkeypatch.setattr(cuts, "LARGE_EVENTS", 10)
    archived.spark = lambda: spark
    until = archived.frontier()
    damaged = Damaged.made(users_file(archived.pipeline), Random(first_seed()), last=True)
    damaged.expect_named(take_turn(archived, until))
    place = (damaged.topic, damaged.number)
    newest = archived.position()
    assert newest.newest is not None
    assert newest.applied.end_of[place] <= damaged.offset
    damaged.repair()
    archived.spark = None
    assert archived.stored() == archived.logged(newest)
    expect_complete(archived)


def test_a_compaction_reads_no_topic(archived: Archived) -> None:
    """So it is of no concern to it that every file of the broker is damaged."""
    expect_complete(archived)
    found = files(archived.pipeline, names.schema_topic(archived.config.prefix))
    chance = Random(first_seed())
    damaged = [Damaged.made(path, chance) for path in found]
    base, is_new = Compaction(archived.config, None).run()
    assert is_new
    assert base.seq == archived.position().applied.seq
    for each in damaged:
        each.repair()


def test_a_proof_names_a_damaged_batch_and_compares_what_is_sound(
    written: PipelineUnderTest,
) -> None:
    chance, sound = Random(first_seed()), proof_of(written.config)
    schemas = names.schema_topic(written.config.prefix)
    for path in files(written, schemas):
        damaged = Damaged.made(path, chance)
        proof = proof_of(written.config)
        named = [each for each in proof.findings if "can't be read" in each]
        assert len(named) == 1, proof.findings
        assert named[0].startswith(f"{damaged.topic} [{damaged.number}] ")
        assert f"at offset {damaged.offset} " in named[0]
        assert "a replica with sound files" in named[0]
        if "frontier" not in damaged.topic:
            assert proof.findings == tuple(named)
            assert proof.events == sound.events
        damaged.repair()
    assert proof_of(written.config) == sound


def test_the_consoles_search_names_a_damaged_batch(
    written: PipelineUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer has no versions rather than some of them; of other partitions it has all."""
    monkeypatch.setattr(key_search, "SECONDS", 60.0)
    config = written.config
    damaged = Damaged.made(users_file(written), Random(first_seed()))
    count = written.resume()[0].partitions[damaged.topic]
    versions = reader.read_schemas(config)
    places = {
        id_: {partition_of(key, count) for key in log_keys("public.users", str(id_), versions)}
        for id_ in range(20)
    }
    concerned = [id_ for id_, each in places.items() if damaged.number in each | {0}]
    assert concerned
    for id_ in concerned:
        with pytest.raises(UnreadableError) as caught:
            KeySearch(config, "public.users", str(id_)).run()
        damaged.expect_named(caught.value)
    for id_ in places.keys() - set(concerned):
        answer = KeySearch(config, "public.users", str(id_)).run()
        assert answer["searched"]["complete"]
        assert answer["count"] > 0
    shown = ConsoleUnderTest(written.config_file, tmp_path / "console.log")
    try:
        _, answer = shown.get(f"/api/explain?table=public.users&key={concerned[0]}")
        assert answer["versions"] is None
        assert f"{damaged.topic} [{damaged.number}]" in answer["error"]
        assert f"at offset {damaged.offset} " in answer["error"]
        assert "a replica with sound files" in answer["error"]
    finally:
        shown.close()
    with closing(KeyIndexer(config)) as indexer:
        indexer.start()
        indexer.asked(damaged.topic)
        wait_until(lambda: f"at offset {damaged.offset} " in indexer.error, "it reports nothing")
    damaged.repair()
    assert KeySearch(config, "public.users", str(concerned[0])).run()["searched"]["complete"]


Places = set[tuple[str, int, int]]


def users_events(made: PipelineUnderTest) -> Places:
    """Return where the log has the changes of rows."""
    topic = f"{made.config.prefix}.public.users"
    count = made.resume()[0].partitions[topic]
    return {
        (topic, each.partition(), each.offset())  # type: ignore[misc]
        for each in read_to_end(made.config, {topic: count})
        if each.value() is not None
    }


def from_batch_on(damaged: Damaged, events: Places) -> Places:
    """Return which events are in the damaged batch, or after it in its partition."""
    return {each for each in events if each[1] == damaged.number and each[2] >= damaged.offset}


def group_reads(config: Config, group: str, left: Places) -> CDCError | None:
    """Take what a member receives from `left`, until nothing is left or there is an error."""
    deadline, failed = time.monotonic() + START_SECONDS, None
    with lockstep.Client(config) as client:
        changes = client.changes(["public.users"], group, "beginning")
        while left and time.monotonic() < deadline:
            try:
                received = changes.receive(0.2)
            except CDCError as error:
                failed = error
                break
            for change in received:
                left.discard((*change.partition, change.offset))
                changes.acknowledge(change)
        if failed is not None:
            with pytest.raises(UnreadableError):
                changes.receive(0.2)
        began = time.monotonic()
        changes.close()
        assert time.monotonic() - began < 60
    return failed


def test_a_group_is_given_nothing_after_a_damaged_batch(written: PipelineUnderTest) -> None:
    """Its member leaves; the next one is given what is left once the batch is sound again."""
    path, chance, events = users_file(written), Random(first_seed()), users_events(written)
    for number in range(2):
        damaged, left = Damaged.made(path, chance), set(events)
        damaged.expect_named(group_reads(written.config, f"group{number}", left))
        assert left >= from_batch_on(damaged, events)
        damaged.repair()
        assert group_reads(written.config, f"group{number}", left) is None
        assert not left


@pytest.mark.slow
def test_a_queue_notes_a_damaged_batch_and_gives_it_out_once_it_is_sound(
    written: PipelineUnderTest,
) -> None:
    """Kafka's client takes it out of the queue; members go on with all others."""
    path, chance, events = users_file(written), Random(first_seed()), users_events(written)
    for number in range(2):
        damaged = Damaged.made(path, chance)
        expect_noted_and_given_out(written.config, f"queue{number}", damaged, events)


def expect_noted_and_given_out(config: Config, name: str, damaged: Damaged, events: Places) -> None:
    group, left = f"queue.{name}", set(events)

    def noted() -> Places:
        """Return where the events are that the queue gave up."""
        found = list(undelivered.read(config, group))
        named = f"reading {damaged.topic} [{damaged.number}]"
        assert all(each.why.startswith(named) for each in found)
        return {(each.topic, each.partition, each.offset) for each in found}

    queue_gives(config, name, left, lambda: left <= noted())
    assert left <= noted()
    assert min(noted()) == (damaged.topic, damaged.number, damaged.offset)
    # While it is damaged, this changes nothing.
    undelivered.queue_again(config, group, ())
    queue_gives(config, name, left, lambda: states(config, group) == {"undelivered"})
    assert left <= noted()
    damaged.repair()
    undelivered.queue_again(config, group, ())
    queue_gives(config, name, left, lambda: not left)
    assert not left
    assert states(config, group) == {"sent again"}


def queue_gives(config: Config, name: str, left: Places, done: Callable[[], bool]) -> None:
    """Take what a member is given from `left` until `done`, or nothing has come for long."""
    deadline = time.monotonic() + START_SECONDS
    with (
        lockstep.Client(config) as client,
        client.queue(["public.users"], name, "beginning") as given,
    ):
        while not done() and time.monotonic() < deadline:
            for each in given.receive(0.5):
                left.discard((*each.change.partition, each.change.offset))
                given.acknowledge(each)


def states(config: Config, group: str) -> set[str]:
    """Return the states of what a queue gave up."""
    return {each.state for each in undelivered.read(config, group)}


@pytest.mark.slow
def test_a_webhook_names_a_damaged_batch_and_delivers_it_once_it_is_sound(
    written: PipelineUnderTest,
) -> None:
    """As `cdc status` shows it; it starts again by itself."""
    with Receiver(SECRET, lambda _: 204) as receiver:
        hook = {"url": receiver.url, "secrets": [SECRET], "tables": ["public.users"]}
        more = {"start": "beginning", "allow": ["127.0.0.0/8"]}
        written.config_file = written.write("hook.yaml", webhooks={"hook": {**hook, **more}})
        config = written.config
        count, over = len(users_events(written)), threading.Event()
        damaged = Damaged.made(users_file(written), Random(first_seed()))
        running = threading.Thread(target=webhooks.deliver, args=(config, "hook", over.is_set, {}))
        running.start()
        try:
            named = f"{damaged.topic} [{damaged.number}]"

            def causes() -> str:
                found = read_status(config)
                assert [each.name for each in found.webhooks] == ["hook"]
                return str([each for each in found.verdict.causes if each.about == "webhook"])

            wait_until(lambda: f"starts again: reading {named}" in causes(), "it says nothing")
            assert "a replica with sound files" in causes()
            damaged.repair()
            wait_until(lambda: len(seqs(receiver)) == count, "it does not deliver all")
        finally:
            over.set()
            running.join()


def test_altered_rows_of_a_snapshot_and_altered_schemas_are_named(
    snapshotted: PipelineUnderTest,
) -> None:
    """Whichever of the producers wrote the row."""
    config = snapshotted.config
    proof = proof_of(config)
    assert (proof.findings, proof.undigested) == ((), 0)
    first, *_ = snapshotted.frontiers()
    assert sum(count for *_, count in first.blocks) == 9
    schemas = names.schema_topic(config.prefix)
    assert len(reader.read_schemas(config)) == 2
    chance = Random(first_seed())
    users = [each for each in files(snapshotted) if "users" in each.parent.name]
    [versions] = [each for each in files(snapshotted, schemas) if each.parent.name[:-2] == schemas]
    for path in [*users, versions] * 8:
        text = path.read_bytes()
        path.write_bytes(altered(text, chance))
        findings = proof_of(config).findings
        assert any(path.parent.name[:-2] in each for each in findings), (path.name, findings)
        path.write_bytes(text)
    assert proof_of(config).findings == ()


def test_an_added_or_replaced_version_is_named(snapshotted: PipelineUnderTest) -> None:
    """A record that somebody writes into the topic by Kafka's own means; a start accepts none."""
    config = snapshotted.config
    schemas = names.schema_topic(config.prefix)
    version = reader.read_schemas(config)[0]
    forged = [
        (records.schema_key(each.schema_id), records.encode(each))
        for each in (replace(version, schema_id=7), replace(version, key=()))
    ]
    acknowledged.write(config, schemas, forged)
    expected = [
        f'no frontier states this record {{"schema_id":{number}}}'
        for number in (version.schema_id, 7)
    ]
    for _ in range(2):
        findings = proof_of(config).findings
        assert [each.partition(": ")[2] for each in findings] == expected
        assert all(each.startswith(f"{schemas} [0] offset ") for each in findings)
        snapshotted.start().wait_ready()
        Archived(snapshotted).log_reach()
        assert snapshotted.daemon.term() == 0
