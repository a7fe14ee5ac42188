"""Typed values of Spark's SQL, and the rules by which Postgres brings their types together.

Pure. Literals are read as Postgres reads them, and refused where they could be read in two ways.
"""

from __future__ import annotations

import re
from datetime import date, datetime
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

from sqlglot import exp

from cdc.errors import ConfigError
from lockstep.jobs.views.refusing import UnsupportedError, written
from lockstep.jobs.views.types import (
    COMPARED,
    FLOAT8,
    FLOATS,
    INTEGERS,
    TEXT,
    TEXTS,
    UNKNOWN,
    PgType,
    numeric,
)
from lockstep.sinks.delta.types import MAX_PRECISION

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence


# Sets of columns, in each of which no two rows of a query agree.
Uniques = tuple[frozenset[str], ...]


class ColumnScope:
    """The columns that the expressions of a query may name."""

    def __init__(
        self, sources: dict[str, dict[str, PgType]], outer: ColumnScope | None = None
    ) -> None:
        self.sources, self.outer = sources, outer
        self.keys: dict[str, frozenset[str]] = {}  # of tables: Postgres knows no other key
        self.uniques: dict[str, Uniques] = {}

    def add(self, alias: str, columns: dict[str, PgType], uniques: Uniques) -> None:
        """Add a subquery."""
        self.sources[alias], self.uniques[alias] = columns, uniques

    def add_table(self, alias: str, columns: dict[str, PgType], key: frozenset[str]) -> None:
        """Add a table."""
        self.add(alias, columns, (key,))
        self.keys[alias] = key

    def type_of(self, column: exp.Column) -> PgType:
        """Return a column's type."""
        if (found := self.sources.get(column.table)) is not None:
            if column.name not in found:
                raise ConfigError(
                    f"there is no column {column.table}.{column.name}", hint="correct its name"
                )
            return found[column.name]
        if self.outer is None:
            raise ConfigError(
                f"there is no table {column.table or column.name} here", hint="correct its name"
            )
        return self.outer.type_of(column)


class Value(NamedTuple):
    """An expression in Spark's SQL, with its type in Postgres."""

    sql: str
    type: PgType
    text: str | None = None  # of a quoted literal


class Rules(Protocol):
    """What rules for kinds of expressions call: `jobs.views.expressions.Expressions`."""

    scope: ColumnScope
    # Whether an ORDER BY, in these partitions, leaves no two rows in either order.
    order_is_total: Callable[[Sequence[exp.Expr]], bool]
    # Whether an ORDER BY leaves no two rows of a group in either order.
    order_of_group_is_total: Callable[[Sequence[exp.Expr]], bool]
    # Whether Spark can call a function of ours here: not in conditions that it joins by, otherwise
    # than by an inner join.
    can_call: bool

    def value(self, node: exp.Expr) -> Value:
        """Return an expression's translation."""
        ...

    def condition(self, node: exp.Expr, where: str) -> str:
        """Return a condition's text."""
        ...

    def query(self, node: exp.Expr) -> Any:  # noqa: ANN401 - `jobs.views.translating.Query`
        """Return the translation of a subquery."""
        ...


class Rule(NamedTuple):
    """How a kind of expression is translated; one that has other parts than these is refused."""

    parts: frozenset[str]
    translate: Callable[[Rules, Any], Value]


def table_of(
    *rules: tuple[str, Callable[[Rules, Any], Value], Sequence[type[exp.Expr]]],
) -> dict[type[exp.Expr], Rule]:
    """Return rules by kind of expression, each given with its parts, separated by spaces."""
    return {
        kind: Rule(frozenset(parts.split()), translate)
        for parts, translate, kinds in rules
        for kind in kinds
    }


# In a node's `meta`. Of a UNION and its like: the type to which each column of its two queries is
# converted, None for one that has it already.
CONVERTED: Final = "converted"
# Of a cast: its type, in place of the one that is written.
CAST_TO: Final = "cast to"


# Parts that change nothing, or that only say how it was written.
_HARMLESS: Final = {"typed", "safe", "big_int", "_type", "ignore_nulls", "over", "nested"}


def expect_parts(node: exp.Expr, parts: Container[str]) -> None:
    """Raise if an expression has a part that its rule knows nothing of."""
    for part, given in node.args.items():
        if given and part not in parts and part not in _HARMLESS:
            raise UnsupportedError(f"{written(node)} with {part.strip('_')}", "leave that out")


def number_in(node: exp.Expr | None) -> int | None:
    """Return an integer that is written as one, with or without a sign; None otherwise."""
    if isinstance(node, exp.Paren):
        return number_in(node.this)
    if isinstance(node, exp.Neg):
        found = number_in(node.this)
        return None if found is None else -found
    is_number = isinstance(node, exp.Literal) and node.is_int and not node.is_string
    return int(node.this) if is_number and node is not None else None


# --- types ---


def coerced(value: Value, wanted: PgType) -> str:
    """Return the text of a value as that type; a quoted literal is read as Postgres does."""
    if value.type.name == UNKNOWN:
        if value.text is None:
            return f"CAST(NULL AS {wanted.spark})"
        return literal(value.text, wanted)
    return value.sql if value.type.spark == wanted.spark else f"CAST({value.sql} AS {wanted.spark})"


def own(value: Value) -> PgType:
    """Return a value's type; text if it is a quoted literal."""
    return TEXT if value.type.name == UNKNOWN else value.type


def common(given: Sequence[PgType], where: str) -> PgType:
    """Return the type that Postgres gives to values of these types together."""
    known = [each for each in given if each.name != UNKNOWN]
    if not known:
        return TEXT
    found = known[0]
    for each in known[1:]:
        found = _common(found, each, where)
    return found


def _common(one: PgType, other: PgType, where: str) -> PgType:  # noqa: PLR0911 - a case a pair of types
    names = {one.name, other.name}
    if one.mask or other.mask:
        if one.mask and other.mask:
            return one
        raise UnsupportedError(f"a masked column with another value in {where}", "leave it out")
    if one.name == other.name and one.name != "numeric":
        kind = one if one.modifier == other.modifier else one._replace(modifier=-1)
        return kind._replace(is_c=_is_c(one, other))
    if names <= TEXTS:
        return TEXT._replace(is_c=_is_c(one, other))
    if names <= INTEGERS.keys():
        return max(one, other, key=lambda each: INTEGERS[each.name])
    if names <= {"numeric", *INTEGERS}:
        (p1, s1), (p2, s2) = size(one, where), size(other, where)
        scale = max(s1, s2)
        # A cast to all 38 digits loses none after the point: a larger number is an error.
        digits = min(max(p1 - s1, p2 - s2) + scale, MAX_PRECISION)
        kind = sized(digits, scale, where)
        same = s1 == s2 and one.has_scale and other.has_scale
        return kind._replace(has_scale=same)
    if names <= {"numeric", *INTEGERS, *FLOATS}:
        return FLOAT8
    if names == {"date", "timestamp"}:
        return PgType("timestamp")
    raise UnsupportedError(f"{one.title} with {other.title} in {where}", "cast one to the other")


def _is_c(one: PgType, other: PgType) -> bool | Literal["column"]:
    """Return whether both are ordered by their bytes: COLLATE counts for both, a column's not."""
    if True in {one.is_c, other.is_c}:
        return True
    return one.is_c and other.is_c


def compared(given: Sequence[Value], where: str, *, ordered: bool) -> list[str]:
    """Return the texts of values that are compared, as one type."""
    kinds = [each.type for each in given]
    kind = common(kinds, where)
    expect_compared(kind, where)
    for each in kinds:
        if each.name != UNKNOWN:
            expect_compared(each, where)
    if ordered:
        expect_ordered(kind, where)
    return [coerced(each, kind) for each in given]


def size(kind: PgType, where: str) -> tuple[int, int]:
    if kind.size is None:
        raise UnsupportedError(
            f"a numeric without precision in {where}", "cast it to numeric(p,s) with p up to 38"
        )
    return kind.size


def sized(precision: int, scale: int, where: str) -> PgType:
    precision = max(precision, scale, 1)
    if precision > MAX_PRECISION:
        raise UnsupportedError(
            f"a numeric of {precision} digits ({where})",
            f"cast its parts to smaller ones: Spark has {MAX_PRECISION} digits",
        )
    return numeric(precision, scale)


def expect_number(kind: PgType, where: str) -> None:
    if kind.name not in {*INTEGERS, *FLOATS, "numeric"}:
        raise UnsupportedError(f"{where} of {kind.title}", "cast to a number, if it has one's text")
    if kind.name == "numeric":
        size(kind, where)


def expect_text(kind: PgType, where: str) -> None:
    if kind.name not in {*TEXTS, UNKNOWN} or kind.mask:
        raise UnsupportedError(f"{where} of {kind.title}", "take a text or varchar column")


_ONLY: Final = "only select such a column"
# In place of a float.
INSTEAD_OF_FLOATS: Final = (
    "keep it in a numeric(p,s) column, or round it to an integer: (… * 100)::bigint"
)


def expect_compared(kind: PgType, where: str) -> None:
    if kind.mask:
        return
    if kind.name not in COMPARED:
        hint = 'only select it, or write … COLLATE "C"' if kind.is_nondeterministic else _ONLY
        raise UnsupportedError(f"{where} of {kind.title}", hint)
    if kind.name == "numeric":
        size(kind, where)


def expect_ordered(kind: PgType, where: str) -> None:
    if kind.mask:
        raise UnsupportedError(f"{where} of a masked column", "leave it out")
    expect_compared(kind, where)
    if kind.name in TEXTS and not kind.is_c:
        raise UnsupportedError(
            f"{where} of text in the database's collation", 'write … COLLATE "C"'
        )


def expect_grouped(kind: PgType, where: str) -> None:
    """Raise unless equal values of the type are one value in both."""
    if kind.name in FLOATS:
        raise UnsupportedError(
            f"{where} of {kind.title}, where 0 and -0 are equal", INSTEAD_OF_FLOATS
        )
    expect_compared(kind, where)


def expect_callable(rules: Rules, where: str) -> None:
    """Raise where Spark can't call a function of ours."""
    if not rules.can_call:
        raise UnsupportedError(
            f"{where} in ON of an outer join, or in a subquery that is a value or a condition",
            "join a subquery that selects it as a column",
        )


# --- literals ---


def string(text: str) -> str:
    """Return a text as a literal of Spark's SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def quoted(name: str) -> str:
    """Return a name quoted for Spark's SQL."""
    return "`" + name.replace("`", "``") + "`"


_DATE: Final = r"\d{4}-\d\d-\d\d"
_TIME: Final = r"\d\d:\d\d(:\d\d(\.\d{1,6})?)?"
_UUID: Final = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"


def literal(text: str, kind: PgType) -> str:  # noqa: C901, PLR0911 - a case a type
    """Return a quoted literal, read as a value of the type."""
    plain = text.strip()
    match kind.name:
        case "text" | "varchar":
            return string(text)
        case "bool" if plain.lower() in {"t", "true", "f", "false"}:
            return "true" if plain.lower().startswith("t") else "false"
        case a if a in INTEGERS and re.fullmatch(r"[+-]?\d{1,18}", plain):
            return f"CAST('{plain}' AS {kind.spark})"
        case "numeric" if kind.size and re.fullmatch(r"[+-]?\d{1,38}(\.\d{1,38})?", plain):
            _expect_room(plain, *kind.size)
            return f"CAST('{plain}' AS {kind.spark})"
        case "float8" | "float4" if re.fullmatch(r"[+-]?\d+(\.\d+)?", plain):
            return f"CAST('{plain}' AS {kind.spark})"
        case "uuid" if re.fullmatch(_UUID, plain.lower()):
            return string(plain.lower())
        case "date" if re.fullmatch(_DATE, plain) and _is(date.fromisoformat, plain):
            return f"DATE '{plain}'"
        case "timestamp" if re.fullmatch(f"{_DATE}([ T]{_TIME})?", plain) and _is(
            datetime.fromisoformat, plain
        ):
            return f"TIMESTAMP_NTZ '{plain}'"
        case "json" | "jsonb" if plain in {"[]", "{}"}:
            return string(plain)
        case _ if kind.delta.element is not None and plain == "{}":
            return f"CAST(array() AS {kind.spark})"
        case "timestamptz" if re.fullmatch(f"{_DATE}[ T]{_TIME}(Z|[+]00)", plain):
            return f"TIMESTAMP '{plain.removesuffix('+00').removesuffix('Z')}Z'"
    raise UnsupportedError(
        f"a literal of type {kind.title} written like this",
        "write dates as '2026-11-24', times as '2026-11-24 10:00:00', with +00 if timestamptz",
    )


def _expect_room(number: str, precision: int, scale: int) -> None:
    """Refuse a literal that the type would round, or has no room for: Postgres takes all digits."""
    integer, _, decimals = number.lstrip("+-").partition(".")
    if len(decimals) > scale or len(integer.lstrip("0")) > precision - scale:
        raise UnsupportedError(
            f"the quoted literal '{number}' as a numeric({precision},{scale})",
            "write the number without quotes",
        )


def _is(parse: Callable[[str], object], text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True
