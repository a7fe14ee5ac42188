"""What DDL changes without a row: in the log as alterations, and in every store."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cdc.cli.main import run
from cdc.errors import Exit
from cdc.log import reader
from cdc.operate.status import read_status
from tests.fixtures.converge import converge
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until

_TABLE = "CREATE TABLE t (id int PRIMARY KEY, a text, b int)"


def alter(line: PipelineUnderTest, *statements: str) -> None:
    """Run statements that write no row, and wait until the log has the table's version."""
    before = len(versions(line))
    line.database.execute(*statements)
    wait_until(lambda: len(versions(line)) > before, "no version without a row")


_REWRITES = (
    "ALTER TABLE t ADD c float8 DEFAULT random()",
    "ALTER TABLE t ALTER b TYPE float8 USING b * 2",
    "ALTER TABLE t ALTER a TYPE varchar(9) USING upper(a)",
    "ALTER TABLE t ALTER a TYPE text USING upper(a)",
)


def versions(line: PipelineUnderTest) -> list[dict[str, Any]]:
    return [
        json.loads(json.dumps({"columns": [(c.name, c.missing) for c in each.columns]}))
        | {"stale": each.stale}
        for each in reader.read_schemas(line.config)
    ]


def test_a_table_that_is_altered_has_its_version_without_a_row(pipeline: NewPipeline) -> None:
    line = pipeline(_TABLE)
    line.start().wait_ready()
    line.database.execute("INSERT INTO t SELECT i, 'a' || i, i FROM generate_series(1, 20) i")
    converge(line.config)
    alter(line, "ALTER TABLE t ADD c numeric(5,2) DEFAULT 1.50, ADD d text DEFAULT 'x\"{,}\\y'")
    converge(line.config)
    alter(line, "ALTER TABLE t RENAME a TO z")
    alter(line, "ALTER TABLE t DROP b; ALTER TABLE t ADD b int DEFAULT 7")
    alter(line, "ALTER TABLE t ADD e int[] DEFAULT '{1,2}'")
    alter(line, "ALTER TABLE t ALTER id TYPE bigint")
    converge(line.config)
    found = versions(line)
    assert [each["stale"] for each in found] == [""] * len(found)
    # A rewrite gives all rows the values: what was missing is in the version that added it.
    missing = {name: value for each in found for name, value in each["columns"] if value}
    assert missing == {"c": '"1.50"', "d": json.dumps('x"{,}\\y'), "b": "7", "e": "[1,2]"}
    assert [name for name, _ in found[-1]["columns"]] == ["id", "z", "c", "d", "b", "e"]
    # What only moves the rows, and changes no value.
    line.database.execute(
        "VACUUM FULL t", "ALTER TABLE t ALTER z SET NOT NULL", "CLUSTER t USING t_pkey"
    )
    alter(line, "ALTER TABLE t RENAME z TO y")
    assert not read_status(line.config).incomplete_topics
    assert line.daemon.term() == 0


@pytest.mark.long("each statement is a snapshot of its own", sample=["0", "3"])
@pytest.mark.parametrize("rewrite", range(len(_REWRITES)))
def test_a_rewrite_makes_the_topic_incomplete_until_it_is_read_again(
    pipeline: NewPipeline, rewrite: int
) -> None:
    line = pipeline(_TABLE)
    line.start().wait_ready()
    line.database.execute("INSERT INTO t SELECT i, 'a' || i, i FROM generate_series(1, 20) i")
    converge(line.config)
    alter(line, _REWRITES[rewrite])
    wait_until(lambda: len(read_status(line.config).incomplete_topics) == 1, "not incomplete")
    [found] = read_status(line.config).incomplete_topics
    assert (found.name, found.remedy) == ("public.t", "cdc snapshot public.t --replace")
    arguments = ["snapshot", "public.t", "--replace", "--wait", "-c", str(line.config_file)]
    assert run(arguments) == Exit.OK
    converge(line.config)
    assert not read_status(line.config).incomplete_topics


@pytest.mark.slow
def test_a_column_that_was_added_again_while_the_daemon_lagged_makes_the_topic_incomplete(
    pipeline: NewPipeline,
) -> None:
    """The row may have been written before that, and then has the value of the dropped column."""
    line = pipeline(_TABLE)
    line.start().wait_ready()
    line.database.execute("INSERT INTO t (id, b) VALUES (1, 1), (2, 2)")
    converge(line.config)
    assert line.daemon.term() == 0
    line.database.execute(
        "UPDATE t SET b = 7 WHERE id = 1", "ALTER TABLE t DROP b", "ALTER TABLE t ADD b int"
    )
    line.start().wait_ready()
    wait_until(lambda: len(read_status(line.config).incomplete_topics) == 1, "not incomplete")
    [*_, newest] = versions(line)
    assert newest["stale"] == "columns were dropped and added, and which is which is not proven"
    arguments = ["snapshot", "public.t", "--replace", "--wait", "-c", str(line.config_file)]
    assert run(arguments) == Exit.OK
    converge(line.config)
    assert not read_status(line.config).incomplete_topics
