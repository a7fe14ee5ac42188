"""Compare stored rows with what Postgres answers to a query.

Postgres itself reads both, the stored rows as JSON, some at a time, and returns a digest of each
row's values, which are compared here: so neither side is ever in one value, and the memory is that
of the digests. Numbers of different scales are equal, and so are the two zeros of a float. Nothing
is written, and no value of a row is returned.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import psycopg
from psycopg import sql

from cdc.decode.types import ValueKind, names_of
from cdc.source.connection import translated

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

# Names in a query without a schema are those of `public`, as in a view.
_PATH: Final = b"SET LOCAL search_path = public, pg_catalog"


_JSON: Final = names_of(ValueKind.JSON)  # which stored rows have as text
# By type, an expression that has one text for equal values.
_ALIKE: Final = {
    **dict.fromkeys(names_of(ValueKind.NUMERIC), "trim_scale({})"),
    **dict.fromkeys(names_of(ValueKind.FLOAT), "{} + 0"),
    **dict.fromkeys(_JSON, "{}::jsonb"),
}
# Of the answer, that are fetched at a time.
_ROWS: Final = 10_000


class CatalogQuestion(NamedTuple):
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


def digest(connection: psycopg.Connection[Any], question: CatalogQuestion) -> str:
    """Return a digest of the rows that Postgres answers now, in any order."""
    query = sql.SQL(
        "{} SELECT concat(count(*), ' ', sum(hashtextextended(v::text, 0)),"
        " ' ', sum(hashtextextended(v::text, 1))) FROM v"
    ).format(_with(question))
    with _reading(connection):
        (found,) = connection.execute(query, []).fetchone() or ("",)
    return str(found)


def compare(
    connection: psycopg.Connection[Any], question: CatalogQuestion, stored: Iterable[bytes]
) -> Differing:
    """Return how rows differ from what Postgres answers now.

    `stored` has them in parts, each a JSON array of objects.
    """
    columns = sql.SQL(", ").join(
        sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL("text" if kind in _JSON else kind))
        for name, kind in question.columns.items()
    )
    row = _digested(question)
    of_stored = sql.SQL("SELECT {} FROM jsonb_to_recordset(%s::jsonb) AS s ({})").format(
        row, columns
    )
    left, missing = Counter[bytes](), 0
    for part in stored:
        with _reading(connection):
            left.update(each for (each,) in connection.execute(of_stored, [part.decode()]))
    with _reading(connection), connection.cursor("answer") as cursor:
        cursor.itersize = _ROWS
        for (each,) in cursor.execute(
            sql.SQL("{} SELECT {} FROM v").format(_with(question), row), []
        ):
            if left[each] > 0:
                left[each] -= 1
            else:
                missing += 1
    return Differing(missing, left.total())


def _digested(question: CatalogQuestion) -> sql.Composable:
    """Return the expression for the digest of a row: of a text in which equal values are alike."""
    values = (
        sql.SQL(_ALIKE.get(kind, "{}")).format(sql.Identifier(name))
        for name, kind in question.columns.items()
    )
    return sql.SQL("decode(md5(ROW({})::text), 'hex')").format(sql.SQL(", ").join(values))


@contextmanager
def _reading(connection: psycopg.Connection[Any]) -> Iterator[None]:
    with translated("asking Postgres for a view's rows"), connection.transaction():
        connection.execute("SET TRANSACTION READ ONLY")
        connection.execute(_PATH)
        yield


def _with(question: CatalogQuestion) -> sql.Composable:
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
