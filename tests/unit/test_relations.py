"""Relation messages and what the catalog adds make table versions, each once."""

from __future__ import annotations

import pytest
from msgspec import convert
from msgspec.structs import replace

from cdc.config import Mask
from cdc.config.patterns import parse_name
from cdc.config.selection import ALL, TableSelection
from cdc.decode.messages import Relation, RelationColumn, ReplicaIdentity
from cdc.encode.alterations import stale
from cdc.errors import ConfigError
from cdc.events import LSN
from cdc.log.records import ColumnNumbers, NumberedColumn, SchemaRecord
from cdc.sequence.relation_request import RelationRequest
from cdc.sequence.relations import Relations
from cdc.source.lookups import SentTable, StoredColumns, TableFacts

DEFAULT, FULL = ReplicaIdentity.DEFAULT, ReplicaIdentity.FULL
INDEX, NOTHING = ReplicaIdentity.INDEX, ReplicaIdentity.NOTHING


def relation(
    identity: ReplicaIdentity = DEFAULT, marked: str = "a", columns: str = "abc", table: str = "t"
) -> Relation:
    """Return a relation whose columns are letters; those in `marked` are its replica identity."""
    named = tuple(RelationColumn(name in marked, name, 23, -1) for name in columns)
    return Relation(16402, "public", table, identity, named)


def facts(*primary_key: str) -> TableFacts:
    return TableFacts(primary_key, {"a": False, "b": True})


class Versions:
    """A pipeline's table versions, requested as the daemon requests them."""

    def __init__(self, known: list[SchemaRecord] | None = None, schema_id: int = 0) -> None:
        self.relations = Relations("shop", known or [], schema_id)

    def of(
        self,
        reported: Relation,
        catalog: TableFacts,
        *,
        types: dict[int, str] | None = None,
        replaying: bool = False,
        today: str | None = None,
        where: str | None = None,
        selection: TableSelection = ALL,
    ) -> tuple[SchemaRecord, bool]:
        """Return the version; `today` are the catalog's current columns."""
        columns = tuple(c.name for c in reported.columns) if today is None else tuple(today)
        published = SentTable(tuple((name, 23, -1) for name in columns), where)
        request = RelationRequest(reported, catalog, types or {}, LSN(0x100), published, selection)
        return self.relations.version(request, replaying=replaying)


def test_a_version_combines_the_streams_and_the_catalogs_description() -> None:
    version, new = Versions().of(relation(), facts("a"))
    assert new
    assert (version.schema_id, version.relation_id) == (1, 16402)
    assert (version.schema, version.table, version.topic) == ("public", "t", "shop.public.t")
    assert (version.replica_identity, version.key, version.from_lsn) == ("d", ("a",), LSN(0x100))
    assert [(c.name, c.type_id, c.type, c.type_modifier) for c in version.columns] == [
        (name, 23, "int4", -1) for name in "abc"
    ]
    assert [c.nullable for c in version.columns] == [False, True, None]


def test_the_same_description_is_the_same_version() -> None:
    versions = Versions()
    first, _ = versions.of(relation(), facts("a"))
    assert versions.of(relation(), facts("a")) == (first, False)
    # The catalog's current nullability makes no new version.
    assert versions.of(relation(), TableFacts(("a",), {})) == (first, False)
    assert versions.relations.schema_id == 1


def test_each_change_of_the_description_is_a_new_version() -> None:
    versions = Versions()
    reported = relation()
    columns = reported.columns
    for number, changed in enumerate(
        [
            reported,
            relation(columns="abcd"),
            relation(columns="ab"),
            relation(columns="acb"),
            relation(marked="ab"),
            relation(FULL, "abc"),
            relation(table="renamed"),
            replace(reported, namespace="other"),
            replace(reported, columns=(columns[0], columns[1], replace(columns[2], type_id=20))),
            replace(
                reported, columns=(columns[0], columns[1], replace(columns[2], type_modifier=9))
            ),
        ],
        1,
    ):
        marked = tuple(column.name for column in changed.columns if column.key)
        version, new = versions.of(changed, facts(*marked))
        assert (version.schema_id, new) == (number, True)


def test_a_column_has_the_collation_that_the_catalog_shows() -> None:
    versions = Versions()

    def seen(collations: dict[str, str], *, replaying: bool = False) -> tuple[object, bool]:
        catalog = TableFacts(("a",), {}, collations=collations)
        version, new = versions.of(relation(), catalog, replaying=replaying)
        return [each.collation for each in version.columns], new

    assert seen({"b": "C"}) == ([None, "C", None], True)
    assert seen({"b": "C"}) == ([None, "C", None], False)
    # Unknown: the catalog was not asked, or did not show the relation's transaction.
    assert seen({}) == ([None, "C", None], False)
    assert seen({"b": "linguistic"}, replaying=True) == ([None, "C", None], False)
    assert seen({"b": "linguistic"}) == ([None, "linguistic", None], True)
    assert seen({"b": "nondeterministic"}) == ([None, "nondeterministic", None], True)
    assert versions.relations.take_alteration() is None


def test_a_version_of_a_log_without_collations_stays_unless_equal_texts_differ() -> None:
    versions = Versions()
    versions.of(relation(), TableFacts(("a",), {}))
    for collation, is_new in (("C", False), ("linguistic", False), ("nondeterministic", True)):
        catalog = TableFacts(("a",), {}, collations={"b": collation})
        assert versions.of(relation(), catalog)[1] is is_new, collation


def test_the_collation_of_a_column_that_the_catalog_has_no_longer_is_not_known() -> None:
    catalog = TableFacts(("a",), {}, collations={"b": "C"})
    version, _ = Versions().of(relation(), catalog, today="ac")
    assert [each.collation for each in version.columns] == [None, None, None]


def test_a_description_that_comes_back_is_a_new_version() -> None:
    """`from_lsn` is where a record starts to hold, so the old one is not valid for the new time."""
    versions = Versions()
    for columns in ("abc", "abcd", "abc"):
        version, new = versions.of(relation(columns=columns), facts("a"))
        assert new
    assert version.schema_id == 3


def test_versions_of_other_relations_do_not_count() -> None:
    versions = Versions()
    versions.of(relation(), facts("a"))
    other = replace(relation(table="u"), relation_id=16999)
    assert versions.of(other, facts("a"))[1]
    assert not versions.of(relation(), facts("a"))[1]


def test_types_that_are_not_built_in_have_the_name_that_the_stream_sent() -> None:
    reported = relation()
    columns = (
        replace(reported.columns[0], type_id=90001),
        replace(reported.columns[1], type_id=90002),
    )
    version, _ = Versions().of(
        replace(reported, columns=columns), facts("a"), types={90001: "public.mood"}
    )
    assert [c.type for c in version.columns] == ["public.mood", "unknown"]


def key(reported: Relation, *primary_key: str) -> tuple[str, ...]:
    return Versions().of(reported, facts(*primary_key))[0].key


def test_the_key_is_in_the_primary_keys_order() -> None:
    assert key(relation(DEFAULT, "abc"), "c", "a", "b") == ("c", "a", "b")
    assert key(relation(FULL, "abc"), "c", "a") == ("c", "a")


def test_a_catalog_that_is_younger_than_the_stream_does_not_make_the_key() -> None:
    assert key(relation(DEFAULT, "ab"), "c") == ("a", "b")
    assert key(relation(DEFAULT, "ab")) == ("a", "b")
    assert key(relation(FULL, "abc"), "gone") == ()


def test_the_identity_index_is_the_key_even_with_a_primary_key() -> None:
    assert key(relation(INDEX, "bc"), "a") == ("b", "c")


def test_full_and_nothing_take_the_primary_key_or_none() -> None:
    assert key(relation(FULL, "abc"), "b") == ("b",)
    assert key(relation(FULL, "abc")) == ()
    assert key(relation(NOTHING, ""), "b") == ("b",)
    assert key(relation(NOTHING, "")) == ()


def test_default_without_a_primary_key_has_no_key() -> None:
    assert key(relation(DEFAULT, "")) == ()


def test_a_changed_key_under_full_is_a_new_version() -> None:
    versions = Versions()
    versions.of(relation(FULL, "abc"), facts("a"))
    version, new = versions.of(relation(FULL, "abc"), facts("b"))
    assert (version.key, new) == (("b",), True)


def restarted(versions: Versions, known: list[SchemaRecord]) -> Versions:
    return Versions(known, versions.relations.schema_id)


def test_a_restart_knows_the_versions_that_the_log_holds() -> None:
    before = Versions()
    known = [before.of(relation(columns=columns), facts("a"))[0] for columns in ("abc", "abcd")]
    after = restarted(before, known)
    assert after.of(relation(columns="abcd"), facts("a")) == (known[1], False)
    version, new = after.of(relation(columns="ab"), facts("a"))
    assert (version.schema_id, new) == (3, True)


def test_a_replay_finds_the_older_version_it_walks_through() -> None:
    before = Versions()
    known = [before.of(relation(columns=columns), facts("a"))[0] for columns in ("abc", "abcd")]
    after = restarted(before, known)
    assert after.of(relation(columns="abc"), facts("a"), replaying=True) == (known[0], False)
    assert after.of(relation(columns="abcd"), facts("a"), replaying=True) == (known[1], False)
    assert after.relations.schema_id == 2


def test_a_replay_keeps_the_key_of_that_time_whatever_the_catalog_says_today() -> None:
    """The description is used for the transactions after the replay: its key must not change."""
    for reported, then, today in [
        (relation(FULL, "abc"), ("a",), ("b",)),
        (relation(FULL, "abc"), ("a",), ()),
        (relation(NOTHING, ""), ("a",), ("b",)),
        (relation(DEFAULT, "ab"), ("b", "a"), ("a", "b")),
        (relation(DEFAULT, "ab"), ("b", "a"), ("c",)),
    ]:
        before = Versions()
        version, _ = before.of(reported, facts(*then))
        after = restarted(before, [version])
        assert after.of(reported, facts(*today), replaying=True) == (version, False)


def test_a_key_made_of_other_columns_is_another_version_also_in_a_replay() -> None:
    before = Versions()
    known = [before.of(relation(marked=marked), facts(*marked))[0] for marked in ("a", "ab")]
    after = restarted(before, known)
    assert after.of(relation(marked="a"), facts("a", "b"), replaying=True) == (known[0], False)
    assert after.of(relation(marked="ab"), facts("a", "b"), replaying=True) == (known[1], False)


def test_a_version_that_the_log_does_not_hold_is_recorded_also_in_a_replay() -> None:
    """Its rows may be published once the replay is over: they need their own record."""
    versions = Versions()
    version, new = versions.of(relation(), facts("a"), replaying=True)
    assert new
    assert versions.of(relation(), facts("a")) == (version, False)
    other, _ = versions.of(relation(columns="ab"), facts("a"))
    assert other.schema_id == version.schema_id + 1


# --- the key, seen by a reader that lags ---


def test_a_lagging_reader_takes_the_key_of_the_version_with_these_columns() -> None:
    versions = Versions()
    versions.of(relation(FULL, "abc"), facts("a"))
    # Since then the table got a column d and the primary key became b: the catalog is newer.
    version, _ = versions.of(relation(FULL, "abc", table="u"), facts("b"), today="abcd")
    assert version.key == ("a",)
    # Once caught up, the catalog describes what the stream does: its key is used.
    version, _ = versions.of(relation(FULL, "abcd", "abcd"), facts("b"))
    assert version.key == ("b",)


def test_a_lagging_reader_keeps_the_last_key_while_its_columns_exist() -> None:
    versions = Versions()
    versions.of(relation(NOTHING, ""), facts("a"))
    version, _ = versions.of(relation(NOTHING, "", "abcd"), facts("b"), today="abcde")
    assert version.key == ("a",)
    version, _ = versions.of(relation(NOTHING, "", "bcd"), facts("b"), today="abcde")
    assert version.key == ("b",)


def test_a_table_that_was_never_described_has_todays_key_or_none() -> None:
    assert Versions().of(relation(FULL, "abc"), facts("b"), today="abcd")[0].key == ("b",)
    assert Versions().of(relation(FULL, "abc"), facts("d"), today="abcd")[0].key == ()


def test_the_keys_order_is_kept_where_the_catalog_has_moved_on() -> None:
    versions = Versions()
    versions.of(relation(DEFAULT, "ab"), facts("b", "a"))
    version, _ = versions.of(relation(DEFAULT, "ab", "abcd"), facts("c"), today="abcd")
    assert version.key == ("b", "a")


# --- what the configuration sets ---


def masks(**kinds: str) -> TableSelection:
    key = "k" * 16
    given = [
        (column, convert({"kind": kind, "value": key}, Mask)) for column, kind in kinds.items()
    ]
    return selecting(
        masks=tuple((parse_name(column), mask) for column, mask in given),
        hidden=frozenset(column for column, mask in given if mask.kind != "keep"),
    )


def selecting(**fields: object) -> TableSelection:
    return ALL._replace(**fields)  # type: ignore[arg-type] # any field's


def test_a_custom_key_keeps_its_order_and_needs_an_identity_that_holds_it() -> None:
    chosen = selecting(key=("c", "a"))
    assert Versions().of(relation(FULL, "abc"), facts("a"), selection=chosen)[0].key == ("c", "a")
    assert Versions().of(relation(INDEX, "abc"), facts("a"), selection=chosen)[0].key == ("c", "a")
    # Postgres refuses updates and deletes there, and an insert has every column.
    assert Versions().of(relation(NOTHING, ""), facts(), selection=chosen)[0].key == ("c", "a")
    with pytest.raises(ConfigError, match="has c, which Postgres does not send") as caught:
        Versions().of(relation(DEFAULT, "a"), facts("a"), selection=chosen)
    assert "REPLICA IDENTITY FULL" in caught.value.hint
    with pytest.raises(ConfigError, match="the table has no column c"):
        Versions().of(relation(FULL, "ab", "ab"), facts("a"), selection=chosen)


def test_another_order_of_a_custom_key_is_another_version() -> None:
    versions = Versions()
    for key in (("a", "c"), ("c", "a")):
        _, new = versions.of(relation(FULL, "abc"), facts("a"), selection=selecting(key=key))
        assert new
    assert not versions.of(relation(FULL, "abc"), facts("a"), selection=selecting(key=key))[1]


def test_a_version_names_the_masked_columns_and_a_changed_mask_is_a_version() -> None:
    versions = Versions()
    version, _ = versions.of(relation(), facts("a"), selection=masks(b="null"))
    assert [c.mask for c in version.columns] == [None, "null", None]
    version, new = versions.of(relation(), facts("a"), selection=masks(b="hmac"))
    assert new
    label = version.columns[1].mask
    assert label is not None
    assert label.startswith("hmac:")
    assert "k" * 16 not in label
    assert not versions.of(relation(), facts("a"), selection=masks(b="hmac"))[1]


def test_a_column_that_is_left_out_and_still_sent_is_excluded() -> None:
    chosen = selecting(excluded=(parse_name("c"),))
    version, _ = Versions().of(relation(), facts("a"), selection=chosen)
    assert [c.mask for c in version.columns] == [None, None, "excluded"]


@pytest.mark.parametrize("kind", ["null", "fixed", "truncate"])
def test_a_key_that_would_make_rows_alike_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="a is in the key of"):
        Versions().of(relation(), facts("a"), selection=masks(a=kind))
    assert Versions().of(relation(), facts("a"), selection=masks(a="hmac"))[0].key == ("a",)


def test_an_excluded_key_is_refused() -> None:
    chosen = selecting(included=(parse_name("b"),))
    with pytest.raises(ConfigError, match="excluded would make rows alike"):
        Versions().of(relation(FULL, "abc"), facts("a"), selection=chosen)


def test_a_changed_row_filter_is_a_version_but_not_in_a_replay() -> None:
    versions = Versions()
    first, _ = versions.of(relation(), facts("a"), where="(b > 1)")
    assert first.where == "(b > 1)"
    assert versions.of(relation(), facts("a"), where="(b > 2)", replaying=True) == (first, False)
    assert versions.of(relation(), facts("a"), where="(b > 2)")[1]


# --- what was hidden stays hidden ---


def test_a_masked_column_that_is_renamed_is_not_shown() -> None:
    versions = Versions()
    versions.of(relation(), facts("a"), selection=masks(b="null"))
    with pytest.raises(
        ConfigError, match="hid b so far, but that column is missing, and x is new"
    ) as caught:
        versions.of(relation(columns="axc"), facts("a"), selection=masks(b="null"))
    assert "keep" in caught.value.hint
    # The new name is masked too, or declared as clear: the version is accepted.
    assert versions.of(relation(columns="axc"), facts("a"), selection=masks(b="null", x="null"))[1]
    assert versions.of(relation(columns="ayc"), facts("a"), selection=masks(b="null", y="keep"))[1]


def test_a_masked_column_may_be_dropped_and_others_may_come() -> None:
    versions = Versions()
    versions.of(relation(), facts("a"), selection=masks(b="null"))
    assert versions.of(relation(columns="abcd"), facts("a"), selection=masks(b="null"))[1]
    assert versions.of(relation(columns="acd"), facts("a"), selection=masks(b="null"))[1]


def test_a_table_renamed_away_from_its_section_is_not_shown() -> None:
    versions = Versions()
    versions.of(relation(), facts("a"), selection=masks(b="null"))
    with pytest.raises(ConfigError, match="hid b so far"):
        versions.of(relation(table="renamed"), facts("a"))
    assert versions.of(relation(table="renamed"), facts("a"), selection=masks(b="keep"))[1]


def test_a_mask_of_a_column_that_a_new_table_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="hid x so far, but the table has none"):
        Versions().of(relation(), facts("a"), selection=masks(x="null"))
    # The catalog has the column: the stream has not reached the point where it was added.
    catalog = TableFacts(("a",), {"x": True})
    assert Versions().of(relation(), catalog, today="abcx", selection=masks(x="null"))[1]


def test_a_table_that_takes_its_name_back_from_another_has_a_new_version() -> None:
    """Its rows follow the other table's, though its description is the one that it had."""
    versions = Versions()
    other = replace(relation(), relation_id=16500)
    first, _ = versions.of(relation(), facts("a"))
    second, _ = versions.of(other, facts("a"))
    third, new = versions.of(relation(), facts("a"))
    assert (new, third) == (True, replace(first, schema_id=3))
    # What the log holds is read again as the version that it was.
    assert versions.of(other, facts("a"), replaying=True) == (second, False)
    assert versions.of(relation(), facts("a")) == (third, False)


def stored(files: str, rewritten: dict[int, int]) -> TableFacts:
    return facts("a")._replace(stored=StoredColumns(3, files, {}, rewritten=rewritten))


def numbered(kind: int = 23) -> Relation:
    """Return a relation whose columns have their numbers, the first one of type `kind`."""
    first, *others = (replace(c, attnum=n) for n, c in enumerate(relation().columns, 1))
    return replace(relation(), columns=(replace(first, type_id=kind), *others))


def test_a_column_that_was_rewritten_makes_a_version_without_an_alteration() -> None:
    versions = Versions()
    first, _ = versions.of(numbered(), stored("1", {}))
    # Other files alone, and a transaction that left the files: no rewrite of a column.
    assert versions.of(numbered(), stored("2", {})) == (first, False)
    assert versions.of(numbered(), stored("1", {2: 700})) == (first, False)
    assert versions.of(numbered(), stored("2", {2: 700}), replaying=True) == (first, False)
    second, new = versions.of(numbered(), stored("2", {2: 700}))
    assert new
    assert second.stale == "the table was rewritten when column b was changed"
    assert versions.relations.take_alteration() is None
    # Once; and the next one again.
    assert versions.of(numbered(), stored("3", {2: 700})) == (second, False)
    assert versions.of(numbered(), stored("4", {2: 701}))[0].stale == second.stale


@pytest.mark.parametrize(
    ("rewritten", "expected"),
    [({1, 3}, ""), ({1, 2, 3}, "the table was rewritten when column b was changed")],
)
def test_a_rewrite_for_a_larger_integer_does_not_accuse_columns_that_it_fills(
    rewritten: set[int], expected: str
) -> None:
    versions = Versions()
    before, _ = versions.of(numbered(), stored("1", {}))
    a, b, c = before.columns
    before = replace(before, columns=(a, b, replace(c, missing="7")))
    after, _ = versions.of(numbered(kind=20), stored("2", dict.fromkeys(rewritten, 700)))
    assert stale(before, after) == expected


def published(**numbers: int) -> SentTable:
    """Return a table as the catalog has it, with its columns' numbers."""
    columns = tuple((name, 23, -1) for name in numbers)
    return SentTable(columns, None, attnums=tuple(numbers.values()))


def read_back(
    versions: Versions,
    today: SentTable,
    columns: str = "ab",
    *,
    replaying: bool = False,
    xid: int | None = None,
) -> tuple[SchemaRecord, bool]:
    """Return the version of a relation that the stream sends while the catalog is `today`'s."""
    catalog = facts("a")._replace(stored=StoredColumns(max(today.attnums), "1", {}))
    reported = relation(columns=columns)
    request = RelationRequest(reported, catalog, {}, LSN(0x100), today, xid=xid)
    return versions.relations.version(request, replaying=replaying)


def numbers(version: SchemaRecord) -> list[int | None]:
    return [column.attnum for column in version.columns]


_WHICH = "columns were dropped and added, and which is which is not proven"


def test_a_column_that_was_dropped_and_added_again_is_not_known_by_its_name() -> None:
    """The row may be from before that or after it."""
    versions = Versions()
    first, _ = read_back(versions, published(a=1, b=2))
    second, new = read_back(versions, published(a=1, b=3))
    assert (new, numbers(second), second.stale) == (True, [1, 3], _WHICH)
    alteration = versions.relations.take_alteration()
    assert alteration is not None
    assert (alteration.previous, alteration.stale) == (first.schema_id, _WHICH)
    assert [column.was for column in alteration.columns] == ["a", None]
    assert read_back(versions, published(a=1, b=3)) == (second, False)
    # Another column since: the list that the catalog has is longer than the stream's.
    third, new = read_back(versions, published(a=1, b=4, c=5))
    assert (new, numbers(third), third.stale) == (True, [1, 4], _WHICH)


def test_what_the_log_holds_keeps_its_version_when_a_column_was_added_again() -> None:
    versions = Versions()
    first, _ = read_back(versions, published(a=1, b=2))
    assert read_back(versions, published(a=1, b=3), replaying=True) == (first, False)
    assert versions.relations.take_alteration() is None
    second, new = read_back(versions, published(a=1, b=3))
    assert (new, second.stale) == (True, _WHICH)


def test_a_description_with_numbers_proves_which_column_was_added_again() -> None:
    versions = Versions()
    read_back(versions, published(a=1, b=2))
    first, second, _ = numbered().columns
    reported = replace(numbered(), columns=(first, replace(second, attnum=3)))
    today = facts("a")._replace(stored=StoredColumns(3, "1", {}))
    request = RelationRequest(reported, today, {}, LSN(0x100), published(a=1, b=3))
    version, new = versions.relations.version(request, replaying=False)
    assert (new, numbers(version), version.stale) == (True, [1, 3], "")


def test_a_column_that_the_rows_own_transaction_added_again_is_known() -> None:
    """No other transaction changes the table between its rows and its end."""
    today = published(a=1, b=3)._replace(xmins=(700, 701))
    for xid, doubt in ((701, ""), (702, _WHICH)):
        versions = Versions()
        read_back(versions, published(a=1, b=2))
        version, new = read_back(versions, today, xid=xid)
        assert (new, numbers(version), version.stale) == (True, [1, 3], doubt)


def test_a_column_that_its_own_transaction_added_again_is_known_in_a_later_catalog() -> None:
    """The catalog lists another column, which was added since."""
    versions = Versions()
    read_back(versions, published(a=1, b=2))
    today = published(a=1, b=3, c=4)._replace(xmins=(700, 701, 702))
    version, new = read_back(versions, today, xid=701)
    assert (new, numbers(version), version.stale) == (True, [1, 3], "")


def test_columns_that_exchanged_their_names_are_known() -> None:
    versions = Versions()
    read_back(versions, published(a=1, b=2, c=3), "abc")
    version, new = read_back(versions, published(a=1, c=2, b=3), "acb")
    assert (new, numbers(version), version.stale) == (True, [1, 2, 3], "")


def test_a_column_of_another_name_or_type_is_known() -> None:
    versions = Versions()
    read_back(versions, published(a=1, b=2))
    other, new = read_back(versions, published(a=1, c=3), "ac")
    assert (new, numbers(other), other.stale) == (True, [1, 3], "")
    assert read_back(versions, published(a=1, c=3, d=4), "acd")[0].stale == ""


def test_a_column_added_again_in_a_table_that_hides_another_is_not_known() -> None:
    versions = Versions()
    hiding = masks(a="hmac")

    def seen(*columns: NumberedColumn) -> SchemaRecord:
        catalog = ColumnNumbers(relation_id=16402, lsn=LSN(0x90 + len(columns)), columns=columns)
        known = facts("a")._replace(numbers=catalog)
        request = RelationRequest(relation(columns="ab"), known, {}, LSN(0x100), None, hiding)
        return versions.relations.version(request, replaying=False)[0]

    a, b = (NumberedColumn(n, name, 23, -1, xmin=7, sent=True) for n, name in ((1, "a"), (2, "b")))
    assert (numbers(seen(a, b)), seen(a, b).stale) == ([1, 2], "")
    again = seen(a, replace(b, name="", dropped=True), replace(b, attnum=3, xmin=8))
    assert numbers(again) == [1, 3]
    assert again.stale.endswith(_WHICH)
