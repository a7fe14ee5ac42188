"""Why a view has no answer at a frontier, in Postgres' words where Postgres has none either.

Pure. What Spark reports quotes values of rows, so none of its text is passed on. Where the query is
an error in Postgres, too, the error has the text of that: without the value, too, and of integers
without the type where Spark does not name it.
"""

from __future__ import annotations

import re
from typing import Final

from cdc.errors import NoAnswerError
from lockstep.jobs.views.quotients import NO_DIGITS
from lockstep.jobs.views.reading_texts import AS_IN_POSTGRES, END, NOT_READ
from lockstep.jobs.views.states import INEXACT_VALUE

_INTEGERS: Final = {"SMALLINT": "smallint", "INT": "integer", "BIGINT": "bigint"}
# What Spark reports, and what Postgres does; `{}` is the integer type that a cast is to.
_ERRORS: Final = (
    (re.compile(r"\[(?:DIVIDE|REMAINDER)_BY_ZERO"), "division by zero"),
    (re.compile(r"\[BINARY_ARITHMETIC_OVERFLOW"), "smallint out of range"),
    (re.compile(r"\[ARITHMETIC_OVERFLOW"), "integer out of range, or bigint out of range"),
    (re.compile(r'\[CAST_OVERFLOW.*?cannot be cast to "(\w+)"', re.DOTALL), "{} out of range"),
    (re.compile(r"\[INTERVAL_ARITHMETIC_OVERFLOW"), "interval out of range"),
    (re.compile(r"\[DATETIME_OVERFLOW"), "timestamp out of range"),
    (re.compile(r"\[DATETIME_FIELD_OUT_OF_BOUNDS"), "date field value out of range"),
    (
        re.compile(r"\[SCALAR_SUBQUERY_TOO_MANY_ROWS"),
        "more than one row returned by a subquery used as an expression",
    ),
)
_OWN: Final = re.compile(f"{AS_IN_POSTGRES}([^{END}]+){END}")
_TEXT: Final = re.compile(f"{NOT_READ}([^{END}]+){END}")
# A sum of numerics of which Postgres has an answer.
_SUM: Final = "Overflow in sum of decimals"
_NUMERIC: Final = re.compile(
    r"\[NUMERIC_(?:VALUE_OUT_OF_RANGE|OUT_OF_SUPPORTED_RANGE)(?:.*?Decimal\((\d+), ?-?\d+\))?",
    re.DOTALL,
)
_MOST_DIGITS: Final = "38"
_VALUE_IN: Final = re.compile(re.escape(INEXACT_VALUE) + r" in (\S+)\.(?:\s|'|$)")


def no_answer(view: str, reported: str) -> NoAnswerError | None:
    """Return the error of a view for which Spark has reported this; None if no value is why."""
    if NO_DIGITS in reported:
        return NoAnswerError(
            f"view {view} has a quotient, or a standard deviation, of more digits than a store has"
            " (docs/VIEWS.md)",
            hint="leave such rows out of it, or round what it is computed of by round(…, n)",
        )
    if (found := _VALUE_IN.search(reported)) is not None:
        return NoAnswerError(
            f"view {view} reads {found[1]}, which has a value that is only text in its mirror"
            " (docs/DELTA.md, `_exact`)",
            hint="leave such rows out of the table, or the column out of the view",
        )
    if (found := _TEXT.search(reported)) is not None:
        return NoAnswerError(
            f"view {view} does not read {found[1]}, of which a row has another (docs/VIEWS.md)",
            hint="correct the row in Postgres, or leave such rows out of the view",
        )
    if (text := _of_postgres(reported)) is not None:
        return NoAnswerError(
            f"view {view} has no answer, in Postgres neither: {text}",
            hint="correct the row in Postgres, where the view's query fails alike until then; or"
            " leave such rows out of the view, cast to a wider type, divide by nullif(…, 0)",
        )
    if _SUM in reported or _NUMERIC.search(reported):
        return NoAnswerError(
            f"view {view} computes a number of more than {_MOST_DIGITS} digits, which no store has",
            hint="correct the row in Postgres, or leave such rows out of the view",
        )
    return None


def _of_postgres(reported: str) -> str | None:
    if (found := _OWN.search(reported)) is not None:
        return found[1]
    if _SUM in reported:
        return None
    for pattern, text in _ERRORS:
        if (found := pattern.search(reported)) is not None:
            return text.format(_INTEGERS.get(found[1], found[1])) if found.groups() else text
    found = _NUMERIC.search(reported)
    if found is not None and found[1] not in {None, _MOST_DIGITS}:
        return "numeric field overflow"
    return None
