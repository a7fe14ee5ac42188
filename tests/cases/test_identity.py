"""CASES "Identity and keys": what old rows and keys hold, for each replica identity."""

from __future__ import annotations

import psycopg
import pytest

from cdc.operate.doctor.run import examine
from cdc.operate.findings import Severity
from tests.fixtures.cases import Case, NewCase

pytestmark = pytest.mark.majors

LONG = "abcdefghij" * 400
_ROW = {"id": 1, "a": "x", "b": 2}


def made(table: str, *more: str) -> tuple[str, ...]:
    return (f"CREATE TABLE {table} (id int PRIMARY KEY, a text, b int)", *more)


def changed(table: str) -> tuple[str, ...]:
    return (
        f"INSERT INTO {table} VALUES (1, 'x', 2)",
        f"UPDATE {table} SET b = 3",
        f"DELETE FROM {table}",
    )


def test_by_default_a_delete_has_the_key_only_and_an_update_no_old_row(case: Case) -> None:
    created, updated, deleted = case(*made("d"), *changed("d"))
    assert (created.op, created.before, created.after) == ("c", None, _ROW)
    assert (updated.op, updated.before, updated.after) == ("u", None, {**_ROW, "b": 3})
    assert (deleted.op, deleted.before, deleted.after) == ("d", {"id": 1}, None)
    assert created.key == updated.key == deleted.key == {"id": 1}
    assert deleted.tombstone
    assert not updated.tombstone
    assert case.schema(created)["replica_identity"] == "d"


def test_by_default_a_changed_key_is_delete_tombstone_and_create_of_one_change(case: Case) -> None:
    before, deleted, created, after = case(
        "CREATE TABLE k (a int, b text, n int, PRIMARY KEY (b, a))",
        "INSERT INTO k VALUES (1, 'one', 0)",
        "UPDATE k SET b = 'two', n = 1",
        "UPDATE k SET n = 2",
    )
    assert (deleted.op, created.op, after.op) == ("d", "c", "u")
    assert before.key == deleted.key == deleted.before == {"b": "one", "a": 1}
    assert created.key == after.key == {"b": "two", "a": 1}
    assert list(created.key) == ["b", "a"]  # the key's own order
    assert created.after == {"a": 1, "b": "two", "n": 1}
    assert deleted.tombstone
    assert created.seq == deleted.seq + 1
    place = ("txId", "lsn", "commit_lsn", "ordinal", "epoch", "ts_us")
    assert [deleted.source[each] for each in place] == [created.source[each] for each in place]


def test_a_key_that_is_set_to_itself_is_an_update(case: Case) -> None:
    _, updated = case(*made("s"), "INSERT INTO s VALUES (1, 'x', 2)", "UPDATE s SET id = 1, b = 3")
    assert (updated.op, updated.key) == ("u", {"id": 1})


def test_keys_that_change_places_in_one_statement_stay_apart(case: Case) -> None:
    events = case(
        "CREATE TABLE swap (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, v text)",
        "ALTER TABLE swap REPLICA IDENTITY FULL",
        "INSERT INTO swap VALUES (1, 'a'), (2, 'b')",
        "UPDATE swap SET id = 3 - id",
    )
    reported = [(e.op, e.key["id"], (e.after or e.before)["v"]) for e in events[2:]]
    assert reported == [("d", 1, "a"), ("c", 2, "a"), ("d", 2, "b"), ("c", 1, "b")]


def test_full_sends_every_column_of_the_old_row_toasted_ones_too(case: Case) -> None:
    created, updated, moved_from, moved_to, deleted = case(
        *made(
            "f", "ALTER TABLE f REPLICA IDENTITY FULL", "ALTER TABLE f ALTER a SET STORAGE EXTERNAL"
        ),
        f"INSERT INTO f VALUES (1, '{LONG}', 2)",
        "UPDATE f SET b = 3",
        "UPDATE f SET id = 5",
        "DELETE FROM f",
    )
    row = {"id": 1, "a": LONG, "b": 2}
    assert created.after == updated.before == row
    assert updated.after == moved_from.before == {**row, "b": 3}
    assert moved_to.after == deleted.before == {"id": 5, "a": LONG, "b": 3}
    assert (moved_from.key, moved_to.key, deleted.key) == ({"id": 1}, {"id": 5}, {"id": 5})
    assert [e.unchanged for e in (created, updated, moved_to)] == [[], [], []]


def test_by_an_index_the_old_row_has_its_columns_and_the_key_is_theirs(case: Case) -> None:
    created, updated, moved_from, moved_to, deleted = case(
        "CREATE TABLE i (id int PRIMARY KEY, a text NOT NULL, b int NOT NULL, c int)",
        "CREATE UNIQUE INDEX i_b_a ON i (b, a)",
        "ALTER TABLE i REPLICA IDENTITY USING INDEX i_b_a",
        "INSERT INTO i VALUES (1, 'x', 2, 3)",
        "UPDATE i SET c = 4",
        "UPDATE i SET a = 'y'",
        "DELETE FROM i",
    )
    assert created.key == updated.key == moved_from.key == moved_from.before == {"a": "x", "b": 2}
    assert moved_to.key == deleted.key == deleted.before == {"a": "y", "b": 2}
    assert list(created.key) == ["a", "b"]
    assert updated.before is None
    assert case.schema(created)["replica_identity"] == "i"
    assert moved_to.after == {"id": 1, "a": "y", "b": 2, "c": 4}


def test_an_identity_index_dropped_later_is_as_nothing(case: Case) -> None:
    [keyed] = case(
        "CREATE TABLE missing (id int PRIMARY KEY, a int NOT NULL)",
        "CREATE UNIQUE INDEX missing_a ON missing (a)",
        "ALTER TABLE missing REPLICA IDENTITY USING INDEX missing_a",
        "INSERT INTO missing VALUES (1, 7)",
        "DROP INDEX missing_a",
    )
    assert keyed.key == {"a": 7}
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        case.run("UPDATE missing SET a = 8")
    [inserted] = case("INSERT INTO missing VALUES (2, 9)")
    assert inserted.after == {"id": 2, "a": 9}
    assert case.schema(inserted)["replica_identity"] == "i"


@pytest.mark.parametrize(
    ("table", "made_by"),
    [
        ("no_key", ("CREATE TABLE no_key (a int)",)),
        ("logs_nothing", (
            "CREATE TABLE logs_nothing (a int PRIMARY KEY)",
            "ALTER TABLE logs_nothing REPLICA IDENTITY NOTHING",
        )),
    ],
)  # fmt: skip
def test_without_an_identity_inserts_flow_and_postgres_refuses_the_rest(
    case: Case, table: str, made_by: tuple[str, ...]
) -> None:
    first, second = case(*made_by, f"INSERT INTO {table} VALUES (1), (2)")
    assert (first.after, second.after) == ({"a": 1}, {"a": 2})
    for refused in (f"UPDATE {table} SET a = 3 WHERE a = 1", f"DELETE FROM {table}"):
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            case.run(refused)
    assert case() == []


def test_what_could_not_be_updated_is_reported_before_it_is_published(case: Case) -> None:
    case.run(
        "CREATE TABLE unnamed (a int)",
        "CREATE TABLE untold (a int PRIMARY KEY)",
        "ALTER TABLE untold REPLICA IDENTITY NOTHING",
        "CREATE TABLE well_keyed (a int PRIMARY KEY)",
    )
    warnings = [each for each in examine(case.pipeline.config) if each.severity is Severity.WARNING]
    found = " ".join(each.what + each.fix for each in warnings)
    assert "public.unnamed" in found
    assert "public.untold" in found
    assert "public.well_keyed" not in found


def test_without_a_key_records_have_none_and_lie_in_one_partition(case: Case) -> None:
    events = case(
        "CREATE TABLE keyless (a int, b text)",
        "ALTER TABLE keyless REPLICA IDENTITY FULL",
        "INSERT INTO keyless SELECT i, 'x' FROM generate_series(1, 20) i",
        "UPDATE keyless SET b = 'y' WHERE a = 3",
        "DELETE FROM keyless WHERE a = 3",
    )
    assert {(e.key_bytes, e.partition) for e in events} == {(None, 0)}
    assert events[-1].before == {"a": 3, "b": "y"}
    assert not events[-1].tombstone
    assert [e.offset for e in events] == sorted(e.offset for e in events)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ("CREATE UNIQUE INDEX {0}_x ON {0} (b)", "nullable"),
        ("CREATE UNIQUE INDEX {0}_x ON {0} (a) WHERE a > 0", "partial"),
        ("CREATE UNIQUE INDEX {0}_x ON {0} (abs(a))", "an expression"),
    ],
    ids=["nullable", "partial", "expression"],
)
def test_an_index_that_is_no_key_is_not_taken_for_one(case: Case, index: str, reason: str) -> None:
    table = f"un_{reason[-7:]}"
    [event] = case(
        f"CREATE TABLE {table} (a int NOT NULL, b int)",
        index.format(table),
        f"ALTER TABLE {table} REPLICA IDENTITY FULL",
        f"INSERT INTO {table} VALUES (1, NULL)",
    )
    assert event.key is None
    with pytest.raises(psycopg.Error):  # nor does Postgres accept it as an identity
        case.run(f"ALTER TABLE {table} REPLICA IDENTITY USING INDEX {table}_x")


def test_a_key_of_many_types_has_the_same_bytes_in_every_event(case: Case) -> None:
    events = case(
        "CREATE TABLE typed (a numeric(6,2), b timestamptz, c uuid, d bytea, e date, f char(3),"
        " g bigint, h boolean, n int, PRIMARY KEY (h, g, f, e, d, c, b, a))",
        "INSERT INTO typed VALUES (1.5, '2026-01-02 03:04:05Z',"
        " 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '\\x00ff', '1970-01-02', 'x',"
        " -9223372036854775808, true)",
        "UPDATE typed SET n = 1",
        "DELETE FROM typed",
    )
    assert len({e.key_bytes for e in events}) == 1
    assert len({e.partition for e in events}) == 1
    assert list(events[0].key.items()) == [
        ("h", True),
        ("g", -9223372036854775808),
        ("f", "x  "),
        ("e", 1),
        ("d", "AP8="),
        ("c", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
        ("b", "2026-01-02T03:04:05Z"),
        ("a", "1.50"),
    ]


def test_a_custom_key_keeps_its_order_and_is_complete_when_a_row_is_deleted(
    new_case: NewCase,
) -> None:
    custom = new_case(
        "CREATE TABLE c (id int PRIMARY KEY, tenant text, region text, n int)",
        "ALTER TABLE c REPLICA IDENTITY FULL",
        tables={"public.c": {"key": ["region", "tenant"]}},
        source={"new_tables": "setup"},
    )
    created, updated, deleted, moved, missing = custom(
        "INSERT INTO c VALUES (1, 't', 'eu', 0)",
        "UPDATE c SET n = 1",
        "UPDATE c SET region = 'us'",
        "DELETE FROM c",
    )
    assert list(created.key.items()) == [("region", "eu"), ("tenant", "t")]
    assert created.key_bytes == updated.key_bytes == deleted.key_bytes
    assert moved.key == missing.key == {"region": "us", "tenant": "t"}
    assert (deleted.op, moved.op, missing.op) == ("d", "c", "d")
    assert deleted.tombstone
    assert missing.tombstone
    assert missing.before == {"id": 1, "tenant": "t", "region": "us", "n": 1}


def test_an_identity_changed_between_two_rows_holds_from_there_on(case: Case) -> None:
    events = case(
        *made("changing"),
        "INSERT INTO changing VALUES (1, 'x', 2), (2, 'y', 3)",
        "DELETE FROM changing WHERE id = 1",
        "ALTER TABLE changing REPLICA IDENTITY FULL",
        "DELETE FROM changing WHERE id = 2",
    )
    assert [e.before for e in events[2:]] == [{"id": 1}, {"id": 2, "a": "y", "b": 3}]
    assert [case.schema(e)["replica_identity"] for e in events] == ["d", "d", "d", "f"]
