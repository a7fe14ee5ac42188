"""Relation messages → table versions.

Pure. A version is the stream's description of a relation's columns and identity, with what only the
catalog knows, and with the key and masks of the configuration. The same description again is the
same version: the walsender repeats it in each session and after each invalidation.

The configuration names columns, and a name can move to another column. So a hidden column is
tracked by its number (`cdc.publication.column_identity`), and a relation that shows it, or may, is refused.
Without numbers from the catalog, names are compared with the previous version (`_nothing_bared`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdc.config.selection import ALL
from cdc.decode.messages import ReplicaIdentity
from cdc.decode.types import type_name
from cdc.encode.masks import column_mask
from cdc.errors import ConfigError
from cdc.log import names
from cdc.log.records import ColumnNumbers, SchemaColumn, SchemaRecord
from cdc.publication import column_identity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdc.config import TableSelection
    from cdc.config.value_options import Values
    from cdc.decode.messages import Relation
    from cdc.events import LSN
    from cdc.publication.column_identity import Places, Shown
    from cdc.source.catalog import TableFacts
    from cdc.source.publications import Published

# The identities under which the stream marks the key's columns.
_MARKING = (ReplicaIdentity.DEFAULT, ReplicaIdentity.INDEX)


class Asked(NamedTuple):
    """A relation to be described, and what is known of it besides the stream."""

    relation: Relation
    facts: TableFacts
    published: Published | None
    selection: TableSelection
    types: dict[int, str]
    values: Values | None
    from_lsn: LSN

    @property
    def today(self) -> ColumnNumbers | None:
        """The columns' numbers as the catalog has them, if it was queried."""
        return self.facts.numbers

    @property
    def name(self) -> str:
        return f"{self.relation.namespace}.{self.relation.name}"

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.relation.columns)

    @property
    def marked(self) -> tuple[str, ...]:
        """The columns of the replica identity, as far as the stream marks them."""
        return tuple(column.name for column in self.relation.columns if column.key)

    @property
    def catalog_speaks(self) -> bool:
        """Whether today's catalog describes the columns as the stream does."""
        if self.published is None:
            return True
        told = tuple((c.name, c.type_id, c.type_modifier) for c in self.relation.columns)
        return told == self.published.columns


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
        self._by_topic: dict[str, list[SchemaRecord]] = {}
        for record in known:
            self._know(record)
        self.schema_id = schema_id

    def version(
        self,
        relation: Relation,
        facts: TableFacts,
        types: dict[int, str],
        from_lsn: LSN,
        *,
        replaying: bool,
        values: Values | None = None,
        published: Published | None = None,
        selection: TableSelection = ALL,
    ) -> tuple[SchemaRecord, bool]:
        """Return the relation's version, and whether it is a new one.

        `facts` are of the catalog at or after `from_lsn`.

        While `replaying` what the log holds, the relation may be an older version than the newest,
        and today's catalog does not describe that time: the result is the newest version with the
        stream's description, with the key it had.

        Raises ConfigError if the configuration's key or masks don't fit the relation.
        """
        asked = Asked(relation, facts, published, selection, types, values, from_lsn)
        versions = self._by_relation.get(relation.relation_id, [])
        found = self._placed(asked, versions)
        record = self._record(asked, _key(asked, versions), found)
        custom = asked.selection.key is not None
        for candidate in reversed(versions if replaying else versions[-1:]):
            if _same(candidate, record, replaying=replaying, custom=custom):
                return candidate, False
        _key_holds(asked, record)
        _nothing_bared(asked, record, versions[-1] if versions else None, numbered=bool(found))
        self.schema_id = record.schema_id
        self._know(record)
        return record, True

    def _know(self, record: SchemaRecord) -> None:
        self._by_relation.setdefault(record.relation_id, []).append(record)
        self._by_topic.setdefault(record.topic, []).append(record)

    def is_another(self, record: SchemaRecord) -> bool:
        """Return whether the previous version under its name was of another table."""
        before = [
            known.relation_id
            for known in self._by_topic.get(record.topic, ())
            if known.schema_id < record.schema_id
        ]
        return bool(before) and before[-1] != record.relation_id

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

    def has_hidden(self, relation_id: int) -> bool:
        """Return whether the log knows of a hidden column of the table."""
        known = self._numbers.get(relation_id)
        return bool(known and known[-1].hidden)

    def take_numbers(self) -> list[ColumnNumbers]:
        """Return the column numbers that are to go into the log, once."""
        taken, self._noted = self._noted, []
        return taken

    def _placed(self, asked: Asked, versions: list[SchemaRecord]) -> Places:
        """Return where each column is; raise ConfigError if a hidden one is shown, or may be."""
        columns, selection, today = asked.relation.columns, asked.selection, asked.today
        exact = bool(columns) and all(column.attnum for column in columns)
        if today is None:
            if not exact:
                return _listed(asked)
            today = ColumnNumbers(relation_id=asked.relation.relation_id, lsn=asked.from_lsn)
        known = self._numbers.get(today.relation_id, [])
        before = next((each for each in reversed(known) if each.lsn <= asked.from_lsn), None)
        # A log of an older version hid columns by name: which columns they were is not known.
        unnumbered = not known and any(c.mask for v in versions for c in v.columns)
        alike = () if unnumbered else (today, *known)
        found = column_identity.places(columns, before, today, alike)
        so_far = known[-1].hidden if known else {}
        hidden = column_identity.hidden(selection, so_far, today) if today.columns else so_far
        if bare := column_identity.shown(selection, columns, found, so_far | hidden):
            raise _shown(asked, bare, dropped=not today.columns, unnumbered=unnumbered)
        _named_columns_exist(asked, versions, known)
        now = ColumnNumbers(
            relation_id=today.relation_id,
            schema=asked.relation.namespace,
            table=asked.relation.name,
            lsn=today.lsn,
            membership=today.membership,
            columns=today.columns,
            hidden=hidden,
        )
        if today.columns and hidden and not (known and _says_the_same(known[-1], now)):
            self.learn([now])
            self._noted.append(now)
        return found

    def _record(self, asked: Asked, key: tuple[str, ...], found: Places) -> SchemaRecord:
        relation, types = asked.relation, asked.types
        columns = []
        attnums = column_identity.attnums(relation.columns, found)
        for column, attnum in zip(relation.columns, attnums, strict=True):
            mask = column_mask(asked.selection, column.name)
            columns.append(
                SchemaColumn(
                    name=column.name,
                    type_id=column.type_id,
                    type=type_name(column.type_id) or types.get(column.type_id, "unknown"),
                    type_modifier=column.type_modifier,
                    nullable=asked.facts.nullable.get(column.name),
                    mask=mask.label if mask else None,
                    attnum=attnum,
                )
            )
        return SchemaRecord(
            schema_id=self.schema_id + 1,
            relation_id=relation.relation_id,
            schema=relation.namespace or "pg_catalog",
            table=relation.name,
            topic=names.data_topic(self._prefix, relation.namespace, relation.name),
            replica_identity=relation.replica_identity.value,
            from_lsn=asked.from_lsn,
            key=key,
            columns=tuple(columns),
            values=asked.values,
            where=asked.published.where if asked.published else None,
        )


def _listed(asked: Asked) -> Places:
    """Return the columns' positions in a table that hides none: as today's catalog lists them."""
    told = asked.published
    if told is None or not told.attnums or not asked.catalog_speaks:
        return {}
    return {attnum: frozenset({at}) for at, attnum in enumerate(told.attnums)}


def _key(asked: Asked, versions: list[SchemaRecord]) -> tuple[str, ...]:
    """Return the key's columns: the configuration's, or the primary key's in the key's order.

    The stream marks them for DEFAULT and USING INDEX; only their order comes from elsewhere. Under
    FULL it marks every column and under NOTHING none: there the primary key comes from the catalog,
    but only while that describes the table as the stream does. While the stream is older than a
    change of the table, the key is that of the newest version with these columns, or else of the
    newest version.
    """
    if asked.selection.key is not None:
        return asked.selection.key
    primary, columns, newest_first = asked.facts.primary_key, set(asked.columns), versions[::-1]
    if asked.relation.replica_identity in _MARKING:
        marked = asked.marked
        ordered = [primary, *(version.key for version in newest_first)]
        return next((key for key in ordered if set(key) == set(marked)), marked)
    today = primary if set(primary) <= columns else ()
    if asked.catalog_speaks or not versions:
        return today
    alike = [v for v in newest_first if tuple(c.name for c in v.columns) == asked.columns]
    then = (alike or newest_first)[0].key
    return then if set(then) <= columns else today


def _same(known: SchemaRecord, seen: SchemaRecord, *, replaying: bool, custom: bool) -> bool:
    """Return whether stream and configuration describe both in the same way.

    A key's order comes from the catalog and makes no new version, unless the configuration sets it
    (`custom`). Under FULL and NOTHING the complete key comes from the catalog, as the row filter
    always does, and is compared only if today's catalog applies (not while replaying).
    """
    if _described(known) != _described(seen):
        return False
    if any(_are_others(*pair) for pair in zip(known.columns, seen.columns, strict=True)):
        return False
    if custom and known.key != seen.key:
        return False
    if not replaying and known.where != seen.where:
        return False
    marked = seen.replica_identity in {identity.value for identity in _MARKING}
    return set(known.key) == set(seen.key) or not (marked or not replaying)


def _are_others(known: SchemaColumn, seen: SchemaColumn) -> bool:
    """Return whether two columns of one name are known to be different columns."""
    return None not in (known.attnum, seen.attnum) and known.attnum != seen.attnum


def _says_the_same(known: ColumnNumbers, now: ColumnNumbers) -> bool:
    return (known.columns, known.membership, known.hidden) == (
        now.columns,
        now.membership,
        now.hidden,
    )


def _described(record: SchemaRecord) -> tuple[object, ...]:
    columns = tuple((c.name, c.type_id, c.type_modifier, c.mask) for c in record.columns)
    named = (record.schema, record.table, record.topic, record.replica_identity)
    return (*named, columns, record.values)


def _key_holds(asked: Asked, record: SchemaRecord) -> None:
    """Raise ConfigError if the key would not distinguish this relation's rows, or be unknown."""
    labels = {column.name: column.mask for column in record.columns}
    missing = [name for name in record.key if name not in labels]
    if missing:
        raise ConfigError(
            f"the key of {asked.name} is to be {', '.join(record.key)}, but at {asked.from_lsn} the"
            f" table has no column {', '.join(missing)}",
            hint=f'correct tables."{asked.name}".key; a column that was added later can be in the'
            " key of a new log only",
        )
    # Without a marked column Postgres refuses updates and deletes: inserts carry every column.
    unsent = [name for name in record.key if asked.marked and name not in asked.marked]
    if unsent:
        raise ConfigError(
            f"the key of {asked.name} has {', '.join(unsent)}, which Postgres does not send with"
            f" updates and deletes: its replica identity is {', '.join(asked.marked)}",
            hint="ALTER TABLE … REPLICA IDENTITY FULL, or USING INDEX of a unique index that has"
            f' the key\'s columns; or take another tables."{asked.name}".key',
        )
    masks = {name: labels[name] for name in record.key}
    alike = [name for name, mask in masks.items() if mask and not mask.startswith("hmac:")]
    if alike:
        raise ConfigError(
            f"{', '.join(alike)} is in the key of {asked.name}, and its mask"
            f" {masks[alike[0]]} would make rows alike",
            hint="a key's column takes the mask hmac, or none",
        )


def _nothing_bared(
    asked: Asked, record: SchemaRecord, before: SchemaRecord | None, *, numbered: bool
) -> None:
    """Raise ConfigError if what was hidden so far would be shown under another name."""
    selection, columns = asked.selection, set(asked.columns)
    if before is None:
        # The catalog may be newer than the stream: a column that either of them has is valid.
        gone = sorted(selection.hidden - columns - asked.facts.nullable.keys())
        if gone:
            raise _bared(asked, gone, "but the table has none of that name")
        return
    hidden = {column.name for column in before.columns if column.mask is not None}
    known = {column.name for column in before.columns}
    shown = {c.name for c in record.columns if c.mask is None and selection.mask(c.name) is None}
    if hidden & shown:
        raise _bared(asked, sorted(hidden & shown), "and is silent now")
    gone = sorted(hidden - columns)
    by_number = numbered and all(c.attnum for c in before.columns if c.mask is not None)
    if gone and shown - known and not by_number:
        new = ", ".join(sorted(shown - known))
        raise _bared(asked, gone, f"but that is gone, and {new} is new and may be the same")


def _named_columns_exist(
    asked: Asked, versions: list[SchemaRecord], known: list[ColumnNumbers]
) -> None:
    """Raise ConfigError if the table's configuration hides a column that never existed."""
    ever = {*asked.columns, *asked.facts.nullable}
    ever |= {column.name for version in versions for column in version.columns}
    ever |= {column.name for numbers in known for column in numbers.columns}
    ever |= {name for numbers in known for name in numbers.hidden.values()}
    if never := sorted(asked.selection.hidden - ever):
        raise _bared(asked, never, "but the table has none of that name")


def _shown(asked: Asked, bare: list[Shown], *, dropped: bool, unnumbered: bool) -> ConfigError:
    """Return the error for hidden columns that have, or may have, names that are shown."""
    same = sorted({each.name for each in bare if each.certain and each.name == each.hidden_as})
    if same:
        return _bared(asked, same, "and is silent now")
    said = [
        f"{each.hidden_as} (column {each.attnum}) {'is' if each.certain else 'may be'} {each.name}"
        for each in bare
    ]
    names = sorted({each.name for each in bare})
    if dropped:
        why = "the table was dropped since, and with it what says which column is which"
    elif all(each.certain for each in bare):
        why = "the name has passed to another column"
    else:
        why = "columns were dropped and added since, so its name does not say which it is"
    first = "run `cdc setup`, which records each hidden column's number; or " if unnumbered else ""
    return ConfigError(
        f"{asked.name} at {asked.from_lsn} would show a hidden column: {', '.join(said)}; {why}",
        hint=f'{first}hide {", ".join(names)} too: tables."{asked.name}".mask. Once `cdc run` has'
        " passed this change, `keep` there shows what may be shown",
    )


def _bared(asked: Asked, columns: list[str], how: str) -> ConfigError:
    return ConfigError(
        f"{asked.name}: the configuration hid {', '.join(columns)} so far, {how}",
        hint=f'name table and column as they are called now: tables."{asked.name}".mask; there'
        " `keep` says that a column may be shown from here on",
    )
