"""The page on types describes what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cdc.decode.types import TYPE_NAMES
from lockstep.sinks.delta import layout as delta_layout
from lockstep.sinks.delta.types import TEXT, DeltaType, delta_type, fixed_type

_PAGE = (Path(__file__).parents[2] / "docs" / "DELTA.md").read_text("utf-8")
_ROWS = re.findall(
    r"^\| ([^|]+?) \| ([^|]+?) \|[^|]*\|$", _PAGE.partition("## Types")[2], re.MULTILINE
)
_INTERNAL = {
    "boolean": "bool", "smallint": "int2", "integer": "int4", "bigint": "int8", "real": "float4",
    "double precision": "float8", "char": "bpchar",
}  # fmt: skip


def named(declared: str) -> tuple[str, int]:
    """Return a type's own name and its modifier, as a relation message has them."""
    bare, digits, array = re.fullmatch(
        r"([a-z ]+\d?[a-z]*)(?:\(([\d,-]+)\))?(\[\])?", declared
    ).groups()  # type: ignore[union-attr]
    modifier = -1
    if digits and bare == "numeric":
        precision, scale = map(int, digits.split(","))
        modifier = (precision << 16 | scale & 0x7FF) + 4
    return ("_" if array else "") + _INTERNAL.get(bare, bare), modifier


def spelled(kind: DeltaType) -> str:
    return kind.name if kind.element is None else f"array&lt;{spelled(kind.element)}&gt;"


@pytest.mark.parametrize(("declared", "shown"), _ROWS[2:])
def test_the_page_has_each_type_as_it_is(declared: str, shown: str) -> None:
    name, modifier = named(declared)
    assert name in TYPE_NAMES.values()
    assert spelled(delta_type(name, modifier)) == shown


def test_no_type_is_left_out() -> None:
    """Each has a type that Delta knows, in the JSON that Spark and Delta write."""
    known = {"boolean", "short", "integer", "long", "float", "double", "string", "binary", "date",
             "timestamp", "timestamp_ntz", "decimal(19,2)"}  # fmt: skip
    for name in TYPE_NAMES.values():
        kind = delta_type(name, -1)
        inner = kind.element or kind
        assert inner.name in known, name
        delta_layout.schema([("a", kind)], "public.t")
    assert delta_type("public._mood", -1) is TEXT
    assert delta_type("money", -1, money_digits=0).name == "decimal(19,0)"
    assert [fixed_type(each).name for each in (True, 1, 1.5, "x")] == [
        "boolean", "long", "double", "string",
    ]  # fmt: skip
