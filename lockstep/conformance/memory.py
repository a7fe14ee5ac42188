"""A store in this process's memory: the contract in its simplest form, for tests.

A `Memory` outlives its sinks, as a server outlives its clients; sinks of the same name share one.
So it is never passed to executors, which are other processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from cdc.errors import ConfigError, StoreLostError, SwitchedError
from lockstep.sinks.contract import (
    Applied,
    Change,
    Changes,
    ShadowBuild,
    StoreState,
    expect_alone,
    expect_tables,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lockstep.sinks.contract import Version

Row = dict[str, Any]


@dataclass(slots=True)
class MemoryTable:
    """Rows by key, each with the seq that wrote it; None is a tombstone."""

    rows: dict[bytes, tuple[int, Row | None]] = field(default_factory=dict)
    keyless: list[Row] = field(default_factory=list)
    # Every change, if a history is kept.
    history: dict[int, Change] = field(default_factory=dict)
    floor: int = 0  # a truncate's seq: changes below it are late
    newest: int = 0  # for a table without a key, whose changes come in seq order


@dataclass(slots=True)
class Memory:
    """The store's content; `build` changes after the store was lost."""

    tables: dict[str, MemoryTable] = field(default_factory=dict)
    applied: Applied | None = None
    reached: int = 0
    replacing: int = 0  # the newest `reached` of a cut that is no difference
    generation: int = 1
    build: object = field(default_factory=object)
    lost: bool = False
    # The generations that readers do not see, by number; then the tables of this one, if not all.
    shadows: dict[int, Memory] = field(default_factory=dict)
    only: frozenset[str] | None = None

    def rows(self, table: str) -> dict[bytes, Row]:
        """Return what a reader sees of a table."""
        known = self.tables.get(table, MemoryTable())
        return {key: row for key, (_, row) in known.rows.items() if row is not None}


STORES: Final[dict[str, Memory]] = {}


class MemorySink:
    """A sink on the store of that name."""

    parallel = False

    def __init__(
        self,
        name: str,
        *,
        complete_rows: bool = False,
        histories: frozenset[str] = frozenset(),
        shadow: ShadowBuild | None = None,
    ) -> None:
        self.complete_rows = complete_rows
        self._name, self._histories, self._shadow = name, histories, shadow
        self._build: object = None

    def open(self) -> StoreState | None:
        store = STORES.setdefault(self._name, Memory())
        if self._shadow is not None and self._shadow[0] != store.generation:
            number, only = self._shadow
            store = store.shadows.setdefault(number, Memory(generation=number, only=only))
            expect_tables(number, store.only, only)
        if store.lost:
            raise StoreLostError(f"the store {self._name} was flushed", hint="")
        self._build = store.build
        if store.applied is None and not store.reached:
            return None
        nothing = Applied.beginning("", store.generation)
        applied = store.applied or nothing
        return StoreState(applied, store.reached, store.replacing > applied.seq)

    def start_over(self, generation: int) -> None:
        STORES[self._name] = Memory(generation=generation)

    def histories(self) -> frozenset[str]:
        return self._histories

    def begin(self, reached: int, versions: Sequence[Version], above: int | None = None) -> None:
        store = self._store
        if above is None:
            store.replacing = max(store.replacing, reached)
        else:
            expect_alone(
                above,
                reached,
                applied=store.applied.seq if store.applied else 0,
                started=store.reached,
                replacing=store.replacing,
            )
        for version in versions:
            store.tables.setdefault(version.name, MemoryTable())
        store.reached = max(store.reached, reached)

    def write(self, changes: Changes) -> int:
        if self._store.only is not None and changes.version.name not in self._store.only:
            return 0
        table = self._store.tables.setdefault(changes.version.name, MemoryTable())
        if changes.truncated is not None:
            _truncate(table, changes.truncated)
        apply = _apply
        if changes.version.name in self._histories:
            apply = _append
        elif not changes.version.key:
            apply = _apply_keyless
        return sum(apply(table, change) for change in changes.changes)

    def commit(self, applied: Applied) -> None:
        store = self._store
        before = store.applied
        if before is None or (applied.seq, applied.lsn) >= (before.seq, before.lsn):
            store.applied = applied
        store.reached = max(store.reached, applied.seq)

    def rows(self, version: Version, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        stored = self._store.rows(version.name)
        return {key: msgspec.json.encode(stored[key]) for key in keys if key in stored}

    def close(self) -> None:
        """Do nothing: there are no connections."""

    def generations(self) -> Mapping[int, Applied | None]:
        store = STORES.get(self._name)
        every = [store, *store.shadows.values()] if store else []
        return {each.generation: each.applied for each in every}

    def current(self) -> int | None:
        return STORES[self._name].generation if self._name in STORES else None

    def at(self, generation: int, tables: frozenset[str] | None = None) -> Self:
        return type(self)(
            self._name,
            complete_rows=self.complete_rows,
            histories=self._histories,
            shadow=ShadowBuild(generation, tables),
        )

    def switch(self, generation: int, former: Applied | None = None) -> None:
        old = STORES[self._name]
        if generation == old.generation:
            return
        new = old.shadows.pop(generation)
        if new.only is not None and old.applied and new.applied:
            rebuilt = {name: new.tables[name] for name in new.only & new.tables.keys()}
            new.tables = old.tables | rebuilt
            new.reached = max(old.reached, new.reached, old.applied.seq, new.applied.seq)
            new.replacing = max(old.replacing, new.replacing)
            before = old.applied.replaced_by(former)
            new.applied = min(before, new.applied, key=lambda each: (each.seq, each.lsn))
            new.applied = new.applied._replace(generation=generation)
            new.only = None
        new.shadows, old.shadows = {**old.shadows, old.generation: old}, {}
        STORES[self._name] = new

    def drop(self, generation: int) -> None:
        if generation == self.current():
            raise ConfigError(f"readers see generation {generation}", hint="switch first")
        STORES[self._name].shadows.pop(generation, None)

    def contents(self, version: Version) -> Iterator[tuple[bytes, int, bytes]]:
        table = self._store.tables.get(version.name, MemoryTable())
        for key, (seq, row) in list(table.rows.items()):
            if row is not None:
                yield key, seq, msgspec.json.encode(row)

    @property
    def _store(self) -> Memory:
        current = STORES[self._name]
        every = [current, *current.shadows.values()]
        store = next((each for each in every if each.build is self._build), None)
        if store is None or store.lost:
            raise StoreLostError(f"the store {self._name} is not the one that was opened", hint="")
        if self._shadow is None and store is not current:
            raise SwitchedError(f"readers of {self._name} see another generation")
        return store


def _truncate(table: MemoryTable, seq: int) -> None:
    table.floor = max(table.floor, seq)
    table.rows = {key: row for key, row in table.rows.items() if row[0] >= seq}
    if table.newest < seq:
        table.newest = seq - 1
        table.keyless.clear()


def _apply(table: MemoryTable, change: Change) -> bool:
    assert change.key is not None
    seq, stored = table.rows.get(change.key, (0, None))
    if change.seq <= seq or change.seq < table.floor:
        return False
    row = None if change.row is None else msgspec.json.decode(change.row, type=Row)
    if row is not None:
        row = {name: value for name, value in row.items() if name not in change.unchanged}
        row |= {name: value for name, value in (stored or {}).items() if name in change.unchanged}
    table.rows[change.key] = (change.seq, row)
    return True


def _apply_keyless(table: MemoryTable, change: Change) -> bool:
    """Replace the old row, or add one: only the values identify a row."""
    if change.seq <= table.newest:
        return False
    table.newest = change.seq
    old = change.before and msgspec.json.decode(change.before, type=Row)
    if old:
        table.keyless.remove(old)
    if change.row is not None:
        row = msgspec.json.decode(change.row, type=Row)
        table.keyless.append(row | {name: (old or {})[name] for name in change.unchanged})
    return True


def _append(table: MemoryTable, change: Change) -> bool:
    is_new = change.seq not in table.history
    table.history[change.seq] = change
    return is_new
