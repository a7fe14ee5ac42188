"""A topic that a rename has left incomplete is reported until its table was read again."""

from __future__ import annotations

import json
from typing import Any

import pytest

import lockstep
from cdc.cli.main import run
from cdc.errors import Exit
from cdc.operate.commands import tables
from cdc.operate.doctor.run import examine
from cdc.operate.findings import Severity
from cdc.operate.status import read_status
from cdc.snapshot.incremental import topic as live_topic
from tests.fixtures.converge import converge
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.read_back import read_to_end
from tests.integration.test_incremental_snapshot import begin, say, wait_state

_TABLE = "CREATE TABLE t (id int PRIMARY KEY, v int)"
_RENAME, _RENAME_BACK = "ALTER TABLE t RENAME TO u", "ALTER TABLE u RENAME TO t"
_CHANGES = (
    "UPDATE u SET v = 2 WHERE id <= 5",
    "DELETE FROM u WHERE id BETWEEN 6 AND 10",
    "INSERT INTO u SELECT i, 2 FROM generate_series(21, 30) i",
)


def status(line: PipelineUnderTest, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    capsys.readouterr()
    code = run(["status", "-c", str(line.config_file), "--json"])
    return code, json.loads(capsys.readouterr().out)


def incomplete(line: PipelineUnderTest) -> dict[str, bool]:
    """Return the names whose topics are incomplete, and whether they are captured."""
    return {each.name: each.captured for each in read_status(line.config).incomplete_topics}


def health(line: PipelineUnderTest) -> tuple[int, set[str]]:
    """Return the code of /healthz, and what its causes are about."""
    code, body = line.daemon.get("/healthz")
    return code, {each["about"] for each in json.loads(body or b'{"causes": []}')["causes"]}


def _causes(line: PipelineUnderTest, capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str]]:
    """Return what keeps `cdc status` from reporting that all is well."""
    causes = status(line, capsys)[1]["verdict"]["causes"]
    return [(each["about"], each["subject"]) for each in causes]


def test_a_table_renamed_there_and_back_is_not_well_until_it_is_read_again(
    pipeline: NewPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    line = pipeline(_TABLE)
    line.start().wait_ready()
    line.database.execute("INSERT INTO t SELECT i, 1 FROM generate_series(1, 20) i")
    converge(line.config)
    assert status(line, capsys)[1]["incomplete_topics"] == []
    line.database.execute(_RENAME, *_CHANGES)
    wait_until(lambda: incomplete(line) == {"public.t": False, "public.u": True}, "not found")
    wait_until(lambda: _causes(line, capsys) == [("topic", "public.u")], "not the only cause")
    assert status(line, capsys)[0] == Exit.FAILED
    # The name is enough: no row has followed under it.
    line.database.execute(_RENAME_BACK)
    assert incomplete(line) == {"public.t": True, "public.u": False}
    wait_until(lambda: health(line) == (503, {"topic"}), "/healthz does not show it")
    assert (
        'lockstep_verdict_causes{about="topic",level="failed"} 1.0'
        in line.daemon.get("/metrics")[1].decode()
    )
    line.database.execute("INSERT INTO t VALUES (31, 3)")
    wait_until(lambda: "public.t --replace" in line.daemon.log, "the daemon does not warn")
    # The log shows it, whichever process reads it.
    assert line.daemon.term() == 0
    line.start().wait_ready()
    _the_remedy_is_named(line, capsys)
    # Rows that are added do not repair it.
    wait_state(line, begin(line, "public.t"))
    assert status(line, capsys)[0] == Exit.FAILED
    assert run(["snapshot", "public.t", "--replace", "--wait", "-c", str(line.config_file)]) == 0
    wait_until(lambda: status(line, capsys)[0] == Exit.OK, "it is not well")
    assert incomplete(line) == {"public.u": False}
    wait_until(lambda: health(line) == (200, set()), "/healthz still shows it")
    # Another table with the name that is left.
    line.database.execute("CREATE TABLE u (id text PRIMARY KEY)", "INSERT INTO u VALUES ('new')")
    (added,) = tables.add(line.config, ["public.u"]).values()
    assert added is not None
    wait_state(line, added)
    converge(line.config)
    wait_until(lambda: status(line, capsys)[0] == Exit.OK, "it is not well")
    assert incomplete(line) == {}
    assert line.daemon.term() == 0


def test_setup_takes_a_table_that_was_renamed_there_and_back_for_the_one_it_was(
    pipeline: NewPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also between the two; nothing was lost, so no person is asked."""
    line = pipeline(_TABLE)
    line.start().wait_ready()
    line.database.execute("INSERT INTO t VALUES (1, 1)")
    wait_until(lambda: line.resume()[1].seq == 1, "the row does not arrive")
    assert line.daemon.term() == 0
    for rename in (_RENAME, _RENAME_BACK):
        line.database.execute(rename)
        assert run(["setup", "-c", str(line.config_file)]) == Exit.OK
    line.database.execute("INSERT INTO t VALUES (2, 2)")
    line.start().wait_ready()
    wait_until(lambda: line.resume()[1].seq == 2, "the table does not go on")
    assert run(["setup", "-c", str(line.config_file)]) == Exit.OK
    wait_until(lambda: status(line, capsys)[0] == Exit.OK, "it is not well")
    assert incomplete(line) == {}
    converge(line.config)


def _the_remedy_is_named(line: PipelineUnderTest, capsys: pytest.CaptureFixture[str]) -> None:
    wait_until(lambda: len(_causes(line, capsys)) == 1, "not the only cause")
    code, shown = status(line, capsys)
    assert code == Exit.FAILED
    [cause] = shown["verdict"]["causes"]
    assert "its table was renamed to public.u" in cause["what"]
    assert cause["remedy"] == "cdc snapshot public.t --replace"
    found = {each.severity: each for each in examine(line.config) if each.check == "topic"}
    error, note = found[Severity.ERROR], found[Severity.NOTE]
    assert ("public.t is incomplete" in error.what, error.fix) == (True, cause["remedy"])
    assert "public.u is incomplete" in note.what
    assert "cdc table add public.u" in note.fix


def test_an_initial_snapshot_replaces_what_an_earlier_generation_described(
    pipeline: NewPipeline,
) -> None:
    """The tables swap their names between two generations: the second one has all rows."""
    line = pipeline(
        _TABLE,
        "CREATE TABLE u (id int PRIMARY KEY, v int)",
        "INSERT INTO t SELECT i, 1 FROM generate_series(1, 20) i",
        "INSERT INTO u SELECT i, 2 FROM generate_series(15, 40) i",
        source={"tables": ["public.*"], "new_tables": "publish"},
        snapshot={"mode": "initial", "runner": "local"},
    )
    line.start("after_plan").wait_exit()
    line.database.execute(
        "ALTER TABLE t RENAME TO away", "ALTER TABLE u RENAME TO t", "ALTER TABLE away RENAME TO u"
    )
    line.start().wait_ready()
    line.database.execute("INSERT INTO t VALUES (50, 1)", "INSERT INTO u VALUES (60, 1)")
    converge(line.config)
    assert incomplete(line) == {}


def test_a_table_renamed_while_it_is_replaced_is_complete_under_its_new_name(
    pipeline: NewPipeline,
) -> None:
    line = pipeline(
        _TABLE,
        # So many that they are still being read when the daemon is asked to pause.
        "INSERT INTO t SELECT i, 1 FROM generate_series(1, 60000) i",
        batch={"max_events": 200, "max_wait_ms": 20},
    )
    line.start().wait_ready()
    number = begin(line, "public.t", anew=True)
    wait_until(lambda: any(each.rows for each in live_topic.read(line.config)), "it does not begin")
    say(line, do="pause", id=None)
    assert wait_state(line, number, "paused").emptied_under
    line.database.execute(_RENAME, "INSERT INTO u VALUES (0, 1)")
    wait_until(lambda: incomplete(line) == {"public.t": False, "public.u": True}, "not found")
    say(line, do="resume", id=None)
    record = wait_state(line, number)
    assert (record.name, record.rows >= 60_001) == ("public.u", True)
    assert incomplete(line) == {"public.t": False}
    topic = f"{line.config.prefix}.public.u"
    messages = read_to_end(line.config, {topic: line.resume()[0].partitions[topic]})
    ops = [json.loads(message.value() or b"")["op"] for message in messages]
    assert ops.count("t") == 1, "rows of a table that had the name before would stay"


def test_a_topic_that_a_stopped_snapshot_has_emptied_is_incomplete_until_it_is_read_again(
    pipeline: NewPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    line = pipeline(
        _TABLE,
        # So many that they are still being read when the daemon is asked to stop.
        "INSERT INTO t SELECT i, 1 FROM generate_series(1, 10000) i",
        batch={"max_events": 200, "max_wait_ms": 20},
    )
    line.start().wait_ready()
    wait_state(line, begin(line, "public.t"))
    assert incomplete(line) == {}
    number = begin(line, "public.t", anew=True)
    wait_until(lambda: emptied(line, number), "it is not emptied")
    say(line, do="stop", id=number)
    assert wait_state(line, number, "stopped").emptied_under
    assert incomplete(line) == {"public.t": True}
    wait_until(lambda: health(line) == (503, {"topic"}), "/healthz does not show it")
    # The log shows it, whichever process reads it.
    assert line.daemon.term() == 0
    line.start().wait_ready()
    wait_until(lambda: health(line) == (503, {"topic"}), "/healthz does not show it")
    with lockstep.Client(line.config) as client:
        [found] = client.incomplete()
    assert f"the snapshot {number} has emptied it" in found.why
    assert found.remedy == "cdc snapshot public.t --replace"
    assert int(found.since_lsn)
    assert run(["snapshot", "public.t", "--replace", "--wait", "-c", str(line.config_file)]) == 0
    wait_until(lambda: health(line) == (200, set()), "/healthz still shows it")
    assert incomplete(line) == {}
    wait_until(lambda: status(line, capsys)[0] == Exit.OK, "it is not well")


def emptied(line: PipelineUnderTest, number: str) -> bool:
    """Return whether a snapshot has emptied its topic."""
    return any(each.emptied_under for each in live_topic.read(line.config) if each.id == number)
