"""Convert a column's stored values when its type changes.

Postgres rewrites the rows without an event, by an expression that is not in the log. So a value
keeps its text, which is parsed as the new type; if that type cannot hold it, it goes to `_exact`,
like any other that does not fit. Nothing is lost, and nothing is guessed: a value that Postgres
rounded keeps its previous text there.

Pure.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from math import isfinite
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from lockstep.sinks.floats import text4, text8

if TYPE_CHECKING:
    from collections.abc import Callable

    Digits = Callable[[float], str]


def retyped(values: pa.Array, odd: pa.Array | None, kind: pa.DataType) -> tuple[pa.Array, pa.Array]:
    """Return values of another type, and the texts of those that do not fit it."""
    digits = _digits(values.type, kind)
    texts = [None if each is None else text(each, digits) for each in values.to_pylist()]
    if odd is not None:
        texts = [
            mine if other is None else other
            for mine, other in zip(texts, odd.to_pylist(), strict=True)
        ]
    read = _reader(kind)
    made: list[Any] = [None] * len(texts)
    left: list[str | None] = [None] * len(texts)
    for row, each in enumerate(texts):
        if each is not None:
            try:
                made[row] = read(each)
            except (ValueError, ArithmeticError):
                left[row] = each
    return pa.array(made, kind), pa.array(left, pa.string())


def _digits(stored: pa.DataType, kind: pa.DataType) -> Digits:
    """Return the function that writes a float's digits, as Postgres casts it to the new type."""
    element = getattr(stored, "value_type", stored)
    is_single = pa.types.is_float32(element)
    if pa.types.is_floating(kind):
        return repr  # a double holds every bit of a real
    if pa.types.is_decimal(kind):
        return lambda value: _rounded(value, 6 if is_single else 15)
    as_text = text4 if is_single else text8
    return lambda value: as_text(value).decode()


def _rounded(value: float, digits: int) -> str:
    """Return a float as a numeric: with the digits that every value of its type can hold."""
    if not isfinite(value):
        return text8(value).decode()
    return format(Decimal(f"{value:.{digits}g}"), "f")


def text(value: Any, digits: Digits) -> str:  # noqa: ANN401, PLR0911 - any type's
    """Return the text of a value, as a cast to text does."""
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return digits(value)
        case Decimal():
            return format(value, "f")
        case datetime():
            clock = f"{value.replace(tzinfo=None, microsecond=0).isoformat(' ')}"
            fraction = f".{value.microsecond:06}".rstrip("0") if value.microsecond else ""
            return f"{clock}{fraction}{'' if value.tzinfo is None else '+00'}"
        case bytes():
            return "\\x" + value.hex()
        case list():
            return "{" + ",".join(_element(each, digits) for each in value) + "}"
    return str(value)


def _element(value: Any, digits: Digits) -> str:  # noqa: ANN401 - any type's
    if value is None:
        return "NULL"
    plain = text(value, digits)
    if plain and plain.upper() != "NULL" and not set(plain) & set('{}",\\ \t\n\r\v\f'):
        return plain
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _reader(kind: pa.DataType) -> Callable[[str], Any]:  # noqa: PLR0911 - a case a type
    """Return the function that parses a text as the type; it raises ValueError if it can't."""
    if pa.types.is_string(kind):
        return str
    if pa.types.is_boolean(kind):
        return _boolean
    if pa.types.is_integer(kind):
        return lambda each: pa.scalar(int(each), kind).as_py()
    if pa.types.is_floating(kind):
        return float
    if pa.types.is_decimal(kind):
        return lambda each: pa.scalar(Decimal(each), kind).as_py()
    if pa.types.is_date(kind):
        return date.fromisoformat
    if pa.types.is_timestamp(kind):
        return lambda each: _moment(each, is_instant=kind.tz is not None)
    return _never


def _boolean(each: str) -> bool:
    found = {"t": True, "true": True, "1": True, "f": False, "false": False, "0": False}.get(each)
    if found is None:
        raise ValueError(each)
    return found


def _moment(each: str, *, is_instant: bool) -> datetime:
    at = datetime.fromisoformat(each)
    if is_instant:
        return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)
    return at.replace(tzinfo=None)


def _never(each: str) -> Any:  # noqa: ANN401 - it returns nothing
    raise ValueError(each)
