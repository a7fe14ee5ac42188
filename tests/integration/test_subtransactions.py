"""Subtransactions: nothing that was rolled back to a savepoint is in the log, however many."""

from __future__ import annotations

import psycopg
import pytest

from tests.fixtures.converge import converge
from tests.fixtures.daemon import NewPipeline, wait_until
from tests.fixtures.witness import data_records

_USERS = "CREATE TABLE users (id int PRIMARY KEY, n int)"
_MANY = 100_000
# Every third is rolled back, with everything that it wrote.
_SUBTRANSACTIONS = f"""
DO $$ BEGIN
  FOR i IN 1..{_MANY} LOOP
    BEGIN
      INSERT INTO users VALUES (i, 1);
      IF i % 3 = 0 THEN RAISE 'undone'; END IF;
    EXCEPTION WHEN raise_exception THEN NULL;
    END;
  END LOOP;
END $$
"""


def test_only_what_no_rollback_took_back_is_published(pipeline: NewPipeline) -> None:
    """Nested, released into one that is rolled back, written again afterwards, and in order."""
    line = pipeline(_USERS)
    line.start().wait_ready()
    with psycopg.connect(line.database.dsn) as connection:
        for statement in (
            "INSERT INTO users VALUES (1, 1)",
            "SAVEPOINT a",
            "INSERT INTO users VALUES (2, 1)",
            "SAVEPOINT b",
            "UPDATE users SET n = 2 WHERE id = 1",
            "RELEASE b",
            "SAVEPOINT c",
            "DELETE FROM users WHERE id = 2",
            "ROLLBACK TO c",
            "ROLLBACK TO a",
            "INSERT INTO users VALUES (3, 1)",
            "SAVEPOINT a",
            "INSERT INTO users VALUES (2, 7)",
            "RELEASE a",
            "UPDATE users SET n = 3 WHERE id = 1",
        ):
            connection.execute(statement.encode())
    line.database.execute("INSERT INTO users VALUES (4, 1)")
    wait_until(lambda: line.resume()[1].seq == 5, "it does not arrive")
    assert converge(line.config).events == 5
    assert line.query("SELECT array_agg((id, n)::text ORDER BY id) FROM users")[0] == [
        "(1,3)",
        "(2,7)",
        "(3,1)",
        "(4,1)",
    ]


@pytest.mark.slow
def test_a_hundred_thousand_subtransactions_leave_what_they_left_in_the_table(
    pipeline: NewPipeline,
) -> None:
    line = pipeline(_USERS)
    daemon = line.start().wait_ready()
    line.database.execute(_SUBTRANSACTIONS, "INSERT INTO users VALUES (0, 1)")
    kept = _MANY - _MANY // 3 + 1
    wait_until(lambda: line.resume()[1].seq == kept, "it does not arrive", 300.0, pause=0.3)
    assert converge(line.config).events == kept
    assert len(data_records(line)) == kept
    assert daemon.peak_rss_mb < 150
