"""A follower that is started before `cdc setup`: it waits, and leaves nothing in its way."""

from __future__ import annotations

from pathlib import Path

from cdc.log import topics
from tests.fixtures.commands import CommandSession
from tests.fixtures.daemon import PipelineUnderTest, wait_until
from tests.fixtures.store_redis import RedisStore


def test_a_follower_waits_for_setup_and_writes_nothing_before(
    bare: PipelineUnderTest, redis_store: RedisStore, tmp_path: Path
) -> None:
    """A record in a topic of ours would prevent it."""
    bare.settings["followers"] = {"cache": {"redis": {"url": redis_store.settings.url}}}
    bare.config_file = bare.write("followed.yaml")
    log, scratch = tmp_path / "follow.log", tmp_path / "scratch"
    follower = CommandSession(bare.config_file, "follow", log=log, scratch=scratch)
    try:
        wait_until(lambda: "is not set up" in follower.log, "it does not say what it waits for")
        assert not topics.existing(topics.admin(bare.config), bare.config.prefix)
        bare.set_up()
        bare.start().wait_ready()
        bare.database.execute("INSERT INTO users VALUES (1, 'a')")
        wait_until(lambda: redis_store.client.keys("*users:*"), "it does not follow")
    finally:
        follower.kill()
