"""Rules for columns and literals, comparisons and choices.

Pure.
"""

from __future__ import annotations

import re
from typing import Final

from sqlglot import exp

from cdc.errors import ConfigError
from lockstep.jobs.views.refusing import UnsupportedError
from lockstep.jobs.views.types import (
    BOOL,
    FLOAT8,
    FLOATS,
    INT4,
    INT8,
    INTEGERS,
    NULL,
    TEXT,
    UNKNOWN,
    PgType,
    numeric,
)
from lockstep.jobs.views.values import (
    Rules,
    Value,
    coerced,
    common,
    compared,
    expect_text,
    own,
    quoted,
    size,
    sized,
    string,
    table_of,
)

_COMPARISONS: Final[dict[type[exp.Expr], str]] = {
    exp.EQ: "=", exp.NEQ: "<>", exp.LT: "<", exp.LTE: "<=", exp.GT: ">", exp.GTE: ">=",
    exp.NullSafeEQ: "<=>", exp.NullSafeNEQ: "<=>",
}  # fmt: skip
_UNORDERED: Final = (exp.EQ, exp.NEQ, exp.NullSafeEQ, exp.NullSafeNEQ)


def _column(rules: Rules, node: exp.Column) -> Value:
    found = rules.scope.type_of(node)
    if found.mask and not found.has_masked_values:
        raise UnsupportedError(
            f"{node.sql()}, whose values are masked ({found.mask})", "leave it out"
        )
    return Value(f"{quoted(node.table)}.{quoted(node.name)}", found)


def _number(_rules: Rules, node: exp.Literal) -> Value:
    if node.is_string:
        return Value("", NULL, node.this)
    text = node.this
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        raise UnsupportedError(f"the number {text}", "write its digits")
    integer, _, fraction = text.partition(".")
    if not fraction and int(text) < 1 << 31:
        return Value(text, INT4)
    if not fraction and int(text) < 1 << 63:
        return Value(f"{text}L", INT8)
    kind = sized(len(integer.lstrip("0")) + len(fraction), len(fraction), text)
    return Value(f"CAST('{text}' AS {kind.spark})", kind)


def _null(_rules: Rules, _: exp.Null) -> Value:
    return Value("NULL", NULL)


def _boolean(_rules: Rules, node: exp.Boolean) -> Value:
    return Value("true" if node.this else "false", BOOL)


def _paren(rules: Rules, node: exp.Paren) -> Value:
    return rules.value(node.this)


def _connector(rules: Rules, node: exp.Expr) -> Value:
    word = "AND" if isinstance(node, exp.And) else "OR"
    sides = (rules.condition(each, word) for each in (node.this, node.expression))
    return Value(f"({f' {word} '.join(sides)})", BOOL)


def _not(rules: Rules, node: exp.Not) -> Value:
    return Value(f"(NOT {rules.condition(node.this, 'NOT')})", BOOL)


def _is(rules: Rules, node: exp.Is) -> Value:
    word = "IS NOT" if node.args.get("negate") else "IS"
    if isinstance(node.expression, exp.Null):
        found = rules.value(node.this)
        return Value(f"({coerced(found, own(found))} {word} NULL)", BOOL)
    if not isinstance(node.expression, exp.Boolean):
        raise UnsupportedError("IS with this operand", "write IS NULL, IS TRUE or IS FALSE")
    is_ = "TRUE" if node.expression.this else "FALSE"
    return Value(f"({rules.condition(node.this, 'IS')} {word} {is_})", BOOL)


def _comparison(rules: Rules, node: exp.Expr) -> Value:
    sides = [rules.value(node.this), rules.value(node.expression)]
    word = _COMPARISONS[type(node)]
    left, right = compared(sides, word, ordered=not isinstance(node, _UNORDERED))
    text = f"({left} {word} {right})"
    return Value(f"(NOT {text})" if isinstance(node, exp.NullSafeNEQ) else text, BOOL)


def _between(rules: Rules, node: exp.Between) -> Value:
    given = [rules.value(node.args[part]) for part in ("this", "low", "high")]
    value, low, high = compared(given, "BETWEEN", ordered=True)
    return Value(f"({value} BETWEEN {low} AND {high})", BOOL)


def _in(rules: Rules, node: exp.In) -> Value:
    if query := node.args.get("query"):
        if not _only_filters(node):
            raise UnsupportedError(
                "IN with a query where its NULL differs from false",
                "write EXISTS, or NOT EXISTS; IN may be a condition of WHERE or HAVING, joined by"
                " AND and OR, and NOT IN one that is joined by AND alone",
            )
        found = rules.query(query)
        ((name, type_),) = found.columns.items()
        inner = Value(f"i.{quoted(name)}", type_)
        could_call, rules.can_call = rules.can_call, False
        outer, rules.can_call = rules.value(node.this), could_call
        value, column = compared([outer, inner], "IN", ordered=False)
        return Value(f"({value} IN (SELECT {column} FROM ({found.sql}) AS i))", BOOL)  # noqa: S608 - quoted
    given = [rules.value(each) for each in (node.this, *node.expressions)]
    value, *among = compared(given, "IN", ordered=False)
    return Value(f"({value} IN ({', '.join(among)}))", BOOL)


def _only_filters(node: exp.Expr) -> bool:
    """Return whether a row is left out alike if a condition with a query is NULL or false.

    Elsewhere Spark has false where Postgres has NULL: a join finds whether it is true.
    """
    negated = combined = either = False
    at = node
    while (parent := at.parent) is not None and not isinstance(parent, exp.Where | exp.Having):
        if isinstance(parent, exp.Not) and not (negated or combined):
            negated = True
        elif isinstance(parent, exp.And | exp.Or):
            combined, either = True, either or isinstance(parent, exp.Or)
        elif not isinstance(parent, exp.Paren):
            return False
        at = parent
    return parent is not None and not (negated and either)


def _exists(rules: Rules, node: exp.Exists) -> Value:
    found = rules.query(node.this)
    return Value(f"EXISTS ({found.sql})", BOOL)


def _scalar(rules: Rules, node: exp.Subquery) -> Value:
    found = rules.query(node)
    if len(found.columns) != 1:
        raise ConfigError("a subquery has several columns", hint="select one")
    return Value(f"({found.sql})", next(iter(found.columns.values())))


def _like(rules: Rules, node: exp.Like) -> Value:
    value, pattern = rules.value(node.this), rules.value(node.expression)
    if pattern.text is None or "\\" in pattern.text:
        raise UnsupportedError(
            "LIKE with a pattern that is not a plain literal", "write it without backslashes"
        )
    expect_text(value.type, "LIKE")
    word = "NOT LIKE" if node.args.get("negate") else "LIKE"
    return Value(f"({coerced(value, TEXT)} {word} {string(pattern.text)})", BOOL)


def _case(rules: Rules, node: exp.Case) -> Value:
    default = node.args.get("default")
    made = [rules.value(each.args["true"]) for each in node.args["ifs"]]
    last = rules.value(default) if default else Value("NULL", NULL)
    kind = common([*(each.type for each in made), last.type], "CASE")
    tests = []
    for each in node.args["ifs"]:
        test = exp.EQ(this=node.this.copy(), expression=each.this) if node.this else each.this
        tests.append(rules.condition(test, "CASE"))
    text = " ".join(
        f"WHEN {test} THEN {coerced(value, kind)}" for test, value in zip(tests, made, strict=True)
    )
    return Value(f"CASE {text} ELSE {coerced(last, kind)} END", kind)


def _coalesce(rules: Rules, node: exp.Coalesce) -> Value:
    given = [rules.value(each) for each in (node.this, *node.expressions)]
    kind = common([each.type for each in given], "coalesce()")
    return Value(f"coalesce({', '.join(coerced(each, kind) for each in given)})", kind)


def _extreme(rules: Rules, node: exp.Greatest | exp.Least) -> Value:
    given = [rules.value(each) for each in (node.this, *node.expressions)]
    texts = compared(given, f"{node.key}()", ordered=True)
    kind = common([each.type for each in given], "")
    return Value(f"{node.key}({', '.join(texts)})", kind)


def _nullif(rules: Rules, node: exp.Nullif) -> Value:
    given = [rules.value(node.this), rules.value(node.expression)]
    left, right = compared(given, "nullif()", ordered=False)
    kind = _left_type(given[0].type, given[1].type)
    return Value(f"if({left} = {right}, NULL, {coerced(given[0], kind)})", kind)


def _left_type(one: PgType, other: PgType) -> PgType:
    """Return the type of the left argument of Postgres' `=` for values of these types."""
    if one.name == UNKNOWN:
        return TEXT if other.name == UNKNOWN else other
    # There are operators for integers of several sizes, for both floats, for date with timestamp.
    if other.name in FLOATS and one.name in {"numeric", *INTEGERS}:
        return FLOAT8
    if other.name == "numeric" and one.name in INTEGERS:
        return numeric(*size(one, "nullif()"))
    return one


RULES: Final = table_of(
    ("this table", _column, [exp.Column]),
    ("this is_string", _number, [exp.Literal]),
    ("", _null, [exp.Null]),
    ("this", _boolean, [exp.Boolean]),
    ("this", _paren, [exp.Paren]),
    ("this expression", _connector, [exp.And, exp.Or]),
    ("this", _not, [exp.Not]),
    ("this expression negate", _is, [exp.Is]),
    ("this expression", _comparison, list(_COMPARISONS)),
    ("this low high", _between, [exp.Between]),
    ("this query expressions", _in, [exp.In]),
    ("this", _exists, [exp.Exists]),
    ("this", _scalar, [exp.Subquery]),
    ("this expression negate", _like, [exp.Like]),
    ("this ifs default", _case, [exp.Case]),
    ("this expressions", _coalesce, [exp.Coalesce]),
    ("this expressions", _extreme, [exp.Greatest, exp.Least]),
    ("this expression", _nullif, [exp.Nullif]),
)
