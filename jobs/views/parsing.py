"""A view's SQL, parsed and with every name resolved.

Pure. After it, each column names its table's alias, stars are expanded, positions in GROUP BY are
expressions, and a view that is named in another view's FROM is a subquery there.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from sqlglot import exp
from sqlglot.dialects.postgres import Postgres
from sqlglot.errors import OptimizeError, ParseError, SqlglotError
from sqlglot.optimizer.qualify import qualify
from sqlglot.parsers.postgres import PostgresParser
from sqlglot.schema import MappingSchema
from sqlglot.tokenizer_core import TokenType

from cdc.errors import ConfigError
from cdc.events import table_name
from lockstep.jobs.views.definitions import SCHEMA
from lockstep.jobs.views.merged_columns import correct_merging, note_merging
from lockstep.jobs.views.numbering import numbered
from lockstep.jobs.views.refusing import UnsupportedError, expect_known
from lockstep.jobs.views.rewriting import rewrite

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from lockstep.sinks.contract import Version

DIALECT = "postgres"
PUBLIC = "public"


def resolved(
    name: str,
    sqls: Mapping[str, str],
    versions: Mapping[str, Version],
    code: frozenset[str] = frozenset(),
) -> exp.Query:
    """Return the query of a view, one of `sqls`, over tables of these versions.

    The views `code` are tables to it, whose versions are among these. Raises ConfigError if it is
    no single query, or names what does not exist.
    """
    query = _inlined(name, sqls, ())
    for table in query.find_all(exp.Table):
        if _is_named(table, code):
            table.set("db", exp.to_identifier(SCHEMA))
    for table in query.find_all(exp.Table):
        _expect_table(table, versions, _ctes(table))
    note_merging(query)
    schema: dict[str, Any] = {}
    for version in versions.values():
        columns = {column.name: "text" for column in version.columns}
        schema.setdefault(version.schema, {})[version.table] = columns
    try:
        found = qualify(
            query,
            dialect=DIALECT,
            db=PUBLIC,
            schema=MappingSchema(schema, dialect=DIALECT, normalize=False),
            quote_identifiers=False,
            identify=False,
        )
    except OptimizeError as error:
        raise ConfigError(
            f"view {name}: {str(error).splitlines()[0]}",
            hint="name columns as the tables have them, with the table's alias where two have one",
        ) from error
    assert isinstance(found, exp.Query), "a query stays one"
    correct_merging(found)
    return numbered(found)


def tables(query: exp.Query) -> set[str]:
    """Return the tables that a resolved query reads, as `schema.table`."""
    return {
        table_name(table.db, table.name)
        for table in query.find_all(exp.Table)
        if table.name not in _ctes(table) or table.db
    }


def column_names(query: exp.Query) -> set[str]:
    """Return the names of all columns that a resolved query reads."""
    return {column.name for column in query.find_all(exp.Column)}


def named_views(name: str, sqls: Mapping[str, str]) -> list[str]:
    """Return the views that a view is made of, each after those that it names itself."""
    found = dict[str, None]()
    for table in parsed(name, sqls[name]).find_all(exp.Table):
        if _is_named(table, sqls):
            found |= dict.fromkeys([*named_views(table.name, sqls), table.name])
    return list(found)


def named_code(name: str, sqls: Mapping[str, str], code: frozenset[str]) -> list[str]:
    """Return the views `code`, which are not SQL, that a view or one that it names is made of."""
    named = _inlined(name, sqls, ()).find_all(exp.Table)
    return list(dict.fromkeys(table.name for table in named if _is_named(table, code)))


def _is_named(table: exp.Table, views: Container[str]) -> bool:
    """Return whether a table in a query is one of these views."""
    return not table.db and table.name in views and table.name not in _ctes(table)


def _inlined(name: str, sqls: Mapping[str, str], above: tuple[str, ...]) -> exp.Query:
    """Return a view's query with the views that it names as subqueries."""
    if name in above:
        raise ConfigError(
            f"views {' -> '.join((*above, name))} are made of each other",
            hint="one of them must name tables only",
        )
    query = parsed(name, sqls[name])
    for table in list(query.find_all(exp.Table)):
        if not _is_named(table, sqls):
            continue
        inner = _inlined(table.name, sqls, (*above, name))
        table.replace(exp.Subquery(this=inner, alias=_alias(table)))
    return query


# Aggregates of which sqlglot knows some, and one by the name of another.
_DOCUMENTS: Final = ("JSON_AGG", "JSONB_AGG", "JSON_OBJECT_AGG", "JSONB_OBJECT_AGG")


def _document(name: str, given: list[exp.Expr]) -> exp.Expr:
    return exp.AnonymousAggFunc(this=name, expressions=given)


class _Parser(PostgresParser):
    LAMBDAS: ClassVar = {
        token: parse
        for token, parse in PostgresParser.LAMBDAS.items()
        if token is not TokenType.ARROW
    }
    # Other than extract(), it is a float8.
    FUNCTION_PARSERS: ClassVar = {
        name: parse
        for name, parse in PostgresParser.FUNCTION_PARSERS.items()
        if name not in {"DATE_PART", *_DOCUMENTS}
    }
    FUNCTIONS: ClassVar = {
        **{name: each for name, each in PostgresParser.FUNCTIONS.items() if name != "DATE_PART"},
        "EVERY": exp.LogicalAnd.from_arg_list,
        **{name: partial(_document, name.lower()) for name in _DOCUMENTS},
    }

    def _parse_interval_span(
        self,
        this: exp.Expr,
        parse_function_unit: bool = True,  # noqa: FBT001, FBT002 - sqlglot's
    ) -> exp.Interval:
        """Return an interval with its complete literal: of `1 day ago` sqlglot keeps `1 day`."""
        made = super()._parse_interval_span(this, parse_function_unit)
        if this.is_string:
            made.set("this", this)
            if exp.INTERVAL_STRING_RE.search(this.name):
                made.set("unit", None)
        return made


def _statements(sql: str) -> list[exp.Expr | None]:
    """Parse statements, in which `->` never makes a function of the names before it."""
    dialect = Postgres()
    return _Parser(dialect=dialect).parse(dialect.tokenize(sql), sql)


def parsed(name: str, sql: str) -> exp.Query:
    """Return the query of a view; raise ConfigError if it is no single one."""
    try:
        statements = [each for each in _statements(sql) if each is not None]
    except (ParseError, SqlglotError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"view {name}: {first}", hint="correct its SQL") from error
    if len(statements) != 1 or not isinstance(statements[0], exp.Query):
        raise UnsupportedError("what is not a single SELECT", "write one query")
    query = statements[0]
    rewrite(query)
    expect_known(query)
    # Only a view's own order: one with a LIMIT or DISTINCT ON chooses rows.
    distinct = query.args.get("distinct")
    chooses = query.args.get("limit") or (
        isinstance(distinct, exp.Distinct) and distinct.args["on"]
    )
    if query.args.get("order") and not chooses:
        query.set("order", None)
    return query


def _alias(table: exp.Table) -> exp.TableAlias:
    found = table.args.get("alias")
    if isinstance(found, exp.TableAlias) and found.this:
        return found
    return exp.TableAlias(this=exp.to_identifier(table.name, quoted=table.this.args["quoted"]))


def _ctes(table: exp.Table) -> set[str]:
    """Return the names of WITH queries that are visible where the table is named."""
    found, node = set[str](), table.parent
    while node is not None:
        if with_ := node.args.get("with_"):
            found |= {cte.alias for cte in with_.expressions}
        node = node.parent
    return found


def _expect_table(table: exp.Table, versions: Mapping[str, Version], ctes: set[str]) -> None:
    if not isinstance(table.this, exp.Identifier):
        raise UnsupportedError("a function in FROM", "name tables, views and subqueries")
    if table.catalog:
        raise UnsupportedError("a table of another database", "name it as schema.table")
    name, schema = (
        each if part is None or part.args.get("quoted") else each.lower()
        for each, part in ((table.name, table.this), (table.db, table.args.get("db")))
    )
    if not schema and name in ctes:
        return
    full = table_name(schema or PUBLIC, name)
    version = versions.get(full)
    if version is None:
        raise ConfigError(
            f"there is no table {full} in the log, and no view of that name",
            hint="name a captured table that has had a row, as schema.table, or correct the name",
        )
    if not version.key:
        raise UnsupportedError(
            f"{full}, which has no key", "give it a primary key, or tables.<table>.key"
        )
