"""Rows of `_frontiers`: a frontier, and every mirror's version at it.

Columns: `generation`, `epoch`, `lsn`, `seq`, `committed_at`, `applied` (the complete frontier,
JSON), `versions` (map: a mirror's folder to its Delta version), `is_whole` (false if these are at
different frontiers, as after the switch of a single table: not a readable state), `written_at` (by
the writer's clock, which decides how long the row is kept, because the source's time may be long
past while catching up).

A full row has all `versions`. A partial row has NULL there, and in `changed` the versions that
differ from those of the full row at `full_seq` and `full_lsn` of its generation. It does not depend
on other partial rows, so each row is read with one other at most. Whatever deletes a full row makes
the rows that depend on it independent of it, in the same commit.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from cdc.errors import StoreLostError
from lockstep.sinks.contract import Applied
from lockstep.sinks.delta import lake

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from deltalake import DeltaTable

    from cdc.events import LSN

NAME: Final = "_frontiers"
TYPES: Final[dict[str, object]] = {
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
    "changed": {
        "type": "map",
        "keyType": "string",
        "valueType": "long",
        "valueContainsNull": False,
    },
    "full_seq": "long",
    "full_lsn": "long",
}
_VERSIONS: Final = pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False))
ARROW: Final = pa.schema(
    [
        *((name, pa.int64()) for name in ("generation", "epoch", "lsn", "seq")),
        ("committed_at", pa.timestamp("us", "UTC")),
        ("applied", pa.string()),
        ("versions", _VERSIONS),
        ("is_whole", pa.bool_()),
        ("written_at", pa.timestamp("us", "UTC")),
        ("changed", _VERSIONS),
        ("full_seq", pa.int64()),
        ("full_lsn", pa.int64()),
    ]
)

# A row's generation, seq and LSN.
Place = tuple[int, int, int]


class FrontierRow(NamedTuple):
    """One row."""

    generation: int
    applied: Applied
    versions: Mapping[str, int]
    is_whole: bool = True


def rows(table: DeltaTable, where: str) -> list[FrontierRow]:
    """Return the rows that an SQL predicate selects, with all their versions."""
    names = lake.arrow_schema(table).names
    # A table of an older release has full rows only, until the first row is appended.
    more = [name for name in ("lsn", "seq", "changed", "full_seq", "full_lsn") if name in names]
    found = lake.read(table, ["generation", "applied", "versions", "is_whole", *more], where)
    read = found.to_pylist()
    full = full_rows(table, {depends_on(each) for each in read if each["versions"] is None})
    return [row_of(each, full) for each in read]


def row_of(columns: Mapping[str, Any], full: Mapping[Place, Mapping[str, int]]) -> FrontierRow:
    """Return a row by its columns; `full` has the full row that a partial one depends on."""
    versions = columns["versions"]
    return FrontierRow(
        columns["generation"],
        Applied.from_fields(json.loads(columns["applied"])),
        dict(versions)
        if versions is not None
        else {**full[depends_on(columns)], **dict(columns["changed"])},
        columns["is_whole"],
    )


def depends_on(columns: Mapping[str, Any]) -> Place:
    """Return the place of the full row that a partial one depends on."""
    return columns["generation"], columns["full_seq"], columns["full_lsn"]


def full_rows(table: DeltaTable, places: set[Place]) -> dict[Place, dict[str, int]]:
    """Return the versions of full rows; raise StoreLostError if one is missing."""
    if not places:
        return {}
    of = ["generation", "seq", "lsn"]
    one = ("(" + " AND ".join(f"{name} = {at}" for name, at in zip(of, place, strict=True)) + ")"
           for place in places)  # fmt: skip
    where = f"is_whole AND versions IS NOT NULL AND ({' OR '.join(one)})"
    read = lake.read(table, [*of, "versions"], where).to_pylist()
    found = {tuple(each[name] for name in of): dict(each["versions"]) for each in read}
    for generation, seq, _ in places - found.keys():
        raise StoreLostError(
            f"{table.table_uri} has no full row at seq {seq} of generation {generation}, which"
            " later rows need"
        )
    return found


def at_frontier(applied: Applied) -> str:
    """Return the predicate for the rows at a frontier."""
    return f"seq = {applied.seq} AND lsn = {int(applied.lsn)} AND is_whole"


def changed(row: FrontierRow, full: FrontierRow) -> dict[str, int]:
    """Return the versions that differ from a full row's."""
    before = full.versions
    return {place: at for place, at in row.versions.items() if before.get(place) != at}


def order(row: FrontierRow) -> Place:
    """Return what is larger for a newer row."""
    return row.generation, row.applied.seq, row.applied.lsn


def newest(found: Iterable[FrontierRow]) -> FrontierRow | None:
    """Return the newest row of the newest generation; None if there is none."""
    return max(found, key=order, default=None)


def as_of(table: DeltaTable, lsn: LSN | None, time: datetime | None) -> FrontierRow | None:
    """Return the newest row not above an LSN or a commit time, or the newest of all.

    It is of the newest generation that has one.
    """
    where = ["is_whole"]
    if lsn is not None:
        where.append(f"lsn <= {int(lsn)}")
    if time is not None:
        where.append(f"committed_at <= '{time.isoformat()}'")
    columns = ["generation", "seq", "lsn"]
    places = lake.read(table, columns, " AND ".join(where)).to_pylist()
    if not places:
        return None
    place = max(places, key=lambda each: [each[name] for name in columns])
    return rows(table, " AND ".join(f"{name} = {place[name]}" for name in columns))[-1]


def as_columns(
    row: FrontierRow, written_at: datetime, full: FrontierRow | None = None
) -> dict[str, object]:
    """Return a row by its columns: a full one, or what differs from a full one."""
    applied = row.applied
    columns: dict[str, object] = {
        "generation": row.generation,
        "epoch": applied.epoch,
        "lsn": int(applied.lsn),
        "seq": applied.seq,
        "committed_at": applied.committed_at_us,
        "applied": json.dumps(applied._asdict()),
        "is_whole": row.is_whole,
        "written_at": written_at,
    }
    if full is None:
        return columns | full_columns(row)
    at = {"full_seq": full.applied.seq, "full_lsn": int(full.applied.lsn)}
    return columns | at | {"versions": None, "changed": list(changed(row, full).items())}


def full_columns(row: FrontierRow) -> dict[str, object]:
    """Return the columns in which a full row differs from a partial one."""
    versions = list(row.versions.items())
    return {"versions": versions, "changed": None, "full_seq": None, "full_lsn": None}


def below(seq: int, lsn: int) -> str:
    """Return the predicate for rows before a frontier."""
    return f"(seq < {seq} OR (seq = {seq} AND lsn < {lsn}))"


def upto(seq: int, lsn: int) -> str:
    """Return the predicate for rows up to a frontier."""
    return f"(seq < {seq} OR (seq = {seq} AND lsn <= {lsn}))"
