"""`cdc teardown` and `cdc setup` with a source.dsn that leads to another database than the log's.

As where a copy of a configuration has another database, and the same pipeline: slots have names of
the cluster, topics of the broker, and neither belongs to who knows its name.
"""

from __future__ import annotations

import pytest

from cdc.cli.main import run
from cdc.errors import Exit
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest
from tests.fixtures.servers import fresh_database
from tests.integration.test_setup_ready import leftovers


@pytest.fixture
def line(pipeline: NewPipeline) -> PipelineUnderTest:
    return pipeline("CREATE TABLE users (id int PRIMARY KEY)")


def test_the_slot_and_the_log_of_another_database_are_kept(
    line: PipelineUnderTest, capsys: pytest.CaptureFixture[str]
) -> None:
    line.start().wait_ready()
    owned = leftovers(line.config, line)
    with fresh_database(line.database.dsn) as other:
        other.execute("CREATE TABLE users (id int PRIMARY KEY)")
        config = ["-c", str(line.write("copy.yaml", source__dsn=other.dsn))]
        assert run(["setup", *config]) == Exit.CONFIG
        err = capsys.readouterr().err
        assert f"the log comes from database {line.database.name}" in err
        assert run(["teardown", "--topics", "--yes", *config]) == Exit.CONFIG
        err = capsys.readouterr().err
        assert f"the log comes from database {line.database.name}" in err
        assert "--other-source" in err
        assert run(["teardown", "--yes", *config]) == Exit.OK
        assert "is something else's (plugin pgoutput" in capsys.readouterr().out
        line.daemon.term()
        assert run(["teardown", "--yes", *config]) == Exit.OK
        assert leftovers(line.config, line) == owned
        assert run(["teardown", "--topics", "--other-source", "--yes", *config]) == Exit.OK
    assert leftovers(line.config, line) == [line.config.publication, line.config.slot]
    assert run(["teardown", "--yes", "-c", str(line.config_file)]) == Exit.OK
    assert not leftovers(line.config, line)
