"""What the publication must contain, and how it differs; what prevents it, and the fix."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import convert

from cdc.config import Config, Log, Source, TableRule
from cdc.operate.doctor.tables import TablesFacts, check_tables
from cdc.operate.findings import Finding
from cdc.publication.plan import Plan, plan
from cdc.source.columns import Column, Partition
from cdc.source.membership import Entry, Note, State, alterations, creation, difference
from cdc.source.server import Table
from tests.unit.test_control_doctor import SERVER, TABLE

OPERATIONS = frozenset({"insert", "update", "delete", "truncate"})
COLUMNS = [
    Column("id", "", in_identity=True, in_primary_key=True),
    Column("email", "", in_identity=False, in_primary_key=False),
    Column("born", "", in_identity=False, in_primary_key=False),
    Column("age", "s", in_identity=False, in_primary_key=False),
    Column("label", "v", in_identity=False, in_primary_key=False),
]
FULL = [column._replace(in_identity=True) for column in COLUMNS]


def configured(rules: dict[str, Any] | None = None, **source: Any) -> Config:  # noqa: ANN401 - fields
    return Config(
        pipeline="shop",
        source=Source(dsn="host=x", **source),
        log=Log(bootstrap_servers="localhost:9092"),
        tables=convert(rules or {}, dict[str, TableRule]),
    )


def planned(
    rules: dict[str, Any] | None = None,
    *,
    major: int = 17,
    superuser: bool = True,
    tables: list[Table] | None = None,
    columns: list[Column] = COLUMNS,
    **source: Any,  # noqa: ANN401 - fields
) -> Plan:
    server = SERVER._replace(version=major * 10_000, superuser=superuser)
    tables = tables or [TABLE]
    known = {table.oid: columns for table in tables}
    return plan(configured(rules, **source), server, tables, known)


def columns_of(wanted: Plan) -> tuple[str, ...] | None:
    return wanted.members[0].columns


def rule(**settings: object) -> dict[str, Any]:
    return {"public.users": settings}


@pytest.mark.parametrize(
    ("settings", "major", "listed"),
    [
        ({}, 17, None),
        ({"exclude": ["born"]}, 17, ("id", "email")),
        ({"exclude": ["born"]}, 18, ("id", "email", "age")),
        ({"columns": ["id", "*a*"]}, 17, ("id", "email")),
        ({"columns": ["id", "*a*"]}, 18, ("id", "email", "age")),
        ({"exclude": ["label"]}, 18, None),  # Postgres never sends it
        ({"exclude": ["born"]}, 14, None),
    ],
)
def test_a_column_list_holds_what_is_captured_and_can_be_sent(
    settings: dict[str, object], major: int, listed: tuple[str, ...] | None
) -> None:
    assert columns_of(planned(rule(**settings), major=major)) == listed


@pytest.mark.parametrize(
    ("major", "table", "source"),
    [
        (14, TABLE, {}),
        (17, TABLE._replace(replica_identity="f"), {}),
        (17, TABLE._replace(kind="p"), {"partitions": "leaf"}),
    ],
)
def test_where_postgres_takes_no_column_list_the_column_is_null(
    major: int, table: Table, source: dict[str, Any]
) -> None:
    wanted = planned(rule(exclude=["born"]), major=major, tables=[table], **source)
    assert columns_of(wanted) is None
    assert wanted.nulled == {"public.users": ["born"]}
    assert not wanted.problems


def test_an_identity_that_holds_an_unpublished_generated_column_is_refused_on_18() -> None:
    table = TABLE._replace(replica_identity="f")
    wanted = planned(major=18, tables=[table], columns=FULL, generated_columns="none")
    assert "generated column that is not published" in wanted.problems[0].what
    assert planned(major=18, tables=[table], columns=FULL[:4]).problems == []
    assert planned(major=18, tables=[table], columns=FULL).problems, "a virtual one is none either"
    assert planned(major=17, tables=[table], columns=FULL).problems == []


@pytest.mark.parametrize(
    ("rules", "source", "major", "superuser", "why"),
    [
        ({}, {}, 14, True, "knows no TABLES IN SCHEMA"),
        ({}, {}, 17, False, "is no superuser"),
        (rule(exclude=["born"]), {}, 17, True, "takes no column list"),
        (rule(where="id > 1"), {}, 17, True, "row filters do not count"),
        ({}, {"exclude": ["public.x*"]}, 17, True, "source.exclude leaves tables out"),
    ],
)
def test_a_schema_that_cannot_be_taken_whole_says_why(
    rules: dict[str, Any], source: dict[str, Any], major: int, *, superuser: bool, why: str
) -> None:
    wanted = planned(rules, major=major, superuser=superuser, new_tables="publish", **source)
    assert why in wanted.listed["public"]
    assert not wanted.schemas
    assert planned(new_tables="publish").schemas == {"public"}
    assert not planned(new_tables="publish", tables=None, exclude=["other.x"]).listed


# --- what differs ---


def state(**changes: object) -> State:
    entry = Entry(500, "public.users", None, filtered=False)
    found = State(
        99,
        OPERATIONS,
        via_root=True,
        generated=False,
        all_tables=False,
        entries={1: entry},
        schemas={},
        published={1: 500},
        note=Note({}, {}),
    )
    return found._replace(**changes)  # type: ignore[arg-type] # any field's


def statements(wanted: Plan, actual: State) -> list[str]:
    change = difference(wanted, actual, set())
    return [each.as_string() for each in alterations("p", change)]


def test_a_publication_that_is_as_configured_is_left() -> None:
    assert not difference(planned(), state(), set())
    entry = Entry(500, "public.users", ("email", "id", "born"), filtered=True)
    actual = state(entries={1: entry}, note=Note({}, {500: "id > 1"}))
    wanted = planned(rule(columns=["id", "email", "born"], where="id > 1", exclude=[]))
    assert not difference(wanted, actual, set())


def test_the_statements_make_the_publication() -> None:
    assert creation("p", planned(rule(where="id > 1", exclude=["born"]))).as_string() == (
        'CREATE PUBLICATION "p" FOR TABLE "public"."users" ("id", "email") WHERE (id > 1)'
        " WITH (publish = 'insert, update, delete, truncate', publish_via_partition_root = 'true')"
    )
    assert creation("p", planned(new_tables="publish", major=18)).as_string() == (
        'CREATE PUBLICATION "p" FOR TABLES IN SCHEMA "public"'
        " WITH (publish = 'insert, update, delete, truncate', publish_via_partition_root = 'true',"
        " publish_generated_columns = 'stored')"
    )
    assert statements(planned(rule(where="id > 1")), state()) == [
        'ALTER PUBLICATION "p" DROP TABLE "public"."users"',
        'ALTER PUBLICATION "p" ADD TABLE "public"."users" WHERE (id > 1)',
    ]
    other = TABLE._replace(oid=2, name="orders")
    assert statements(planned(tables=[TABLE, other]), state()) == [
        'ALTER PUBLICATION "p" ADD TABLE "public"."orders"'
    ]


def test_a_whole_schema_is_left_before_a_column_list_comes() -> None:
    actual = state(entries={}, schemas={"public": 7}, published={1: 0})
    assert statements(planned(rule(exclude=["born"])), actual) == [
        'ALTER PUBLICATION "p" DROP TABLES IN SCHEMA "public"',
        'ALTER PUBLICATION "p" ADD TABLE "public"."users" ("id", "email")',
    ]
    foreign = actual._replace(schemas={"public": 7, "theirs": 8})
    assert "theirs" not in str(statements(planned(), foreign))


def test_options_that_differ_are_set() -> None:
    (statement,) = statements(planned(partitions="leaf", major=18), state())
    assert statement == (
        "ALTER PUBLICATION \"p\" SET (publish_via_partition_root = 'false',"
        " publish_generated_columns = 'stored')"
    )


# --- the doctor's findings ---


def findings(
    rules: dict[str, Any] | None = None,
    actual: State | None = None,
    tables: list[Table] | None = None,
    **source: Any,  # noqa: ANN401 - fields
) -> dict[str, Finding]:
    tables = tables or [TABLE]
    known = {table.oid: COLUMNS for table in tables}
    names = {1: ("public", "users"), 7: ("public", "extra")}
    published = actual.published if actual else {}
    facts = TablesFacts(
        SERVER,
        tables,
        known,
        planned(rules, tables=tables, **source),
        actual,
        {oid: at for oid, at in names.items() if oid in published},
        [Partition("public", "users_1", identifies_rows=False)],
    )
    told = check_tables(configured(rules, **source), facts)
    return {each.check: each for each in told}


def test_the_doctor_tells_what_differs() -> None:
    assert findings(actual=state())["publication"].severity.value == "ok"
    missing = findings(actual=state(entries={}, published={}))["publication_tables"]
    assert (missing.severity.value, missing.fix) == ("warning", "cdc setup")
    assert "public.users" in findings(rule(where="id > 1"), state())["publication_differs"].what
    assert "publication_options" in findings(None, state(), partitions="leaf")
    extra = findings(actual=state(published={1: 500, 7: 501}))["publication_extra"]
    assert "public.extra" in extra.what
    by_hand = Entry(500, "public.users", ("id",), filtered=False)
    assert "by hand" in findings(actual=state(entries={1: by_hand}))["publication_filters"].what


def test_the_doctor_names_what_is_in_no_event() -> None:
    told = findings()["generated"]
    assert "public.users.label" in told.what
    split = findings(tables=[TABLE._replace(kind="p")])
    assert "one topic each" in split["partitions"].what
    assert "public.users_1" in split["partition_identity"].what
    passed = findings(tables=[TABLE, TABLE._replace(oid=3, name="v", kind="v")])
    assert "public.v (a view)" in passed["ignored"].what


def test_the_doctor_finds_topics_that_kafka_keeps_not_apart() -> None:
    tables = [
        TABLE._replace(oid=1, schema="a", name="b_c"),
        TABLE._replace(oid=2, schema="a_b", name="c"),
    ]
    assert "a.b_c, a_b.c" in findings(tables=tables)["topic_name"].what
    long = [TABLE._replace(name="x" * 63, schema="é" * 31)]
    assert "characters long" in findings(tables=long)["topic_name"].what
