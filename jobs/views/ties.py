"""A view's own LIMIT where its ORDER BY leaves rows in any order: by the view's key.

    SELECT … FROM orders ORDER BY total DESC LIMIT 10      -- key: id

has one answer with `id` at the end of ORDER BY, and that answer is one of those that Postgres may
give without. Where no key decides between two rows, the rest of what is selected does: rows that
agree in all of it are the same rows of a view. Texts among these are ordered by their bytes.

Pure: adds to the query's own text, so that Postgres can be asked for the same rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlglot import exp
from sqlglot.dialects.postgres import Postgres
from sqlglot.tokenizer_core import TokenType

from cdc.errors import ConfigError
from lockstep.jobs.views.parsing import DIALECT, named_views, parsed, resolved
from lockstep.jobs.views.refusing import UnsupportedError
from lockstep.jobs.views.translating import Query, Translator
from lockstep.jobs.views.types import TEXTS
from lockstep.jobs.views.values import expect_grouped

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cdc.config.views import View
    from lockstep.jobs.views.types import PgType
    from lockstep.sinks.contract import Version

_LIMITS: Final = {TokenType.LIMIT, TokenType.FETCH}


def broken(
    name: str,
    sqls: Mapping[str, str],
    views: Mapping[str, View],
    versions: Mapping[str, Version],
    code: frozenset[str],
) -> dict[str, str]:
    """Return the queries, with ORDER BY completed in a view and in those that it names."""
    found = dict(sqls)
    for each in (*named_views(name, sqls), name):
        if each in views and parsed(each, found[each]).args.get("limit"):
            found[each] = _broken(each, found, views[each].key, versions, code)
    return found


def _broken(
    name: str,
    sqls: Mapping[str, str],
    key: Sequence[str],
    versions: Mapping[str, Version],
    code: frozenset[str],
) -> str:
    """Return a view's query with the least that gives it one answer; as it is if nothing does."""

    def translated(sql: str) -> tuple[exp.Query, Query]:
        query = resolved(name, {**sqls, name: sql}, versions, code)
        return query, Translator(versions, "").query(query)

    sql = sqls[name]
    try:
        translated(sql)
    except UnsupportedError:
        pass
    else:
        return sql
    try:
        query, every = translated(_without(sql))
        by = _expressions(query, every.columns)
        names = [each for each in key if each in by]
        for chosen in (names, [*names, *(each for each in by if each not in names)]):
            made = _completed(sql, [by[each] for each in chosen])
            try:
                translated(made)
            except UnsupportedError:
                continue
            return made
    except ConfigError:
        pass  # the query is refused, with its own words, where it is translated
    return sql


def _expressions(query: exp.Query, columns: Mapping[str, PgType]) -> dict[str, str]:
    """Return what ORDER BY has for each column by which rows can be ordered."""
    found = {}
    for each in query.selects:
        name = each.alias_or_name
        try:
            expect_grouped(columns[name], "ORDER BY")
        except UnsupportedError:
            continue
        if columns[name].mask or isinstance(each.unalias(), exp.Literal):
            continue
        found[name] = '"' + name.replace('"', '""') + '"'
        if columns[name].name in TEXTS and not columns[name].is_c:
            # An expression can't have a column's new name.
            found[name] = f'({each.unalias().sql(dialect=DIALECT)}) COLLATE "C"'
    return found


def _without(sql: str) -> str:
    """Return a query without its LIMIT, whose ORDER BY then has no effect."""
    return sql[: _limit_at(sql)]


def _completed(sql: str, by: Iterable[str]) -> str:
    """Return a query with these at the end of its ORDER BY."""
    at, more = _limit_at(sql), ", ".join(by)
    if not more:
        return sql
    word = ", " if parsed("", sql).args.get("order") else "ORDER BY "
    return f"{sql[:at]}{word}{more} {sql[at:]}"


def _limit_at(sql: str) -> int:
    """Return where a query's own LIMIT starts."""
    depth, found = 0, len(sql)
    for token in Postgres().tokenize(sql):
        depth += (token.token_type is TokenType.L_PAREN) - (token.token_type is TokenType.R_PAREN)
        if not depth and token.token_type in _LIMITS:
            found = token.start
    return found
