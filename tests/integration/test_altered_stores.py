"""DDL that writes no rows, from a daemon to every kind of store: at the frontier each is the table.

Cuts that only alter, cuts with rows before and after, by the small path and by executors.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import pytest

from cdc.cli.main import run
from cdc.errors import Exit
from cdc.operate.status import read_status
from tests.fixtures.daemon import NewPipeline, wait_until
from tests.fixtures.every_store import EveryStore, NewEveryStore
from tests.fixtures.followed import small_cuts
from tests.integration.test_altered_tables import alter

TABLES: Final = (
    "CREATE TABLE t (id int PRIMARY KEY, a text, b int, body text)",
    "ALTER TABLE t ALTER body SET STORAGE EXTERNAL",
    "CREATE TABLE quiet (id int PRIMARY KEY, a text)",
)
ROWS: Final = (
    "INSERT INTO t SELECT i, 'a' || i, i, repeat('x', 3000) FROM generate_series(1, 60) i",
    "INSERT INTO quiet SELECT i, 'q' || i FROM generate_series(1, 20) i",
)


@pytest.fixture
def altered(pipeline: NewPipeline, every_store: NewEveryStore) -> EveryStore:
    made = every_store(partial(pipeline, *TABLES))
    made.pipeline.start().wait_ready()
    made.pipeline.database.execute(*ROWS)
    return made


@pytest.mark.long("minutes of Spark and of four stores", sample=["small"])
@pytest.mark.parametrize("size", ["small", "large"])
def test_every_store_shows_what_ddl_without_rows_has_changed(
    altered: EveryStore, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    line, execute = altered.pipeline, altered.pipeline.database.execute
    altered.check("t", "quiet")
    if size == "large":
        small_cuts(monkeypatch, 0)
    alter(line, "ALTER TABLE quiet ADD c text DEFAULT 'now', ADD n int DEFAULT 15")
    altered.check("t", "quiet")
    # Names are exchanged, one is another column now, and rows are written before and after.
    execute(
        "UPDATE t SET b = -b WHERE id < 10",
        "ALTER TABLE t RENAME a TO z; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME z TO b",
        "UPDATE t SET a = 7 WHERE id BETWEEN 5 AND 15",
        "BEGIN; DELETE FROM t WHERE id > 55; ALTER TABLE t ADD c int DEFAULT 9;"
        " INSERT INTO t VALUES (70, 'new', 1, 'y'); COMMIT",
    )
    altered.check("t", "quiet")
    # Which of two columns of one name a row has would not be proven, if the daemon lagged.
    alter(line, "ALTER TABLE t DROP c; ALTER TABLE t ADD c text DEFAULT 'other'")
    execute(
        "UPDATE t SET id = id + 100 WHERE id BETWEEN 20 AND 25",
        "ALTER TABLE t RENAME body TO text",
        "UPDATE t SET c = NULL WHERE id < 3",
    )
    altered.check("t", "quiet")
    # One after the other: with a rewrite, a type that needs none may have other values.
    alter(line, "ALTER TABLE quiet ALTER id TYPE bigint")
    alter(line, "ALTER TABLE quiet ALTER a TYPE varchar, DROP c")
    alter(line, "ALTER TABLE quiet ADD c int")
    altered.check("t", "quiet")
    assert not read_status(line.config).incomplete_topics
    assert line.daemon.term() == 0


@pytest.mark.long("minutes of Spark and of four stores")
def test_what_a_rewrite_has_changed_is_in_every_store_once_it_is_read_again(
    altered: EveryStore,
) -> None:
    line = altered.pipeline
    altered.check("t", "quiet")
    alter(line, "ALTER TABLE t ADD c double precision DEFAULT random()")
    alter(line, "ALTER TABLE quiet ALTER a TYPE varchar(40) USING a || '!'")
    wait_until(lambda: len(read_status(line.config).incomplete_topics) == 2, "not incomplete")
    for name in ("public.t", "public.quiet"):
        wanted = ["snapshot", name, "--replace", "--wait", "-c", str(line.config_file)]
        assert run(wanted) == Exit.OK
    altered.check("t", "quiet")
    assert not read_status(line.config).incomplete_topics
    assert line.daemon.term() == 0
