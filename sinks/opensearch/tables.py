"""The index to which each table of a generation is written, following versions and truncates.

- A new column becomes a new field of the same index.
- A changed mapping of a field needs another index: it is created next to the previous one, filled
  from that with the documents' versions, and replaces it at the commit of the cut.
- A truncate needs an empty index, and nothing below its seq is written any more.

The record names an index before it is created, and records its creation before it is written to: so
any copy of the follower can continue where another has died.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from lockstep.sinks.contract import expect_key
from lockstep.sinks.opensearch.bulk import Action, BulkOutcome, Refused, send
from lockstep.sinks.opensearch.dead import DeadLetterIndex, LetterOwner
from lockstep.sinks.opensearch.mapping import alias, digest, properties
from lockstep.sinks.opensearch.record import FollowerRecords, IndexRecord, TableIndex, TableIndices

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lockstep.sinks.contract import Changes, Version
    from lockstep.sinks.opensearch.client import OpenSearchClient
    from lockstep.sinks.opensearch.indices import Indices


@dataclass(frozen=True)
class OpenSearchOptions:
    """Where and how a follower writes, with options by table, `schema.table`."""

    url: str
    pipeline: str
    follower: str
    prefix: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    mappings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)


class WrittenTables:
    """The tables of the generation to which `records` is bound."""

    def __init__(
        self,
        options: OpenSearchOptions,
        client: OpenSearchClient,
        records: FollowerRecords,
        indices: Indices,
        dead: DeadLetterIndex,
    ) -> None:
        self._options = options
        self._client, self._records, self._indices, self.dead = client, records, indices, dead
        self._fields: dict[str, dict[str, Any]] = {}  # by index
        self._letters_loaded = (
            0  # how many dead letters had been written when they were last loaded
        )

    def get(self, name: str) -> TableIndices | None:
        return self._records.build.tables.get(name)

    def target(self, version: Version, truncated: int | None) -> TableIndices:
        """Return the table, ready for writing."""
        table = self.get(version.name) or self.ensure_index(version)
        index = table.target
        if truncated is not None and truncated > max(index.floor, index.truncated):
            table = self._replaced(version, truncated)
            owner = LetterOwner(table.origin, version.name)
            self.dead.delete(owner, [(id_, truncated) for id_ in self.dead.of(owner)])
        return self._ready(version, table)

    def expect_key(self, changes: Changes) -> None:
        """Raise ConfigError if rows would be mixed with rows of another key; record a first key."""
        name = changes.version.name
        table = self._records.build.tables[name]
        late = table.target.late
        expect_key(changes, tuple(table.key) if table.key else None, late)
        keys = {each.schema_id: each.key for each in changes.versions}
        rows = (keys[each.schema_id] for each in changes.changes if each.seq > late)
        key = list(next(rows, ()))
        if not key or table.key is not None:
            return

        def note(record: IndexRecord) -> bool:
            table = self._records.own_build(record).tables[name]
            if table.key is None:
                table.key = key
            return table.key == key

        self._records.change(note)

    def ensure_index(self, version: Version) -> TableIndices:
        """Ensure that the table has an index for its version's documents."""
        table = self._ready(version, self.get(version.name) or self._added(version))
        index, wanted = table.target, self._properties(version)
        if index.name not in self._fields:
            self._fields[index.name] = self._indices.fields(index)
        has = self._fields[index.name]
        if any(has[name] != each for name, each in wanted.items() if name in has):
            return self._replaced(version)
        if wanted.keys() - has.keys():
            self._indices.add_fields(index, has | wanted)
            self._fields[index.name] = has | wanted
        return table

    def _added(self, version: Version) -> TableIndices:
        public = self._options.aliases.get(version.name)
        public = public or alias(self._options.prefix, version)

        def add(record: IndexRecord) -> bool:
            build = self._records.own_build(record)
            if version.name in build.tables:
                return False
            index = TableIndex(self._name(public, version, 1))
            build.tables[version.name] = TableIndices(public, self._generation, index)
            return True

        return self._changed(add, version)

    def _replaced(self, version: Version, truncated: int | None = None) -> TableIndices:
        """Start another index for the table: empty, for a truncate at this seq, or a copy."""
        seen = self._records.build.tables[version.name].made

        def replace(record: IndexRecord) -> bool:
            table = self._records.own_build(record).tables[version.name]
            if table.made != seen:  # another copy has done the same
                return False
            table.made += 1
            past, name = table.target, self._name(table.alias, version, table.made)
            if truncated is not None:
                table.source = table.key = None
                table.next = TableIndex(name, truncated=truncated)
                return True
            if table.next is not None and table.next.filled:
                table.source = table.next
            table.next = TableIndex(name, None, past.floor, past.truncated, filled=False)
            return True

        return self._ready(version, self._changed(replace, version))

    def _ready(self, version: Version, table: TableIndices) -> TableIndices:
        """Create the index that the record names, and fill it."""
        index = table.target
        if index.uuid is not None and index.filled:
            return table
        aliases = [self._indices.name(self._generation)]
        if index is table.now and self._records.known.generation == self._generation:
            aliases.append(table.alias)
        uuid = self._indices.create(index, self._properties(version), *aliases)
        if not index.filled:
            self._fill(LetterOwner(table.origin, version.name), table.source or table.now, index)

        def note(record: IndexRecord) -> bool:
            table = self._records.own_build(record).tables[version.name]
            target = table.target
            if target.name != index.name or (target.uuid, target.filled) == (uuid, True):
                return False
            target.uuid, target.filled, table.source = uuid, True, None
            return True

        return self._changed(note, version)

    def _changed(self, do: Callable[[IndexRecord], bool], version: Version) -> TableIndices:
        return self._records.own_build(self._records.change(do)).tables[version.name]

    def _fill(self, owner: LetterOwner, old: TableIndex, new: TableIndex) -> None:
        """Copy the documents; retry those that were refused so far."""
        for refused in self._indices.fill(old, new):
            self.reject(owner, new, refused)
        seqs = self.dead.of(owner)
        letters = self.dead.documents(owner, seqs)
        retried = [Action(id_, seqs[id_], document) for id_, document in letters.items()]
        outcome = send(self._client, new.write_alias, retried)
        self.dead.delete(owner, self.passed(owner, new, retried, outcome))

    def passed(
        self, owner: LetterOwner, index: TableIndex, actions: Sequence[Action], outcome: BulkOutcome
    ) -> list[tuple[bytes, int]]:
        """Return the ids and versions of those actions after which no dead letter is needed."""
        refused = {each.action.id for each in outcome.refused}
        # Sent again, a document may be stale without being there: OpenSearch compares versions
        # before it refuses some documents, and the delete of a refused one has its version.
        letters = self.dead.of(owner)
        again = [
            each.id
            for each, there in outcome.stale
            if there <= each.version == letters.get(each.id)
        ]
        if again:
            found = self._indices.documents(index, again)
            refused |= set(again) - {msgspec.json.encode(each.id) for each in found}
        return [(each.id, each.version) for each in actions if each.id not in refused]

    def reject(self, owner: LetterOwner, index: TableIndex, refused: Sequence[Refused]) -> int:
        """Store refused documents as dead letters; return how many were new to the store.

        The dead letters are written first, so that none is missing after a crash in between.
        """
        self.dead.put(owner, index.name, refused)

        def count(record: IndexRecord) -> bool:
            self._records.own_build(record).letters += len(refused)
            return True

        self._letters_loaded = self._records.own_build(self._records.change(count)).letters
        return self._delete_rejected(
            owner, index, [(action.id, action.version) for action, _ in refused]
        )

    def _delete_rejected(
        self, owner: LetterOwner, index: TableIndex, letters: Sequence[tuple[bytes, int]]
    ) -> int:
        """Delete the documents that have a dead letter; delete dead letters that were late."""
        outcome = send(self._client, index.write_alias, [Action(*each, None) for each in letters])
        late = [(each.id, each.version) for each, there in outcome.stale if there > each.version]
        self.dead.delete(owner, late)
        return outcome.applied

    def clear_cache(self) -> None:
        """Clear the cached dead letters and fields."""
        self._fields.clear()
        self.dead.clear()
        self._letters_loaded = 0

    def load_letters(self) -> None:
        """Load the dead letters that other copies have written, if there are any.

        Fixes documents and dead letters that another copy wrote without knowing of each other.
        """
        build = self._records.build
        if build.letters == self._letters_loaded:
            return
        self.dead.load()
        for name, table in build.tables.items():
            owner = LetterOwner(table.origin, name)
            if table.target.uuid is not None and table.target.filled:
                self._delete_rejected(owner, table.target, list(self.dead.of(owner).items()))
        self._letters_loaded = build.letters

    def _name(self, public: str, version: Version, number: int) -> str:
        return f"{public}-g{self._generation}-{digest(self._properties(version))}-{number}"

    def _properties(self, version: Version) -> dict[str, Any]:
        return properties(version, self._options.mappings.get(version.name, {}))

    @property
    def _generation(self) -> int:
        assert self._records.generation is not None
        return self._records.generation
