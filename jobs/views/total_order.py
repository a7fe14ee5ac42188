"""Whether an order leaves no two rows of a query in either order: what row_number() needs.

Pure. By the keys of the query's tables and the equalities between their columns: what a set of
columns determines, as functional dependencies do. Where nothing proves it, the answer is no.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlglot import exp

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    Column = tuple[str, str]


class Proof:
    """What determines the rows of one SELECT; `keys`: unique columns, by alias."""

    def __init__(self, node: exp.Select, keys: Mapping[str, frozenset[str] | None]) -> None:
        self._keys = keys
        self._group = node.args.get("group")
        where = node.args.get("where")
        ons = [join.args["on"] for join in node.args.get("joins") or () if join.args.get("on")]
        inner = [join.args["on"] for join in node.args.get("joins") or ()
                 if join.args.get("on") and not join.side]  # fmt: skip
        # In an outer join's ON an equality still makes at most one row match, if it is a key's.
        self._matched = [pair for on in ons for pair in _equal(on)]
        self._equal = [
            pair for each in (*inner, *([where.this] if where else [])) for pair in _equal(each)
        ]
        self._constant = [
            column
            for each in (*inner, *([where.this] if where else []))
            for column in _constants(each)
        ]

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
        return aliases == self._keys.keys()

    def _determined(self, given: set[Column]) -> tuple[set[Column], set[str]]:
        """Return the columns, and the tables, that have one value where the given ones have."""
        known, aliases = given | set(self._constant), set[str]()
        while True:
            size = len(known), len(aliases)
            for one, other in self._equal:
                if one in known or other in known:
                    known |= {one, other}
            for alias, key in self._keys.items():
                joined = {a[1] for a, b in _both(self._matched) if a[0] == alias and b in known}
                there = {name for table, name in known if table == alias}
                if key is not None and alias not in aliases and key <= joined | there:
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


def _both(pairs: Iterable[tuple[Column, Column]]) -> Iterator[tuple[Column, Column]]:
    for one, other in pairs:
        yield one, other
        yield other, one


def _at(node: exp.Expr) -> Column | None:
    return (node.table, node.name) if isinstance(node, exp.Column) else None
