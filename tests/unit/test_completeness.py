"""A topic that a rename or another table has left incomplete is found until it is replaced."""

from __future__ import annotations

import pytest

from cdc.events import LSN
from cdc.log import records
from cdc.log.completeness import Completeness, EmptiedTopic, IncompleteTopic, Name
from cdc.log.records import Replacement, SchemaRecord

T, U = ("public", "t"), ("public", "u")


def versions(*tables: str, key: tuple[str, ...] = ("id",)) -> list[SchemaRecord]:
    """Return a version of each `relation name`, with its place in the list as id and LSN."""
    return [
        SchemaRecord(
            schema_id=number,
            relation_id=int(each.split()[0]),
            schema="public",
            table=each.split()[1],
            topic=f"shop.public.{each.split()[1]}",
            replica_identity="d",
            from_lsn=LSN(number),
            key=key,
            columns=(),
        )
        for number, each in enumerate(tables, 1)
    ]


def replacement(name: Name, schema_id: int) -> Replacement:
    schema, table = name
    return Replacement(
        pipeline="p", schema=schema, table=table, schema_id=schema_id, snapshot="a1", at_us=1
    )


def found(
    tables: list[str], *replaced: Replacement, captured: set[Name] | None = None
) -> dict[str, int]:
    """Return since when which captured topics are incomplete."""
    names = {("public", each.split()[1]) for each in tables} if captured is None else captured
    completeness = Completeness(versions(*tables), replaced)
    return {each.name: int(each.since_lsn) for each in completeness.incomplete(names)}


@pytest.mark.parametrize(
    ("tables", "incomplete"),
    [
        ([], {}),
        (["1 t", "2 u"], {}),
        (["1 t", "1 t", "2 u", "1 t"], {}),  # altered
        (["1 t", "1 u"], {"public.t": 2, "public.u": 2}),
        (["1 t", "1 u", "1 t"], {"public.t": 2, "public.u": 2}),  # there and back
        (["1 t", "2 t"], {"public.t": 2}),  # dropped and created again
        (["1 t", "2 u", "2 t", "1 u"], {"public.t": 3, "public.u": 3}),  # swapped
        (["1 t", "2 t", "1 t"], {"public.t": 2}),  # swapped, and back again
    ],
)
def test_each_way_to_leave_a_topic_incomplete(
    tables: list[str], incomplete: dict[str, int]
) -> None:
    assert found(tables) == incomplete


def test_a_replacement_covers_what_was_before_it_and_nothing_else() -> None:
    there_and_back = ["1 t", "1 u", "1 t"]
    assert found(there_and_back, replacement(T, 3)) == {"public.u": 2}
    assert found(there_and_back, replacement(T, 3), replacement(U, 2)) == {"public.u": 3}
    # A snapshot that began before the table was renamed.
    assert found(there_and_back, replacement(T, 1)) == {"public.t": 2, "public.u": 2}
    again = [*there_and_back, "1 u", "1 t"]
    assert found(again, replacement(T, 3), replacement(U, 5)) == {"public.t": 4}
    assert found(["1 t"], replacement(T, 1), replacement(U, 7)) == {}


def test_a_name_that_no_captured_table_has_is_reported_with_another_remedy() -> None:
    completeness = Completeness(versions("1 t", "1 u", "1 t"))
    [t, u] = completeness.incomplete({T})
    assert (t.captured, t.remedy) == (True, "cdc snapshot public.t --replace")
    assert t.what == (
        "the topic of public.t is incomplete since LSN 0/2: its table was renamed to public.u,"
        " whose topic has what changed then"
    )
    assert not u.captured
    assert u.remedy.startswith("`cdc table add public.u` if there is such a table; otherwise")
    assert t.fields()["since_lsn"] == "0/2"
    # Without the catalog the newest name of each table counts.
    assert completeness.incomplete(None) == [t, u]


def test_a_table_without_a_key_needs_one_first() -> None:
    [t] = Completeness(versions("1 t", "2 t", key=())).incomplete({T})
    assert t.remedy == (
        'give it a primary key, or set tables."public.t".key; then `cdc snapshot public.t'
        " --replace`"
    )


def test_a_version_is_reported_when_it_is_added() -> None:
    completeness = Completeness()
    added: list[IncompleteTopic | None] = [
        completeness.add(each) for each in versions("1 t", "1 t", "1 u", "1 t")
    ]
    assert [each and each.name for each in added] == [None, None, "public.u", "public.t"]


def test_a_replacement_is_read_as_it_was_written() -> None:
    record = replacement(T, 3)
    assert records.decode(Replacement, records.encode(record), "topic") == record


def test_a_topic_that_was_emptied_is_incomplete_until_it_is_replaced() -> None:
    completeness = Completeness(versions("1 t", "2 u"), [replacement(T, 1)])
    for name in T, ("public", "unknown"):
        completeness.empty(EmptiedTopic(name, 1, LSN(7), "a1"))
    [topic] = completeness.incomplete(None)
    assert (topic.name, topic.since_lsn, topic.remedy) == (
        ("public.t", LSN(7), "cdc snapshot public.t --replace")
    )
    assert "the snapshot a1 has emptied it" in topic.why
    completeness.replace(replacement(T, 1))
    assert completeness.incomplete(None) == []
