"""Waiting survives the broker: nothing is reported meanwhile, and the same client goes on after."""

from __future__ import annotations

import pytest

from cdc.client import Client, LagError
from cdc.errors import UnavailableError
from cdc.events import LSN
from cdc.playground.servers.stack import LocalStack
from cdc.source.token import Token
from tests.fixtures.daemon import NewPipeline, wait_until
from tests.integration.test_wait import FOLLOWERS, FakeFollower


@pytest.mark.long("half a minute; test_kafka_away has brokers that are away")
def test_a_client_outlives_the_broker(
    killable_pipeline: NewPipeline, killable_stack: LocalStack
) -> None:
    line = killable_pipeline("CREATE TABLE t (id int PRIMARY KEY)", followers=FOLLOWERS)
    follower = FakeFollower(line.config)
    with Client(line.config) as client:
        follower.apply(5)
        client.wait(LSN(5), timeout=120.0)
        killable_stack["kafka"].kill()
        # What was known is not reported either: since then the store may have been rebuilt.
        for lsn in (5, 6):
            with pytest.raises((UnavailableError, LagError)) as caught:
                client.wait(LSN(lsn), timeout=0.5)
            assert caught.value.exit_code
        # A first request fails within the timeout: the token is checked later.
        with Client(line.config) as late, pytest.raises(UnavailableError, match=r"cdc\.followers"):
            late.wait(Token(LSN(5), "1", "another"), timeout=0.5)
        killable_stack.start("kafka")

        def answers() -> bool:
            try:
                client.wait(LSN(5), timeout=5.0)
            except UnavailableError:
                return False
            return True

        wait_until(answers, "the client stays away")
        follower.apply(6)
        client.wait(LSN(6), timeout=120.0)
