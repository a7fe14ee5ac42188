"""What maintains a view: its query in each state of the tables, and the queries for its keys.

Pure: from the configuration and the table versions.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.errors import ConfigError
from lockstep.jobs.views import types
from lockstep.jobs.views.definitions import SCHEMA, Definition
from lockstep.jobs.views.expressions import Expressions
from lockstep.jobs.views.lineage import Lineage, NoLineageError, Probe, lineage
from lockstep.jobs.views.parsing import named_views, resolved, tables
from lockstep.jobs.views.refusing import UnsupportedError
from lockstep.jobs.views.translating import Query, Translator, relation
from lockstep.jobs.views.types import COMPARED, FLOATS, of
from lockstep.jobs.views.values import Scope, coerced, quoted
from lockstep.sinks.contract import Column, Version

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cdc.config.views import View

# The states of the tables: before and after the cut, and the rows that only one of them has.
OLD: Final = "old"
NEW: Final = "new"
REMOVED: Final = "removed"
ADDED: Final = "added"


class AffectedQuery(NamedTuple):
    """A query for the anchors that changes of a table affect."""

    table: str
    changed: str  # the state with the changed rows: REMOVED or ADDED
    sql: str


class ViewPlan(NamedTuple):
    """One view over tables of certain versions."""

    name: str
    key: tuple[str, ...]
    version: Version
    new: str  # Spark's SQL, of tables after the cut
    old: str  # and before it
    columns: Mapping[str, types.Type]
    tables: frozenset[str]
    anchor: tuple[str, ...]
    affected: tuple[AffectedQuery, ...]
    full_for: Mapping[str, str]  # tables whose changes need a full recompute, and why
    is_strict: bool
    definition: Definition


def plan(name: str, views: Mapping[str, View], versions: Mapping[str, Version]) -> ViewPlan:
    """Return the plan of a view; raise ConfigError for what is wrong or not supported in it."""
    view = views[name]
    query = resolved(name, {each: other.sql for each, other in views.items()}, versions)
    new, old = (Translator(versions, state).query(query) for state in (NEW, OLD))
    _check(name, view, new)
    named = frozenset(tables(query))
    try:
        found = lineage(query, view.key)
        reason = ""
    except NoLineageError as error:
        found, reason = Lineage((), (), {}), str(error)
    full_for = dict.fromkeys(named, reason) if reason else found.every
    is_strict = view.refresh == "strict"
    if is_strict and full_for:
        table, why = next(iter(full_for.items()))
        raise UnsupportedError(
            f"refresh: strict with changes of {table} ({why})",
            "join it by an equality of columns, or use refresh: auto",
        )
    version = _version(name, view, new, named, versions)
    return ViewPlan(
        name,
        view.key,
        version,
        new.sql,
        old.sql,
        new.columns,
        named,
        found.anchor,
        tuple(
            each
            for probe in found.probes
            if probe.table not in full_for
            for each in _affected(probe, new, versions)
        ),
        full_for,
        is_strict,
        _definition(name, views, new, version),
    )


def _definition(name: str, views: Mapping[str, View], query: Query, version: Version) -> Definition:
    sqls = {each: other.sql for each, other in views.items()}
    declared = [sqls[each] for each in (*named_views(name, sqls), name)]
    return Definition(
        _fingerprint((version.key, query.sql, query.columns)),
        _fingerprint(declared),
        version.schema_id,
        version.key,
        version.columns,
    )


def _fingerprint(of_: object) -> str:
    return f"{zlib.crc32(repr(of_).encode()):08x}"


def _check(name: str, view: View, query: Query) -> None:
    for column in query.columns:
        if column.startswith(("_col_", "?")):
            raise ConfigError(
                f"view {name} has a column without a name", hint="name each expression: AS …"
            )
    missing = [each for each in view.key if each not in query.columns]
    if missing or not view.key:
        raise ConfigError(
            f"view {name} has no column {', '.join(missing)}, which is in its key",
            hint="`key` names columns that the view selects, and that identify its rows",
        )
    for each in view.key:
        type_ = query.columns[each]
        if type_.name not in COMPARED or type_.name in FLOATS:
            raise UnsupportedError(f"a key of {type_.title} ({each})", "choose other columns")


def _version(
    name: str,
    view: View,
    query: Query,
    named: frozenset[str],
    versions: Mapping[str, Version],
) -> Version:
    """Return the table version that the view is for a sink."""
    columns: tuple[Column, ...] = types.columns(query.columns)
    schema_id = max((versions[each].schema_id for each in named), default=1)
    return Version(schema_id, SCHEMA, name, f"{SCHEMA}.{name}", view.key, columns, {})


def _affected(
    probe: Probe, view: Query, versions: Mapping[str, Version]
) -> tuple[AffectedQuery, AffectedQuery]:
    """Return the queries of a probe: for old rows in the old state, for new ones in the new."""
    scope = Scope({}, None)
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
