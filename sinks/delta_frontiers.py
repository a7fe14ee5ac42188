"""`_frontiers`: the follower's applied frontiers, each with every mirror's version at it.

One row is appended behind each batch, when all mirrors stand at its frontier: reading each mirror
at the version that one row names is reading all of them as of one LSN. Until then the row before
is what readers go by. A Delta transaction of its own says up to which seq a batch is being written,
before anything of it is.

Columns: `generation`, `epoch`, `lsn`, `seq`, `committed_at`, `applied` (the whole frontier, JSON),
`versions` (map: `schema.table` to the Delta version of its mirror).
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
from deltalake import CommitProperties, Transaction, write_deltalake

from cdc.errors import StoreLostError, SwitchedError
from cdc.events import LSN
from sinks import delta_lake, delta_layout
from sinks.contract import Applied

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deltalake import DeltaTable

NAME: Final = "_frontiers"
_SCHEMA: Final[dict[str, object]] = {
    "type": "struct",
    "fields": [
        {"name": name, "type": kind, "nullable": True, "metadata": {}}
        for name, kind in {
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
        }.items()
    ],
}
_ARROW: Final = pa.schema(
    [
        *((name, pa.int64()) for name in ("generation", "epoch", "lsn", "seq")),
        ("committed_at", pa.timestamp("us", "UTC")),
        ("applied", pa.string()),
        ("versions", pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False))),
    ]
)
# Delta transactions of this table.
_REACHED: Final = "lockstep/reached"
_GENERATION: Final = "lockstep/generation"
_COMPACT_FILES: Final = 200
_TRIES: Final = 10


class Row(NamedTuple):
    """One row."""

    applied: Applied
    versions: Mapping[str, int]


class Frontiers:
    """The table of one follower's path."""

    def __init__(self, root: str, storage: Mapping[str, str], owner: Mapping[str, object]) -> None:
        self._path = f"{root.rstrip('/')}/{NAME}"
        self._storage, self._owner = storage, owner
        self._table: DeltaTable | None = None
        self._id: object = None
        self.newest: Row | None = None
        self.reached = 0
        self.generation = 1

    def open(self) -> None:
        """Take what is there; make the table where it is missing."""
        table = delta_lake.opened(self._path, self._storage)
        if table is None:
            table = delta_lake.made(
                self._path, _SCHEMA, self._storage, properties={}, facts=self._owner
            )
        self._table, self._id = table, table.metadata().id
        self._look()
        self.newest = self._newest_row()

    def begin(self, reached: int) -> None:
        """Note how far rows may reach; raise where the table is not the one that was opened."""
        for _ in range(_TRIES):
            self._again()
            if reached <= self.reached:
                return
            try:
                self._append([], {_REACHED: reached})
            except delta_lake.ConflictError:
                continue
            self.reached = reached
            return
        raise delta_lake.busy(self._path)

    def commit(self, applied: Applied, versions: Mapping[str, int]) -> bool:
        """Append the row, unless the newest is of that frontier or a later one."""
        for _ in range(_TRIES):
            newest = self.newest and self.newest.applied
            if newest and (newest.seq, newest.lsn) >= (applied.seq, applied.lsn):
                return False
            try:
                self._append([Row(applied, versions)], {self._app: applied.seq})
            except delta_lake.ConflictError:
                self._again()
                continue
            self.newest = Row(applied, versions)
            return True
        raise delta_lake.busy(self._path)

    def anew(self, generation: int) -> None:
        """Begin a generation at no frontier, whatever is there."""
        table = delta_lake.opened(self._path, self._storage) or delta_lake.made(
            self._path, _SCHEMA, self._storage, properties={}, facts=self._owner
        )
        with delta_lake.translated(self._path):
            write_deltalake(
                table,
                pa.Table.from_pylist([], schema=_ARROW),
                mode="overwrite",
                commit_properties=self._properties({_GENERATION: generation, _REACHED: 0}),
            )
        self.open()

    def tidy(self, keep_hours: float) -> None:
        """Join small files; forget rows, and files, older than what can be read."""
        table = self._table
        assert table is not None, "open comes first"
        with delta_lake.translated(self._path):
            if len(table.file_uris()) > _COMPACT_FILES:
                table.optimize.compact()
                oldest = datetime.now(UTC).timestamp() - keep_hours * 3600
                if keep_hours and self.newest is not None:
                    kept = min(oldest * 1_000_000, self.newest.applied.committed_at_us)
                    at = datetime.fromtimestamp(kept / 1_000_000, UTC)
                    table.delete(f"committed_at < '{at.isoformat()}'")
                table.vacuum(retention_hours=1, dry_run=False, enforce_retention_duration=False)
                table.create_checkpoint()
                table.cleanup_metadata()

    @property
    def _app(self) -> str:
        return f"lockstep/{self.generation}/applied"

    def _again(self) -> None:
        """Look at the table as it is; raise where it is another, or another generation's."""
        table = delta_lake.opened(self._path, self._storage)
        if table is None or table.metadata().id != self._id:
            raise StoreLostError(f"{self._path} is not the table that was opened")
        generation = self.generation
        self._table = table
        self._look()
        if self.generation != generation:
            raise SwitchedError(f"generation {generation} of {self._path} is no longer the one")
        newest = table.transaction_version(self._app) or 0
        if self.newest is None or newest > self.newest.applied.seq:
            self.newest = self._newest_row()

    def _look(self) -> None:
        table = self._table
        assert table is not None, "open comes first"
        self.generation = table.transaction_version(_GENERATION) or 1
        self.reached = table.transaction_version(_REACHED) or 0

    def _newest_row(self) -> Row | None:
        table = self._table
        assert table is not None, "open comes first"
        newest = table.transaction_version(self._app)
        if newest is None:
            return None
        found = rows(table, f"generation = {self.generation} AND seq = {newest}")
        return max(found, key=lambda row: row.applied.lsn, default=None)

    def _append(self, new: list[Row], apps: Mapping[str, int]) -> None:
        table = self._table
        assert table is not None, "open comes first"
        with delta_lake.translated(self._path):
            write_deltalake(
                table,
                pa.Table.from_pylist(
                    [as_columns(row, self.generation) for row in new], schema=_ARROW
                ),
                mode="append",
                commit_properties=self._properties(apps),
            )

    def _properties(self, apps: Mapping[str, int]) -> CommitProperties:
        return CommitProperties(
            custom_metadata={"userMetadata": delta_layout.metadata(**self._owner)},
            app_transactions=[Transaction(app, seq) for app, seq in apps.items()],
        )


def rows(table: DeltaTable, where: str) -> list[Row]:
    """Return the rows that an SQL predicate names."""
    found = delta_lake.read(table, ["applied", "versions"], where)
    return [
        Row(_applied(json.loads(each["applied"])), dict(each["versions"]))
        for each in found.to_pylist()
    ]


def as_columns(row: Row, generation: int) -> dict[str, object]:
    """Return a row by its columns."""
    applied = row.applied
    return {
        "generation": generation,
        "epoch": applied.epoch,
        "lsn": int(applied.lsn),
        "seq": applied.seq,
        "committed_at": applied.committed_at_us,
        "applied": json.dumps(applied._asdict()),
        "versions": list(row.versions.items()),
    }


def _applied(said: dict[str, Any]) -> Applied:
    ends = {topic: tuple(offsets) for topic, offsets in said["ends"].items()}
    return Applied(**(said | {"lsn": LSN(said["lsn"]), "ends": ends}))


def as_of(table: DeltaTable, lsn: LSN | None, time: datetime | None) -> Row | None:
    """Return the newest row not above an LSN or a commit time; without either the newest."""
    generation = table.transaction_version(_GENERATION) or 1
    where = [f"generation = {generation}"]
    if lsn is not None:
        where.append(f"lsn <= {int(lsn)}")
    if time is not None:
        where.append(f"committed_at <= '{time.isoformat()}'")
    places = delta_lake.read(table, ["seq", "lsn"], " AND ".join(where)).to_pylist()
    if not places:
        return None
    newest = max(places, key=lambda each: (each["seq"], each["lsn"]))
    found = rows(table, f"{where[0]} AND seq = {newest['seq']} AND lsn = {newest['lsn']}")
    return found[-1]
