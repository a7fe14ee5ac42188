"""Column text as Postgres writes it → JSON bytes, one form a type.

A form is a Python expression over `b[p:q]`, the value's bytes, which the compiled encoders inline;
the functions below are what some forms call. Exact or text: what does not fit a form's shape
(infinity, BC, years above 9999) stays Postgres' own text in a JSON string, never clamped, never
null. docs/EVENTS.md lists the forms for users; the session settings that pin the text are in
`cdc.source.connection`.
"""

from __future__ import annotations

from binascii import b2a_base64, unhexlify
from datetime import date, datetime
from typing import Final

from orjson import dumps

_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - Postgres' timestamp has no zone either

# Form: an expression giving JSON bytes from b[p:q].
NUMBER: Final = "b[p:q]"  # digits, straight into the JSON
QUOTED: Final = "QUOTE % b[p:q]"  # ASCII without quotes or backslashes, by the type's grammar
TEXT: Final = "dumps(b[p:q].decode())"  # a strict decode: invalid UTF-8 raises
BOOL: Final = "TRUE if b[p] == 116 else FALSE"
# Only the everyday shape is rewritten in place: `YYYY-MM-DD hh:mm:ss[.f]+00`.
INSTANT: Final = (
    "INSTANT_FORMAT % b[p:q - 3].replace(SPACE, T)"
    " if b[q - 3] == 43 and b[p + 10] == 32 else QUOTE % b[p:q]"
)
FLOAT: Final = "floating(b[p:q])"
BYTEA: Final = "bytea(b[p:q])"
DATE: Final = "days(b[p:q])"
TIME: Final = "time_micros(b[p:q])"
TIMESTAMP_MICROS: Final = "timestamp_micros(b[p:q])"
TIMESTAMP_MILLIS: Final = "timestamp_millis(b[p:q])"

_FORMS: Final = {
    16: BOOL,
    17: BYTEA,
    20: NUMBER,
    21: NUMBER,
    23: NUMBER,
    26: NUMBER,
    650: QUOTED,  # cidr
    700: FLOAT,
    701: FLOAT,
    774: QUOTED,  # macaddr8
    829: QUOTED,  # macaddr
    869: QUOTED,  # inet
    1082: DATE,
    1083: TIME,
    1184: INSTANT,
    1700: QUOTED,  # numeric: exact text, NaN and infinities included
    2950: QUOTED,  # uuid
}
_TIMESTAMP: Final = 1114


def form(type_id: int, type_modifier: int) -> str:
    """Return the expression that turns `b[p:q]` of this type into JSON bytes."""
    if type_id == _TIMESTAMP:
        # As Debezium's adaptive mode: milliseconds hold timestamp(0) to timestamp(3) exactly.
        return TIMESTAMP_MILLIS if 0 <= type_modifier <= 3 else TIMESTAMP_MICROS  # noqa: PLR2004
    return _FORMS.get(type_id, TEXT)


def floating(text: bytes) -> bytes:
    """Return a JSON number, or a string for NaN and the infinities, which JSON lacks."""
    return text if text[-1:].isdigit() else b'"%b"' % text


def bytea(text: bytes) -> bytes:
    r"""Return base64 in quotes for hex text (`\x0a1b`)."""
    return b'"%b"' % b2a_base64(unhexlify(text[2:]), newline=False)


def days(text: bytes) -> bytes:
    """Return days since 1970-01-01."""
    if len(text) != len("YYYY-MM-DD"):
        return b'"%b"' % text
    return b"%d" % (date.fromisoformat(text.decode()).toordinal() - _EPOCH_DAY)


def time_micros(text: bytes) -> bytes:
    """Return microseconds since midnight; `24:00:00` is 86400000000."""
    seconds = (int(text[:2]) * 60 + int(text[3:5])) * 60 + int(text[6:8])
    return b"%d" % (seconds * 1_000_000 + int(text[9:].ljust(6, b"0")))


def timestamp_micros(text: bytes) -> bytes:
    """Return microseconds since 1970-01-01 of the wall clock the text shows."""
    micros = _micros(text)
    return b'"%b"' % text if micros is None else b"%d" % micros


def timestamp_millis(text: bytes) -> bytes:
    """Return milliseconds since 1970-01-01 of the wall clock the text shows."""
    micros = _micros(text)
    return b'"%b"' % text if micros is None else b"%d" % (micros // 1000)


def _micros(text: bytes) -> int | None:
    if text[10:11] != b" " or text[-1:] == b"C":
        return None
    since = datetime.fromisoformat(text.decode()) - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


# The names that forms use.
NAMESPACE: Final = {
    "QUOTE": b'"%b"',
    "TRUE": b"true",
    "FALSE": b"false",
    "SPACE": b" ",
    "T": b"T",
    "INSTANT_FORMAT": b'"%bZ"',
    "dumps": dumps,
    "floating": floating,
    "bytea": bytea,
    "days": days,
    "time_micros": time_micros,
    "timestamp_micros": timestamp_micros,
    "timestamp_millis": timestamp_millis,
}
