"""Rules for the operators and functions of jsonb.

Pure. The functions that they call are in `jobs.views.jsonb_functions`.
"""

from __future__ import annotations

import re
from json import JSONDecoder
from typing import TYPE_CHECKING, Final, NoReturn

from sqlglot import exp

from lockstep.jobs.views.jsonb_functions import AT_PATH, CONTAINS, HAS_KEYS, LENGTH, MEMBER
from lockstep.jobs.views.refusing import UnsupportedError
from lockstep.jobs.views.types import BOOL, INT4, INTEGERS, JSONB, TEXT, TEXTS, UNKNOWN
from lockstep.jobs.views.values import Rules, Value, coerced, expect_callable, string, table_of

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of a path that is one key or index.
_ROOT_AND_ONE: Final = 2
_LARGEST_INDEX: Final = (1 << 31) - 1  # an int4
_ARRAY: Final = re.compile(r"\{(?P<parts>[^{}\"\\,\s]+(,[^{}\"\\,\s]+)*)?\}")
_KINDS: Final = {"{": "object", "[": "array", '"': "string", "n": "null"}


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(text)


_parse: Final = JSONDecoder(parse_constant=_refuse_constant).decode


def _member(rules: Rules, node: exp.JSONExtract | exp.JSONExtractScalar) -> Value:
    as_text = isinstance(node, exp.JSONExtractScalar)
    written = "->>" if as_text else "->"
    found = _column(rules, node.this, written, calls=True)
    key, index = _place(rules, node.expression, written)
    return _text_or_jsonb(f"{MEMBER}({found}, {key}, {index}, {_bool(as_text)})", as_text=as_text)


def _place(rules: Rules, node: exp.Expr, written: str) -> tuple[str, str]:
    """Return the key and the index of a member, of which one is NULL."""
    if isinstance(node, exp.JSONPath) and len(node.expressions) == _ROOT_AND_ONE:
        part = node.expressions[1]
        if isinstance(part, exp.JSONPathKey) and isinstance(part.this, str):
            return _key(string(part.this))
        if isinstance(part, exp.JSONPathSubscript) and abs(part.this) < _LARGEST_INDEX:
            return _index(str(part.this))
    if isinstance(node, exp.JSONPath):
        raise UnsupportedError(f"{written} with such a literal", "write a key or an index")
    place = rules.value(node)
    if place.type.name in {*TEXTS, UNKNOWN} and not place.type.mask:
        return _key(coerced(place, TEXT))
    if place.type.name in INTEGERS.keys() - {"int8"}:
        return _index(coerced(place, INT4))
    raise UnsupportedError(f"{written} with a {place.type.title}", "write a key or an index")


def _key(sql: str) -> tuple[str, str]:
    return sql, "CAST(NULL AS INT)"


def _index(sql: str) -> tuple[str, str]:
    return "CAST(NULL AS STRING)", sql


def _at_path(rules: Rules, node: exp.JSONBExtract | exp.JSONBExtractScalar) -> Value:
    as_text = isinstance(node, exp.JSONBExtractScalar)
    written = "#>>" if as_text else "#>"
    found = _column(rules, node.this, written, calls=True)
    path = _texts(node.expression, written)
    return _text_or_jsonb(f"{AT_PATH}({found}, {path}, {_bool(as_text)})", as_text=as_text)


def _contains(rules: Rules, node: exp.ArrayContainsAll | exp.ArrayContainedBy) -> Value:
    outer, part = node.this, node.expression
    written = "@>"
    if isinstance(node, exp.ArrayContainedBy):
        outer, part, written = part, outer, "<@"
    both = [_operand(rules, each, written) for each in (outer, part)]
    return Value(f"{CONTAINS}({', '.join(both)})", BOOL)


def _operand(rules: Rules, node: exp.Expr, written: str) -> str:
    """Return a jsonb, which may be a literal."""
    at = node.this if isinstance(node, exp.Cast) and node.to.is_type("jsonb") else node
    if not (isinstance(at, exp.Literal) and at.is_string):
        return _column(rules, node, written, calls=True)
    try:
        _parse(at.this)
    except ValueError as error:
        raise UnsupportedError(f"{written} with a literal that is no JSON", str(error)) from None
    return string(at.this)


def _has_keys(rules: Rules, node: exp.Binary) -> Value:
    written = {exp.JSONBContainsTopKey: "?", exp.JSONBContainsAnyTopKeys: "?|"}.get(
        type(node), "?&"
    )
    found = _column(rules, node.this, written, calls=True)
    if written == "?":
        key = rules.value(node.expression)
        if key.text is None:
            raise UnsupportedError("? with other than a literal", "write the key")
        keys = f"array({string(key.text)})"
    else:
        keys = _texts(node.expression, written)
    return Value(f"{HAS_KEYS}({found}, {keys}, {_bool(written == '?&')})", BOOL)


def _length(rules: Rules, node: exp.Expr) -> Value:
    return Value(f"{LENGTH}({_column(rules, node, 'jsonb_array_length()', calls=True)})", INT4)


def _kind(rules: Rules, node: exp.Expr) -> Value:
    found = _column(rules, node, "jsonb_typeof()", calls=False)
    kinds = " ".join(f"WHEN '{first}' THEN '{kind}'" for first, kind in _KINDS.items())
    sql = f"CASE left({found}, 1) {kinds} WHEN 't' THEN 'boolean' WHEN 'f' THEN 'boolean'"
    return Value(f"({sql} ELSE CASE WHEN {found} IS NOT NULL THEN 'number' END END)", TEXT)


def _column(rules: Rules, node: exp.Expr, written: str, *, calls: bool) -> str:
    """Return a jsonb value that is no literal; refuse what Spark can't compute here."""
    found = rules.value(node)
    if found.type.name != "jsonb" or found.type.mask:
        kind = "a masked column" if found.type.mask else found.type.title
        raise UnsupportedError(f"{written} of {kind}", "take a jsonb column, or select it as it is")
    if calls:
        expect_callable(rules, written)
    return found.sql


def _texts(node: exp.Expr, written: str) -> str:
    """Return a literal array of texts."""
    if isinstance(node, exp.Array):
        parts: Sequence[exp.Expr] = node.expressions
        if all(isinstance(part, exp.Literal) and part.is_string for part in parts):
            return _array([part.name for part in parts])
    elif isinstance(node, exp.Literal) and (found := _ARRAY.fullmatch(node.name)):
        parts_of_text = (found["parts"] or "").split(",")
        if "null" not in {part.lower() for part in parts_of_text}:
            return _array([part for part in parts_of_text if part])
    raise UnsupportedError(f"{written} with other than plain texts", "write ARRAY['a', 'b']")


def _array(parts: Sequence[str]) -> str:
    return f"CAST(array({', '.join(map(string, parts))}) AS ARRAY<STRING>)"


def _text_or_jsonb(sql: str, *, as_text: bool) -> Value:
    return Value(sql, TEXT if as_text else JSONB)


def _bool(given: bool) -> str:  # noqa: FBT001 - a value
    return "true" if given else "false"


RULES: Final = table_of(
    ("this expression only_json_types", _member, [exp.JSONExtract, exp.JSONExtractScalar]),
    ("this expression", _at_path, [exp.JSONBExtract, exp.JSONBExtractScalar]),
    ("this expression", _contains, [exp.ArrayContainsAll, exp.ArrayContainedBy]),
    (
        "this expression",
        _has_keys,
        [exp.JSONBContainsTopKey, exp.JSONBContainsAnyTopKeys, exp.JSONBContainsAllTopKeys],
    ),
)
NAMED: Final = {"jsonb_array_length": _length, "jsonb_typeof": _kind}
