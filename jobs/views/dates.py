"""Rules for dates, timestamps and the intervals that are added to them.

Pure. An interval is no value in a view, as a store has no type for it: it is a literal, or an
integer times one, that is added to a date or a timestamp. As in Postgres its months are added
first, up to the last day of the month, then its days, then its time.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from sqlglot import exp

from lockstep.jobs.views.refusing import UnsupportedError
from lockstep.jobs.views.types import DATE, INT4, TIMES, PgType, numeric
from lockstep.jobs.views.values import Rules, Value, coerced, table_of

_TIMESTAMP: Final = PgType("timestamp")
_TIMESTAMPTZ: Final = PgType("timestamptz")
_SECOND: Final = 1_000_000  # microseconds
# Of years from 1 to 9999; more are in no mirror.
_YEAR: Final = "CAST(extract(YEAR FROM {0}) AS int)"
_YEARS: Final = {
    "decade": f"(({_YEAR} div 10) * 10)",
    "century": f"((({_YEAR} + 99) div 100) * 100 - 99)",
    "millennium": f"((({_YEAR} + 999) div 1000) * 1000 - 999)",
}
_INTEGER: Final = numeric(10, 0)
# What Spark has for each part, and its type in Postgres.
_PARTS_OF_DATES: Final = {
    "year": ("extract(year FROM {0})", _INTEGER),
    "quarter": ("extract(quarter FROM {0})", _INTEGER),
    "month": ("extract(month FROM {0})", _INTEGER),
    "week": ("weekofyear({0})", _INTEGER),
    "day": ("extract(day FROM {0})", _INTEGER),
    "dow": ("dayofweek({0}) - 1", _INTEGER),
    "isodow": ("weekday({0}) + 1", _INTEGER),
    "doy": ("dayofyear({0})", _INTEGER),
    "isoyear": ("extract(YEAROFWEEK FROM {0})", _INTEGER),
    "decade": (f"{_YEAR} div 10", _INTEGER),
    "century": (f"({_YEAR} + 99) div 100", _INTEGER),
    "millennium": (f"({_YEAR} + 999) div 1000", _INTEGER),
}
_PARTS_OF_TIMES: Final = {
    "hour": ("extract(hour FROM {0})", _INTEGER),
    "minute": ("extract(minute FROM {0})", _INTEGER),
    "second": ("extract(SECOND FROM {0})", numeric(8, 6)),
    "milliseconds": ("extract(SECOND FROM {0}) * 1000", numeric(8, 3)),
    "microseconds": ("extract(SECOND FROM {0}) * 1000000", _INTEGER),
}
_EPOCH: Final = numeric(20, 6)
_TRUNCATED_TO: Final = {
    "year": "year", "quarter": "quarter", "month": "month", "week": "week", "day": "day",
    "hour": "hour", "minute": "minute", "second": "second",
    "milliseconds": "millisecond", "microseconds": "microsecond",
}  # fmt: skip
_UNITS: Final = {
    **dict.fromkeys(("year", "years"), (12, 0, 0)),
    **dict.fromkeys(("month", "months", "mon", "mons"), (1, 0, 0)),
    **dict.fromkeys(("week", "weeks"), (0, 7, 0)),
    **dict.fromkeys(("day", "days"), (0, 1, 0)),
    **dict.fromkeys(("hour", "hours"), (0, 0, 3600 * _SECOND)),
    **dict.fromkeys(("minute", "minutes", "min", "mins"), (0, 0, 60 * _SECOND)),
    **dict.fromkeys(("second", "seconds", "sec", "secs"), (0, 0, _SECOND)),
    **dict.fromkeys(("millisecond", "milliseconds", "ms"), (0, 0, 1000)),
    **dict.fromkeys(("microsecond", "microseconds", "us"), (0, 0, 1)),
}
_FIELD: Final = re.compile(
    r"\s*([+-]?\d{1,9})\s*([a-z]+)|\s*(\d{1,9}):(\d\d)(?::(\d\d))?(?![\d:.])"
)


class _Interval(NamedTuple):
    """What is added: each part as Spark's SQL has it."""

    months: str
    days: str
    time: str


def moved(rules: Rules, sign: str, node: exp.Expr) -> Value | None:
    """Return a date or a timestamp with an interval added; None if no side is an interval."""
    left, right = (_plain(node.args[side]) for side in ("this", "expression"))
    if sign in {"+", "-"} and (interval := _interval(rules, right)) is not None:
        return _with_interval(rules.value(left), sign, interval)
    if sign == "+" and (interval := _interval(rules, left)) is not None:
        return _with_interval(rules.value(right), sign, interval)
    return None


def days(sign: str, left: Value, right: Value) -> Value | None:
    """Return a difference of dates, or days added to one; None if neither is a date or time."""
    if not {left.type.name, right.type.name} & TIMES:
        return None
    names = left.type.name, sign, right.type.name
    match names:
        case ("date", "-", "date"):
            return Value(f"datediff({left.sql}, {right.sql})", INT4)
        case ("date", "+" | "-", "int2" | "int4"):
            word = "date_add" if sign == "+" else "date_sub"
            return Value(f"{word}({left.sql}, {right.sql})", DATE)
        case ("int2" | "int4", "+", "date"):
            return Value(f"date_add({right.sql}, {left.sql})", DATE)
        case ("timestamp" | "timestamptz" | "date", "-", "timestamp" | "timestamptz" | "date"):
            raise UnsupportedError(
                f"{left.type.title} - {right.type.title}, whose interval a store has no type for",
                "write extract(epoch FROM a - b), or subtract dates",
            )
    raise UnsupportedError(
        f"{left.type.title} {sign} {right.type.title}",
        "add days, as integers, to dates, or an interval",
    )


def _with_interval(value: Value, sign: str, interval: _Interval) -> Value:
    name = value.type.name
    if name not in {"date", "timestamp", "timestamptz"} or value.type.mask:
        raise UnsupportedError(
            f"{value.type.title} {sign} an interval", "cast it to a timestamp, if it has one's text"
        )
    if name == "timestamptz" and (interval.months or interval.days):
        raise UnsupportedError(
            "timestamptz and an interval of days or months, which depend on TimeZone",
            "write … AT TIME ZONE 'UTC' + interval '…', or an interval of hours",
        )
    kind = _TIMESTAMPTZ if name == "timestamptz" else _TIMESTAMP
    made = coerced(value, kind)
    for part in filter(None, interval):
        made = f"({made} {sign} {part})"
    return Value(made, kind)


def _interval(rules: Rules, node: exp.Expr) -> _Interval | None:
    """Return an interval, or an integer times one; None if it is neither."""
    if isinstance(node, exp.Mul):
        sides = [_plain(node.this), _plain(node.expression)]
        for one, other in (sides, sides[::-1]):
            if (unit := _interval(rules, one)) is not None:
                return _times(unit, rules.value(other))
        return None
    if isinstance(node, exp.Cast) and node.to.this == exp.DType.INTERVAL:
        text = node.this.name if isinstance(node.this, exp.Literal) else None
    elif isinstance(node, exp.Interval):
        amount, unit_ = node.this, node.args.get("unit")
        text = amount.name if isinstance(amount, exp.Literal) else None
        if text is not None and unit_ is not None:
            text = f"{text} {unit_.name}" if isinstance(unit_, exp.Var) else None
    else:
        return None
    found = _read(text) if text is not None else None
    if found is None:
        raise UnsupportedError(
            "an interval written like this",
            "write integers and units: interval '1 month 2 days', '90 minutes' or '01:30:00'",
        )
    return found


def _read(text: str) -> _Interval | None:
    """Return a literal's interval; None if it is written in another way."""
    months = days = time = at = fields = 0
    text = text.lower().rstrip()
    while at < len(text):
        found = _FIELD.match(text, at)
        if found is None or (found[2] and found[2] not in _UNITS):
            return None
        if found[2]:
            each = [int(found[1]) * amount for amount in _UNITS[found[2]]]
        else:
            seconds = int(found[3]) * 3600 + int(found[4]) * 60 + int(found[5] or 0)
            each = [0, 0, seconds * _SECOND]
        months, days, time = (a + b for a, b in zip((months, days, time), each, strict=True))
        at, fields = found.end(), fields + 1
    # What the sign of one part says of the others depends on IntervalStyle.
    if not fields or (fields > 1 and ("-" in text or "+" in text)):
        return None
    seconds, micros = divmod(abs(time), _SECOND)
    minus = "-" if time < 0 else ""
    return _Interval(
        f"INTERVAL '{months}' MONTH" if months else "",
        f"INTERVAL '{days}' DAY" if days else "",
        f"INTERVAL '{minus}{seconds}.{micros:06}' SECOND" if time else "",
    )


def _times(interval: _Interval, factor: Value) -> _Interval:
    if factor.type.name not in {"int2", "int4"}:
        raise UnsupportedError(
            f"an interval times {factor.type.title}", "multiply by an integer, cast to int"
        )
    return _Interval(*(each and f"({each} * {factor.sql})" for each in interval))


def _extract(rules: Rules, node: exp.Extract) -> Value:
    part, inner = node.name.lower(), _plain(node.expression)
    if part == "epoch" and isinstance(inner, exp.Sub):
        one, other = rules.value(inner.this), rules.value(inner.expression)
        if one.type.name == other.type.name and one.type.name in {"timestamp", "timestamptz"}:
            return _seconds(f"{_micros(one)} - {_micros(other)}")
    found = rules.value(inner)
    name = found.type.name
    if part == "epoch" and name in {"timestamp", "timestamptz"}:
        return _seconds(_micros(found))
    if part == "epoch" and name == "date":
        kind = numeric(12, 0)
        return Value(f"CAST(unix_date({found.sql}) * 86400L AS {kind.spark})", kind)
    known = _PARTS_OF_DATES | (_PARTS_OF_TIMES if name == "timestamp" else {})
    if name not in {"date", "timestamp"} or part not in known:
        hint = f"take epoch, {', '.join(known)} of a date or timestamp"
        if name == "timestamptz":
            hint = "write extract(… FROM … AT TIME ZONE 'UTC')"
        elif name == "date" and part in _PARTS_OF_TIMES:
            hint = "take it of a timestamp"
        raise UnsupportedError(f"extract({part} from {found.type.title})", hint)
    text, kind = known[part]
    return Value(f"CAST({text.format(found.sql)} AS {kind.spark})", kind)


def _micros(value: Value) -> str:
    return f"unix_micros({coerced(value, _TIMESTAMPTZ)})"


def _seconds(micros: str) -> Value:
    """Return microseconds as seconds, with six digits after the point as Postgres has them."""
    millionth = "CAST('0.000001' AS decimal(7,6))"
    return Value(f"CAST(CAST(({micros}) AS decimal(19,0)) * {millionth} AS {_EPOCH.spark})", _EPOCH)


def _truncated(rules: Rules, node: exp.TimestampTrunc) -> Value:
    found, unit = rules.value(node.this), node.args["unit"].name.lower()
    zone = node.args.get("zone")
    is_utc = zone is not None and rules.value(zone).text == "UTC"
    wanted = "timestamptz" if is_utc else "timestamp"
    if found.type.name != wanted or (zone is not None and not is_utc):
        raise UnsupportedError(
            f"date_trunc('{unit}', {found.type.title})",
            "cast a date to timestamp; of a timestamptz write date_trunc('…', …, 'UTC')",
        )
    if unit in _YEARS and not is_utc:
        year = _YEARS[unit].format(found.sql)
        return Value(f"make_timestamp_ntz({year}, 1, 1, 0, 0, 0)", found.type)
    if unit not in _TRUNCATED_TO:
        raise UnsupportedError(
            f"date_trunc('{unit}', …)", f"take {', '.join((*_TRUNCATED_TO, *_YEARS))}"
        )
    made = f"date_trunc('{_TRUNCATED_TO[unit]}', {coerced(found, _TIMESTAMPTZ)})"
    return Value(coerced(Value(made, _TIMESTAMPTZ), found.type), found.type)


def _zone(rules: Rules, node: exp.AtTimeZone) -> Value:
    found, zone = rules.value(node.this), rules.value(node.args["zone"])
    if found.type.name != "timestamptz" or zone.text != "UTC":
        raise UnsupportedError(
            f"{found.type.title} AT TIME ZONE", "write timestamptz AT TIME ZONE 'UTC'"
        )
    return Value(f"CAST({found.sql} AS timestamp_ntz)", _TIMESTAMP)


def _make_date(rules: Rules, year: exp.Expr, month: exp.Expr, day: exp.Expr) -> Value:
    given = [rules.value(each) for each in (year, month, day)]
    for each in given:
        if each.type.name not in {"int2", "int4"}:
            raise UnsupportedError(f"make_date() of {each.type.title}", "cast it to int")
    of_year, of_month, of_day = (each.sql for each in given)
    # A negative year is one before Christ, which is Spark's year 0 or an earlier one. Postgres has
    # no year 0, which is an error: as there is no month 0.
    return Value(
        f"make_date({of_year} + if({of_year} < 0, 1, 0),"
        f" if({of_year} = 0, {of_month} * 0, {of_month}), {of_day})",
        DATE,
    )


def _plain(node: exp.Expr) -> exp.Expr:
    """Return an expression without parentheses around it."""
    return _plain(node.this) if isinstance(node, exp.Paren) else node


RULES: Final = table_of(
    ("this expression", _extract, [exp.Extract]),
    ("this unit zone", _truncated, [exp.TimestampTrunc]),
    ("this zone", _zone, [exp.AtTimeZone]),
)
NAMED: Final = {"make_date": _make_date}
