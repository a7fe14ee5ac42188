"""A wait ends when the follower's report allows it: not before, and not much later."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from cdc.cli.main import run
from cdc.client import Client, LagError
from cdc.config import Config
from cdc.errors import ConfigError, Exit
from cdc.events import LSN
from cdc.log.follower_reports import Reports
from tests.fixtures.converge import converge
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.reported import reported
from tests.integration.test_altered_tables import alter

FOLLOWERS = {"cache": {"redis": {"url": "redis://localhost"}}}


class FakeFollower:
    """Reports as a follower's job does, after it has applied something; it does nothing else."""

    def __init__(self, config: Config) -> None:
        self.reports = Reports(config)
        self.truth = LSN(0)
        self._pipeline = config.pipeline

    def apply(self, lsn: int, generation: int = 1) -> None:
        self.truth = LSN(lsn)
        self.report(lsn=LSN(lsn), generation=generation)

    def report(self, **changed: object) -> None:
        self.reports.write(reported(pipeline=self._pipeline, **changed))
        self.reports.flush()


@pytest.fixture
def line(pipeline: NewPipeline) -> PipelineUnderTest:
    return pipeline("CREATE TABLE t (id int PRIMARY KEY)", followers=FOLLOWERS)


@pytest.fixture
def follower(line: PipelineUnderTest) -> FakeFollower:
    return FakeFollower(line.config)


@pytest.fixture
def client(line: PipelineUnderTest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    # A call that does not wait still gets an answer, however busy the machine is.
    monkeypatch.setattr("cdc.client.ASK_SECONDS", 30.0)
    monkeypatch.setattr("cdc.client.CONNECT_SECONDS", 60.0)
    with Client(line.config) as client:
        client.applied()  # connects, which is slow on a busy machine
        yield client


def has(client: Client, lsn: int) -> bool:
    try:
        client.wait(LSN(lsn), ["cache"], timeout=0)
    except LagError:
        return False
    return True


def test_it_reports_exactly_what_is_applied(client: Client, follower: FakeFollower) -> None:
    """Through advances, repeats by another copy, steps back, rebuilds, and late reports."""
    random_ = random.Random(7)
    generation, at = 1, 0
    assert not has(client, 0)  # it has never run
    for _ in range(150):
        match random_.randrange(6):
            case 0:
                generation, at = generation + 1, 0
            case 1:
                at = max(0, at - random_.randrange(3))
            case _:
                at += random_.randrange(3)
        follower.apply(at, generation)
        if generation > 1 and random_.random() < 0.5:
            # The previous build was nearly complete, and its job has not noticed yet.
            follower.report(lsn=LSN(10_000), generation=generation - 1)
        wanted = at + random_.randrange(-2, 3)
        assert has(client, wanted) is (wanted <= at)


def test_no_thread_is_released_too_early(client: Client, follower: FakeFollower) -> None:
    """Threads share a client; each returns as soon as its LSN is applied, and not before."""
    early: list[int] = []
    last = 60

    def waits(seed: int) -> None:
        random_, wanted = random.Random(seed), 0
        while wanted < last:
            wanted = min(last, wanted + random_.randrange(1, 9))
            client.wait(LSN(wanted), timeout=120.0)
            if follower.truth < wanted:
                early.append(wanted)

    threads = [threading.Thread(target=waits, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for lsn in range(1, last + 1):
        follower.apply(lsn)
    for thread in threads:
        thread.join(120.0)
        assert not thread.is_alive()
    assert early == []


def test_a_token_of_a_commit_is_where_the_log_will_be(
    line: PipelineUnderTest, client: Client
) -> None:
    """Exactly so on an idle database: a wait for it can end without anything later."""
    with psycopg.connect(line.database.dsn) as connection:
        connection.execute("INSERT INTO t VALUES (1)")
        with pytest.raises(ConfigError, match="within a transaction that has written"):
            client.token(connection)
        with line.database.connect() as another:
            before = client.token(another)
        connection.commit()
        token = client.token(connection)
        assert connection.info.transaction_status is psycopg.pq.TransactionStatus.IDLE
    assert token > before
    assert token.database == line.database.name
    other = str(token).replace(token.database, "another")
    with pytest.raises(ConfigError, match="is of another database"):
        client.wait(other, timeout=0)
    with pytest.raises(LagError, match="cache has never run"):
        client.wait(token, timeout=0)


def test_the_commands_say_which_followers_lag(
    line: PipelineUnderTest,
    follower: FakeFollower,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Connecting is slow on a busy machine.
    monkeypatch.setattr("cdc.client.CONNECT_SECONDS", 60.0)
    path = str(line.config_file)

    def wait(*words: str) -> tuple[int, str]:
        code = run(["wait", "-c", path, *words])
        described = capsys.readouterr()
        return code, described.out + described.err

    follower.apply(0x100)
    assert wait("--lsn", "0/100") == (0, "✓ cache has applied all up to 0/100, seq 0\n")
    code, output = wait("--lsn", "0/200", "--timeout", "100ms")
    assert (code, "no daemon reads the slot" in output) == (Exit.UNAVAILABLE, True)
    line.start().wait_ready()
    follower.apply(0x100)  # a report that is old means a job that does not run
    code, output = wait("--lsn", "0/200", "--timeout", "100ms")
    assert (code, "cache is following, at 0/100, with a lag of 256 bytes" in output) == (75, True)
    assert "no daemon" not in output
    follower.report(state="stopped", lsn=LSN(0x100))
    assert wait("--lsn", "0/200", "--timeout", "100ms")[0] == Exit.UNAVAILABLE
    follower.report(state="halted", lsn=LSN(0x100), what="a gap in t", hint="cdc rebuild cache")
    code, output = wait("--lsn", "0/200", "--timeout", "1h")
    assert code == Exit.CONFIG
    assert (
        "has halted at 0/100, with a lag of 256 bytes: a gap in t\nwhat to do: cdc rebuild cache"
        in output
    )
    assert wait("--lsn", "0/100")[0] == Exit.OK
    for words, says in (
        (("--for", "nobody"), "there is no follower nobody"),
        (("--lsn", "x"), "not an LSN"),
        (("--token", "x@"), "not a token"),
    ):
        code, output = wait(*words)
        assert (code, says in output) == (Exit.CONFIG, True)
    assert run(["token", "-c", path]) == Exit.OK
    token = capsys.readouterr().out.strip()
    follower.apply(1 << 62)
    assert wait("--token", token)[0] == wait()[0] == Exit.OK


def test_a_wait_names_the_tables_that_stores_do_not_show_as_the_source_has_them(
    line: PipelineUnderTest, follower: FakeFollower, capsys: pytest.CaptureFixture[str]
) -> None:
    line.start().wait_ready()
    line.database.execute("INSERT INTO t VALUES (1)")
    converge(line.config)
    follower.apply(1 << 62)
    wait = ["wait", "--lsn", "0/1", "-c", str(line.config_file)]
    assert run([*wait, "--json"]) == Exit.OK
    assert json.loads(capsys.readouterr().out)["incomplete_topics"] == []
    alter(line, "ALTER TABLE t ADD c float8 DEFAULT random()")
    with Client(line.config) as client:
        wait_until(client.incomplete, "the topic is not incomplete")
        [found] = client.incomplete()
    assert (found.name, found.remedy) == ("public.t", "cdc snapshot public.t --replace")
    assert run([*wait, "--json"]) == Exit.OK
    [shown] = json.loads(capsys.readouterr().out)["incomplete_topics"]
    assert shown == found.fields()
    assert run(wait) == Exit.OK
    assert f"{found.what}; stores may differ from the table" in capsys.readouterr().out


def test_a_pipeline_without_followers_has_nobody_to_wait_for(pipeline: NewPipeline) -> None:
    line = pipeline("CREATE TABLE t (id int PRIMARY KEY)")
    with Client(Path(line.config_file)) as client, pytest.raises(ConfigError, match="no follower"):
        client.wait(LSN(1))
