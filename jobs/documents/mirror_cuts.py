"""The cuts of a follower's documents, from one frontier of their mirror to a later one.

Only the mirror is read, and the log's table versions: those in force at the later frontier define
the documents. If the mirror has no row for the store's frontier, or its files were deleted, the
changes can't be computed: that is a gap, and the follower must be rebuilt.

A mirror that was rebuilt may have other rows at the same frontiers, which no difference from one
of its generation to a later one shows. So a store records the mirror's generation, and the first
cut to another one replaces all that is in the store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from cdc.errors import ConfigError, GapError, UnavailableError
from cdc.events import LSN, table_name
from cdc.log import names, reader
from lockstep.jobs.cuts.schemas import version
from lockstep.jobs.documents.kinds import DocumentBuild, DocumentKind, DocumentTables, tree
from lockstep.jobs.documents.mirror import MirrorTables, MirrorVersion
from lockstep.sinks.delta import frontier_rows as delta_frontiers
from lockstep.sinks.delta import lake as delta_lake
from lockstep.sinks.delta import layout as delta_layout
from lockstep.sinks.delta.frontier_tail import FrontierTail
from lockstep.sinks.delta.opened_tables import OpenedTables
from lockstep.sinks.delta.stored_files import StoredFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from cdc.config import Config
    from cdc.log.records import SchemaRecord
    from lockstep.sinks.contract import Applied, Changes, StoreState, Version


class MirrorCut(NamedTuple):
    """From a frontier of the mirror, or from nothing, to a later one."""

    before: delta_frontiers.FrontierRow | None
    after: delta_frontiers.FrontierRow
    # From nothing, in a store that is not new: all that is in it is replaced.
    replaces: bool = False
    # It was started before, and the store may have rows of it.
    repeats: bool = False


class MirrorCuts:
    """Reads the mirror for a follower with documents; keeps no position."""

    # Whether a cut replaces all that is in a store whose frontier the mirror no longer has.
    _replaces_lost = False

    def __init__(
        self,
        config: Config,
        name: str,
        versions: Callable[[LSN], Mapping[str, Version]] | None = None,
    ) -> None:
        """`versions` gives the table versions in force at an LSN; the log's by default."""
        follower = config.followers[name]
        mirror = config.followers[follower.mirror or ""]
        root = (mirror.delta and mirror.delta.path) or config.delta.path
        if root is None:
            raise ConfigError(
                f"follower {name} is made from {follower.mirror}, whose path is not known",
                hint="set its delta.path",
            )
        self._config, self._name, self._root = config, name, root
        self._documents, self._mirror = follower.documents, follower.mirror
        self._storage = mirror.delta.storage if mirror.delta else {}
        self._versions = versions or LogVersions(config)
        self._files = StoredFiles(storage=self._storage)
        self._opened = OpenedTables(self._storage)
        self._frontiers = FrontierTail(self._root, self._storage)
        self._found: tuple[Applied, Mapping[str, Version]] | None = None
        # What was asked when nothing was new, and the newest row then.
        self._nothing: tuple[object, ...] | None = None

    def cut(
        self,
        state: StoreState | None,
        through: LSN | None = None,
        most_events: int | None = None,
    ) -> MirrorCut | None:
        """Return the cut from the store's frontier; None if there is nothing new.

        It ends at the newest frontier, or the newest not above `through`; if `most_events` is given
        and the store has a frontier, at one with so many events in between, if there is one. But an
        interrupted cut is repeated to its own end, even if there are later frontiers: it may have
        written documents that no longer exist at a later frontier, and a longer cut would not see
        them at either end.
        """
        newest = self._frontiers.newest()
        replaces = state is not None and state.replaces
        applied = state.applied if state and state.applied.seq and not replaces else None
        reached = state.reached if state else 0
        if not self._frontiers.exists:
            if applied is not None:
                raise self._missing(applied)
            return None
        asked = state, through, newest
        if asked == self._nothing:
            return None
        after = self._end(newest, applied, reached, through, most_events)
        if after is None or (applied and not _is_later(after.applied, applied)):
            self._nothing = asked
            return None
        applied_after = after.applied._replace(mirror_generation=after.generation)
        after = after._replace(applied=applied_after)
        is_lost = after.applied.seq != reached > (applied.seq if applied else 0)
        if applied is None or is_lost:
            return MirrorCut(None, after, replaces=replaces or is_lost)
        return self._from(applied, after)

    def _from(self, applied: Applied, after: delta_frontiers.FrontierRow) -> MirrorCut:
        """Return the cut from a store's frontier: one that replaces if the mirror was rebuilt."""
        if applied.mirror_generation in (0, after.generation):
            before = self._frontiers.at(applied)
            if before is not None:
                return MirrorCut(before, after)
            if not self._replaces_lost:
                raise self._lost(applied)
        if after.applied.seq > applied.seq:
            return MirrorCut(None, after, replaces=True)
        return _only_lsn(applied, after)

    def _end(
        self,
        newest: delta_frontiers.FrontierRow | None,
        applied: Applied | None,
        reached: int,
        through: LSN | None,
        most_events: int | None,
    ) -> delta_frontiers.FrontierRow | None:
        """Return the frontier at which the next cut ends; None if there is none."""
        seq = applied.seq if applied else 0
        many = newest.applied.seq - seq if newest else 0
        is_near = applied is None or most_events is None or many <= most_events
        if reached <= seq and through is None and is_near:
            return newest
        table = self._frontiers.table()
        if table is None:
            raise self._missing(applied)
        if reached > seq:
            at_it = delta_frontiers.rows(table, f"seq = {reached} AND is_whole")
            if at_it:
                # It may have been started before the mirror was rebuilt: the next cut follows that.
                first = min(row.generation for row in at_it)
                return delta_frontiers.newest(row for row in at_it if row.generation == first)
            if not self._replaces_lost:
                raise self._gap(f"seq {reached}", "were being written up to")
            # What the store has of the cut is replaced only by one that ends later.
            is_past = newest is not None and newest.applied.seq > reached
            return newest if is_past else None
        after = delta_frontiers.as_of(table, through, None)
        if after is not None and applied is not None and most_events is not None:
            after = _within(table, applied, after, most_events)
        return after

    def changes(self, cut: MirrorCut) -> Iterator[Changes]:
        """Yield the cut's changes to the documents."""
        before, after = cut.before, cut.after
        known = self._versions(before.applied.lsn) if before else {}
        for kind in self.kinds(after.applied):
            name = kind.root.name
            try:
                yield from kind.changes(
                    self._tables(after, kind),
                    after.applied,
                    before and self._tables(before, kind),
                    was=tree(name, self._documents[name], known),
                    replaces=cut.replaces,
                )
            except (DeltaError, pa.ArrowException) as error:  # files are read by Arrow
                if before is None or not _is_lost(error):
                    raise
                raise self._lost(before.applied) from error

    def builds(self, cut: MirrorCut) -> tuple[list[DocumentBuild], int] | None:
        """Return what executors build, and its size in bytes; None if it is no first build.

        Also None if the mirror's storage has options of delta-rs: Spark has none of them.
        """
        if cut.before is not None or cut.replaces or self._storage:
            return None
        after, versions = cut.after, self._versions_of(cut.after.applied)
        found, size = [], 0
        for kind in self.kinds(after.applied):
            places = self._places(after, kind)
            name = kind.root.name
            document = self._documents[name]
            found.append(DocumentBuild(name, document, versions, places, after.applied))
            size += sum(delta_lake.size(DeltaTable(*place)) for place in places.values())
        return found, size

    @property
    def names(self) -> tuple[str, ...]:
        """The documents' names."""
        return tuple(self._documents)

    def keys(self, document: str, applied: Applied) -> list[bytes] | None:
        """Return the keys of the documents of this name at a frontier; None if unknown."""
        found = self._frontiers.at(applied)
        if found is None:
            return None
        kind = next(each for each in self.kinds(applied) if each.root.name == document)
        return [row.key for row in self._tables(found, kind).every(kind.root)]

    def kinds(self, applied: Applied) -> list[DocumentKind]:
        """Return the kinds of documents, for the table versions in force at a frontier."""
        versions = self._versions_of(applied)
        return [
            DocumentKind(name, document, versions)
            for name, document in self._documents.items()
            # A table without any event so far has no rows.
            if document.table in versions
        ]

    def _versions_of(self, applied: Applied) -> Mapping[str, Version]:
        """Return the table versions in force at a cut's frontier: during all of the cut the same.

        A lookup connects to the brokers twice.
        """
        if self._found is None or self._found[0] is not applied:
            self._found = applied, self._versions(applied.lsn)
        return self._found[1]

    def _tables(self, row: delta_frontiers.FrontierRow, kind: DocumentKind) -> DocumentTables:
        return MirrorTables(self._places(row, kind), kind.rows, self._files, self._opened.at)

    def _places(
        self, row: delta_frontiers.FrontierRow, kind: DocumentKind
    ) -> dict[str, MirrorVersion]:
        places, versions = {}, row.versions
        for node, rows in kind.rows.items():
            place = rows.topic.removeprefix(f"{self._config.prefix}.")
            if place in versions:
                path = delta_layout.path(self._root, self._config.prefix, rows.topic)
                places[node.table] = MirrorVersion(path, versions[place])
        return places

    def _at(self, applied: Applied) -> delta_frontiers.FrontierRow:
        """Return the mirror's row for the store's frontier."""
        found = self._frontiers.at(applied)
        if found is None:
            raise self._lost(applied)
        return found

    def _missing(self, applied: Applied | None) -> UnavailableError:
        made = f", and these documents were made from one at {applied.lsn}" if applied else ""
        return UnavailableError(
            f"the mirror {self._mirror} has no frontiers at {self._root}{made}",
            hint="its volume is not mounted, or it was deleted: see the mirror's follower",
        )

    def _lost(self, applied: Applied) -> GapError:
        return self._gap(f"{applied.lsn} (seq {applied.seq})", "are at")

    def _gap(self, frontier: str, how: str) -> GapError:
        return GapError(
            f"the mirror {self._mirror} no longer has the frontier {frontier}, which the"
            f" documents of {self._name} {how}",
            hint=f"`cdc rebuild {self._name}` builds them again, in a shadow build",
        )


class LogVersions:
    """The table versions in the log, read again when there are more."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._known: list[SchemaRecord] = []
        self._end = -1

    def __call__(self, lsn: LSN) -> Mapping[str, Version]:
        """Return the newest version of each table that is not above an LSN."""
        topic = names.schema_topic(self._config.prefix)
        end = reader.end_offsets(self._config, [(topic, 0)])[topic, 0]
        if end != self._end:
            self._known, self._end = reader.read_schemas(self._config), end
        return {
            table_name(record.schema, record.table): version(record)
            for record in self._known
            if record.from_lsn <= lsn
        }


def _within(
    table: DeltaTable, applied: Applied, newest: delta_frontiers.FrontierRow, most_events: int
) -> delta_frontiers.FrontierRow:
    """Return the last row with at most so many events after a frontier, or the first one with more.

    The events are those of all tables of the log.
    """
    most = applied.seq + most_events
    if newest.applied.seq <= most:
        return newest
    between = (
        f"is_whole AND generation = {newest.generation} AND seq > {applied.seq}"
        f" AND seq < {newest.applied.seq}"
    )
    seqs = delta_lake.read(table, ["seq"], between)["seq"].to_pylist()
    if not seqs:
        return newest
    chosen = max((seq for seq in seqs if seq <= most), default=min(seqs))
    found = delta_frontiers.newest(delta_frontiers.rows(table, f"{between} AND seq = {chosen}"))
    assert found is not None, "it was there"
    return found


def _only_lsn(applied: Applied, after: delta_frontiers.FrontierRow) -> MirrorCut:
    """Return the cut in which only the LSN moves: a store takes no rows of the seq that it has.

    The store still has the rows of the mirror's earlier generation, if there was one.
    """
    moved = after.applied._replace(mirror_generation=applied.mirror_generation)
    return MirrorCut(after._replace(applied=applied), after._replace(applied=moved))


def _is_later(applied: Applied, than: Applied) -> bool:
    return (applied.seq, applied.lsn) > (than.seq, than.lsn)


def _is_lost(error: Exception) -> bool:
    """Return whether files or versions are missing, as after VACUUM or log cleanup."""
    text = str(error)
    return any(words in text for words in ("not found", "Not Found", "No such file", "Invalid"))
