"""Features that another hand enables in a mirror: served or refused by name, never retried."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st

from cdc.errors import ConfigError, Exit
from lockstep.conformance.store import USERS, WIDER, applied, apply, change, row
from lockstep.jobs.apply.delta_merge import SparkMerge
from lockstep.jobs.reading_as_of import read_as_of_arrow
from lockstep.sinks.contract import Altered, AlteredColumn, Changes
from lockstep.sinks.delta import actions, features, lake
from lockstep.sinks.delta.lake import CommitInfo
from lockstep.sinks.delta.settings import DeltaSettings
from lockstep.sinks.delta.sink import DeltaSink
from tests.integration.test_delta_sink import APPLIERS, Lake, users

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lockstep.sinks.delta.actions import Action

# Writer features of the protocol, by whether readers must support them too.
WRITERS: Final = (
    "allowColumnDefaults", "appendOnly", "changeDataFeed", "checkConstraints",
    "checkpointProtection", "clustering", "domainMetadata", "generatedColumns", "icebergCompatV1",
    "icebergCompatV2", "identityColumns", "inCommitTimestamp", "invariants", "rowTracking",
    "materializePartitionColumns", "allowOutOfOrderCommits",
)  # fmt: skip
READERS: Final = (
    "catalogManaged", "columnMapping", "deletionVectors", "timestampNtz", "typeWidening",
    "typeWidening-preview", "v2Checkpoint", "vacuumProtocolCheck", "variantType",
    "variantShredding-preview", "nobodyKnowsThis",
)  # fmt: skip
# Those that ask nothing, or nothing but what we do, as long as no property or column uses them.
SERVED: Final = {
    "appendOnly", "changeDataFeed", "checkConstraints", "columnMapping", "deletionVectors",
    "generatedColumns", "invariants", "timestampNtz",
}  # fmt: skip
PROPERTIES: Final = {
    "delta.appendOnly": "true",
    "delta.columnMapping.mode": "id",
    "delta.constraints.positive": "id > 0",
    "delta.checkpointPolicy": "v2",
    "delta.enableChangeDataFeed": "true",
    "delta.enableIcebergCompatV2": "true",
    "delta.enableInCommitTimestamps": "true",
    "delta.enableRowTracking": "true",
    "delta.enableTypeWidening": "true",
    "delta.enableWhatComesNext": "true",
}
COLUMNS: Final[dict[str, dict[str, object]]] = {
    "NOT NULL": {"nullable": False},
    "generated columns": {"metadata": {"delta.generationExpression": "id + 1"}},
    "identity columns": {"metadata": {"delta.identity.start": 1}},
    "invariants": {"metadata": {"delta.invariants": "{}"}},
    "type widening": {"metadata": {"delta.typeChanges": []}},
}


def in_turn(*names: str) -> list[str]:
    """Return one case of each name, by the appliers in turn."""
    return [f"{name}-{APPLIERS[at % len(APPLIERS)]}" for at, name in enumerate(names)]


def put(path: Path, *changed: dict[str, Any]) -> int:
    """Commit actions as another writer does; return the version."""
    log = path / "_delta_log"
    version = max(int(each.stem) for each in log.glob("*.json")) + 1
    lines = [{"commitInfo": {"timestamp": 1, "operation": "ALTER"}}, *changed]
    (log / f"{version:020d}.json").write_text("\n".join(map(json.dumps, lines)))
    return version


def protocol(*names: str) -> dict[str, Any]:
    readers = sorted({*names, "deletionVectors"} - {*WRITERS})
    return {
        "protocol": {
            "minReaderVersion": 3,
            "minWriterVersion": 7,
            "readerFeatures": readers,
            "writerFeatures": sorted({*names, "deletionVectors"}),
        }
    }


def described(table: DeltaTable, properties: dict[str, str], **field: object) -> dict[str, Any]:
    schema = json.loads(table.schema().to_json())
    schema["fields"][0] |= field
    return actions.described(table, schema, table.metadata().configuration | properties)


def newest(path: Path) -> int:
    return max(int(each.stem) for each in (path / "_delta_log").glob("*.json"))


def continued(lake: Lake, applier: str, name: str, version: int) -> None:
    """Assert that a running and a new follower refuse the mirror by the feature's name."""
    with pytest.raises(ConfigError) as caught:
        apply(lake.sink(applier=applier), 9, users(9, 1, 2))
    assert name in caught.value.what
    assert caught.value.exit_code is Exit.CONFIG
    assert newest(lake.path / "public.users") == version, "nothing was committed"


@pytest.mark.long("each by every applier", sample=in_turn(*WRITERS, *READERS))
@pytest.mark.parametrize("applier", APPLIERS)
@pytest.mark.parametrize("feature", [*WRITERS, *READERS])
def test_a_feature_is_served_or_refused_by_name(tmp_path: Path, feature: str, applier: str) -> None:
    """Without Spark; by a running follower, and by a new one."""
    lake, path = Lake(tmp_path), tmp_path / "public.users"
    running = lake.sink(applier=applier)
    apply(running, 2, users(2, 1, 2))
    version = put(path, protocol(feature))
    if feature in SERVED:
        apply(running, 3, users(3, 1))
        apply(lake.sink(applier=applier), 4, users(4, 2, 3))
        assert lake.ids() == {1: 3, 2: 4, 3: 4}
        return
    # delta-rs names neither, and opens no such table.
    name = "catalog-managed" if feature == "catalogManaged" else feature
    with pytest.raises(ConfigError, match=name):
        apply(running, 3, users(3, 1))
    continued(lake, applier, name, version)


@pytest.mark.long("each by every applier", sample=in_turn(*PROPERTIES, *COLUMNS))
@pytest.mark.parametrize("applier", APPLIERS)
@pytest.mark.parametrize("name", [*PROPERTIES, *COLUMNS])
def test_a_property_is_refused_whatever_the_protocol_names(
    tmp_path: Path, name: str, applier: str
) -> None:
    lake, path = Lake(tmp_path), tmp_path / "public.users"
    running = lake.sink(applier=applier)
    apply(running, 2, users(2, 1, 2))
    properties = {name: PROPERTIES[name]} if name in PROPERTIES else {}
    table, of_column = lake.table(), COLUMNS.get(name, {})
    version = put(path, described(table, properties, **of_column))
    with pytest.raises(ConfigError, match=name):
        apply(running, 3, users(3, 1))
    continued(lake, applier, name, version)


@pytest.mark.parametrize(
    "name", ["delta.enableChangeDataFeed", "delta.enableInCommitTimestamps", "rowTracking"]
)
def test_ddl_changes_the_rows_of_a_mirror_or_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """Of replaced files the change feed needs no change files, so that one is served."""
    lake, path = Lake(tmp_path), tmp_path / "public.users"
    sink = lake.sink(large=SparkMerge({}))
    apply(sink, 2, users(2, 1, 2))
    if name in PROPERTIES:
        version = put(path, described(lake.table(), {name: PROPERTIES[name]}))
    else:
        version = put(path, protocol(name))
    columns = [AlteredColumn(each.name, each.name) for each in USERS.columns]
    age = AlteredColumn("age", None, b"7")
    sink.begin(3, [WIDER])
    sink.alter(Altered(3, USERS, WIDER, (*columns, age)))
    if name == "delta.enableChangeDataFeed":
        sink.commit(applied(3))
        assert lake.table().to_pyarrow_table()["age"].to_pylist() == [7, 7]
        return
    with pytest.raises(ConfigError, match=name):
        sink.commit(applied(3))
    assert newest(path) == version, "nothing was committed"


@given(
    names=st.sets(
        st.sampled_from([*WRITERS, *READERS]) | st.text("abcXYZ-", min_size=3), max_size=4
    ),
    # A table with that mode is valid only with numbered columns.
    properties=st.sets(
        st.sampled_from(sorted(PROPERTIES.keys() - {"delta.columnMapping.mode"})), max_size=2
    ),
)
def test_no_commit_of_ours_follows_what_is_unknown(
    tmp_path_factory: pytest.TempPathFactory, names: set[str], properties: set[str]
) -> None:
    """Any set of features and properties: a commit is made only if each of them is served."""
    path = tmp_path_factory.mktemp("table")
    table = DeltaTable.create(path, pa.schema([("id", pa.int64())]))
    version = put(path, described(table, {name: PROPERTIES[name] for name in properties}))
    version = put(path, protocol(*names))
    opened: DeltaTable | None = None
    files = actions.Files(str(path), {})
    add: Action = {"add": {}}
    with suppress(ConfigError):
        opened = lake.opened(str(path), {})
    for action, harmless in ((add, set()), ({"txn": {}}, {"delta.enableChangeDataFeed"})):
        if opened is not None:
            with suppress(ConfigError), lake.translated(str(path)):
                features.expect_ours(opened, changes_rows=not harmless)
                actions.put_version(files, version + 1, [action], {}, CommitInfo("a", None, {}))
        if names <= SERVED and properties <= harmless:
            assert newest(path) == version + 1
            (path / "_delta_log" / f"{version + 1:020d}.json").unlink()
        else:
            assert newest(path) == version


def having(name: str, value: str = "true") -> str:
    return f"SET TBLPROPERTIES ('delta.{name}' = '{value}')"


# How Spark alters the mirror, and the name by which that is refused, if Spark does not write it.
BY_SPARK: Final = {
    "changes": (having("enableChangeDataFeed"), None),
    "times": (having("enableInCommitTimestamps"), None),
    "tracking": (having("enableRowTracking"), None),
    "checkpoints": (having("checkpointPolicy", "v2"), None),
    "defaults": (having("feature.allowColumnDefaults", "supported"), None),
    "domains": (having("feature.domainMetadata", "supported"), None),
    "clustering": ("CLUSTER BY (id)", None),
    "vectors": (having("enableDeletionVectors"), None),
    "mapping": (having("columnMapping.mode", "name"), None),
    "append": (having("appendOnly"), "delta.appendOnly"),
    "widening": (having("enableTypeWidening"), "typeWidening"),
    "vacuum": (having("feature.vacuumProtocolCheck", "supported"), "vacuumProtocolCheck"),
    "constraint": ("ADD CONSTRAINT positive CHECK (id > 0)", "delta.constraints.positive"),
    "variant": ("ADD COLUMNS (v VARIANT)", "variant"),
}
LATER = USERS._replace(
    schema_id=9, columns=(*USERS.columns, USERS.columns[0]._replace(name="later", nullable=True))
)


@pytest.mark.long("minutes of Spark's commits", sample=["constraint"])
@pytest.mark.parametrize("altered", BY_SPARK)
def test_a_mirror_that_spark_has_altered(spark: SparkSession, tmp_path: Path, altered: str) -> None:
    """Updates, deletes, values that were not sent, a new column and a truncate; then upkeep."""
    settings = DeltaSettings("shop", "mirror", "shop", str(tmp_path), large=SparkMerge({}))
    sink = DeltaSink(settings)
    sink.open()
    apply(sink, 2, users(2, 1, 2, 3))
    table = f"delta.`{tmp_path / 'public.users'}`"
    statement, refused = BY_SPARK[altered]
    spark.sql(f"ALTER TABLE {table} {statement}")
    before = newest(tmp_path / "public.users")
    if refused:
        with pytest.raises(ConfigError, match=refused):
            apply(sink, 3, users(3, 1))
        with pytest.raises(ConfigError, match=refused):
            DeltaSink(settings).open()
        assert newest(tmp_path / "public.users") == before
        return
    kept = change(USERS, 4, row(USERS, 4, 2, body="?"), 2, unchanged=("body",))
    apply(sink, 4, Changes((USERS,), [change(USERS, 3, None, 1), kept]))
    sent = row(USERS, 5, 4) | {"later": 7}
    new = change(USERS, 5, sent, 4)._replace(schema_id=9)
    apply(sink, 5, Changes((USERS, LATER), [new]))
    sink = DeltaSink(settings._replace(cluster={"public.users": ("id",)}))
    sink.open()
    rows = read_as_of_arrow(str(tmp_path), ["public.users"]).tables["public.users"].to_pylist()
    assert {each["id"]: (each["_seq"], each["body"], each["later"]) for each in rows} == {
        2: (4, "long 2", None),
        3: (2, "long 2", None),
        4: (5, "long 5", 7),
    }
    sink.tidy()
    apply(sink, 8, Changes((LATER,), [new._replace(seq=8)], truncated=7))
    assert spark.sql(f"SELECT id, _seq FROM {table}").collect() == [(4, 8)]


def test_a_mirror_with_a_change_feed_shows_every_change_in_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The rows before it, with its changes, are the rows after: of a cut, of DDL, of a truncate."""
    sink = Lake(tmp_path).sink(large=SparkMerge({}))
    path = tmp_path / "public.users"
    apply(sink, 2, users(2, 1, 2, 3))
    spark.sql(f"ALTER TABLE delta.`{path}` {having('enableChangeDataFeed')}")
    before = newest(path)
    deleted = change(USERS, 3, None, 2)
    apply(sink, 3, Changes((USERS,), [deleted, *users(3, 1, 4).changes]))
    columns = [AlteredColumn(each.name, each.name) for each in USERS.columns]
    sink.begin(4, [WIDER])
    sink.alter(Altered(4, USERS, WIDER, (*columns, AlteredColumn("age", None, b"7"))))
    sink.commit(applied(4))
    altered = newest(path)
    new = change(WIDER, 6, row(WIDER, 6, 5), 5)
    apply(sink, 6, Changes((WIDER,), [new], truncated=5))
    sink.close()

    def after(first: int) -> Counter[tuple[object, ...]]:
        feed = spark.read.format("delta").option("readChangeFeed", "true")
        found = Counter[tuple[object, ...]]()
        for each in feed.option("startingVersion", first).load(str(path)).collect():
            is_new = each["_change_type"] in {"insert", "update_postimage"}
            found[each["id"], each["_seq"], each.asDict().get("age")] += 1 if is_new else -1
        return found

    counted = Counter[tuple[object, ...]]({(number, 2, None): 1 for number in (1, 2, 3)})
    counted.update(after(before + 1))
    assert {each: many for each, many in counted.items() if many} == {(5, 6, 6): 1}
    counted = Counter[tuple[object, ...]]({(1, 3, 7): 1, (3, 2, 7): 1, (4, 3, 7): 1})
    counted.update(after(altered + 1))
    assert {each: many for each, many in counted.items() if many} == {(5, 6, 6): 1}
