"""Apply a follower's documents, frontier by frontier of their mirror.

A cut goes from the store's row of `_frontiers` to the newest one. Only the mirror is read, and the
log's table versions: those in force at the later frontier define the documents.

If the mirror has no row for the store's frontier, or its files were deleted, the changes can't be
computed: that is a gap, and the follower must be rebuilt.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Final, NamedTuple

from deltalake.exceptions import DeltaError

from cdc.errors import ConfigError, GapError, OvertakenError, UnavailableError
from cdc.events import LSN, table_name
from cdc.log import names, reader
from cdc.log.ranges import Range, RangeReader
from jobs.apply import canaries
from jobs.apply import positions as stores_standing
from jobs.cuts.schemas import version
from jobs.documents.kinds import SCHEMA, Kind, Tables, tree
from jobs.documents.mirror import MirrorTables, Place
from sinks.contract import Standing
from sinks.delta import frontiers as delta_frontiers
from sinks.delta import lake as delta_lake
from sinks.delta import layout as delta_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from deltalake import DeltaTable

    from cdc.config import Config
    from cdc.log.records import SchemaRecord
    from jobs.apply.running import Run
    from sinks.contract import Applied, Changes, Generations, Sink, Version


# Seconds between two polls for a new frontier of the mirror.
_LOOK_SECONDS: Final = 0.2
# How many of the latest messages are searched for the newest canary.
_CANARY_OFFSETS: Final = 200


class Cut(NamedTuple):
    """From a frontier of the mirror, or from nothing, to a later one."""

    before: delta_frontiers.Row | None
    after: delta_frontiers.Row


class DocumentsFollower:
    """Reads the mirror for a follower with documents; keeps no position."""

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

    def cut(self, standing: Standing | None, through: LSN | None = None) -> Cut | None:
        """Return the cut from the store's frontier; None if there is nothing new.

        It ends at the newest frontier, or the newest not above `through`. But an interrupted cut is
        repeated to its own end, even if there are later frontiers: it may have written documents
        that no longer exist at a later frontier, and a longer cut would not see them at either end.
        """
        table = self._frontiers()
        if table is None and standing and standing.applied.seq:
            raise UnavailableError(
                f"the mirror {self._mirror} has no frontiers at {self._root}, and these documents"
                f" were made from one at {standing.applied.lsn}",
                hint="its volume is not mounted, or it was deleted: see the mirror's follower",
            )
        if table is None:
            return None
        applied, reached = standing or (None, 0)
        if applied is not None and not applied.seq:
            applied = None
        if reached > (applied.seq if applied else 0):
            after = _newest(delta_frontiers.rows(table, f"seq = {reached} AND is_whole"))
            if after is None:
                raise self._gap(f"seq {reached}", "were being written up to")
        else:
            after = delta_frontiers.as_of(table, through, None)
        if after is None or (applied and not _is_later(after.applied, applied)):
            return None
        return Cut(applied and self._at(table, applied), after)

    def changes(self, cut: Cut) -> Iterator[Changes]:
        """Yield the cut's changes to the documents."""
        before, after = cut
        known = self._versions(before.applied.lsn) if before else {}
        for kind in self.kinds(after.applied):
            name = kind.root.name
            try:
                yield from kind.changes(
                    self._tables(after, kind),
                    after.applied,
                    before and self._tables(before, kind),
                    before.applied.seq if before else 0,
                    was=tree(name, self._documents[name], known),
                )
            except DeltaError as error:
                if before is None or not _is_lost(error):
                    raise
                raise self._lost(before.applied) from error

    @property
    def names(self) -> tuple[str, ...]:
        """The documents' names."""
        return tuple(self._documents)

    def keys(self, document: str, applied: Applied) -> list[bytes] | None:
        """Return the keys of the documents of this name at a frontier; None if unknown."""
        table = self._frontiers()
        rows = delta_frontiers.rows(table, _place(applied)) if table is not None else []
        found = _newest(rows)
        if found is None:
            return None
        kind = next(each for each in self.kinds(applied) if each.root.name == document)
        return [row.key for row in self._tables(found, kind).every(kind.root)]

    def kinds(self, applied: Applied) -> list[Kind]:
        """Return the kinds of documents, for the table versions in force at a frontier."""
        versions = self._versions(applied.lsn)
        return [
            Kind(name, document, versions)
            for name, document in self._documents.items()
            # A table without any event so far has no rows.
            if document.table in versions
        ]

    def _tables(self, row: delta_frontiers.Row, kind: Kind) -> Tables:
        places, versions = {}, row.versions
        for node, rows in kind.rows.items():
            place = rows.topic.removeprefix(f"{self._config.prefix}.")
            if place in versions:
                path = delta_layout.path(self._root, self._config.prefix, rows.topic)
                places[node.table] = Place(path, versions[place])
        return MirrorTables(places, kind.rows, self._storage)

    def _frontiers(self) -> DeltaTable | None:
        path = f"{self._root.rstrip('/')}/{delta_frontiers.NAME}"
        return delta_lake.opened(path, self._storage)

    def _at(self, table: DeltaTable, applied: Applied) -> delta_frontiers.Row:
        """Return the mirror's row for the store's frontier."""
        found = _newest(delta_frontiers.rows(table, _place(applied)))
        if found is None:
            raise self._lost(applied)
        return found

    def _lost(self, applied: Applied) -> GapError:
        return self._gap(f"{applied.lsn} (seq {applied.seq})", "stand at")

    def _gap(self, frontier: str, how: str) -> GapError:
        return GapError(
            f"the mirror {self._mirror} does not have the frontier {frontier} any more, which the"
            f" documents of {self._name} {how}",
            hint=f"`cdc rebuild {self._name}` builds them anew, beside what there is",
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


class DocumentsFollowing:
    """One follower's documents: what `Run` calls as its session."""

    def __init__(
        self,
        config: Config,
        name: str,
        sink: Generations,
        *,
        until: LSN | None = None,
        exactly: bool = False,
    ) -> None:
        """`until`: end once that LSN is applied, `exactly` there."""
        self._config, self._name, self._sink, self._until = config, name, sink, until
        self._through = until if exactly else None
        self._follower = DocumentsFollower(config, name)

    def __call__(self, run: Run) -> None:
        """Follow until asked to stop, or until an error."""
        with closing(self._sink):
            standing = stores_standing.found(run, self._sink)
            applied = standing.applied
            every = self._config.followers[self._name].every_seconds
            while not run.stopping.is_set():
                if self._until is not None and applied.lsn >= self._until:
                    return
                cut = self._follower.cut(standing, self._through)
                if cut is None:
                    run.reads()
                    run.stopping.wait(_LOOK_SECONDS)
                    continue
                began = time.monotonic()
                try:
                    news = apply(self._follower, self._sink, cut, applied.generation)
                except OvertakenError:
                    run.stopping.wait(_LOOK_SECONDS)
                    standing = stores_standing.found(run, self._sink)
                    applied = standing.applied
                    continue
                applied = cut.after.applied._replace(generation=applied.generation)
                standing = Standing(applied, applied.seq)
                tables = {f"{SCHEMA}.{name}" for name in self._follower.names}
                seconds = time.monotonic() - began
                run.has_applied(applied, news, tables, seconds, self._canary(cut))
                run.stopping.wait(max(_LOOK_SECONDS, every - seconds))

    def _canary(self, cut: Cut) -> int | None:
        """Return when the newest canary up to the mirror's frontier was sent."""
        topic = names.messages_topic(self._config.prefix)
        before = cut.before.applied.ends if cut.before else {}
        (first, *_), (end, *_) = (
            ends.get(topic, (0,)) or (0,) for ends in (before, cut.after.applied.ends)
        )
        first = max(first, end - _CANARY_OFFSETS)
        if first >= end:
            return None
        try:
            with closing(RangeReader(self._config)) as log:
                found = log.read({(topic, 0): Range(first, end)})
        except GapError:
            return None  # retention has deleted them; this time is only reported
        return canaries.newest(self._config, found or {})


def apply(follower: DocumentsFollower, sink: Sink, cut: Cut, generation: int) -> int:
    """Apply the cut to a store; return how many document changes were new to it."""
    applied = cut.after.applied
    above = cut.before.applied.seq if cut.before else 0
    sink.begin(applied.seq, [kind.version for kind in follower.kinds(applied)], above)
    news = sum(sink.write(changes) for changes in follower.changes(cut))
    sink.commit(applied._replace(generation=generation))
    return news


def _place(applied: Applied) -> str:
    """Return the predicate for the mirror's rows of a frontier."""
    return f"seq = {applied.seq} AND lsn = {int(applied.lsn)} AND is_whole"


def _newest(found: Sequence[delta_frontiers.Row]) -> delta_frontiers.Row | None:
    """Return the row of the newest generation with the latest LSN."""
    return max(found, key=lambda row: (row.generation, row.applied.lsn), default=None)


def _is_later(applied: Applied, than: Applied) -> bool:
    return (applied.seq, applied.lsn) > (than.seq, than.lsn)


def _is_lost(error: DeltaError) -> bool:
    """Return whether files or versions are missing, as after VACUUM or log cleanup."""
    said = str(error)
    return any(words in said for words in ("not found", "Not Found", "No such file", "Invalid"))
