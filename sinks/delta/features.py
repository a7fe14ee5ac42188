"""Who may write a table, by the features and properties that another hand may have enabled.

Each feature of Delta's protocol is in one of three classes: its rules are followed by delta-rs and
by our own commits; it is left to delta-spark; or the table is refused by name, as is every feature
that is not listed here. A listed feature may be without effect: then only the property, or the
metadata of a column, that gives it one decides.

Every commit of ours asks first (`expect_ours`), so none is made by rules that it does not know
(docs/adr/0067).

https://github.com/delta-io/delta/blob/master/PROTOCOL.md#valid-feature-names-in-table-features
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from deltalake import DeltaTable

    from lockstep.sinks.delta.settings import Applier

# Without a property or a column that uses them, these ask nothing of a writer, or what ours do.
_OURS: Final = {
    "appendOnly",
    "changeDataFeed",
    "checkConstraints",
    "columnMapping",
    "deletionVectors",
    "generatedColumns",
    "invariants",
    "timestampNtz",
}
# delta-rs commits to no table with one of these.
_SPARKS: Final = {
    "allowColumnDefaults",
    "checkpointProtection",
    "clustering",
    "domainMetadata",
    "identityColumns",
    "inCommitTimestamp",
    "rowTracking",
    "v2Checkpoint",
}
_LAST_READER: Final = 3
_LAST_WRITER: Final = 7
_TRUE: Final = "true"
_ENABLES: Final = "delta.enable"
_CONSTRAINT: Final = "delta.constraints."
_MAPPED: Final = "delta.columnMapping.mode"
_POLICY: Final = "delta.checkpointPolicy"
# Properties that ask nothing of a writer of rows.
_HARMLESS: Final = {"delta.enableDeletionVectors", "delta.enableExpiredLogCleanup"}
_CHANGES: Final = "delta.enableChangeDataFeed"
_SPARKS_PROPERTIES: Final = {
    _CHANGES,
    "delta.enableInCommitTimestamps",
    "delta.enableRowTracking",
}
# What a column's metadata, or its type, asks of writers. A mirror has what its source has: no
# values of its own, and no conditions.
_OF_COLUMNS: Final = {
    "NOT NULL": re.compile(r'"nullable":\s*false,\s*"metadata"'),
    "identity columns": re.compile(r'"delta\.identity\.'),
    "generated columns": re.compile(r'"delta\.generationExpression"'),
    "invariants": re.compile(r'"delta\.invariants"'),
    "type widening": re.compile(r'"delta\.typeChanges"'),
    "variant": re.compile(r'"type":\s*"variant"'),
}


class Found(NamedTuple):
    """What a table's writers must know, beyond what ours do."""

    sparks: tuple[str, ...]  # left to delta-spark
    refused: tuple[str, ...]


def found(table: DeltaTable) -> Found:
    """Return the features and properties of a table that are not for our commits."""
    protocol, properties = table.protocol(), table.metadata().configuration
    features = {*(protocol.writer_features or ()), *(protocol.reader_features or ())}
    refused = [*sorted(features - _OURS - _SPARKS), *_refused(properties)]
    if protocol.min_reader_version > _LAST_READER or protocol.min_writer_version > _LAST_WRITER:
        refused.append(f"protocol {protocol.min_reader_version}, {protocol.min_writer_version}")
    schema = table.schema().to_json()
    refused += [name for name, sign in _OF_COLUMNS.items() if sign.search(schema)]
    sparks = [*sorted(features & _SPARKS), *_sparks(properties)]
    return Found(tuple(sparks), tuple(refused))


def _sparks(properties: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(_SPARKS_PROPERTIES & properties.keys()):
        if properties[name].casefold() == _TRUE:
            yield name
    if properties.get(_POLICY, "classic") != "classic":
        yield _POLICY


def _refused(properties: Mapping[str, str]) -> Iterator[str]:
    for name, value in sorted(properties.items()):
        is_unknown = name.startswith(_ENABLES) and name not in _HARMLESS | _SPARKS_PROPERTIES
        if (is_unknown or name == "delta.appendOnly") and value.casefold() == _TRUE:
            yield name
        if name.startswith(_CONSTRAINT):
            yield name
        if name == _MAPPED and value not in {"none", "name"}:
            yield f"{name}={value}"


def needs_spark(table: DeltaTable, *, changes_rows: bool = True) -> bool:
    """Return whether only delta-spark may write the table; raise ConfigError if nobody may.

    Without `changes_rows` files are added and removed only as they are, if at all: their readers
    need no change data.
    """
    each = found(table)
    if each.refused:
        raise refusal(table.table_uri, *each.refused)
    return any(changes_rows or name != _CHANGES for name in each.sparks)


def expect_writable(table: DeltaTable, large: Applier | None) -> None:
    """Raise ConfigError if neither we nor `large`, Spark's applier, may write the table."""
    if needs_spark(table) and large is None:
        raise refusal(table.table_uri, *found(table).sparks)


def expect_ours(table: DeltaTable, *, changes_rows: bool = True) -> None:
    """Raise ConfigError unless we support everything that a writer of the table must know."""
    if needs_spark(table, changes_rows=changes_rows):
        raise refusal(table.table_uri, *found(table).sparks)


def refusal(path: str, *names: str) -> ConfigError:
    """Return the error for a table with features or properties that are not written."""
    return ConfigError(
        f"{path} has what this follower does not write: {', '.join(names)}",
        hint="another writer has enabled it: take it back (`ALTER TABLE … DROP FEATURE`, `UNSET"
        " TBLPROPERTIES`, `DROP CONSTRAINT`), or move the table away and `cdc rebuild` the"
        " follower; docs/DELTA.md has what is supported",
    )
