"""What maintains a view: its query in each state of the tables, and the queries for its keys.

Pure: from the configuration and the table versions.
"""

from __future__ import annotations

import re
import zlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.config.views import PythonView
from cdc.errors import ConfigError
from lockstep.jobs.views import ties, types
from lockstep.jobs.views.code import Task
from lockstep.jobs.views.definitions import SCHEMA, Definition
from lockstep.jobs.views.expressions import Expressions
from lockstep.jobs.views.firsts import Firsts, firsts
from lockstep.jobs.views.lineage import Lineage, NoLineageError, Probe, lineage
from lockstep.jobs.views.parsing import (
    PUBLIC,
    column_names,
    named_code,
    named_views,
    resolved,
    tables,
)
from lockstep.jobs.views.paths import Route, route
from lockstep.jobs.views.ranking import ranking
from lockstep.jobs.views.refusing import UnsupportedError
from lockstep.jobs.views.translating import Query, Translator, relation
from lockstep.jobs.views.types import COMPARED, FLOATS, of
from lockstep.jobs.views.values import ColumnScope, coerced, quoted
from lockstep.sinks.contract import Version

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sqlglot import exp

    from cdc.config.views import View

# The states of the tables: before and after the cut, and the rows that only one of them has.
OLD: Final = "old"
NEW: Final = "new"
REMOVED: Final = "removed"
ADDED: Final = "added"
# A name has no blank.
_SELECT: Final = re.compile(r"\s")


class AffectedQuery(NamedTuple):
    """A query for the anchors that changes of a table affect."""

    table: str
    changed: str  # the state with the changed rows: REMOVED or ADDED
    sql: str


class Input(NamedTuple):
    """What a parameter of a view in Python gets: Spark's SQL, in each state of the tables."""

    name: str
    new: str
    old: str


class CodePlan(NamedTuple):
    """What makes the rows of a view in Python."""

    task: Task
    inputs: tuple[Input, ...]


class ViewPlan(NamedTuple):
    """One view over tables of certain versions."""

    name: str
    key: tuple[str, ...]
    version: Version
    new: str  # Spark's SQL, of tables after the cut
    old: str  # and before it
    columns: Mapping[str, types.PgType]
    tables: frozenset[str]
    anchor: tuple[str, ...]
    affected: tuple[AffectedQuery, ...]
    full_for: Mapping[str, str]  # tables whose changes need a full recompute, and why
    is_strict: bool
    definition: Definition
    made: tuple[ViewPlan, ...] = ()  # views in Python that it reads as tables
    code: CodePlan | None = None  # of a view in Python: `new` and `old` read what that makes
    is_masked: bool = False  # it may read masked values
    routes: tuple[Route, ...] = ()  # of all tables' occurrences; none if Python makes rows of it
    column_names: frozenset[str] = frozenset()  # of all tables' columns that it reads
    firsts: Firsts | None = None  # if its rows are the first ones of each key
    ranked: Ranked | None = None  # if its rows are the first ones of all
    # What Postgres is asked for its rows: the queries that it names, in order, and last its own.
    asked: Mapping[str, str] = MappingProxyType({})

    @property
    def is_of_mirrors(self) -> bool:
        """Whether Postgres can't answer it: Python makes rows of it, or values are masked."""
        return self.code is not None or bool(self.made) or self.is_masked


class Ranked(NamedTuple):
    """Of which rows a view's are the first ones, and which those are."""

    all: ViewPlan  # of no store, with a key that may occur more than once
    relation: str  # the temporary view that has them
    first: str  # Spark's SQL, of it


class _Query(NamedTuple):
    """A query over tables, and how their changes lead to its anchor."""

    new: Query
    old: Query
    tables: frozenset[str]
    anchor: tuple[str, ...]
    affected: tuple[AffectedQuery, ...]
    full_for: Mapping[str, str]
    made: tuple[ViewPlan, ...]
    is_masked: bool
    routes: tuple[Route, ...]
    column_names: frozenset[str]
    firsts: Firsts | None
    query: exp.Query
    asked: Mapping[str, str]


def plan(
    name: str,
    views: Mapping[str, View],
    versions: Mapping[str, Version],
    above: tuple[str, ...] = (),
) -> ViewPlan:
    """Return the plan of a view; raise ConfigError for what is wrong or not supported in it.

    `above`: the views in Python that read it.
    """
    view = views[name]
    if name in above:
        raise ConfigError(
            f"views {' -> '.join((*above, name))} are made of each other",
            hint="one of them must name tables only",
        )
    made = _of_code if isinstance(view, PythonView) else _of_sql
    found = made(name, views, versions, above)
    if found.is_strict and found.full_for:
        table, why = next(iter(found.full_for.items()))
        raise UnsupportedError(
            f"refresh: strict with changes of {table} ({why})",
            "join it by an equality of columns, or use refresh: auto",
        )
    return found


def _of_sql(
    name: str,
    views: Mapping[str, View],
    versions: Mapping[str, Version],
    above: tuple[str, ...],
) -> ViewPlan:
    view = views[name]
    found = _query(name, _sqls(views), view.key, views, versions, above)
    _check(name, view, found.new.columns)
    version = _version(name, view, found.new.columns, found.tables, versions)
    definition = _definition(
        # Views without code keep the fingerprints that stores have.
        (version.key, found.new.sql, found.new.columns, *_fingerprints(found.made)),
        _declared(name, views),
        version,
    )
    made = _planned(name, view.key, version, found, definition, is_strict=view.refresh == "strict")
    return made._replace(ranked=_ranked(made, found, versions) if found.full_for else None)


def _planned(
    name: str,
    key: tuple[str, ...],
    version: Version,
    found: _Query,
    definition: Definition,
    *,
    is_strict: bool,
) -> ViewPlan:
    """Return the plan of a query."""
    return ViewPlan(
        name,
        key,
        version,
        found.new.sql,
        found.old.sql,
        found.new.columns,
        found.tables,
        found.anchor,
        found.affected,
        found.full_for,
        is_strict,
        definition,
        found.made,
        is_masked=found.is_masked,
        routes=found.routes,
        column_names=found.column_names,
        firsts=found.firsts,
        asked=found.asked,
    )


def _of_code(
    name: str,
    views: Mapping[str, View],
    versions: Mapping[str, Version],
    above: tuple[str, ...],
) -> ViewPlan:
    view = views[name]
    assert isinstance(view, PythonView), "checked before"
    columns = {each: types.named(kind) for each, kind in view.columns.items()}
    _check(name, view, columns)
    by = view.by
    if view.is_transform and not by:
        (read,) = view.reads.values()
        by = _key_of(read, views, versions)
    parts = {
        parameter: _query(
            f"{name}.{parameter}",
            _sqls(views) | {f"{name}.{parameter}": _select(read)},
            by,
            views,
            versions,
            (*above, name),
        )
        for parameter, read in view.reads.items()
    }
    for parameter, part in parts.items():
        _check_by(f"view {name}: {parameter}", view, by, part, columns)
    named = frozenset(table for part in parts.values() for table in part.tables)
    full_for = {table: why for part in parts.values() for table, why in _full_for(part, by).items()}
    inputs = tuple(Input(each, part.new.sql, part.old.sql) for each, part in parts.items())
    task = Task(name, view.source, tuple(parts), by, view.is_transform)
    made = tuple({each.name: each for part in parts.values() for each in part.made}.values())
    version = _version(name, view, columns, named, versions)
    new, old = (
        f"SELECT * FROM {quoted(relation(version.name, state))}"  # noqa: S608 - quoted
        for state in (NEW, OLD)
    )
    affected = (each for part in parts.values() for each in part.affected)
    return ViewPlan(
        name,
        view.key,
        version,
        new,
        old,
        columns,
        named,
        by,
        tuple(each for each in affected if each.table not in full_for),
        full_for,
        view.refresh == "strict",
        _definition(
            (view.key, columns, task, inputs, _fingerprints(made)),
            (view.source, [_declared(f"{name}.{each}", views) for each in parts]),
            version,
        ),
        made,
        CodePlan(task, inputs),
    )


def _query(
    name: str,
    sqls: Mapping[str, str],
    key: tuple[str, ...],
    views: Mapping[str, View],
    versions: Mapping[str, Version],
    above: tuple[str, ...],
) -> _Query:
    """Return what is known of a query, one of `sqls`; views in Python are tables to it."""
    code = frozenset(each for each, view in views.items() if isinstance(view, PythonView))
    made = tuple(plan(each, views, versions, above) for each in named_code(name, sqls, code))
    known = {**versions, **{each.version.name: each.version for each in made}}
    sqls = ties.broken(name, sqls, views, known, code)
    found = _known(resolved(name, sqls, known, code), key, known, made)
    return found._replace(asked={each: sqls[each] for each in (*named_views(name, sqls), name)})


def _known(
    query: exp.Query,
    key: tuple[str, ...],
    known: Mapping[str, Version],
    made: tuple[ViewPlan, ...] = (),
) -> _Query:
    """Return what is known of a resolved query."""
    tables_of = {table: each for each in made for table in each.tables}
    new, old = (Translator(known, state).query(query) for state in (NEW, OLD))
    named = frozenset(tables(query)) - {each.version.name for each in made}
    try:
        found = lineage(query, key, new.columns)
        reason = ""
    except NoLineageError as error:
        found, reason = Lineage((), (), {}), str(error)
    full_for = dict.fromkeys(named, reason) if reason else dict(found.every)
    for table, each in tables_of.items():
        full_for[table] = f"the view {each.name}, which it reads, is in Python"
    full_for = {table: why for table, why in full_for.items() if table in named | tables_of.keys()}
    affected = tuple(
        each
        for probe in found.probes
        if probe.table in named and probe.table not in full_for
        for each in _affected(probe, new, known)
    )
    routes = (route(probe, known, new.columns) for probe in found.probes)
    read = column_names(query)
    return _Query(
        new,
        old,
        named | tables_of.keys(),
        found.anchor,
        affected,
        full_for,
        made,
        is_masked=not _masked(named, known).isdisjoint(read),
        routes=() if made else tuple(dict.fromkeys(routes)),
        column_names=frozenset(read),
        firsts=None if made else firsts(query, new.columns),
        query=query,
        asked={},
    )


def _ranked(view: ViewPlan, found: _Query, versions: Mapping[str, Version]) -> Ranked | None:
    """Return what a view's rows are the first ones of; None if that can't be kept up to date."""
    named = f"{view.name} (all)"
    parts = None if found.made else ranking(found.query, SCHEMA, named)
    if parts is None:
        return None
    every = _known(parts.all, view.key, versions)
    if every.full_for.keys() >= every.tables:
        return None
    columns = types.columns(every.new.columns)
    version = Version(1, SCHEMA, named, f"{SCHEMA}.{named}", parts.order, columns, {})
    try:
        first = Translator({version.name: version}, NEW).query(parts.first)
    except UnsupportedError:
        return None
    definition = _definition(every.new.sql, "", version)
    made = _planned(named, view.key, version, every, definition, is_strict=False)
    return Ranked(made, relation(version.name, NEW), first.sql)


def _masked(named: Iterable[str], versions: Mapping[str, Version]) -> set[str]:
    """Return the names of tables' columns with masked values."""
    every = (column for table in named for column in versions[table].columns)
    return {column.name for column in every if of(column).has_masked_values}


def _key_of(
    read: str, views: Mapping[str, View], versions: Mapping[str, Version]
) -> tuple[str, ...]:
    """Return the key of a table or view that a transform names; () of a SELECT."""
    if read in views:
        return views[read].key
    found = versions.get(read if "." in read else f"{PUBLIC}.{read}")
    return found.key if found else ()


def _full_for(part: _Query, by: tuple[str, ...]) -> Mapping[str, str]:
    """Return which changes of an input's tables need a complete recompute, and why."""
    if not by:
        return dict.fromkeys(part.tables, "its code reads all rows: it has no `by`")
    if part.anchor and (missing := sorted({*by} - {*part.anchor})):
        why = f"{', '.join(missing)} is no column of its own, so no changed row leads to it"
        return dict.fromkeys(part.tables, why)
    return part.full_for


def _check_by(
    what: str,
    view: PythonView,
    by: tuple[str, ...],
    found: _Query,
    columns: Mapping[str, types.PgType],
) -> None:
    """Raise ConfigError unless rows of an input can be found by the columns `by`."""
    if missing := [each for each in by if each not in view.key]:
        raise ConfigError(
            f"{what} is read by {', '.join(missing)}, which is not in the view's key",
            hint="the key has the columns of `by` (of a transform: of its table's key), unchanged,"
            " so that a row's key shows of which rows it was made",
        )
    for each in by:
        kind = found.new.columns.get(each)
        if kind is None or kind.spark != columns[each].spark:
            raise ConfigError(
                f"{what} has no column {each} of type {columns[each].title}",
                hint="each of `reads` has the columns of `by`, with the types of the view's"
                " columns: SELECT … AS …",
            )


def _select(read: str) -> str:
    """Return the query for what a parameter reads: a name, or a query already."""
    return read if _SELECT.search(read) else f"SELECT * FROM {read}"  # noqa: S608 - the operator's own


def _sqls(views: Mapping[str, View]) -> dict[str, str]:
    return {each: view.sql for each, view in views.items() if not isinstance(view, PythonView)}


def _declared(name: str, views: Mapping[str, View]) -> list[str]:
    """Return the SQL of a view and of those that it names; `view.parameter` of one in Python."""
    sqls, (base, _, parameter) = _sqls(views), name.partition(".")
    view = views[base]
    if isinstance(view, PythonView):
        sqls[name] = view.reads[parameter]
        if not _SELECT.search(sqls[name]):
            return [sqls[name], *(_declared(sqls[name], views) if sqls[name] in sqls else ())]
    return [sqls[each] for each in (*named_views(name, sqls), name)]


def _fingerprints(made: Iterable[ViewPlan]) -> list[str]:
    return [each.definition.fingerprint for each in made]


def _definition(computed_by: object, declared: object, version: Version) -> Definition:
    return Definition(
        _fingerprint(computed_by),
        _fingerprint(declared),
        version.schema_id,
        version.key,
        version.columns,
    )


def _fingerprint(of_: object) -> str:
    return f"{zlib.crc32(repr(of_).encode()):08x}"


def _check(name: str, view: View, columns: Mapping[str, types.PgType]) -> None:
    for column in columns:
        if column.startswith(("_col_", "?")):
            raise ConfigError(
                f"view {name} has a column without a name", hint="name each expression: AS …"
            )
    missing = [each for each in view.key if each not in columns]
    if missing or not view.key:
        raise ConfigError(
            f"view {name} has no column {', '.join(missing)}, which is in its key",
            hint="`key` names columns that the view selects, and that identify its rows",
        )
    for each in view.key:
        type_ = columns[each]
        if type_.name not in COMPARED or type_.name in FLOATS:
            raise UnsupportedError(f"a key of {type_.title} ({each})", "choose other columns")


def _version(
    name: str,
    view: View,
    columns: Mapping[str, types.PgType],
    named: frozenset[str],
    versions: Mapping[str, Version],
) -> Version:
    """Return the table version that the view is for a sink."""
    schema_id = max((versions[each].schema_id for each in named), default=1)
    name_ = f"{SCHEMA}.{name}"
    return Version(schema_id, SCHEMA, name, name_, view.key, types.columns(columns), {})


def _affected(
    probe: Probe, view: Query, versions: Mapping[str, Version]
) -> tuple[AffectedQuery, AffectedQuery]:
    """Return the queries of a probe: for old rows in the old state, for new ones in the new."""
    scope = ColumnScope({}, None)
    for alias, table in ((probe.alias, probe.table), *probe.joined.items()):
        version = versions[table]
        scope.add(alias, {each.name: of(each) for each in version.columns}, ())
    rules = Expressions(Translator(versions, NEW), {}, scope)
    columns = ", ".join(
        f"{coerced(rules.value(node), view.columns[name])} AS {quoted(name)}"
        for name, node in probe.anchors.items()
    )
    where = " AND ".join(rules.condition(each, "WHERE") for each in probe.conditions)

    def sql(state: str, changed: str) -> str:
        sources = [(changed, probe.table, probe.alias)]
        sources += [(state, table, alias) for alias, table in probe.joined.items()]
        from_ = ", ".join(
            f"{quoted(relation(table, of_))} AS {quoted(alias)}" for of_, table, alias in sources
        )
        text = f"SELECT DISTINCT {columns} FROM {from_}"  # noqa: S608 - names are quoted
        return f"{text} WHERE {where}" if where else text

    return (
        AffectedQuery(probe.table, REMOVED, sql(OLD, REMOVED)),
        AffectedQuery(probe.table, ADDED, sql(NEW, ADDED)),
    )
