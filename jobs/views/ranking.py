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

_ORDER: Final = "#order"  # columns of the query without the limit, for its order
_ALIAS: Final = "#all"


class Ranking(NamedTuple):
    """A query in two: all rows, and the first ones of a table that has them."""

    all: exp.Select
    first: exp.Select  # of the table `named`
    order: tuple[str, ...]  # columns of `all` in which no two rows agree


def ranking(query: exp.Query, schema: str, named: str) -> Ranking | None:
    """Return what a resolved query's rows are the first ones of; None if it has another form.

    `schema`, `named`: the table that has all rows.
    """
    inner = _numbered(query)
    if inner is None:
        return None
    (place,) = [each for each in inner.expressions if each.find(exp.Window)]
    window = place.unalias()
    every = inner.copy()
    every.set("with_", query.args["with_"].copy() if query.args.get("with_") else None)
    every.set("expressions", [each.copy() for each in inner.expressions if each is not place])
    order, names = list[exp.Expr](), list[str]()
    for number, each in enumerate(window.args["order"].expressions):
        by, collation = each.this, None
        if isinstance(by, exp.Collate):
            by, collation = by.this, by.expression
        name = f"{_ORDER}{number}"
        every.append("expressions", exp.alias_(by.copy(), name, quoted=True))
        names.append(name)
        ordered = each.copy()
        column = exp.column(name, table=_ALIAS, quoted=True)
        ordered.set("this", exp.Collate(this=column, expression=collation) if collation else column)
        order.append(ordered)
    chosen = window.copy()
    chosen.set("order", exp.Order(expressions=order))
    shown = [each.alias_or_name for each in inner.expressions if each is not place]
    columns = [exp.alias_(exp.column(e, table=_ALIAS, quoted=True), e, quoted=True) for e in shown]
    table = exp.Table(
        this=exp.to_identifier(named, quoted=True),
        db=exp.to_identifier(schema, quoted=True),
        alias=exp.TableAlias(this=exp.to_identifier(_ALIAS, quoted=True)),
    )
    first = query.copy()
    assert isinstance(first, exp.Select), "as it was found"
    first.set("with_", None)
    numbered = exp.Select(
        expressions=[*columns, exp.alias_(chosen, place.alias, quoted=True)],
        from_=exp.From(this=table),
    )
    first.args["from_"].this.set("this", numbered)
    return Ranking(every, first, tuple(names))


def _numbered(query: exp.Query) -> exp.Select | None:
    """Return the subquery of numbered rows, if the query chooses some of these by their number."""
    source = query.args.get("from_")
    parts = {name for name, part in query.args.items() if part}
    if not isinstance(query, exp.Select) or source is None:
        return None
    inner = source.this.this if isinstance(source.this, exp.Subquery) else None
    plain = {"with_", "expressions", "from_", "where", "kind"}
    if not isinstance(inner, exp.Select) or not parts <= plain:
        return None
    windows = [window for each in inner.expressions for window in each.find_all(exp.Window)]
    own = [each.unalias() for each in inner.expressions]
    if len(windows) != 1 or not any(each is windows[0] for each in own):
        return None
    (window,) = windows
    is_first = isinstance(window.this, exp.RowNumber) and window.args.get("order")
    if not is_first or window.args.get("partition_by") or window.args.get("spec"):
        return None
    return None if inner.args.get("distinct") else inner
