"""Rules for aggregates.

Pure. Each takes what follows the aggregate in Spark's SQL: FILTER, or the window that it is over.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlglot import exp

from lockstep.jobs.views import collecting
from lockstep.jobs.views.quotients import MOST_SCALE, quotient
from lockstep.jobs.views.refusing import UnsupportedError, unknown, written
from lockstep.jobs.views.roots import STDDEV
from lockstep.jobs.views.scalars import combined
from lockstep.jobs.views.types import BOOL, FLOATS, INT8, INTEGERS, numeric
from lockstep.jobs.views.values import (
    INSTEAD_OF_FLOATS,
    Rules,
    Value,
    coerced,
    expect_callable,
    expect_grouped,
    expect_number,
    expect_ordered,
    expect_parts,
    own,
    size,
    table_of,
)
from lockstep.sinks.delta.types import MAX_PRECISION

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lockstep.jobs.views.types import PgType

_BITS: Final[dict[type[exp.Expr], str]] = {
    exp.BitwiseAndAgg: "bit_and",
    exp.BitwiseOrAgg: "bit_or",
    exp.BitwiseXorAgg: "bit_xor",
}
# Of a standard deviation, before the point: more leave too few digits after it.
_MOST_ROOT_DIGITS: Final = 14


class _Aggregate(NamedTuple):
    parts: frozenset[str]
    translate: Callable[[Rules, Any, str], Value]


def aggregate(rules: Rules, node: exp.Expr, clause: str = "") -> Value:
    """Return an aggregate's translation; `clause`: FILTER and OVER."""
    found = AGGREGATES.get(type(node))
    if found is None:
        raise unknown(node)
    expect_parts(node, found.parts)
    return found.translate(rules, node, clause)


def filtered(rules: Rules, node: exp.Filter, clause: str = "") -> Value:
    """Return an aggregate of the rows that meet a condition."""
    test = rules.condition(node.expression.this, "FILTER")
    return aggregate(rules, node.this, f" FILTER (WHERE {test}){clause}")


def ordered_by(rules: Rules, node: exp.Ordered) -> str:
    """Return a part of ORDER BY."""
    found = rules.value(node.this)
    expect_ordered(found.type, "ORDER BY")
    way = "DESC" if node.args.get("desc") else "ASC"
    nulls = "FIRST" if node.args.get("nulls_first") else "LAST"
    return f"{found.sql} {way} NULLS {nulls}"


def _count(rules: Rules, node: exp.Count, clause: str) -> Value:
    inner = node.this
    if isinstance(inner, exp.Star):
        return Value(f"count(*){clause}", INT8)
    if isinstance(inner, exp.Distinct):
        return Value(f"count(DISTINCT {_counted(rules, inner.expressions)}){clause}", INT8)
    found = rules.value(inner)
    return Value(f"count({coerced(found, own(found))}){clause}", INT8)


def _counted(rules: Rules, given: Sequence[exp.Expr]) -> str:
    """Return what is counted once for each value: an expression, or a row of several."""
    what = "count(DISTINCT …)"
    if len(given) != 1 or (isinstance(given[0], exp.Case) and given[0].find(exp.Tuple)):
        raise UnsupportedError(f"{what} of several", "write count(DISTINCT (a, b)), with ((…))")
    parts = given[0].expressions if isinstance(given[0], exp.Tuple) else given
    found = [rules.value(each) for each in parts]
    for each in found:
        expect_grouped(each.type, what)
    # A row of NULLs is counted, too: it is no NULL.
    return found[0].sql if parts is given else f"struct({', '.join(each.sql for each in found)})"


def _sum(rules: Rules, node: exp.Sum, clause: str) -> Value:
    word, inner = _distinct(node.this)
    found = rules.value(inner)
    _expect_exact(found, "sum()")
    if found.type.name in {"int2", "int4"}:
        return Value(f"sum({word}{found.sql}){clause}", INT8)
    wide = numeric(MAX_PRECISION, size(found.type, "sum()")[1], has_scale=found.type.has_scale)
    # Wide enough before the sum: Spark would add only ten digits.
    return Value(f"CAST(sum({word}{coerced(found, wide)}){clause} AS {wide.spark})", wide)


def _avg(rules: Rules, node: exp.Avg, clause: str) -> Value:
    _, inner = _distinct(node.this)
    found = rules.value(inner)
    _expect_exact(found, "avg()")
    precision, scale = size(found.type, "avg()")
    total, rows = (
        aggregate(rules, kind(this=node.this.copy()), clause) for kind in (exp.Sum, exp.Count)
    )
    # An average is at most the largest of its values.
    return quotient(total, rows, precision - scale)


def _variance(rules: Rules, node: exp.Variance | exp.VariancePop, clause: str) -> Value:
    """Return a variance by the formula of Postgres' numeric.c, whose scale depends on its terms.

    (n Σx² - (Σx)²) / (n (n - 1)); of the population, / n².
    """
    what = written(node)
    if isinstance(node.this, exp.Distinct):
        raise UnsupportedError(f"{what} with DISTINCT", "select the values once in a subquery")
    found = rules.value(node.this)
    _expect_exact(found, what)
    precision, scale = size(found.type, what)
    one = exp.Cast(this=node.this, to=exp.DataType.build(f"numeric({precision},{scale})"))
    square = exp.Paren(this=exp.Mul(this=one, expression=one.copy()))
    total, squares, rows = (
        aggregate(rules, each, clause)
        for each in (exp.Sum(this=one), exp.Sum(this=square), exp.Count(this=node.this.copy()))
    )
    times = combined("*", rows, squares)
    difference = combined("-", times, combined("*", total, total))
    fewer = "1L" if isinstance(node, exp.Variance) else "0L"
    # NULL of too few rows.
    by = Value(f"nullif({rows.sql} * ({rows.sql} - {fewer}), 0L)", INT8)
    return quotient(difference, by, 2 * (precision - scale))


def _stddev(rules: Rules, node: exp.Stddev | exp.StddevSamp | exp.StddevPop, clause: str) -> Value:
    """Return a standard deviation, of sums of integers: the numbers without their point."""
    what = written(node)
    if isinstance(node.this, exp.Distinct):
        raise UnsupportedError(f"{what} with DISTINCT", "select the values once in a subquery")
    expect_callable(rules, what)
    found = rules.value(node.this)
    _expect_exact(found, what)
    precision, scale = size(found.type, what)
    # At most half as large again as the largest value.
    digits = min(precision - scale + 1, _MOST_ROOT_DIGITS)
    kind = numeric(MAX_PRECISION, min(MAX_PRECISION - digits, MOST_SCALE), has_scale=False)
    most = size(kind, what)[1]
    if 2 * scale > most:
        raise UnsupportedError(
            f"{what} of a numeric of {scale} digits after the point",
            f"round it before, by round(…, n) or ::numeric(p,s), to {most // 2} digits at most",
        )
    wide = numeric(MAX_PRECISION, 0).spark
    unit = f"CAST('1{'0' * scale}' AS decimal({scale + 1},0))"
    integer = f"{coerced(found, numeric(precision, scale))} * {unit}"
    integer = f"CAST({integer} AS {numeric(precision, 0).spark})"
    total, squares = (
        f"CAST(sum(CAST({each} AS {wide})){clause} AS string)"
        for each in (integer, f"{integer} * {integer}")
    )
    is_sample = "false" if isinstance(node, exp.StddevPop) else "true"
    has_scale = "true" if found.type.has_scale else "false"
    given = f"{total}, {squares}, count({found.sql}){clause}, {is_sample}, {scale}, {has_scale}"
    return Value(f"CAST({STDDEV}({given}, {most}) AS {kind.spark})", kind)


def _min_max(rules: Rules, node: exp.Min | exp.Max, clause: str) -> Value:
    _, inner = _distinct(node.this)
    found = rules.value(inner)
    expect_ordered(found.type, f"{node.key}()")
    if found.type.name in {"bool", "uuid"}:
        raise UnsupportedError(f"{node.key}() of {found.type.title}", "Postgres has none")
    return Value(f"{node.key}({found.sql}){clause}", found.type)


def _all_any(rules: Rules, node: exp.LogicalAnd | exp.LogicalOr, clause: str) -> Value:
    word = "bool_and" if isinstance(node, exp.LogicalAnd) else "bool_or"
    return Value(f"{word}({rules.condition(node.this, word)}){clause}", BOOL)


def _bits(rules: Rules, node: exp.Expr, clause: str) -> Value:
    word = _BITS[type(node)]
    found = rules.value(node.this)
    if found.type.name not in INTEGERS:
        raise UnsupportedError(f"{word}() of {found.type.title}", "cast to an integer")
    return Value(f"{word}({found.sql}){clause}", found.type)


def _chosen(rules: Rules, node: exp.WithinGroup, clause: str) -> Value:
    """Return percentile_disc() or mode(): a value that is chosen among the sorted ones."""
    if not isinstance(node.this, exp.PercentileDisc | exp.Mode) or (
        isinstance(node.this, exp.Mode) and node.this.this is not None
    ):
        raise unknown(node.this)
    what = written(node.this)
    (by,) = node.expression.expressions
    found = rules.value(by.this)
    expect_ordered(found.type, what)
    expect_grouped(found.type, what)
    way = "false" if by.args.get("desc") else "true"
    called = f"array(sort_array(collect_list({found.sql}){clause}, {way}))"
    value = _most_frequent(found.type) if isinstance(node.this, exp.Mode) else _at(node.this)
    return Value(f"transform({called}, x -> {value})[0]", found.type)


def _at(node: exp.PercentileDisc) -> str:
    """Return the value at a place of the sorted values `x`; NULL if there are none."""
    part = node.this
    if not isinstance(part, exp.Literal) or not 0 <= float(part.this) <= 1:
        raise UnsupportedError("percentile_disc() of other than a number", "write one from 0 to 1")
    place = f"greatest(CAST(ceil(CAST('{part.this}' AS double) * size(x)) AS int) - 1, 0)"
    return f"get(x, {place})"


def _most_frequent(kind: PgType) -> str:
    """Return the first of the most frequent of the sorted values `x`; NULL if there are none.

    `c` counts the values that are equal to the last one, `l`.
    """
    none = f"CAST(NULL AS {kind.spark})"
    count = "if(y <=> a.l, a.c + 1, 1)"
    return (
        f"aggregate(x, named_struct('v', {none}, 'n', 0, 'l', {none}, 'c', 0), (a, y) ->"
        f" named_struct('v', if({count} > a.n, y, a.v), 'n', greatest({count}, a.n),"
        f" 'l', y, 'c', {count}), a -> a.v)"
    )


def _expect_exact(found: Value, what: str) -> None:
    if found.type.name in FLOATS:
        raise UnsupportedError(
            f"{what} of {found.type.title}, which depends on the order of the rows",
            INSTEAD_OF_FLOATS,
        )
    expect_number(found.type, what)


def _distinct(node: exp.Expr) -> tuple[str, exp.Expr]:
    if isinstance(node, exp.Distinct):
        return "DISTINCT ", node.expressions[0]
    return "", node


def _alone(translate: Callable[[Rules, Any, str], Value], rules: Rules, node: exp.Expr) -> Value:
    return translate(rules, node, "")


AGGREGATES: Final = {
    kind: _Aggregate(frozenset(parts.split()), translate)
    for parts, translate, kinds in (
        ("this", _count, [exp.Count]),
        ("this", _sum, [exp.Sum]),
        ("this", _avg, [exp.Avg]),
        ("this", _variance, [exp.Variance, exp.VariancePop]),
        ("this", _stddev, [exp.Stddev, exp.StddevSamp, exp.StddevPop]),
        ("this", _min_max, [exp.Min, exp.Max]),
        ("this", _all_any, [exp.LogicalAnd, exp.LogicalOr]),
        ("this", _bits, list(_BITS)),
        ("this separator", collecting.joined, [exp.GroupConcat]),
        ("this", collecting.as_array, [exp.ArrayAgg]),
        ("this expressions", collecting.document, [exp.AnonymousAggFunc]),
        ("this expression", _chosen, [exp.WithinGroup]),
    )
    for kind in kinds
}
RULES: Final = table_of(
    *(
        (" ".join(each.parts), partial(_alone, each.translate), [kind])
        for kind, each in AGGREGATES.items()
    ),
    ("this expression", filtered, [exp.Filter]),
)
