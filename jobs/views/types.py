"""The Postgres types of a view's expressions, and how Spark has them in a mirror.

Pure. A type that is not among `COMPARED` is passed through unchanged: a view may select such a
column, and nothing else, because its text does not compare as its values do.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from cdc.decode.types import BY_OID, ValueKind, names_of, numeric_modifier, row_of
from cdc.errors import ConfigError
from cdc.log.records import NONDETERMINISTIC
from lockstep.sinks.contract import Column
from lockstep.sinks.delta.types import MAX_PRECISION, DeltaType, delta_type

if TYPE_CHECKING:
    from collections.abc import Mapping

# With their decimal digits.
INTEGERS: Final = {
    row.name: len(str(2 ** (8 * row.size - 1)))
    for row in BY_OID.values()
    if row.kind is ValueKind.INTEGER
}
FLOATS: Final = frozenset(names_of(ValueKind.FLOAT))
TEXTS: Final = frozenset(names_of(ValueKind.TEXT))
TIMES: Final = frozenset(names_of(ValueKind.DATE, ValueKind.TIMESTAMP, ValueKind.INSTANT))
# Types of which equality is the same in Spark.
COMPARED: Final = (FLOATS | TEXTS | TIMES) | {
    *INTEGERS,
    *names_of(ValueKind.BOOLEAN, ValueKind.NUMERIC, ValueKind.UUID),
}
# Values of these may be in `_exact`, where the column is NULL.
INEXACT: Final = TIMES | {*names_of(ValueKind.NUMERIC, ValueKind.MONEY)}
UNKNOWN: Final = "unknown"  # of a quoted literal or NULL, until something decides
# What a view in Python may return.
DECLARED: Final = (
    "bool", "int2", "int4", "int8", "float8", "text", "date", "timestamp", "timestamptz",
)  # fmt: skip
# Of a type's name here. It is none of `COMPARED` then: as a view passes it through, its equal texts
# may differ, and Spark's do not.
_NONDETERMINISTIC: Final = f" with a {NONDETERMINISTIC} collation"
_NUMERIC: Final = re.compile(r"numeric\((\d+), ?(\d+)\)")
_SPARK: Final = {
    "short": "smallint", "integer": "int", "long": "bigint", "timestamp": "timestamp",
}  # fmt: skip


class PgType(NamedTuple):
    """A Postgres type."""

    name: str
    modifier: int = -1
    oid: int = 0
    mask: str | None = None
    # A text that is ordered by its bytes, by COLLATE "C"; "column": as its column is.
    is_c: bool | Literal["column"] = False
    has_scale: bool = True  # a numeric, all of whose values have this scale in Postgres

    @property
    def size(self) -> tuple[int, int] | None:
        """Precision and scale of a numeric or an integer; None if it has none."""
        if self.name in INTEGERS:
            return INTEGERS[self.name], 0
        kind = self.delta.name
        if self.name != "numeric" or not kind.startswith("decimal"):
            return None
        precision, scale = kind[len("decimal(") : -1].split(",")
        return int(precision), int(scale)

    @property
    def delta(self) -> DeltaType:
        """The type in a mirror."""
        return delta_type("text" if self.mask else self._kind, self.modifier)

    @property
    def spark(self) -> str:
        """The type in a mirror, as Spark's SQL names it."""
        return _spark(self.delta)

    @property
    def has_masked_values(self) -> bool:
        """Whether values are masked, and say something all the same: which are equal."""
        return self.mask is not None and self.mask.partition(":")[0] in {"hmac", "truncate"}

    @property
    def is_nondeterministic(self) -> bool:
        """Whether it is a text under a collation by which different texts may be equal."""
        return self.name.endswith(_NONDETERMINISTIC)

    @property
    def as_bytes(self) -> PgType:
        """The type of a text with COLLATE "C"."""
        return self._replace(name=self._kind, is_c=True)

    @property
    def _kind(self) -> str:
        return self.name.removesuffix(_NONDETERMINISTIC)

    @property
    def title(self) -> str:
        """The type as messages name it."""
        size = self.size if self.name == "numeric" else None
        return f"numeric({size[0]},{size[1]})" if size else self.name

    def column(self, name: str) -> Column:
        """Return a column of this type."""
        row = row_of(self._kind)
        oid = self.oid or (row.oid if row else 0)
        made = Column(name, self._kind, oid, self.modifier, nullable=True, mask=self.mask)
        return made._replace(collation=NONDETERMINISTIC) if self.is_nondeterministic else made


def _spark(kind: DeltaType) -> str:
    if kind.element is not None:
        return f"array<{_spark(kind.element)}>"
    return _SPARK.get(kind.name, kind.name)


BOOL: Final = PgType("bool")
INT4: Final = PgType("int4")
INT8: Final = PgType("int8")
TEXT: Final = PgType("text")
DATE: Final = PgType("date")
FLOAT8: Final = PgType("float8")
JSON: Final = PgType("json")
JSONB: Final = PgType("jsonb")
NULL: Final = PgType(UNKNOWN)


def numeric(precision: int, scale: int, *, has_scale: bool = True) -> PgType:
    """Return a numeric type."""
    assert precision <= MAX_PRECISION, "checked before"
    return PgType("numeric", numeric_modifier(precision, scale), has_scale=has_scale)


def array_of(element: PgType) -> PgType:
    """Return the type of arrays of a built-in type."""
    row = row_of(element.name)
    assert row is not None, "it is built in"
    return PgType(f"_{element.name}", element.modifier, row.array)


def named(text: str) -> PgType:
    """Return the type that a view in Python declares; raise ConfigError for any other."""
    found = _NUMERIC.fullmatch(text)
    if found and int(found[2]) <= int(found[1]) <= MAX_PRECISION:
        return numeric(int(found[1]), int(found[2]))
    if text not in DECLARED:
        raise ConfigError(
            f"there is no type {text} for a column of a view in Python",
            hint=f"the types are {', '.join(DECLARED)}, and numeric(p,s) with p up to"
            f" {MAX_PRECISION}",
        )
    return PgType(text)


def of(column: Column) -> PgType:
    """Return a column's type."""
    found = PgType(column.type, column.modifier, column.type_id, column.mask)
    if column.mask:
        return found
    if column.collation == NONDETERMINISTIC:
        return found._replace(name=column.type + _NONDETERMINISTIC)
    return found._replace(is_c="column") if column.collation == "C" else found


def columns(given: Mapping[str, PgType]) -> tuple[Column, ...]:
    """Return these as a table version's columns."""
    return tuple(type_.column(name) for name, type_ in given.items())
