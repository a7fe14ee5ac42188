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

from lockstep.sinks.delta.types import TEXT, DeltaType, TypeKind
from lockstep.sinks.delta.values import Digits, Form

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lockstep.sinks.contract import Column

_INTEGERS: Final = frozenset({"int2", "int4", "int8", "oid"})
_FLOATS: Final = frozenset({"float4", "float8"})
_SAME: Final = frozenset(
    """ bool int2 int4 int8 oid float4 float8 numeric text varchar bpchar json jsonb bytea uuid date
    time timetz timestamp timestamptz interval varbit inet cidr macaddr macaddr8 pg_lsn point line
    lseg box path polygon circle tsvector tsquery int4range int8range numrange tsrange tstzrange
    daterange int4multirange int8multirange nummultirange tsmultirange tstzmultirange
    datemultirange """.split()  # noqa: SIM905 - a list of so many is longer
)
# `bit` alone is one bit; the form of money depends on the server's locale.
_OTHER: Final = {"bit": "varbit", "_bit": "_varbit", "money": "numeric"}
_SQLITE: Final = {
    **dict.fromkeys(_INTEGERS, "integer"),
    **dict.fromkeys(_FLOATS, "real"),
    "bool": "boolean",
    "bytea": "blob",
}
# Reads a row or a key; its numbers with a point or an exponent keep their digits.
DECODE: Final = msgspec.json.Decoder(dict[str, Any], float_hook=Digits).decode
_MONEY: Final = DeltaType("decimal", TypeKind.MONEY)
_BYTES: Final = DeltaType("binary", TypeKind.SAME)


class ColumnValues:
    """The type of a column, and conversion of its values from the log's JSON and back."""

    def __init__(self, column: Column, options: Mapping[str, object], *, postgres: bool) -> None:
        self._kind = kind = "" if column.mask is not None else column.type
        self._postgres = postgres
        # Kinds of which the log's JSON is not Postgres' text, nor a number.
        self._marked = options.get("decimal.handling.mode") == "precise" or kind == "bytea"
        target = {"money": _MONEY, "bytea": _BYTES}.get(kind, TEXT)
        self._form = Form(column.type, column.modifier, target, options)
        # Microseconds do not say which interval they were.
        lossy = kind == "interval" and options.get("interval.handling.mode") == "numeric"
        self.type = "text" if postgres else _SQLITE.get(kind, "text")
        if postgres and not lossy and (kind in _OTHER or kind.removeprefix("_") in _SAME):
            self.type = _OTHER.get(kind, kind)

    def stored(self, value: Any) -> object:  # noqa: ANN401, PLR0911 - JSON's; a case a kind
        """Return the value to bind: Postgres' text, or SQLite's own."""
        if value is None:
            return None
        if type(value) is dict and value.keys() == {"text"}:
            text = value["text"]
            is_bytes = self._kind == "bytea" and not self._postgres
            return bytes.fromhex(text[2:]) if is_bytes else text
        if not self._kind:
            return value if type(value) is str else msgspec.json.encode(value).decode()
        if self._kind == "money":
            return format(self._form.natural(value), "f")
        if not self._postgres:
            if self._kind == "bool" or self._kind in _INTEGERS:
                return int(value)
            if self._kind in _FLOATS:
                return value if type(value) is str else float(value)
            if self._kind == "bytea":
                return bytes(self._form.natural(value))
        return self._form.text(value)

    def json(self, value: Any) -> object:  # noqa: ANN401 - the driver's
        """Return a stored value as JSON that `stored` reads."""
        if value is None or not self._kind:
            return value
        try:
            if self._kind == "bool":
                return value in {1, "t", "true"}
            if self._kind in _INTEGERS:
                return int(value)
            if self._kind in _FLOATS:
                return value if value in {"NaN", "Infinity", "-Infinity"} else float(value)
        except ValueError:  # a text of the type that the column had before
            return {"text": value}
        text = f"\\x{value.hex()}" if type(value) is bytes else str(value)
        return {"text": text} if self._marked else text
