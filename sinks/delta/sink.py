"""Mirrors in Delta Lake: one per table, all of them at one frontier after each batch.

A cut is gathered first: `write` only collects it, and nothing is in any table until `commit`
applies it to all tables that it changes, several at a time, one Delta commit each. After the last
one the row of `_frontiers` records each mirror's version at the cut's end. If the process is killed
in between, some mirrors are ahead of that row, which its readers do not see; the next cut reaches
at least as far as each of them.

Two copies of a follower: each commit is a Delta transaction of the same app, so the later one
fails, reloads the table, and finds the work done. A copy that lags skips the changes that the
mirrors already hold, and writes no row while any mirror is ahead of its own frontier. So no deleted
row reappears, and no tombstones are needed.

A mirror that cannot take its changes holds back the frontier, which all tables share, and nothing
else: the cut is applied to the other mirrors first, and the error names the table.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from cdc.errors import (
    CDCError,
    ConfigError,
    Policy,
    StoreLostError,
    SwitchedError,
    UnavailableError,
)
from cdc.events import table_name, unescaped_table
from lockstep.sinks.contract import (
    Applied,
    Change,
    Changes,
    StoreState,
    expect_tables,
    renamed_key,
)
from lockstep.sinks.delta import (
    actions,
    buckets,
    erasing,
    generations,
    key_forms,
    lake,
    layout,
)
from lockstep.sinks.delta import json as delta_json
from lockstep.sinks.delta import keys as delta_keys
from lockstep.sinks.delta import work as delta_work
from lockstep.sinks.delta.appliers import Appliers
from lockstep.sinks.delta.frontiers import FrontierTable
from lockstep.sinks.delta.gathered import GatheredChanges
from lockstep.sinks.delta.idle import IdleFrontier
from lockstep.sinks.delta.rows import batch
from lockstep.sinks.delta.table import Keeper, Mirror
from lockstep.sinks.delta.upkeep import MirrorUpkeep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from lockstep.sinks.contract import Altered, Version
    from lockstep.sinks.delta.actions import Action
    from lockstep.sinks.delta.erasing import Erased
    from lockstep.sinks.delta.frontier_rows import FrontierRow
    from lockstep.sinks.delta.settings import DeltaSettings
    from lockstep.sinks.delta.targets import Target

T = TypeVar("T")
R = TypeVar("R")

# How many commits run concurrently: on an object store they wait for it more than they compute.
_AT_ONCE: Final = 16
# For how long at least the generation that a repair has replaced is kept, if readers used it:
# documents continue from a frontier that may be in it only.
UNREAD_SECONDS: Final = 3_600.0


class DeltaSink:
    """The mirrors of one follower: of the current generation, or of the one given to `at`."""

    complete_rows = False
    parallel = False

    def __init__(
        self,
        settings: DeltaSettings,
        generation: int | None = None,
        tables: frozenset[str] | None = None,
    ) -> None:
        self._settings, self._generation, self._tables = settings, generation, tables
        self._root = settings.path
        self.frontiers = FrontierTable(settings.path, settings.storage, settings.owner)
        # The newest frontier of a generation that is no longer current, and therefore read-only.
        self._past: FrontierRow | None = None
        self.mirrors: dict[str, Mirror] = {}
        self._pending: dict[str, GatheredChanges] = {}
        self._altered: dict[str, list[Altered]] = {}  # in the cut
        self._staged: dict[str, tuple[Target, list[Action]]] = {}
        # The mirrors whose versions may not be those in the newest frontier.
        self._touched: set[str] = set()
        self._upkeep = MirrorUpkeep(
            settings.optimize_minutes, settings.vacuum_hours, settings.storage
        )
        self.appliers = Appliers(settings, self._upkeep)
        self._pool: ThreadPoolExecutor | None = None
        # A shadow build's frontiers are compared with the log's: none is held back.
        seconds = settings.idle_seconds if generation is None else 0.0
        self._idle = IdleFrontier(seconds, self._write_idle)

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...]]:
        return type(self), (self._settings, self._generation, self._tables)

    def open(self) -> StoreState | None:
        with self._idle.lock:
            self._idle.forget()
            try:
                return self._open()
            except SwitchedError:
                if self._generation is not None or not generations.finish_switch(self._settings):
                    raise
            return self._open()

    def _open(self) -> StoreState | None:
        self.mirrors.clear()
        self._touched.clear()
        self._forget_cut()
        mine = self._settings
        self._root, self._past = generations.place(mine, self._generation)
        if self._past is not None:
            return StoreState(self._past.applied, self._past.applied.seq)
        self.frontiers = FrontierTable(self._root, mine.storage, mine.owner)
        self.frontiers.open(self._generation or 1, self._tables)
        if self._generation and self._root != mine.path.rstrip("/"):
            expect_tables(self._generation, self.frontiers.tables, self._tables)
        generations.clear(mine, self.frontiers.generation, self._root)
        newest, reached = self.frontiers.newest, self.frontiers.reached
        if newest is None:
            nothing = Applied.beginning(mine.pipeline, self.frontiers.generation)
            return StoreState(nothing, reached) if reached else None
        found = dict(self._every(self._seq_of, list(newest.versions.items())))
        if lost := [place for place, seq in found.items() if seq is None]:
            raise StoreLostError(
                f"the mirror {self.mirror(lost[0]).path} was replaced or restored to an older"
                " version",
                tables=frozenset(table_name(*unescaped_table(each)) for each in lost),
            )
        self._touched |= newest.versions.keys()
        return StoreState(newest.applied, max(reached, *filter(None, found.values()), 0))

    def _seq_of(self, place: str, version: int) -> tuple[str, int | None]:
        """Return a mirror's place and seq; None if it is not at that version at least."""
        mirror = self.mirror(place)
        is_there = mirror.find() and mirror.table.version() >= version
        return place, mirror.seq if is_there else None

    def start_over(self, generation: int) -> None:
        self.frontiers.start_over(generation)

    def absent(self) -> str | None:
        """Return the path if nothing exists there: perhaps a volume that is not mounted."""
        return None if generations.holds_anything(self._settings) else self._settings.path

    def histories(self) -> frozenset[str]:
        return self._settings.history

    def begin(self, reached: int, versions: Sequence[Version], above: int | None = None) -> None:
        if self._past is not None:
            raise ConfigError(
                f"generation {self._past.generation} of {self._root} is no longer written",
                hint="the current one is: open the follower without a generation",
            )
        self._forget_cut()
        newest = {version.topic: version for version in versions if self._keeps(version)}
        if above is not None:
            self._idle.flush()
        with self._idle.lock:
            self.frontiers.begin(reached if newest else 0, above)
        places = [(self._place(each), each) for each in newest.values()]
        self._touched |= {place for place, _ in places}
        self._every(self._find_or_create, places)

    def _find_or_create(self, place: str, version: Version) -> None:
        """Find the mirror, or create it if there was none."""
        mirror = self.mirror(place)
        mirror.name = version.name
        if not mirror.find():
            if self.frontiers.newest and place in self.frontiers.newest.versions:
                raise StoreLostError(
                    f"the Delta table {mirror.path} is missing", tables=frozenset({version.name})
                )
            mirror.ensure(version)
        elif not self.frontiers.knows(mirror.seq):
            raise StoreLostError(f"{mirror.path} is ahead of every seq that _frontiers has")
        if mirror.is_loaded:
            self._upkeep.retain(mirror)

    def write(self, changes: Changes) -> int:
        if not self._keeps(changes.version):
            return 0
        place = self._place(changes.version)
        seq = self.mirrors[place].seq
        new = [change for change in changes.changes if change.seq > seq]
        truncated = changes.truncated if (changes.truncated or 0) > seq else None
        if new or truncated is not None:
            history = changes.version.name in self._settings.history
            gathered = self._pending.setdefault(place, GatheredChanges(history=history))
            gathered.add(changes._replace(changes=new, truncated=truncated))
        return len(new) + (truncated is not None)

    def target(
        self,
        versions: Sequence[Version],
        reached: int,
        truncated: int | None,
        truncates: Sequence[Change] = (),
        altered: Sequence[Altered] = (),
    ) -> Target | None:
        """Return the mirror as tasks need it; None if its changes are for `write`."""
        mine, every = self._settings, [*versions, *(each.before for each in altered)]
        if altered:
            last = altered[-1].version
            versions = [last, *(each for each in versions if each.schema_id > last.schema_id)]
        version = versions[-1]
        is_history = version.name in mine.history
        masks = {column.mask for each in (*every, version) for column in each.columns}
        if (
            not self._keeps(version)
            or (mine.soft and version.key and not is_history)
            or (is_history and truncated is not None and not truncates)
            or mine.applier not in {"auto", "vectors"}
            # Another key, which only a truncate allows; a type that only rows show.
            or any(renamed_key(each, altered) != version.key for each in every)
            or "fixed" in masks
        ):
            return None
        place = self._place(version)
        mirror = self.mirrors[place]
        if mirror.seq >= reached or not actions.is_plain(mirror.table):
            return None
        mirror.alter([each for each in altered if each.seq > mirror.seq])
        target = mirror.target(place, versions, truncated, truncates)
        return target._replace(keys_vary=is_history and key_forms.vary(target.schema, versions))

    def stage(self, target: Target, actions: Sequence[Action]) -> None:
        """Take the actions of the files that tasks have written, for the mirror's commit."""
        removed = (
            [buckets.removed(file) for file in target.files.values()] if target.replaces else []
        )
        self._staged[target.place] = target, [*removed, *actions]

    def alter(self, altered: Altered) -> None:
        if not self._keeps(altered.version):
            return
        place = self._place(altered.version)
        if altered.seq > self.mirror(place).seq:
            history = altered.version.name in self._settings.history
            self._pending.setdefault(place, GatheredChanges(history=history)).alter(altered)
            self._altered.setdefault(place, []).append(altered)
            self._touched.add(place)

    def _forget_cut(self) -> None:
        for each in (self._pending, self._altered, self._staged):
            each.clear()

    def commit(self, applied: Applied) -> None:
        with self._idle.lock:
            self._commit(applied)

    def _commit(self, applied: Applied) -> None:
        self._every(lambda place, its: self.mirrors[place].alter(its), list(self._altered.items()))
        pending = [(place, gathered.changes()) for place, gathered in self._pending.items()]
        for place, changes in pending:
            self.mirrors[place].expect_key(changes)
        self._every(lambda place, changes: self.apply(place, changes, applied), pending)
        self._pending.clear()
        self._altered.clear()
        staged = list(self._staged.items())
        self._every(lambda place, of: self.mirrors[place].commit(*of, applied), staged)
        self._staged.clear()
        if self.frontiers.newest is None:
            self._adopt()
        self._commit_frontier(applied)
        if self._upkeep.is_due(self.frontiers.tidied):
            self.tidy()

    def _commit_frontier(self, applied: Applied) -> None:
        """Write the frontier, unless a mirror is ahead of it; untouched mirrors are not asked."""
        newest = self.frontiers.newest
        if newest and newest.is_whole and not self._touched and self._idle.holds(applied):
            return
        # Mirrors from an older generation are at another frontier until they are rewritten.
        touched = {place: self.mirrors[place] for place in self._touched}
        touched = {place: each for place, each in touched.items() if not each.is_stale}
        if all(mirror.seq <= applied.seq for mirror in touched.values()):
            versions = {place: mirror.version for place, mirror in touched.items()}
            if self.frontiers.commit(applied, {**(newest.versions if newest else {}), **versions}):
                self._touched.clear()
            self._idle.written()

    def _write_idle(self, applied: Applied) -> None:
        """Write a frontier at which the mirrors are as at the newest one."""
        newest = self.frontiers.newest
        assert newest is not None, "it was written before another was held"
        self.frontiers.commit(applied, newest.versions)

    def _adopt(self) -> None:
        """Add the mirrors that direct mode filled to the first frontier, changed since or not."""
        for place in generations.folders(self._settings, self._root):
            if place not in self.mirrors:
                mirror = self.mirror(place)
                try:
                    is_there = mirror.find()
                except (ConfigError, UnavailableError):
                    is_there = False  # not ours, or incomplete: none of its tables is required
                if is_there:
                    self._touched.add(place)
                else:
                    del self.mirrors[place]

    def tidy(self) -> None:
        """Run upkeep between two batches: few files, little storage."""
        mine, places = self._settings, list(self.mirrors.items())
        unwanted, since = self.frontiers.unwanted
        if unwanted and time.time() - since > UNREAD_SECONDS and self.still_read() is None:
            with suppress(lake.ConflictError):  # the next upkeep deletes it
                generations.drop(mine, unwanted)
        # First, so that no remaining frontier needs files that are then deleted.
        self.frontiers.tidy(mine.vacuum_hours)
        keeps_old = len(self.frontiers.rows()) > 1

        def tidy(_: str, mirror: Mirror) -> None:
            mirror.find()
            cluster = mine.cluster.get(mirror.name, ())
            joins = not self.appliers.joins_files(mirror)
            self._upkeep.maintain(mirror, cluster, joins=joins, deletes=not keeps_old)

        # Files of the versions before are deleted one day: the next frontier names those after.
        self._touched |= self.mirrors.keys()
        self._every(tidy, places)

    def apply(self, place: str, changes: Changes, applied: Applied) -> None:
        """Commit a cut's changes to one mirror."""
        mirror = self.mirrors[place]
        mirror.ensure(*changes.versions, changes=changes.changes)
        if not changes.changes and changes.truncated is None:
            return  # it was altered
        mirror.apply(mirror.work(changes), applied, self.appliers.apply)

    def rows(self, version: Version, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        altered = self._altered.get(self._place(version), [])
        before, asked = version, list(keys)
        for each in reversed(altered):
            former = map(each.former_key, asked)
            before, asked = each.before, [key for key in former if key is not None]
        stored = self._stored_rows(before, asked)
        for each in altered:
            stored = {each.key(key): each.row(row) for key, row in stored.items()}
        gathered = self._pending.get(self._place(version))
        return gathered.rows(keys, stored) if gathered else stored

    def _stored_rows(self, version: Version, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        """Return rows as they were before the cut, even if another copy has written it."""
        place = self._place(version)
        mirror, newest = self.mirror(place), self.frontiers.newest
        if not mirror.find() or mirror.is_stale or not mirror.has_key(version):
            return {}
        table = mirror.table
        reached = max(mirror.seq, mirror.altered_seq)
        if newest is not None and reached > newest.applied.seq:
            before = newest.versions.get(place)
            found = lake.opened(mirror.path, self._settings.storage, before)
            if before is None or found is None:
                return {}
            table = found
        asked = [Change(key, 0, None, version.schema_id, 0, 0) for key in keys]
        schema = lake.arrow_schema(table)
        wanted = batch(Changes((version,), asked), schema, {}).rows
        stored = _without_deleted(delta_work.of_keys(table, wanted, version.key, schema.names))
        places = delta_keys.places(wanted, stored, version.key)
        existing = stored.take(places.drop_null())
        there = places.is_valid().to_pylist()
        rows = (row for _, row in delta_json.rows(existing, version))
        return {key: next(rows) for key, is_there in zip(keys, there, strict=True) if is_there}

    def contents(self, version: Version) -> Iterator[tuple[bytes, int, bytes]]:
        place = self._place(version)
        past = self._past and self._past.versions.get(place)
        if self._past is not None and past is None:
            return
        yield from self._rows_of(version, past)

    def contents_at(
        self, version: Version, applied: Applied
    ) -> Iterator[tuple[bytes, int, bytes]] | None:
        row = self._past or self.frontiers.newest
        if row is None or row.applied != applied:
            return None
        past = row.versions.get(self._place(version))
        return iter(()) if past is None else self._rows_of(version, past)

    def _rows_of(self, version: Version, past: int | None) -> Iterator[tuple[bytes, int, bytes]]:
        """Yield the rows of a mirror's version; None: the newest."""
        table = lake.opened(f"{self._root}/{self._place(version)}", self._settings.storage, past)
        for part in lake.streamed(table) if table else ():
            there = _without_deleted(part)
            seqs = there[layout.SEQ].to_pylist()
            for seq, (key, row) in zip(seqs, delta_json.rows(there, version), strict=True):
                yield key, seq, row

    def close(self) -> None:
        with suppress(CDCError):  # the frontier before is as good
            self._idle.flush()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def generations(self) -> Mapping[int, Applied | None]:
        return generations.found(self._settings)

    def current(self) -> int | None:
        frontiers = FrontierTable(self._settings.path, self._settings.storage, self._settings.owner)
        return frontiers.generation if frontiers.find() else None

    def at(self, generation: int, tables: frozenset[str] | None = None) -> Self:
        return type(self)(self._settings, generation, tables)

    def switch(self, generation: int, former: Applied | None = None) -> None:
        generations.switch(self._settings, generation, former)

    def drop(self, generation: int) -> None:
        generations.drop(self._settings, generation)

    def still_read(self) -> int | None:
        return generations.still_read(self._settings)

    def drop_unread(self, generation: int) -> None:
        generations.drop_unread(self._settings, generation)

    def switching(self) -> int | None:
        return generations.switching(self._settings)

    def erase(
        self,
        erased: Erased | None,
        applied_seq: int,
        step: Callable[[str], None] = lambda _: None,
    ) -> list[str]:
        """Erase a table's rows, and what older versions have of them; see `erasing.erase`."""
        return erasing.erase(self._settings, erased, applied_seq, step)

    def _keeps(self, version: Version) -> bool:
        return self._tables is None or version.name in self._tables

    def _place(self, version: Version) -> str:
        """Return the folder of a table's mirror below the path, named like its topic."""
        return version.topic.removeprefix(f"{self._settings.prefix}.")

    def mirror(self, place: str) -> Mirror:
        """Return a table's mirror; it may not exist yet."""
        if place not in self.mirrors:
            keeper = keeper_of(self._settings, self.frontiers.generation)
            if self._root.rstrip("/") != self._settings.path.rstrip("/"):
                # A snapshot has filled no mirror of a shadow build: its source has all rows.
                keeper = keeper._replace(is_direct=None)
            self.mirrors[place] = Mirror(place, f"{self._root}/{place}", keeper)
        return self.mirrors[place]

    def _every(self, do: Callable[[str, T], R], of: Sequence[tuple[str, T]]) -> list[R]:
        """Call `do` for each table, several at a time; raise an error once all are done.

        Of several errors, one that a retry cannot fix.
        """
        self._pool = self._pool or ThreadPoolExecutor(_AT_ONCE, "delta")
        running = {place: self._pool.submit(do, place, each) for place, each in of}
        wait(running.values())
        errors = {place: each.exception() for place, each in running.items()}
        for place, error in sorted(errors.items(), key=lambda each: _is_retried(each[1])):
            if error is not None:
                raise self._named(place, error)
        return [each.result() for each in running.values()]

    def _named(self, place: str, error: BaseException) -> BaseException:
        """Return the error with its table's name."""
        mirror, name = self.mirrors[place], self.mirrors[place].name
        if lake.is_missing_file(error):
            version = mirror.version
            if mirror.find() and mirror.version != version:
                error = UnavailableError(
                    f"{name}: files were deleted after another process had written them again",
                    hint="as `cdc erase --mirrors` does; the follower reads the table again",
                )
        elif isinstance(error, CDCError) and name not in error.what:
            error.what = f"{name}: {error.what}"
        if not isinstance(error, CDCError):
            error.add_note(name)
        return error


def _is_retried(error: BaseException | None) -> bool:
    return isinstance(error, CDCError) and error.policy is not Policy.HALT


def keeper_of(settings: DeltaSettings, generation: int) -> Keeper:
    """Return the settings with which a generation's mirrors are kept."""
    return Keeper(
        settings.pipeline,
        settings.follower,
        generation,
        settings.storage,
        settings.soft,
        settings.history,
        settings.partition,
        settings.is_direct,
        settings.large,
    )


def _without_deleted(rows: pa.Table) -> pa.Table:
    """Return the rows that the source has: no deleted rows and no former versions."""
    if layout.DELETED in rows.column_names:
        return rows.filter(pc.invert(pc.fill_null(rows[layout.DELETED], fill_value=False)))
    if layout.CURRENT in rows.column_names:
        return rows.filter(rows[layout.CURRENT])
    return rows
