"""The type of a column in Postgres or SQLite, and its values.

In Postgres a column has its source's type without length and precision, if that is built in and
needs nothing else of the source: such a type holds every value, cast from Postgres' own text. Every
other column is text, and holds that text. SQLite's types are not strict: integers, floats, booleans
(1 and 0) and bytes are its own values, and all else is Postgres' text, as is NaN in a column of
floats. So no value is rounded or missing, and none needs a column of its own. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from cdc.decode.types import ValueKind, element_of, kind_of, row_of
from lockstep.sinks.delta.types import delta_type
from lockstep.sinks.delta.values import Digits, Form

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lockstep.sinks.contract import Column

_INTEGERS: Final = frozenset({ValueKind.INTEGER, ValueKind.OID})
# `bit` alone is one bit; the form of money depends on the server's locale.
_POSTGRES: Final = {ValueKind.BITS: "varbit", ValueKind.MONEY: "numeric"}
# Without those that another server may lack, or reads as something else.
_NOT_THERE: Final = frozenset({ValueKind.XML, ValueKind.INTERNAL})
_SQLITE: Final = {
    **dict.fromkeys(_INTEGERS, "integer"),
    ValueKind.FLOAT: "real",
    ValueKind.BOOLEAN: "boolean",
    ValueKind.BYTES: "blob",
}
# Reads a row or a key; its numbers with a point or an exponent keep their digits.
DECODE: Final = msgspec.json.Decoder(dict[str, Any], float_hook=Digits).decode


class ColumnValues:
    """The type of a column, and conversion of its values from the log's JSON and back."""

    def __init__(self, column: Column, options: Mapping[str, object], *, postgres: bool) -> None:
        kind = kind_of(column.type)
        self._kind = None if column.mask is not None else kind
        self._postgres = postgres
        # Kinds of which the log's JSON is not Postgres' text, nor a number.
        is_precise = options.get("decimal.handling.mode") == "precise"
        is_map = kind is ValueKind.MAP  # whose JSON may look as if it were marked
        self._marked = (is_precise or kind is ValueKind.BYTES) and not is_map
        mirrored = delta_type(column.type, column.modifier)
        self._form = Form(column.type, column.modifier, mirrored, options)
        self.type = "text"
        if self._kind is not None:
            self.type = _own(column.type, options) if postgres else _SQLITE.get(kind, "text")

    def stored(self, value: Any) -> object:  # noqa: ANN401, PLR0911 - JSON's; a case a kind
        """Return the value to bind: Postgres' text, or SQLite's own."""
        if value is None:
            return None
        if self._kind is not ValueKind.MAP and type(value) is dict and value.keys() == {"text"}:
            text = value["text"]
            is_bytes = self._kind is ValueKind.BYTES and not self._postgres
            return bytes.fromhex(text[2:]) if is_bytes else text
        if self._kind is None:
            return value if type(value) is str else msgspec.json.encode(value).decode()
        if self._kind is ValueKind.MONEY:
            return format(self._form.natural(value), "f")
        if not self._postgres:
            if self._kind is ValueKind.BOOLEAN or self._kind in _INTEGERS:
                return int(value)
            if self._kind is ValueKind.FLOAT:
                return value if type(value) is str else float(value)
            if self._kind is ValueKind.BYTES:
                return bytes(self._form.natural(value))
        return self._form.text(value)

    def json(self, value: Any) -> object:  # noqa: ANN401 - the driver's
        """Return a stored value as JSON that `stored` reads."""
        if value is None or self._kind is None:
            return value
        try:
            if self._kind is ValueKind.BOOLEAN:
                return value in {1, "t", "true"}
            if self._kind in _INTEGERS:
                return int(value)
            if self._kind is ValueKind.FLOAT:
                return value if value in {"NaN", "Infinity", "-Infinity"} else float(value)
        except ValueError:  # a text of the type that the column had before
            return {"text": value}
        text = f"\\x{value.hex()}" if type(value) is bytes else str(value)
        return {"text": text} if self._marked else text


def _own(name: str, options: Mapping[str, object]) -> str:
    """Return the type of a column in Postgres."""
    element = element_of(name)
    row = row_of(element or name)
    if row is None or not row.oid or row.kind in _NOT_THERE:
        return "text"
    # Microseconds do not say which interval they were; an array has money in the server's form.
    if row.kind is ValueKind.INTERVAL and options.get("interval.handling.mode") == "numeric":
        return "text"
    if row.kind is ValueKind.MONEY and element:
        return "text"
    return ("_" if element else "") + _POSTGRES.get(row.kind, row.name)
