"""`cdc view check` knows from the log how Postgres compares the texts of a column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from cdc.errors import Exit
from cdc.source.lookups import look_up
from tests.fixtures.commands import completed
from tests.fixtures.daemon import wait_until

if TYPE_CHECKING:
    from tests.fixtures.daemon import NewPipeline
    from tests.fixtures.servers import Database

_FOLDING = (
    "CREATE COLLATION folding (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
)
_TABLE = (
    'CREATE TABLE words (id int PRIMARY KEY, own text, bytes text COLLATE "C", posix varchar'
    ' COLLATE "POSIX", german text COLLATE "de-x-icu", folded text COLLATE folding, n int)'
)
_VIEWS = {
    "by_bytes": "SELECT id, bytes FROM words ORDER BY bytes LIMIT 2",
    "by_language": "SELECT id, german FROM words ORDER BY german LIMIT 2",
    "equal": "SELECT id FROM words WHERE folded = 'a'",
    "selected": "SELECT id, folded FROM words WHERE folded COLLATE \"C\" = 'a'",
}
_FOLDED = "a view can't have = of text with a nondeterministic collation"
_ORDERED = "a view can't have ORDER BY of text in the database's collation"


def test_the_catalog_says_how_the_texts_of_each_column_are_compared(database: Database) -> None:
    """The test's database has the collation C."""
    database.execute(_FOLDING, _TABLE)
    with database.connect() as connection:
        row = connection.execute("SELECT 'words'::regclass::oid::int").fetchone()
        assert row is not None
        found = look_up(connection, "", row)[row[0]].facts.collations
    assert found == {
        "own": "C", "bytes": "C", "posix": "C", "german": "linguistic", "folded": "nondeterministic"
    }  # fmt: skip


def test_views_that_compare_equal_texts_that_differ_are_refused(
    pipeline: NewPipeline, tmp_path: Path
) -> None:
    """Postgres finds two rows where Spark would find one."""
    line = pipeline(
        _FOLDING,
        _TABLE,
        views={name: {"sql": sql, "key": ["id"]} for name, sql in _VIEWS.items()},
        followers={
            "lake": {"delta": {"path": str(tmp_path / "lake")}},
            "answers": {
                "delta": {"path": str(tmp_path / "views")},
                "mirror": "lake",
                "views": [*_VIEWS],
            },
        },
    )

    def refused() -> tuple[int, dict[str, str | None]]:
        ran = completed(line.config_file, "view", "check", "--json")
        return ran.returncode, {each["view"]: each["refused"] for each in json.loads(ran.stdout)}

    row = "INSERT INTO words VALUES ({}, 'a', 'a', 'a', 'a', '{}')"
    line.database.execute(row.format(1, "a"), row.format(2, "A"))
    line.start().wait_ready()
    wanted = {"by_bytes": None, "by_language": _ORDERED, "equal": _FOLDED, "selected": None}
    assert refused() == (Exit.CONFIG, wanted)
    with line.database.connect() as connection:
        assert len(connection.execute(_VIEWS["equal"].encode()).fetchall()) == 2
        assert len(connection.execute(_VIEWS["selected"].encode()).fetchall()) == 1
    # Postgres describes the table again, with the same types.
    line.database.execute(
        'ALTER TABLE words ALTER bytes TYPE text COLLATE "de-x-icu"', row.format(3, "b")
    )
    wait_until(
        lambda: refused()[1] == wanted | {"by_bytes": _ORDERED}, "the new collation is known"
    )
