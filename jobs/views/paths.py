"""How rows of a table lead to a view's anchor by equal columns, and back.

Pure. A probe (`jobs.views.lineage`) is a join without negation. What is used of it here are its
equalities of columns, one after another: what they lead to is a superset of what the probe finds.

Forward, from changed rows, that is a superset of the affected anchors. Backward, from the affected
anchors, it is a superset of the rows on which the view's rows with these anchors depend: a row that
is not among them changes only rows with other anchors if it is deleted. So all such rows may be
left out, one after another: with fewer rows a probe finds fewer anchors, never others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from sqlglot import exp

from lockstep.jobs.views.types import COMPARED, FLOATS, INEXACT, INTEGERS, PgType, of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lockstep.jobs.views.lineage import Probe
    from lockstep.sinks.contract import Version

# Floats are not compared here: 0.0 and -0.0 are equal, and have different bytes. Nor is what a
# mirror's column may not hold: a query that reads such a value must fail.
_EXACT: Final = COMPARED - FLOATS - INEXACT


class Hop(NamedTuple):
    """From rows of a table to those of the next, whose column has an equal value."""

    column: str
    table: str
    other: str


class Path(NamedTuple):
    """The hops from a table to the last one, whose column `end` has the values of an anchor."""

    anchor: str
    hops: tuple[Hop, ...]
    end: str


class Route(NamedTuple):
    """The shortest path from one occurrence of a table to each of the anchors that it leads to."""

    table: str
    paths: tuple[Path, ...]


def route(probe: Probe, versions: Mapping[str, Version], columns: Mapping[str, PgType]) -> Route:
    """Return the paths of a probe to anchors among a view's columns."""
    tables = {probe.alias: probe.table, **probe.joined}
    kinds = {
        alias: {each.name: of(each) for each in versions[table].columns}
        for alias, table in tables.items()
    }

    def equal(one: exp.Column, other: exp.Column) -> bool:
        return _are_comparable(kinds[one.table][one.name], kinds[other.table][other.name])

    pairs = [pair for node in probe.conditions if (pair := _pair(node)) and equal(*pair)]
    edges = [*pairs, *(pair[::-1] for pair in pairs)]
    found = []
    for name, node in probe.anchors.items():
        column = node.unnest()
        if not isinstance(column, exp.Column):
            continue
        kind = kinds[column.table][column.name]
        if kind.name not in _EXACT or kind.spark != columns[name].spark:
            continue
        hops = _shortest(probe.alias, column.table, edges, tables)
        if hops is not None:
            found.append(Path(name, hops, column.name))
    return Route(probe.table, tuple(found))


def read_by(routes: Iterable[Route]) -> dict[str, tuple[str, ...]]:
    """Return the columns by which rows of each table are looked up, forward or backward."""
    found: dict[str, set[str]] = {}
    for each in routes:
        for path in each.paths:
            table = each.table
            for hop in path.hops:
                found.setdefault(table, set()).add(hop.column)
                found.setdefault(hop.table, set()).add(hop.other)
                table = hop.table
            found.setdefault(table, set()).add(path.end)
    return {table: tuple(sorted(columns)) for table, columns in sorted(found.items())}


def _pair(node: exp.Expr) -> tuple[exp.Column, exp.Column] | None:
    """Return the columns of two occurrences whose equality this is."""
    node = node.unnest()
    if not isinstance(node, exp.EQ):
        return None
    one, other = node.this.unnest(), node.expression.unnest()
    if not (isinstance(one, exp.Column) and isinstance(other, exp.Column)):
        return None
    return (one, other) if one.table != other.table else None


def _are_comparable(one: PgType, other: PgType) -> bool:
    """Return whether values of these types are equal if and only if Arrow's are."""
    if one.name not in _EXACT or other.name not in _EXACT:
        return False
    are_integers = {one.name, other.name} <= INTEGERS.keys() and not (one.mask or other.mask)
    return are_integers or one.spark == other.spark


def _shortest(
    first: str,
    last: str,
    edges: list[tuple[exp.Column, exp.Column]],
    tables: Mapping[str, str],
) -> tuple[Hop, ...] | None:
    """Return the fewest hops from one occurrence to another; None if there are none."""
    reached: dict[str, tuple[Hop, ...]] = {first: ()}
    left = [first]
    for at in left:
        for one, other in edges:
            if one.table == at and other.table not in reached:
                hop = Hop(one.name, tables[other.table], other.name)
                reached[other.table] = (*reached[at], hop)
                left.append(other.table)
    return reached.get(last)
