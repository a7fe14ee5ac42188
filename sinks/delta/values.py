"""Convert the log's JSON values to Delta: the natural value, or Postgres' text if none fits.

The inverse of the log's forms (docs/EVENTS.md, "Values"): each value is read by its column's type
and the options of its table version, exact before fast; `sinks.delta.columns` converts complete
columns where it can and uses this module for the rest. A value without a natural value in Delta
(`sinks.delta.types`) is restored to Postgres' own text, so that a mirror is the same whether a row
came through the log or by a direct snapshot.

Two forms cannot be reversed: an interval in microseconds, and text that is not UTF-8. The first
stays a number, the second its `{"base64":…}`, both as text.

Numbers with a point or an exponent are parsed as `Digits`, so that none goes through a float.

Pure.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, urlsafe_b64decode
from binascii import unhexlify
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from cdc.decode.types import ValueKind, delimiter_of, element_of, kind_of, numeric_size
from lockstep.sinks.delta.types import TypeKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lockstep.sinks.delta.types import DeltaType

# Returns the natural value of a JSON value; raises `Odd` with its text if there is none.
Natural: TypeAlias = "Callable[[Any], Any]"
Text: TypeAlias = "Callable[[Any], str]"

_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - a wall clock
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_DAY: Final = re.compile(r"(\d{4}-\d\d-\d\d)Z?")
_MOMENT: Final = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,6}))?(?:Z|\+00)?")
_INTERVAL: Final = re.compile(
    r"P(-?\d+)Y(-?\d+)M(-?\d+)DT(-?\d+)H(-?\d+)M(-?)(\d+)(?:\.(\d{1,6}))?S"
)
_MILLISECONDS: Final = 3
# What Postgres puts in quotes inside an array, in addition to a delimiter.
_SPECIAL: Final = r'null|.*[\s"\\{}%s].*'


class Digits(str):
    """A JSON number that is not an integer, as written."""

    __slots__ = ()


class Odd(Exception):  # noqa: N818 - no error, but a value
    """A value that its column's type cannot hold; its argument is Postgres' text of it."""

    @property
    def text(self) -> str:
        """Postgres' text."""
        return str(self.args[0])


class Form:
    """How a column's values are written in the log, and what they are in Delta.

    `kind` is the type's name, without a mask; `target` is the type in Delta.
    """

    def __init__(
        self, kind: str, modifier: int, target: DeltaType, options: Mapping[str, object]
    ) -> None:
        self._options = options
        self._modifier = modifier
        self._element = element_of(kind)
        scalar = self._element or kind
        values = kind_of(scalar)
        self._text = _legible(self._text_of(values))
        self._delimiter = delimiter_of(scalar)
        self._special = re.compile(_SPECIAL % re.escape(self._delimiter), re.IGNORECASE | re.DOTALL)
        one = target.element or target
        self._one: Natural = self._natural_of(values, one)
        self.natural: Natural = self._array if target.kind is TypeKind.ARRAY else self._scalar

    def text(self, value: Any) -> str:  # noqa: ANN401 - JSON's
        """Return Postgres' text of a value that is not null."""
        if isinstance(value, list):
            return self._array_text(value)
        # A value of an array type that is not a JSON array is already text.
        return str(value) if self._element and isinstance(value, str) else self._text(value)

    def _scalar(self, value: Any) -> Any:  # noqa: ANN401 - JSON's
        if isinstance(value, list) or (self._element and isinstance(value, str)):
            return self.text(value)  # an array that is text in Delta
        return self._one(value)

    def _array(self, value: Any) -> list[Any]:  # noqa: ANN401 - JSON's
        """Return an array's elements; raise Odd if its shape or an element does not fit."""
        if not isinstance(value, list) or any(isinstance(each, list) for each in value):
            raise Odd(self.text(value))
        try:
            return [None if each is None else self._one(each) for each in value]
        except Odd:
            raise Odd(self.text(value)) from None

    def _array_text(self, value: list[Any]) -> str:
        return "{" + self._delimiter.join(map(self._element_text, value)) + "}"

    def _element_text(self, value: Any) -> str:  # noqa: ANN401 - JSON's
        if value is None:
            return "NULL"
        if isinstance(value, list):
            return self._array_text(value)
        text = self._text(value)
        if text and not self._special.fullmatch(text):
            return text
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'

    def _text_of(self, kind: ValueKind) -> Text:  # noqa: C901, PLR0911 - a case a kind
        match kind:
            case ValueKind.BOOLEAN:
                return lambda value: "t" if value is True else "f"
            case ValueKind.FLOAT:
                return _float_text
            case ValueKind.DATE:
                return lambda value: str(_day(value)) if _is_day(value) else str(value)
            case ValueKind.TIMESTAMP:
                return lambda value: _moment_text(self._micros(value)) or str(value)
            case ValueKind.INSTANT:
                return _instant_text
            case ValueKind.TIME:
                return self._time_text
            case ValueKind.BYTES:
                return lambda value: "\\x" + self._bytes(value).hex()
            case ValueKind.NUMERIC:
                return self._numeric_text
            case ValueKind.MONEY:
                return self._money_text
            case ValueKind.INTERVAL:
                return _interval_text
            case ValueKind.MAP:
                return self._hstore_text
            case _:
                return str

    def _natural_of(self, kind: ValueKind, target: DeltaType) -> Natural:  # noqa: PLR0911 - a case a type
        if target.kind is TypeKind.NUMBER:
            return self._number
        match target.name:
            case "boolean":
                return bool
            case "short" | "integer" | "long":
                return int
            case "float" | "double":
                return float
            case "binary":
                return self._bytes
            case "date":
                return lambda value: (
                    _day(value).toordinal() - _EPOCH_DAY if _is_day(value) else (_odd(value))
                )
            case "timestamp_ntz":
                return self._moment
            case "timestamp":
                return lambda value: _fitting(_parsed(value), value)
        if kind is ValueKind.MONEY:
            return lambda value: self._units(value) * Decimal(1).scaleb(-self._digits)
        return self._text

    # Numbers.

    @property
    def _digits(self) -> int:
        return int(str(self._options.get("money.fraction.digits", 2)))

    def _number(self, value: Any) -> Decimal:  # noqa: ANN401 - JSON's
        text = self._numeric_text(value)
        number = Decimal(text)
        if not number.is_finite():
            raise Odd(text)
        return number

    def _numeric_text(self, value: Any) -> str:  # noqa: ANN401 - JSON's
        if isinstance(value, dict):
            return _placed(_big(str(value["value"])), int(value["scale"]))
        if isinstance(value, Digits) or not isinstance(value, str):
            return str(value)
        size = numeric_size(self._modifier)
        is_text = self._options.get("decimal.handling.mode") != "precise" or value in {
            *("NaN", "Infinity", "-Infinity")
        }
        return value if is_text or size is None else _placed(_big(value), size.scale)

    def _units(self, value: Any) -> Decimal:  # noqa: ANN401 - JSON's
        """Return an amount in the currency's smallest unit."""
        if self._options.get("decimal.handling.mode") == "precise":
            return Decimal(_big(str(value)))
        return Decimal(str(value)).scaleb(self._digits)

    def _money_text(self, value: Any) -> str:  # noqa: ANN401 - JSON's
        # As lc_monetary=C writes it, for any currency.
        cents = int(self._units(value))
        return f"{'-' if cents < 0 else ''}${abs(cents) // 100:,}.{abs(cents) % 100:02}"

    # Times.

    def _micros(self, value: Any) -> int | None:  # noqa: ANN401 - JSON's
        """Return a timestamp's microseconds since 1970; None if it is out of the calendar."""
        if isinstance(value, str):
            return _parsed(value)
        if self._options.get("time.precision.mode") == "nanoseconds":
            return int(value) // 1_000
        return int(value) * (1_000 if in_milliseconds(self._options, self._modifier) else 1)

    def _moment(self, value: Any) -> int:  # noqa: ANN401 - JSON's
        return _fitting(self._micros(value), value)

    def _time_text(self, value: Any) -> str:  # noqa: ANN401 - JSON's
        if isinstance(value, str):
            return value.removesuffix("Z")
        match self._options.get("time.precision.mode"):
            case "nanoseconds":
                micros = int(value) // 1_000
            case "microseconds" | "adaptive_time_microseconds":
                micros = int(value)
            case "connect":
                micros = int(value) * 1_000
            case _:
                micros = int(value) * (1_000 if 0 <= self._modifier <= _MILLISECONDS else 1)
        seconds, rest = divmod(micros, 1_000_000)
        return _clock(seconds // 3600, seconds // 60 % 60, seconds % 60, f"{rest:06}")

    # Other types.

    def _bytes(self, value: str) -> bytes:
        match self._options.get("binary.handling.mode"):
            case "hex":
                return unhexlify(value)
            case "base64-url-safe":
                return urlsafe_b64decode(value)
        return b64decode(value)

    def _hstore_text(self, value: Any) -> str:  # noqa: ANN401 - JSON's
        mode = self._options.get("hstore.handling.mode", "text")
        if mode == "json" and isinstance(value, str):
            value = _object(value)
        if not isinstance(value, dict):
            return str(value)
        return ", ".join(
            f"{_quoted(name)}=>{'NULL' if text is None else _quoted(text)}"
            for name, text in value.items()
        )


def in_milliseconds(options: Mapping[str, object], modifier: int) -> bool:
    """Return whether the log counts milliseconds of a timestamp, or other units."""
    mode = options.get("time.precision.mode", "adaptive")
    is_adaptive = mode in {"adaptive", "adaptive_time_microseconds"}
    return mode == "connect" or (is_adaptive and 0 <= modifier <= _MILLISECONDS)


def _object(text: str) -> Any:  # noqa: ANN401 - JSON's
    """Return the object in a JSON text; return the text if it has none."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, dict) else text


def _legible(text: Text) -> Text:
    """Return the same function for text that may not be UTF-8, and so be an object with base64."""

    def of(value: Any) -> str:  # noqa: ANN401 - JSON's
        if isinstance(value, dict) and value.keys() == {"base64"}:
            return json.dumps(value, separators=(",", ":"))
        return text(value)

    return of


def _odd(value: Any) -> Any:  # noqa: ANN401 - it returns nothing
    raise Odd(str(value))


def _fitting(micros: int | None, value: Any) -> int:  # noqa: ANN401 - JSON's
    if micros is None:
        raise Odd(str(value))
    return micros


def _is_day(value: Any) -> bool:  # noqa: ANN401 - JSON's
    return not isinstance(value, str) or _DAY.fullmatch(value) is not None


def _day(value: Any) -> date:  # noqa: ANN401 - JSON's
    if isinstance(value, str):
        return date.fromisoformat(value.removesuffix("Z"))
    return date.fromordinal(int(value) + _EPOCH_DAY)


def _parsed(value: str) -> int | None:
    """Return microseconds since 1970 of a text within the calendar; None for any other."""
    found = _MOMENT.fullmatch(value)
    if found is None:
        return None
    day, clock, fraction = found.groups()
    since = datetime.fromisoformat(f"{day} {clock}") - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + int((fraction or "").ljust(6, "0"))


def _moment_text(micros: int | None) -> str | None:
    if micros is None:
        return None
    at = _EPOCH + timedelta(microseconds=micros)
    clock = _clock(at.hour, at.minute, at.second, f"{at.microsecond:06}")
    return f"{at.year:04}-{at.month:02}-{at.day:02} {clock}"


def _instant_text(value: str) -> str:
    return value[:-1].replace("T", " ") + "+00" if value.endswith("Z") else value


def _clock(hours: int, minutes: int, seconds: int, fraction: str) -> str:
    fraction = fraction.rstrip("0")
    return f"{hours:02}:{minutes:02}:{seconds:02}{'.' if fraction else ''}{fraction}"


def _interval_text(value: Any) -> str:  # noqa: ANN401 - JSON's
    """Return Postgres' text of an interval in ISO 8601; any other form is returned as text."""
    found = _INTERVAL.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return str(value)
    parts: list[str] = []
    negative = False  # a sign is written if the part before it was negative
    for count, unit in zip(map(int, found.groups()[:3]), ("year", "mon", "day"), strict=True):
        if count:
            plus = "+" if negative and count > 0 else ""
            parts.append(f"{plus}{count} {unit}{'' if count == 1 else 's'}")
            negative = count < 0
    hours, minutes = int(found[4]), int(found[5])
    seconds, fraction = int(found[7]), (found[8] or "").rstrip("0")
    below = hours < 0 or minutes < 0 or bool(found[6])
    if hours or minutes or seconds or fraction or not parts:
        sign = "-" if below else ("+" if negative else "")
        parts.append(sign + _clock(abs(hours), abs(minutes), seconds, fraction))
    return " ".join(parts)


def _float_text(value: Any) -> str:  # noqa: ANN401 - JSON's
    return "-0" if value == "-0.0" else str(value)


def _big(text: str) -> int:
    return int.from_bytes(b64decode(text), "big", signed=True)


def _placed(unscaled: int, scale: int) -> str:
    """Return the digits with the point `scale` places from the right."""
    if scale <= 0:
        return str(unscaled * 10**-scale)
    digits = str(abs(unscaled)).rjust(scale + 1, "0")
    return f"{'-' if unscaled < 0 else ''}{digits[:-scale]}.{digits[-scale:]}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
