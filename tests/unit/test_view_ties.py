"""A view's own LIMIT has one answer: where its ORDER BY leaves rows in any order, by its key."""

from __future__ import annotations

import pytest

from cdc.config.views import View
from lockstep.jobs.views.plans import plan
from lockstep.jobs.views.refusing import UnsupportedError
from lockstep.sinks.contract import Column, Version


def _table(name: str, key: str, /, **columns: str) -> Version:
    made = tuple(Column(each, kind, 0, -1, nullable=True) for each, kind in columns.items())
    return Version(1, "public", name, f"x.public.{name}", tuple(key.split()), made, {})


TABLES = {
    each.name: each
    for each in (
        _table("orders", "id", id="int4", by="int4", at="timestamp", state="text", ratio="float8"),
        _table("people", "id", id="int4", name="text"),
    )
}


def _asked(sql: str, key: str = "id", **others: View) -> str:
    found = plan("v", {"v": View(sql=sql, key=tuple(key.split())), **others}, TABLES)
    return found.asked["v"]


@pytest.mark.parametrize(
    ("sql", "key", "asked"),
    [
        # It has one answer already.
        ("SELECT id FROM orders ORDER BY at, id LIMIT 3", "id", ""),
        ("SELECT id FROM orders ORDER BY at LIMIT 3", "id",
         'SELECT id FROM orders ORDER BY at , "id" LIMIT 3'),
        ("SELECT id FROM orders -- last\nLIMIT 3 -- first", "id",
         'SELECT id FROM orders -- last\nORDER BY "id" LIMIT 3 -- first'),
        ('SELECT id AS "Its""id" FROM orders LIMIT 3', 'Its"id',
         'SELECT id AS "Its""id" FROM orders ORDER BY "Its""id" LIMIT 3'),
        ("WITH o AS (SELECT id, at FROM orders) SELECT id FROM o ORDER BY at LIMIT 3", "id",
         'WITH o AS (SELECT id, at FROM orders) SELECT id FROM o ORDER BY at , "id" LIMIT 3'),
        # By the bytes of a text; what is selected is named as in the query.
        ("SELECT state AS s, count(*) AS n FROM orders GROUP BY state ORDER BY n LIMIT 3", "s",
         ("SELECT state AS s, count(*) AS n FROM orders GROUP BY state"
          ' ORDER BY n , (orders.state) COLLATE "C" LIMIT 3')),
        # Several rows of `orders` may be one row here: any of them is the same.
        ("SELECT o.by, p.name FROM orders o JOIN people p ON p.id = o.by LIMIT 3", "by",
         ("SELECT o.by, p.name FROM orders o JOIN people p ON p.id = o.by"
          ' ORDER BY "by", (p.name) COLLATE "C" LIMIT 3')),
    ],
)  # fmt: skip
def test_postgres_is_asked_for_the_same_first_rows(sql: str, key: str, asked: str) -> None:
    assert _asked(sql, key) == (asked or sql)


def test_a_view_of_such_a_view_reads_its_rows() -> None:
    first = View(sql="SELECT id, at FROM orders ORDER BY at LIMIT 3", key=("id",))
    views = {"first": first, "v": View(sql="SELECT id FROM first", key=("id",))}
    found = plan("v", views, TABLES)
    assert found.asked == {
        "first": 'SELECT id, at FROM orders ORDER BY at , "id" LIMIT 3',
        "v": "SELECT id FROM first",
    }


@pytest.mark.parametrize(
    "sql",
    [
        # Rows that agree in what can be ordered differ in the rest.
        "SELECT by AS id, ratio FROM orders ORDER BY at LIMIT 3",
        # Not the view's own.
        "SELECT id FROM (SELECT id FROM orders ORDER BY at LIMIT 3) AS x",
        "SELECT id, row_number() OVER (ORDER BY at) AS n FROM orders",
    ],
)
def test_what_no_key_of_the_view_decides_is_refused(sql: str) -> None:
    with pytest.raises(UnsupportedError, match="whose ORDER BY may leave rows in any order"):
        _asked(sql)


def test_a_query_that_is_refused_for_another_reason_is_refused_for_it() -> None:
    with pytest.raises(UnsupportedError, match="text in the database's collation"):
        _asked("SELECT id, state FROM orders ORDER BY state LIMIT 3")
    with pytest.raises(UnsupportedError, match="OFFSET"):
        _asked("SELECT id FROM orders ORDER BY at LIMIT 3 OFFSET 1")
