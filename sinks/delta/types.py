"""The Delta Lake type of a Postgres type, and the values that it cannot hold.

The natural type if it holds each value exactly; Postgres' own text if there is none. A few types
are natural although some values do not fit, such as `infinity` in a date or NaN in a numeric: then
the column is NULL and `_exact`, a map, has the column's name with Postgres' text. So NULL with an
entry in `_exact` is a value, and NULL without one is NULL. Nothing is clamped.

Pure. docs/DELTA.md has the table for users. Types have the names that relation messages use.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

MAX_PRECISION: Final = 38
# The years of Spark's and most readers' calendar: dates outside do not fit.
FIRST_YEAR, LAST_YEAR = 1, 9999

_MODIFIER_OFFSET: Final = 4
_SCALE_BITS: Final = 0x7FF
_SCALE_SIGN: Final = 0x400
_MONEY_PRECISION: Final = 19  # 64 bits


class TypeKind(Enum):
    """How values of a type are converted to Delta's."""

    SAME = "same"  # every value is one of Delta's
    CALENDAR = "calendar"  # values from year 1 to 9999 fit
    NUMBER = "number"  # decimal digits in text, except NaN and the infinities
    MONEY = "money"  # decimal digits in text, with Postgres' currency symbol and separators
    TEXT = "text"  # Postgres' own text
    ARRAY = "array"  # arrays fit if one-dimensional, with lower bound 1 and fitting elements


@dataclass(frozen=True)
class DeltaType:
    """A Delta Lake type, by its name in the JSON schema."""

    name: str
    kind: TypeKind
    element: DeltaType | None = None

    @property
    def json(self) -> str | dict[str, object]:
        """The type as Spark and Delta write it in a schema."""
        if self.element is None:
            return self.name
        return {"type": "array", "elementType": self.element.json, "containsNull": True}


TEXT: Final = DeltaType("string", TypeKind.TEXT)
_NATURAL: Final = {
    "bool": DeltaType("boolean", TypeKind.SAME),
    "int2": DeltaType("short", TypeKind.SAME),
    "int4": DeltaType("integer", TypeKind.SAME),
    "int8": DeltaType("long", TypeKind.SAME),
    "oid": DeltaType("long", TypeKind.SAME),
    "float4": DeltaType("float", TypeKind.SAME),
    "float8": DeltaType("double", TypeKind.SAME),
    "bytea": DeltaType("binary", TypeKind.SAME),
    "date": DeltaType("date", TypeKind.CALENDAR),
    "timestamp": DeltaType("timestamp_ntz", TypeKind.CALENDAR),
    "timestamptz": DeltaType("timestamp", TypeKind.CALENDAR),
}
# The type of a masked column, by the type of the mask's fixed value.
_FIXED: Final = {bool: "boolean", int: "long", float: "double"}


def delta_type(name: str, modifier: int, *, money_digits: int = 2) -> DeltaType:
    """Return the type of a column whose Postgres type is `name`, built in or not."""
    if name in _NATURAL:
        return _NATURAL[name]
    if name == "numeric":
        return _numeric(modifier)
    if name == "money":
        return DeltaType(f"decimal({_MONEY_PRECISION},{money_digits})", TypeKind.MONEY)
    # An array of a type that is not built in has a name that a user may have chosen.
    if name.startswith("_") and "." not in name:
        element = delta_type(name[1:], modifier, money_digits=money_digits)
        return DeltaType("array", TypeKind.ARRAY, element)
    return TEXT


def fixed_type(value: object) -> DeltaType:
    """Return the type of a column with a mask of the fixed `value`."""
    return DeltaType(_FIXED.get(type(value), "string"), TypeKind.SAME)


def _numeric(modifier: int) -> DeltaType:
    """Return a decimal that holds every finite value; text if none is wide enough."""
    if modifier < _MODIFIER_OFFSET:
        return TEXT  # unlimited digits before and after the decimal point
    packed = modifier - _MODIFIER_OFFSET
    scale = ((packed & _SCALE_BITS) ^ _SCALE_SIGN) - _SCALE_SIGN
    # A negative scale has zeros before the point; a scale above the precision, after it.
    precision = max((packed >> 16) - min(scale, 0), scale)
    if precision > MAX_PRECISION:
        return TEXT
    return DeltaType(f"decimal({precision},{max(scale, 0)})", TypeKind.NUMBER)
