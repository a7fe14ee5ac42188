"""CASES "DDL in mid-stream": each event by the schema of its own LSN, also for a daemon that lags.

What is tested with the daemon running is also tested with it stopped: then the catalog that it
could read is newer than every row that it reads.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Final

import pytest

from tests.fixtures.cases import Case, Event, NewCase

pytestmark = pytest.mark.majors


def daemon(case: Case, how: str) -> AbstractContextManager[None]:
    return case.away() if how == "away" else nullcontext()


def of_rows(events: list[Event]) -> list[Event]:
    """Return the events without those that say how DDL changes older rows."""
    return [event for event in events if event.op != "m"]


def rows(events: list[Event]) -> list[object]:
    return [event.after for event in of_rows(events)]


Histories = dict[str, list[Event]]

# What is done to a table {0}, and to the tables that result.
_SCRIPTS: Final = {
    "columns": (
        "CREATE TABLE {0} (id int PRIMARY KEY, a text)",
        "INSERT INTO {0} VALUES (1, 'v1')",
        "ALTER TABLE {0} ADD COLUMN b int",
        "INSERT INTO {0} VALUES (2, 'v2', 2)",
        "ALTER TABLE {0} ADD COLUMN c int NOT NULL DEFAULT 7",
        "INSERT INTO {0} VALUES (3, 'v3', 3)",
        "UPDATE {0} SET b = 1 WHERE id = 1",
        "ALTER TABLE {0} RENAME a TO called",
        "INSERT INTO {0} VALUES (4, 'v4', 4, 4)",
        "ALTER TABLE {0} DROP COLUMN b",
        "INSERT INTO {0} VALUES (5, 'v5', 5)",
        "ALTER TABLE {0} ADD COLUMN b text",
        "INSERT INTO {0} VALUES (6, 'v6', 6, 'again')",
    ),
    "types": (
        "CREATE TABLE {0} (id int PRIMARY KEY, v varchar(9), n numeric(5,2), t timestamp)",
        "INSERT INTO {0} VALUES (1, '42', 1.5, '1970-01-01 00:00:01')",
        "ALTER TABLE {0} ALTER v TYPE int USING v::int, ALTER n TYPE numeric(6,1)",
        "INSERT INTO {0} VALUES (2, 42, 1.5, '1970-01-01 00:00:01')",
        "ALTER TABLE {0} ALTER n TYPE numeric, ALTER t TYPE timestamp(3)",
        "INSERT INTO {0} VALUES (3, 42, 1.5000, '1970-01-01 00:00:01')",
        "ALTER TABLE {0} ALTER t TYPE timestamptz, ALTER v TYPE boolean USING v > 0",
        "INSERT INTO {0} VALUES (4, true, 1.5, '1970-01-01 00:00:01Z')",
        "ALTER TABLE {0} ALTER v TYPE text[] USING ARRAY[v::text]",
        "INSERT INTO {0} VALUES (5, '{{a}}', 1.5, 'infinity')",
    ),
    "keys": (
        "CREATE TABLE {0} (a int, b int, c int, CONSTRAINT {0}_k PRIMARY KEY (a))",
        "INSERT INTO {0} VALUES (1, 2, 3)",
        "ALTER TABLE {0} DROP CONSTRAINT {0}_k, ADD CONSTRAINT {0}_k PRIMARY KEY (c, b)",
        "INSERT INTO {0} VALUES (4, 5, 6)",
        "DELETE FROM {0} WHERE a = 1",
        "ALTER TABLE {0} DROP CONSTRAINT {0}_k",
        "INSERT INTO {0} VALUES (7, 8, 9)",
        "ALTER TABLE {0} ADD CONSTRAINT {0}_k PRIMARY KEY (b)",
        "DELETE FROM {0} WHERE a = 4",
    ),
    "moving": (
        "CREATE TABLE {0} (id int PRIMARY KEY, a text)",
        "INSERT INTO {0} VALUES (1, 'first')",
        "ALTER TABLE {0} RENAME TO {0}_2",
        "INSERT INTO {0}_2 VALUES (2, 'renamed')",
        "CREATE TABLE {0} (id text PRIMARY KEY)",
        "INSERT INTO {0} VALUES ('another')",
        "DROP TABLE {0}",
        "ALTER TABLE {0}_2 RENAME TO {0}",
        "INSERT INTO {0} VALUES (3, 'back')",
        "DROP TABLE {0}",
        "CREATE TABLE {0} (id bigint PRIMARY KEY, b int)",
        "INSERT INTO {0} VALUES (4, 4)",
    ),
}


@pytest.fixture(scope="module", params=["running", "away"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def histories(case: Case, how: str) -> Histories:
    """Return the events of every script, written while the daemon ran or while it was stopped."""
    with daemon(case, how):
        for name, statements in _SCRIPTS.items():
            case.run(*(each.format(f"{name}_{how}") for each in statements))
    events = case.events()
    return {name: [e for e in events if e.table.startswith(name)] for name in _SCRIPTS}


@pytest.fixture(scope="module")
def listed(new_case: NewCase) -> Case:
    """A publication that lists its tables."""
    return new_case("CREATE TABLE first (id int PRIMARY KEY)", source={"new_tables": "setup"})


def test_a_column_that_is_added_renamed_or_dropped_is_there_from_its_lsn_on(
    case: Case, histories: Histories, how: str
) -> None:
    events = histories["columns"]
    assert rows(events) == [
        {"id": 1, "a": "v1"},
        {"id": 2, "a": "v2", "b": 2},
        {"id": 3, "a": "v3", "b": 3, "c": 7},
        {"id": 1, "a": "v1", "b": 1, "c": 7},
        {"id": 4, "called": "v4", "b": 4, "c": 4},
        {"id": 5, "called": "v5", "c": 5},
        {"id": 6, "called": "v6", "c": 6, "b": "again"},
    ]
    for event in events:
        assert list(case.columns(event)) == list(event.after)
    assert events[2].source["schema_id"] == events[3].source["schema_id"]
    assert len({e.source["schema_id"] for e in events}) == 6


def test_a_type_that_changes_holds_from_its_lsn_on(
    case: Case, histories: Histories, how: str
) -> None:
    events = histories["types"]
    assert rows(events) == [
        {"id": 1, "v": "42", "n": "1.50", "t": 1_000_000},
        {"id": 2, "v": 42, "n": "1.5", "t": 1_000_000},
        {"id": 3, "v": 42, "n": "1.5000", "t": 1_000},
        {"id": 4, "v": True, "n": "1.5", "t": "1970-01-01T00:00:01Z"},
        {"id": 5, "v": ["a"], "n": "1.5", "t": "infinity"},
    ]
    types = [case.columns(each)["v"] for each in events]
    assert types[:4] == ["varchar", "int4", "int4", "bool"]
    assert len({each.source["schema_id"] for each in events}) == 5


def test_a_primary_key_that_changes_keys_each_row_by_its_time(
    case: Case, histories: Histories, how: str
) -> None:
    events = histories["keys"]
    # The stream has which columns a key has, not their order; the catalog has that.
    assert [event.key for event in events] == [
        {"a": 1},
        {"c": 6, "b": 5},
        {"c": 3, "b": 2},
        None,
        {"b": 5},
    ]


def test_a_table_renamed_moved_or_recreated_keeps_every_row_apart(
    case: Case, histories: Histories, how: str
) -> None:
    events = histories["moving"]
    t = f"moving_{how}"
    assert [(e.table, e.after) for e in events] == [
        (t, {"id": 1, "a": "first"}),
        (f"{t}_2", {"id": 2, "a": "renamed"}),
        (t, {"id": "another"}),
        (t, {"id": 3, "a": "back"}),
        (t, {"id": 4, "b": 4}),
    ]
    relations = [case.schema(each)["relation_id"] for each in events]
    assert relations[0] == relations[1] == relations[3]
    assert len(set(relations)) == 3


def test_ddl_and_rows_of_one_transaction_go_together_or_not_at_all(case: Case) -> None:
    case("CREATE TABLE atomic (id int PRIMARY KEY)")
    with case.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO atomic VALUES (1)")
        connection.execute("ALTER TABLE atomic ADD a int DEFAULT 3")
        connection.execute("INSERT INTO atomic VALUES (2)")
        connection.execute("SAVEPOINT s")
        connection.execute("ALTER TABLE atomic ADD b int")
        connection.execute("INSERT INTO atomic VALUES (3, 3, 3)")
        connection.execute("ROLLBACK TO s")
        connection.execute("INSERT INTO atomic VALUES (4)")
        connection.commit()
        connection.execute("ALTER TABLE atomic RENAME a TO z")
        connection.execute("INSERT INTO atomic VALUES (5)")
        connection.rollback()
        connection.execute("INSERT INTO atomic VALUES (6)")
    assert rows(case.events()) == [
        {"id": 1},
        {"id": 2, "a": 3},
        {"id": 4, "a": 3},
        {"id": 6, "a": 3},
    ]


def test_a_rewrite_of_a_table_is_no_change_of_its_rows(case: Case) -> None:
    seen = case(
        "CREATE TABLE rewritten (id int PRIMARY KEY, a int)",
        "INSERT INTO rewritten VALUES (1, 1)",
        "ALTER TABLE rewritten ALTER a TYPE bigint",
        "VACUUM FULL rewritten",
        "CLUSTER rewritten USING rewritten_pkey",
        "ALTER TABLE rewritten ADD b float8 DEFAULT random()",
        "REINDEX TABLE rewritten",
        "UPDATE rewritten SET a = 2",
    )
    events = of_rows(seen)
    assert [(e.op, e.after["a"]) for e in events] == [("c", 1), ("u", 2)]
    assert isinstance(events[1].after["b"], float)


def test_a_new_table_of_a_published_schema_is_captured_from_its_first_row(
    case: Case, how: str
) -> None:
    with daemon(case, how):
        case.run(
            f"CREATE TABLE new_{how} (id int PRIMARY KEY)", f"INSERT INTO new_{how} VALUES (1)"
        )
    [event] = case.events()
    assert (event.table, event.after) == (f"new_{how}", {"id": 1})


def test_a_new_table_of_a_list_is_captured_from_the_setup_that_takes_it(
    listed: Case, how: str
) -> None:
    t = f"later_{how}"
    assert listed(f"CREATE TABLE {t} (id int PRIMARY KEY)", f"INSERT INTO {t} VALUES (1)") == []
    with daemon(listed, how):
        listed.pipeline.set_up()
        listed.run(f"INSERT INTO {t} VALUES (2)")
    [event] = listed.events()
    assert (event.table, event.after) == (t, {"id": 2})


def test_a_table_that_left_the_publication_and_came_back_is_a_gap(new_case: NewCase) -> None:
    left = new_case("CREATE TABLE t (id int PRIMARY KEY)", source={"new_tables": "setup"})
    line = left.pipeline
    assert len(left("INSERT INTO t VALUES (1)")) == 1
    publication = line.config.publication
    left.run(
        f"ALTER PUBLICATION {publication} DROP TABLE t",
        "INSERT INTO t VALUES (2)",
        f"ALTER PUBLICATION {publication} ADD TABLE t",
        "INSERT INTO t VALUES (3)",
    )
    line.ends(line.daemon, 78, "public.t")


def test_a_generated_column_is_absent_or_delivered_and_never_null(case: Case) -> None:
    created, updated = case(
        "CREATE TABLE generated (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED,"
        " v text)",
        "INSERT INTO generated (id, v) VALUES (4, 'a')",
        "UPDATE generated SET v = 'b'",
    )
    generated = {"twice": 8} if case.major >= 18 else {}
    assert created.after == {"id": 4, "v": "a"} | generated
    assert updated.after == {"id": 4, "v": "b"} | generated
    assert ("twice" in case.columns(created)) == (case.major >= 18)


def test_a_virtual_column_is_in_no_event(case: Case) -> None:
    if case.major < 18:
        pytest.skip("Postgres 18 is the first that has them")
    [event] = case(
        "CREATE TABLE virtual (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) VIRTUAL)",
        "INSERT INTO virtual VALUES (4)",
    )
    assert event.after == {"id": 4}
