"""Any text is either a condition of columns and literals or refused; none is passed on as it is."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.source.column_types import ColumnType
from cdc.source.conditions import ConditionError, parse, quoted

_COLUMNS = ("a", "id", "Odd", "na me", 'q"t')
_TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
_pieces = st.sampled_from(
    ["a", '"Odd"', "id", "1", "-", "2.5e3", "'t'", "''", "'", '"', "\\", "(", ")", ",", "::", "=",
     "<>", "!=", "<", "AND", "or", "NOT", "IN", "BETWEEN", "LIKE", "IS", "NULL", "true", "date",
     "::int", "::text", ";", "--", "/*", "*/", "$$", "$1", "now()", "pg_sleep(9)", "SELECT",
     "COPY", "COMMIT", "E'", "U&'", "x'", "||", ".", "[", "{", "\n", "\u00a0", "é"]
)  # fmt: skip
_soups = st.lists(_pieces | _TEXTS, max_size=30).map(" ".join) | st.lists(_pieces).map("".join)
# What may be written: literals and quoted names first, so that their content is not matched.
_WRITTEN = re.compile(
    r"\(|\)|, | (?:=|<>|<=|>=|<|>|\+|-|\*|/|%|AND|OR|IS|IN|BETWEEN|LIKE|ILIKE|NOT|DISTINCT|FROM"
    r"|NULL|TRUE|FALSE|UNKNOWN|IS NOT|NOT IN|NOT BETWEEN|NOT LIKE|NOT ILIKE)(?= |\))"
    r"|NOT |- |NULL|TRUE|FALSE|CURRENT_DATE|CURRENT_TIMESTAMP|pg_catalog\.now\(\)| "
    r"|::pg_catalog\.[a-z0-9]+|E?'(?:[^'\\]|''|\\\\)*'|\"(?:[^\"]|\"\")+\"|[0-9.]+(?:[eE][+-]?\d+)?"
)

_USERS = {
    "a": ColumnType("low.mood", 20_000, False, "low.mood", "enum"),  # noqa: FBT003 - no domain
    "id": ColumnType("low.feeling", 20_000, True, "low.mood", "enum"),  # noqa: FBT003 - a domain
    "Odd": ColumnType("low.pair", 20_001, False, "low.pair", "other"),  # noqa: FBT003 - no domain
}
_OF_USERS = r"(?:\"a\"|CASE WHEN true THEN \"id\" ELSE NULL END)"
_OPERAND = rf"(?:{_OF_USERS}|NULL|E?'(?:[^'\\]|''|\\\\)*')"
# Where a column of a user's type may be: in a function that takes enums only, in a test for NULL.
_ALLOWED = re.compile(
    rf"pg_catalog\.enum_(?:eq|ne|lt|le|gt|ge)\({_OPERAND}, {_OPERAND}\)"
    rf"|\((?:{_OPERAND}|\"id\"|\"Odd\") IS (?:NOT )?NULL\)"
)


def literals() -> st.SearchStrategy[str]:
    texts = _TEXTS.map(lambda each: "'" + each.replace("'", "''") + "'")
    numbers = st.integers(0, 10**30).map(str) | st.decimals(0, 10**6, places=3).map(str)
    return texts | numbers | st.sampled_from(["NULL", "true", "DATE '2020-01-01'", "'1'::int"])


def columns() -> st.SearchStrategy[str]:
    return st.sampled_from(_COLUMNS).map(lambda each: '"' + each.replace('"', '""') + '"')


def conditions() -> st.SearchStrategy[str]:
    operand = columns() | literals()
    simple = st.one_of(
        st.tuples(operand, st.sampled_from(["=", "<>", "<", ">="]), operand).map(" ".join),
        st.tuples(operand, operand, operand).map(lambda o: f"{o[0]} not between {o[1]} and {o[2]}"),
        st.tuples(operand, operand).map(lambda o: f"{o[0]} IN ({o[1]},{o[0]})"),
        operand.map(lambda each: f"{each} is not null"),
        st.tuples(columns(), literals()).map(lambda o: f"{o[0]} LIKE {o[1]}"),
    )
    return st.recursive(
        simple,
        lambda inner: st.one_of(
            st.tuples(inner, st.sampled_from([" and ", " OR "]), inner).map("".join),
            inner.map(lambda each: f"not ({each})"),
        ),
        max_leaves=8,
    )


def is_whitelisted(written: str) -> bool:
    at = 0
    while at < len(written):
        match = _WRITTEN.match(written, at)
        if match is None or match.end() == at:
            return False
        at = match.end()
    return True


@given(_TEXTS | _soups)
def test_any_text_is_rewritten_or_refused(text: str) -> None:
    try:
        condition = parse(text)
    except ConditionError:
        return
    assert is_whitelisted(condition.sql), condition.sql


@given(conditions())
def test_a_condition_is_understood_and_understood_again(text: str) -> None:
    condition = parse(text)
    assert is_whitelisted(condition.sql), condition.sql
    assert condition.columns <= set(_COLUMNS)


@given(conditions() | _soups)
def test_no_operator_takes_a_column_of_a_users_type(text: str) -> None:
    try:
        written = parse(text, _USERS).sql
    except ConditionError:
        return
    left = re.sub(r"E?'(?:[^'\\]|''|\\\\)*'", "''", _ALLOWED.sub("TRUE", written))
    assert not re.search(r'"(?:a|id|Odd)"', left), written
    assert is_whitelisted(left)


@given(_TEXTS)
def test_a_literal_is_one_whatever_it_holds(text: str) -> None:
    written = quoted(text)
    assert re.fullmatch(r"E'(?:[^'\\]|''|\\\\)*'|'(?:[^'\\]|'')*'", written)
    assert parse("a = '" + text.replace("'", "''") + "'").sql == f'("a" = {written})'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "true)) TO STDOUT (FORMAT binary); COMMIT; CREATE TABLE t (); --",
        "a = 1; DROP TABLE t",
        "pg_sleep(1) IS NULL",
        "a = (SELECT 1)",
        "a = 1 -- comment",
        "a = 1 /* comment */",
        "a = E'x'",
        "a = U&'x'",
        "a = $$x$$",
        "a = $1",
        "a::int = 1",
        "a = '1'::regclass",
        "a = '1'::pg_catalog.int4",
        "a.b = 1",
        "current_user = 'x'",
        "user = 'x'",
        "a = 1 = 2",
        "a < 1 IS NULL",
        "a IN (SELECT 1)",
        "a IN ()",
        "a || 'x' = 'y'",
        "a ~ 'x'",
        "a COLLATE x = 1",
        "CASE WHEN a THEN b END",
        "a OPERATOR(pg_catalog.=) 1",
        'a = "',
        "a = '",
        "a = 'x\0'",
        "(" * 5_000 + "a" + ")" * 5_000,
        "not " * 5_000 + "a",
        "- " * 5_000 + "a = 1",
        "1" + " + 1" * 5_000 + " = a",
        "a = 1" + " or a = 1" * 100_000,
    ],
)
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(ConditionError) as raised:
        parse(text)
    assert "DROP" not in str(raised.value), "what was given is in no message"
