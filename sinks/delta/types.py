"""The Delta Lake type of a Postgres type, and the values that it cannot hold.

The natural type if it holds each value exactly; Postgres' own text if there is none. A few types
are natural although some values do not fit, such as `infinity` in a date or NaN in a numeric: then
the column is NULL and `_exact`, a map, has the column's name with Postgres' text. So NULL with an
entry in `_exact` is a value, and NULL without one is NULL. Nothing is clamped.

Pure. docs/DELTA.md has the table for users. Which values a type has is in `cdc.decode.types`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from cdc.decode.types import ValueKind, element_of, numeric_size, row_of

MAX_PRECISION: Final = 38
# The years of Spark's and most readers' calendar: dates outside do not fit.
FIRST_YEAR, LAST_YEAR = 1, 9999

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
# By the kind of values, and their size.
_NATURAL: Final = {
    (ValueKind.BOOLEAN, 0): DeltaType("boolean", TypeKind.SAME),
    (ValueKind.INTEGER, 2): DeltaType("short", TypeKind.SAME),
    (ValueKind.INTEGER, 4): DeltaType("integer", TypeKind.SAME),
    (ValueKind.INTEGER, 8): DeltaType("long", TypeKind.SAME),
    (ValueKind.OID, 0): DeltaType("long", TypeKind.SAME),
    (ValueKind.FLOAT, 4): DeltaType("float", TypeKind.SAME),
    (ValueKind.FLOAT, 8): DeltaType("double", TypeKind.SAME),
    (ValueKind.BYTES, 0): DeltaType("binary", TypeKind.SAME),
    (ValueKind.DATE, 0): DeltaType("date", TypeKind.CALENDAR),
    (ValueKind.TIMESTAMP, 0): DeltaType("timestamp_ntz", TypeKind.CALENDAR),
    (ValueKind.INSTANT, 0): DeltaType("timestamp", TypeKind.CALENDAR),
}
# The type of a masked column, by the type of the mask's fixed value.
_FIXED: Final = {bool: "boolean", int: "long", float: "double"}


def delta_type(name: str, modifier: int, *, money_digits: int = 2) -> DeltaType:
    """Return the type of a column whose Postgres type is `name`, built in or not."""
    element = element_of(name)
    # An array of a type that is not built in has a name that a user may have chosen.
    if element and "." not in name:
        of = delta_type(element, modifier, money_digits=money_digits)
        return DeltaType("array", TypeKind.ARRAY, of)
    row = row_of(name)
    if row is None:
        return TEXT
    if row.kind is ValueKind.NUMERIC:
        return _numeric(modifier)
    if row.kind is ValueKind.MONEY:
        return DeltaType(f"decimal({_MONEY_PRECISION},{money_digits})", TypeKind.MONEY)
    return _NATURAL.get((row.kind, row.size), TEXT)


def fixed_type(value: object) -> DeltaType:
    """Return the type of a column with a mask of the fixed `value`."""
    return DeltaType(_FIXED.get(type(value), "string"), TypeKind.SAME)


def _numeric(modifier: int) -> DeltaType:
    """Return a decimal that holds every finite value; text if none is wide enough."""
    size = numeric_size(modifier)
    # Without one, there are unlimited digits before and after the decimal point.
    if size is None or size.digits > MAX_PRECISION:
        return TEXT
    return DeltaType(f"decimal({size.digits},{max(size.scale, 0)})", TypeKind.NUMBER)
