"""Every type of `cdc.decode.types` in every reader of values, from its text and back.

A value that a reader has in its own way goes back to the text, so a kind of values that one of them
has forgotten, and takes for text, fails here.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pytest
from msgspec import structs

from cdc.config.value_options import Values
from cdc.decode.types import (
    BY_OID,
    TYPES,
    ValueKind,
    element_of,
    kind_of,
    numeric_modifier,
    numeric_size,
    row_of,
)
from cdc.encode import oversize
from cdc.encode.values import form, undescribed
from cdc.events import LSN
from cdc.log.records import SchemaRecord
from cdc.source.conditions import ConditionError, parse
from lockstep.jobs.copying import arrow_rows
from lockstep.jobs.documents.values import ValueReader
from lockstep.jobs.views import types as view_types
from lockstep.sinks.contract import Column, Version
from lockstep.sinks.delta import json as delta_json
from lockstep.sinks.delta import layout
from lockstep.sinks.delta.columns import ColumnReader, arrow_type, wanted
from lockstep.sinks.delta.types import TEXT, DeltaType, delta_type
from lockstep.sinks.delta.values import Form, Odd
from lockstep.sinks.opensearch.mapping import field
from lockstep.sinks.sql.types import DECODE, ColumnValues
from tests.unit.forms import column as described
from tests.unit.forms import encoded

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parents[2]
# A text that Postgres writes of each type, and of each type with a modifier.
TEXTS: Final = {
    "bool": "t", "int2": "-7", "int4": "2147483647", "int8": "-9223372036854775808",
    "oid": "4294967295", "float4": "1.5", "float8": "-0", "numeric": "-12.340",
    "money": "-$1,234.05", "date": "2016-11-04", "time": "13:51:30.5",
    "timestamp": "2016-11-04 13:51:30.25", "timestamptz": "2026-01-02 03:04:05.12+00",
    "interval": "1 year 2 mons -3 days +04:05:06.7", "bytea": "\\x00fbff7c",
    "uuid": "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "bit": "101", "varbit": "",
    "inet": "192.168.0.1/24", "text": 'say "ä"\\n, {x}', "varchar": "Z", "bpchar": "ab  ",
    "tsvector": "'fat':2 'rat'", "json": '{"a" : 1}', "jsonb": "null", "xml": "<a b='c'/>",
    "point": "(1,2)", "lseg": "[(0,0),(1,1)]", "path": "((0,0),(1,1))", "box": "(3,4),(1,2)",
    "polygon": "((0,0),(1,1))", "line": "{1,-2,3.5}", "cidr": "2001:db8::/32",
    "circle": "<(1,2),3>", "macaddr8": "08:00:2b:01:02:03:04:05", "macaddr": "08:00:2b:01:02:03",
    "timetz": "13:51:30.12+02", "pg_lsn": "0/16E9088", "tsquery": "'a' & 'b'",
    "int4range": "[1,3)", "numrange": "(,2.50]", "tsrange": '["2026-01-01 00:00:00",)',
    "tstzrange": '["2026-01-01 00:00:00+00",)', "daterange": "[2026-01-01,)", "int8range": "empty",
    "int4multirange": "{[1,3)}", "nummultirange": "{}", "tsmultirange": "{}",
    "tstzmultirange": "{}", "datemultirange": "{[2026-01-01,)}", "int8multirange": "{[1,3),[5,6)}",
    "hstore": '"a"=>"1, 2", "b"=>NULL',
}  # fmt: skip
# Those without any value of their own here: text that needs quotes everywhere.
ANY_TEXT: Final = "a, \"b\" 'c'"
MODIFIERS: Final = {
    "numeric": (-1, numeric_modifier(6, 3), numeric_modifier(40, 3)),
    "time": (-1, 3, 6),
    "timestamp": (-1, 3, 6),
}
OPTIONS: Final = (
    Values(),
    Values(decimal_handling_mode="precise", binary_handling_mode="base64"),
    Values(decimal_handling_mode="double", binary_handling_mode="hex"),
    Values(time_precision_mode="adaptive_time_microseconds", bigint_handling_mode="string"),
    Values(time_precision_mode="connect", hstore_handling_mode="json"),
    Values(time_precision_mode="isostring", interval_handling_mode="string"),
    Values(time_precision_mode="microseconds", hstore_handling_mode="map"),
    Values(time_precision_mode="nanoseconds", binary_handling_mode="base64-url-safe"),
    Values(invalid_text_handling_mode="base64"),
)
_NUMBERS: Final = {"long", "integer", "double", "float", "scaled_float"}


def cases() -> Iterator[tuple[str, int, str]]:
    """Yield each type and each array with a modifier and a text."""
    for row in TYPES:
        text = TEXTS.get(row.name, "1" if row.is_plain else ANY_TEXT)
        for modifier in MODIFIERS.get(row.name, (-1,)):
            yield (row.name if row.oid else f"public.{row.name}"), modifier, text
            if row.array or not row.oid:
                element = text
                if not text or text == "null" or set(text) & {*' ,"\\{}', row.delimiter}:
                    element = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
                texts = f"{{{element}{row.delimiter}NULL}}"
                yield (f"_{row.name}" if row.oid else f"public._{row.name}"), modifier, texts


CASES: Final = list(cases())


def test_each_kind_of_values_has_a_text_here() -> None:
    """Add one for a new type; those of the server itself are text everywhere."""
    named = {row.name for row in TYPES if row.kind not in {ValueKind.INTERNAL, ValueKind.OTHER}}
    assert named - TEXTS.keys() - {"citext"} == set()
    assert {kind_of(row.name if row.oid else f"x.{row.name}") for row in TYPES} == set(ValueKind)
    assert TEXTS.keys() <= {row.name for row in TYPES}


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_each_reader_has_each_value(options: Values) -> None:
    """Text → the log's JSON → Delta, SQL, documents, and from there to the JSON and the text."""
    wrong = []
    for name, modifier, text in CASES:
        value = encoded(described(name, modifier), text.encode(), options)
        column = Column("c", name, described(name).type_id, modifier, nullable=True)
        for reader, found in read(column, value, msgspec.to_builtins(options)).items():
            if plain(found) != plain(text):
                wrong.append((name, modifier, reader, found))
    assert wrong == []


# Short elements that become long: digits, control characters, and a byte that is not UTF-8.
_DENSE: Final = (
    b"1", b"0", b"-1", b"1.5", b"NaN", b"t", b"f", b"a", b"\x01", b'"\x01"', b'"\\\\"', b"\xff",
    b"NULL", b'""', b'"\x01"=>NULL', b'"\\"\\""=>"\x01"', b"$1.00", b"00:00:00", b"2026-01-01",
)  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_no_value_grows_more_than_what_surely_fits_allows(options: Values) -> None:
    """A column is sent with five bytes before its text; an array's elements have none."""
    most, tried = 0.0, 0
    legible = structs.replace(options, invalid_text_handling_mode="base64")
    columns = {form(each, legible): each for each in (described(n, m) for n, m, _ in CASES)}
    for column in columns.values():
        for each in _DENSE:
            array = b"{%b}" % b",".join([each] * 200)
            pairs = b", ".join([each] * 200)
            for dense in (each, each * 200, array, pairs, array.replace(b",", b";")):
                try:
                    size = len(encoded(column, dense, legible))
                except (ValueError, IndexError):  # not a text of this type
                    continue
                most, tried = max(most, size / (5 + len(dense))), tried + 1
    assert tried > 500
    assert most <= oversize.GROWTH
    if options.decimal_handling_mode == "precise":
        assert most > 13, "the longest is tried"


def plain(text: str) -> str:
    """Return an array's text without the quotes that an element needs or does not need."""
    return text.replace('"', "").replace("\\", "")


def read(column: Column, value: bytes, options: dict[str, Any]) -> dict[str, str]:
    """Return a value's text by each reader."""
    version = Version(1, "public", "t", "x", ("c",), (column,), options)
    row = b'{"c":%b}' % value
    kind = dict(wanted(version))["c"]
    form = Form(column.type, column.modifier, kind, options)
    json = DECODE(row)["c"]
    found = {"form": form.text(json)}
    for postgres in (True, False):
        values = ColumnValues(column, options, postgres=postgres)
        stored = values.stored(json)
        back = msgspec.json.encode({"c": values.json(stored)})
        assert values.stored(DECODE(back)["c"]) == stored
        found[f"SQL {postgres}"] = _text_in_sql(column, stored)
    fast = ColumnReader(version).columns([row], {"c": kind}, {})["c"]
    for reader, (mirrored, odd) in {"fast": fast, "exact": exactly(form, kind, json)}.items():
        texts = pa.nulls(1, pa.string()) if odd is None else odd
        exact = [None if each is None else [("c", each)] for each in texts.to_pylist()]
        table = pa.table(
            {"c": mirrored, layout.EXACT: pa.array(exact, pa.map_(pa.string(), pa.string()))}
        )
        ((_, back),) = delta_json.rows(table, version)
        found[f"{reader} in Delta"] = form.text(DECODE(back)["c"])
        cells = ValueReader(column, options).read(mirrored, texts.to_pylist(), compares=True)
        assert cells.json == [value], (column, reader)
    shown = field(column.type, column.modifier, options)
    if shown["type"] in _NUMBERS and not element_of(column.type):
        float(json)
    return found


def exactly(form: Form, kind: DeltaType, json: object) -> tuple[pa.Array, pa.Array | None]:
    """Return a mirror's column with this value, and the text of one that does not fit."""
    try:
        return pa.array([form.natural(json)], arrow_type(kind)), None
    except Odd as odd:
        return pa.nulls(1, arrow_type(kind)), pa.array([odd.text])


def _text_in_sql(column: Column, stored: object) -> str:
    """Return what Postgres would write of a bound value, which may be SQLite's own."""
    match stored:
        case bytes():
            return f"\\x{stored.hex()}"
        case int() if kind_of(column.type) is ValueKind.BOOLEAN:
            return "t" if stored else "f"
        case float():
            return "-0" if str(stored) == "-0.0" else str(stored)
        case _ if kind_of(column.type) is ValueKind.MONEY:
            return f"-${abs(float(str(stored))):,.2f}"
    return str(stored)


def test_a_users_type_may_have_the_name_of_a_built_in_one() -> None:
    """In a schema of theirs: its values are text, whatever Postgres' own type of that name is."""
    text = '"At Z"'
    options = msgspec.to_builtins(Values(decimal_handling_mode="precise"))
    for row in BY_OID.values():
        for name in (f"app.{row.name}", f'"a.b".{row.name}'):
            assert (row_of(name), undescribed(name)) == (None, name)
            column = Column("c", name, 90_001, -1, nullable=True)
            value = encoded(described(name), text.encode(), Values())
            assert delta_type(name, -1) is TEXT
            assert set(read(column, value, options).values()) == {text}, name
            assert field(name, -1, options)["type"] == "keyword"
            assert ColumnValues(column, options, postgres=True).type == "text"
    boxes = Form("app._box", -1, TEXT, options)
    assert boxes.text(["a", "b"]) == "{a,b}"


def test_microseconds_of_an_interval_are_text_in_sql_alone_and_in_arrays() -> None:
    """Postgres would read them as seconds."""
    options = msgspec.to_builtins(Values(interval_handling_mode="numeric"))
    for name in ("interval", "_interval"):
        column = Column("c", name, described(name).type_id, -1, nullable=True)
        assert ColumnValues(column, options, postgres=True).type == "text"


@pytest.mark.parametrize("text", ['{"1 day 00:00:01",NULL,"-1 mons"}', '{{"1 day"},{"2 days"}}'])
def test_documents_have_microseconds_of_intervals_as_numbers_in_arrays_too(text: str) -> None:
    values = Values(interval_handling_mode="numeric")
    options = msgspec.to_builtins(values)
    for name, written in (("interval", "1 day 00:00:01"), ("_interval", text)):
        column = Column("c", name, described(name).type_id, -1, nullable=True)
        value = encoded(described(name), written.encode(), values)
        version = Version(1, "public", "t", "x", ("c",), (column,), options)
        kind = dict(wanted(version))["c"]
        mirrored, odd = ColumnReader(version).columns([b'{"c":%b}' % value], {"c": kind}, {})["c"]
        exact = [None] if odd is None else odd.to_pylist()
        assert ValueReader(column, options).read(mirrored, exact, compares=True).json == [value]


def test_views_and_copies_have_each_type() -> None:
    for name, modifier, _ in CASES:
        source = described(name, modifier)
        column = Column("c", name, source.type_id, modifier, nullable=True)
        kind = view_types.of(column)
        row = row_of(name)
        assert kind.delta == delta_type(name, modifier)
        assert kind.column("c").type_id == column.type_id
        if row and row.oid:
            assert view_types.PgType(name).column("c").type_id == row.oid
        record = SchemaRecord(
            schema_id=1, relation_id=1, schema="public", table="t", topic="x",
            replica_identity="d", from_lsn=LSN(1), key=("c",), columns=(source,),
        )  # fmt: skip
        [copied] = arrow_rows.columns(record, [None], money_digits=2)
        assert copied.type == kind.delta
        assert copied.query("c::text")
    declared = {each.name for each in map(view_types.named, view_types.DECLARED)}
    assert declared <= view_types.COMPARED


def test_a_condition_casts_to_types_by_each_of_their_names() -> None:
    """But not to those whose literals are not plain: their kinds are in `cdc.source.conditions`."""
    refused = set()
    for row in BY_OID.values():
        for name in (row.name, *row.aliases):
            try:
                assert f"::pg_catalog.{row.name}" in parse(f"a = 'x'::{name}").sql
            except ConditionError:
                refused.add(row.kind)
    assert refused == {
        *(ValueKind.OID, ValueKind.MONEY, ValueKind.BITS, ValueKind.WORDS, ValueKind.JSON),
        *(ValueKind.XML, ValueKind.OTHER, ValueKind.INTERNAL),
    }


@pytest.mark.parametrize(
    ("precision", "scale", "digits"), [(6, 2, 6), (4, 0, 4), (2, -3, 5), (2, 5, 5)]
)
def test_a_modifier_has_a_numerics_size(precision: int, scale: int, digits: int) -> None:
    size = numeric_size((precision << 16 | scale & 0x7FF) + 4)
    assert size is not None
    assert (size, size.digits) == ((precision, scale), digits)
    assert numeric_size(-1) is None


# What lists types for another reason than what their values are.
OTHERS: Final = {
    "cdc/decode/types.py": "the table",
    "cdc/playground/demo/database.py": "proves the demo's stores, so it shares nothing with them",
    "jobs/views": "the rules by which Spark computes as Postgres, for pairs of types",
}


def test_no_other_module_has_a_list_of_types() -> None:
    """Of the names that nothing else has: a reader asks for kinds of values."""
    names = {row.name for row in BY_OID.values() if row.kind is not ValueKind.INTERNAL}
    names -= {"text", "date", "time", "timestamp", "interval", "json", "xml", "path", "line"}
    names -= {"point", "box", "circle", "bit", "numeric", "bool", "money", "uuid", "oid"}
    found = {}
    for package in ("cdc", "sinks", "jobs"):
        for path in sorted((ROOT / package).rglob("*.py")):
            relative = str(path.relative_to(ROOT))
            tree = ast.parse(path.read_text(encoding="utf-8"))
            texts = {each.value for each in ast.walk(tree) if isinstance(each, ast.Constant)}
            listed = names & texts
            if len(listed) > 1 and not relative.startswith(tuple(OTHERS)):
                found[relative] = sorted(listed)
    assert found == {}
