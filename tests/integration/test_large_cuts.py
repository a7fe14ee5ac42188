"""Large cuts of histories and rows without a key: executors write what small cuts write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cdc import failpoints
from cdc.errors import Exit
from lockstep.jobs.apply import large
from lockstep.jobs.cuts import pieces
from lockstep.jobs.reading_as_of import read_as_of_arrow
from lockstep.sinks.contract import Changes
from lockstep.sinks.delta.layout import COMMIT_LSN, COMMITTED_AT, SEQ
from lockstep.sinks.delta.sink import DeltaSink
from tests.fixtures.daemon import NewPipeline
from tests.fixtures.followed import Followed, small_cuts
from tests.integration.test_following import TABLES

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

HISTORY = ["public.users", "public.lines"]
# Each a cut of its own. Bodies are not sent where they stay, except to other keys.
WRITES = (
    (
        "INSERT INTO users SELECT g, 'n' || g, repeat('x', 3000) FROM generate_series(1, 200) g",
        "INSERT INTO lines SELECT g % 7, g, 'n' || g FROM generate_series(1, 200) g",
        "INSERT INTO clicks SELECT g % 50, 'c' FROM generate_series(1, 200) g",
    ),
    (
        "UPDATE users SET name = name || 'u'",
        "UPDATE users SET name = name || 'v' WHERE id % 3 = 0",
        "UPDATE lines SET no = no + 10 WHERE id % 5 = 0",
        "DELETE FROM users WHERE id % 10 = 0",
        "DELETE FROM lines WHERE id % 4 = 0",
        "INSERT INTO clicks VALUES (1, 'c'), (1, 'd')",
        "DELETE FROM clicks WHERE id % 3 = 0 OR name = 'd'",
        "UPDATE clicks SET name = 'e' WHERE id % 3 = 1",
    ),
    (
        "UPDATE users SET name = 'before' WHERE id % 2 = 0",
        "UPDATE lines SET name = 'before' WHERE id % 2 = 0",
        "TRUNCATE lines",
        "INSERT INTO lines SELECT 1, g, 'between' FROM generate_series(1, 60) g",
        "TRUNCATE lines",
        "INSERT INTO lines SELECT 1, g, 'after' FROM generate_series(1, 60) g",
        "TRUNCATE clicks",
        "INSERT INTO clicks SELECT g, 'after' FROM generate_series(1, 60) g",
        "UPDATE users SET name = 'large', body = repeat('y', 200000) WHERE id = 5",
    ),
    (
        "UPDATE users SET name = 'last'",
        "UPDATE lines SET name = 'last'",
        "UPDATE clicks SET name = repeat('z', 200000) WHERE id < 3",
    ),
)


def versions(path: Path, name: str) -> list[str]:
    """Return every version of a mirror's rows; of equal rows without a key any may be deleted."""
    rows = read_as_of_arrow(str(path), [name]).tables[name]
    if name == "public.clicks":
        rows = rows.drop_columns([SEQ, COMMIT_LSN, COMMITTED_AT])
    return sorted(str(sorted(row.items())) for row in rows.to_pylist())


@pytest.mark.slow
def test_executors_write_what_small_cuts_write(
    spark: SparkSession,
    pipeline: NewPipeline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With truncates, dead letters and unsent values; the driver gathers no change.

    A follower that ends between the tasks' files and their commit repeats the cut.
    """
    small_cuts(monkeypatch, 40)
    monkeypatch.setattr(pieces, "PIECE_EVENTS", 25)
    monkeypatch.setattr(large, "SORTED_BYTES", 4_000)
    lakes = {name: tmp_path / name for name in ("large", "small")}
    made = pipeline(
        *TABLES,
        followers={
            name: {
                "delta": {"path": str(path), "history": HISTORY},
                "max_events": 40 if name == "large" else 100_000,
            }
            for name, path in lakes.items()
        },
        log={"kafka": {"message.max.bytes": 60_000}},
    )
    made.start().wait_ready()
    everyone = Followed(made, spark)
    everyone.follow("large", "small")
    gathered: list[str] = []
    write = DeltaSink.write

    def recorded(sink: DeltaSink, changes: Changes) -> int:
        if changes.changes:
            gathered.append(changes.version.name)
        return write(sink, changes)

    for number, statements in enumerate(WRITES):
        with made.database.connect() as connection, connection.transaction():
            for each in statements:
                connection.execute(each.encode())
        with monkeypatch.context() as patched:
            patched.setattr(DeltaSink, "write", recorded)
            if number == 2:
                killed(everyone, patched)
            everyone.follow("large")
        everyone.follow("small")
        for name in (*HISTORY, "public.clicks"):
            assert versions(lakes["large"], name) == versions(lakes["small"], name)
    assert gathered == []


class Killed(Exception):  # noqa: N818 - no error: the follower's death
    """The follower has died."""


def killed(everyone: Followed, patched: pytest.MonkeyPatch) -> None:
    """Run the follower until the tasks' files are written, and before they are in a commit."""
    until = everyone.lsn()
    reach = failpoints.reach

    def die(point: str) -> None:
        if point == "follow_written":
            raise Killed
        reach(point)

    with patched.context() as dying:
        dying.setattr(failpoints, "reach", die)
        assert everyone.run("large", until).run() == Exit.BUG
