"""What a changed publication has lost: each gap by name, with its tables and the fix."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from cdc.errors import GapError
from cdc.log import records
from cdc.log.records import OPERATIONS, PinnedPublication, PublicationOptions
from cdc.publication.diff import Gap, continue_with, gaps, split_name

SENDS = PublicationOptions(700, "postgres", OPERATIONS, via_root=True)
KNOWN = PinnedPublication("shop", 1, {"public.orders": 501, "public.users": 502}, options=SENDS)
BY_SCHEMA = replace(
    KNOWN,
    tables={'"My""shop".t': 0, "public.users": 0, "other.x": 0},
    options=replace(SENDS, schemas={"public": 31, 'My"shop': 32, "other": 33}),
)


def found(new: PinnedPublication, old: PinnedPublication = KNOWN) -> list[Gap]:
    return gaps(old, new, frozenset(old.tables))


def sending(**changes: object) -> PinnedPublication:
    """Return the publication in a newer version of its row, with these changes."""
    return replace(KNOWN, options=replace(SENDS, **{"version": 701, **changes}))


def test_the_same_publication_has_no_gap() -> None:
    assert not found(KNOWN)
    assert not found(BY_SCHEMA, BY_SCHEMA)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, "was altered and set back"),
        (
            {"operations": ("insert",)},
            "it publishes insert, before insert, update, delete, truncate",
        ),
        ({"operations": ()}, "it publishes nothing, before"),
        ({"via_root": False}, "publish_via_partition_root is false, before true"),
        ({"generated": "stored"}, "publish_generated_columns is stored, before none"),
        ({"all_tables": True}, "FOR ALL TABLES is true, before false"),
        ({"owner": "anna"}, "its owner is anna, before postgres"),
    ],
)
def test_another_version_is_a_gap_of_every_table(changes: dict[str, object], what: str) -> None:
    (gap,) = found(sending(**changes))
    assert what in gap.what
    assert gap.tables == ("public.orders", "public.users")
    assert "cdc publication acknowledge" in gap.hint
    assert ("--no-snapshot" in gap.hint) is (not changes or "owner" in changes)
    assert ("ALTER PUBLICATION" in gap.hint) is ("operations" in changes)


def test_options_under_a_version_that_continues_the_known_one_are_our_own() -> None:
    assert not found(sending(version=700, via_root=False, generated="stored"))


def test_a_log_that_pinned_less_is_continued_while_everything_is_published() -> None:
    old = replace(KNOWN, options=None)
    assert not found(sending(), old)
    (gap,) = found(sending(operations=("insert", "update", "delete")), old)
    assert "does not publish truncate" in gap.what


def test_a_schema_that_came_back_is_a_gap_of_its_tables() -> None:
    sends = replace(SENDS, schemas={"public": 31, 'My"shop': 41, "other": 33})
    back = replace(BY_SCHEMA, options=sends)
    (gap,) = found(back, BY_SCHEMA)
    assert gap.tables == ('"My""shop".t',)
    assert "came back" in gap.what
    assert not found(replace(back, removed=(32,)), BY_SCHEMA)  # removed by our own command


def test_a_renamed_schema_keeps_its_membership() -> None:
    sends = replace(SENDS, schemas={"renamed": 31, 'My"shop': 32, "other": 33})
    tables = {'"My""shop".t': 0, "renamed.users": 0, "other.x": 0}
    new = replace(BY_SCHEMA, tables=tables, options=sends)
    assert not gaps(BY_SCHEMA, new, frozenset({'"My""shop".t', "other.x"}))


def test_what_a_table_sends_is_named_where_it_came_back() -> None:
    new = replace(
        KNOWN,
        tables={"public.orders": 501, "public.users": 900},
        narrowed={"public.users": ((1, 3), "#a1")},
    )
    (gap,) = found(new)
    sent = "public.users sends columns 1, 3 of the rows of its row filter, before every column"
    assert gap.what.endswith(sent)
    assert gap.tables == ("public.users",)


@pytest.mark.parametrize(
    ("before", "now", "is_reported"),
    [
        ("#a1", "#a1", False),
        ("#a1", "#b2", True),
        ("#a1", None, True),
        # A record of an older version has the text: whether the filter differs is not known.
        ("(id > 5)", "#b2", False),
        ("(id > 5)", None, True),
    ],
)
def test_a_row_filter_is_compared_by_its_hash(
    before: str, now: str | None, *, is_reported: bool
) -> None:
    old = replace(KNOWN, narrowed={"public.users": (None, before)})
    new = replace(
        KNOWN,
        tables={"public.orders": 501, "public.users": 900},
        narrowed={"public.users": (None, now)} if now else {},
    )
    (gap,) = gaps(old, new, frozenset())
    assert ("row filter" in gap.what) is is_reported


def test_every_gap_is_named_at_once() -> None:
    new = replace(sending(operations=("insert",)), tables={"public.orders": 777})
    with pytest.raises(GapError) as raised:
        continue_with(KNOWN, new, frozenset(KNOWN.tables), "after 0/5000")
    for words in ("was altered", "public.orders left", "no longer has public.users", "0/5000"):
        assert words in raised.value.what


def test_a_dropped_table_stays_known_until_its_name_is_another_tables() -> None:
    users = replace(KNOWN, tables={"public.users": 502})
    there = frozenset({"public.users"})
    after = continue_with(KNOWN, users, there)
    assert after.tables == KNOWN.tables
    assert continue_with(after, users, there) == after
    with pytest.raises(GapError, match=r"no longer has public\.orders"):
        continue_with(after, users, frozenset(KNOWN.tables))
    # A renamed table continues under its other name; one removed on purpose is not missed.
    renamed = replace(KNOWN, tables={"public.old_orders": 501, "public.users": 502})
    assert continue_with(KNOWN, renamed, frozenset(renamed.tables)) == renamed
    assert continue_with(KNOWN, replace(users, removed=(501,)), there).tables == users.tables
    # A partition is added and removed with its root, and a table of a published schema with that.
    parted = replace(KNOWN, tables={"public.a": 0, "public.users": 502})
    assert continue_with(parted, users, there).tables == users.tables


def test_thousands_of_tables_make_no_endless_sentence() -> None:
    many = {f"public.t{number:04}": number for number in range(1, 5_000)}
    old = replace(KNOWN, tables=many)
    (gap,) = found(replace(old, options=replace(SENDS, version=701)), old)
    assert len(gap.tables) == len(many)
    assert "and 4991 more" in gap.hint
    assert len(gap.hint) < 1_000


@pytest.mark.parametrize(
    ("table", "schema", "name"),
    [
        ("public.users", "public", "users"),
        ('"A.b".c', "A.b", "c"),
        ('"A""b"."C.d"', 'A"b', "C.d"),
        ('a."B"', "a", "B"),
    ],
)
def test_a_quoted_name_has_its_parts(table: str, schema: str, name: str) -> None:
    assert split_name(table) == (schema, name)


def test_the_record_keeps_what_is_pinned_and_reads_one_that_has_none() -> None:
    identity = records.ResumeIdentity(
        pipeline="shop",
        epoch=1,
        system_identifier="1",
        timeline=1,
        database="shop",
        slot="s",
        publication=replace(BY_SCHEMA, narrowed={"public.users": ((1,), None)}),
        partitions={},
    )
    value = records.encode(identity)
    assert records.decode(records.ResumeIdentity, value, "t") == identity
    old = value.replace(b'"sends"', b'"unknown"').replace(b'"narrowed"', b'"unheard"')
    assert records.decode(records.ResumeIdentity, old, "t").publication.options is None


OIDS = replace(KNOWN, relations={"public.orders": 11, "public.users": 12})


def test_a_renamed_table_that_leaves_is_missing() -> None:
    """It has neither its name nor its membership any more: only its oid shows it."""
    left = replace(OIDS, tables={"public.orders": 501}, relations={"public.orders": 11})
    (gap,) = gaps(OIDS, left, frozenset(OIDS.tables))
    assert gap.tables == ("public.users",)
    assert gap.is_removal
    assert not gaps(OIDS, left, frozenset({"public.orders"})), "it was dropped"


def test_a_renamed_table_that_left_and_came_back_is_a_gap_under_its_new_name() -> None:
    back = replace(
        OIDS,
        tables={"public.orders": 501, "public.people": 600},
        relations={"public.orders": 11, "public.people": 12},
    )
    (gap,) = gaps(OIDS, back, frozenset(OIDS.tables))
    assert gap.tables == ("public.people",)
    assert "came back" in gap.what
    assert not gaps(OIDS, replace(back, removed=(502,)), frozenset(OIDS.tables))


def test_tables_that_take_each_others_names_have_lost_nothing() -> None:
    swapped = replace(
        OIDS,
        tables={"public.orders": 502, "public.users": 501},
        relations={"public.orders": 12, "public.users": 11},
    )
    assert not gaps(OIDS, swapped, frozenset(OIDS.tables))
    assert continue_with(OIDS, swapped, frozenset(OIDS.tables)) == swapped


def test_another_table_in_the_place_of_a_dropped_one_is_a_gap() -> None:
    made = replace(
        OIDS,
        tables={"public.orders": 501, "public.users": 600},
        relations={"public.orders": 11, "public.users": 13},
    )
    (gap,) = gaps(OIDS, made, frozenset(OIDS.tables))
    assert gap.tables == ("public.users",)
