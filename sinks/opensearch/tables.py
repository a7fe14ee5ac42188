"""The index to which each table of a generation is written, following versions and truncates.

- A new column becomes a new field of the same index.
- A changed mapping of a field needs another index: it is created next to the previous one, filled
  from that with the documents' versions, and replaces it at the commit of the cut.
- A truncate needs an empty index, and its seq is the floor below which nothing is written any more.

The record names an index before it is created, and records its creation before it is written to: so
any copy of the follower can continue where another has died.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sinks.contract import expect_key
from sinks.opensearch.bulk import Action, Refused, send
from sinks.opensearch.dead import DeadLetters, Shelf
from sinks.opensearch.mapping import alias, digest, properties
from sinks.opensearch.record import Place, Record, Records, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sinks.contract import Changes, Version
    from sinks.opensearch.client import Client
    from sinks.opensearch.indices import Indices


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


class Tables:
    """The tables of the generation to which `records` is bound."""

    def __init__(
        self,
        options: OpenSearchOptions,
        client: Client,
        records: Records,
        indices: Indices,
        dead: DeadLetters,
    ) -> None:
        self._options = options
        self._client, self._records, self._indices, self.dead = client, records, indices, dead
        self._fields: dict[str, dict[str, Any]] = {}  # by index
        self._learnt = 0  # how many dead letters had been written when they were last loaded

    def get(self, name: str) -> Table | None:
        return self._records.build.tables.get(name)

    def target(self, version: Version, truncated: int | None) -> Table:
        """Return the table, ready for writing."""
        table = self.get(version.name) or self.follow(version)
        if truncated is not None and truncated > table.target.floor:
            table = self._replaced(version, floor=truncated)
            shelf = Shelf(table.origin, version.name)
            self.dead.take_back(shelf, [(id_, truncated) for id_ in self.dead.of(shelf)])
        return self._ready(version, table)

    def expect_key(self, changes: Changes) -> None:
        """Raise ConfigError if rows would be mixed with rows of another key; record a first key."""
        name = changes.version.name
        table = self._records.build.tables[name]
        expect_key(changes, tuple(table.key) if table.key else None, table.target.floor)
        keys = {each.schema_id: each.key for each in changes.versions}
        rows = (keys[each.schema_id] for each in changes.changes if each.seq > table.target.floor)
        key = list(next(rows, ()))
        if not key or table.key is not None:
            return

        def note(record: Record) -> bool:
            table = self._records.mine(record).tables[name]
            if table.key is None:
                table.key = key
            return table.key == key

        self._records.change(note)

    def follow(self, version: Version) -> Table:
        """Ensure that the table has an index for its version's documents."""
        table = self._ready(version, self.get(version.name) or self._added(version))
        place, wanted = table.target, self._properties(version)
        if place.index not in self._fields:
            self._fields[place.index] = self._indices.fields(place)
        has = self._fields[place.index]
        if any(has[name] != each for name, each in wanted.items() if name in has):
            return self._replaced(version, floor=place.floor, filled=False)
        if wanted.keys() - has.keys():
            self._indices.widen(place, has | wanted)
            self._fields[place.index] = has | wanted
        return table

    def _added(self, version: Version) -> Table:
        public = self._options.aliases.get(version.name)
        public = public or alias(self._options.prefix, version)

        def add(record: Record) -> bool:
            build = self._records.mine(record)
            if version.name in build.tables:
                return False
            place = Place(self._name(public, version, 1))
            build.tables[version.name] = Table(public, self._generation, place)
            return True

        return self._changed(add, version)

    def _replaced(self, version: Version, *, floor: int, filled: bool = True) -> Table:
        """Start another index for the table: empty, for a truncate at `floor`, or a copy."""
        seen = self._records.build.tables[version.name].made

        def replace(record: Record) -> bool:
            table = self._records.mine(record).tables[version.name]
            if table.made != seen:  # another copy has done the same
                return False
            if filled:
                table.source = table.key = None
            elif table.next is not None and table.next.filled:
                table.source = table.next
            table.made += 1
            name = self._name(table.alias, version, table.made)
            table.next = Place(name, floor=floor, filled=filled)
            return True

        return self._ready(version, self._changed(replace, version))

    def _ready(self, version: Version, table: Table) -> Table:
        """Create the index that the record names, and fill it."""
        place = table.target
        if place.uuid is not None and place.filled:
            return table
        aliases = [self._indices.name(self._generation)]
        if place is table.now and self._records.known.generation == self._generation:
            aliases.append(table.alias)
        made = self._indices.make(place, self._properties(version), *aliases)
        if not place.filled:
            self._fill(Shelf(table.origin, version.name), table.source or table.now, place)

        def note(record: Record) -> bool:
            table = self._records.mine(record).tables[version.name]
            target = table.target
            if target.index != place.index or (target.uuid, target.filled) == (made, True):
                return False
            target.uuid, target.filled, table.source = made, True, None
            return True

        return self._changed(note, version)

    def _changed(self, do: Callable[[Record], bool], version: Version) -> Table:
        return self._records.mine(self._records.change(do)).tables[version.name]

    def _fill(self, shelf: Shelf, old: Place, new: Place) -> None:
        """Copy the documents; retry those that were refused so far."""
        for refused in self._indices.fill(old, new):
            self.bury(shelf, new, refused)
        seqs = self.dead.of(shelf)
        letters = self.dead.documents(shelf, seqs)
        tried = [Action(id_, seqs[id_], document) for id_, document in letters.items()]
        unfit = {each.action.id for each in send(self._client, new.door, tried).refused}
        passed = [(each.id, each.version) for each in tried if each.id not in unfit]
        self.dead.take_back(shelf, passed)

    def bury(self, shelf: Shelf, place: Place, refused: Sequence[Refused]) -> int:
        """Store refused documents as dead letters; return how many were new to the store.

        The dead letters are written first, so that none is missing after a crash in between.
        """
        self.dead.put(shelf, place.index, refused)

        def count(record: Record) -> bool:
            self._records.mine(record).letters += len(refused)
            return True

        self._learnt = self._records.mine(self._records.change(count)).letters
        return self._empty(shelf, place, [(action.id, action.version) for action, _ in refused])

    def _empty(self, shelf: Shelf, place: Place, letters: Sequence[tuple[bytes, int]]) -> int:
        """Delete the documents that have a dead letter; delete dead letters that were late."""
        outcome = send(self._client, place.door, [Action(*each, None) for each in letters])
        late = [(each.id, each.version) for each, there in outcome.stale if there > each.version]
        self.dead.take_back(shelf, late)
        return outcome.applied

    def forget(self) -> None:
        """Clear the cached dead letters and fields."""
        self._fields.clear()
        self.dead.forget()
        self._learnt = 0

    def learn(self) -> None:
        """Load the dead letters that other copies have written, if there are any.

        Fixes documents and dead letters that another copy wrote without knowing of each other.
        """
        build = self._records.build
        if build.letters == self._learnt:
            return
        self.dead.learn()
        for name, table in build.tables.items():
            shelf = Shelf(table.origin, name)
            if table.target.uuid is not None and table.target.filled:
                self._empty(shelf, table.target, list(self.dead.of(shelf).items()))
        self._learnt = build.letters

    def _name(self, public: str, version: Version, number: int) -> str:
        return f"{public}-g{self._generation}-{digest(self._properties(version))}-{number}"

    def _properties(self, version: Version) -> dict[str, Any]:
        return properties(version, self._options.mappings.get(version.name, {}))

    @property
    def _generation(self) -> int:
        assert self._records.generation is not None
        return self._records.generation
