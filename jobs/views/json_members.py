"""Members of jsonb values, as Postgres' `->` and `->>` return them: a function for Spark's SQL.

Spark's own functions write numbers again (1.500 as 1.5), so a member is cut out of the text: within
a value, jsonb's text is the one that the member has alone.
"""

from __future__ import annotations

from json import JSONDecoder
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

FUNCTION: Final = "lockstep_jsonb"
# Returns the value at a place, and where it ends. A number stays a text: it may have any length.
_read: Final = JSONDecoder(parse_int=str, parse_float=str).raw_decode


def register(spark: SparkSession) -> None:
    """Make the function known to a session."""
    from pyspark.sql.functions import udf  # noqa: PLC0415 - pyspark takes a second to import

    spark.udf.register(FUNCTION, udf(member, "string", useArrow=False))


def member(value: str | None, key: str | None, index: int, as_text: bool) -> str | None:  # noqa: FBT001 - Spark passes no names
    """Return the member with a key, or without one the element with an index; None if none is.

    A negative index counts from the end. As a text, a string is without quotes, and null is None.
    """
    if value is None:
        return None
    found = _of_object(value, key) if key is not None else _of_array(value, index)
    if found is None or not as_text:
        return found
    if found == "null":
        return None
    return str(_read(found)[0]) if found[0] == '"' else found


def _of_object(value: str, key: str) -> str | None:
    if value[0] != "{":
        return None
    at = 1
    while value[at] != "}":
        name, at = _read(value, value.index('"', at))
        start = at + len(": ")
        _, at = _read(value, start)
        if name == key:
            return value[start:at]
    return None


def _of_array(value: str, index: int) -> str | None:
    if value[0] == "{":
        return None
    # A value that is no array is one element to Postgres.
    every = list(_elements(value)) if value[0] == "[" else [value]
    return every[index] if -len(every) <= index < len(every) else None


def _elements(value: str) -> Iterator[str]:
    at = 1
    while value[at] != "]":
        start = at + len(", ") if value[at] == "," else at
        _, at = _read(value, start)
        yield value[start:at]
