"""What the publication must contain, and how it differs; what prevents it, and the fix."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import convert
from msgspec.structs import replace

from cdc.config import Config, Log, Source, TableRule, stores
from cdc.config.followers import Follower
from cdc.operate.doctor.tables import check_tables
from cdc.operate.facts import TablesFacts
from cdc.operate.findings import Finding
from cdc.publication.change import alterations, creation, difference
from cdc.publication.plan import Plan, plan
from cdc.source.publication_note import PublicationNote
from cdc.source.publications import Publication, PublicationEntry, PublishedTable
from cdc.source.tables import Partition, SourceTable, TableColumn
from lockstep.sinks.delta import layout
from lockstep.sinks.sql import tables
from tests.unit.test_control_doctor import SERVER, TABLE

OPERATIONS = frozenset({"insert", "update", "delete", "truncate"})
COLUMNS = [
    TableColumn("id", "", in_identity=True, in_primary_key=True, type_id=23),
    TableColumn("email", "", in_identity=False, in_primary_key=False, type_id=25),
    TableColumn("born", "", in_identity=False, in_primary_key=False, type_id=25),
    TableColumn("age", "s", in_identity=False, in_primary_key=False, type_id=25),
    TableColumn("label", "v", in_identity=False, in_primary_key=False, type_id=25),
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
    tables: list[SourceTable] | None = None,
    columns: list[TableColumn] = COLUMNS,
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
    major: int, table: SourceTable, source: dict[str, Any]
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
    ("column", "store", "refused"),
    [
        ("_seq", {"delta": {}}, True),
        ("_Exact", {"delta": {}}, True),
        ("EMAIL", {"delta": {}}, True),
        ("_deleted", {"delta": {}}, False),
        ("_deleted", {"delta": {"deletes": "soft"}}, True),
        ("_current", {"delta": {}}, False),
        ("_current", {"delta": {"history": ["public.users"]}}, True),
        ("_lockstep_seq", {"sql": {"url": "postgresql://x/y"}}, True),
        ("_LOCKSTEP_SEQ", {"sql": {"url": "postgresql://x/y"}}, False),
        ("_LOCKSTEP_SEQ", {"sql": {"url": "sqlite:////y"}}, True),
        ("_seq", {"sql": {"url": "postgresql://x/y"}}, False),
        ("_seq", {"redis": {"url": "redis://x"}}, False),
        ("_seq", {"delta": {}, "tables": ["public.orders"]}, False),
    ],
)
def test_a_column_that_a_store_has_for_itself_is_refused(
    column: str, store: dict[str, Any], *, refused: bool
) -> None:
    named = TableColumn(column, "", in_identity=False, in_primary_key=False, type_id=25)
    config = replace(configured(), followers={"copy": convert(store, Follower)})
    wanted = plan(config, SERVER, [TABLE], {TABLE.oid: [*COLUMNS, named]})
    assert [each.check for each in wanted.problems] == ["store_names"] * refused
    if refused:
        assert "followers.copy" in wanted.problems[0].what
        hidden = replace(config, tables=convert(rule(exclude=[column]), dict[str, TableRule]))
        assert not plan(hidden, SERVER, [TABLE], {TABLE.oid: [*COLUMNS, named]}).problems


def test_the_table_of_a_sql_stores_frontiers_is_refused_and_the_names_are_the_sinks() -> None:
    follower = convert({"sql": {"url": "postgresql://x/y"}}, Follower)
    config = replace(configured(), followers={"copy": follower})
    frontiers = TABLE._replace(name=stores.SQL_FRONTIERS)
    wanted = plan(config, SERVER, [frontiers], {TABLE.oid: COLUMNS})
    assert [each.check for each in wanted.problems] == ["store_names"]
    assert stores.own_columns(follower, "public.users") == (tables.SEQ,)
    for given in ({}, {"history": ["public.users"]}, {"deletes": "soft"}):
        mirrored = convert({"delta": given}, Follower)
        ours = layout.ours(history="history" in given, soft="deletes" in given)
        assert stores.own_columns(mirrored, "public.users") == tuple(ours)


@pytest.mark.parametrize(
    ("rules", "source", "major", "superuser", "why"),
    [
        ({}, {}, 14, True, "has no TABLES IN SCHEMA"),
        ({}, {}, 17, False, "is no superuser"),
        (rule(exclude=["born"]), {}, 17, True, "takes no column list"),
        (rule(where="id > 1"), {}, 17, True, "row filters do not count"),
        ({}, {"exclude": ["public.x*"]}, 17, True, "source.exclude leaves tables out"),
    ],
)
def test_a_schema_that_cannot_be_published_completely_says_why(
    rules: dict[str, Any], source: dict[str, Any], major: int, *, superuser: bool, why: str
) -> None:
    wanted = planned(rules, major=major, superuser=superuser, new_tables="publish", **source)
    assert why in wanted.refused_schemas["public"]
    assert not wanted.schemas
    assert planned(new_tables="publish").schemas == {"public"}
    assert not planned(new_tables="publish", tables=None, exclude=["other.x"]).refused_schemas


# --- what differs ---


def entry(columns: tuple[str, ...] | None = None, where: str | None = None) -> PublicationEntry:
    attnums = None if columns is None else tuple(range(1, len(columns) + 1))
    return PublicationEntry(500, "public", "users", "public.users", columns, attnums, where)


def published(*tables: int, membership: int = 500) -> dict[int, PublishedTable]:
    names = {1: "users", 7: "extra"}
    return {
        oid: PublishedTable("public", names[oid], f"public.{names[oid]}", membership)
        for oid in tables
    }


def publication(**changes: object) -> Publication:
    found = Publication(
        name="p",
        oid=99,
        owner="me",
        operations=OPERATIONS,
        via_root=True,
        generated="none",
        all_tables=False,
        version=700,
        note=PublicationNote({}, {}),
        entries={1: entry()},
        schemas={},
        published=published(1),
    )
    return found._replace(**changes)  # type: ignore[arg-type] # any field's


def statements(wanted: Plan, actual: Publication) -> list[str]:
    change = difference(wanted, actual, configured().selection)
    return [each.as_string() for each in alterations("p", change)]


def test_a_publication_that_is_as_configured_is_left() -> None:
    assert not difference(planned(), publication(), configured().selection)
    actual = publication(
        entries={1: entry(("email", "id", "born"), "(id > 1)")},
        note=PublicationNote({}, {500: "id > 1"}),
    )
    wanted = planned(rule(columns=["id", "email", "born"], where="id > 1", exclude=[]))
    assert not difference(wanted, actual, configured().selection)


def test_the_statements_make_the_publication() -> None:
    assert creation("p", planned(rule(where="id > 1", exclude=["born"]))).as_string() == (
        'CREATE PUBLICATION "p" FOR TABLE ONLY "public"."users" ("id", "email") WHERE (id > 1)'
        " WITH (publish = 'insert, update, delete, truncate', publish_via_partition_root = 'true')"
    )
    assert creation("p", planned(new_tables="publish", major=18)).as_string() == (
        'CREATE PUBLICATION "p" FOR TABLES IN SCHEMA "public"'
        " WITH (publish = 'insert, update, delete, truncate', publish_via_partition_root = 'true',"
        " publish_generated_columns = 'stored')"
    )
    assert statements(planned(rule(where="id > 1")), publication()) == [
        'ALTER PUBLICATION "p" DROP TABLE ONLY "public"."users"',
        'ALTER PUBLICATION "p" ADD TABLE ONLY "public"."users" WHERE (id > 1)',
    ]
    other = TABLE._replace(oid=2, name="orders")
    assert statements(planned(tables=[TABLE, other]), publication()) == [
        'ALTER PUBLICATION "p" ADD TABLE ONLY "public"."orders"'
    ]


def test_a_published_schema_is_removed_before_a_column_list_is_added() -> None:
    actual = publication(entries={}, schemas={"public": 7}, published=published(1, membership=0))
    assert statements(planned(rule(exclude=["born"])), actual) == [
        'ALTER PUBLICATION "p" DROP TABLES IN SCHEMA "public"',
        'ALTER PUBLICATION "p" ADD TABLE ONLY "public"."users" ("id", "email")',
    ]
    foreign = actual._replace(schemas={"public": 7, "theirs": 8})
    assert "theirs" not in str(statements(planned(), foreign))


def test_options_that_differ_are_set() -> None:
    (statement,) = statements(planned(partitions="leaf", major=18), publication())
    assert statement == (
        "ALTER PUBLICATION \"p\" SET (publish_via_partition_root = 'false',"
        " publish_generated_columns = 'stored')"
    )


# --- the doctor's findings ---


def findings(
    rules: dict[str, Any] | None = None,
    actual: Publication | None = None,
    tables: list[SourceTable] | None = None,
    **source: Any,  # noqa: ANN401 - fields
) -> dict[str, Finding]:
    tables = tables or [TABLE]
    known = {table.oid: COLUMNS for table in tables}
    facts = TablesFacts(
        SERVER,
        tables,
        known,
        planned(rules, tables=tables, **source),
        actual,
        [Partition(7, "public", "users_1", identifies_rows=False)],
    )
    reported = check_tables(configured(rules, **source), facts)
    return {each.check: each for each in reported}


def test_the_doctor_shows_what_differs() -> None:
    assert findings(actual=publication())["publication"].severity.value == "ok"
    missing = findings(actual=publication(entries={}, published={}))["publication_tables"]
    assert (missing.severity.value, missing.fix) == ("warning", "cdc setup")
    assert (
        "public.users" in findings(rule(where="id > 1"), publication())["publication_differs"].what
    )
    assert "publication_options" in findings(None, publication(), partitions="leaf")
    more = publication(published=published(1, 7))
    extra = findings(actual=more)["publication_extra"]
    assert "public.extra" in extra.what
    by_hand = entry(("id",))
    assert (
        "by hand" in findings(actual=publication(entries={1: by_hand}))["publication_filters"].what
    )


def test_the_doctor_names_what_is_in_no_event() -> None:
    reported = findings()["generated"]
    assert "public.users.label" in reported.what
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
