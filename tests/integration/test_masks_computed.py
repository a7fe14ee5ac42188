"""A generated column that is computed from a hidden one is hidden too, or the daemon stops."""

from __future__ import annotations

import pytest

from cdc.errors import ConfigError
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest
from tests.integration.test_masks import caught_up, everything

pytestmark = pytest.mark.pg(">= 18")

_TABLE = "CREATE TABLE users (id int PRIMARY KEY, name text, email text)"
_ADD = "ALTER TABLE users ADD shout text GENERATED ALWAYS AS (upper(email)) STORED"
_OTHER = "ALTER TABLE users ADD big text GENERATED ALWAYS AS (upper(name)) STORED"
_SECRET = b"SECRET@EXAMPLE.ORG"


def _masked(*more: str) -> dict[str, object]:
    hidden = {name: {"hmac": "a key of the tests"} for name in ("email", *more)}
    return {"public.users": {"mask": hidden}}


def _shown(line: PipelineUnderTest) -> bool:
    return _SECRET in everything(line).upper()


def test_one_that_is_added_later_stops_the_daemon_before_it_is_shown(
    pipeline: NewPipeline,
) -> None:
    line = pipeline(_TABLE, tables=_masked())
    line.start().wait_ready()
    line.database.execute(
        _OTHER,
        "INSERT INTO users VALUES (1, 'a', 'secret@example.org')",
    )
    caught_up(line, 1)
    line.database.execute(_ADD, "UPDATE users SET name = 'b'")
    assert line.daemon.wait_exit() == 78
    assert "shout is computed from email" in line.daemon.log
    assert not _shown(line)
    line.config_file = line.write("lockstep.yaml", tables=_masked("shout"))
    line.start().wait_ready()
    caught_up(line, 1)
    assert not _shown(line)


def test_setup_refuses_one_that_is_there_unless_it_is_kept(bare: PipelineUnderTest) -> None:
    line = bare
    line.database.execute("DROP TABLE IF EXISTS users", _TABLE, _ADD)
    line.config_file = line.write("lockstep.yaml", tables=_masked())
    with pytest.raises(ConfigError, match="shout, is computed from email"):
        line.set_up()
    kept = {"email": {"hmac": "a key of the tests"}, "shout": "keep"}
    line.config_file = line.write("kept.yaml", tables={"public.users": {"mask": kept}})
    line.set_up()
    line.start().wait_ready()
    line.database.execute("INSERT INTO users VALUES (1, 'a', 'secret@example.org')")
    caught_up(line, 1)
    assert _shown(line)


def test_one_that_a_partition_computes_counts(pipeline: NewPipeline) -> None:
    line = pipeline(
        "CREATE TABLE users (id int PRIMARY KEY, name text, email text,"
        " shout text GENERATED ALWAYS AS (upper(name)) STORED) PARTITION BY RANGE (id)",
        "CREATE TABLE users_1 PARTITION OF users FOR VALUES FROM (1) TO (10)",
        tables=_masked(),
    )
    line.start().wait_ready()
    line.database.execute(
        "CREATE TABLE users_2 (id int NOT NULL, name text, email text,"
        " shout text GENERATED ALWAYS AS (upper(email)) STORED)",
        "ALTER TABLE users ATTACH PARTITION users_2 FOR VALUES FROM (10) TO (20)",
        "INSERT INTO users (id, name, email) VALUES (11, 'a', 'secret@example.org')",
    )
    assert line.daemon.wait_exit() == 78
    assert not _shown(line)


def test_an_initial_snapshot_shows_none_that_was_added_after_setup(bare: PipelineUnderTest) -> None:
    line = bare
    line.database.execute(
        "DROP TABLE IF EXISTS users",
        _TABLE,
        "INSERT INTO users VALUES (1, 'a', 'secret@example.org')",
    )
    line.config_file = line.write(
        "lockstep.yaml", tables=_masked(), snapshot={"mode": "initial", "runner": "local"}
    )
    line.set_up()
    line.database.execute(_ADD)
    line.start()
    assert line.daemon.wait_exit() == 78
    assert "shout is computed from email" in line.daemon.log
    assert not _shown(line)
