"""Relation messages → table versions.

Pure. A version is the stream's description of a relation's columns and identity, with what only the
catalog knows, and with the key and masks of the configuration. The same description again is the
same version: the walsender repeats it in each session and after each invalidation.

The configuration names columns, and a name can move to another column. So a hidden column is
tracked by its number (`cdc.publication.column_identity`), and a relation that shows it, or may, is
refused (`cdc.sequence.refusals`). Without numbers from the catalog, names are compared with the
previous version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from cdc.decode.messages import ReplicaIdentity
from cdc.decode.types import type_name
from cdc.encode import alterations
from cdc.encode.encoder import Encoder
from cdc.encode.masks import column_mask
from cdc.log import names
from cdc.log.records import NONDETERMINISTIC, ColumnNumbers, SchemaColumn, SchemaRecord
from cdc.publication import column_identity
from cdc.sequence import refusals

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdc.decode.messages import RelationColumn
    from cdc.log.records import Alteration
    from cdc.publication.column_identity import ColumnPositions
    from cdc.sequence.relation_request import RelationRequest

# The identities under which the stream marks the key's columns.
_MARKING = (ReplicaIdentity.DEFAULT, ReplicaIdentity.INDEX)


class Relations:
    """Every table version in the log, and the ids of the next ones."""

    def __init__(
        self,
        prefix: str,
        known: list[SchemaRecord],
        schema_id: int,
        numbers: Iterable[ColumnNumbers] = (),
    ) -> None:
        """Start with the versions and the column numbers that the log has."""
        self._prefix = prefix
        self._numbers: dict[int, list[ColumnNumbers]] = {}
        self._noted: list[ColumnNumbers] = []
        self.learn(numbers)
        # A crash can't leave half a version: records and schema_id share a Kafka transaction.
        self._by_relation: dict[int, list[SchemaRecord]] = {}
        self._by_topic: dict[str, SchemaRecord] = {}  # the newest of each
        self._alteration: Alteration | None = None
        for record in known:
            self._add(record)
        self.schema_id = schema_id

    def version(self, request: RelationRequest, *, replaying: bool) -> tuple[SchemaRecord, bool]:
        """Return the relation's version, and whether it is a new one.

        While `replaying` what the log holds, the relation may be an older version than the newest,
        and today's catalog does not describe that time: the result is the newest version with the
        stream's description, with the key it had.

        Raises ConfigError if the configuration's key or masks don't fit the relation.
        """
        versions = self._by_relation.get(request.relation.relation_id, [])
        found, numbers, doubts = self._column_numbers(request, versions, replaying=replaying)
        record = self._record(request, _key(request, versions), numbers)
        custom = request.selection.key is not None
        for candidate in reversed(versions if replaying else self._newest(versions)):
            if _same(candidate, record, replaying=replaying, custom=custom):
                return candidate, False
        refusals.key_holds(request, record)
        refusals.subjects_are_sent(request, record)
        refusals.nothing_revealed(
            request, record, versions[-1] if versions else None, numbered=bool(found)
        )
        record = _with_missing_values(request, record)
        if here := self._newest(versions):
            change = alterations.compare(here[0], record, _unreadable(request, record))
            stale = change.stale if change else alterations.stale(here[0], record)
            more = [doubt for doubt in doubts if doubt not in stale]
            record = replace(record, stale="; ".join(filter(None, (stale, *more))))
            self._alteration = replace(change, stale=record.stale) if change else None
        self.schema_id = record.schema_id
        self._add(record)
        return record, True

    def take_alteration(self) -> Alteration | None:
        """Return what the newest version does to the rows before it, once; None: nothing."""
        taken, self._alteration = self._alteration, None
        return taken

    def _newest(self, versions: list[SchemaRecord]) -> list[SchemaRecord]:
        """Return the newest of a relation's versions, unless another relation had its name since.

        The relation has taken the name back then, and its rows follow the other one's.
        """
        return [each for each in versions[-1:] if self._by_topic[each.topic] is each]

    def _add(self, record: SchemaRecord) -> None:
        self._by_relation.setdefault(record.relation_id, []).append(record)
        self._by_topic[record.topic] = record

    def learn(self, numbers: Iterable[ColumnNumbers]) -> None:
        """Add column numbers that the log has."""
        for each in numbers:
            known = self._numbers.setdefault(each.relation_id, [])
            if each not in known:
                known.append(each)
                known.sort(key=lambda one: one.lsn)

    def knows_numbers(self, relation_id: int) -> bool:
        """Return whether the table's columns were numbered before."""
        return relation_id in self._numbers

    def known_columns(self, relation_id: int) -> set[str]:
        """Return the names of the columns that the log last had of a table."""
        newest, numbers = self.newest(relation_id), self._numbers.get(relation_id)
        known = {column.name for column in newest.columns} if newest else set()
        return known | {c.name for c in numbers[-1].columns if not c.dropped} if numbers else known

    def newest(self, relation_id: int) -> SchemaRecord | None:
        """Return the newest version of a relation."""
        versions = self._by_relation.get(relation_id)
        return versions[-1] if versions else None

    def has_hidden(self, relation_id: int) -> bool:
        """Return whether the log knows of a hidden column of the table."""
        known = self._numbers.get(relation_id)
        return bool(known and known[-1].hidden)

    def take_numbers(self) -> list[ColumnNumbers]:
        """Return the column numbers that are to go into the log, once."""
        taken, self._noted = self._noted, []
        return taken

    def _column_numbers(
        self, request: RelationRequest, versions: list[SchemaRecord], *, replaying: bool
    ) -> tuple[ColumnPositions, tuple[int | None, ...], tuple[str, ...]]:
        """Return where each column is, each column's number, and what is not proven about them.

        A column that was dropped and added again may be either of the two. It is taken for today's;
        while `replaying` for that of the newest version, which the log has such rows under.
        """
        again = _added_again(request, versions)
        unproven = {name for name, by_itself in again.items() if replaying or not by_itself}
        found = self._column_places(request, versions, unproven)
        numbers = column_identity.attnums(request.relation.columns, found)
        unknown = {name for name in again if numbers[request.columns.index(name)] is None}
        if not unknown:
            return found, numbers, ()
        known = _numbers_before(versions) if replaying else _numbers_today(request)
        numbers = tuple(
            number or known.get((column.name, column.type_id, column.type_modifier))
            for column, number in zip(request.relation.columns, numbers, strict=True)
        )
        is_proven = replaying or not unknown & unproven
        return found, numbers, () if is_proven else (alterations.NOT_PROVEN,)

    def _column_places(
        self, request: RelationRequest, versions: list[SchemaRecord], unproven: set[str]
    ) -> ColumnPositions:
        """Return where each column is; raise ConfigError if a hidden one is shown, or may be.

        The catalog alone does not prove which columns those are that are `unproven`.
        """
        columns, selection = request.relation.columns, request.selection
        today = request.facts.numbers  # as the catalog has them, if it was queried
        exact = bool(columns) and all(column.attnum for column in columns)
        if today is None:
            if not exact:
                catalog = {} if unproven else _places_in_catalog(request)
                return catalog or _places_since(request, versions)
            today = ColumnNumbers(relation_id=request.relation.relation_id, lsn=request.from_lsn)
        known = self._numbers.get(today.relation_id, [])
        before = next((each for each in reversed(known) if each.lsn <= request.from_lsn), None)
        # A log of an older version hid columns by name: which columns they were is not known.
        unnumbered = not known and any(c.mask for v in versions for c in v.columns)
        alike = () if unnumbered else (today, *known)
        found = column_identity.possible_positions(columns, before, today, alike)
        so_far = known[-1].hidden if known else {}
        hidden = (
            column_identity.hidden_columns(selection, so_far, today) if today.columns else so_far
        )
        exposed = column_identity.exposed_columns(selection, columns, found, so_far | hidden)
        refusals.nothing_exposed(request, exposed, today, so_far | hidden, unnumbered=unnumbered)
        refusals.named_columns_exist(request, versions, known)
        now = ColumnNumbers(
            relation_id=today.relation_id,
            schema=request.relation.namespace,
            table=request.relation.name,
            lsn=today.lsn,
            membership=today.membership,
            columns=today.columns,
            hidden=hidden,
        )
        last = known and (known[-1].columns, known[-1].membership, known[-1].hidden)
        if today.columns and hidden and last != (now.columns, now.membership, now.hidden):
            self.learn([now])
            self._noted.append(now)
        return found

    def _record(
        self, request: RelationRequest, key: tuple[str, ...], numbers: tuple[int | None, ...]
    ) -> SchemaRecord:
        relation, types, stored = request.relation, request.types, request.facts.stored
        columns = []
        rewritten = stored.rewritten if stored else {}
        for column, attnum in zip(relation.columns, numbers, strict=True):
            mask = column_mask(request.selection, column.name)
            columns.append(
                SchemaColumn(
                    name=column.name,
                    type_id=column.type_id,
                    type=type_name(column.type_id) or types.get(column.type_id, "unknown"),
                    type_modifier=column.type_modifier,
                    nullable=request.facts.nullable.get(column.name),
                    mask=mask.label if mask else None,
                    attnum=attnum,
                    rewritten_by=rewritten.get(attnum or 0, 0),
                    collation=_collation(request, column),
                )
            )
        return SchemaRecord(
            schema_id=self.schema_id + 1,
            relation_id=relation.relation_id,
            schema=relation.namespace or "pg_catalog",
            table=relation.name,
            topic=names.data_topic(self._prefix, relation.namespace, relation.name),
            replica_identity=relation.replica_identity.value,
            from_lsn=request.from_lsn,
            key=key,
            columns=tuple(columns),
            values=request.values,
            where=request.published.where if request.published else None,
            where_mark=request.published.where_mark if request.published else "",
            attributes=stored.attributes if stored else 0,
            storage=stored.storage if stored else "",
        )


def _collation(request: RelationRequest, column: RelationColumn) -> str | None:
    """Return a column's collation, if the catalog still has the column with its type."""
    found = request.facts.collations.get(column.name)
    if found is None or request.published is None:
        return found
    described = (column.name, column.type_id, column.type_modifier)
    return found if described in request.published.columns else None


def _with_missing_values(request: RelationRequest, record: SchemaRecord) -> SchemaRecord:
    """Return the version with the values of rows that are older than a column, as rows have them.

    The values of a hidden column are masked as any other of it.
    """
    missing = request.facts.stored.missing if request.facts.stored else {}
    texts = [missing.get(column.attnum or 0) for column in record.columns]
    known = [_has_type_of_catalog(request, column) for column in record.columns]
    if not any(text is not None and is_known for text, is_known in zip(texts, known, strict=True)):
        return record
    # An encrypted value has the key of its row, and is in no version.
    masks = [
        None if _is_encrypted(column) else column_mask(request.selection, column.name)
        for column in record.columns
    ]
    encoder = Encoder(record, "", "", 1, masks)
    columns = []
    for number, column in enumerate(record.columns):
        text, value = texts[number], None
        if text is not None and known[number] and not _is_encrypted(column):
            value = encoder.value(number, text.encode()).decode()
        columns.append(replace(column, missing=value))
    return replace(record, columns=tuple(columns))


def _unreadable(request: RelationRequest, record: SchemaRecord) -> set[int]:
    """Return the numbers of the columns whose missing values the catalog does not show."""
    stored = request.facts.stored
    return {
        column.attnum
        for column in record.columns
        if column.attnum is not None
        and (
            stored is None
            or not _has_type_of_catalog(request, column)
            or column.attnum in stored.mixed
            or (_is_encrypted(column) and column.attnum in stored.missing)
            or len(column.missing or "") > alterations.MOST_MISSING
        )
    }


def _is_encrypted(column: SchemaColumn) -> bool:
    """Return whether a column's values are encrypted, each by the key of its row's subject."""
    return column.mask is not None and column.mask.startswith("encrypt:")


def _has_type_of_catalog(request: RelationRequest, column: SchemaColumn) -> bool:
    """Return whether the catalog still has the column, and with the same type."""
    published = request.published
    if published is None or column.attnum not in published.attnums:
        return False
    _, *today = published.columns[published.attnums.index(column.attnum)]
    return today == [column.type_id, column.type_modifier]


def _added_again(request: RelationRequest, versions: list[SchemaRecord]) -> dict[str, bool]:
    """Return the columns of the newest version that were dropped, and added again as they were.

    A relation that is older than the catalog has one or the other. True: the relation's own
    transaction added it, and no other one can have done so between its rows and its end.
    """
    before, today = _numbers_before(versions), _numbers_today(request)
    live, own = set(today.values()), _changed_by_itself(request)
    sent = {(c.name, c.type_id, c.type_modifier) for c in request.relation.columns}
    return {
        described[0]: today[described] in own
        for described in sent & before.keys() & today.keys()
        if before[described] not in live
    }


def _numbers_before(versions: list[SchemaRecord]) -> dict[tuple[str, int, int], int]:
    """Return the numbers of the newest version's columns, as far as they are known."""
    columns = versions[-1].columns if versions else ()
    return {(c.name, c.type_id, c.type_modifier): c.attnum for c in columns if c.attnum}


def _numbers_today(request: RelationRequest) -> dict[tuple[str, int, int], int]:
    """Return the numbers of the columns in the catalog, if it shows the relation's transaction."""
    published, numbers = request.published, request.facts.numbers
    if numbers is not None:
        live = [column for column in numbers.columns if not column.dropped]
        return {(c.name, c.type_id, c.type_modifier): c.attnum for c in live}
    if published is None or not published.attnums:
        return {}
    return dict(zip(published.columns, published.attnums, strict=True))


def _changed_by_itself(request: RelationRequest) -> set[int]:
    """Return the numbers of the columns that the relation's own transaction changed last."""
    published, numbers = request.published, request.facts.numbers
    rows: Iterable[tuple[int, int]] = ()
    if numbers is not None:
        rows = ((column.attnum, column.xmin) for column in numbers.columns)
    elif published is not None:
        rows = zip(published.attnums, published.xmins, strict=False)
    return {attnum for attnum, xmin in rows if xmin == request.xid}


def _places_since(request: RelationRequest, versions: list[SchemaRecord]) -> ColumnPositions:
    """Return the columns' positions in a relation that is older than the catalog.

    Only if the newest version and the catalog together leave one possibility.
    """
    published, stored = request.published, request.facts.stored
    before = versions[-1] if versions else None
    if published is None or stored is None or before is None or not before.attributes:
        return {}
    numbers = [column.attnum for column in before.columns if column.attnum is not None]
    if len(numbers) < len(before.columns):
        return {}
    possible = column_identity.possible_numbers(
        len(request.columns), numbers, before.attributes, published.attnums, stored.attributes
    )
    if possible is None:
        return {}
    return {attnum: frozenset({at}) for at, attnum in enumerate(possible)}


def _places_in_catalog(request: RelationRequest) -> ColumnPositions:
    """Return the columns' positions in a table that hides none: as today's catalog lists them."""
    published = request.published
    if published is None or not published.attnums or not request.catalog_matches:
        return {}
    return {attnum: frozenset({at}) for at, attnum in enumerate(published.attnums)}


def _key(request: RelationRequest, versions: list[SchemaRecord]) -> tuple[str, ...]:
    """Return the key's columns: the configuration's, or the primary key's in the key's order.

    The stream marks them for DEFAULT and USING INDEX; only their order comes from elsewhere. Under
    FULL it marks every column and under NOTHING none: there the primary key comes from the catalog,
    but only while that describes the table as the stream does. While the stream is older than a
    change of the table, the key is that of the newest version with these columns, or else of the
    newest version.
    """
    if request.selection.key is not None:
        return request.selection.key
    primary, columns, newest_first = request.facts.primary_key, set(request.columns), versions[::-1]
    if request.relation.replica_identity in _MARKING:
        marked = request.marked
        ordered = [primary, *(version.key for version in newest_first)]
        return next((key for key in ordered if set(key) == set(marked)), marked)
    today = primary if set(primary) <= columns else ()
    if request.catalog_matches or not versions:
        return today
    alike = [v for v in newest_first if tuple(c.name for c in v.columns) == request.columns]
    then = (alike or newest_first)[0].key
    return then if set(then) <= columns else today


def _same(known: SchemaRecord, seen: SchemaRecord, *, replaying: bool, custom: bool) -> bool:
    """Return whether stream and configuration describe both in the same way.

    A key's order comes from the catalog and makes no new version, unless the configuration sets it
    (`custom`). Under FULL and NOTHING the complete key comes from the catalog, as the row filter,
    rewrites of the table and collations always do, and is compared only if today's catalog applies
    (not while replaying).
    """
    if _described(known) != _described(seen):
        return False
    # Columns of one name that are known to be different columns.
    for old, new in zip(known.columns, seen.columns, strict=True):
        if None not in (old.attnum, new.attnum) and old.attnum != new.attnum:
            return False
    if custom and known.key != seen.key:
        return False
    if not replaying and (
        known.where != seen.where
        or alterations.stale(known, seen)
        or _is_collated_otherwise(known, seen)
    ):
        return False
    marked = seen.replica_identity in {identity.value for identity in _MARKING}
    return set(known.key) == set(seen.key) or not (marked or not replaying)


def _is_collated_otherwise(known: SchemaRecord, seen: SchemaRecord) -> bool:
    """Return whether a column has another collation now.

    Records of older versions have none: a new version of the table has it. Only that different
    texts may be equal is worth one.
    """
    pairs = [(a.collation, b.collation) for a, b in zip(known.columns, seen.columns, strict=True)]
    return any(
        new is not None and old != new and (old is not None or new == NONDETERMINISTIC)
        for old, new in pairs
    )


def _described(record: SchemaRecord) -> tuple[object, ...]:
    columns = tuple((c.name, c.type_id, c.type_modifier, c.mask) for c in record.columns)
    named = (record.schema, record.table, record.topic, record.replica_identity)
    return (*named, columns, record.values)
