"""Dates', times' and intervals' text → JSON.

A number only where it is exact: what does not fit the unit or the calendar of a form (infinity, BC,
years above 9999, microseconds in milliseconds, nanoseconds beyond 64 bits) stays Postgres' own text
in a JSON string. `interval_micros` is the one exception.

https://www.postgresql.org/docs/current/datatype-datetime.html#DATATYPE-INTERVAL-OUTPUT
"""

from __future__ import annotations

import re
from datetime import date, datetime
from functools import lru_cache
from typing import Final

_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - Postgres' timestamp has no zone either

# Longer text has more than milliseconds: Postgres leaves out zeros at the end.
_MILLIS_TIME: Final = len("hh:mm:ss.fff")
_MILLIS_TIMESTAMP: Final = len("YYYY-MM-DD hh:mm:ss.fff")
_INT64: Final = 2**63

_INTERVAL = re.compile(
    rb"(?:([+-]?\d+) years? ?)?(?:([+-]?\d+) mons? ?)?(?:([+-]?\d+) days? ?)?"
    rb"(?:([+-]?)(\d+):(\d\d):(\d\d)(?:\.(\d{1,6}))?)?"
)
_DAY_MICROS: Final = 86_400_000_000
# Debezium's month: a twelfth of 365.25 days.
_MONTH_MICROS: Final = 2_629_800_000_000


@lru_cache(maxsize=8_192)  # a table's dates repeat
def days(text: bytes) -> bytes:
    """Return days since 1970-01-01."""
    if len(text) != len("YYYY-MM-DD"):
        return b'"%b"' % text
    return b"%d" % (date.fromisoformat(text.decode()).toordinal() - _EPOCH_DAY)


def _micros_of_day(text: bytes) -> int:
    seconds = (int(text[:2]) * 60 + int(text[3:5])) * 60 + int(text[6:8])
    return seconds * 1_000_000 + int(text[9:].ljust(6, b"0"))


def time_micros(text: bytes) -> bytes:
    """Return microseconds since midnight; `24:00:00` is 86400000000. Common, so it is inlined."""
    seconds = (int(text[:2]) * 60 + int(text[3:5])) * 60 + int(text[6:8])
    return b"%d" % (seconds * 1_000_000 + int(text[9:].ljust(6, b"0")))


def time_millis(text: bytes) -> bytes:
    """Return milliseconds since midnight."""
    if len(text) > _MILLIS_TIME:
        return b'"%b"' % text
    return b"%d" % (_micros_of_day(text) // 1_000)


def time_nanos(text: bytes) -> bytes:
    """Return nanoseconds since midnight."""
    return b"%d" % (_micros_of_day(text) * 1_000)


def timestamp_micros(text: bytes) -> bytes:
    """Return microseconds since 1970-01-01 of the wall clock the text shows."""
    if text[10:11] != b" " or text[-1:] == b"C":
        return b'"%b"' % text
    since = datetime.fromisoformat(text.decode()) - _EPOCH
    return b"%d" % ((since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds)


def timestamp_millis(text: bytes) -> bytes:
    """Return milliseconds since 1970-01-01 of the wall clock the text shows."""
    if len(text) > _MILLIS_TIMESTAMP or text[10:11] != b" " or text[-1:] == b"C":
        return b'"%b"' % text
    since = datetime.fromisoformat(text.decode()) - _EPOCH
    return b"%d" % ((since.days * 86_400 + since.seconds) * 1_000 + since.microseconds // 1_000)


def timestamp_nanos(text: bytes) -> bytes:
    """Return nanoseconds since 1970-01-01, from 1677 to 2262, where 64 bits hold them."""
    micros = timestamp_micros(text)
    if micros[:1] == b'"' or not -_INT64 <= int(micros) * 1_000 < _INT64:
        return b'"%b"' % text
    return b"%d" % (int(micros) * 1_000)


def interval_iso(text: bytes) -> bytes:
    """Return the interval as ISO 8601, each part with its own sign; text if it is infinite."""
    found = _INTERVAL.fullmatch(text)
    if found is None or not text:
        return b'"%b"' % text
    years, months, days_, sign, hours, minutes, seconds, fraction = found.groups()
    part = (fraction or b"").rstrip(b"0")
    clock = [
        b"-%b" % each if sign == b"-" and each.strip(b"0.") else each
        for each in (
            b"%d" % int(hours or 0),
            b"%d" % int(minutes or 0),
            b"%d%b" % (int(seconds or 0), b"." + part if part else b""),
        )
    ]
    dated = b"P%dY%dM%dD" % (int(years or 0), int(months or 0), int(days_ or 0))
    return b'"%bT%bH%bM%bS"' % (dated, *clock)


def interval_micros(text: bytes) -> bytes:
    """Return about how many microseconds the interval lasts: a month is 30.4375 days.

    Not exact, as the chosen option implies; text if it is infinite or beyond 64 bits.
    """
    found = _INTERVAL.fullmatch(text)
    if found is None or not text:
        return b'"%b"' % text
    years, months, days_, sign, hours, minutes, seconds, fraction = found.groups()
    clock = (int(hours or 0) * 60 + int(minutes or 0)) * 60 + int(seconds or 0)
    micros = clock * 1_000_000 + int((fraction or b"").ljust(6, b"0"))
    total = (
        (int(years or 0) * 12 + int(months or 0)) * _MONTH_MICROS
        + int(days_ or 0) * _DAY_MICROS
        + (-micros if sign == b"-" else micros)
    )
    return b"%d" % total if -_INT64 <= total < _INT64 else b'"%b"' % text


NAMESPACE: Final = {
    function.__name__: function
    for function in (
        days,
        time_micros,
        time_millis,
        time_nanos,
        timestamp_micros,
        timestamp_millis,
        timestamp_nanos,
        interval_iso,
        interval_micros,
    )
}
