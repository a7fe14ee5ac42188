"""OpenSearch as a follower's store: one index per table, with an alias, one document per row.

- A document is the row as in the log, with its key as `_id` (`mapping`), and its seq is its
  external version: OpenSearch drops late changes and remembers deletes.
- The applied frontier, `reached` and the indices in use are in one record (`record`), changed by
  compare-and-set. So there is no lock, and two copies only repeat each other's work.
- A commit makes a cut visible to searches: refresh, aliases, then the record.
- A truncate, or a changed type, replaces the index by a new one (`tables`).
- A document that OpenSearch refuses becomes a dead letter (`dead`).
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Self

import msgspec

from cdc.errors import ConfigError, StoreLostError, SwitchedError
from lockstep.sinks.contract import (
    Applied,
    Changes,
    ShadowBuild,
    StoreState,
    Version,
    expect_alone,
    expect_keyed,
    expect_tables,
)
from lockstep.sinks.opensearch.bulk import Action, send
from lockstep.sinks.opensearch.client import OpenSearchClient
from lockstep.sinks.opensearch.dead import DeadLetterIndex, LetterOwner
from lockstep.sinks.opensearch.generations import (
    clear_other_aliases,
    drop,
    finish_switch,
    generations,
    restore_aliases,
    switch,
)
from lockstep.sinks.opensearch.indices import Indices
from lockstep.sinks.opensearch.mapping import Documents, Ids, index_part, key_of
from lockstep.sinks.opensearch.record import (
    Build,
    FollowerRecords,
    IndexRecord,
    new_build,
)
from lockstep.sinks.opensearch.tables import OpenSearchOptions, WrittenTables

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from lockstep.sinks.opensearch.record import TableIndices

# Seconds between checks that every index is still the one that was created.
CHECK_SECONDS: Final = 15.0
_IDS_AT_ONCE: Final = 1_000


class OpenSearchSink:
    """The sink of one follower."""

    complete_rows = True
    parallel = True

    def __init__(self, options: OpenSearchOptions, shadow: ShadowBuild | None = None) -> None:
        self.options, self._shadow = options, shadow
        generation = shadow.generation if shadow else None
        self._connect((generation, None, shadow is not None))

    def _connect(self, opened: tuple[int | None, str | None, bool]) -> None:
        options = self.options
        prefix, follower = index_part(options.prefix), options.follower
        self.client = OpenSearchClient(options.url, options.user, options.password, options.ca_file)
        ours = f"{prefix}-followers"
        self._records = FollowerRecords(self.client, ours, follower, options.pipeline, opened)
        self._indices = Indices(self.client, f"{ours}-{follower}", options.settings)
        self._dead = DeadLetterIndex(self.client, f"{prefix}-dead", follower)
        self._tables = WrittenTables(options, self.client, self._records, self._indices, self._dead)
        # Since the last commit: the cut's tables, and the index to which each was written.
        self._cut: set[str] = set()
        self._written: dict[str, str] = {}
        self._refused: dict[str, ConfigError] | None = None  # key errors; None in an executor
        self._checked = 0.0
        # Indices that the record does not name, left by a writer that died.
        self._strays: list[str] = []

    def __getstate__(self) -> dict[str, object]:
        return {"options": self.options, "shadow": self._shadow, "opened": self._records.opened}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.options, self._shadow = state["options"], state["shadow"]  # type: ignore[assignment]
        self._connect(state["opened"])  # type: ignore[arg-type]

    # --- the contract ---

    def open(self) -> StoreState | None:
        self._records.prepare()
        present = self._indices.present()  # before the record, which names new ones first
        record = self._records.load()
        if record is None:
            if present and self._shadow is None:  # readers see them until a rebuild is complete
                raise StoreLostError(
                    f"{len(present)} indices of {self.options.follower} exist, and no record"
                )
            self._records.create(self._records.first(1))
            record = self._records.known
        record = finish_switch(self._records, self._indices, record)
        clear_other_aliases(self._records, self._indices, record)
        generation, build = self._ensure_build(record)
        self._records.bind(generation, build)
        self._tables.clear_cache()
        # Of a cut that was not ended: it is written again, maybe into other indices.
        self._cut.clear()
        self._written.clear()
        self._check()
        named = {index.name for index in self._records.known.indices()}
        # Deleted when the first cut starts: only then is it certain that the record is the newest.
        self._strays = [] if self._shadow else sorted(present.keys() - named)
        if build.applied is None and not build.reached:
            return None
        nothing = Applied.beginning(self.options.pipeline, generation)
        applied = Applied.from_fields(build.applied) if build.applied else nothing
        return StoreState(applied, build.reached, build.replacing > applied.seq)

    def start_over(self, generation: int) -> None:
        self._records.prepare()
        self._records.replace(self._records.first(generation))

    def histories(self) -> frozenset[str]:
        return frozenset()

    def begin(self, reached: int, versions: Sequence[Version], above: int | None = None) -> None:
        expect_keyed(versions, "an index has each row under its key")
        self._indices.delete(self._strays)
        self._refused, self._strays = {}, []
        if not versions:  # nothing will be written
            return

        def raise_reached(record: IndexRecord) -> bool:
            build = self._records.own_build(record)
            before = build.reached, build.replacing
            if above is None:
                build.replacing = max(reached, build.replacing)
            else:
                expect_alone(
                    above,
                    reached,
                    applied=build.applied["seq"] if build.applied else 0,
                    started=build.reached,
                    replacing=build.replacing,
                )
            build.reached = max(reached, build.reached)
            return (build.reached, build.replacing) != before

        self._records.change(raise_reached)
        if time.monotonic() > self._checked + CHECK_SECONDS:
            self._check()
        with self._unless_moved():
            self._tables.load_letters()
            for version in {each.name: each for each in versions}.values():
                if self._holds(version):
                    self._cut.add(version.name)
                    # Also what executors write is in this index, or refused at the commit.
                    self._written[version.name] = self._tables.ensure_index(version).target.name

    def write(self, changes: Changes) -> int:
        if not self._holds(changes.version):
            return 0
        with self._unless_moved():
            table = self._tables.target(changes.version, changes.truncated)
            self._expect_key(changes)
            return self._apply(changes, table)

    def commit(self, applied: Applied) -> None:
        for refused in (self._refused or {}).values():
            raise refused
        build = self._records.build
        with self._unless_moved():
            self._indices.refresh(sorted(build.tables[name].target.name for name in self._cut))
        # The indices that replace another: they hold everything up to this frontier, and nothing
        # has been written above it.
        due = build.tables if build.reached <= applied.seq else {}
        moves = {name: table for name, table in due.items() if table.next is not None}
        if moves and not self._records.is_newest():
            self._records.own_build(self._records.known)  # raises if it is no longer current
        if self._records.known.generation == self._records.generation:
            with self._unless_moved():
                self._indices.show(
                    (table.alias, table.target.name, [table.now.name]) for table in moves.values()
                )

        def advance(record: IndexRecord) -> bool:
            build = self._records.own_build(record)
            self._refuse_other_targets(build)
            for name, moved in moves.items():
                table = build.tables[name]
                if table.next is not None and moved.next == table.next:
                    table.now, table.next = table.next, None
            before = Applied.from_fields(build.applied) if build.applied else None
            if before is None or (applied.seq, applied.lsn) > (before.seq, before.lsn):
                build.applied = applied.fields
                build.reached = max(build.reached, applied.seq)
                return True
            return bool(moves)

        self._records.change(advance)
        self._indices.delete(sorted(table.now.name for table in moves.values()))
        self._cut.clear()
        self._written.clear()

    def rows(self, version: Version, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        table = self._tables.get(version.name)
        if table is None:
            return {}
        ids, documents = Ids(version.key), Documents(version.columns)
        wanted = {ids.of(key): key for key in keys}
        found = {}
        with self._unless_moved():
            self._tables.load_letters()
            for some in _some(list(wanted)):
                for each in self._indices.documents(table.target, some):
                    key = wanted[msgspec.json.encode(each.id)]
                    found[key] = documents.row(bytes(each.source))
            letters = self._dead.documents(LetterOwner(table.origin, version.name), wanted)
        return found | {wanted[id_]: documents.row(each) for id_, each in letters.items()}

    def close(self) -> None:
        self.client.close()

    # --- generations ---

    def generations(self) -> Mapping[int, Applied | None]:
        """Return every generation in the store and its applied frontier."""
        return generations(self._records.load())

    def current(self) -> int | None:
        """Return the generation that readers see."""
        record = self._records.load()
        return record.generation if record else None

    def at(self, generation: int, tables: frozenset[str] | None = None) -> Self:
        """Return a sink of a generation, which `open` creates; of some tables only, if given."""
        return type(self)(self.options, ShadowBuild(generation, tables))

    def switch(self, generation: int, former: Applied | None = None) -> None:
        """Switch readers to a generation; the previous one is kept."""
        self._records.load()
        switch(self._records, self._indices, generation, former)

    def drop(self, generation: int) -> None:
        """Delete what only that generation has."""
        drop(self._records, self._indices, self._dead, generation)

    def contents(self, version: Version) -> Iterator[tuple[bytes, int, bytes]]:
        """Yield key, seq and row of everything in a table, dead letters too, in any order."""
        table = self._tables.get(version.name)
        if table is None:
            return
        self._tables.load_letters()
        ids, documents = Ids(version.key), Documents(version.columns)
        for each in self._indices.contents(table.target):
            row = documents.row(bytes(each.source))
            yield key_of(version, row, ids, each.id), each.version, row
        owner = LetterOwner(table.origin, version.name)
        seqs = self._dead.of(owner)
        for some in _some(list(seqs)):
            for id_, document in self._dead.documents(owner, some).items():
                row = documents.row(document)
                yield key_of(version, row, ids, msgspec.json.decode(id_)), seqs[id_], row

    # --- within ---

    def _ensure_build(self, record: IndexRecord) -> tuple[int, Build]:
        """Return this copy's generation; create it if it is missing."""
        if self._shadow is None:
            return record.generation, record.builds[str(record.generation)]
        generation, tables = self._shadow

        def add(found: IndexRecord) -> bool:
            if found.build(generation):
                return False
            found.builds[str(generation)] = new_build(tables)
            return True

        record = self._records.change(add)
        build = record.builds[str(generation)]
        if record.generation != generation:
            expect_tables(generation, build.only, tables)
        return generation, build

    def _holds(self, version: Version) -> bool:
        """Return whether this copy writes the table: it may be a build of some tables only."""
        only = self._records.build.only
        return only is None or version.name in only

    def _check(self) -> None:
        """Raise StoreLostError if an index that the newest record names is missing.

        The record names the tables that have lost one: readers find nothing of these.
        """
        while True:
            try:
                self._indices.check(self._records.build)
            except StoreLostError as error:
                if self._records.is_newest():
                    self._mark_lost(error.tables or frozenset())
                    raise
            else:
                self._mark_lost(frozenset())
                restore_aliases(self._records, self._indices)
                self._checked = time.monotonic()
                return

    def _mark_lost(self, names: frozenset[str]) -> None:
        def mark(record: IndexRecord) -> bool:
            tables = self._records.own_build(record).tables
            changed = [table for name, table in tables.items() if table.lost != (name in names)]
            for table in changed:
                table.lost = not table.lost
            return bool(changed)

        if names != {name for name, table in self._records.build.tables.items() if table.lost}:
            self._records.change(mark)

    @contextmanager
    def _unless_moved(self) -> Iterator[None]:
        """Raise SwitchedError if a missing index was replaced by another copy."""
        try:
            yield
        except StoreLostError as error:
            self._records.load()
            self._check()
            raise SwitchedError(
                f"another copy of {self.options.follower} writes to other indices"
            ) from error

    def _refuse_other_targets(self, build: Build) -> None:
        for name, index in self._written.items():
            if build.tables[name].target.name != index:
                raise SwitchedError(f"another copy of the follower writes {name} elsewhere")

    def _expect_key(self, changes: Changes) -> None:
        """Record an error for rows with another key; `commit` raises it if no truncate follows."""
        name = changes.version.name
        if self._refused is not None and changes.truncated is not None:
            self._refused.pop(name, None)
        try:
            self._tables.expect_key(changes)
        except ConfigError as error:
            if self._refused is None:
                raise
            self._refused.setdefault(name, error)

    def _apply(self, changes: Changes, table: TableIndices) -> int:
        version, index = changes.version, table.target
        if version.name not in self._cut:  # in an executor: `begin` ran in the driver
            self._tables.load_letters()
        owner = LetterOwner(table.origin, version.name)
        self._cut.add(version.name)
        self._written[version.name] = index.name
        ids, documents, late = Ids(version.key), Documents(version.columns), index.late
        actions = [
            Action(
                ids.of(change.key),
                change.seq,
                None if change.row is None else documents.document(change.row),
            )
            for change in changes.changes
            if change.key is not None and change.seq > late
        ]
        outcome = send(self.client, index.write_alias, actions)
        new = outcome.applied
        if outcome.refused:
            new += self._tables.reject(owner, index, outcome.refused)
        if self._dead.of(owner):
            self._dead.delete(owner, self._tables.passed(owner, index, actions, outcome))
        return new


def _some(ids: list[bytes]) -> Iterable[list[bytes]]:
    for at in range(0, len(ids), _IDS_AT_ONCE):
        yield ids[at : at + _IDS_AT_ONCE]
