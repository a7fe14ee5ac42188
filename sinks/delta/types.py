"""Which type a Postgres type has in Delta Lake, and what of its values that type cannot hold.

The natural type where each value is exactly one of its values; Postgres' own text where there is
none. A few types are natural though some values do not fit, such as `infinity` in a date or NaN in
a numeric: there the column is NULL and `_exact`, a map, has the column's name with Postgres' text.
So NULL with an entry in `_exact` is a value, and NULL without one is NULL. Nothing is clamped.

Pure. docs/DELTA.md has the table for users. Types are named as relation messages name them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

MAX_PRECISION: Final = 38
# Spark's and most readers' calendar: what lies outside does not fit.
FIRST_YEAR, LAST_YEAR = 1, 9999

_MODIFIER_OFFSET: Final = 4
_SCALE_BITS: Final = 0x7FF
_SCALE_SIGN: Final = 0x400
_MONEY_PRECISION: Final = 19  # 64 bits


class Kind(Enum):
    """How values of a type become Delta's."""

    SAME = "same"  # every value is one of Delta's
    CALENDAR = "calendar"  # those from year 1 to 9999
    NUMBER = "number"  # decimal digits in text, but for NaN and the infinities
    MONEY = "money"  # decimal digits in text between Postgres' marks
    TEXT = "text"  # Postgres' own text
    ARRAY = "array"  # those of one dimension that begins at 1 and whose elements fit


@dataclass(frozen=True)
class DeltaType:
    """A type of Delta Lake, by the name that its schema has in JSON."""

    name: str
    kind: Kind
    element: DeltaType | None = None

    @property
    def json(self) -> str | dict[str, object]:
        """The type as Spark and Delta write it in a schema."""
        if self.element is None:
            return self.name
        return {"type": "array", "elementType": self.element.json, "containsNull": True}


TEXT: Final = DeltaType("string", Kind.TEXT)
_NATURAL: Final = {
    "bool": DeltaType("boolean", Kind.SAME),
    "int2": DeltaType("short", Kind.SAME),
    "int4": DeltaType("integer", Kind.SAME),
    "int8": DeltaType("long", Kind.SAME),
    "oid": DeltaType("long", Kind.SAME),
    "float4": DeltaType("float", Kind.SAME),
    "float8": DeltaType("double", Kind.SAME),
    "bytea": DeltaType("binary", Kind.SAME),
    "date": DeltaType("date", Kind.CALENDAR),
    "timestamp": DeltaType("timestamp_ntz", Kind.CALENDAR),
    "timestamptz": DeltaType("timestamp", Kind.CALENDAR),
}
# What stands in a mask's place, by the fixed value's own type.
_FIXED: Final = {bool: "boolean", int: "long", float: "double"}


def delta_type(name: str, modifier: int, *, money_digits: int = 2) -> DeltaType:
    """Return the type of a column of the built-in type `name`, or of any other by its name."""
    if name in _NATURAL:
        return _NATURAL[name]
    if name == "numeric":
        return _numeric(modifier)
    if name == "money":
        return DeltaType(f"decimal({_MONEY_PRECISION},{money_digits})", Kind.MONEY)
    # An array of a type that is not built in is known by a name that anybody may have given.
    if name.startswith("_") and "." not in name:
        element = delta_type(name[1:], modifier, money_digits=money_digits)
        return DeltaType("array", Kind.ARRAY, element)
    return TEXT


def fixed_type(value: object) -> DeltaType:
    """Return the type of a column under a mask that puts `value` there."""
    return DeltaType(_FIXED.get(type(value), "string"), Kind.SAME)


def _numeric(modifier: int) -> DeltaType:
    """Return a decimal that holds every finite value; text where none is wide enough."""
    if modifier < _MODIFIER_OFFSET:
        return TEXT  # any number of digits, on either side of the point
    packed = modifier - _MODIFIER_OFFSET
    scale = ((packed & _SCALE_BITS) ^ _SCALE_SIGN) - _SCALE_SIGN
    # A negative scale has zeros before the point; a scale above the precision, behind it.
    precision = max((packed >> 16) - min(scale, 0), scale)
    if precision > MAX_PRECISION:
        return TEXT
    return DeltaType(f"decimal({precision},{max(scale, 0)})", Kind.NUMBER)
