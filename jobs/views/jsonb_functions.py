"""Postgres' operators and functions of jsonb, as functions for Spark's SQL.

Spark's own functions write numbers again (1.500 as 1.5), so a member is cut out of the text: within
a value, jsonb's text is the one that the member has alone. Only what compares values parses them.
"""

from __future__ import annotations

import re
from decimal import Decimal
from json import JSONDecoder
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MEMBER: Final = "lockstep_jsonb"
AT_PATH: Final = "lockstep_jsonb_path"
CONTAINS: Final = "lockstep_jsonb_contains"
HAS_KEYS: Final = "lockstep_jsonb_keys"
LENGTH: Final = "lockstep_jsonb_length"
# Returns the value at a place, and where it ends. A number stays a text: it may have any length.
_read: Final = JSONDecoder(parse_int=str, parse_float=str).raw_decode
# Equal numbers are equal, whatever their digits: 1.0 and 1.00.
_parse: Final = JSONDecoder(parse_int=Decimal, parse_float=Decimal).decode
_INDEX: Final = re.compile(r"[ \t\n\v\f\r]*[+-]?0{0,99}[0-9]{1,10}", re.ASCII)
_INT4: Final = range(-(1 << 31), 1 << 31)


def member(
    value: str | None,
    key: str | None,
    index: int | None,
    as_text: bool,  # noqa: FBT001 - Spark passes no names
) -> str | None:
    """Return the member with a key, or without one the element with an index; None if none is.

    A negative index counts from the end. As a text, a string is without quotes, and null is None.
    """
    if value is None or (key is None and index is None):
        return None
    return _shown(_of_object(value, key) if key is not None else _of_array(value, index), as_text)


def at_path(value: str | None, path: Sequence[str], as_text: bool) -> str | None:  # noqa: FBT001 - Spark passes no names
    """Return the value at a path of keys and indexes, as `#>` and `#>>` do; None if none is."""
    found = value
    for part in path:
        if found is None:
            return None
        if found[0] == "{":
            found = _of_object(found, part)
        else:
            is_index = found[0] == "[" and _INDEX.fullmatch(part) and int(part) in _INT4
            found = _of_array(found, int(part)) if is_index else None
    return _shown(found, as_text)


def contains(value: str | None, part: str | None) -> bool | None:
    """Return whether a value contains another, as `@>` does."""
    if value is None or part is None:
        return None
    outer, wanted = _parse(value), _parse(part)
    if not isinstance(outer, dict | list) and isinstance(wanted, list):
        return False
    # At the top, and only there, a value that is neither is an array of one.
    return _contains(*(x if isinstance(x, dict | list) else [x] for x in (outer, wanted)))


def _contains(outer: Any, part: Any) -> bool:  # noqa: ANN401 - any JSON
    if type(outer) is not type(part):
        return False
    if isinstance(part, dict):
        return all(key in outer and _contains(outer[key], part[key]) for key in part)
    if isinstance(part, list):
        return all(any(_contains(one, wanted) for one in outer) for wanted in part)
    return bool(outer == part)


def has_keys(value: str | None, keys: Sequence[str], every: bool) -> bool | None:  # noqa: FBT001 - Spark passes no names
    """Return whether texts are keys of an object, or strings in an array: `?&`, or any: `?|`."""
    if value is None:
        return None
    found = _parse(value)
    among = {x for x in (found if isinstance(found, dict | list) else [found]) if type(x) is str}
    return among.issuperset(keys) if every else not among.isdisjoint(keys)


def length(value: str | None) -> int | None:
    """Return the number of an array's elements; None if it is no array, where Postgres fails.

    Spark calls it for all rows, also where a CASE leaves them out.
    """
    return None if value is None or value[0] != "[" else sum(1 for _ in _elements(value))


def _shown(found: str | None, as_text: bool) -> str | None:  # noqa: FBT001
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


def _of_array(value: str, index: int | None) -> str | None:
    if value[0] == "{" or index is None:
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
