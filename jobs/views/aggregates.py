"""Rules for aggregates and window functions.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlglot import exp

from lockstep.jobs.views.numbering import SELECTS_ALIKE, WRITTEN
from lockstep.jobs.views.quotients import quotient
from lockstep.jobs.views.refusing import UnsupportedError
from lockstep.jobs.views.types import BOOL, FLOATS, INT8, numeric
from lockstep.jobs.views.values import (
    Rules,
    Value,
    coerced,
    common,
    expect_grouped,
    expect_number,
    expect_ordered,
    own,
    size,
    table_of,
)
from lockstep.sinks.delta.types import MAX_PRECISION

if TYPE_CHECKING:
    from collections.abc import Callable

_RANKS: Final[dict[type[exp.Expr], str]] = {
    exp.RowNumber: "row_number",
    exp.Rank: "rank",
    exp.DenseRank: "dense_rank",
}
_NEIGHBOUR_NAMES: Final[dict[type[exp.Expr], str]] = {
    exp.Lag: "lag",
    exp.Lead: "lead",
    exp.FirstValue: "first_value",
}
_NEIGHBOURS: Final = tuple(_NEIGHBOUR_NAMES)
_OVER: Final = (exp.Count, exp.Sum, exp.Avg, exp.Min, exp.Max)


def _count(rules: Rules, node: exp.Count) -> Value:
    inner = node.this
    if isinstance(inner, exp.Star):
        return Value("count(*)", INT8)
    if isinstance(inner, exp.Distinct):
        if len(inner.expressions) != 1:
            raise UnsupportedError("count(DISTINCT …) of several", "count one expression")
        found = rules.value(inner.expressions[0])
        expect_grouped(found.type, "count(DISTINCT …)")
        return Value(f"count(DISTINCT {found.sql})", INT8)
    found = rules.value(inner)
    return Value(f"count({coerced(found, own(found))})", INT8)


def _sum(rules: Rules, node: exp.Sum) -> Value:
    word, inner = _distinct(node.this)
    found = rules.value(inner)
    if found.type.name in FLOATS:
        raise UnsupportedError(
            f"sum() of {found.type.title}, which depends on the order of the rows",
            "cast to numeric(p,s)",
        )
    expect_number(found.type, "sum()")
    if found.type.name in {"int2", "int4"}:
        return Value(f"sum({word}{found.sql})", INT8)
    wide = numeric(MAX_PRECISION, size(found.type, "sum()")[1], has_scale=found.type.has_scale)
    # Wide enough before the sum: Spark would add only ten digits.
    return Value(f"CAST(sum({word}{coerced(found, wide)}) AS {wide.spark})", wide)


def _avg(rules: Rules, node: exp.Avg) -> Value:
    return _average(rules, node, lambda part: part)


def _average(rules: Rules, node: exp.Avg, within: Callable[[exp.Expr], exp.Expr]) -> Value:
    """Return an average as Postgres computes it; `within` adds FILTER and OVER to an aggregate."""
    _, inner = _distinct(node.this)
    found = rules.value(inner)
    if found.type.name in FLOATS:
        raise UnsupportedError(
            f"avg() of {found.type.title}, which depends on the order of the rows",
            "cast to numeric(p,s)",
        )
    expect_number(found.type, "avg()")
    precision, scale = size(found.type, "avg()")
    total, rows = (
        rules.value(within(kind(this=node.this.copy()))) for kind in (exp.Sum, exp.Count)
    )
    # An average is at most the largest of its values.
    return quotient(total, rows, precision - scale)


def _min_max(rules: Rules, node: exp.Min | exp.Max) -> Value:
    _, inner = _distinct(node.this)
    found = rules.value(inner)
    expect_ordered(found.type, f"{node.key}()")
    if found.type.name in {"bool", "uuid"}:
        raise UnsupportedError(f"{node.key}() of {found.type.title}", "Postgres has none")
    return Value(f"{node.key}({found.sql})", found.type)


def _all_any(rules: Rules, node: exp.LogicalAnd | exp.LogicalOr) -> Value:
    word = "bool_and" if isinstance(node, exp.LogicalAnd) else "bool_or"
    return Value(f"{word}({rules.condition(node.this, word)})", BOOL)


def _filter(rules: Rules, node: exp.Filter) -> Value:
    if isinstance(node.this, exp.Avg):
        return _average(rules, node.this, lambda part: _replaced(node, part))
    found, test = rules.value(node.this), rules.condition(node.expression.this, "FILTER")
    clause = f" FILTER (WHERE {test})"
    if found.sql.startswith("CAST(sum("):
        cast, inner = found.type.spark, found.sql[len("CAST(") :]
        inner = inner.removesuffix(f" AS {cast})")
        return Value(f"CAST({inner}{clause} AS {cast})", found.type)
    return Value(f"{found.sql}{clause}", found.type)


def _rank(_rules: Rules, node: exp.Expr) -> Value:
    raise UnsupportedError(f"{_RANKS[type(node)]}() without OVER", "write OVER (…)")


def _window(rules: Rules, node: exp.Window) -> Value:
    by = [rules.value(each) for each in node.args.get("partition_by") or ()]
    for each in by:
        expect_grouped(each.type, "PARTITION BY")
    order = node.args.get("order")
    ordered = order.expressions if order else []
    over = [f"PARTITION BY {', '.join(each.sql for each in by)}"] if by else []
    if ordered:
        over.append(f"ORDER BY {', '.join(_ordered(rules, each) for each in ordered)}")
    over_sql = f"OVER ({' '.join(over)})"
    if name := _RANKS.get(type(node.this)):
        if name == "row_number" and not (_is_total(rules, node) or _selects_alike(rules, node)):
            written = node.meta.get(WRITTEN, "row_number()")
            raise UnsupportedError(
                f"{written} whose ORDER BY may leave rows in any order",
                "add what is unique in each table and subquery to ORDER BY, or number by rank()",
            )
        if not ordered and name != "row_number":
            raise UnsupportedError(f"{name}() without ORDER BY", "write it")
        return Value(f"{name}() {over_sql}", INT8)
    inner = node.this.this if isinstance(node.this, exp.Filter) else node.this
    if isinstance(inner, _NEIGHBOURS):
        return _neighbour(rules, inner, node, over_sql)
    if not isinstance(inner, _OVER) or inner.find(exp.Distinct):
        raise UnsupportedError(
            f"the window function {inner.key}()",
            "take row_number, rank, dense_rank, lag, lead, first_value or an aggregate",
        )
    if isinstance(inner, exp.Avg):
        return _average(rules, inner, lambda part: _replaced(node, part))
    found = rules.value(node.this)
    if found.sql.startswith("CAST(sum("):
        text = found.sql[len("CAST(") :].removesuffix(f" AS {found.type.spark})")
        return Value(f"CAST({text} {over_sql} AS {found.type.spark})", found.type)
    return Value(f"{found.sql} {over_sql}", found.type)


def _is_total(rules: Rules, node: exp.Window) -> bool:
    order = node.args.get("order")
    ordered = [each.this for each in order.expressions] if order else []
    return rules.order_is_total([*(node.args.get("partition_by") or ()), *ordered])


def _selects_alike(rules: Rules, node: exp.Window) -> bool:
    """Return whether rows in either order are alike in all that is selected."""
    order = node.args.get("order")
    ordered = [rules.value(each.this) for each in (order.expressions if order else ())]
    # 0 and -0 have one place in an order.
    is_exact = all(each.type.name not in FLOATS for each in ordered)
    return is_exact and bool(node.meta.get(SELECTS_ALIKE))


def _neighbour(rules: Rules, inner: exp.Expr, window: exp.Window, over: str) -> Value:
    """Return lag, lead or first_value: of another row, which must be the same one in both."""
    name = _NEIGHBOUR_NAMES[type(inner)]
    if isinstance(window.this, exp.Filter) or inner.args.get("order"):
        raise UnsupportedError(f"{name}() with FILTER or ORDER BY in it", "leave it out")
    if not window.args.get("order") or not _is_total(rules, window):
        raise UnsupportedError(
            f"{name}() whose ORDER BY may leave rows in any order",
            "add what is unique in each table and subquery to ORDER BY",
        )
    found = rules.value(inner.this)
    kind = own(found)
    given = [coerced(found, kind)]
    if (offset := inner.args.get("offset")) is not None:
        if not (isinstance(offset, exp.Literal) and offset.is_int):
            raise UnsupportedError(f"{name}() with an offset that is no literal", "write a number")
        given.append(offset.this)
    if (default := inner.args.get("default")) is not None:
        other = rules.value(default)
        kind = common([kind, other.type], f"{name}()")
        given[0] = coerced(found, kind)
        given.append(coerced(other, kind))
    return Value(f"{name}({', '.join(given)}) {over}", kind)


def _replaced(node: exp.Expr, part: exp.Expr) -> exp.Expr:
    """Return a window or a filter of another aggregate, in place of its own."""
    made = node.copy()
    inner = made.this
    if isinstance(node, exp.Window) and isinstance(inner, exp.Filter):
        inner.set("this", part)
    else:
        made.set("this", part)
    return made


def _ordered(rules: Rules, node: exp.Ordered) -> str:
    found = rules.value(node.this)
    expect_ordered(found.type, "ORDER BY")
    way = "DESC" if node.args.get("desc") else "ASC"
    nulls = "FIRST" if node.args.get("nulls_first") else "LAST"
    return f"{found.sql} {way} NULLS {nulls}"


def _distinct(node: exp.Expr) -> tuple[str, exp.Expr]:
    if isinstance(node, exp.Distinct):
        return "DISTINCT ", node.expressions[0]
    return "", node


RULES: Final = table_of(
    ("this", _count, [exp.Count]),
    ("this", _sum, [exp.Sum]),
    ("this", _avg, [exp.Avg]),
    ("this", _min_max, [exp.Min, exp.Max]),
    ("this", _all_any, [exp.LogicalAnd, exp.LogicalOr]),
    ("this expression", _filter, [exp.Filter]),
    ("", _rank, list(_RANKS)),
    ("this partition_by order", _window, [exp.Window]),
)
