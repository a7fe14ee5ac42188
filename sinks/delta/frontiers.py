"""`_frontiers`: the follower's applied frontiers, each with every mirror's version at it.

One row is appended after each batch, when all mirrors are at its frontier: reading each mirror at
the version in one row reads all of them as of one LSN. Until then readers use the previous row. A
separate Delta transaction records up to which seq a batch is being written, before any of it is
written; every commit repeats the generation, so that a commit of an older generation fails once
another is current.

Columns: `generation`, `epoch`, `lsn`, `seq`, `committed_at`, `applied` (the complete frontier,
JSON), `versions` (map: a mirror's folder to its Delta version), `is_whole` (false if these are at
different frontiers, as after the switch of a single table: not a readable state), `written_at` (by
the writer's clock, which decides how long the row is kept, because the source's time may be long
past while catching up).

Two commits per batch: their small files are joined and deleted once there are many, independent of
other upkeep, so that opening the table stays fast.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
from deltalake import CommitProperties, Transaction, write_deltalake

from cdc.errors import StoreLostError, SwitchedError
from lockstep.sinks.contract import Applied, expect_alone
from lockstep.sinks.delta import lake, layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from deltalake import DeltaTable

    from cdc.events import LSN

NAME: Final = "_frontiers"
_TYPES: Final[dict[str, object]] = {
    "generation": "long",
    "epoch": "long",
    "lsn": "long",
    "seq": "long",
    "committed_at": "timestamp",
    "applied": "string",
    "versions": {
        "type": "map",
        "keyType": "string",
        "valueType": "long",
        "valueContainsNull": False,
    },
    "is_whole": "boolean",
    "written_at": "timestamp",
}
_ARROW: Final = pa.schema(
    [
        *((name, pa.int64()) for name in ("generation", "epoch", "lsn", "seq")),
        ("committed_at", pa.timestamp("us", "UTC")),
        ("applied", pa.string()),
        ("versions", pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False))),
        ("is_whole", pa.bool_()),
        ("written_at", pa.timestamp("us", "UTC")),
    ]
)
# Names of this table's Delta transactions.
_REACHED: Final = "lockstep/reached"
_APPLIED: Final = "lockstep/applied"
_GENERATION: Final = "lockstep/generation"
_TIDIED: Final = "lockstep/tidied"  # the time, in seconds
# How many small files are joined at once; files above a size are not worth rewriting.
_MOST_FILES: Final = 200
_SMALL_BYTES: Final = 4 << 20
_JOINED_BYTES: Final = 8 << 20
# Old versions of this table are not read, but two copies of a follower must see each other's
# commits.
_KEPT_HOURS: Final = 1
_PROPERTIES: Final = {
    "delta.logRetentionDuration": f"interval {_KEPT_HOURS} hours",
    "delta.deletedFileRetentionDuration": f"interval {_KEPT_HOURS + 1} hours",
}
_TRIES: Final = 10


class FrontierRow(NamedTuple):
    """One row."""

    generation: int
    applied: Applied
    versions: Mapping[str, int]
    is_whole: bool = True


class Frontiers:
    """The `_frontiers` table in one follower's path."""

    def __init__(self, root: str, storage: Mapping[str, str], owner: Mapping[str, object]) -> None:
        self._path = f"{root.rstrip('/')}/{NAME}"
        self._storage, self._owner = storage, owner
        self._table: DeltaTable | None = None
        self._id: object = None
        self.newest: FrontierRow | None = None
        self.reached = 0
        self.generation = 1
        self.tidied = 0.0  # when the last upkeep ran, or the table was created

    def find(self) -> bool:
        """Load the table; return whether it exists."""
        table = lake.opened(self._path, self._storage)
        if table is None:
            return False
        self._set(table)
        return True

    def open(self, generation: int, tables: frozenset[str] | None = None) -> None:
        """Load the table; create a missing one, for some `tables` only if given."""
        if self.find():
            return
        table = lake.made(
            self._path,
            layout.struct(_TYPES.items(), NAME),
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

    def commit(self, applied: Applied, versions: Mapping[str, int]) -> None:
        """Append the row, unless the newest has that frontier or a later one."""
        row = FrontierRow(self.generation, applied, versions)
        upto = lake.transaction_version(self.generation, applied.seq)
        for _ in range(_TRIES):
            newest = self.newest and self.newest.applied
            is_old = newest and (newest.seq, newest.lsn) >= (applied.seq, applied.lsn)
            if is_old and self.newest and self.newest.is_whole:
                return
            try:
                self._append([row], {_APPLIED: upto, _GENERATION: self.generation})
            except lake.ConflictError:
                self._reload()
                continue
            self.newest = row
            sizes = pa.table(self.table.get_add_actions())["size_bytes"].to_pylist()
            if sum(size < _SMALL_BYTES for size in sizes) >= _MOST_FILES:
                self._join()
            return
        raise lake.busy(self._path)

    def switch(self, row: FrontierRow, reached: int) -> None:
        """Make the row's generation current, at its frontier."""
        apps = {
            _APPLIED: lake.transaction_version(row.generation, row.applied.seq),
            _REACHED: lake.transaction_version(row.generation, reached),
            _GENERATION: row.generation,
        }
        self._append([row], apps)
        self.find()

    def start_over(self, generation: int) -> None:
        """Start a generation at no frontier, regardless of existing rows."""
        self.open(generation)
        with lake.translated(self._path):
            write_deltalake(
                self.table,
                _ARROW.empty_table(),
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

    def delete(self, generation: int) -> None:
        """Delete the rows of a generation."""
        with lake.translated(self._path):
            self.table.delete(f"generation = {generation}")

    def tidy(self, keep_hours: float) -> None:
        """Delete rows that are older than what can be read; join small files, delete old ones.

        Only rows of the current generation: those of an older one stay until it is dropped. The
        newest of the old rows stays too: it is the state at the start of the retention time.
        """
        with lake.translated(self._path):
            self.table.update_incremental()
        with self._or_reload():
            self._append([], {_TIDIED: int(_now().timestamp())})
        if keep_hours:
            oldest = (_now() - timedelta(hours=keep_hours)).isoformat()
            mine = f"generation = {self.generation}"
            is_old = f"{mine} AND is_whole AND written_at < '{oldest}'"
            old = lake.read(self.table, ["seq", "lsn"], is_old).to_pylist()
            seq, lsn = max(((each["seq"], each["lsn"]) for each in old), default=(0, 0))
            if len(old) > 1:
                with self._or_reload(), lake.translated(self._path):
                    self.table.delete(f"{mine} AND (seq < {seq} OR (seq = {seq} AND lsn < {lsn}))")
        self._join()

    def _join(self) -> None:
        """Join the files of single rows, and delete replaced files and old commits."""
        with self._or_reload(), lake.translated(self._path):
            self.table.optimize.compact(target_size=_JOINED_BYTES)
            # A full vacuum: the log may no longer list files removed before its last checkpoint.
            self.table.vacuum(
                retention_hours=_KEPT_HOURS,
                dry_run=False,
                enforce_retention_duration=False,
                full=True,
            )
            self.table.create_checkpoint()
            self.table.cleanup_metadata()

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
        """The table; available after `find` or `open`."""
        assert self._table is not None, "it was opened"
        return self._table

    def _reload(self) -> None:
        """Reload the table; raise if it is another table, or another generation is current."""
        generation, known = self.generation, self._id
        table = lake.opened(self._path, self._storage)
        if table is None or table.metadata().id != known:
            raise StoreLostError(f"{self._path} is not the table that was opened")
        current = lake.newest_transaction(table, _GENERATION) or 1
        if current != generation:
            raise SwitchedError(f"generation {generation} of {self._path} is no longer current")
        self._set(table)

    def _set(self, table: DeltaTable) -> None:
        self._table, self._id = table, table.metadata().id
        self.generation = lake.newest_transaction(table, _GENERATION) or 1
        generation, reached = lake.generation_and_seq(lake.newest_transaction(table, _REACHED))
        self.reached = reached if generation == self.generation else 0
        made = (table.metadata().created_time or 0) / 1_000
        self.tidied = lake.newest_transaction(table, _TIDIED) or made
        generation, seq = lake.generation_and_seq(lake.newest_transaction(table, _APPLIED))
        if generation != self.generation:
            self.newest = None
        elif self.newest is None or (self.newest.generation, self.newest.applied.seq) != (
            generation,
            seq,
        ):
            found = rows(table, f"generation = {generation} AND seq = {seq}")
            self.newest = max(found, key=lambda row: row.applied.lsn, default=None)

    def _append(self, new: list[FrontierRow], apps: Mapping[str, int]) -> None:
        with lake.translated(self._path):
            write_deltalake(
                self.table,
                pa.Table.from_pylist([as_columns(row) for row in new], schema=_ARROW),
                mode="append",
                schema_mode="merge",  # adds columns that an older table lacks
                commit_properties=self._properties(apps),
            )

    def _properties(self, apps: Mapping[str, int]) -> CommitProperties:
        return CommitProperties(
            custom_metadata={"userMetadata": layout.metadata(**self._owner)},
            app_transactions=[Transaction(app, seq) for app, seq in apps.items()],
        )


def rows(table: DeltaTable, where: str) -> list[FrontierRow]:
    """Return the rows that an SQL predicate selects."""
    found = lake.read(table, ["generation", "applied", "versions", "is_whole"], where)
    return [
        FrontierRow(
            each["generation"],
            Applied.from_fields(json.loads(each["applied"])),
            dict(each["versions"]),
            each["is_whole"],
        )
        for each in found.to_pylist()
    ]


def as_of(table: DeltaTable, lsn: LSN | None, time: datetime | None) -> FrontierRow | None:
    """Return the newest row not above an LSN or a commit time, or the newest of all.

    It is of the newest generation that has one.
    """
    where = ["is_whole"]
    if lsn is not None:
        where.append(f"lsn <= {int(lsn)}")
    if time is not None:
        where.append(f"committed_at <= '{time.isoformat()}'")
    order = ["generation", "seq", "lsn"]
    places = lake.read(table, order, " AND ".join(where)).to_pylist()
    if not places:
        return None
    newest = max(places, key=lambda each: [each[name] for name in order])
    return rows(table, " AND ".join(f"{name} = {newest[name]}" for name in order))[-1]


def as_columns(row: FrontierRow) -> dict[str, object]:
    """Return a row by its columns."""
    applied = row.applied
    return {
        "generation": row.generation,
        "epoch": applied.epoch,
        "lsn": int(applied.lsn),
        "seq": applied.seq,
        "committed_at": applied.committed_at_us,
        "applied": json.dumps(applied._asdict()),
        "versions": list(row.versions.items()),
        "is_whole": row.is_whole,
        "written_at": _now(),
    }


def _now() -> datetime:
    return datetime.now(UTC)
