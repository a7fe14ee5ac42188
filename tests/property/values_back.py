"""Event values → text that Postgres reads as the same value: docs/EVENTS.md, backwards.

For tests only, and slow: a value that can be turned back has lost nothing. Shares no code with the
forms. JSON numbers must have been read as `Number`, so that none of their digits is lost either.
"""

from __future__ import annotations

import base64
import json
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

from cdc.config.value_options import Values
from tests.property import array_text

_DELIMITERS: Final = {"box": ";", "geometry": ":", "geography": ":"}
_UNITS: Final = {"millis": 1_000, "micros": 1, "nanos": -1_000}


class Number(str):
    """A JSON number's digits."""

    __slots__ = ()


def loads(text: bytes | str) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value of JSON text, with numbers as their digits."""
    return json.loads(text, parse_int=Number, parse_float=Number)


def text_of(name: str, modifier: int, value: Any, options: Values) -> str | None:  # noqa: ANN401
    """Return the text of an event's value of the type `name` (Postgres' own name, unqualified)."""
    if value is None:
        return None
    if name.startswith("_"):
        if isinstance(value, list):
            element = name[1:]

            def each(item: object) -> str:
                text = text_of(element, modifier, item, options)
                assert text is not None
                return text

            return array_text.write(value, each, _DELIMITERS.get(element, ","))
        assert isinstance(value, str), "an array is a list, or text with its lower bounds"
        return value
    return _scalar(name, modifier, value, options)


def _scalar(name: str, modifier: int, value: Any, options: Values) -> str:  # noqa: ANN401, PLR0911
    match name:
        case "bool":
            assert isinstance(value, bool)
            return "true" if value else "false"
        case "bytea":
            return "\\x" + _bytes(value, options).hex()
        case "numeric" | "money":
            return _decimal(name, modifier, value, options)
        case "date" | "time" | "timestamp" if isinstance(value, Number):
            return _moment(name, modifier, int(value), options)
        case "hstore" if options.hstore_handling_mode != "text":
            pairs = value if options.hstore_handling_mode == "map" else loads(value)
            assert isinstance(pairs, dict)
            return ", ".join(f"{_quote(k)}=>{_quote(v)}" for k, v in pairs.items())
        case "interval" if options.interval_handling_mode == "numeric" and isinstance(
            value, Number
        ):
            return f"{value} microseconds"
        case _:
            assert isinstance(value, str), f"{name} is text or a number"
            return str(value)


def _quote(text: str | None) -> str:
    if text is None:
        return "NULL"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _bytes(value: str, options: Values) -> bytes:
    match options.binary_handling_mode:
        case "hex":
            return bytes.fromhex(value)
        case "base64-url-safe":
            return base64.urlsafe_b64decode(value)
        case _:
            return base64.b64decode(value, validate=True)


def _decimal(name: str, modifier: int, value: Any, options: Values) -> str:  # noqa: ANN401
    if options.decimal_handling_mode != "precise":
        # The digits as they are; money's decimal point depends on the database's locale.
        if name == "money":
            assert options.money_fraction_digits == 2, "the test server's locale is C"
        return str(value)
    if isinstance(value, dict):
        return _scaled(value["value"], int(value["scale"]))
    if name == "money":
        return _scaled(value, 2)
    if value in {"NaN", "Infinity", "-Infinity"}:
        return str(value)
    scale = (modifier - 4) & 0x7FF
    return _scaled(value, scale - 0x800 if scale & 0x400 else scale)


def _scaled(value: str, scale: int) -> str:
    number = int.from_bytes(base64.b64decode(value, validate=True), "big", signed=True)
    return f"{Decimal((0 if number >= 0 else 1, tuple(map(int, str(abs(number)))), -scale)):f}"


def _moment(name: str, modifier: int, value: int, options: Values) -> str:
    if name == "date":
        return (date(1970, 1, 1) + timedelta(days=value)).isoformat()
    mode = options.time_precision_mode
    few = 0 <= modifier <= 3
    unit = {
        "adaptive": "millis" if few else "micros",
        "adaptive_time_microseconds": "millis" if few and name == "timestamp" else "micros",
        "connect": "millis",
        "nanoseconds": "nanos",
    }.get(mode, "micros")
    by = _UNITS[unit]
    micros = value * by if by > 0 else value // -by
    assert by > 0 or value % -by == 0, "Postgres has no nanoseconds"
    if name == "time":
        minutes, micros = divmod(micros, 60_000_000)
        return (
            f"{minutes // 60:02}:{minutes % 60:02}:{micros // 1_000_000:02}.{micros % 1_000_000:06}"
        )
    at = datetime(1970, 1, 1) + timedelta(microseconds=micros)  # noqa: DTZ001 - as Postgres has none
    return at.isoformat(" ")
