"""Views of the first rows of all: what their rows are the first ones of, and which are first.

    SELECT … FROM (SELECT …, row_number() OVER (ORDER BY a DESC, b) AS place FROM …) AS x
    WHERE place <= 100

is what `numbering` makes of ORDER BY … LIMIT. Each changed row may change which rows are first, so
that nothing leads to the affected ones. But changed rows lead to those of the query without the
limit: these are kept in memory while they fit, and the first ones are chosen from them.

Pure.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from sqlglot import exp

from lockstep.jobs.views.firsts import chosen_from, has_only
from lockstep.jobs.views.numbering import column_of

_ORDER: Final = "#order"  # columns of the query without the limit, for its order
_ALIAS: Final = "#all"


class Ranking(NamedTuple):
    """A query in two: all rows, and the first ones of a table that has them."""

    all: exp.Query
    first: exp.Query  # of the table `named`
    order: tuple[str, ...]  # columns of `all` in which no two rows agree


def ranking(query: exp.Query, schema: str, named: str) -> Ranking | None:
    """Return what a resolved query's rows are the first ones of; None if it has another form.

    `schema`, `named`: the table that has all rows.
    """
    inner = chosen_from(query, {"with_", "expressions", "from_", "where", "kind"})
    place = None if inner is None or inner.args.get("distinct") else _place(inner)
    if inner is None or place is None:
        return None
    window, with_ = place.unalias(), query.args.get("with_")
    shown = [each for each in inner.expressions if each is not place]
    order, by = list[exp.Expr](), list[exp.Expr]()
    for each in window.args["order"].expressions:
        ordered, value = each.copy(), each.this
        here: exp.Expr = column_of(_ALIAS, f"{_ORDER}{len(by)}")
        if isinstance(value, exp.Collate):
            here, value = exp.Collate(this=here, expression=value.expression), value.this
        ordered.set("this", here)
        order.append(ordered)
        by.append(exp.alias_(value.copy(), f"{_ORDER}{len(by)}", quoted=True))
    every = inner.copy()
    every.set("with_", with_ and with_.copy())
    every.set("expressions", [*(each.copy() for each in shown), *by])
    chosen = window.copy()
    chosen.set("order", exp.Order(expressions=order))
    names = [each.alias_or_name for each in shown]
    table = exp.Table(
        this=exp.to_identifier(named, quoted=True),
        db=exp.to_identifier(schema, quoted=True),
        alias=exp.TableAlias(this=exp.to_identifier(_ALIAS, quoted=True)),
    )
    numbered = exp.Select(
        expressions=[
            *(exp.alias_(column_of(_ALIAS, name), name, quoted=True) for name in names),
            exp.alias_(chosen, place.alias, quoted=True),
        ],
        from_=exp.From(this=table),
    )
    first = query.copy()
    first.set("with_", None)
    first.args["from_"].this.set("this", numbered)
    return Ranking(every, first, tuple(each.alias for each in by))


def _place(inner: exp.Select) -> exp.Expr | None:
    """Return the column that numbers all rows in an order, if that is the only window."""
    windows = [window for each in inner.expressions for window in each.find_all(exp.Window)]
    places = [each for each in inner.expressions if isinstance(each.unalias(), exp.Window)]
    if len(windows) != 1 or len(places) != 1:
        return None
    (window,), (place,) = windows, places
    numbers = isinstance(window.this, exp.RowNumber) and window.args.get("order")
    return place if numbers and has_only(window, {"this", "order", "over"}) else None
