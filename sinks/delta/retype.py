"""A stored value under another type: what a column's values become when its type changes.

Postgres rewrites the rows without an event, by an expression that the log does not tell. So a value
keeps its text and is read again as the new type; where that type cannot hold it, it stands in
`_exact`, as any other that does not fit. Nothing is lost, and nothing is guessed: for what nobody
cast with an expression of his own it is what Postgres made of it.

Pure.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable


def retyped(values: pa.Array, odd: pa.Array | None, kind: pa.DataType) -> tuple[pa.Array, pa.Array]:
    """Return values of another type, and the texts of those that do not fit it."""
    texts = [None if each is None else text(each) for each in values.to_pylist()]
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
            except (ValueError, InvalidOperation):
                left[row] = each
    return pa.array(made, kind), pa.array(left, pa.string())


def text(value: Any) -> str:  # noqa: ANN401, PLR0911 - any type's
    """Return the text of a value as a cast to text gives it."""
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return repr(value).removesuffix(".0").replace("inf", "Infinity").replace("nan", "NaN")
        case Decimal():
            return format(value, "f")
        case datetime():
            clock = f"{value.replace(tzinfo=None, microsecond=0).isoformat(' ')}"
            fraction = f".{value.microsecond:06}".rstrip("0") if value.microsecond else ""
            return f"{clock}{fraction}{'' if value.tzinfo is None else '+00'}"
        case bytes():
            return "\\x" + value.hex()
        case list():
            return "{" + ",".join(map(_element, value)) + "}"
    return str(value)


def _element(value: Any) -> str:  # noqa: ANN401 - any type's
    if value is None:
        return "NULL"
    plain = text(value)
    if plain and plain.upper() != "NULL" and not set(plain) & set('{}",\\ \t\n\r\v\f'):
        return plain
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _reader(kind: pa.DataType) -> Callable[[str], Any]:  # noqa: PLR0911 - a case a type
    """Return how a text becomes a value of the type; it raises ValueError where it can't."""
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
