"""Evaluate a column's form as the compiled encoders do: in the middle of other bytes."""

from __future__ import annotations

import json
from typing import Any

from cdc.config.value_options import Values
from cdc.decode.types import TYPE_NAMES
from cdc.encode.values import NAMESPACE, form
from cdc.log.records import SchemaColumn

_OIDS = {name: oid for oid, name in TYPE_NAMES.items()}
# Bytes after a value must not change it, even those that the forms search for.
_PAST = (b"", b"t\0\0\0 12 +", b" " * 30, b"+" * 30, b"9" * 30)


def column(name: str, modifier: int = -1) -> SchemaColumn:
    """Return a column of the type; `schema.name` for one that is not built in."""
    type_id = _OIDS.get(name, 90_001)
    return SchemaColumn(name="c", type_id=type_id, type=name, type_modifier=modifier, nullable=True)


def encoded(of: SchemaColumn, text: bytes, options: Values) -> bytes:
    """Return the JSON of a column's text."""
    function = eval(f"lambda b, p, q: {form(of, options)}", dict(NAMESPACE))  # noqa: S307 - our own text
    found: bytes = function(text, 0, len(text))
    return found


def written(name: str, text: str | bytes, modifier: int = -1, **options: Any) -> object:  # noqa: ANN401
    """Return the value in the event, with any bytes before and after its text."""
    value = text if isinstance(text, bytes) else text.encode()
    function = eval(  # noqa: S307 - our own text
        f"lambda b, p, q: {form(column(name, modifier), Values(**options))}", dict(NAMESPACE)
    )
    found = {
        function(ahead + value + lagging, len(ahead), len(ahead) + len(value))
        for ahead in (b"", b"\n\0-1 ")
        for lagging in _PAST
    }
    [json_bytes] = found
    result: object = json.loads(json_bytes)
    return result
