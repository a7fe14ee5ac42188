"""Which rows of a view a changed row of a table can affect.

Pure. A query is flattened into its tables' occurrences and the conditions between them. A row of
the view is made of rows that are joined by these; so if a row of a table changes, the view's rows
that may change have the anchor (some of the view's columns) of the rows that it joins to: with its
old values in the old state, or with its new values in the new state. That is one query for each
occurrence, without aggregates, windows and most conditions. It may return too many anchors, never
too few:

- an outer join or a subquery is a group of occurrences of its own. Its conditions are used only for
  its own changes, and then as those of an inner join: rows without a match have the same anchor;
- above an aggregate only the groups' expressions are known, above a window function only what all
  windows partition by: a changed row may affect all rows of its group or partition;
- a condition that is not understood is left out;
- a column of a UNION has the type that it has there, so that an expression of it has its value;
- a RIGHT JOIN is a LEFT JOIN of its right side, and a FULL JOIN's rows are those of both.

Where a changed row is joined to the anchor by no equality, every row may be affected.
"""

from __future__ import annotations

from itertools import count, product
from typing import TYPE_CHECKING, Final, NamedTuple

from sqlglot import exp

from cdc.events import table_name
from lockstep.jobs.views.translating import has_aggregate
from lockstep.jobs.views.types import COMPARED, FLOATS
from lockstep.jobs.views.values import CAST_TO, CONVERTED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from lockstep.jobs.views.types import PgType

# How many combinations of the queries of UNIONs, and of the sides of FULL JOINs, are flattened.
_MOST_FLATS: Final = 64
_TOO_MANY: Final = f"its UNIONs and FULL JOINs have more than {_MOST_FLATS} combinations"
_SIMPLE: Final = (
    exp.Column, exp.Literal, exp.Null, exp.Boolean, exp.Paren, exp.And, exp.Or, exp.Not, exp.Is,
    exp.EQ, exp.NEQ, exp.LT, exp.LTE, exp.GT, exp.GTE, exp.NullSafeEQ, exp.Between, exp.In,
    exp.Identifier, exp.Collate,
)  # fmt: skip

Group = tuple[int, ...]  # a path of outer joins and subqueries; () is the query itself
Outputs = dict[str, "exp.Expr | None"]  # a column's expression over occurrences, if it is known


class NoLineageError(Exception):
    """A query is computed completely, for this reason."""


class JoinCondition(NamedTuple):
    """A condition over occurrences, of a group."""

    node: exp.Expr
    group: Group
    tables: frozenset[str]  # the occurrences that it names


class Flat(NamedTuple):
    """A query, or one of a UNION's, without its nesting."""

    occurrences: dict[str, tuple[str, Group]]  # by alias: the table and its group
    conditions: tuple[JoinCondition, ...]
    outputs: Outputs


class Probe(NamedTuple):
    """How the anchors are found that changes of one occurrence affect."""

    alias: str
    table: str
    joined: dict[str, str]  # the other occurrences' tables, by alias
    conditions: tuple[exp.Expr, ...]
    anchors: dict[str, exp.Expr]


class Lineage(NamedTuple):
    """A view's anchor, and the probes of its tables."""

    anchor: tuple[str, ...]
    probes: tuple[Probe, ...]
    every: dict[str, str]  # tables whose changes may affect every row, with the reason


def lineage(query: exp.Query, key: Sequence[str], columns: Mapping[str, PgType]) -> Lineage:
    """Return how changed rows lead to a view's rows; raise NoLineageError if they do not.

    `columns`: the view's, with their types.
    """
    flats = _Flattening().query(query, {}, {})
    names = list(flats[0].outputs)
    known = [name for name in names if all(_is_known(flat, name) for flat in flats)]
    found = [name for name in known if _is_compared(columns[name])]
    anchor = tuple(name for name in key if name in known) or tuple(found[:1])
    if not anchor:
        raise NoLineageError(
            "none of its columns is one of a table, a group and every window's partition at once,"
            " and of a type whose equal values are the same"
        )
    probes, every = [], dict[str, str]()
    for flat in flats:
        for alias, (table, _) in flat.occurrences.items():
            probe = _probe(flat, alias, anchor)
            if probe is None:
                every[table] = f"no equality joins {table} to {', '.join(anchor)}"
            else:
                probes.append(probe)
    return Lineage(anchor, tuple(probes), every)


def _is_compared(kind: PgType) -> bool:
    """Return whether a literal finds all equal values: not 0 of a float, which has -0, too."""
    return bool(kind.mask) or kind.name in COMPARED - FLOATS


def _is_known(flat: Flat, name: str) -> bool:
    """Return whether a column is known, and of tables of the query itself: never of a match."""
    node = flat.outputs[name]
    if node is None or not node.find(exp.Column):
        return False
    return all(flat.occurrences[each][1] == () for each in _names(node))


def _probe(flat: Flat, alias: str, anchor: Sequence[str]) -> Probe | None:
    """Return the probe of one occurrence; None if its changes may affect every row."""
    anchors = {name: _expression(flat, name) for name in anchor}
    ends = {each for node in anchors.values() for each in _names(node)}
    used = _used(flat, alias)
    neighbours = {alias: set[str]()}
    for condition in used:
        for each in condition.tables:
            neighbours.setdefault(each, set()).update(condition.tables - {each})
    reached, left = {alias}, [alias]
    while left:
        for each in neighbours[left.pop()] - reached:
            reached.add(each)
            left.append(each)
    if not ends <= reached:
        return None
    _prune(reached, neighbours, {alias, *ends})
    conditions = [each.node for each in used if each.tables <= reached]
    joined = {each: flat.occurrences[each][0] for each in reached if each != alias}
    return Probe(alias, flat.occurrences[alias][0], joined, tuple(conditions), anchors)


def _prune(reached: set[str], neighbours: Mapping[str, set[str]], kept: set[str]) -> None:
    """Remove occurrences that lead nowhere: without them there may only be more anchors."""
    while True:
        leaves = {
            each for each in reached - kept if len(neighbours.get(each, set()) & reached) <= 1
        }
        if not leaves:
            return
        reached -= leaves


def _used(flat: Flat, alias: str) -> list[JoinCondition]:
    """Return the conditions that hold for a row of an occurrence and all that it is joined to."""
    own = flat.occurrences[alias][1]
    groups = {own[:length] for length in range(len(own) + 1)}
    used = list[JoinCondition]()
    while True:
        found = [each for each in flat.conditions if each.group in groups]
        found = [each for each in found if _holds(flat, each, groups)]
        more = {
            flat.occurrences[name][1][:length]
            for each in found
            for name in each.tables
            for length in range(len(flat.occurrences[name][1]) + 1)
        }
        used = found
        if more <= groups:
            return used
        groups |= more


def _holds(flat: Flat, condition: JoinCondition, groups: set[Group]) -> bool:
    """Return whether a condition is true of every joined row that has its tables' rows.

    One that names a table of another outer join is true of rows without a match, too, unless it is
    an equality of columns.
    """
    for each in condition.tables:
        group = flat.occurrences[each][1]
        if condition.group[: len(group)] == group:
            continue
        sides = condition.node.this, condition.node.args.get("expression")
        is_join = isinstance(condition.node, exp.EQ) and all(
            isinstance(side, exp.Column) for side in sides
        )
        if not (is_join and condition.group in groups and len(condition.group) > 0):
            return False
    return True


def _expression(flat: Flat, name: str) -> exp.Expr:
    found = flat.outputs[name]
    assert found is not None, "an anchor is known"
    return found


class _Joined(NamedTuple):
    """A source of a SELECT, and how it is joined to those before it."""

    alias: str
    flats: list[Flat]
    on: exp.Expr | None
    sides: tuple[str, ...]  # LEFT, RIGHT, none; both of a FULL JOIN


class _Flattening:
    """Flattens one query; numbers its occurrences and groups."""

    def __init__(self) -> None:
        self._numbers = count()

    def query(
        self, node: exp.Expr, ctes: Mapping[str, exp.CTE], outer: Mapping[str, Outputs]
    ) -> list[Flat]:
        """Return the query's parts; `outer` has the columns of the queries around it."""
        known = dict(ctes)
        if with_ := node.args.get("with_"):
            for cte in with_.expressions:
                known[cte.alias] = cte
        if isinstance(node, exp.Subquery):
            return self.query(node.this, known, outer)
        if isinstance(node, exp.SetOperation):
            left = self.query(node.this, known, outer)
            right = self.query(node.expression, known, outer)
            names = list(left[0].outputs)
            # Of a subquery of which a copy was translated they are not known, nor are its columns.
            kinds = node.meta.get(CONVERTED, (None, None))
            return [
                _named(_converted(flat, kinds[at]), names)
                for at, side in enumerate((left, right))
                for flat in side
            ]
        assert isinstance(node, exp.Select), "others are refused before"
        return self._select(node, known, outer)

    def _select(
        self, node: exp.Select, ctes: Mapping[str, exp.CTE], outer: Mapping[str, Outputs]
    ) -> list[Flat]:
        sources = list[_Joined]()
        if from_ := node.args.get("from_"):
            flats = self._source(from_.this, ctes, outer)
            sources.append(_Joined(from_.this.alias, flats, None, ("",)))
        for join in node.args.get("joins") or ():
            flats = self._source(join.this, ctes, outer)
            side = join.side.upper()
            sides = ("LEFT", "RIGHT") if side == "FULL" else (side,)
            sources.append(_Joined(join.this.alias, flats, join.args.get("on"), sides))
        choices = list(product(*(product(each.flats, each.sides) for each in sources)))
        if len(choices) > _MOST_FLATS:
            raise NoLineageError(_TOO_MANY)
        return [
            flat for chosen in choices for flat in self._joined(node, sources, chosen, ctes, outer)
        ]

    def _joined(
        self,
        node: exp.Select,
        sources: Sequence[_Joined],
        chosen: Sequence[tuple[Flat, str]],
        ctes: Mapping[str, exp.CTE],
        outer: Mapping[str, Outputs],
    ) -> list[Flat]:
        made = _Made(dict(outer))
        for (alias, _, on, _), (flat, side) in zip(sources, chosen, strict=True):
            group: Group = (next(self._numbers),) if side else ()
            nulled = {*flat.occurrences} if side == "LEFT" else {*made.occurrences}
            if side == "RIGHT":
                made.lower(group)
            made.add(alias, flat, group if side == "LEFT" else ())
            made.conditions(on, group)
            if side:
                made.match(on, nulled)
        if where := node.args.get("where"):
            made.conditions(where.this, ())
        outputs = _outputs(node, made)
        flats = [made]
        for place in _subqueries(node):
            flats = [
                extended for each in flats for extended in self._with_subquery(each, place, ctes)
            ]
            if len(flats) > _MOST_FLATS:
                raise NoLineageError(_TOO_MANY)
        return [Flat(each.occurrences, tuple(each.found), outputs) for each in flats]

    def _with_subquery(
        self, made: _Made, place: exp.Expr, ctes: Mapping[str, exp.CTE]
    ) -> Iterator[_Made]:
        query = place.args["query"] if isinstance(place, exp.In) else place
        query = query.this if isinstance(query, exp.Exists) else query
        for flat in self.query(query, ctes, made.columns):
            each, group = made.copy(), (next(self._numbers),)
            each.add("", flat, group)
            if isinstance(place, exp.In):
                each.conditions(_membership(place, flat, made), group, substitute=False)
            yield each

    def _source(
        self, node: exp.Expr, ctes: Mapping[str, exp.CTE], outer: Mapping[str, Outputs]
    ) -> list[Flat]:
        if isinstance(node, exp.Subquery):
            return [_renamed(flat, node) for flat in self.query(node, ctes, outer)]
        assert isinstance(node, exp.Table), "others are refused before"
        if not node.db and (cte := ctes.get(node.name)):
            # A query of WITH sees those before it only.
            before = dict(ctes)
            del before[node.name]
            flats = [_renamed(flat, cte) for flat in self.query(cte.this, before, outer)]
            return [_renamed(flat, node) for flat in flats]
        alias = f"t{next(self._numbers)}"
        return [Flat({alias: (table_name(node.db, node.name), ())}, (), _Columns(alias))]


class _Columns(dict[str, "exp.Expr | None"]):
    """The columns of an occurrence: any name."""

    def __init__(self, alias: str) -> None:
        super().__init__()
        self._alias = alias

    def __missing__(self, name: str) -> exp.Expr:
        return exp.Column(
            this=exp.to_identifier(name, quoted=True),
            table=exp.to_identifier(self._alias, quoted=True),
        )


class _Made:
    """A SELECT's sources and conditions so far."""

    def __init__(self, columns: dict[str, Outputs]) -> None:
        self.columns = columns
        self.occurrences = dict[str, tuple[str, Group]]()
        self.found = list[JoinCondition]()
        # Columns that outer joins may leave NULL, each with one that it equals where it is not.
        self._equals = list[tuple[exp.Column, exp.Column]]()

    def copy(self) -> _Made:
        made = _Made(dict(self.columns))
        made.occurrences, made.found = dict(self.occurrences), list(self.found)
        made._equals = list(self._equals)
        return made

    def add(self, alias: str, flat: Flat, group: Group) -> None:
        """Add a source, below a group."""
        if alias:
            self.columns[alias] = flat.outputs
        for name, (table, own) in flat.occurrences.items():
            self.occurrences[name] = table, group + own
        self.found += [each._replace(group=group + each.group) for each in flat.conditions]

    def lower(self, group: Group) -> None:
        """Put all sources so far below a group."""
        for name, (table, own) in self.occurrences.items():
            self.occurrences[name] = table, group + own
        self.found = [each._replace(group=group + each.group) for each in self.found]

    def match(self, on: exp.Expr | None, nulled: AbstractSet[str]) -> None:
        """Add the equal columns of an outer join, which may have no row of these occurrences."""
        for each in _conjuncts(on):
            if not isinstance(each, exp.EQ):
                continue
            sides = [self.substituted(side) for side in (each.this, each.expression)]
            for one, other in (sides, sides[::-1]):
                if not (isinstance(one, exp.Column) and isinstance(other, exp.Column)):
                    continue
                if one.table in nulled and other.table not in nulled:
                    self._equals.append((one, other))

    def _without_matches(self, node: exp.Expr) -> exp.Expr:
        """Return coalesce() without columns that equal another of its columns, or are NULL."""
        if not isinstance(node, exp.Coalesce):
            return node
        given: list[exp.Expr] = [node.this, *node.expressions]
        for one, other in self._equals:
            if one in given and other in given:
                given.remove(one)
        if len(given) == 1:
            return given[0]
        return exp.Coalesce(this=given[0], expressions=given[1:])

    def conditions(self, node: exp.Expr | None, group: Group, *, substitute: bool = True) -> None:
        """Add what is understood of a condition."""
        for each in _conjuncts(node):
            made = self.substituted(each) if substitute else each
            if made is None or not (_is_simple(each) or _is_simple(made)):
                continue
            if names := frozenset(_names(made)):
                self.found.append(JoinCondition(made, group, names))

    def substituted(self, node: exp.Expr) -> exp.Expr | None:
        """Return an expression over occurrences; None if it has something that is not known."""
        if node.find(exp.Query, exp.Exists, exp.AggFunc, exp.Window):
            return None
        made = node.copy()
        for column in list(made.find_all(exp.Column)):
            outputs = self.columns.get(column.table)
            found = None if outputs is None else outputs[column.name]
            if found is None:
                return None
            if column is made:
                return found.copy()
            column.replace(
                exp.Paren(this=found.copy()) if not isinstance(found, exp.Column) else found.copy()
            )
        return made.transform(self._without_matches, copy=False)


def _outputs(node: exp.Select, made: _Made) -> Outputs:
    """Return the columns of a SELECT that are known."""
    group = node.args.get("group")
    is_grouped = (
        group is not None or node.args.get("having") or any(map(has_aggregate, node.expressions))
    )
    by = list(group.expressions) if group else []
    windows = [
        each.args.get("partition_by") or [] for part in node.expressions for each in _windows(part)
    ]
    outputs: Outputs = {}
    for each in node.expressions:
        inner = each.unalias()
        is_known = (not is_grouped or inner in by) and all(inner in part for part in windows)
        outputs[each.alias_or_name] = made.substituted(inner) if is_known else None
    return outputs


def _windows(node: exp.Expr) -> Iterator[exp.Window]:
    if isinstance(node, exp.Query):
        return
    if isinstance(node, exp.Window):
        yield node
    for each in node.iter_expressions():
        yield from _windows(each)


def _subqueries(node: exp.Select) -> Iterator[exp.Expr]:
    """Yield the subqueries in a SELECT's expressions: IN, EXISTS, or a value's."""
    parts = [*node.expressions, *(node.args.get(p) for p in ("where", "having", "group"))]
    parts += [join.args.get("on") for join in node.args.get("joins") or ()]
    for part in parts:
        if part is not None:
            yield from _subqueries_in(part)


def _subqueries_in(node: exp.Expr) -> Iterator[exp.Expr]:
    if isinstance(node, exp.Query | exp.Exists):
        yield node
        return
    if isinstance(node, exp.In) and node.args.get("query"):
        yield node
        yield from _subqueries_in(node.this)
        return
    for each in node.iter_expressions():
        yield from _subqueries_in(each)


def _membership(node: exp.In, flat: Flat, made: _Made) -> exp.Expr | None:
    """Return the condition under which a subquery's row may change what IN returns.

    The values are equal; or one is NULL, which makes IN neither true nor false.
    """
    inner, value = next(iter(flat.outputs.values())), made.substituted(node.this)
    if inner is None or value is None:
        return None
    equal: exp.Expr = exp.EQ(this=value.copy(), expression=inner.copy())
    if isinstance(node.find_ancestor(exp.Where, exp.Select), exp.Where) and not _is_negated(node):
        return equal
    for each in (value, inner):
        null = exp.Is(this=each.copy(), expression=exp.Null())
        equal = exp.Or(this=equal, expression=null)
    return exp.Paren(this=equal)


def _is_negated(node: exp.Expr) -> bool:
    """Return whether it is below anything other than AND in its WHERE."""
    above = node.parent
    while above is not None and not isinstance(above, exp.Where):
        if not isinstance(above, exp.And | exp.Paren):
            return True
        above = above.parent
    return False


def _conjuncts(node: exp.Expr | None) -> Iterator[exp.Expr]:
    if node is None:
        return
    if isinstance(node, exp.And):
        yield from _conjuncts(node.this)
        yield from _conjuncts(node.expression)
    elif isinstance(node, exp.Paren) and isinstance(node.this, exp.And | exp.Paren):
        yield from _conjuncts(node.this)
    else:
        yield node


def _is_simple(node: exp.Expr) -> bool:
    return all(isinstance(part, _SIMPLE) for part in node.walk())


def _names(node: exp.Expr) -> Iterable[str]:
    return {each.table for each in node.find_all(exp.Column)}


def _renamed(flat: Flat, node: exp.Expr) -> Flat:
    """Return a source with the columns' names that its alias gives."""
    alias = node.args.get("alias")
    names = [each.name for each in alias.columns] if isinstance(alias, exp.TableAlias) else []
    return _named(flat, names) if names else flat


def _converted(flat: Flat, kinds: Sequence[PgType | None] | None) -> Flat:
    """Return a query of a UNION with the types that its columns have in that, None if their own."""
    if kinds is None:
        return flat._replace(outputs=dict.fromkeys(flat.outputs))
    outputs = {
        name: node if node is None or kind is None else _cast(node, kind)
        for (name, node), kind in zip(flat.outputs.items(), kinds, strict=True)
    }
    return flat._replace(outputs=outputs)


def _cast(node: exp.Expr, kind: PgType) -> exp.Cast:
    made = exp.Cast(this=node, to=exp.DataType(this=exp.DType.USERDEFINED, kind=kind.spark))
    made.meta[CAST_TO] = kind
    return made


def _named(flat: Flat, names: Sequence[str]) -> Flat:
    return flat._replace(outputs=dict(zip(names, flat.outputs.values(), strict=True)))
