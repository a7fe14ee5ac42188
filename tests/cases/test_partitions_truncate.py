"""CASES "Partitions, truncate, misc objects": each row's topic, and what is captured at all."""

from __future__ import annotations

import pytest

from tests.fixtures.cases import Case, Event, NewCase

pytestmark = pytest.mark.majors

_SALES = "CREATE TABLE sales (id int, year int, who text, PRIMARY KEY (id, year))"
_PARTED = (
    f"{_SALES} PARTITION BY LIST (year)",
    "CREATE TABLE sales_24 PARTITION OF sales FOR VALUES IN (24)",
    "CREATE TABLE sales_25 PARTITION OF sales FOR VALUES IN (25) PARTITION BY HASH (id)",
    "CREATE TABLE sales_25_0 PARTITION OF sales_25 FOR VALUES WITH (MODULUS 1, REMAINDER 0)",
    "CREATE TABLE sales_else PARTITION OF sales DEFAULT",
)


@pytest.fixture(scope="module")
def leaf(new_case: NewCase) -> Case:
    return new_case(*_PARTED, source={"partitions": "leaf", "new_tables": "setup"})


@pytest.fixture(scope="module")
def root(new_case: NewCase) -> Case:
    return new_case(*_PARTED, source={"new_tables": "setup"})


def reported(events: list[Event]) -> list[tuple[str, str, int, int]]:
    return [(e.table, e.op, e.key["id"], e.key["year"]) for e in events]


def test_by_root_every_partitions_row_is_in_the_one_topic(root: Case) -> None:
    events = root(
        "INSERT INTO sales VALUES (1, 24, 'a'), (2, 25, 'b'), (3, 99, 'c')",
        "INSERT INTO sales_24 VALUES (4, 24, 'directly')",
        "UPDATE sales SET who = 'd' WHERE id = 2",
        "DELETE FROM sales_else",
    )
    assert reported(events) == [
        ("sales", "c", 1, 24),
        ("sales", "c", 2, 25),
        ("sales", "c", 3, 99),
        ("sales", "c", 4, 24),
        ("sales", "u", 2, 25),
        ("sales", "d", 3, 99),
    ]
    assert len({e.topic for e in events}) == 1
    root("DELETE FROM sales")


def test_by_root_a_row_that_moves_is_deleted_and_created(root: Case) -> None:
    _, deleted, created = root(
        "INSERT INTO sales VALUES (1, 24, 'a')", "UPDATE sales SET year = 25, who = 'b'"
    )
    assert reported([deleted, created]) == [("sales", "d", 1, 24), ("sales", "c", 1, 25)]
    assert deleted.tombstone
    assert created.after == {"id": 1, "year": 25, "who": "b"}
    assert deleted.source["txId"] == created.source["txId"]
    root("DELETE FROM sales")


def test_by_root_a_partition_apart_is_captured_again_once_it_is_attached(root: Case) -> None:
    events = root(
        "ALTER TABLE sales DETACH PARTITION sales_24",
        "INSERT INTO sales_24 VALUES (9, 24, 'apart')",
        "INSERT INTO sales VALUES (10, 25, 'b')",
        "ALTER TABLE sales ATTACH PARTITION sales_24 FOR VALUES IN (24)",
        "INSERT INTO sales VALUES (11, 24, 'c')",
        "CREATE TABLE sales_26 PARTITION OF sales FOR VALUES IN (26)",
        "INSERT INTO sales VALUES (12, 26, 'd')",
        "DROP TABLE sales_26",
    )
    assert reported(events) == [
        ("sales", "c", 10, 25),
        ("sales", "c", 11, 24),
        ("sales", "c", 12, 26),
    ]
    root("DELETE FROM sales")


def test_by_root_a_partition_may_have_its_columns_in_another_order(root: Case) -> None:
    events = root(
        "CREATE TABLE sales_27 (dropped int, who text, year int NOT NULL, id int NOT NULL)",
        "ALTER TABLE sales_27 DROP COLUMN dropped",
        "ALTER TABLE sales ATTACH PARTITION sales_27 FOR VALUES IN (27)",
        "INSERT INTO sales VALUES (1, 27, 'x')",
        "UPDATE sales SET who = 'y' WHERE id = 1",
        "DELETE FROM sales WHERE id = 1",
    )
    assert [each.after for each in events] == [
        {"id": 1, "year": 27, "who": "x"},
        {"id": 1, "year": 27, "who": "y"},
        None,
    ]
    assert {list(each.key) == ["id", "year"] for each in events} == {True}


def test_by_leaf_each_partition_is_a_topic_and_a_row_that_moves_is_in_both(leaf: Case) -> None:
    events = leaf(
        "INSERT INTO sales VALUES (1, 24, 'a'), (2, 25, 'b'), (3, 99, 'c')",
        "UPDATE sales SET year = 25 WHERE id = 1",
        "CREATE TABLE sales_26 PARTITION OF sales FOR VALUES IN (26)",
        "INSERT INTO sales VALUES (4, 26, 'd')",
        "DELETE FROM sales WHERE id = 1",
    )
    assert reported(events) == [
        ("sales_24", "c", 1, 24),
        ("sales_25_0", "c", 2, 25),
        ("sales_else", "c", 3, 99),
        ("sales_24", "d", 1, 24),
        ("sales_25_0", "c", 1, 25),
        ("sales_26", "c", 4, 26),
        ("sales_25_0", "d", 1, 25),
    ]
    assert len({e.topic for e in events}) == 4


def test_a_truncate_of_many_is_one_event_of_each_captured_table_in_order(case: Case) -> None:
    events = case(
        "CREATE UNLOGGED TABLE fleeting (id int)",
        "CREATE TABLE parent (id serial PRIMARY KEY)",
        "CREATE TABLE child (id int PRIMARY KEY, p int REFERENCES parent)",
        "CREATE TABLE other (id int PRIMARY KEY)",
        "INSERT INTO parent VALUES (1)",
        "INSERT INTO child VALUES (1, 1)",
        "TRUNCATE other, fleeting, parent RESTART IDENTITY CASCADE",
        "INSERT INTO parent DEFAULT VALUES",
    )
    truncates = [each for each in events if each.op == "t"]
    assert sorted(each.table for each in truncates) == ["child", "other", "parent"]
    assert [each.op for each in events] == ["c", "c", "t", "t", "t", "c"]
    for event in truncates:
        assert (event.before, event.after, event.key_bytes, event.partition) == (
            None,
            None,
            None,
            0,
        )
    assert len({each.source["commit_lsn"] for each in truncates}) == 1
    assert [each.source["ordinal"] for each in truncates] == [1, 2, 3]
    assert events[-1].after == {"id": 1}


def test_a_truncate_is_between_the_rows_of_its_transaction(case: Case) -> None:
    case("CREATE TABLE emptied (id int PRIMARY KEY)")
    with case.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO emptied VALUES (1)")
        connection.execute("TRUNCATE emptied")
        connection.execute("INSERT INTO emptied VALUES (2)")
        connection.execute("SAVEPOINT s")
        connection.execute("TRUNCATE emptied")
        connection.execute("ROLLBACK TO s")
        connection.execute("INSERT INTO emptied VALUES (3)")
    events = case.events()
    assert [(e.op, e.after and e.after["id"]) for e in events] == [
        ("c", 1),
        ("t", None),
        ("c", 2),
        ("c", 3),
    ]


def test_a_truncate_of_a_partitioned_table_is_one_event_by_root(root: Case) -> None:
    events = root("INSERT INTO sales VALUES (1, 24, 'a'), (2, 25, 'b')", "TRUNCATE sales")
    assert [(e.table, e.op) for e in events[2:]] == [("sales", "t")]


def test_a_truncate_of_a_partitioned_table_is_one_event_of_each_leaf(leaf: Case) -> None:
    events = leaf("TRUNCATE sales")
    assert {e.op for e in events} == {"t"}
    tables = [e.table for e in events]
    assert len(tables) == len(set(tables))
    assert {"sales_24", "sales_25_0", "sales_else"} <= set(tables)


def test_what_writes_no_changes_is_left_out_and_harms_nothing(case: Case) -> None:
    events = case(
        "CREATE TABLE real_one (id int PRIMARY KEY, v int)",
        "CREATE VIEW seen AS SELECT * FROM real_one",
        "CREATE MATERIALIZED VIEW kept AS SELECT * FROM real_one",
        "CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY)",
        "CREATE TEMPORARY TABLE temporary (id int PRIMARY KEY)",
        "CREATE SEQUENCE counting",
        "CREATE EXTENSION file_fdw SCHEMA public",
        "CREATE SERVER files FOREIGN DATA WRAPPER file_fdw",
        "CREATE FOREIGN TABLE far (line text) SERVER files OPTIONS (program 'echo far')",
        "INSERT INTO unlogged VALUES (1)",
        "INSERT INTO temporary VALUES (1)",
        "SELECT nextval('counting')",
        "INSERT INTO seen VALUES (1, 2)",
        "REFRESH MATERIALIZED VIEW kept",
        "UPDATE seen SET v = 3",
        "DROP VIEW seen CASCADE",
    )
    assert [(e.table, e.op, e.after) for e in events] == [
        ("real_one", "c", {"id": 1, "v": 2}),
        ("real_one", "u", {"id": 1, "v": 3}),
    ]


def test_a_table_that_becomes_logged_is_captured_from_then_on(case: Case) -> None:
    events = case(
        "CREATE UNLOGGED TABLE later_logged (id int PRIMARY KEY)",
        "INSERT INTO later_logged VALUES (1)",
        "ALTER TABLE later_logged SET LOGGED",
        "INSERT INTO later_logged VALUES (2)",
    )
    assert [e.after for e in events] == [{"id": 2}]


def test_an_inheritance_child_is_a_table_of_its_own(case: Case) -> None:
    events = case(
        "CREATE TABLE elder (id int PRIMARY KEY, a text)",
        "CREATE TABLE heir (extra int, PRIMARY KEY (id)) INHERITS (elder)",
        "INSERT INTO elder VALUES (1, 'x')",
        "INSERT INTO heir VALUES (2, 'y', 3)",
        "UPDATE elder SET a = 'z'",
        "TRUNCATE ONLY elder",
        "DELETE FROM elder",
    )
    assert [(e.table, e.op) for e in events] == [
        ("elder", "c"),
        ("heir", "c"),
        ("elder", "u"),
        ("heir", "u"),
        ("elder", "t"),
        ("heir", "d"),
    ]
    assert events[3].after == {"id": 2, "a": "z", "extra": 3}


def test_copy_insert_select_merge_and_upsert_are_rows_like_any(case: Case) -> None:
    case("CREATE TABLE ways (id int PRIMARY KEY, v int)")
    with case.connect() as connection:
        with connection.cursor().copy("COPY ways FROM STDIN") as copy:
            copy.write_row((1, 1))
            copy.write_row((2, 2))
        connection.execute("INSERT INTO ways SELECT id + 2, v FROM ways")
        connection.execute(
            "INSERT INTO ways VALUES (1, 0), (9, 9) ON CONFLICT (id) DO UPDATE SET v = 10"
        )
        connection.execute(
            "MERGE INTO ways w USING (VALUES (2), (8)) s(id) ON w.id = s.id"
            " WHEN MATCHED THEN DELETE WHEN NOT MATCHED THEN INSERT VALUES (s.id, 8)"
        )
    reported = [(e.op, e.key["id"], e.after and e.after["v"]) for e in case.events()]
    assert reported[:6] == [
        ("c", 1, 1),
        ("c", 2, 2),
        ("c", 3, 1),
        ("c", 4, 2),
        ("u", 1, 10),
        ("c", 9, 9),
    ]
    assert sorted(reported[6:]) == [("c", 8, 8), ("d", 2, None)]
