"""A range's rows from Postgres into Arrow batches of a mirror's schema.

ADBC reads binary COPY into Arrow columns; types that it does not carry faithfully are selected as
text, by the expression that writes them as the stream does. Text is converted to its natural type
here, where that is exact; a value that does not fit is NULL with its text in `_exact`
(`sinks.delta.types`).

Postgres decides which dates are out of range, so that their text is Postgres' own. Arrays are first
encoded as in the stream, and their elements converted from there to Arrow, one value at a time:
exact before fast.
"""

from __future__ import annotations

import hmac
from array import array
from base64 import b64decode
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from cdc.config.value_options import Values
from cdc.decode.types import ValueKind, delimiter_of, element_of, kind_of, type_name
from cdc.encode import values
from cdc.encode.masks import encryptor, subject_column
from lockstep.sinks.delta import layout as delta_layout
from lockstep.sinks.delta.columns import numbers
from lockstep.sinks.delta.types import (
    FIRST_YEAR,
    LAST_YEAR,
    TEXT,
    DeltaType,
    TypeKind,
    delta_type,
    fixed_type,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cdc.encode.masks import ColumnMask
    from cdc.keyring.ciphers import Ciphers
    from cdc.log.records import SchemaColumn, SchemaRecord

# Array elements are always read from this form, independent of the configured form of events.
_FORMS: Final = Values(time_precision_mode="microseconds")
_TEXT_ARRAY: Final = 1009
# What is appended to the first and to the last day that fits.
_CALENDAR_TYPES: Final = {
    ValueKind.DATE: ("", ""),
    ValueKind.TIMESTAMP: ("", " 23:59:59.999999"),
    ValueKind.INSTANT: (" 00:00:00+00", " 23:59:59.999999+00"),
}
# Takes the arrays selected for a column and the number of rows; returns its values, and the text of
# those that do not fit.
Converter: TypeAlias = "Callable[[list[pa.Array], int], tuple[pa.Array, pa.Array | None]]"

_EXACT_TYPE: Final = pa.map_(pa.string(), pa.field("value", pa.string(), nullable=False))


@dataclass(frozen=True)
class CopiedColumn:
    """A column of a mirror, the source's name for it, and its mask."""

    name: str
    source: SchemaColumn
    type: DeltaType
    mask: ColumnMask | None
    subject: int | None = None  # the number of the column that names whose key encrypts it

    def query(self, output: str, subject: str = "") -> list[str]:  # noqa: PLR0911 - a case a kind
        """Return the expressions selected for it.

        `output` is its text, and `subject` that of the column that names its subject, as SQL.
        """
        quoted = '"' + self.name.replace('"', '""') + '"'
        name = type_name(self.source.type_id) or self.source.type
        match self.mask and self.mask.kind, self.type.kind:
            case (("null" | "fixed"), _):
                return []
            case "truncate", _:
                assert self.mask is not None
                return [f"pg_catalog.left({output}, {int(str(self.mask.value))})"]
            case "encrypt", _:
                return [output, subject]
            case None, TypeKind.SAME:
                # ADBC reads an oid as a signed integer of four bytes.
                is_oid = kind_of(name) is ValueKind.OID
                return [f"{quoted}::pg_catalog.int8" if is_oid else quoted]
            case None, TypeKind.CALENDAR:
                first, last = _CALENDAR_TYPES[kind_of(name)]
                value = f"{quoted}::pg_catalog.{name}"
                before = f"{value} < '{FIRST_YEAR:04}-01-01{first}'"
                after = f"{value} > '{LAST_YEAR}-12-31{last}'"
                return [value, f"CASE WHEN {before} OR {after} THEN {output} END"]
            case None, TypeKind.MONEY:
                return [f"pg_catalog.translate({output}, '$,', '')"]
            case _:
                return [output]


def columns(
    version: SchemaRecord, masks: list[ColumnMask | None], *, money_digits: int
) -> list[CopiedColumn]:
    """Return a mirror's columns that come from the source, for a table version."""
    found = []
    for column, mask in zip(version.columns, masks, strict=True):
        name = type_name(column.type_id) or column.type
        if mask is None:
            kind = delta_type(name, column.type_modifier, money_digits=money_digits)
        else:
            kind = fixed_type(mask.value) if mask.kind == "fixed" else TEXT
        subject = None
        if mask is not None and mask.subject is not None:
            subject = subject_column(version.columns, column.name, mask)
        found.append(CopiedColumn(column.name, column, kind, mask, subject))
    return found


class ArrowRows:
    """The batches of one table version; seqs go on from range to range."""

    def __init__(
        self, parts: list[CopiedColumn], schema: pa.Schema, *, lsn: int, at_us: int,
        ciphers: Ciphers | None = None,
    ) -> None:  # fmt: skip
        self._parts = parts
        self._schema = schema
        self._width = [len(part.query("")) for part in parts]
        self._convert = [_converter(part, schema.field(part.name).type, ciphers) for part in parts]
        self._lsn = pa.scalar(lsn, pa.int64())
        self._at = pa.scalar(at_us, schema.field(delta_layout.COMMITTED_AT).type)
        self.seq = 0

    def query(self, outputs: tuple[str, ...], place: str) -> str:
        """Return the SELECT that reads a range; `place` is the part after FROM."""
        selected = [
            expression
            for part, output in zip(self._parts, outputs, strict=True)
            for expression in part.query(
                output, "" if part.subject is None else outputs[part.subject]
            )
        ]
        # If every column is masked, the rows must still be counted.
        named = (f"{each} AS c{i}" for i, each in enumerate(selected or ["true"]))
        return f"SELECT {', '.join(named)} FROM {place}"  # noqa: S608 - names quoted by Postgres

    def batch(self, read: pa.RecordBatch) -> pa.RecordBatch:
        """Return the mirror's batch for a batch of the query."""
        exact: list[tuple[str, pa.Array]] = []
        made = []
        at = 0
        for part, width, convert in zip(self._parts, self._width, self._convert, strict=True):
            value, odd = convert(read.columns[at : at + width], read.num_rows)
            at += width
            made.append(value)
            if odd is not None and odd.null_count < len(odd):
                exact.append((part.name, odd))
        rows = read.num_rows
        seqs = array("q", range(self.seq, self.seq + rows))
        self.seq += rows
        made += [
            pa.Array.from_buffers(pa.int64(), rows, [None, pa.py_buffer(seqs)]),
            pa.repeat(self._lsn, rows),
            pa.repeat(self._at, rows),
            _exact(exact, rows),
        ]
        return pa.RecordBatch.from_arrays(made, schema=self._schema)


def _converter(part: CopiedColumn, kind: pa.DataType, ciphers: Ciphers | None) -> Converter:  # noqa: PLR0911 - a case a kind
    match part.mask and part.mask.kind, part.type.kind:
        case "null", _:
            return lambda _, rows: (pa.nulls(rows, kind), None)
        case "fixed", _:
            assert part.mask is not None
            fixed = pa.scalar(part.mask.value, kind)
            return lambda _, rows: (pa.repeat(fixed, rows), None)
        case "hmac", _:
            assert part.mask is not None
            return _hmac(str(part.mask.value).encode())
        case "encrypt", _:
            assert part.mask is not None
            return _encrypted(encryptor(part.mask, ciphers))
        case None, TypeKind.CALENDAR:
            return lambda read, rows: (_within(read[0], read[1], rows), read[1])
        case None, TypeKind.NUMBER:
            return lambda read, _: numbers(read[0], kind)
        case None, TypeKind.MONEY:
            cents = pa.decimal128(kind.precision, 2)
            return lambda read, _: (_scaled(read[0].cast(cents), kind), None)
        case None, TypeKind.ARRAY:
            return _arrays(part, kind)
        case _:
            return lambda read, _: (read[0], None)


def _within(value: pa.Array, odd: pa.Array, rows: int) -> pa.Array:
    """Return the values, with NULL where a value has a text instead."""
    if odd.null_count == rows:
        return value
    return pc.if_else(odd.is_valid(), pa.scalar(None, value.type), value)


def _scaled(cents: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the same integers with the scale that the configuration gives money."""
    return pa.Array.from_buffers(kind, len(cents), cents.buffers(), offset=cents.offset)


def _hmac(key: bytes) -> Converter:
    def convert(read: list[pa.Array], rows: int) -> tuple[pa.Array, None]:  # noqa: ARG001 - a Converter
        digests = [
            None if text is None else hmac.digest(key, text.encode(), "sha256").hex()
            for text in read[0].to_pylist()
        ]
        return pa.array(digests, pa.string()), None

    return convert


def _encrypted(encrypt: Callable[[bytes, bytes], bytes]) -> Converter:
    def convert(read: list[pa.Array], rows: int) -> tuple[pa.Array, None]:  # noqa: ARG001 - a Converter
        values = [
            None if text is None else orjson.loads(encrypt((subject or "").encode(), text.encode()))
            for text, subject in zip(*(each.to_pylist() for each in read), strict=True)
        ]
        return pa.array(values, pa.string()), None

    return convert


def _arrays(part: CopiedColumn, kind: pa.DataType) -> Converter:
    """Return the converter of arrays, which reads the stream's form element by element."""
    assert part.type.element is not None
    # A value that stays text must be Postgres' own text, even where the stream has a number.
    name = element_of(type_name(part.source.type_id) or part.source.type) or ""
    is_text = part.type.element.kind is TypeKind.TEXT and delimiter_of(name) == ","
    column = replace(part.source, type_id=_TEXT_ARRAY) if is_text else part.source
    expression = values.form(column, _FORMS)
    form = eval(f"lambda b, p, q: {expression}", dict(values.NAMESPACE))  # noqa: S307 - our own text
    element = _ELEMENTS.get(part.type.element.name, _decimal)

    def convert(read: list[pa.Array], rows: int) -> tuple[pa.Array, pa.Array]:  # noqa: ARG001 - a Converter
        made: list[list[Any] | None] = []
        odd: list[str | None] = []
        for text in read[0].to_pylist():
            value = None if text is None else _elements(form, element, text)
            made.append(value)
            odd.append(text if value is None else None)
        return pa.array(made, kind), pa.array(odd, pa.string())

    return convert


def _elements(
    form: Callable[[bytes, int, int], bytes], element: Callable[[Any], Any], text: str
) -> list[Any] | None:
    """Return an array's elements; None where it has another shape, or one does not fit."""
    encoded = text.encode()
    found = orjson.loads(form(encoded, 0, len(encoded)))
    if not isinstance(found, list) or any(isinstance(each, list) for each in found):
        return None
    try:
        return [None if each is None else element(each) for each in found]
    except (ValueError, ArithmeticError):
        return None


def _same(value: Any) -> Any:  # noqa: ANN401 - JSON's
    return value


def _counted(value: Any) -> int:  # noqa: ANN401 - JSON's
    """Return days or microseconds; raise for text, which stands for what is out of range."""
    if isinstance(value, str):
        raise ValueError(value)  # noqa: TRY004 - of the right type, but not one of ours
    return int(value)


def _instant(value: str) -> datetime:
    if not value.endswith("Z"):
        raise ValueError(value)
    return datetime.fromisoformat(value)


def _decimal(value: str) -> Decimal:
    number = Decimal(value)
    if not number.is_finite():
        raise ValueError(value)
    return number


_ELEMENTS: Final[dict[str, Callable[[Any], Any]]] = {
    "boolean": _same,
    "short": _same,
    "integer": _same,
    "long": _same,
    "float": float,
    "double": float,
    "string": _same,
    "binary": b64decode,
    "date": _counted,
    "timestamp_ntz": _counted,
    "timestamp": _instant,
}


def _exact(odd: list[tuple[str, pa.Array]], rows: int) -> pa.Array:
    """Return the map of values that do not fit, by column; NULL for rows in which all fit."""
    if not odd:
        return pa.nulls(rows, _EXACT_TYPE)
    maps: list[list[tuple[str, str]] | None] = [None] * rows
    for name, text in odd:
        for row, found in _present(text):
            maps[row] = [*(maps[row] or []), (name, found)]
    return pa.array(maps, _EXACT_TYPE)


def _present(text: pa.Array) -> Iterator[tuple[int, str]]:
    for row in pc.indices_nonzero(pc.is_valid(text)).to_pylist():
        yield row, text[row].as_py()
