"""Relation messages and what the catalog adds make table versions, each once."""

from __future__ import annotations

from msgspec.structs import replace

from cdc.decode.messages import Column, Relation, ReplicaIdentity
from cdc.events import LSN
from cdc.log.records import SchemaRecord
from cdc.relations import Relations
from cdc.source.catalog import TableFacts

DEFAULT, FULL = ReplicaIdentity.DEFAULT, ReplicaIdentity.FULL
INDEX, NOTHING = ReplicaIdentity.INDEX, ReplicaIdentity.NOTHING


def relation(
    identity: ReplicaIdentity = DEFAULT, marked: str = "a", columns: str = "abc", table: str = "t"
) -> Relation:
    """Return a relation whose columns are letters; those in `marked` are its replica identity."""
    named = tuple(Column(name in marked, name, 23, -1) for name in columns)
    return Relation(16402, "public", table, identity, named)


def facts(*primary_key: str) -> TableFacts:
    return TableFacts(primary_key, {"a": False, "b": True})


class Versions:
    """A pipeline's table versions, asked as the daemon asks."""

    def __init__(self, known: list[SchemaRecord] | None = None, schema_id: int = 0) -> None:
        self.relations = Relations("shop", known or [], schema_id)

    def of(
        self,
        told: Relation,
        catalog: TableFacts,
        *,
        types: dict[int, str] | None = None,
        replaying: bool = False,
    ) -> tuple[SchemaRecord, bool]:
        return self.relations.version(told, catalog, types or {}, LSN(0x100), replaying=replaying)


def test_a_version_holds_what_stream_and_catalog_say() -> None:
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
    # What the catalog says of nullability today makes no new version.
    assert versions.of(relation(), TableFacts(("a",), {})) == (first, False)
    assert versions.relations.schema_id == 1


def test_each_change_of_the_description_is_a_new_version() -> None:
    versions = Versions()
    told = relation()
    columns = told.columns
    for number, changed in enumerate(
        [
            told,
            relation(columns="abcd"),
            relation(columns="ab"),
            relation(columns="acb"),
            relation(marked="ab"),
            relation(FULL, "abc"),
            relation(table="renamed"),
            replace(told, namespace="other"),
            replace(told, columns=(columns[0], columns[1], replace(columns[2], type_id=20))),
            replace(told, columns=(columns[0], columns[1], replace(columns[2], type_modifier=9))),
        ],
        1,
    ):
        marked = tuple(column.name for column in changed.columns if column.key)
        version, new = versions.of(changed, facts(*marked))
        assert (version.schema_id, new) == (number, True)


def test_a_description_that_comes_back_is_a_new_version() -> None:
    """`from_lsn` says from where it holds, so the old record cannot speak for the new time."""
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


def test_types_that_are_not_built_in_have_the_name_the_stream_told() -> None:
    told = relation()
    columns = (replace(told.columns[0], type_id=90001), replace(told.columns[1], type_id=90002))
    version, _ = Versions().of(
        replace(told, columns=columns), facts("a"), types={90001: "public.mood"}
    )
    assert [c.type for c in version.columns] == ["public.mood", "unknown"]


def key(told: Relation, *primary_key: str) -> tuple[str, ...]:
    return Versions().of(told, facts(*primary_key))[0].key


def test_the_key_stands_in_the_primary_keys_order() -> None:
    assert key(relation(DEFAULT, "abc"), "c", "a", "b") == ("c", "a", "b")
    assert key(relation(FULL, "abc"), "c", "a") == ("c", "a")


def test_a_catalog_that_is_younger_than_the_stream_does_not_make_the_key() -> None:
    assert key(relation(DEFAULT, "ab"), "c") == ("a", "b")
    assert key(relation(DEFAULT, "ab")) == ("a", "b")
    assert key(relation(FULL, "abc"), "gone") == ()


def test_the_identity_index_makes_the_key_also_beside_a_primary_key() -> None:
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
    """The description holds for the transactions behind the replay: its key must not move."""
    for told, then, today in [
        (relation(FULL, "abc"), ("a",), ("b",)),
        (relation(FULL, "abc"), ("a",), ()),
        (relation(NOTHING, ""), ("a",), ("b",)),
        (relation(DEFAULT, "ab"), ("b", "a"), ("a", "b")),
        (relation(DEFAULT, "ab"), ("b", "a"), ("c",)),
    ]:
        before = Versions()
        version, _ = before.of(told, facts(*then))
        after = restarted(before, [version])
        assert after.of(told, facts(*today), replaying=True) == (version, False)


def test_a_key_made_of_other_columns_is_another_version_also_in_a_replay() -> None:
    before = Versions()
    known = [before.of(relation(marked=marked), facts(*marked))[0] for marked in ("a", "ab")]
    after = restarted(before, known)
    assert after.of(relation(marked="a"), facts("a", "b"), replaying=True) == (known[0], False)
    assert after.of(relation(marked="ab"), facts("a", "b"), replaying=True) == (known[1], False)


def test_a_version_that_the_log_does_not_hold_is_recorded_also_in_a_replay() -> None:
    """Its rows may be published once the replay is over: they need a record of their own."""
    versions = Versions()
    version, new = versions.of(relation(), facts("a"), replaying=True)
    assert new
    assert versions.of(relation(), facts("a")) == (version, False)
    other, _ = versions.of(relation(columns="ab"), facts("a"))
    assert other.schema_id == version.schema_id + 1
