"""Column text as Postgres writes it → JSON bytes, one form per kind of values.

A form is a Python expression over `b[p:q]`, the value's bytes, which the compiled encoders inline;
some forms call the functions of `cdc.log.values_*`. It depends only on the stream's description of
the column and on the table version's options, not on today's catalog or on other values. Exact or
text: what does not fit a form's shape stays Postgres' own text in a JSON string, never clamped,
never null.

A domain is sent under its base type's name (and without its modifier), so it has the base type's
form. A type that Postgres describes by a Type message (an enum, a composite, an extension's) is
known by its name only. docs/EVENTS.md lists the forms for users; the session settings that pin the
text are in `cdc.source.connection`.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from binascii import b2a_base64, unhexlify
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from orjson import dumps

from cdc.decode.types import (
    ValueKind,
    delimiter_of,
    element_of,
    is_built_in,
    numeric_size,
    row_of,
    type_name,
)
from cdc.encode import values_numbers, values_structures, values_times
from cdc.encode.values_numbers import SAFE_CHARACTERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.config.value_options import Values
    from cdc.log.records import SchemaColumn

# Form: an expression giving JSON bytes from b[p:q].
NUMBER: Final = "b[p:q]"  # digits, straight into the JSON
QUOTED: Final = "QUOTE % b[p:q]"  # ASCII without quotes or backslashes, by the type's grammar
TEXT: Final = "dumps(b[p:q].decode())"  # a strict decode: invalid UTF-8 raises
FLOAT: Final = "floating(b[p:q])"
# Only the common shape is rewritten in place: `YYYY-MM-DD hh:mm:ss[.f]+00`.
INSTANT: Final = (
    "INSTANT_FORMAT % b[p:q - 3].replace(SPACE, T)"
    " if b[q - 3] == 43 and b[p + 10] == 32 else QUOTE % b[p:q]"
)
# `YYYY-MM-DD hh:mm:ss[.f]`, which ends in a digit, unlike the texts with fewer than 11 characters.
_ISO_TIMESTAMP: Final = (
    "INSTANT_FORMAT % b[p:q].replace(SPACE, T)"
    " if b[q - 1] < 58 and b[p + 10] == 32 else QUOTE % b[p:q]"
)
_ISO_DATE: Final = "INSTANT_FORMAT % b[p:q] if q - p == 10 else QUOTE % b[p:q]"

_FORMS: Final = {
    ValueKind.BOOLEAN: "TRUE if b[p] == 116 else FALSE",
    ValueKind.INTEGER: NUMBER,
    ValueKind.OID: NUMBER,
    ValueKind.FLOAT: FLOAT,
    ValueKind.INSTANT: INSTANT,
}
_DATES: Final = {"isostring": _ISO_DATE}
_TIMES: Final = {
    "adaptive_time_microseconds": "time_micros(b[p:q])",
    "connect": "time_millis(b[p:q])",
    "isostring": "INSTANT_FORMAT % b[p:q]",
    "microseconds": "time_micros(b[p:q])",
    "nanoseconds": "time_nanos(b[p:q])",
}
_TIMESTAMPS: Final = {
    "connect": "timestamp_millis(b[p:q])",
    "isostring": _ISO_TIMESTAMP,
    "microseconds": "timestamp_micros(b[p:q])",
    "nanoseconds": "timestamp_nanos(b[p:q])",
}
_MILLISECONDS: Final = 3  # digits of a second's fraction
_BINARY: Final = {
    "bytes": "QUOTE % base64(unhex(b[p + 2:q]), newline=False)",
    "base64": "QUOTE % base64(unhex(b[p + 2:q]), newline=False)",
    "base64-url-safe": "QUOTE % base64url(unhex(b[p + 2:q]))",
    "hex": "QUOTE % b[p + 2:q]",
}
_INTERVALS: Final = {
    "postgres": QUOTED,
    "string": "interval_iso(b[p:q])",
    "numeric": "interval_micros(b[p:q])",
}
_INT8_BYTES: Final = 8


def form(column: SchemaColumn, options: Values) -> str:
    """Return the expression that turns `b[p:q]` of this column into JSON bytes."""
    name = type_name(column.type_id) or column.type
    element = element_of(name)
    if element is None:
        return _scalar(name, column.type_modifier, options)
    value, text = _scalar(element, column.type_modifier, options), _text(options)
    delimiter, is_known = delimiter_of(element), is_built_in(name)
    if is_known and delimiter == ",":
        array = {NUMBER: "numbers", FLOAT: "floats", QUOTED: "words", TEXT: "texts"}.get(value)
        if array:
            return f"{array}(b[p:q])"
    return f"array_of({value!r}, {delimiter!r}, {text!r}, {not is_known})(b[p:q])"


def undescribed(name: str) -> str | None:
    """Return the type, or an array's element type, of which only the name is known.

    None for a type that is built in or of one of the known extensions. It may be a user's enum,
    composite or range: only the catalog knows.
    """
    name = element_of(name) or name
    return None if row_of(name) else name


def _scalar(name: str, modifier: int, options: Values) -> str:  # noqa: PLR0911 - a case a kind
    """Return the form of a type that is no array."""
    row = row_of(name)
    if row is None:
        return _text(options)
    match row.kind:
        case ValueKind.INTEGER if row.size == _INT8_BYTES:
            small = f"b[p:q] if q - p < {SAFE_CHARACTERS} else bigint(b[p:q])"
            return small if options.bigint_handling_mode == "string" else NUMBER
        case ValueKind.NUMERIC:
            return _numeric(modifier, options)
        case ValueKind.MONEY:
            return _money(options)
        case ValueKind.DATE:
            return _DATES.get(options.time_precision_mode, "days(b[p:q])")
        case ValueKind.TIME | ValueKind.TIMESTAMP:
            forms = _TIMES if row.kind is ValueKind.TIME else _TIMESTAMPS
            unit = "millis" if 0 <= modifier <= _MILLISECONDS else "micros"
            return forms.get(options.time_precision_mode, f"{name}_{unit}(b[p:q])")
        case ValueKind.INTERVAL:
            return _INTERVALS[options.interval_handling_mode]
        case ValueKind.BYTES:
            return _BINARY[options.binary_handling_mode]
        case ValueKind.MAP if options.hstore_handling_mode != "text":
            pairs = "hstore" if options.hstore_handling_mode == "map" else "hstore_json"
            legible = options.invalid_text_handling_mode == "base64"
            return f"legible(b[p:q], {pairs})" if legible else f"{pairs}(b[p:q])"
        case _:
            return _FORMS.get(row.kind) or (QUOTED if row.is_plain else _text(options))


def _text(options: Values) -> str:
    return TEXT if options.invalid_text_handling_mode == "fail" else "legible(b[p:q])"


def _numeric(modifier: int, options: Values) -> str:
    if options.decimal_handling_mode == "string":
        return QUOTED  # exact text, NaN and infinities included
    if options.decimal_handling_mode == "double":
        return FLOAT  # every digit; it is the reader that rounds
    size = numeric_size(modifier)
    return "scaled(b[p:q])" if size is None else f"unscaled(b[p:q], {size.scale})"


def _money(options: Values) -> str:
    digits = options.money_fraction_digits
    if options.decimal_handling_mode == "precise":
        return "money_units(b[p:q])"
    # Two is what Postgres writes under lc_monetary=C, whatever the database's own.
    plain = digits == 2  # noqa: PLR2004
    number = "b[p:q].translate(None, MONEY_MARKS)" if plain else f"money(b[p:q], {digits})"
    return number if options.decimal_handling_mode == "double" else f"QUOTE % {number}"


@cache
def _array_of(
    element: str,
    delimiter: str,
    otherwise: str,
    guessed: bool,  # noqa: FBT001 - as the forms write it
) -> values_structures.Form:
    """Return the function that reads arrays whose elements have the form `element`."""
    return values_structures.ArrayReader(
        _function(element), delimiter.encode(), _function(otherwise), guessed=guessed
    )


def _function(expression: str) -> values_structures.Form:
    """Return a form as a function of the value's bytes."""
    function: Callable[[bytes, int, int], bytes] = eval(f"lambda b, p, q: {expression}", NAMESPACE)  # noqa: S307 - our own text
    return lambda text: function(text, 0, len(text))


# The names that forms use.
NAMESPACE: Final[dict[str, Any]] = {
    "QUOTE": b'"%b"',
    "TRUE": b"true",
    "FALSE": b"false",
    "SPACE": b" ",
    "T": b"T",
    "INSTANT_FORMAT": b'"%bZ"',
    "dumps": dumps,
    "unhex": unhexlify,
    "base64": b2a_base64,
    "base64url": urlsafe_b64encode,
    "array_of": _array_of,
    **values_numbers.NAMESPACE,
    **values_structures.NAMESPACE,
    **values_times.NAMESPACE,
}
