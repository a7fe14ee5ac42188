"""Changed topics are refused until acknowledged; then a new epoch keeps the order provable."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from cdc.cli.main import run
from tests.fixtures.converge import converge
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.load import TABLES, Load
from tests.fixtures.witness import Witness, data_records
from tests.integration.test_slot_gaps import delete_topic, run_once, running, users_topic
from tests.integration.test_topic_monitor import empty, widen

_CONFIG = 78
_USERS = "CREATE TABLE users (id int PRIMARY KEY, n int)"


def acknowledge(line: PipelineUnderTest, *options: str) -> int:
    return run(["topics", "acknowledge", "-c", str(line.config_file), *options])


def some_load(line: PipelineUnderTest, seed: int) -> None:
    """Publish a few hundred changes, and stop."""
    daemon = line.start().wait_ready()
    with Load(line.database.dsn, seed) as load:
        wait_until(lambda: load.commits > 60, "no load")
    converge(line.config)
    assert daemon.term() == 0


def test_added_partitions_are_refused_until_acknowledged_and_then_keep_every_order(
    pipeline: NewPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    """The complete history is compared with Postgres' own account, over both epochs."""
    line = pipeline(*TABLES)
    witness = Witness(line)
    some_load(line, 31)
    topic = users_topic(line)
    widen(line, topic, 7)
    line.refused(_CONFIG, f"topic {topic} has 7 partitions", "cdc topics acknowledge")
    assert acknowledge(line, "--yes", "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["epoch"], output["seq"]) == (2, line.resume()[1].seq)
    assert topic in output["acknowledged"][0]
    daemon = line.start().wait_ready()
    with Load(line.database.dsn, 32) as load:
        wait_until(lambda: load.commits > 100, "no load")
    witness.check()
    assert daemon.term() == 0

    homes: dict[int, set[int]] = defaultdict(set)
    seqs: dict[int, list[int]] = defaultdict(list)
    for record in data_records(line):
        if record.value is not None:
            source = record.event["source"]
            seqs[source["epoch"]].append(source["seq"])
            if record.topic == topic:
                homes[source["epoch"]].add(record.partition)
    assert max(seqs[1]) == output["seq"] == min(seqs[2]) - 1
    assert max(homes[1]) < 3 <= max(homes[2]), "the new partitions are not used"


@pytest.mark.long("half a minute; added partitions are acknowledged in the first tier")
def test_an_emptied_topic_can_be_acknowledged(pipeline: NewPipeline) -> None:
    line = pipeline(_USERS)
    run_once(line, 1)
    empty(line, users_topic(line))
    line.refused(_CONFIG, "log.retention_hours")
    assert acknowledge(line, "--yes") == 0
    run_once(line, 2)
    run_once(line, 3)
    assert line.resume()[0].epoch == 2


def test_with_nothing_to_acknowledge_nothing_is_done(
    pipeline: NewPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    line = pipeline(_USERS)
    run_once(line, 1)
    assert acknowledge(line) == 0
    assert "every topic is as the resume record has it, in epoch 1" in capsys.readouterr().out
    assert line.resume()[0].epoch == 1


def test_a_loss_can_not_be_acknowledged(
    pipeline: NewPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    line = pipeline(_USERS)
    run_once(line, 1)
    delete_topic(line, users_topic(line))
    assert acknowledge(line, "--yes") == _CONFIG
    assert "was deleted" in capsys.readouterr().err


def test_while_a_daemon_runs_nothing_is_acknowledged(
    pipeline: NewPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    line = pipeline(_USERS)
    running(line, 1)
    assert acknowledge(line, "--yes") == _CONFIG
    assert "stop the daemon" in capsys.readouterr().err
    assert line.daemon.process.poll() is None
