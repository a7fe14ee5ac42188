"""The statistics in a file's add action, by which readers skip files: bounds and NULLs.

For the first 32 columns, as in Delta's own writer. Text is truncated to 32 characters, unless its
column is to be exact, and times to milliseconds, the upper bound rounded up: a bound may be wide,
never narrow. Doubles with a NaN have no bounds, because readers do not agree on its order.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md#per-file-statistics
"""

from __future__ import annotations

import math
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Collection

_COLUMNS: Final = 32
_CHARACTERS: Final = 32
_LAST_CHARACTER: Final = "\U0010ffff"
_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - the zone is written after it
_LAST_MS: Final = 253_402_300_799_999


class Stats:
    """The statistics of one file, row group by row group."""

    def __init__(self, schema: pa.Schema, *, exact: Collection[str] = ()) -> None:
        """Text columns that are `exact` have bounds which are not truncated."""
        self._exact = exact
        fields = [schema.field(at) for at in range(min(_COLUMNS, len(schema)))]
        self.rows = 0
        self._nulls = {field.name: 0 for field in fields}
        self._bounded = {field.name: field.type for field in fields if _has_bounds(field.type)}
        self._least: dict[str, Any] = {}
        self._most: dict[str, Any] = {}

    def add(self, rows: pa.Table) -> None:
        """Add rows."""
        self.rows += rows.num_rows
        for name in self._nulls:
            self._nulls[name] += rows[name].null_count
        for name, kind in list(self._bounded.items()):
            column = rows[name]
            if pa.types.is_floating(kind) and pc.any(pc.is_nan(column)).as_py():
                del self._bounded[name]
                continue
            if pa.types.is_timestamp(kind):
                column = column.cast(pa.int64())
            found = pc.min_max(column)
            least, most = found["min"].as_py(), found["max"].as_py()
            if least is not None:
                self._least[name] = min(self._least.get(name, least), least)
                self._most[name] = max(self._most.get(name, most), most)

    def json(self) -> str:
        """Return them in the form of an add action."""
        least: dict[str, object] = {}
        most: dict[str, object] = {}
        for name, kind in self._bounded.items():
            if name in self._least:
                low, high = self._least[name], self._most[name]
                if name not in self._exact:
                    low, high = _written(kind, low, high)
                if low is not None and high is not None:
                    least[name], most[name] = low, high
        fields = {
            "numRecords": self.rows,
            "minValues": least,
            "maxValues": most,
            "nullCount": self._nulls,
            "tightBounds": True,
        }
        return msgspec.json.encode(fields).decode()


def with_deleted(stats: str, rows: int) -> str:
    """Return a file's statistics once some of its rows are deleted: bounds that may be wide."""
    known = msgspec.json.decode(stats or "{}", type=dict[str, msgspec.Raw])
    known |= {"numRecords": msgspec.Raw(b"%d" % rows), "tightBounds": msgspec.Raw(b"false")}
    return msgspec.json.encode(known).decode()


def without_values(stats: str, rows: int) -> set[str]:
    """Return the columns of a file with so many rows, deleted ones included, that are all NULL."""
    known = msgspec.json.decode(stats or "{}").get("nullCount") or {}
    return {name for name, nulls in known.items() if nulls == rows}


def _has_bounds(kind: pa.DataType) -> bool:
    return any(
        each(kind)
        for each in (
            pa.types.is_integer,
            pa.types.is_floating,
            pa.types.is_decimal,
            pa.types.is_date,
            pa.types.is_timestamp,
            pa.types.is_string,
        )
    )


def _written(kind: pa.DataType, least: Any, most: Any) -> tuple[object, object]:  # noqa: ANN401 - any type's
    """Return both bounds for JSON, None if it has no form for them."""
    if pa.types.is_timestamp(kind):
        zone = "Z" if kind.tz else ""
        return _time(least // 1_000, zone), _time(-(-most // 1_000), zone)
    if pa.types.is_string(kind):
        return least[:_CHARACTERS], _above(most)
    if pa.types.is_floating(kind):
        # Equal to Arrow, which has found either; some readers take -0 for less than 0.
        least, most = -0.0 if least == 0 else least, 0.0 if most == 0 else most
    return _as_json(least), _as_json(most)


def _as_json(value: Any) -> object:  # noqa: ANN401 - any type's
    match value:
        case Decimal():
            # As a number with all its digits, which a float can't hold.
            return msgspec.Raw(format(value, "f").encode())
        case float():
            return value if math.isfinite(value) else None
        case date():
            return value.isoformat()
        case _:
            return value


def _time(ms: int, zone: str) -> str | None:
    if ms > _LAST_MS:
        return None
    return (_EPOCH + timedelta(milliseconds=ms)).isoformat(timespec="milliseconds") + zone


def _above(text: str) -> str | None:
    """Return a short text that is not less than the given one."""
    if len(text) <= _CHARACTERS:
        return text
    # No text with this prefix is greater, unless it continues with that character.
    return None if text[_CHARACTERS] == _LAST_CHARACTER else text[:_CHARACTERS] + _LAST_CHARACTER
