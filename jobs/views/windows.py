"""Rules for window functions and their frames.

Pure. A frame of rows has one answer only if the order is total; one by RANGE takes rows that are
equal in ORDER BY together, so it always has.
"""

from __future__ import annotations

from typing import Final

from sqlglot import exp

from lockstep.jobs.views.aggregates import aggregate, filtered, ordered_by
from lockstep.jobs.views.numbering import SELECTS_ALIKE, WRITTEN
from lockstep.jobs.views.refusing import UnsupportedError, written
from lockstep.jobs.views.types import FLOAT8, FLOATS, INT4, INT8, PgType
from lockstep.jobs.views.values import (
    Rules,
    Value,
    coerced,
    common,
    expect_grouped,
    number_in,
    own,
    table_of,
)

_RANKS: Final[dict[type[exp.Expr], tuple[str, PgType]]] = {
    exp.RowNumber: ("row_number", INT8),
    exp.Rank: ("rank", INT8),
    exp.DenseRank: ("dense_rank", INT8),
    exp.PercentRank: ("percent_rank", FLOAT8),
    exp.CumeDist: ("cume_dist", FLOAT8),
    exp.Ntile: ("ntile", INT4),
}
# Of these each row has its own number; of the others, rows that are equal share one.
_NUMBERING: Final = (exp.RowNumber, exp.Ntile)
_OF_ROWS: Final[dict[type[exp.Expr], str]] = {
    exp.Lag: "lag",
    exp.Lead: "lead",
    exp.FirstValue: "first_value",
    exp.LastValue: "last_value",
    exp.NthValue: "nth_value",
}
_OVER: Final = (
    exp.Count, exp.Sum, exp.Avg, exp.Min, exp.Max, exp.LogicalAnd, exp.LogicalOr, exp.Variance,
    exp.VariancePop, exp.Stddev, exp.StddevSamp, exp.StddevPop, exp.BitwiseAndAgg,
    exp.BitwiseOrAgg,
)  # fmt: skip
_ANY_ORDER: Final = "add what is unique in each table and subquery to ORDER BY"
_FIRST, _LAST = float("-inf"), float("inf")


def _rank(_rules: Rules, node: exp.Expr) -> Value:
    raise UnsupportedError(f"{written(node)} without OVER", "write OVER (…)")


def _window(rules: Rules, node: exp.Window) -> Value:
    by = [rules.value(each) for each in node.args.get("partition_by") or ()]
    for each in by:
        expect_grouped(each.type, "PARTITION BY")
    order = node.args.get("order")
    ordered = order.expressions if order else []
    over = [f"PARTITION BY {', '.join(each.sql for each in by)}"] if by else []
    if ordered:
        over.append(f"ORDER BY {', '.join(ordered_by(rules, each) for each in ordered)}")
    frame = _frame(rules, node)
    over_sql = f"OVER ({' '.join([*over, *([frame] if frame else [])])})"
    inner = node.this.this if isinstance(node.this, exp.Filter) else node.this
    if type(inner) in _RANKS:
        return _ranked(rules, inner, node, over_sql)
    if type(inner) in _OF_ROWS:
        return _of_row(rules, inner, node, over_sql)
    if not isinstance(inner, _OVER) or inner.find(exp.Distinct):
        raise UnsupportedError(
            f"the window function {written(inner)}",
            "take row_number, rank, dense_rank, percent_rank, cume_dist, ntile, lag, lead,"
            " first_value, last_value, nth_value, or an aggregate without DISTINCT that has no"
            " order",
        )
    if isinstance(node.this, exp.Filter):
        return filtered(rules, node.this, f" {over_sql}")
    return aggregate(rules, inner, f" {over_sql}")


def _ranked(rules: Rules, inner: exp.Expr, node: exp.Window, over: str) -> Value:
    """Return the number of a row in its partition, or its part of it."""
    name, kind = _RANKS[type(inner)]
    alike = isinstance(inner, exp.RowNumber) and _selects_alike(rules, node)
    if isinstance(inner, _NUMBERING) and not (alike or _is_total(rules, node)):
        what = node.meta.get(WRITTEN, f"{name}()")
        raise UnsupportedError(
            f"{what} whose ORDER BY may leave rows in any order",
            f"{_ANY_ORDER}, or number by rank()",
        )
    if not node.args.get("order") and name != "row_number":
        raise UnsupportedError(f"{name}() without ORDER BY", "write it")
    if node.args.get("spec"):
        raise UnsupportedError(f"{name}() with a frame", "leave it out: it changes nothing")
    given = ""
    if isinstance(inner, exp.Ntile):
        parts = number_in(inner.this)
        if parts is None or parts < 1:
            raise UnsupportedError("ntile() of other than a number", "write how many, from 1")
        given = str(parts)
    return Value(f"{name}({given}) {over}", kind)


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


def _of_row(rules: Rules, inner: exp.Expr, window: exp.Window, over: str) -> Value:
    """Return a value of another row, which must be the same one in both."""
    name = _OF_ROWS[type(inner)]
    if isinstance(window.this, exp.Filter) or inner.args.get("order"):
        raise UnsupportedError(f"{name}() with FILTER or ORDER BY in it", "leave it out")
    if not window.args.get("order") or not _is_total(rules, window):
        raise UnsupportedError(f"{name}() whose ORDER BY may leave rows in any order", _ANY_ORDER)
    if window.args.get("spec") and isinstance(inner, exp.Lag | exp.Lead):
        raise UnsupportedError(f"{name}() with a frame", "leave it out: it changes nothing")
    found = rules.value(inner.this)
    kind = own(found)
    given = [coerced(found, kind)]
    if (offset := inner.args.get("offset")) is not None:
        place = number_in(offset)
        if place is None or place < (1 if isinstance(inner, exp.NthValue) else 0):
            raise UnsupportedError(f"{name}() with an offset that is no literal", "write a number")
        given.append(str(place))
    if (default := inner.args.get("default")) is not None:
        other = rules.value(default)
        kind = common([kind, other.type], f"{name}()")
        given[0] = coerced(found, kind)
        given.append(coerced(other, kind))
    return Value(f"{name}({', '.join(given)}) {over}", kind)


def _frame(rules: Rules, node: exp.Window) -> str:
    """Return the frame of a window; "" if it is the one that is without any."""
    spec = node.args.get("spec")
    if spec is None:
        return ""
    kind = str(spec.args["kind"]).upper()
    if kind == "GROUPS" or spec.args.get("exclude"):
        part = "EXCLUDE" if spec.args.get("exclude") else "GROUPS"
        raise UnsupportedError(
            f"a frame with {part}, which Spark does not have", "write ROWS or RANGE without it"
        )
    first = _place(spec.args.get("start"), spec.args.get("start_side"))
    last = _place(spec.args.get("end"), spec.args.get("end_side"))
    if first > last or first == _LAST or last == _FIRST:
        raise UnsupportedError("a frame that ends before it starts", "write the earlier row first")
    inside = {first, last} - {_FIRST, _LAST}
    if kind == "RANGE" and inside - {0}:
        raise UnsupportedError(
            "a frame by RANGE with an offset, whose arithmetic differs",
            "join the rows within the distance, and group them; or write ROWS",
        )
    if inside and (not node.args.get("order") or (kind == "ROWS" and not _is_total(rules, node))):
        raise UnsupportedError(
            "a frame of rows whose ORDER BY may leave rows in any order",
            f"{_ANY_ORDER}, or leave the frame out",
        )
    return f"{kind} BETWEEN {_bound(first)} AND {_bound(last)}"


def _place(given: object, side: object) -> float:
    """Return how many rows after the current one a bound of a frame is."""
    sign = -1 if str(side or "").upper() == "PRECEDING" else 1
    text = str(given or "CURRENT ROW").upper()
    if text == "CURRENT ROW":
        return 0
    if text == "UNBOUNDED":
        return sign * _LAST
    rows = number_in(given) if isinstance(given, exp.Expr) else None
    if rows is None or rows < 0:
        raise UnsupportedError("a frame with an offset that is no literal", "write a number")
    return sign * rows


def _bound(place: float) -> str:
    if place == 0:
        return "CURRENT ROW"
    side = "PRECEDING" if place < 0 else "FOLLOWING"
    return f"{'UNBOUNDED' if place in {_FIRST, _LAST} else abs(int(place))} {side}"


RULES: Final = table_of(
    ("this", _rank, list(_RANKS)),
    ("this partition_by order spec", _window, [exp.Window]),
)
