"""Whether an order leaves no two rows of a query in either order: what row_number() needs.

Pure. By what is unique in the query's tables and subqueries, and the equalities between their
columns: what a set of columns determines, as functional dependencies do. Where nothing proves it,
the answer is no. Rows agree in a column also where both have NULL there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlglot import exp

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lockstep.jobs.views.values import Uniques

    Column = tuple[str, str]


class OrderProof:
    """What determines the rows of one SELECT; `uniques`: what is unique, by alias."""

    def __init__(self, node: exp.Select, uniques: Mapping[str, Uniques]) -> None:
        self._select, self._uniques = node, dict(uniques)
        self._group = node.args.get("group")
        joins = node.args.get("joins") or ()
        sides = {join.side.upper() for join in joins}
        if "FULL" in sides:
            # Of each side a row without the other: NULL in what is unique in a subquery, too.
            self._uniques = {
                alias: each if _is_table(node, alias) else () for alias, each in uniques.items()
            }
        where = [node.args["where"].this] if node.args.get("where") else []
        inner = [join.args["on"] for join in joins if join.args.get("on") and not join.side]
        self._equal = [pair for each in (*inner, *where) for pair in _equal(each)]
        # Where a later join adds rows without these tables, no condition of theirs is met.
        always = where if sides & {"RIGHT", "FULL"} else [*inner, *where]
        self._constant = [column for each in always for column in _constants(each)]
        self._matched = [pair for join in joins for pair in _matched(join)]

    def holds(self, by: Sequence[exp.Expr]) -> bool:
        """Return whether rows that agree in all of these are one row."""
        # A collation orders a text, and leaves equal what is equal.
        by = [each.this if isinstance(each, exp.Collate) else each for each in by]
        known = {(each.table, each.name) for each in by if isinstance(each, exp.Column)}
        known, aliases = self._determined(known)
        if self._group is not None:
            return all(
                each in by
                or (isinstance(each, exp.Column) and (_at(each) in known or each.table in aliases))
                for each in self._group.expressions
            )
        return aliases == self._uniques.keys()

    def holds_in_group(self, by: Sequence[exp.Expr]) -> bool:
        """Return whether rows of one group that agree in all of these are one row."""
        grouped = self._group.expressions if self._group is not None else []
        named = [each.this if isinstance(each, exp.Collate) else each for each in by]
        known = {at for each in (*named, *grouped) if (at := _at(each)) is not None}
        _, aliases = self._determined(known)
        return aliases == self._uniques.keys()

    def uniques(self) -> Uniques:
        """Return sets of the SELECT's columns, in each of which no two of its rows agree."""
        outputs = {each.alias_or_name: each.unalias() for each in self._select.expressions}
        found = {frozenset(outputs)} if self._select.args.get("distinct") else set()
        grouped = self._group.expressions if self._group else []
        named = [
            n for n, each in outputs.items() if isinstance(each, exp.Column) or each in grouped
        ]
        if self.holds([outputs[name] for name in named]):
            for order in (named, named[::-1]):
                found.add(self._least(order, outputs))
        for name, each in outputs.items():
            if isinstance(each, exp.Window) and isinstance(each.this, exp.RowNumber):
                by = each.args.get("partition_by") or ()
                if all(part in outputs.values() for part in by):
                    parts = {n for n, output in outputs.items() if output in by}
                    found.add(frozenset({name, *parts}))
        return tuple(sorted(found, key=sorted))

    def _least(self, names: Sequence[str], outputs: Mapping[str, exp.Expr]) -> frozenset[str]:
        """Return the columns without those that the proof does not need."""
        kept = list(names)
        for name in names:
            fewer = [each for each in kept if each != name]
            if self.holds([outputs[each] for each in fewer]):
                kept = fewer
        return frozenset(kept)

    def _determined(self, given: set[Column]) -> tuple[set[Column], set[str]]:
        """Return the columns, and the tables, that have one value where the given ones have."""
        known, aliases = given | set(self._constant), set[str]()
        while True:
            size = len(known), len(aliases)
            for one, other in self._equal:
                if one in known or other in known:
                    known |= {one, other}
            for alias, uniques in self._uniques.items():
                joined = {a[1] for a, b in self._matched if a[0] == alias and b in known}
                there = {name for table, name in known if table == alias}
                if any(unique <= joined | there for unique in uniques):
                    aliases.add(alias)
            known |= {each for pair in self._equal for each in pair if each[0] in aliases}
            known |= {each for pair in self._matched for each in pair if each[0] in aliases}
            if (len(known), len(aliases)) == size:
                return known, aliases


def _conjuncts(node: exp.Expr) -> Iterator[exp.Expr]:
    if isinstance(node, exp.And):
        yield from _conjuncts(node.this)
        yield from _conjuncts(node.expression)
    elif isinstance(node, exp.Paren):
        yield from _conjuncts(node.this)
    else:
        yield node


def _equal(node: exp.Expr) -> Iterator[tuple[Column, Column]]:
    for each in _conjuncts(node):
        if isinstance(each, exp.EQ):
            sides = each.this, each.expression
            if isinstance(sides[0], exp.Column) and isinstance(sides[1], exp.Column):
                yield (sides[0].table, sides[0].name), (sides[1].table, sides[1].name)


def _constants(node: exp.Expr) -> Iterator[Column]:
    for each in _conjuncts(node):
        if isinstance(each, exp.EQ):
            for one, other in ((each.this, each.expression), (each.expression, each.this)):
                if isinstance(one, exp.Column) and isinstance(other, exp.Literal):
                    yield one.table, one.name


def _matched(join: exp.Join) -> Iterator[tuple[Column, Column]]:
    """Yield an outer join's equalities: a column that may be missing, and the one of the other.

    If the first is unique, the second determines its row: at most one matches. Not the other way:
    where none matches, the first is NULL, for any second.
    """
    on, side = join.args.get("on"), join.side.upper()
    for one, other in _equal(on) if on and side in {"LEFT", "RIGHT"} else ():
        if (one[0] == join.alias_or_name) != (other[0] == join.alias_or_name):
            is_right = one[0] == join.alias_or_name
            yield (one, other) if is_right == (side == "LEFT") else (other, one)


def _is_table(node: exp.Select, alias: str) -> bool:
    sources = [node.args["from_"].this, *(join.this for join in node.args["joins"])]
    return any(isinstance(each, exp.Table) and each.alias_or_name == alias for each in sources)


def _at(node: exp.Expr) -> Column | None:
    return (node.table, node.name) if isinstance(node, exp.Column) else None
