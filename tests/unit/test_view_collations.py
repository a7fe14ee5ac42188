"""Texts are ordered where their column's collation orders bytes, and compared where it can be."""

from __future__ import annotations

import pytest

from cdc.config.views import View
from lockstep.jobs.views.plans import ViewPlan, plan
from lockstep.jobs.views.refusing import UnsupportedError
from lockstep.sinks.contract import Column, Version

_COLLATIONS = {"c": "C", "d": "C", "l": "linguistic", "n": "nondeterministic", "u": None}
TABLE = Version(
    1, "public", "t", "x.public.t", ("id",),
    (
        Column("id", "int4", 0, -1, nullable=False),
        *(
            Column(name, "text", 0, -1, nullable=True, collation=each)
            for name, each in _COLLATIONS.items()
        ),
        Column("masked", "text", 0, -1, nullable=True, mask="hmac:k", collation="C"),
    ),
    {},
)  # fmt: skip


def _plan(sql: str, *key: str) -> ViewPlan:
    return plan("v", {"v": View(sql=sql, key=key or ("id",))}, {TABLE.name: TABLE})


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT id, c FROM t ORDER BY c, id LIMIT 3",
        "SELECT id, c < 'x' AND c < d AS b FROM t",
        "SELECT id, coalesce(c, d) < 'x' AS b FROM t",
        "SELECT id, max(c) AS m, min(CASE WHEN id > 1 THEN c ELSE d END) AS n FROM t GROUP BY id",
        "SELECT id, row_number() OVER (ORDER BY c::varchar, id) AS n FROM t",
        # COLLATE counts for both.
        'SELECT id, l COLLATE "C" < c AND c < l COLLATE "C" AS b FROM t',
    ],
)
def test_texts_are_ordered_as_a_column_that_orders_bytes_is(sql: str) -> None:
    _plan(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT id, l FROM t ORDER BY l, id LIMIT 3",
        "SELECT id, u < 'x' AS b FROM t",
        # Postgres takes the one that is not the database's, which may be either.
        "SELECT id, c < l AS b FROM t",
        "SELECT id, coalesce(l, c) < 'x' AS b FROM t",
    ],
)
def test_texts_of_another_collation_are_not_ordered(sql: str) -> None:
    with pytest.raises(UnsupportedError, match="text in the database's collation"):
        _plan(sql)


def test_a_masked_text_is_not_ordered() -> None:
    with pytest.raises(UnsupportedError, match="masked"):
        _plan("SELECT id, max(masked) AS m FROM t GROUP BY id")


@pytest.mark.parametrize(
    ("sql", "what"),
    [
        ("SELECT id, n = 'x' AS b FROM t", "="),
        ("SELECT id FROM t WHERE n <> 'x'", "<>"),
        ("SELECT id FROM t WHERE n IS DISTINCT FROM 'x'", "<=>"),
        ("SELECT id FROM t WHERE n IN ('x', 'y')", "IN"),
        ("SELECT id FROM t WHERE n IN (SELECT n FROM t)", "IN"),
        ("SELECT id, CASE n WHEN 'x' THEN 1 END AS b FROM t", "="),
        ("SELECT id, nullif(n, 'x') AS b FROM t", "nullif()"),
        ("SELECT a.id FROM t a JOIN t b ON b.n = a.n AND b.id = a.id", "="),
        ("SELECT a.id FROM t a JOIN t b USING (id, n)", "="),
        ("SELECT max(id) AS id FROM t GROUP BY n", "GROUP BY"),
        ("SELECT DISTINCT id, n FROM t", "DISTINCT over n"),
        ("SELECT DISTINCT ON (n) id FROM t ORDER BY n, id", "PARTITION BY"),
        ("SELECT id, count(DISTINCT n) AS m FROM t GROUP BY id", "count(DISTINCT …)"),
        ("SELECT id, n FROM t UNION SELECT id, n FROM t", "UNION over n"),
        ("SELECT id, n FROM t EXCEPT ALL SELECT id, n FROM t", "EXCEPT ALL over n"),
        ("SELECT id, row_number() OVER (PARTITION BY n ORDER BY id) AS m FROM t", "PARTITION BY"),
        ("SELECT id, max(n) AS m FROM t GROUP BY id", "max()"),
        ("SELECT id, n FROM t ORDER BY n, id LIMIT 3", "ORDER BY"),
    ],
)
def test_equal_texts_that_differ_are_not_compared(sql: str, what: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        _plan(sql)
    assert f"a view can't have {what} of text with a nondeterministic collation" in str(
        caught.value
    )
    assert 'COLLATE "C"' in caught.value.hint


def test_they_are_no_key() -> None:
    with pytest.raises(UnsupportedError, match="a key of text with a nondeterministic collation"):
        _plan("SELECT n FROM t", "n")


def test_they_are_selected_and_compared_by_their_bytes() -> None:
    found = _plan("SELECT id, n, n IS NULL AS missing FROM t WHERE n COLLATE \"C\" = 'x'")
    (column,) = (each for each in found.version.columns if each.name == "n")
    # As sinks know it; and a view in Python that reads it knows its collation.
    assert (column.type, column.type_id, column.collation) == ("text", 25, "nondeterministic")


@pytest.mark.parametrize("name", ["c", "l", "u"])
def test_letters_change_by_the_rules_of_c_alone(name: str) -> None:
    """A collation that orders bytes may change more letters than those of ASCII."""
    _plan(f'SELECT id, lower({name} COLLATE "C") AS b FROM t')
    with pytest.raises(UnsupportedError, match=r"lower\(\), which depends on the collation"):
        _plan(f"SELECT id, lower({name}) AS b FROM t")
