"""Compare stored rows with what Postgres answers to a query.

Postgres itself compares, by its own equality: the rows are sent to it as JSON. Nothing is written,
and no value of a row is returned.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import psycopg
from psycopg import sql

from cdc.source.connection import translated

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Names in a query without a schema are those of `public`, as in a view.
_PATH: Final = b"SET LOCAL search_path = public, pg_catalog"


class Question(NamedTuple):
    """A query, and the queries that it names, in order; `columns`: its columns' types.

    `where` is a condition for its rows, in SQL; empty for all of them.
    """

    text: str
    named: Mapping[str, str]
    columns: Mapping[str, str]
    where: str = ""


class Differing(NamedTuple):
    """How many rows only Postgres has, and how many only the store has."""

    missing: int
    extra: int


def digest(connection: psycopg.Connection[Any], question: Question) -> str:
    """Return a digest of the rows that Postgres answers now."""
    query = sql.SQL(
        "{} SELECT md5(coalesce(string_agg(v::text, chr(10) ORDER BY v::text), '')) FROM v"
    ).format(_with(question))
    with _reading(connection):
        (found,) = connection.execute(query, []).fetchone() or ("",)
    return str(found)


def compare(connection: psycopg.Connection[Any], question: Question, stored: bytes) -> Differing:
    """Return how rows, a JSON array of objects, differ from what Postgres answers now."""
    columns = sql.SQL(", ").join(
        sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind))
        for name, kind in question.columns.items()
    )
    names = sql.SQL(", ").join(map(sql.Identifier, question.columns))
    query = sql.SQL(
        "{with_}, s AS (SELECT {names} FROM jsonb_to_recordset(%s::jsonb) AS s ({columns}))"
        " SELECT (SELECT count(*) FROM (SELECT {names} FROM v EXCEPT ALL SELECT * FROM s) AS m),"
        " (SELECT count(*) FROM (SELECT * FROM s EXCEPT ALL SELECT {names} FROM v) AS e)"
    ).format(with_=_with(question), names=names, columns=columns)
    with _reading(connection):
        return Differing(*(connection.execute(query, [stored.decode()]).fetchone() or (0, 0)))


@contextmanager
def _reading(connection: psycopg.Connection[Any]) -> Iterator[None]:
    with translated("asking Postgres for a view's rows"), connection.transaction():
        connection.execute("SET TRANSACTION READ ONLY")
        connection.execute(_PATH)
        yield


def _with(question: Question) -> sql.Composable:
    # A query's own text; `%` would be a parameter.
    text = question.text.rstrip().rstrip(";")
    if question.where:
        text = f"SELECT * FROM ({text}\n) AS every WHERE {question.where}"  # noqa: S608 - its own
    parts = [*question.named.items(), ("v", text)]
    return sql.SQL("WITH {}").format(
        sql.SQL(", ").join(
            sql.SQL("{} AS ({})").format(sql.Identifier(name), sql.SQL(text.replace("%", "%%")))
            for name, text in parts
        )
    )
