"""What a relation message asks for: the table's version, topic and encoder.

The only part of the stream's path that asks the source's catalog and Kafka's admin, so it blocks
and belongs on the worker. It keeps the identity half of the resume record, since a new topic or a
changed publication changes it; `take` gives the records that must go out with the next batch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from msgspec.structs import replace
from orjson import dumps

from cdc import continuity
from cdc.log import names, records, resume, topics
from cdc.log.dead import DeadLetters
from cdc.log.encoder import Encoder
from cdc.log.limits import limits, ours
from cdc.log.mask import column_mask
from cdc.log.routes import Table
from cdc.log.values import undescribed
from cdc.source import catalog
from cdc.source.kinds import defined_by_users
from cdc.source.published import published

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.decode.messages import Relation
    from cdc.events import LSN
    from cdc.log.batch import Batch
    from cdc.relations import Relations

log = logging.getLogger("cdc.tables")

Record = tuple[str, bytes, bytes]  # topic, key, value


class Tables:
    """Every table version the pipeline meets, and where its rows go."""

    def __init__(
        self,
        config: Config,
        sql: catalog.Connection,
        admin: topics.Admin,
        batch: Batch,
        relations: Relations,
        identity: records.ResumeIdentity,
    ) -> None:
        """Begin with the log's `identity`; `sql` and `admin` stay the caller's to close."""
        self._config = config
        self._sql = sql
        self._admin = admin
        self.batch = batch
        placeholder = dumps(config.values.unavailable_value_placeholder)
        dead_topic = names.dead_topic(config.prefix)
        self.dead = DeadLetters(batch, dead_topic, placeholder, ours(config))
        self._relations = relations
        self._identity = identity
        self._records: list[Record] = []
        self._unknown_types: dict[int, int] = {}  # columns, by relation id

    @property
    def unknown_type_columns(self) -> int:
        """How many columns of the tables met have a type of which nothing but its text is known."""
        return sum(self._unknown_types.values())

    @property
    def schema_id(self) -> int:
        """The newest version's."""
        return self._relations.schema_id

    def take(self) -> list[Record]:
        """Return the records for the next Kafka transaction, once."""
        taken, self._records = self._records, []
        return taken

    def describe(
        self, relation: Relation, types: dict[int, str], from_lsn: LSN, *, replaying: bool
    ) -> Table:
        """Return how the relation's rows are encoded and where they go. Blocks.

        Raises GapError where a table has left the publication, even if it came back: changing a
        publication makes the walsender describe every table anew, so to look here is to look
        before the next row of any.
        """
        self.follow(catalog.publication(self._sql, self._config.publication))
        facts = catalog.table_facts(self._sql, relation.relation_id)
        told = published(self._sql, self._config.publication, relation.relation_id)
        names = ((relation.namespace, relation.name), *told.ancestors)
        selection = self._config.selection.of(*names)
        version, new = self._relations.version(
            relation,
            facts,
            types,
            from_lsn,
            replaying=replaying,
            values=self._config.values,
            published=told,
            selection=selection,
        )
        self._count_unknown_types(version, new=new)
        if new:
            self._publish(version)
        partitions = self._partitions(version)
        if not self.dead.knows(version.topic):
            # Once a session: a table is described anew behind each truncate.
            self.dead.limit_to(limits(self._admin, self._config, [version.topic]))
        masks = [column_mask(selection, column.name) for column in version.columns]
        encoder = Encoder(version, self._identity.database, self._config.prefix, partitions, masks)
        return Table(encoder, self.batch.topic(version.topic, encoder.partitions), self.dead)

    @property
    def publication(self) -> records.Publication:
        """The publication as the log knows it."""
        return self._identity.publication

    @property
    def identity(self) -> records.ResumeIdentity:
        """The identity half of the resume record, as it stands or goes out next."""
        return self._identity

    def adopt(self, identity: records.ResumeIdentity) -> None:
        """Go on as `identity`, which goes into the log with the next Kafka transaction."""
        if identity.timeline != self._identity.timeline:
            timelines = {"from": self._identity.timeline, "to": identity.timeline}
            log.warning("following a promotion", extra={"fields": timelines})
        if identity != self._identity:
            self._identify(identity)

    def note(self, publication: records.Publication) -> None:
        """Take a publication that has lost nothing as the one to hold on to."""
        self._identify(replace(self._identity, publication=publication))

    def follow(self, publication: records.Publication) -> None:
        """Note the publication as it is; raise GapError where that has lost changes."""
        old = self._identity.publication
        if publication != old:
            publication, existing = catalog.publication_beside(self._sql, old.name, old.tables)
            continuity.same_publication(old, publication, existing)
            self.note(publication)

    def _partitions(self, version: records.SchemaRecord) -> int:
        """Return the partition count of the version's topic; create and pin a new topic."""
        identity = self._identity
        if version.topic not in identity.partitions:
            topic = topics.data_topic(self._config, version.schema, version.table)
            made = topics.ensure(self._admin, self._config, [topic])[version.topic]
            self._identify(
                replace(
                    identity,
                    partitions=identity.partitions | {version.topic: made.partitions},
                    topic_ids=identity.topic_ids | {version.topic: made.topic_id},
                )
            )
        return self._identity.partitions[version.topic]

    def _identify(self, identity: records.ResumeIdentity) -> None:
        self._identity = identity
        self._records.append(resume.record(self._config, identity))

    def _count_unknown_types(self, version: records.SchemaRecord, *, new: bool) -> None:
        """Count columns whose values are text that only the type's maker can read; tell new ones.

        Nothing but this report depends on today's catalog.
        """
        named = {c.name: kind for c in version.columns if (kind := undescribed(c.type))}
        ours = defined_by_users(self._sql, named.values()) if named else frozenset()
        unknown = {column: kind for column, kind in named.items() if kind not in ours}
        self._unknown_types[version.relation_id] = len(unknown)
        if unknown and new:
            table = f"{version.schema}.{version.table}"
            log.warning(
                "columns of unknown types: their values are Postgres' own text",
                extra={"fields": {"table": table, "types": unknown}},
            )

    def _publish(self, version: records.SchemaRecord) -> None:
        key = records.schema_key(version.schema_id)
        topic = names.schema_topic(self._config.prefix)
        self._records.append((topic, key, records.encode(version)))
        fields = {
            "table": f"{version.schema}.{version.table}",
            "schema_id": version.schema_id,
            "topic": version.topic,
        }
        log.info("table version", extra={"fields": fields})
        if self._relations.is_another(version):
            # Dropped and created again, or renamed into its place: the stream tells of neither.
            remedy = f"cdc snapshot {version.schema}.{version.table} --anew"
            log.warning(
                "another table has this name now, and rows of the one before are still in the log",
                extra={"fields": {**fields, "hint": remedy}},
            )
