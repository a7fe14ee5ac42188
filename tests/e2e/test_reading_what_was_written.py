"""A client that has committed waits for the follower, and then finds its change in the store."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis

from cdc.client import Client, LagError
from cdc.errors import Exit
from cdc.operate.status import read_status
from tests.fixtures.commands import CommandSession
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until

ROUNDS = int(os.environ.get("LOCKSTEP_WAITS", "25"))
# Spark starts in the meantime, on a busy machine.
_LONG_SECONDS = 300.0


@pytest.fixture
def line(pipeline: NewPipeline, redis_url: str, redis_client: redis.Redis) -> PipelineUnderTest:
    line = pipeline(
        "CREATE TABLE t (id int PRIMARY KEY, n int)",
        "INSERT INTO t VALUES (1, 0)",
        source={"canary_seconds": 1},
        followers={"cache": {"redis": {"url": redis_url}}},
    )
    line.start().wait_ready()
    return line


@pytest.fixture
def follow(line: PipelineUnderTest, tmp_path: Path) -> Iterator[CommandSession]:
    follow = CommandSession(
        line.config_file, "follow", log=tmp_path / "follow.log", scratch=tmp_path / "scratch"
    )
    yield follow
    follow.kill()
    print(follow.log[-6_000:])  # noqa: T201 - pytest shows it where the test failed


def _state(line: PipelineUnderTest) -> str:
    (cache,) = read_status(line.config).fields()["followers"]
    return str(cache["state"])


def test_what_was_waited_for_is_there(
    line: PipelineUnderTest,
    follow: CommandSession,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A short wait still gets an answer, however busy the machine is.
    monkeypatch.setattr("cdc.client.ASK_SECONDS", 30.0)
    place = f"{line.config.prefix}:public.t:1"
    with Client(line.config) as client, psycopg.connect(line.database.dsn) as connection:
        for n in range(1, ROUNDS + 1):
            connection.execute("UPDATE t SET n = %s", [n])
            connection.commit()
            token = client.token(connection)
            applied = client.wait(token, ["cache"], timeout=_LONG_SECONDS)
            assert applied["cache"].lsn >= token.lsn
            assert redis_client.get(place) == b'{"id":1,"n":%d}' % n
        # On an idle database the follower reports canaries, and its frontier advances.
        first = client.applied()["cache"]
        wait_until(lambda: (client.applied()["cache"].canary_at_us or 0) > 0, "no canary")
        wait_until(lambda: client.applied()["cache"].lsn > first.lsn, "the frontier stays")
        wait_until(lambda: _state(line) == "following", "it does not follow")
        (cache,) = read_status(line.config).fields()["followers"]
        assert (cache["store"], cache["generation"]) == ("redis", 1)
        assert cache["events"] >= ROUNDS
        assert min(cache[f"lag_{unit}"] for unit in ("bytes", "seconds")) >= 0
        age = "lockstep_follower_canary_age_seconds"
        wait_until(lambda: line.daemon.metric(age) > 0, "the daemon shows no canary's age")
        follow.signal(signal.SIGSTOP)
        connection.execute("UPDATE t SET n = 0")
        connection.commit()
        token = client.token(connection)
        with pytest.raises(LagError, match="not applied up to"):
            client.wait(token, ["cache"], timeout=1.0)
        follow.signal(signal.SIGCONT)
        client.wait(token, ["cache"], timeout=_LONG_SECONDS)
        assert redis_client.get(place) == b'{"id":1,"n":0}'
        assert follow.term() == Exit.OK
        wait_until(
            lambda: client.applied()["cache"].state == "stopped", "it is not reported as stopped"
        )
