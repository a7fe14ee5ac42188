"""Convert columns from the log's JSON to Arrow, a column at a time if its JSON allows it.

The rows are joined to one text of lines, which Arrow's parser reads with a type for each column. A
column with values that this parser can't read (NaN, a date `infinity`, an array of two dimensions,
times that Delta has as text) is converted exactly, a value at a time, by `sinks.delta.values`; the
others stay fast.

Pure, except that it remembers which columns had such values.
"""

from __future__ import annotations

import re
from base64 import b64decode
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from cdc.decode.types import ValueKind, element_of, kind_of
from lockstep.sinks.delta.types import TEXT, DeltaType, TypeKind, delta_type, fixed_type
from lockstep.sinks.delta.values import Digits, Form, Odd, in_milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from lockstep.sinks.contract import Change, Column, Version

# A column's values, and Postgres' text of those that do not fit.
Values: TypeAlias = "tuple[pa.Array, pa.Array | None]"

_NUMBER: Final = r"^-?[0-9.]+$"
_INSTANT: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T.*Z$"
_CHANGED: Final = re.compile(r"Column\(/(.*?)(?:/\[\].*)?\) changed from", re.DOTALL)
# In bytes. A row must fit into two blocks; one thread parses one block.
_BLOCK_BYTES: Final = 4 << 20
_INTEGERS: Final = {"short": pa.int16(), "integer": pa.int32(), "long": pa.int64()}


def wanted(
    version: Version, changes: Iterable[Change] = (), stored: Collection[str] = ()
) -> list[tuple[str, DeltaType]]:
    """Return the columns of a mirror of this version, without ours.

    The type of a `fixed` mask is known only from rows. If no row shows it (deletes don't), the
    column stays as it is `stored` and is not among these; if it is not stored, it is a string until
    a row shows its type.
    """
    found = []
    for column in version.columns:
        if column.mask != "fixed":
            found.append((column.name, _type_of(column, version)))
        elif kind := _fixed(column.name, version.schema_id, changes):
            found.append((column.name, kind))
        elif column.name not in stored:
            found.append((column.name, TEXT))
    return found


def _type_of(column: Column, version: Version) -> DeltaType:
    if column.mask is not None:
        return TEXT
    digits = int(str(version.values.get("money.fraction.digits", 2)))
    return delta_type(column.type, column.modifier, money_digits=digits)


def _fixed(name: str, schema_id: int, changes: Iterable[Change]) -> DeltaType | None:
    for change in changes:
        if change.schema_id != schema_id:
            continue
        for text in (change.row, change.before):
            row = msgspec.json.decode(text) if text else {}
            if name in row:
                return fixed_type(row[name])
    return None


class ColumnReader:
    """Reads rows of one table version."""

    def __init__(self, version: Version) -> None:
        self._version = version
        # Columns that are converted exactly: those without a fast form, and those with such values.
        self._exact = set[str]()

    def columns(
        self, rows: Sequence[bytes], types: Mapping[str, DeltaType], skip: Mapping[str, set[int]]
    ) -> dict[str, Values]:
        """Return each column's values; `skip` has, by column, the rows without a value."""
        if not rows:
            return {}
        fast: dict[str, _Fast] = {}
        for column in self._version.columns:
            way = _fast(column, types[column.name], self._version.values)
            if way is not None and column.name not in self._exact:
                fast[column.name] = way
        found = self._parsed(rows, fast)
        slow = [each for each in self._version.columns if each.name not in found]
        return found | self._exactly(rows, slow, types, skip)

    def _parsed(self, rows: Sequence[bytes], fast: dict[str, _Fast]) -> dict[str, Values]:
        """Return the columns that Arrow's parser can read; remember those that it can't."""
        text = b"\n".join(rows)
        block = max(_BLOCK_BYTES, 2 * max(map(len, rows)))
        while fast:
            schema = pa.schema([(name, way.parsed) for name, way in fast.items()])
            try:
                read = pj.read_json(
                    pa.BufferReader(text),
                    read_options=pj.ReadOptions(
                        block_size=block, use_threads=len(text) > _BLOCK_BYTES
                    ),
                    parse_options=pj.ParseOptions(
                        explicit_schema=schema, unexpected_field_behavior="ignore"
                    ),
                )
            except pa.ArrowInvalid as error:
                odd = _CHANGED.search(str(error))
                names = {odd[1]} & fast.keys() if odd else set(fast)
                self._exact |= names or fast.keys()
                fast = {name: way for name, way in fast.items() if name not in self._exact}
                continue
            assert read.num_rows == len(rows), "a line is a row"
            made = {}
            for name, way in fast.items():
                try:
                    made[name] = way.convert(one_chunk(read[name]))
                except (pa.ArrowInvalid, ValueError):
                    self._exact.add(name)
            return made
        return {}

    def _exactly(
        self,
        rows: Sequence[bytes],
        columns: list[Column],
        types: Mapping[str, DeltaType],
        skip: Mapping[str, set[int]],
    ) -> dict[str, Values]:
        """Return columns that are converted a value at a time."""
        if not columns:
            return {}
        names = {f"c{place}": column.name for place, column in enumerate(columns)}
        struct = msgspec.defstruct("Row", [(each, Any, None) for each in names], rename=names)
        decoder = msgspec.json.Decoder(struct, float_hook=Digits)
        read = [decoder.decode(row) for row in rows]
        found = {}
        for place, column in enumerate(columns):
            values = [getattr(row, f"c{place}") for row in read]
            for row in skip.get(column.name, ()):
                values[row] = None
            found[column.name] = _one_by_one(column, types[column.name], self._version, values)
        return found


class _Fast(NamedTuple):
    """How Arrow parses a column, and how the result is converted."""

    parsed: pa.DataType
    convert: Callable[[pa.Array], Values]


def _as_it_is(values: pa.Array) -> Values:
    return values, None


def _fast(  # noqa: C901, PLR0911 - a case a type
    column: Column, kind: DeltaType, options: Mapping[str, object]
) -> _Fast | None:
    """Return the fast form of a column, None if there is none."""
    target = arrow_type(kind)
    if column.mask is not None:
        if column.mask in {"null", "excluded"}:
            return _Fast(pa.string(), lambda values: (pa.nulls(len(values), pa.string()), None))
        return _Fast(target, _as_it_is)
    if kind.kind is TypeKind.ARRAY:
        element = kind.element
        assert element is not None
        plain = element.kind is TypeKind.TEXT and _is_plain(column.type, options)
        simple = plain or element.name in {*_INTEGERS, "boolean"}
        return _Fast(target, _as_it_is) if simple else None
    match kind.name:
        case "boolean" | "short" | "integer" | "long" | "float" | "double":
            return _Fast(target, _as_it_is)
        case "binary" if options.get("binary.handling.mode", "bytes") in {"bytes", "base64"}:
            return _Fast(pa.string(), _decoded)
        case "date" if options.get("time.precision.mode") != "isostring":
            return _Fast(pa.int32(), lambda values: (values.cast(target), None))
        case "timestamp_ntz" if options.get("time.precision.mode") != "isostring":
            return _Fast(pa.int64(), _counted(column.modifier, options))
        case "timestamp":
            return _Fast(pa.string(), _instants)
        case "string":
            plain = element_of(column.type) is None and _is_plain(column.type, options)
            return _Fast(pa.string(), _as_it_is) if plain else None
    if options.get("decimal.handling.mode", "string") == "string" and kind.kind in {
        *(TypeKind.NUMBER, TypeKind.MONEY)
    }:
        return _Fast(pa.string(), lambda values: numbers(values, target))
    return None


def _is_plain(name: str, options: Mapping[str, object]) -> bool:
    """Return whether the log has Postgres' own text of what Delta has as text."""
    match kind_of(element_of(name) or name):
        case ValueKind.TIME | ValueKind.MONEY:
            return False
        case ValueKind.NUMERIC:
            return options.get("decimal.handling.mode", "string") == "string"
        case ValueKind.INTERVAL:
            return options.get("interval.handling.mode", "postgres") == "postgres"
        case ValueKind.MAP:
            return options.get("hstore.handling.mode", "text") == "text"
    return True


def _decoded(text: pa.Array) -> Values:
    values = [None if each is None else b64decode(each) for each in text.to_pylist()]
    return pa.array(values, pa.binary()), None


def _counted(modifier: int, options: Mapping[str, object]) -> Callable[[pa.Array], Values]:
    millis = in_milliseconds(options, modifier)

    def convert(values: pa.Array) -> Values:
        if millis:
            values = pc.multiply_checked(values, 1_000)
        elif options.get("time.precision.mode") == "nanoseconds":
            values = values.cast(pa.timestamp("ns"))
        return values.cast(pa.timestamp("us")), None

    return convert


def _instants(text: pa.Array) -> Values:
    kind = pa.timestamp("us", "UTC")
    try:
        return text.cast(kind), None
    except pa.ArrowInvalid:
        return _split(text, kind, _INSTANT)


def numbers(text: pa.Array, kind: pa.DataType) -> Values:
    """Return decimals, and the texts that are none: NaN and the infinities."""
    try:
        return text.cast(kind), None
    except pa.ArrowInvalid:
        return _split(text, kind, _NUMBER)


def _split(text: pa.Array, kind: pa.DataType, plain: str) -> Values:
    """Return the values of texts that are `plain`, and the other texts."""
    fits = pc.match_substring_regex(text, plain)
    nothing = pa.scalar(None, pa.string())
    return pc.if_else(fits, text, nothing).cast(kind), pc.if_else(fits, nothing, text)


def _one_by_one(
    column: Column, kind: DeltaType, version: Version, values: list[Any]
) -> tuple[pa.Array, pa.Array]:
    if column.mask is not None:
        made = values if column.mask == "fixed" else [v and str(v) for v in values]
        return pa.array(made, arrow_type(kind)), pa.nulls(len(values), pa.string())
    natural = Form(column.type, column.modifier, kind, version.values).natural
    odd: list[str | None] = [None] * len(values)
    for row, value in enumerate(values):
        if value is not None:
            try:
                values[row] = natural(value)
            except Odd as text:
                values[row], odd[row] = None, text.text
    return pa.array(values, arrow_type(kind)), pa.array(odd, pa.string())


def one_chunk(values: pa.ChunkedArray) -> pa.Array:
    """Return a column's values in one piece."""
    return values.combine_chunks() if values.num_chunks != 1 else values.chunk(0)


def arrow_type(kind: DeltaType) -> pa.DataType:
    """Return the Arrow type that Delta's readers use for the type."""
    if kind.element is not None:
        return pa.list_(pa.field("element", arrow_type(kind.element)))
    if kind.name.startswith("decimal"):
        precision, scale = map(int, kind.name[len("decimal(") : -1].split(","))
        return pa.decimal128(precision, scale)
    return _ARROW[kind.name]


_ARROW: Final = {
    **_INTEGERS,
    "boolean": pa.bool_(),
    "float": pa.float32(),
    "double": pa.float64(),
    "binary": pa.binary(),
    "string": pa.string(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
