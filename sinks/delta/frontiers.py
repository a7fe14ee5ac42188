"""`_frontiers`: the follower's applied frontiers, each with every mirror's version at it.

One row is appended after each batch, when all mirrors are at its frontier: reading each mirror at
the version in one row reads all of them as of one LSN. Until then readers use the previous row. A
separate Delta transaction records up to which seq a batch is being written, before any of it is
written; every commit repeats the generation, so that a commit of an older generation fails once
another is current.

Two commits per batch: their small files are joined and deleted once there are many, independent of
other upkeep, so that opening the table stays fast.
"""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from deltalake import CommitProperties, Transaction, write_deltalake

from cdc.errors import StoreLostError, SwitchedError
from lockstep.sinks.contract import expect_alone
from lockstep.sinks.delta import features, lake, layout
from lockstep.sinks.delta.actions import (
    CHECKPOINT_EVERY,
    Files,
    TaggedVersion,
    log_name,
    put_version,
)
from lockstep.sinks.delta.frontier_rows import (
    ARROW,
    NAME,
    TYPES,
    FrontierRow,
    as_columns,
    below,
    changed,
    full_columns,
    rows,
    upto,
)
from lockstep.sinks.delta.parts import small_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from deltalake import DeltaTable

    from lockstep.sinks.contract import Applied
    from lockstep.sinks.delta.actions import Action

# Names of this table's Delta transactions.
_REACHED: Final = "lockstep/reached"
_APPLIED: Final = "lockstep/applied"
_GENERATION: Final = "lockstep/generation"
_TIDIED: Final = "lockstep/tidied"  # the time, in seconds
_UNWANTED: Final = "lockstep/unwanted"  # an older generation to be deleted, since which second
# How many small files are joined at once; files above a size are not worth rewriting.
MOST_FILES: Final = 200
_SMALL_BYTES: Final = 4 << 20
_JOINED_BYTES: Final = 8 << 20
# Old versions of this table are not read, but two copies of a follower must see each other's
# commits.
KEPT_HOURS: Final = 1
_PROPERTIES: Final = {
    "delta.logRetentionDuration": f"interval {KEPT_HOURS} hours",
    "delta.deletedFileRetentionDuration": f"interval {KEPT_HOURS + 1} hours",
}
_TRIES: Final = 10
_WRITE: Final = {"operation": "WRITE", "operationParameters": {"mode": "Append"}}
# At most this many rows depend on one full row.
PARTIAL_ROWS: Final = 100


class FrontierTable:
    """The `_frontiers` table in one follower's path."""

    def __init__(self, root: str, storage: Mapping[str, str], owner: Mapping[str, object]) -> None:
        self._path = f"{root.rstrip('/')}/{NAME}"
        self._storage, self._owner = storage, owner
        self._id: object = None
        self.newest: FrontierRow | None = None
        # The full row on which partial rows may depend, and how many do; None after any other
        # process has written to the table, because it may delete rows.
        self._full: FrontierRow | None = None
        self._dependent = 0
        self.reached = 0
        self.generation = 1
        # An older generation to be deleted, 0 for none, and when that was noted, in seconds.
        self.unwanted = 0, 0
        self.tidied = 0.0  # when the last upkeep ran, or the table was created
        self._own: TaggedVersion | None = None  # our last commit
        self._loaded: DeltaTable | None = None  # it may lack our commits since
        self._small_files = 0

    def find(self) -> bool:
        """Load the table; return whether it exists."""
        table = lake.opened(self._path, self._storage)
        if table is None:
            return False
        self._full = self.newest = None
        self._set(table)
        return True

    def open(self, generation: int, tables: frozenset[str] | None = None) -> None:
        """Load the table; create a missing one, for some `tables` only if given."""
        if self.find():
            return
        table = lake.made(
            self._path,
            layout.struct(TYPES.items(), NAME),
            self._storage,
            properties=_PROPERTIES,
            facts=self._owner,
            about=None if tables is None else json.dumps(sorted(tables)),
        )
        self._set(table)
        if self.generation != generation:
            self._append([], {_GENERATION: generation})
            self._set(self.table)

    def begin(self, reached: int, above: int | None = None) -> None:
        """Record how far rows may reach; raise if the table is not the one that was opened."""
        for _ in range(_TRIES):
            self._reload()
            if above is not None:
                applied_seq = self.newest.applied.seq if self.newest else 0
                expect_alone(above, reached, applied=applied_seq, started=self.reached)
            if reached <= self.reached:
                return
            try:
                upto = lake.transaction_version(self.generation, reached)
                self._append([], {_REACHED: upto, _GENERATION: self.generation})
            except lake.ConflictError:
                continue
            self.reached = reached
            return
        raise lake.busy(self._path)

    def knows(self, seq: int) -> bool:
        """Return whether a cut up to `seq` was recorded, by this or another copy."""
        if seq > self.reached:
            self._reload()
        return seq <= self.reached

    def commit(self, applied: Applied, versions: Mapping[str, int]) -> bool:
        """Append the row; return False if the newest has that frontier or a later one."""
        upto = lake.transaction_version(self.generation, applied.seq)
        for _ in range(_TRIES):
            # An erasure may have written mirrors again that this cut has not touched.
            row = FrontierRow(self.generation, applied, self._not_before(versions))
            newest = self.newest and self.newest.applied
            is_old = newest and (newest.seq, newest.lsn) >= (applied.seq, applied.lsn)
            if is_old and self.newest and self.newest.is_whole:
                return False
            full = self._full_for(row)
            try:
                self._append(
                    [as_columns(row, now(), full)], {_APPLIED: upto, _GENERATION: self.generation}
                )
            except lake.ConflictError:
                self._reload()
                continue
            self.newest = row
            self._full, self._dependent = (full, self._dependent + 1) if full else (row, 0)
            self._small_files += 1
            if self._small_files >= MOST_FILES:
                self._join()
            return True
        raise lake.busy(self._path)

    def forget(self, versions: Mapping[str, int]) -> None:
        """Replace all rows by those at the newest seq, with these versions of some mirrors.

        Those at the same seq, of a later LSN or an earlier one, have the same rows. Raises
        ConflictError if another commit came first.
        """
        newest = self.newest
        assert newest is not None, "the caller has seen it"
        mine = f"generation = {self.generation}"
        same = rows(self.table, f"{mine} AND seq = {newest.applied.seq} AND is_whole")
        merged = self._not_before({**newest.versions, **versions})
        kept = [as_columns(row._replace(versions=merged), now()) for row in same]
        with lake.translated(self._path):
            write_deltalake(
                self.table,
                pa.Table.from_pylist(kept, schema=ARROW),
                mode="overwrite",
                commit_properties=self._properties({_GENERATION: self.generation}),
            )
        self.find()

    def _not_before(self, versions: Mapping[str, int]) -> Mapping[str, int]:
        """Return the versions, or those that the newest row has where they are later."""
        newest = self.newest.versions if self.newest else {}
        return {place: max(at, newest.get(place, at)) for place, at in versions.items()}

    def _full_for(self, row: FrontierRow) -> FrontierRow | None:
        """Return the full row on which a row can depend; None if it should be full itself."""
        full = self._full
        if full is None or self._dependent >= PARTIAL_ROWS:
            return None
        if not full.versions.keys() <= row.versions.keys():
            return None
        # With half of them changed, a partial row saves little.
        return full if 2 * len(changed(row, full)) <= len(row.versions) else None

    def drop_later(self, generation: int) -> None:
        """Record that an older generation is to be deleted once no reader uses it.

        Raises ConflictError if another process has committed since the table was loaded.
        """
        self._append([], {_UNWANTED: lake.transaction_version(generation, int(time.time()))})

    def switch(self, row: FrontierRow, reached: int) -> None:
        """Make the row's generation current, at its frontier."""
        apps = {
            _APPLIED: lake.transaction_version(row.generation, row.applied.seq),
            _REACHED: lake.transaction_version(row.generation, reached),
            _GENERATION: row.generation,
        }
        self._append([as_columns(row, now())], apps)
        self.find()

    def start_over(self, generation: int) -> None:
        """Start a generation at no frontier, regardless of existing rows."""
        self.open(generation)
        with lake.translated(self._path):
            write_deltalake(
                self.table,
                ARROW.empty_table(),
                mode="overwrite",
                commit_properties=self._properties({_GENERATION: generation}),
            )
        self.find()

    def rows(self) -> dict[int, FrontierRow]:
        """Return the newest row of each generation."""
        places = lake.read(self.table, ["generation", "seq"]).to_pylist()
        newest: dict[int, int] = {}
        for each in places:
            newest[each["generation"]] = max(each["seq"], newest.get(each["generation"], 0))
        found = []
        for generation, seq in sorted(newest.items()):
            found += rows(self.table, f"generation = {generation} AND seq = {seq}")
        return {row.generation: row for row in sorted(found, key=lambda row: row.applied.lsn)}

    def oldest(self) -> FrontierRow | None:
        """Return the oldest row, if all are of the current generation; else None."""
        places = lake.read(self.table, ["generation", "seq"]).to_pylist()
        if {each["generation"] for each in places} != {self.generation}:
            return None
        least = min(each["seq"] for each in places)
        found = rows(self.table, f"seq = {least}")
        return min(found, key=lambda row: row.applied.lsn)

    def delete(self, generation: int) -> None:
        """Delete the rows of a generation."""
        with lake.translated(self._path):
            self.table.delete(
                f"generation = {generation}", commit_properties=self._properties({_UNWANTED: 0})
            )

    def tidy(self, keep_hours: float) -> None:
        """Delete rows that are older than what can be read; join small files, delete old ones.

        Only rows of the current generation: those of an older one stay until it is dropped. The
        newest of the old rows stays too: it is the state at the start of the retention time.
        """
        self._reload()
        with self._or_reload():
            tidied = int(now().timestamp())
            self._append([], {_TIDIED: tidied})
            self.tidied = tidied
        if keep_hours:
            oldest = (now() - timedelta(hours=keep_hours)).isoformat()
            mine = f"generation = {self.generation}"
            is_old = f"{mine} AND is_whole AND written_at < '{oldest}'"
            old = lake.read(self.table, ["seq", "lsn"], is_old).to_pylist()
            seq, lsn = max(((each["seq"], each["lsn"]) for each in old), default=(0, 0))
            if len(old) > 1:
                with self._or_reload(), lake.translated(self._path):
                    self._delete_below(seq, lsn)
        self._join()

    def _delete_below(self, seq: int, lsn: int) -> None:
        """Delete the generation's rows below one, on which the rows after it depend from then on.

        One commit, with our transaction: it conflicts with a row that another copy appends
        meanwhile, which may depend on what is deleted.
        """
        mine = f"generation = {self.generation}"
        properties = self._properties({_GENERATION: self.generation})
        at = f"{mine} AND seq = {seq} AND lsn = {lsn} AND is_whole"
        (*_, first), (*_, stored) = rows(self.table, at), self._stored(at)
        if stored["versions"] is not None:
            self.table.delete(f"{mine} AND {below(seq, lsn)}", commit_properties=properties)
            return
        full = stored["full_seq"], stored["full_lsn"]
        after = f"{mine} AND NOT {below(seq, lsn)}"
        depend = self._stored(f"{after} AND full_seq = {full[0]} AND full_lsn = {full[1]}")
        last = max((each["seq"], each["lsn"]) for each in depend)
        kept = self._stored(f"{after} AND {upto(*last)}")
        for each in kept:
            if (each["full_seq"], each["full_lsn"]) == full:
                is_first = (each["seq"], each["lsn"]) == (seq, lsn)
                each.update(full_columns(first) if is_first else {"full_seq": seq, "full_lsn": lsn})
        write_deltalake(
            self.table,
            pa.Table.from_pylist(kept, schema=ARROW),
            mode="overwrite",
            predicate=f"{mine} AND {upto(*last)}",
            commit_properties=properties,
        )

    def _stored(self, where: str) -> list[dict[str, Any]]:
        """Return the rows that a predicate selects, as they are stored."""
        known = set(lake.arrow_schema(self.table).names)
        names = [name for name in ARROW.names if name in known]
        found: list[dict[str, Any]] = lake.read(self.table, names, where).to_pylist()
        return found

    def _join(self) -> None:
        """Join the files of single rows, and delete replaced files and old commits."""
        with self._or_reload(), lake.translated(self._path):
            self.table.optimize.compact(target_size=_JOINED_BYTES)
            # A full vacuum: the log may no longer list files removed before its last checkpoint.
            self.table.vacuum(
                retention_hours=KEPT_HOURS,
                dry_run=False,
                enforce_retention_duration=False,
                full=True,
            )
            self.table.create_checkpoint()
            self.table.cleanup_metadata()
        self._small_files = 0

    @contextmanager
    def _or_reload(self) -> Iterator[None]:
        """Leave the work for the next time if another commit came first."""
        try:
            yield
        except lake.ConflictError:
            self._reload()

    @property
    def tables(self) -> list[str] | None:
        """The tables that it was created for; None: all."""
        about = self.table.metadata().description
        found: list[str] | None = json.loads(about) if about else None
        return found

    @property
    def table(self) -> DeltaTable:
        """The table, with our commits; available after `find` or `open`."""
        assert self._loaded is not None, "it was opened"
        if self._own is not None and self._own.number > self._loaded.version():
            with lake.translated(self._path):
                self._loaded.update_incremental()
        return self._loaded

    def _reload(self) -> None:
        """Reload the table; raise if it is another table, or another generation is current."""
        generation, known, version = self.generation, self._id, self._version
        if self._is_newest():
            return
        table = lake.opened(self._path, self._storage)
        if table is None or table.metadata().id != known:
            raise StoreLostError(f"{self._path} is not the table that was opened")
        is_other = self._own is not None and not self._files.has(self._own)
        if is_other or table.version() != version:  # it was restored, or another process wrote
            self._full = self.newest = None
        current = lake.newest_transaction(table, _GENERATION) or 1
        if current != generation:
            raise SwitchedError(f"generation {generation} of {self._path} is no longer current")
        self._set(table)

    @property
    def _version(self) -> int:
        """The newest version that we have read or written."""
        assert self._loaded is not None, "it was opened"
        return self._own.number if self._own else self._loaded.version()

    def _is_newest(self) -> bool:
        """Return whether our last commit is the table's newest, and still there."""
        return (
            self._own is not None
            and self._files.has(self._own)
            and self._files.tag(log_name(self._own.number + 1)) is None
        )

    @cached_property
    def _files(self) -> Files:
        return Files(self._path, self._storage)

    def _set(self, table: DeltaTable) -> None:
        self._loaded, self._own, self._id = table, None, table.metadata().id
        sizes = pa.table(table.get_add_actions())["size_bytes"].to_pylist()
        self._small_files = sum(size < _SMALL_BYTES for size in sizes)
        self.generation = lake.newest_transaction(table, _GENERATION) or 1
        generation, reached = lake.generation_and_seq(lake.newest_transaction(table, _REACHED))
        self.reached = reached if generation == self.generation else 0
        self.unwanted = lake.generation_and_seq(lake.newest_transaction(table, _UNWANTED))
        made = (table.metadata().created_time or 0) / 1_000
        self.tidied = lake.newest_transaction(table, _TIDIED) or made
        generation, seq = lake.generation_and_seq(lake.newest_transaction(table, _APPLIED))
        if generation != self.generation:
            self.newest = None
        elif self.newest is None:
            found = rows(table, f"generation = {generation} AND seq = {seq}")
            self.newest = max(found, key=lambda row: (row.applied.lsn, row.is_whole), default=None)

    def _append(self, new: list[dict[str, object]], apps: Mapping[str, int]) -> None:
        """Commit rows and transactions; raise ConflictError if another commit came first."""
        appended = pa.Table.from_pylist(new, schema=ARROW)
        table, version = self._loaded, self._version + 1
        assert table is not None, "it was opened"
        if not set(ARROW.names) <= set(lake.arrow_schema(table).names):
            self._merge(appended, apps)
            return
        features.expect_ours(table, changes_rows=bool(new))
        actions: list[Action] = [
            {"txn": {"appId": app, "version": at, "lastUpdated": int(time.time() * 1_000)}}
            for app, at in apps.items()
        ]
        if new:
            actions.append(small_file(self._files, appended))
        by = lake.CommitInfo("", None, self._owner)
        with lake.translated(self._path):
            tag = put_version(self._files, version, actions, _WRITE, by)
            self._own = TaggedVersion(version, tag)
            # Other commits may take the round number.
            if version // CHECKPOINT_EVERY > table.version() // CHECKPOINT_EVERY:
                self.table.create_checkpoint()

    def _merge(self, appended: pa.Table, apps: Mapping[str, int]) -> None:
        """Commit as `_append` does, and add columns that an older table lacks."""
        with lake.translated(self._path):
            write_deltalake(
                self.table,
                appended,
                mode="append",
                schema_mode="merge",
                commit_properties=self._properties(apps),
            )

    def _properties(self, apps: Mapping[str, int]) -> CommitProperties:
        return CommitProperties(
            custom_metadata={"userMetadata": layout.metadata(**self._owner)},
            app_transactions=[Transaction(app, seq) for app, seq in apps.items()],
        )


def now() -> datetime:
    return datetime.now(UTC)
