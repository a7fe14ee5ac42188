"""Convert a mirror's values to the log's JSON, byte for byte as in an event of the row.

In two steps, so that no JSON form is defined here: a typed value is written as Postgres writes it,
and that text goes through the encoders' own forms (`cdc.encode.values`), by the table version's
types and options. A value that does not fit its column's type is already in `_exact` as Postgres'
text.

In addition to its JSON a value has a term, by which keys and foreign keys compare (numbers by
value, regardless of their type), and a rank, by which lists are sorted: in Postgres' order, NULL
last, but text by its code points.
"""

from __future__ import annotations

import re
from binascii import a2b_base64
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import orjson
import pyarrow as pa
from pyarrow import types

from cdc.config.value_options import Values
from cdc.decode.types import ValueKind, delimiter_of, element_of, kind_of, type_name
from cdc.encode import values
from cdc.log.records import SchemaColumn
from lockstep.sinks.floats import text4, text8

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from lockstep.sinks.contract import Column

    Text = Callable[[Any], bytes]
    Form = Callable[[bytes], bytes]

_INTEGER: Final = re.compile(rb"-?\d+")
_QUOTED_INTEGER: Final = re.compile(rb'"(-?\d+)"')
_ILLEGIBLE: Final = re.compile(rb'\{"base64":"([A-Za-z0-9+/]+=*)"\}')
_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - counted from here, whatever the zone
# Parts of ranks: a value that has only a text sorts before or after all that fit.
_BEFORE, _FITS, _AFTER, _NAN, _NULL = range(5)


class Cells(NamedTuple):
    """A column of some rows: each value's JSON, its term and its rank."""

    json: list[bytes]
    terms: list[Hashable]
    ranks: list[tuple[int, Any]]


class ValueReader:
    """Reads one column of a table version."""

    def __init__(self, column: Column, options: Mapping[str, object]) -> None:
        self._mask = column.mask
        name = type_name(column.type_id) or column.type
        kind = kind_of(name)
        self._is_numeric = kind is ValueKind.NUMERIC
        self._delimiter = delimiter_of(element_of(name) or name)
        described = SchemaColumn(
            name=column.name,
            type_id=column.type_id,
            type=column.type,
            type_modifier=column.modifier,
            nullable=column.nullable,
        )
        chosen = msgspec.convert(options, Values)
        self._form = _function(values.form(described, chosen))
        numeric = chosen.interval_handling_mode == "numeric"
        if numeric and kind_of(element_of(name) or "") is ValueKind.INTERVAL:
            self._form = _with_integers(self._form)
        # A value that the log could not write as text is in the mirror as the log's own JSON.
        self._is_json: Callable[[bytes], bool] | None = None
        if numeric and kind is ValueKind.INTERVAL:
            self._is_json = _is_integer
        elif chosen.invalid_text_handling_mode == "base64":
            self._is_json = _is_illegible

    def read(self, column: pa.Array, exact: Sequence[str | None], *, compares: bool) -> Cells:
        """Return the cells of a mirror's column; `exact` has its texts from `_exact`.

        Terms and ranks are computed only if `compares`: most columns are only shown.
        """
        found = _plain(column)
        if self._mask is not None:
            return self._masked(found)
        cells = Cells(self._json(found, exact, _text(column.type, self._delimiter)), [], [])
        if compares:
            for value, odd in zip(found, exact, strict=True):
                term, rank = self._compared(value, odd)
                cells.terms.append(term)
                cells.ranks.append(rank)
        return cells

    def _json(self, found: list[Any], exact: Sequence[str | None], text: Text) -> list[bytes]:
        form, is_json = self._form, self._is_json
        written = [
            (None if odd is None else odd.encode()) if value is None else text(value)
            for value, odd in zip(found, exact, strict=True)
        ]
        if is_json is None:
            return [b"null" if each is None else form(each) for each in written]
        return [
            b"null" if each is None else each if is_json(each) else form(each) for each in written
        ]

    def _compared(
        self,
        value: Any,  # noqa: ANN401 - Arrow's
        odd: str | None,
    ) -> tuple[Hashable, tuple[int, Any]]:
        if value is None:
            return (None, (_NULL, 0)) if odd is None else (("exact", odd), _odd_rank(odd))
        if self._is_numeric and isinstance(value, str):
            value = Decimal(value)
            if not value.is_finite():
                return ("exact", str(value)), _odd_rank(str(value))
        if value != value:  # noqa: PLR0124 - NaN, which equals itself in Postgres
            return ("exact", "NaN"), (_NAN, 0)
        if isinstance(value, list):
            plain = repr(value)
            return plain, (_FITS, plain)
        return value, (_FITS, value)

    def _masked(self, found: list[Any]) -> Cells:
        """Return the values that a mask has put there, which already have JSON's types."""
        json = [orjson.dumps(value) for value in found]
        ranks = [(_NULL, 0) if value is None else (_FITS, value) for value in found]
        return Cells(json, list(found), ranks)


def exact_texts(exact: pa.Array | None, names: Sequence[str], rows: int) -> list[list[str | None]]:
    """Return the texts from `_exact`, one list per column."""
    nothing: list[str | None] = [None] * rows
    if exact is None or exact.null_count == rows:
        return [nothing] * len(names)
    maps = [dict(each or ()) for each in exact.to_pylist()]
    return [[each.get(name) for each in maps] for name in names]


def _with_integers(form: Form) -> Form:
    """Return a form of arrays whose elements of digits are JSON's integers."""
    return lambda text: _QUOTED_INTEGER.sub(rb"\1", form(text))


def _is_integer(text: bytes) -> bool:
    return _INTEGER.fullmatch(text) is not None


def _is_illegible(text: bytes) -> bool:
    """Return whether it is the JSON object that represents text that is not UTF-8."""
    found = _ILLEGIBLE.fullmatch(text)
    if found is None:
        return False
    try:
        a2b_base64(found[1]).decode()
    except UnicodeDecodeError:
        return True
    return False


def _odd_rank(text: str) -> tuple[int, Any]:
    if text == "NaN":
        return _NAN, 0
    early = text.startswith("-") or text.endswith("BC")
    return (_BEFORE if early else _AFTER), text


def _plain(column: pa.Array) -> list[Any]:
    """Return Python values; times as microseconds, because every time fits into those."""
    kind = column.type
    if types.is_timestamp(kind):
        column = column.cast(pa.timestamp("us", kind.tz)).cast(pa.int64())
    elif _is_list(kind) and types.is_timestamp(kind.value_type):
        column = column.cast(pa.list_(pa.timestamp("us", kind.value_type.tz)))
        column = column.cast(pa.list_(pa.int64()))
    found: list[Any] = column.to_pylist()
    return found


def _text(kind: pa.DataType, delimiter: str) -> Text:  # noqa: PLR0911 - a case a type
    """Return the function that writes a typed value as Postgres does."""
    if types.is_boolean(kind):
        return lambda value: b"t" if value else b"f"
    if types.is_integer(kind):
        return lambda value: b"%d" % value
    if types.is_floating(kind):
        return text4 if kind == pa.float32() else text8
    if types.is_decimal(kind):
        return lambda value: format(value, "f").encode()
    if types.is_date(kind):
        return _date
    if types.is_timestamp(kind):
        zone = b"+00" if kind.tz else b""
        return lambda value: _timestamp(value) + zone
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        return lambda value: b"\\x" + value.hex().encode()
    if _is_list(kind):
        return _array(kind.value_type, delimiter)
    return str.encode


def _is_list(kind: pa.DataType) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_list_view(kind))


def _date(value: date) -> bytes:
    return value.isoformat().encode()


def _timestamp(micros: int) -> bytes:
    text = str(_EPOCH + timedelta(microseconds=micros))
    return (text.rstrip("0") if "." in text else text).encode()


def _array(element: pa.DataType, delimiter: str) -> Text:
    """Return the function that writes arrays, with quotes where Postgres puts them."""
    text = _text(element, ",")
    between = delimiter.encode()
    special = re.compile(rb'(?:null|.*[\s"\\{}%b].*)?' % between, re.DOTALL | re.IGNORECASE)

    def one(value: Any) -> bytes:  # noqa: ANN401 - Arrow's
        if value is None:
            return b"NULL"
        written = text(value)
        if special.fullmatch(written) is None:
            return written
        return b'"%b"' % written.replace(b"\\", b"\\\\").replace(b'"', b'\\"')

    return lambda found: b"{%b}" % between.join(map(one, found))


def _function(expression: str) -> Form:
    form: Callable[[bytes, int, int], bytes] = eval(  # noqa: S307 - our own text
        f"lambda b, p, q: {expression}", dict(values.NAMESPACE)
    )
    return lambda text: form(text, 0, len(text))
