"""Translate a resolved query from Postgres' dialect to Spark's, with the same answer.

Pure. Every kind of expression is on a list here: what is on none is refused, so that nothing has
Spark's meaning by accident. Each expression gets the type that it has in Postgres, and where
Spark's result would differ, the text that makes it the same. docs/VIEWS.md lists the differences.

Tables are read from temporary views, named by `relation`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlglot import exp

from cdc.errors import ConfigError
from cdc.events import table_name
from lockstep.jobs.views import total_order
from lockstep.jobs.views.expressions import Expressions
from lockstep.jobs.views.refusing import UnsupportedError
from lockstep.jobs.views.types import INTEGERS, TEXT, UNKNOWN, PgType, of
from lockstep.jobs.views.values import (
    CONVERTED,
    ColumnScope,
    Uniques,
    Value,
    coerced,
    common,
    expect_grouped,
    quoted,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lockstep.sinks.contract import Version

_SET_OPERATIONS: Final[dict[type[exp.Expr], str]] = {
    exp.Union: "UNION",
    exp.Intersect: "INTERSECT",
    exp.Except: "EXCEPT",
}
_SELECT: Final = {
    *("expressions", "from_", "joins", "where", "group", "having", "distinct", "with_"),
    *("order", "kind", "hint"),
}
_JOINS: Final = {"": "JOIN", "LEFT": "LEFT JOIN", "RIGHT": "RIGHT JOIN", "FULL": "FULL JOIN"}
# Why parts of a SELECT are refused, and what to write instead.
_REWRITES: Final = {
    "limit": (
        "LIMIT",
        "select from it in another query: SELECT … FROM (…) AS x ORDER BY … LIMIT …",
    ),
    "offset": ("OFFSET", "as for LIMIT: number the rows, and keep some"),
    "laterals": ("LATERAL", "join a subquery, and number its rows by row_number()"),
    "locks": ("FOR UPDATE and the like", "leave it out: a view locks nothing"),
    "sample": ("TABLESAMPLE", "leave it out: its rows are random"),
}


class Query(NamedTuple):
    """A translated query: Spark's text, and its columns in Postgres' types."""

    sql: str
    columns: dict[str, PgType]
    uniques: Uniques = ()


def relation(table: str, state: str) -> str:
    """Return the name of the temporary view with a table's rows in a state."""
    return f"{state} {table}"


class Translator:
    """Translates queries over tables of these versions, in one state of the tables."""

    def __init__(self, versions: Mapping[str, Version], state: str) -> None:
        self._versions, self._state = versions, state

    def query(
        self,
        node: exp.Expr,
        ctes: Mapping[str, Query] | None = None,
        outer: ColumnScope | None = None,
    ) -> Query:
        """Return the translation of a query."""
        known = dict(ctes or {})
        if with_ := node.args.get("with_"):
            if with_.args.get("recursive"):
                raise UnsupportedError("WITH RECURSIVE", "unfold it to a fixed number of joins")
            for cte in with_.expressions:
                found = self.query(cte.this, known, outer)
                known[cte.alias] = _renamed(found, cte.args["alias"])
        if isinstance(node, exp.Subquery):
            _expect_no_limit(node)
            return self.query(node.this, known, outer)
        if isinstance(node, exp.Select):
            return self._select(node, known, outer)
        if type(node) in _SET_OPERATIONS:
            return self._set_operation(node, known, outer)
        raise UnsupportedError(_title(node), "write SELECT, UNION, INTERSECT or EXCEPT")

    def _set_operation(
        self, node: exp.Expr, ctes: Mapping[str, Query], outer: ColumnScope | None
    ) -> Query:
        _expect_no_limit(node)
        left, right = (self.query(node.args[side], ctes, outer) for side in ("this", "expression"))
        pairs = list(zip(left.columns.items(), right.columns.values(), strict=False))
        if len(left.columns) != len(right.columns):
            raise ConfigError("the queries of a UNION have different numbers of columns", hint="")
        types = {name: common([a, b], "a UNION") for (name, a), b in pairs}
        uniques: Uniques = ()
        name = _SET_OPERATIONS[type(node)]
        if node.args.get("distinct"):
            uniques = (frozenset(types),)
        else:
            name += " ALL"
        if name != "UNION ALL":
            for column, each in types.items():
                expect_grouped(each, f"{name} over {column}")
        node.meta[CONVERTED] = [
            [
                new if _is_converted(old, new) else None
                for old, new in zip(side.columns.values(), types.values(), strict=True)
            ]
            for side in (left, right)
        ]
        sides = (self._converted(each, types) for each in (left, right))
        return Query(f" {name} ".join(sides), types, uniques)

    def _converted(self, query: Query, types: Mapping[str, PgType]) -> str:
        """Return a query with its columns' types, and their names, replaced by these."""
        columns = ", ".join(
            f"{coerced(Value(f'u.{quoted(old)}', kind), new)} AS {quoted(name)}"
            for (old, kind), (name, new) in zip(query.columns.items(), types.items(), strict=True)
        )
        return f"SELECT {columns} FROM ({query.sql}) AS u"  # noqa: S608 - quoted

    def _select(
        self, node: exp.Select, ctes: Mapping[str, Query], outer: ColumnScope | None
    ) -> Query:
        for part, value in node.args.items():
            if value and part not in _SELECT:
                raise UnsupportedError(*_REWRITES.get(part, (part.upper(), "leave it out")))
        from_ = node.args.get("from_")
        scope = ColumnScope({}, outer)
        sources = [self._source(from_.this, ctes, outer, scope)] if from_ else []
        rules = Expressions(self, ctes, scope)
        sources += [
            self._join(join, ctes, outer, scope, rules) for join in node.args.get("joins") or ()
        ]
        text = [f"FROM {' '.join(sources)}"] if sources else []
        if where := node.args.get("where"):
            text.append(f"WHERE {rules.condition(where.this, 'WHERE')}")
        proof = total_order.OrderProof(node, scope.uniques)
        rules.order_of_group_is_total = proof.holds_in_group
        text += self._grouped(node, rules, scope)
        rules.order_is_total = proof.holds
        columns, selected = dict[str, PgType](), []
        for each in node.expressions:
            found = rules.value(each.unalias())
            type_ = TEXT if found.type.name == UNKNOWN else found.type
            name = each.alias_or_name
            if name.lower() in {other.lower() for other in columns}:
                raise ConfigError(
                    f"a view has two columns of the name {name}",
                    hint="name one otherwise: AS …; upper and lower case are not different",
                )
            columns[name] = type_
            selected.append(f"{coerced(found, type_)} AS {quoted(name)}")
        distinct = self._distinct(node, columns)
        sql = " ".join([f"SELECT {distinct}{', '.join(selected)}", *text])
        return Query(sql, columns, proof.uniques())

    def _distinct(self, node: exp.Select, columns: Mapping[str, PgType]) -> str:
        distinct = node.args.get("distinct")
        if distinct is None:
            return ""
        assert not distinct.args.get("on"), "it is numbered rows"
        for name, type_ in columns.items():
            expect_grouped(type_, f"DISTINCT over {name}")
        return "DISTINCT "

    def _grouped(self, node: exp.Select, rules: Expressions, scope: ColumnScope) -> list[str]:
        group, having = node.args.get("group"), node.args.get("having")
        is_grouped = (
            group is not None or having is not None or any(map(has_aggregate, node.expressions))
        )
        if not is_grouped:
            return []
        text, by = [], list(group.expressions) if group else []
        if any(isinstance(each, exp.Rollup | exp.Cube | exp.GroupingSets) for each in by) or any(
            value for part, value in (group.args.items() if group else ()) if part != "expressions"
        ):
            raise UnsupportedError(
                "GROUPING SETS, ROLLUP and CUBE", "write a query for each, with UNION ALL"
            )
        by += [
            column
            for each in (*node.expressions, *([having] if having else []))
            for column in _ungrouped(each, by)
            if self._is_determined(column, by, scope)
        ]
        if by:
            found = [rules.value(each) for each in by]
            for each in found:
                expect_grouped(each.type, "GROUP BY")
            text.append(f"GROUP BY {', '.join(dict.fromkeys(each.sql for each in found))}")
        if having:
            text.append(f"HAVING {rules.condition(having.this, 'HAVING')}")
        return text

    def _is_determined(self, column: exp.Column, by: list[exp.Expr], scope: ColumnScope) -> bool:
        """Return whether to group by this column too; False if it is another query's.

        Raises ConfigError unless the table's key is among the group's expressions.
        """
        if column.table not in scope.sources:
            return False
        key = scope.keys.get(column.table)
        grouped = {each.name for each in by if _is_column_of(each, column.table)}
        if not key or not key <= grouped:
            raise ConfigError(
                f"{column.sql(dialect='postgres')} is neither in GROUP BY nor in an aggregate",
                hint="add it to GROUP BY",
            )
        return True

    # --- FROM ---

    def _source(
        self,
        node: exp.Expr,
        ctes: Mapping[str, Query],
        outer: ColumnScope | None,
        scope: ColumnScope,
    ) -> str:
        """Return a table or a subquery as it is in FROM; add its columns to the scope."""
        if isinstance(node, exp.Table):
            refused = {"joins", "laterals", "sample", "pivots", "only", "when", "version"}
            if part := next((each for each in refused if node.args.get(each)), None):
                raise UnsupportedError(*_REWRITES.get(part, (part.upper(), "leave it out")))
            if node.name in ctes and not node.db:
                query = ctes[node.name]
            else:
                return self._table(node, scope)
        elif isinstance(node, exp.Subquery):
            query = self.query(node, ctes, None if outer is None else outer)
        else:
            raise UnsupportedError(f"{_title(node)} in FROM", "name tables and subqueries")
        query = _renamed(query, node.args["alias"])
        scope.add(node.alias, query.columns, query.uniques)
        return f"({query.sql}) AS {quoted(node.alias)}"

    def _table(self, node: exp.Table, scope: ColumnScope) -> str:
        version = self._versions[table_name(node.db, node.name)]
        if node.args["alias"].columns:
            raise UnsupportedError("a table's alias with names of columns", "name them by AS")
        columns = {each.name: of(each) for each in version.columns}
        scope.add_table(node.alias, columns, frozenset(version.key))
        return f"{quoted(relation(version.name, self._state))} AS {quoted(node.alias)}"

    def _join(
        self,
        node: exp.Join,
        ctes: Mapping[str, Query],
        outer: ColumnScope | None,
        scope: ColumnScope,
        rules: Expressions,
    ) -> str:
        if node.args.get("method") or node.args.get("using"):
            raise UnsupportedError("NATURAL JOIN", "write ON with the columns")
        side, kind = node.side.upper(), node.kind.upper()
        if kind not in {"", "INNER", "OUTER", "CROSS"}:
            raise UnsupportedError(f"{kind} JOIN", "write JOIN, LEFT JOIN or EXISTS")
        source = self._source(node.this, ctes, outer, scope)
        on = node.args.get("on")
        if on is None:
            return f"CROSS JOIN {source}"
        if side == "FULL" and not _has_equality(on, node.alias_or_name):
            raise UnsupportedError(
                "FULL JOIN without an equality, which Postgres has neither",
                "join by equal columns of both sides, or write UNION ALL of two LEFT JOINs",
            )
        could_call, rules.can_call = rules.can_call, rules.can_call and not side
        condition = rules.condition(on, "ON")
        rules.can_call = could_call
        return f"{_JOINS[side]} {source} ON {condition}"


def _is_converted(kind: PgType, wanted: PgType) -> bool:
    """Return whether an expression may have another value of a column that is converted."""
    if kind.mask or {kind.name, wanted.name} <= INTEGERS.keys():
        return False
    return (kind.spark, kind.has_scale) != (wanted.spark, wanted.has_scale)


def _has_equality(on: exp.Expr, alias: str) -> bool:
    """Return whether a condition has, by AND, an equality of what is joined with another table."""
    if isinstance(on, exp.And | exp.Paren):
        return any(_has_equality(each, alias) for each in on.iter_expressions())
    tables = [
        {column.table for column in each.find_all(exp.Column)} for each in on.iter_expressions()
    ]
    return (
        isinstance(on, exp.EQ) and {alias} in tables and any(alias not in each for each in tables)
    )


def _expect_no_limit(node: exp.Expr) -> None:
    """Raise for a LIMIT of other than a SELECT: `numbering` replaces those."""
    for part in ("limit", "offset"):
        if node.args.get(part):
            raise UnsupportedError(*_REWRITES[part])


def has_aggregate(node: exp.Expr) -> bool:
    """Return whether an expression has an aggregate of its own query."""
    if isinstance(node, exp.Query):
        return False
    if isinstance(node, exp.Window):
        inner = node.this.this if isinstance(node.this, exp.Filter) else node.this
        below = [*inner.iter_expressions(), *node.args.get("partition_by", ())]
        if order := node.args.get("order"):
            below.append(order)
        return any(map(has_aggregate, below))
    if isinstance(node, exp.AggFunc):
        return True
    return any(map(has_aggregate, node.iter_expressions()))


def _ungrouped(node: exp.Expr, by: list[exp.Expr]) -> list[exp.Column]:
    """Return the columns of an expression that are in no aggregate and no group's expression."""
    if node in by or isinstance(node, exp.Query):
        return []
    if isinstance(node, exp.Window):
        return [each for part in _parts_of_window(node) for each in _ungrouped(part, by)]
    if isinstance(node, exp.AggFunc | exp.Filter | exp.WithinGroup):
        return []
    if isinstance(node, exp.Column):
        return [node]
    return [each for below in node.iter_expressions() for each in _ungrouped(below, by)]


def _parts_of_window(node: exp.Window) -> list[exp.Expr]:
    """Return what a window function reads of its query's rows or groups."""
    inner = node.this.this if isinstance(node.this, exp.Filter) else node.this
    order = node.args.get("order")
    return [
        *inner.iter_expressions(),
        *(node.args.get("partition_by") or ()),
        *([order] if order else []),
    ]


def _is_column_of(node: exp.Expr, table: str) -> bool:
    return isinstance(node, exp.Column) and node.table == table


def _renamed(query: Query, alias: Any) -> Query:  # noqa: ANN401 - sqlglot's
    """Return the query with the columns' names that its alias gives."""
    names = [each.name for each in alias.columns] if isinstance(alias, exp.TableAlias) else []
    if not names or names == list(query.columns):
        return query
    if len(names) != len(query.columns):
        raise UnsupportedError("an alias with names of some columns", "name all, or none")
    columns = dict(zip(names, query.columns.values(), strict=True))
    selected = ", ".join(
        f"r.{quoted(old)} AS {quoted(new)}" for old, new in zip(query.columns, names, strict=True)
    )
    new = dict(zip(query.columns, names, strict=True))
    uniques = tuple(frozenset(new[each] for each in unique) for unique in query.uniques)
    return Query(f"SELECT {selected} FROM ({query.sql}) AS r", columns, uniques)  # noqa: S608 - quoted


def _title(node: exp.Expr) -> str:
    return node.key.upper()
