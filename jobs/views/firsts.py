"""Views of the first rows of each key, and what rows that are added to a table change in them.

    SELECT … FROM (SELECT …, row_number() OVER (PARTITION BY k ORDER BY a DESC, b) AS place
                   FROM t JOIN s ON …) AS x WHERE place <= 100

Rows that are added to a table of inner joins add rows to what is joined, and remove none. Then the
first rows of a key are among its first rows before and those that were added: no other row of the
key need be read. Where a row was deleted or updated, the next one moves up, and has to be found.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from lockstep.jobs.views.types import COMPARED, FLOATS, INEXACT, INTEGERS, TIMES
from lockstep.sinks.delta.columns import one_chunk

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lockstep.jobs.views.types import PgType

# Arrow orders them as Postgres does.
_ORDERED: Final = TIMES | INTEGERS.keys()
_KEYS: Final = COMPARED - FLOATS - INEXACT


class Ordered(NamedTuple):
    """A column that rows are ordered by."""

    name: str
    descends: bool
    nulls_first: bool


class Firsts(NamedTuple):
    """Which rows of a view there are: the first ones of each value of a column, in an order."""

    by: str
    order: tuple[Ordered, ...]
    most: int


def firsts(query: exp.Query, columns: Mapping[str, PgType]) -> Firsts | None:
    """Return what a resolved query's rows are the first ones of; None if it has another form."""
    inner = _joins(query)
    if inner is None or not isinstance(query, exp.Select):
        return None
    (window,) = inner.find_all(exp.Window)
    outputs = {each.unalias(): each.alias_or_name for each in inner.expressions}
    shown = dict[str, str]()
    for each in query.expressions:
        if not isinstance(each.unalias(), exp.Column):
            return None
        shown[each.unalias().name] = each.alias_or_name
    place = outputs.get(window, "")
    most = _most(query, place)
    partition, order = window.args.get("partition_by") or [], window.args.get("order")
    ordered = order.expressions if order else []
    named = [each.this for each in ordered]
    found = [shown.get(outputs.get(each, "")) for each in (*partition, *named)]
    if most is None or len(partition) != 1 or not named or place in shown or None in found:
        return None
    by, *names = [each for each in found if each is not None]
    kinds = [columns[each].name for each in names]
    if columns[by].name not in _KEYS or not {*kinds} <= _ORDERED or not _is_plain(window):
        return None
    flags = ((bool(each.args.get(name)) for name in ("desc", "nulls_first")) for each in ordered)
    order = (Ordered(name, *each) for name, each in zip(names, flags, strict=True))
    return Firsts(by, tuple(order), most)


def first_rows(rows: pa.Table, of: Firsts) -> pa.Table | None:
    """Return the first rows of each key; None if a key is NULL."""
    if rows[of.by].null_count:
        return None
    sorted_by, columns = [(of.by, "ascending")], {of.by: rows[of.by]}
    for place, each in enumerate(of.order):
        nulls, values = f"{place} is null", str(place)
        columns |= {nulls: pc.is_null(rows[each.name]), values: rows[each.name]}
        sorted_by.append((nulls, "descending" if each.nulls_first else "ascending"))
        sorted_by.append((values, "descending" if each.descends else "ascending"))
    ordered = rows.take(pc.sort_indices(pa.table(columns), sort_keys=sorted_by))
    keys, places = one_chunk(ordered[of.by]), pa.arange(0, rows.num_rows)
    if not rows.num_rows:
        return ordered
    starts = pa.concat_arrays([pa.array([True]), pc.not_equal(keys[1:], keys[:-1])])
    of_key = pc.fill_null_forward(pc.if_else(starts, places, pa.scalar(None, pa.int64())))
    return ordered.filter(pc.less(pc.subtract(places, of_key), of.most))


def _joins(query: exp.Query) -> exp.Select | None:
    """Return the subquery of numbered rows, if it has only inner joins of different tables."""
    selects = list(query.find_all(exp.Select))
    plain = {"expressions", "from_", "where", "kind"}
    inner = chosen_from(query, plain)
    if inner is None or len(selects) != len((query, inner)):
        return None
    joins = inner.args.get("joins") or []
    if not has_only(inner, {*plain, "joins"}) or any(each.side for each in joins):
        return None
    tables = [inner.args["from_"].this, *(each.this for each in joins)]
    if not all(isinstance(each, exp.Table) for each in tables):
        return None
    names = {(each.db, each.name) for each in tables}
    kinds = {each.kind for each in joins} | {each.method for each in joins}
    windows = list(inner.find_all(exp.Window))
    if len(names) < len(tables) or not kinds <= {"", "INNER"} or len(windows) != 1:
        return None
    aggregates = [each for each in inner.find_all(exp.AggFunc) if each is not windows[0].this]
    return inner if isinstance(windows[0].this, exp.RowNumber) and not aggregates else None


def chosen_from(query: exp.Query, parts: set[str]) -> exp.Select | None:
    """Return the one SELECT in FROM of another that has only these parts; None otherwise."""
    source = query.args.get("from_")
    if source is None or not isinstance(source.this, exp.Subquery) or not has_only(query, parts):
        return None
    return source.this.this if isinstance(source.this.this, exp.Select) else None


def has_only(node: exp.Expr, parts: set[str]) -> bool:
    return {name for name, part in node.args.items() if part} <= parts


def _most(query: exp.Query, place: str) -> int | None:
    """Return the last number that rows may have; None if they are chosen otherwise."""
    where = query.args.get("where")
    test = where.this if where else None
    if not isinstance(test, exp.LTE | exp.EQ) or not place:
        return None
    column, number = test.this, test.expression
    if not isinstance(column, exp.Column) or column.name != place:
        return None
    if not isinstance(number, exp.Literal) or number.is_string or not number.this.isdigit():
        return None
    most = int(number.this)
    return most if isinstance(test, exp.LTE) or most == 1 else None


def _is_plain(window: exp.Window) -> bool:
    """Return whether it has no frame, filter or name."""
    return has_only(window, {"this", "partition_by", "order", "over"})
