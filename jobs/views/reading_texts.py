"""Casts of texts to booleans, numbers, dates and timestamps, as Postgres reads them.

Pure. What is read is what every supported version of Postgres reads alike, in any DateStyle. A text
that is none, or too large, fails with Postgres' own message, without the text. One that Postgres
may read and a view does not (`0x1F`, `1_000`, `NaN`, `Jan 2 2026`) fails, too, with another one.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from lockstep.jobs.views.types import INTEGERS, PgType
from lockstep.jobs.views.values import Value, string

# Of the messages of errors that a query raises for a text.
AS_IN_POSTGRES: Final = "lockstep: as in Postgres: "
NOT_READ: Final = "lockstep: a view does not read this: "
END: Final = ";"
# What isspace() has in Postgres.
_BLANKS: Final = " \t\n\v\f\r"
_BLANK: Final = "[ \\t-\\r]*"
_END_OF_TEXT: Final = r"\z"  # `$` is also before the end of a line
_DIGITS: Final = r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?"
_DATE: Final = r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}"
_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9](\.[0-9]{1,6})?)?"
_TRUE: Final = ("t", "tr", "tru", "true", "y", "ye", "yes", "on", "1")
_FALSE: Final = ("f", "fa", "fal", "fals", "false", "n", "no", "of", "off", "0")
_OTHER_NUMBERS: Final = r"_|0[xXoObB]"
_OTHER_EXPONENTS: Final = rf"(?i){_OTHER_NUMBERS}|nan|inf|e"
_OUT_OF_DATES: Final = "date/time field value out of range"


class _Reading(NamedTuple):
    """How texts of a type are read."""

    title: str  # the type, as Postgres' messages have it
    read: str  # the texts that are
    others: str  # texts that Postgres may read, too
    too_large: str  # the error of a text that is read and has no value


_READINGS: Final = {
    "bool": _Reading("boolean", f"(?i)({'|'.join((*_TRUE, *_FALSE))})", "(?!)", ""),
    **{
        name: _Reading(
            title, "[+-]?[0-9]+", _OTHER_NUMBERS, f"value is out of range for type {title}"
        )
        for name, title in zip(INTEGERS, ("smallint", "integer", "bigint"), strict=True)
    },
    "numeric": _Reading("numeric", _DIGITS, _OTHER_EXPONENTS, "numeric field overflow"),
    "float8": _Reading(
        "double precision", _DIGITS, _OTHER_EXPONENTS, "is out of range for type double precision"
    ),
    # Postgres reads dates in many forms, and words.
    "date": _Reading("date", _DATE, "", _OUT_OF_DATES),
    "timestamp": _Reading("timestamp", f"{_DATE}([ T]{_TIME})?", "", _OUT_OF_DATES),
}


def read_text(text: str, wanted: PgType) -> Value | None:
    """Return a text's value of a type; None if texts are not cast to it."""
    reading = _READINGS.get(wanted.name)
    if reading is None or (wanted.name == "numeric" and wanted.size is None):
        return None
    kind = wanted.spark
    invalid = f"invalid input syntax for type {reading.title}"
    not_read = f"a text as {reading.title}, which has several forms"
    # A lambda's `x`, so that the text's expression is there once.
    sql = (
        f"transform(array(CAST({text} AS string)), x -> CASE WHEN x IS NULL THEN NULL"
        f" WHEN x RLIKE {string(f'^{_BLANK}({reading.read}){_BLANK}{_END_OF_TEXT}')}"
        f" THEN coalesce({_value(wanted)}, {fails(AS_IN_POSTGRES + reading.too_large, kind)})"
        f" WHEN x RLIKE {string(reading.others)} THEN {fails(NOT_READ + not_read, kind)}"
        f" ELSE {fails(AS_IN_POSTGRES + invalid, kind)} END)[0]"
    )
    return Value(sql, wanted)


def _value(wanted: PgType) -> str:
    """Return the value of a text `x` that is read; NULL if the type has none."""
    trimmed = f"trim(BOTH {string(_BLANKS)} FROM x)"
    made = f"try_cast({trimmed} AS {wanted.spark})"
    if wanted.name == "bool":
        return f"lower({trimmed}) IN ({', '.join(map(string, _TRUE))})"
    if wanted.name == "float8":
        # Too large, or too small: Spark has infinity and 0.
        lost = f"abs({made}) = double('Infinity') OR ({made} = 0 AND x RLIKE '^[^eE]*[1-9].*')"
        return f"if({lost}, NULL, {made})"
    if wanted.name in {"date", "timestamp"}:
        return f"if(x RLIKE {string(f'^{_BLANK}0000')}, NULL, {made})"
    return made


def fails(message: str, kind: str) -> str:
    """Return an expression of a type that fails with a message."""
    return f"CAST(raise_error({string(message + END)}) AS {kind})"
