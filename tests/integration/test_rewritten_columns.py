"""What the catalog shows of a transaction that wrote a column's values again without an event."""

from __future__ import annotations

import pytest

from cdc.source.lookups import look_up
from tests.fixtures.servers import Database

_MADE = "CREATE TABLE t (id int PRIMARY KEY, a text, b int)"
_ROWS = "INSERT INTO t SELECT i, 'a' || i, i FROM generate_series(1, 9) i"
_LACKING = "ALTER TABLE t ADD c text DEFAULT 'x'"
_USING = "ALTER TABLE t ALTER a TYPE text USING upper(a)"
_NOT_NULL = "ALTER TABLE t ALTER a SET NOT NULL"

_HARMLESS = {
    "vacuum full": ["VACUUM FULL t"],
    "vacuum full of a column with a missing value": [_LACKING, "VACUUM FULL t"],
    "cluster": ["CLUSTER t USING t_pkey"],
    "truncate": ["TRUNCATE t"],
    "truncate, then not null": [f"TRUNCATE t; {_NOT_NULL}"],
    "not null": ["VACUUM FULL t", _NOT_NULL],
    "not null, and a column": ["VACUUM FULL t", f"{_NOT_NULL}; ALTER TABLE t ADD d int"],
    "another persistence": ["ALTER TABLE t SET UNLOGGED"],
    "that of a column with a missing value": [_LACKING, "ALTER TABLE t SET UNLOGGED"],
    "storage": ["ALTER TABLE t ALTER a SET STORAGE EXTERNAL"],
    "reindex": ["REINDEX TABLE t"],
    "a type that is the same": [
        "CREATE INDEX ON t (a)",
        "VACUUM FULL t",
        "ALTER TABLE t ALTER a TYPE text",
    ],
    "without an index": ["ALTER TABLE t DROP CONSTRAINT t_pkey", "VACUUM FULL t", _NOT_NULL],
}
_REWRITES = {
    "using": ([_USING], {2}),
    "using of the key": (["ALTER TABLE t ALTER id TYPE int USING id * 2"], {1}),
    "using of a column with a missing value": (
        [_LACKING, "ALTER TABLE t ALTER c TYPE text USING c || 'y'"],
        {4},
    ),
    "using of an indexed column": (["CREATE INDEX ON t (a)", _USING], {2}),
    "using, then a constraint": ([_USING, "ALTER TABLE t ADD CHECK (b > 0)"], {2}),
    "using without an index": (["ALTER TABLE t DROP CONSTRAINT t_pkey", _USING], {2}),
    "a larger integer, then not null": (
        [f"ALTER TABLE t ALTER id TYPE bigint; {_NOT_NULL}"],
        {1},
    ),
}


def rewritten(database: Database, table: str = "t") -> dict[int, int]:
    """Return by attnum which transaction is shown."""
    with database.connect() as connection:
        [oid] = connection.execute("SELECT %s::regclass::oid::bigint", (table,)).fetchone() or ()
        stored = look_up(connection, "none", [oid])[oid].facts.stored
    assert stored is not None
    return dict(stored.rewritten)


@pytest.mark.parametrize("statements", _HARMLESS.values(), ids=_HARMLESS)
def test_what_only_moves_rows_is_no_rewrite_of_a_column(
    database: Database, statements: list[str]
) -> None:
    database.execute(_MADE, _ROWS, *statements)
    assert rewritten(database) == {}


@pytest.mark.parametrize(("statements", "columns"), _REWRITES.values(), ids=_REWRITES)
def test_a_rewritten_column_is_found(
    database: Database, statements: list[str], columns: set[int]
) -> None:
    database.execute(_MADE, _ROWS, *statements)
    assert set(rewritten(database)) == columns


def test_each_rewrite_has_its_own_transaction(database: Database) -> None:
    database.execute(_MADE, _ROWS, _USING)
    first = rewritten(database)
    database.execute(_USING)
    assert set(first) == set(rewritten(database)) == {2}
    assert first != rewritten(database)


def test_rewrites_of_a_partitioned_table_are_found_in_its_partitions(database: Database) -> None:
    database.execute(
        "CREATE TABLE p (id int, a text, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (5)",
        "INSERT INTO p SELECT i, 'a' FROM generate_series(1, 4) i",
        "VACUUM FULL p1",
    )
    assert rewritten(database, "p") == {}
    database.execute("ALTER TABLE p ALTER a TYPE text USING upper(a)")
    found = rewritten(database, "p")
    assert set(found) == {2}
    database.execute(
        "CREATE TABLE p2 (id int NOT NULL, a text, PRIMARY KEY (id))",
        "ALTER TABLE p2 ALTER a TYPE text USING upper(a)",
        "ALTER TABLE p ATTACH PARTITION p2 FOR VALUES FROM (5) TO (9)",
    )
    assert rewritten(database, "p") == found
