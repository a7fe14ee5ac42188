"""A table in OpenSearch: names, `_id`s, and a mapping derived from its columns' types.

A document is the row as in the log, byte for byte, so it is exact whatever a field can hold. A
field only decides what can be searched. It has the natural type if that fits nearly all of a
column's values, with `ignore_malformed`: a value that does not fit (`infinity` in a date, NaN in a
number, an array with unusual bounds) is in the document but not in that field. If a type has such
values, or the field rounds, `<column>.exact` has every value as a keyword.

Pure. docs/FOLLOWERS.md has the table for users.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cdc.decode.types import ValueKind, element_of, numeric_size, row_of
from lockstep.sinks.delta.values import in_milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lockstep.sinks.contract import Column, Version

Properties = dict[str, Any]

MAX_ID_BYTES: Final = 512
# The prefix of the `_id` of a key that cannot be used directly.
HASHED: Final = "sha256:"
# Lucene refuses a document with a term of more than 32,766 bytes; a UTF-16 unit takes 3 at most.
_LONGEST_TERM: Final = 8_191
# A long, and a double's mantissa, hold every number with up to this many digits.
_LONG_DIGITS: Final = 18
_DOUBLE_DIGITS: Final = 15

_KEYWORD: Final = {"type": "keyword", "ignore_above": _LONGEST_TERM}
_EXACT: Final = {"fields": {"exact": _KEYWORD}}
_TEXT: Final = {"type": "text", **_EXACT}
_OPAQUE: Final = {"type": "object", "enabled": False}
_ISO: Final = "strict_date_optional_time"

# Field names that OpenSearch reserves.
_RESERVED: Final = {
    *("_data_stream_timestamp", "_doc_count", "_field_names", "_id", "_ignored", "_index"),
    *("_nested_path", "_recovery_source", "_routing", "_seq_no", "_source", "_version"),
}


# --- fields ---


def properties(version: Version, instead: Mapping[str, Any]) -> Properties:
    """Return the fields of a table's documents; `instead` replaces some, by column."""
    document = version.values.get("document")
    fields = document if isinstance(document, dict) else {}
    found: Properties = {
        field_name(column.name): _nested(fields[column.name], version.values)
        if column.name in fields
        else field(column.type, column.modifier, version.values, masked=column.mask is not None)
        for column in version.columns
    }
    return {**found, **instead}


def _nested(child: Mapping[str, Any], values: Mapping[str, object]) -> Properties:
    """Return the field of rows that belong to a document: `nested` if there may be many."""
    inner = {
        field_name(name): field(kind, modifier, values) for name, kind, modifier in child["columns"]
    }
    inner |= {field_name(name): _nested(below, values) for name, below in child["fields"].items()}
    return {"type": "nested" if child["many"] else "object", "properties": inner}


def field(
    name: str, modifier: int, values: Mapping[str, object], *, masked: bool = False
) -> Properties:
    """Return the mapping of a column of the type `name`, written by the options `values`."""
    if masked:
        return _KEYWORD
    if element := element_of(name):
        one = field(element, modifier, values)
        # An array with unusual bounds is text: a type that can't ignore that becomes a keyword,
        # which accepts anything.
        if one["type"] == "boolean":
            return _KEYWORD
        return one | _EXACT if "ignore_malformed" in one else one
    row = row_of(name)
    if row is None:
        return _KEYWORD
    if made := _BY_OPTION.get(row.kind):
        return made(modifier, values)
    return _FIELDS.get((row.kind, row.size), _KEYWORD)


def _lenient(kind: str, **more: object) -> Properties:
    """Return a field whose type holds every value that its column can have."""
    return {"type": kind, "ignore_malformed": True, **more}


def _near(kind: str, **more: object) -> Properties:
    """Return a field whose type holds nearly every value, with a keyword that holds all."""
    return _lenient(kind, **more, **_EXACT)


def _numeric(modifier: int, values: Mapping[str, object]) -> Properties:
    size = numeric_size(modifier)
    if values.get("decimal.handling.mode") == "precise":  # base64, with scale if not in the type
        return _KEYWORD if size else _OPAQUE
    if size is None:
        return _near("double")
    if size.scale <= 0:
        return _near("long" if size.digits <= _LONG_DIGITS else "double")
    if size.digits <= _DOUBLE_DIGITS:
        return _near("scaled_float", scaling_factor=10**size.scale)
    return _near("double")


def _money(_modifier: int, values: Mapping[str, object]) -> Properties:
    precise = values.get("decimal.handling.mode") == "precise"
    return _KEYWORD if precise else _near("double")


def _date(_modifier: int, values: Mapping[str, object]) -> Properties:
    if values.get("time.precision.mode") == "isostring":
        return _near("date", format="uuuu-MM-dd'Z'||strict_date")
    return _near("integer")


def _time(_modifier: int, values: Mapping[str, object]) -> Properties:
    return _KEYWORD if values.get("time.precision.mode") == "isostring" else _near("long")


def _timestamp(modifier: int, values: Mapping[str, object]) -> Properties:
    if values.get("time.precision.mode") == "isostring":
        return _near("date", format=_ISO)
    if in_milliseconds(values, modifier):
        # The second format is for searches; a number always has the first.
        return _near("date", format=f"epoch_millis||{_ISO}")
    return _near("long")


def _interval(_modifier: int, values: Mapping[str, object]) -> Properties:
    return _near("long") if values.get("interval.handling.mode") == "numeric" else _KEYWORD


def _hstore(_modifier: int, values: Mapping[str, object]) -> Properties:
    return _OPAQUE if values.get("hstore.handling.mode") == "map" else _TEXT


# By the kind of values, and their size.
_FIELDS: Final[dict[tuple[ValueKind, int], Properties]] = {
    (ValueKind.BOOLEAN, 0): {"type": "boolean"},
    (ValueKind.INTEGER, 2): _lenient("integer"),
    (ValueKind.INTEGER, 4): _lenient("integer"),
    (ValueKind.INTEGER, 8): _lenient("long"),
    (ValueKind.OID, 0): _lenient("long"),
    (ValueKind.FLOAT, 4): _near("float"),
    (ValueKind.FLOAT, 8): _near("double"),
    (ValueKind.INSTANT, 0): _near("date", format=_ISO),
    (ValueKind.BYTES, 0): {"type": "binary"},
    (ValueKind.ADDRESS, 0): _near("ip"),
    (ValueKind.TEXT, 0): _TEXT,
    (ValueKind.WORDS, 0): _TEXT,
    (ValueKind.JSON, 0): _TEXT,
    (ValueKind.XML, 0): _TEXT,
}
_BY_OPTION: Final[dict[ValueKind, Callable[[int, Mapping[str, object]], Properties]]] = {
    ValueKind.NUMERIC: _numeric,
    ValueKind.MONEY: _money,
    ValueKind.DATE: _date,
    ValueKind.TIME: _time,
    ValueKind.TIMESTAMP: _timestamp,
    ValueKind.INTERVAL: _interval,
    ValueKind.MAP: _hstore,
}


def digest(of: Properties) -> str:
    """Return a digest that identifies a mapping, for the name of an index."""
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:8]


# --- names ---


def field_name(column: str) -> str:
    """Return a column's field name, which is the same except for unusual names.

    A dot would make it an object, and empty or reserved names are refused: these are escaped as in
    topic names, `_xHH`.
    """
    if not column.strip() or column in _RESERVED:
        return "".join(f"_x{byte:02X}" for byte in column[:1].encode() or b"\0") + column[1:]
    return re.sub(r"_(?=x[0-9A-F]{2})", "_x5F", column).replace(".", "_x2E")


def index_part(name: str) -> str:
    """Return a name in the alphabet of indices: lower case, `_xhh` for every other byte."""
    plain = re.sub(r"_(?=x[0-9a-f]{2})", "_x5f", name)
    return "".join(
        char if char in _PLAIN_CHARACTERS else "".join(f"_x{b:02x}" for b in char.encode())
        for char in plain
    )


_PLAIN_CHARACTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-")
# An index's name may have 255 bytes; generation, hash, count and `-w` are appended.
_LONGEST_ALIAS: Final = 200


def alias(prefix: str, version: Version) -> str:
    """Return the alias of a table without a configured one."""
    name = f"{index_part(prefix)}-{index_part(version.schema)}.{index_part(version.table)}"
    if len(name) <= _LONGEST_ALIAS:
        return name
    return f"{name[: _LONGEST_ALIAS - 17]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


# --- keys and documents ---


class Ids:
    """`_id`s of one table's keys.

    The value itself for a key of one column (`7`, `ada@example.org`), else the key's JSON as in the
    log; a hash of that JSON if the `_id` is too long, empty, or looks like such a hash.
    """

    def __init__(self, key: Sequence[str]) -> None:
        self._head = b"{%b:" % msgspec.json.encode(key[0]) if len(key) == 1 else None

    def of(self, key: bytes) -> bytes:
        """Return the `_id` as a JSON string."""
        if self._head and key.startswith(self._head):
            value = key[len(self._head) : -1]
            first = value[:1]
            if first == b'"':
                text: str = msgspec.json.decode(value)
                if 0 < len(text.encode()) <= MAX_ID_BYTES and not text.startswith(HASHED):
                    return value
            elif first not in (b"{", b"["):
                return b'"%b"' % value
        elif not self._head and len(key) <= MAX_ID_BYTES:
            return msgspec.json.encode(key.decode())
        return b'"%b%b"' % (HASHED.encode(), hashlib.sha256(key).hexdigest().encode())


def key_of(version: Version, row: bytes, ids: Ids, id_: str) -> bytes:
    """Return the key of a row, byte for byte the log's; its document has that `_id`."""
    values = msgspec.json.decode(row, type=dict[str, msgspec.Raw])
    key = msgspec.json.encode({name: values[name] for name in version.key})
    if msgspec.json.decode(ids.of(key)) == id_:
        return key
    # The key is too long even for the log, which has its hash instead.
    return msgspec.json.encode({"sha256": hashlib.sha256(key).hexdigest()})


class Documents:
    """Convert rows to documents and back: the same bytes, except with unusual column names."""

    def __init__(self, columns: Sequence[Column]) -> None:
        fields = {column.name: field_name(column.name) for column in columns}
        self._odd = {name: field for name, field in fields.items() if name != field}
        self._back = {field: name for name, field in self._odd.items()}

    def document(self, row: bytes) -> bytes:
        return _renamed(row, self._odd) if self._odd else row

    def row(self, document: bytes) -> bytes:
        return _renamed(document, self._back) if self._back else document


def _renamed(members: bytes, names: Mapping[str, str]) -> bytes:
    values = msgspec.json.decode(members, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({names.get(name, name): value for name, value in values.items()})
