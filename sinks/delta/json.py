"""A mirror's rows as JSON, as rows in the log.

In the forms of the log where they are exact here (docs/EVENTS.md, "Values"); a value that Delta has
as text, or in `_exact`, is that text. In both cases `sinks.delta.values` reads it back as the same
value.

Pure.
"""

from __future__ import annotations

from base64 import b64encode, urlsafe_b64encode
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from cdc.decode.types import ValueKind, element_of, kind_of
from lockstep.sinks.delta.layout import EXACT
from lockstep.sinks.delta.values import in_milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lockstep.sinks.contract import Column, Version

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_SAFE: Final = 2**53
_INT64: Final = 2**63
_NO_NUMBERS: Final = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def rows(table: pa.Table, version: Version) -> Iterator[tuple[bytes, bytes]]:
    """Yield each row's key and the complete row."""
    named = {each.name: _form(each, version.values) for each in version.columns}
    forms = {name: form for name, form in named.items() if name in table.column_names}
    columns = [_values(table[name], form) for name, form in forms.items()]
    is_exact = table[EXACT].null_count == table.num_rows
    odd = repeat(None) if is_exact else iter(table[EXACT].to_pylist())
    for values, others in zip(zip(*columns, strict=True), odd, strict=False):
        row = dict(zip(forms, values, strict=True))
        if others:
            row |= {name: text for name, text in others if name in row}
        yield orjson.dumps({name: row[name] for name in version.key}), orjson.dumps(row)


def _values(column: pa.ChunkedArray, form: Callable[[Any], Any]) -> list[Any]:
    if form is _iso and pa.types.is_timestamp(column.type):
        column, form = _iso_texts(column), _same
    values: list[Any] = column.to_pylist()
    return values if form is _same else [_each(form, value) for value in values]


def _iso_texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Do what `_iso` does, of a column."""
    texts = pc.strftime(column, format="%Y-%m-%dT%H:%M:%S")
    trimmed = pc.utf8_rtrim(pc.utf8_rtrim(texts, characters="0"), characters=".")
    return pc.binary_join_element_wise(trimmed, "Z", "")


def _each(form: Callable[[Any], Any], value: Any) -> Any:  # noqa: ANN401 - any type's
    if isinstance(value, list):
        return [None if each is None else form(each) for each in value]
    return None if value is None else form(value)


def _form(column: Column, options: Mapping[str, object]) -> Callable[[Any], Any]:  # noqa: PLR0911 - a case a kind
    """Return a value's form, or the form of an array's elements."""
    if column.mask is not None:
        return _same
    kind = kind_of(element_of(column.type) or column.type)
    match kind:
        case ValueKind.INTEGER if options.get("bigint.handling.mode") == "string":
            return lambda value: value if -_SAFE <= value <= _SAFE else str(value)
        case ValueKind.FLOAT:
            return lambda value: _NO_NUMBERS.get(str(value), value)
        case ValueKind.BYTES:
            return _bytes(options)
        case ValueKind.DATE:
            iso = options.get("time.precision.mode") == "isostring"
            return lambda value: f"{value}Z" if iso else value.toordinal() - _EPOCH_DAY
        case ValueKind.TIMESTAMP:
            return lambda value: _timestamp(value.replace(tzinfo=UTC), options, column.modifier)
        case ValueKind.INSTANT:
            return _iso
        case ValueKind.NUMERIC | ValueKind.MONEY:
            return _decimal(options, is_money=kind is ValueKind.MONEY)
    return _same


def _same(value: Any) -> Any:  # noqa: ANN401 - any type's
    return value


def _bytes(options: Mapping[str, object]) -> Callable[[bytes], str]:
    match options.get("binary.handling.mode"):
        case "hex":
            return bytes.hex
        case "base64-url-safe":
            return lambda value: urlsafe_b64encode(value).decode()
    return lambda value: b64encode(value).decode()


def _timestamp(value: datetime, options: Mapping[str, object], modifier: int) -> object:
    mode = options.get("time.precision.mode")
    if mode == "isostring":
        return _iso(value)
    micros = (value - _EPOCH) // timedelta(microseconds=1)
    if mode == "nanoseconds":
        nanos = micros * 1_000
        return nanos if -_INT64 <= nanos < _INT64 else str(value.replace(tzinfo=None))
    if in_milliseconds(options, modifier):
        # A time with more digits than milliseconds is text in the log.
        return str(value.replace(tzinfo=None)) if micros % 1_000 else micros // 1_000
    return micros


def _iso(value: datetime) -> str:
    fraction = f".{value.microsecond:06}".rstrip("0") if value.microsecond else ""
    day = f"{value.year:04}-{value.month:02}-{value.day:02}"
    return f"{day}T{value.hour:02}:{value.minute:02}:{value.second:02}{fraction}Z"


def _decimal(options: Mapping[str, object], *, is_money: bool) -> Callable[[Any], Any]:
    match options.get("decimal.handling.mode", "string"):
        case "double":
            return lambda value: _number(_digits(value))
        case "precise":
            return lambda value: _precise(_digits(value), is_money=is_money)
    return _digits


def _number(text: str) -> object:
    return orjson.Fragment(text.encode()) if text[-1].isdigit() else text


def _digits(value: Decimal | str) -> str:
    return value if isinstance(value, str) else format(value, "f")


def _precise(text: str, *, is_money: bool) -> object:
    """Return the unscaled value's bytes, with its scale if no option defines it."""
    if not text[-1].isdigit():
        return text
    integer, _, fraction = text.partition(".")
    number = int(integer + fraction)
    size = (number if number >= 0 else ~number).bit_length() // 8 + 1
    packed = b64encode(number.to_bytes(size, "big", signed=True)).decode()
    return packed if is_money else {"scale": len(fraction), "value": packed}
