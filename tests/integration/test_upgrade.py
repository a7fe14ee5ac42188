"""`cdc upgrade --check` on real logs and stores: what it refuses, and if a way back is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cdc.cli.main import run
from cdc.config import Config
from cdc.errors import ConfigError, Exit
from cdc.events import LSN
from cdc.log import acknowledged, group_records, names, reader, records, topics
from cdc.log.follower_reports import Reports
from cdc.log.records import DIGESTS_FORMAT
from cdc.operate import formats
from cdc.snapshot.incremental.records import IncrementalRecord, incremental_key
from cdc.snapshot.initial import topic as initial_topic
from cdc.snapshot.initial.records import SnapshotState
from lockstep.jobs.archiving import layout
from lockstep.jobs.compacting import layout as bases_layout
from lockstep.jobs.compacting.running import Compaction
from tests.fixtures.archived import Archived
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.reported import reported
from tests.fixtures.servers import KafkaServer, log_alone
from tests.fixtures.store_opensearch import OpenSearchStore

TABLES = ("CREATE TABLE users (id int PRIMARY KEY, name text)",)
# What every log has; this one has a report, a group, snapshots and a dead letter too.
ALWAYS = ("resume identity", "resume position", "frontier", "table version")
MORE = ("initial snapshot", "incremental snapshot", "follower report", "group", "dead letter")
OWN_FORMAT = {"resume position": DIGESTS_FORMAT, "frontier": DIGESTS_FORMAT}


def checked(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    """Return exit code and answer of the command."""
    code = run(["upgrade", "--check", "--json", "-c", str(path)])
    return code, json.loads(capsys.readouterr().out)


def kinds(answer: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    return {each["kind"]: each for each in answer["kinds"]}


@pytest.fixture
def written(pipeline: NewPipeline) -> PipelineUnderTest:
    """A pipeline that has written something, and whose daemon has stopped."""
    made = pipeline(*TABLES, log={"kafka": {"message.max.bytes": 60_000}})
    made.start().wait_ready()
    made.database.execute("INSERT INTO users VALUES (1, 'a')")
    made.database.execute("INSERT INTO users VALUES (2, repeat('y', 200000))")
    wait_until(lambda: made.frontiers()[-1:] and made.frontiers()[-1].seq >= 2, "no frontier")
    made.daemon.term()
    return made


def write_more(config: Config) -> None:
    """Write what only followers, groups and snapshots write."""
    reports = Reports(config)
    reports.write(reported(pipeline=config.pipeline))
    reports.flush()
    group = group_records.GroupRecord(pipeline=config.pipeline, group="g", topics={})
    group_records.write(config, group)
    topic, key, value = initial_topic.state_record(
        config, SnapshotState(pipeline=config.pipeline, stage="done")
    )
    one = IncrementalRecord(
        pipeline=config.pipeline, id="1", schema="public", table="users", state="done"
    )
    taken = incremental_key(config.pipeline, "1"), records.encode(one)
    acknowledged.write(config, topic, [(key, value), taken])


def newest_of(config: Config, kind: str) -> tuple[str, bytes, bytes]:
    """Return topic, key and value of the newest record of a kind."""
    for topic in formats.TOPICS:
        name, found = topic.name(config.prefix), None
        for message in reader.read_if_there(config, name):
            key = message.key() or b""
            known = topic.kind(msgspec.json.decode(key))
            if known is not None and known[0] == kind and message.value():
                found = name, key, message.value() or b""
        if found is not None:
            return found
    raise AssertionError(f"no {kind}")


def test_this_versions_own_log_can_be_taken_over_and_left_again(
    written: PipelineUnderTest, capsys: pytest.CaptureFixture[str]
) -> None:
    write_more(written.config)
    code, answer = checked(written.config_file, capsys)
    assert code == Exit.OK
    assert (answer["can_run"], answer["can_go_back"], answer["not_checked"]) == (True, True, [])
    found = kinds(answer)
    assert {*ALWAYS, *MORE} <= found.keys()
    for kind, each in found.items():
        assert each["newest"] == each["reads"] == OWN_FORMAT.get(kind, 1), kind
        assert each["records"] >= 1


def test_a_newer_format_of_any_kind_is_refused_by_its_name(
    written: PipelineUnderTest, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written.config
    write_more(config)
    expected = set[str]()
    for kind in (*ALWAYS, *MORE):
        topic, key, value = newest_of(config, kind)
        newer = json.loads(value) | {"format": 7, "unheard": 1}
        acknowledged.write(config, topic, [(key, json.dumps(newer).encode())])
        expected.add(kind)
        code, answer = checked(written.config_file, capsys)
        refused = {name for name, each in kinds(answer).items() if not each["readable"]}
        assert (code, refused) == (Exit.CONFIG, expected)
        assert kinds(answer)[kind]["newest"] == 7
        assert not answer["can_run"]
    assert run(["upgrade", "--check", "-c", str(written.config_file)]) == Exit.CONFIG
    out = capsys.readouterr().out
    assert f"{names.frontier_topic(config.prefix)}: a frontier has format 7, and this" in out
    assert "can take over" not in out
    # The daemon agrees.
    written.refused(Exit.CONFIG, "of format 7; this version reads up to")


def test_what_will_rise_is_named_and_does_not_hinder(
    written: PipelineUnderTest, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written.config
    for kind in ("resume position", "frontier"):
        topic, key, value = newest_of(config, kind)
        older = json.loads(value) | {"format": 2}
        acknowledged.write(config, topic, [(key, json.dumps(older).encode())] * 200)
    code, answer = checked(written.config_file, capsys)
    assert (code, answer["can_run"], answer["can_go_back"]) == (Exit.OK, True, False)
    rising = [name for name, each in kinds(answer).items() if each["will_rise"]]
    assert rising == ["resume position", "frontier"]
    assert run(["upgrade", "--check", "-c", str(written.config_file)]) == Exit.OK
    out = capsys.readouterr().out
    assert "can take over" in out
    assert f"newer formats: resume position {DIGESTS_FORMAT}, frontier {DIGESTS_FORMAT}" in out


def test_a_log_without_the_pipeline_and_a_broken_record_are_refused(
    kafka_server: KafkaServer,
    topic_prefix: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = log_alone(kafka_server, topic_prefix, tmp_path)
    path = tmp_path / "lockstep.yaml"
    assert run(["upgrade", "--check", "-c", str(path)]) == Exit.CONFIG
    assert "holds no resume record of pipeline" in capsys.readouterr().err
    assert run(["upgrade", "-c", str(path)]) == Exit.USAGE
    assert "cdc upgrade --check" in capsys.readouterr().err
    topics.ensure(topics.admin(config), config, topics.internal_topics(config))
    key = records.resume_key(config.pipeline, "position")
    acknowledged.write(config, names.resume_topic(config.prefix), [(key, b'{"format":3}')])
    head = b'{"id":"x","chunk":0}', b"torn"
    acknowledged.write(config, names.dead_topic(config.prefix), [head])
    code, answer = checked(path, capsys)
    found = kinds(answer)
    assert (code, answer["can_run"]) == (Exit.CONFIG, False)
    assert "can't be read" in found["resume position"]["problem"]
    assert "not JSON of ours" in found["dead letter"]["problem"]


def test_an_alteration_in_a_message_is_found(
    kafka_server: KafkaServer, topic_prefix: str, tmp_path: Path
) -> None:
    config = log_alone(kafka_server, topic_prefix, tmp_path)
    topics.ensure(topics.admin(config), config, topics.internal_topics(config))
    altered = records.Alteration(
        format=2, schema_id=2, previous=1, schema="public", table="t", topic="t", columns=()
    )
    event = {"message": {"content": records.encode(altered)}}
    acknowledged.write(
        config,
        names.messages_topic(config.prefix),
        [(b'{"prefix":"cdc.altered"}', msgspec.json.encode(event))],
    )
    position = records.ResumePosition(
        end_lsn=LSN(1), commit_lsn=LSN(1), ordinal=0, open=False, seq=0, committed_at_us=0,
        schema_id=0, owner="", at_us=0,
    )  # fmt: skip
    key = records.resume_key(config.pipeline, "position")
    written = [(key, records.encode(position))]
    acknowledged.write(config, names.resume_topic(config.prefix), written)
    found = {each.kind: each for each in formats.read(config)}
    assert found["alteration"].newest == 2
    assert not found["alteration"].is_readable
    assert found["resume position"].is_readable


def test_archive_bases_and_documents_are_checked_where_their_programs_are(
    pipeline: NewPipeline,
    opensearch_store: OpenSearchStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opensearch = {"url": opensearch_store.options.url, "prefix": opensearch_store.prefix}
    made = pipeline(
        *TABLES,
        archive={"path": str(tmp_path / "archive"), "every_seconds": 0},
        followers={
            "search": {"opensearch": opensearch},
            "away": {"opensearch": {"url": "http://127.0.0.1:9"}},
        },
    )
    made.start().wait_ready()
    made.database.execute("INSERT INTO users VALUES (1, 'a')")
    Archived(made).reach()
    Compaction(made.config, None).run()
    sink = opensearch_store.sink(pipeline=made.config.pipeline, follower="search")
    sink.open()
    code, answer = checked(made.config_file, capsys)
    found = kinds(answer)
    assert code == Exit.OK
    for kind in ("archived cut", "base", "follower's record"):
        assert (found[kind]["newest"], found[kind]["reads"]) == (1, 1), kind
    (unread,) = answer["not_checked"]
    assert unread.startswith("followers.away: ")
    path = f"/{opensearch_store.prefix}-followers/_doc/search"
    _, stored = opensearch_store.call("GET", path)
    opensearch_store.call("PUT", f"{path}?refresh=true", stored["_source"] | {"format": 7})
    code, answer = checked(made.config_file, capsys)
    assert code == Exit.CONFIG
    assert kinds(answer)["follower's record"]["newest"] == 7
    # Without the followers' packages it names what it has not read.
    monkeypatch.setattr("cdc.operate.upgrade.extras.is_installed", lambda _: False)
    code, answer = checked(made.config_file, capsys)
    assert code == Exit.OK
    assert len(answer["not_checked"]) == 3
    assert "needs lockstep-cdc[opensearch,spark]" in answer["not_checked"][0]


def test_archive_and_bases_of_a_newer_format_are_refused() -> None:
    with pytest.raises(ConfigError, match="an archive's cut is of format 2; this version reads"):
        layout.decode(b'{"format":2}')
    with pytest.raises(ConfigError, match="a base is of format 2; this version reads up to 1"):
        bases_layout.decode(b'{"format":2}')
