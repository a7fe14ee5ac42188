"""Relation messages → table versions.

Pure. A version is what the stream said of a relation's columns and identity, with what only the
catalog knows beside it. The same description again is the same version: the walsender repeats it
in each session and after each invalidation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.decode.messages import ReplicaIdentity
from cdc.decode.types import type_name
from cdc.log import names
from cdc.log.records import SchemaColumn, SchemaRecord

if TYPE_CHECKING:
    from cdc.decode.messages import Relation
    from cdc.events import LSN
    from cdc.source.catalog import TableFacts


class Relations:
    """Every table version in the log, and the ids of the next ones."""

    def __init__(self, prefix: str, known: list[SchemaRecord], schema_id: int) -> None:
        self._prefix = prefix
        # A crash can leave no half of a version: records and schema_id share a Kafka transaction.
        self._known = {record.schema_id: record for record in known}
        self.schema_id = schema_id

    def version(
        self,
        relation: Relation,
        facts: TableFacts,
        types: dict[int, str],
        from_lsn: LSN,
        *,
        replaying: bool,
    ) -> tuple[SchemaRecord, bool]:
        """Return the relation's version, and whether it is a new one.

        While `replaying` what the log holds, the relation may be an older version than the newest,
        and today's catalog says nothing of that time: the newest version that the stream describes
        alike is the one, with the key it had.
        """
        versions = [v for v in self._known.values() if v.relation_id == relation.relation_id]
        columns = tuple(
            SchemaColumn(
                name=column.name,
                type_id=column.type_id,
                type=type_name(column.type_id) or types.get(column.type_id, "unknown"),
                type_modifier=column.type_modifier,
                nullable=facts.nullable.get(column.name),
            )
            for column in relation.columns
        )
        record = SchemaRecord(
            schema_id=self.schema_id + 1,
            relation_id=relation.relation_id,
            schema=relation.namespace or "pg_catalog",
            table=relation.name,
            topic=names.data_topic(self._prefix, relation.namespace, relation.name),
            replica_identity=relation.replica_identity.value,
            from_lsn=from_lsn,
            key=_key(relation, facts),
            columns=columns,
        )
        for candidate in reversed(versions if replaying else versions[-1:]):
            if _same(candidate, record, key_too=not replaying):
                return candidate, False
        self.schema_id = record.schema_id
        self._known[record.schema_id] = record
        return record, True


def _key(relation: Relation, facts: TableFacts) -> tuple[str, ...]:
    """Return the key's columns, in the key's order where the catalog still agrees on them.

    The stream marks them for DEFAULT and USING INDEX. Under FULL it marks every column and under
    NOTHING none, so there the primary key is the catalog's to tell.
    """
    marked = tuple(column.name for column in relation.columns if column.key)
    everything = {column.name for column in relation.columns}
    if relation.replica_identity in (ReplicaIdentity.FULL, ReplicaIdentity.NOTHING):
        return facts.primary_key if set(facts.primary_key) <= everything else ()
    return facts.primary_key if set(facts.primary_key) == set(marked) else marked


def _same(known: SchemaRecord, seen: SchemaRecord, *, key_too: bool) -> bool:
    """Return whether the stream says the same of both.

    A key's order is the catalog's and makes no new version. Under FULL and NOTHING the whole key
    is, and counts only where today's catalog can speak (`key_too`).
    """
    marked = seen.replica_identity in (ReplicaIdentity.DEFAULT.value, ReplicaIdentity.INDEX.value)
    return _described(known) == _described(seen) and (
        set(known.key) == set(seen.key) or not (marked or key_too)
    )


def _described(record: SchemaRecord) -> tuple[object, ...]:
    columns = tuple((c.name, c.type_id, c.type_modifier) for c in record.columns)
    return (record.schema, record.table, record.topic, record.replica_identity, columns)
