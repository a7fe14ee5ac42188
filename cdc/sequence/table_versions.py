"""What a relation message requires: the table's version, topic and encoder.

The only part of the stream's path that queries the source's catalog and Kafka's admin API, so it
blocks and must run on the worker. It keeps the identity half of the resume record, since a new
topic or a changed publication changes it; `take` returns the records for the next batch.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace
from orjson import dumps

from cdc.decode.pg_snapshot import PgSnapshot
from cdc.encode.encoder import Encoder
from cdc.encode.masks import column_mask
from cdc.encode.oversize import DeadLetters
from cdc.encode.routes import TableRoute
from cdc.encode.values import undescribed
from cdc.errors import UnavailableError
from cdc.events import TRUNCATE_KEY
from cdc.keyring.opening import ciphers_of
from cdc.log import cleanup, column_numbers, names, reader, records, resume, topics
from cdc.log.limits import limits, ours
from cdc.publication import diff
from cdc.publication.check import PublicationCheck
from cdc.publication.column_identity import hides_something
from cdc.sequence import refusals
from cdc.sequence.relation_request import RelationRequest
from cdc.source.column_changes import fingerprints
from cdc.source.described import describe_table
from cdc.source.lookups import (
    Lookup,
    TableFacts,
    current_snapshot,
    defined_by_users,
    look_up,
    look_up_column_numbers,
)
from cdc.source.members import read_members
from cdc.source.row_filters import RowFilter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdc.config import Config, TableSelection
    from cdc.decode.messages import Relation
    from cdc.events import LSN
    from cdc.log.batch import Batch
    from cdc.log.completeness import Completeness
    from cdc.sequence.lookahead import Upcoming
    from cdc.sequence.relations import Relations
    from cdc.source.column_changes import ColumnChange
    from cdc.source.connection import Connection
    from cdc.source.lookups import SentTable

log = logging.getLogger("cdc.sequence.table_versions")

Record = tuple[str, bytes, bytes]  # topic, key, value

# How long a decoded commit may be invisible to other sessions before the session fails.
_VISIBLE_SECONDS: Final = 30.0
# The same where it only proves which column is which: without that, the session continues.
_LOOKUP_SECONDS: Final = 5.0
_VISIBLE_POLL_SECONDS: Final = 0.02


class TableVersions:
    """Every table version the pipeline meets, and where its rows go."""

    def __init__(
        self,
        config: Config,
        sql: Connection,
        admin: topics.Admin,
        batch: Batch,
        relations: Relations,
        identity: records.ResumeIdentity,
        completeness: Completeness,
    ) -> None:
        """Start with the log's `identity`; the caller closes `sql` and `admin`.

        New versions are added to `completeness`.
        """
        self._config = config
        self._sql = sql
        self._admin = admin
        self.batch = batch
        placeholder = dumps(config.values.unavailable_value_placeholder)
        dead_topic = names.dead_topic(config.prefix)
        self.dead = DeadLetters(batch, dead_topic, placeholder, ours(config))
        self._relations, self._completeness = relations, completeness
        self._ciphers = ciphers_of(config)
        self._identity = identity
        self._records: list[Record] = []
        self._unknown_types: dict[int, int] = {}  # columns, by relation id
        self.unknown_type_columns = 0  # the sum
        self._publication = PublicationCheck(config.publication, members=False)
        self._identified = False  # whether the identity is to be written
        self._upcoming: Upcoming | None = None  # whose relations are looked up
        self._lookups: dict[int, Lookup] = {}
        self._seen: PgSnapshot | None = None  # which transactions those show
        self._invisible: int | None = None  # a transaction that they did not show in time
        self._alteration: records.Alteration | None = None
        self._hides_by_ancestor = config.source.partitions == "leaf" and config.hides

    @property
    def schema_id(self) -> int:
        """The newest version's id."""
        return self._relations.schema_id

    def take(self) -> list[Record]:
        """Return the records for the next Kafka transaction, once."""
        taken, self._records = self._records, []
        if self._identified:
            # Only the newest: with thousands of tables it is long.
            taken.append(resume.record(self._config, self._identity))
            self._identified = False
        return taken

    def describe(
        self,
        relation: Relation,
        types: dict[int, str],
        from_lsn: LSN,
        *,
        replaying: bool,
        upcoming: Upcoming | None = None,
        xid: int | None = None,
    ) -> TableRoute:
        """Return how the relation's rows are encoded and where they go. Blocks.

        The catalog is queried for all `upcoming` relations at once: they arrived before the query,
        so the answer is as recent for each of them. `xid` is the transaction that the relation
        belongs to.

        Raises GapError if the publication has lost changes, even if it was reverted: changing a
        publication makes the walsender describe every table again, so this check comes before the
        next row of any table.
        """
        if xid is not None and self._hides_by_ancestor:
            # A partition that was attached just now hides what the table that it is of hides.
            self._wait_until_visible(relation, xid)
            upcoming = None
        facts, published = self._lookup_of(relation, upcoming, xid)
        return self._described(
            relation, types, from_lsn, facts, published, replaying=replaying, xid=xid
        )

    def describe_changed(
        self, change: ColumnChange, types: dict[int, str], from_lsn: LSN
    ) -> tuple[Relation, TableRoute] | None:
        """Return a table that was announced, as it is from `from_lsn` on. Blocks.

        None if its columns have changed since: how they were at that LSN is not known, and the
        change after it is announced, too.
        """
        oid, name = change.relation_id, self._config.publication
        self.check_publication()
        found = next((each for each in read_members(self._sql, name) if each.oid == oid), None)
        if found is None:
            return None
        known = look_up(self._sql, name, [oid], self._row_filters([oid]))[oid]
        described = describe_table(
            self._sql, name, oid, found.schema, found.table, found.replica_identity, known,
            heaps=False,
        )  # fmt: skip
        if fingerprints(self._sql, [oid]).get(oid) != change.fingerprint:
            return None
        self._lookups.clear()
        types.update(described.types)
        relation, (facts, published) = described.relation, (described.facts, described.published)
        table = self._described(
            relation, types, from_lsn, facts, published, replaying=False, xid=None
        )
        return relation, table

    def _described(
        self,
        relation: Relation,
        types: dict[int, str],
        from_lsn: LSN,
        facts: TableFacts,
        published: SentTable,
        *,
        replaying: bool,
        xid: int | None,
    ) -> TableRoute:
        names = ((relation.namespace, relation.name), *published.ancestors)
        selection = self._config.selection.of(*names)
        if self._hides_by_ancestor:
            self._require_ancestors(relation, selection, published)
        # After the transaction is visible: what is read here is of its time, or a later one.
        facts = facts._replace(numbers=self._numbers(relation, selection, xid))
        request = RelationRequest(
            relation, facts, types, from_lsn, published, selection, self._config.values, xid
        )
        version, new = self._relations.version(request, replaying=replaying)
        for numbers in self._relations.take_numbers():
            self._records.append(column_numbers.record(self._config, numbers))
        self._count_unknown_types(version, new=new)
        self._alteration = self._relations.take_alteration()
        if new:
            self._publish(version)
        cleanup.expect_keys(self._config, [version])
        self._ensure([version.topic], {version.topic: (version.schema, version.table)})
        self.adopt(
            cleanup.give(self._config, self._admin, self._identity, [version.topic], [version])
        )
        partitions = self._identity.partitions[version.topic]
        masks = [column_mask(selection, column.name) for column in version.columns]
        identity, prefix = self._identity, self._config.prefix
        encoder = Encoder(version, identity.database, prefix, partitions, masks, self._ciphers)
        return TableRoute(
            encoder,
            self.batch.topic(version.topic, encoder.partitions),
            self.dead,
            keyless=TRUNCATE_KEY if cleanup.is_compacted(self._config, version) else None,
        )

    def _require_ancestors(
        self, relation: Relation, selection: TableSelection, published: SentTable
    ) -> None:
        """Raise ConfigError if the relation may have hidden columns as a former partition.

        The catalog shows what it is a partition of today, not when its rows were written. What the
        log has of it was described then: only other columns are refused.
        """
        known = self._relations.known_columns(relation.relation_id)
        unknown = refusals.undecided_columns(relation, selection, known)
        if unknown and not self._has_its_ancestors(relation, published):
            raise refusals.may_be_hidden(relation, unknown, dropped=not published.columns)

    def _has_its_ancestors(self, relation: Relation, published: SentTable) -> bool:
        """Return whether the relation is sent for what it is today, so that no ancestor is missing.

        A table with a membership of its own is no partition that came with its table.
        """
        oid, own = relation.relation_id, (relation.namespace, relation.name)
        pinned = self._identity.publication
        for table, membership in pinned.tables.items():
            # A table that was dropped is pinned without its oid.
            known = pinned.relations.get(table)
            if membership and (known == oid or (known is None and diff.split_name(table) == own)):
                return True
        if not published.columns:
            return False
        members = read_members(self._sql, self._config.publication)
        member = next((each for each in members if each.oid == oid), None)
        if member is None or (member.root is None) != (not published.ancestors):
            return False
        return any(self._config.selection.includes(*n) for n in (own, *published.ancestors))

    def take_alteration(self) -> records.Alteration | None:
        """Return what the version described last does to the rows before it, once."""
        taken, self._alteration = self._alteration, None
        return taken

    @property
    def identity(self) -> records.ResumeIdentity:
        """The identity half of the resume record, as written or to be written next."""
        return self._identity

    def adopt(self, identity: records.ResumeIdentity) -> None:
        """Continue with `identity`, which goes into the log with the next Kafka transaction."""
        if identity.timeline != self._identity.timeline:
            timelines = {"from": self._identity.timeline, "to": identity.timeline}
            log.warning("following a promotion", extra={"fields": timelines})
        if identity != self._identity:
            self._identify(identity)

    def pin_publication(self, publication: records.PinnedPublication) -> None:
        """Pin a publication that has lost nothing."""
        self._identify(replace(self._identity, publication=publication))

    def check_publication(self) -> None:
        """Compare the publication with what the log knows; raise GapError if it lost changes.

        Blocks.
        """
        known = self._identity.publication
        if (now := self._publication.continue_with(self._sql, known)) != known:
            self.pin_publication(now)

    def _lookup_of(self, relation: Relation, upcoming: Upcoming | None, xid: int | None) -> Lookup:
        """Return the catalog's description of the relation, read after its message arrived.

        It shows the relation's transaction. Where that is not visible in time, which column is
        which is not known.
        """
        if upcoming is None or upcoming is not self._upcoming or not self._sees(xid):
            self._lookups.clear()
        if relation.relation_id not in self._lookups:
            if xid is not None and xid != self._invisible:
                try:
                    self._wait_until_visible(relation, xid, _LOOKUP_SECONDS)
                except UnavailableError:
                    self._invisible = xid
            others = upcoming.relations() if upcoming else []
            relations = {each.relation_id: each for each in (*others, relation)}
            self.check_publication()
            known = self._row_filters(relations)
            self._lookups = look_up(self._sql, self._config.publication, relations.keys(), known)
            self._upcoming = upcoming
            named = {
                names.data_topic(self._config.prefix, each.namespace, each.name): (
                    each.namespace or "pg_catalog",
                    each.name,
                )
                for each in relations.values()
            }
            self._ensure(list(named), named)
        facts, published = self._lookups[relation.relation_id]
        if self._sees(xid):
            return Lookup(facts, published)
        return Lookup(TableFacts(facts.primary_key, facts.nullable), published._replace(attnums=()))

    def _row_filters(self, relations: Iterable[int]) -> dict[int, RowFilter]:
        """Return the row filters that the log knows: reading those takes no lock."""
        return {
            each: RowFilter(version.where_mark, version.where)
            for each in relations
            if (version := self._relations.newest(each)) and version.where is not None
        }

    def _sees(self, xid: int | None) -> bool:
        """Return whether the lookups show a transaction; `xid` is None where it was verified."""
        return xid is None or (self._seen is not None and self._seen.sees(xid))

    def _numbers(
        self, relation: Relation, selection: TableSelection, xid: int | None
    ) -> records.ColumnNumbers | None:
        """Return the columns' numbers as the catalog has them once it shows the transaction.

        None if no column is hidden.
        """
        table, name = relation.relation_id, self._config.publication
        if not (hides_something(selection) or self._relations.has_hidden(table)):
            return None
        if xid is not None:
            self._wait_until_visible(relation, xid)
        found = look_up_column_numbers(self._sql, name, [table])[table]
        if not self._relations.knows_numbers(table):
            # `cdc setup` may have written them since the session began.
            self._relations.learn(reader.read_column_numbers(self._config))
        return found

    def _wait_until_visible(
        self, relation: Relation, xid: int, seconds: float = _VISIBLE_SECONDS
    ) -> None:
        """Wait until lookups see the transaction; raise UnavailableError if they don't in time.

        A commit is decoded before other sessions see it, long before if it waits for a synchronous
        standby: what it renamed has its old name until then.
        """
        deadline = time.monotonic() + seconds
        while not self._look(xid):
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"transaction {xid} is in the stream, and after {seconds:.0f} s no"
                    f" other session sees it: which columns {relation.namespace}.{relation.name}"
                    " hides can't be looked up",
                    hint="a commit waits for a synchronous standby: see pg_stat_replication; the"
                    " daemon tries again",
                )
            time.sleep(_VISIBLE_POLL_SECONDS)

    def _look(self, xid: int) -> bool:
        self._seen = PgSnapshot.parse(current_snapshot(self._sql))
        return self._seen.sees(xid)

    def _ensure(self, wanted: list[str], named: dict[str, tuple[str, str]]) -> None:
        """Create and pin the topics that are new, and learn how large a record each accepts."""
        identity, config = self._identity, self._config
        new = [
            topics.data_topic(config, *named[topic])
            for topic in wanted
            if topic not in identity.partitions
        ]
        if new:
            made = topics.ensure(self._admin, config, new)
            partitions = {name: each.partitions for name, each in made.items()}
            topic_ids = {name: each.topic_id for name, each in made.items()}
            self._identify(
                replace(
                    identity,
                    partitions=identity.partitions | partitions,
                    topic_ids=identity.topic_ids | topic_ids,
                )
            )
        # Once a session: a table is described again after each truncate.
        if unknown := [topic for topic in wanted if not self.dead.knows(topic)]:
            self.dead.limit_to(limits(self._admin, config, unknown))

    def limit_messages(self) -> None:
        """Learn how large a logical message its topic accepts. Blocks."""
        topic = names.messages_topic(self._config.prefix)
        self.dead.limit_to(limits(self._admin, self._config, [topic]), rows=False)

    def _identify(self, identity: records.ResumeIdentity) -> None:
        self._identity, self._identified = identity, True

    def _count_unknown_types(self, version: records.SchemaRecord, *, new: bool) -> None:
        """Count columns whose values are the text of an unknown type; log new ones.

        Only this report depends on today's catalog.
        """
        named = {c.name: kind for c in version.columns if (kind := undescribed(c.type))}
        ours = defined_by_users(self._sql, named.values()) if named else frozenset()
        unknown = {column: kind for column, kind in named.items() if kind not in ours}
        self._unknown_types[version.relation_id] = len(unknown)
        self.unknown_type_columns = sum(self._unknown_types.values())
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
        if found := self._completeness.add(version):
            shown = {**fields, "what": found.what, "hint": found.remedy}
            log.warning("a topic is incomplete", extra={"fields": shown})
