"""LIMIT, DISTINCT ON and LATERAL as numbered rows: the same answer, in a form that has lineage.

Pure: replaces them in a resolved query. The first rows of a key are those that row_number() gives
the first numbers, so the rules for windows decide what can be maintained and what is refused: an
ORDER BY that leaves rows in any order has no one answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlglot import exp

from lockstep.jobs.views.refusing import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of a window's node, in its `meta`: what the SQL has in place of row_number().
WRITTEN: Final = "written"
# And whether rows that agree in its order agree in all that is selected: then any order of them
# selects the same.
SELECTS_ALIKE: Final = "selects alike"
_PLACE: Final = "#place"
_ALIAS: Final = "#numbered"


def numbered(query: exp.Query) -> exp.Query:
    """Return the query with LIMIT, DISTINCT ON and LATERAL replaced."""
    for join in list(query.find_all(exp.Join)):
        if isinstance(join.this, exp.Lateral):
            _unfold(join)
    for select in list(query.find_all(exp.Select)):
        distinct = select.args.get("distinct")
        by = list(distinct.args["on"].expressions) if distinct and distinct.args.get("on") else []
        if by or select.args.get("limit"):
            made = _numbered(select, by)
            if select is query:
                query = made
            else:
                select.replace(made)
    return query


def _numbered(select: exp.Select, by: Sequence[exp.Expr], names: Sequence[str] = ()) -> exp.Select:
    """Return a SELECT of the first rows, for each value of `by`; `names`: columns that it keeps."""
    limit, distinct = select.args.get("limit"), select.args.get("distinct")
    written = "DISTINCT ON" if distinct else "LIMIT"
    if distinct and (limit or not by):
        raise UnsupportedError("LIMIT with DISTINCT", "write SELECT DISTINCT in a subquery")
    own = {each.alias_or_name for each in select.find_all(exp.Table, exp.Subquery)}
    if any(each.table and each.table not in own for each in select.find_all(exp.Column)):
        raise UnsupportedError(
            f"{written} in a subquery that names the query around it",
            "join the subquery by LATERAL",
        )
    if select.args.get("offset"):
        raise UnsupportedError("OFFSET", "number the rows by row_number() in a subquery")
    most = limit.expression if limit else exp.Literal.number(1)
    if not isinstance(most, exp.Literal) or most.is_string or not most.this.isdigit():
        raise UnsupportedError("LIMIT with other than a number", "write a number")
    order = select.args.get("order")
    window = exp.Window(
        this=exp.RowNumber(),
        partition_by=[_input(each, select) for each in by],
        order=order and exp.Order(expressions=[_ordered(each, select) for each in order]),
    )
    window.meta[WRITTEN] = written
    window.meta[SELECTS_ALIKE] = _selects_alike(select, window)
    inner = select.copy()
    for part in ("limit", "order", "distinct"):
        inner.set(part, None)
    with_ = inner.args.get("with_")
    inner.set("with_", None)
    inner.append("expressions", exp.alias_(window, _PLACE, quoted=True))
    kept = names or [each.alias_or_name for each in select.expressions]
    # By `= 1` it is known that no two rows have one key.
    test = exp.EQ if most.this == "1" else exp.LTE
    made = exp.Select(
        expressions=[exp.alias_(column_of(_ALIAS, name), name, quoted=True) for name in kept],
        from_=exp.From(this=_subquery(inner, _ALIAS)),
        where=exp.Where(this=test(this=column_of(_ALIAS, _PLACE), expression=most.copy())),
    )
    if with_:
        made.set("with_", with_)
    return made


def _unfold(join: exp.Join) -> None:
    """Replace LATERAL by a join with its subquery, by the equalities that are in its WHERE."""
    lateral, outer = join.this, join.parent_select
    select = lateral.this.this if isinstance(lateral.this, exp.Subquery) else None
    if not isinstance(select, exp.Select) or join.side.upper() not in {"", "LEFT"}:
        raise UnsupportedError("LATERAL with other than a SELECT", "join a subquery")
    if select.args.get("group") or select.args.get("distinct") or select.find(exp.AggFunc):
        raise UnsupportedError("LATERAL with GROUP BY or DISTINCT", "join a grouped subquery")
    assert outer is not None, "a join is one of a SELECT"
    around = _aliases(outer) - _aliases(select)
    where = select.args.get("where")
    inner, pairs, rest = select.copy(), list[tuple[exp.Expr, exp.Expr]](), list[exp.Expr]()
    for each in (
        where.this.flatten()
        if where and isinstance(where.this, exp.And)
        else ([where.this] if where else [])
    ):
        pair = _pair(each, around)
        if pair:
            pairs.append(pair)
        else:
            rest.append(each.copy())
    inner.set("where", exp.Where(this=exp.and_(*rest, copy=False)) if rest else None)
    if any(each.table in around for each in inner.find_all(exp.Column)) or not pairs:
        raise UnsupportedError(
            "LATERAL that is not joined by equalities in its WHERE",
            "join a subquery, and number its rows by row_number()",
        )
    own = [each.alias_or_name for each in inner.expressions]
    named = [f"#by{at}" for at in range(len(pairs))]
    _partition(inner, [column for column, _ in pairs])
    for (column, _), name in zip(pairs, named, strict=True):
        inner.append("expressions", exp.alias_(column.copy(), name, quoted=True))
    if inner.args.get("limit"):
        inner = _numbered(inner, [column for column, _ in pairs], [*own, *named])
    inner.set("order", None)
    alias = lateral.alias
    ons = [
        exp.EQ(this=column_of(alias, name), expression=other.copy())
        for name, (_, other) in zip(named, pairs, strict=True)
    ]
    given = join.args.get("on")
    if given is not None and given != exp.true():
        ons.append(given.copy())
    join.set("this", _subquery(inner, alias))
    join.set("kind", None)
    join.set("on", exp.and_(*ons, copy=False))


def _partition(select: exp.Select, by: Sequence[exp.Expr]) -> None:
    """Compute a SELECT's window functions for each value of `by`, as LATERAL does for its rows."""
    for window in select.find_all(exp.Window):
        if window.parent_select is select:
            given = window.args.get("partition_by") or ()
            window.set("partition_by", [*(each.copy() for each in by), *given])


def _pair(node: exp.Expr, around: set[str]) -> tuple[exp.Expr, exp.Expr] | None:
    """Return an equality's column of the subquery, and the one of the query around it."""
    if not isinstance(node, exp.EQ):
        return None
    one, other = node.this, node.expression
    if not isinstance(one, exp.Column) or not isinstance(other, exp.Column):
        return None
    if (one.table in around) == (other.table in around):
        return None
    return (other, one) if one.table in around else (one, other)


def _aliases(select: exp.Select) -> set[str]:
    from_ = select.args.get("from_")
    sources = [from_.this] if from_ else []
    sources += [join.this for join in select.args.get("joins") or ()]
    return {each.alias_or_name for each in sources}


def _ordered(node: exp.Ordered, select: exp.Select) -> exp.Expr:
    made = node.copy()
    made.set("this", _input(node.this, select))
    return made


def _selects_alike(select: exp.Select, window: exp.Window) -> bool:
    order = window.args.get("order")
    ordered = [each.this for each in (order.expressions if order else ())]
    by = [*window.args["partition_by"], *ordered]
    known = {(each.this if isinstance(each, exp.Collate) else each).unnest() for each in by}
    selected = [each.unalias().unnest() for each in select.expressions]
    return all(isinstance(each, exp.Literal) or each in known for each in selected)


def _input(node: exp.Expr, select: exp.Select) -> exp.Expr:
    """Return an expression of ORDER BY over the query's tables, in place of its columns' names."""
    outputs: dict[str, exp.Expr] = {
        each.alias_or_name: each.unalias() for each in select.expressions
    }
    if isinstance(node, exp.Column) and not node.table and node.name in outputs:
        return outputs[node.name].copy()
    made = node.copy()
    for each in list(made.find_all(exp.Column)):
        if each.table:
            continue
        found = outputs.get(each.name)
        if not isinstance(found, exp.Column) or found.name != each.name:
            raise UnsupportedError(
                f"ORDER BY with {each.name} in an expression", "write what it is the name of"
            )
        each.replace(found.copy())
    return made


def column_of(table: str, name: str) -> exp.Column:
    """Return a quoted column of a quoted alias."""
    return exp.column(name, table=table, quoted=True)


def _subquery(query: exp.Query, alias: str) -> exp.Subquery:
    name = exp.TableAlias(this=exp.to_identifier(alias, quoted=True))
    return exp.Subquery(this=query, alias=name)
