"""No changed row of a view has an anchor that the affected keys lack: nothing else must hold.

The plans' own queries run in SQLite, over random tables before and after a cut.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from random import Random
from typing import Any

import pytest

from cdc.config.views import View
from lockstep.jobs.views.plans import ADDED, NEW, OLD, REMOVED, ViewPlan, plan
from lockstep.sinks.contract import Version
from tests.fixtures.seeds import examples
from tests.fixtures.view_list import STRICT, VIEWS
from tests.unit.test_view_plans import TABLES

# Their expressions have no form in SQLite; their joins are those of other views.
_OTHERS = {
    *("expressions", "texts", "dates", "aggregates", "averages", "ratios"),
    *("running_average", "spread", "states_in_order", "times", "cut_texts"),
    *("intersect_all", "except_all", "collected", "documents"),
}
_MORE = {
    "grouped_subquery": "SELECT c.id, o.n FROM customers c LEFT JOIN (SELECT customer_id,"
    " count(*) AS n FROM orders GROUP BY customer_id) o ON o.customer_id = c.id",
    "window_below_join": "SELECT c.id, o.id AS o FROM customers c JOIN (SELECT id, customer_id,"
    " rank() OVER (PARTITION BY customer_id ORDER BY placed) AS r FROM orders) o"
    " ON o.customer_id = c.id AND o.r = 1",
    "exists_below_group": "SELECT customer_id AS id, count(*) AS n FROM orders o WHERE EXISTS"
    " (SELECT 1 FROM lines l WHERE l.order_id = o.id AND l.qty > 1) GROUP BY customer_id",
    "left_join_of_joins": "SELECT c.id, x.n FROM customers c LEFT JOIN (SELECT o.customer_id,"
    " l.n FROM orders o JOIN lines l ON l.order_id = o.id WHERE l.qty > 0) x"
    " ON x.customer_id = c.id AND c.id > x.n",
    "not_exists_outer": "SELECT o.id FROM orders o LEFT JOIN customers c ON c.id = o.customer_id"
    " WHERE c.region IS NULL OR NOT EXISTS (SELECT 1 FROM lines l"
    " WHERE l.order_id = o.id AND l.qty > 2)",
    "nested_in": "SELECT id FROM customers WHERE id IN (SELECT customer_id FROM orders"
    " WHERE id IN (SELECT order_id FROM lines WHERE product_id NOT IN (SELECT id FROM products)))",
    "exists_as_value": "SELECT o.id, EXISTS (SELECT 1 FROM tweets t"
    " WHERE t.author_id = o.customer_id) AS known FROM orders o",
    "union_in_from": "SELECT c.id, count(u.x) AS n FROM customers c LEFT JOIN (SELECT customer_id"
    " AS who, id AS x FROM orders UNION ALL SELECT author_id, id::int FROM tweets) u"
    " ON u.who = c.id GROUP BY c.id",
    "scalar_of_group": "SELECT o.id, (SELECT sum(qty) FROM lines l JOIN products p"
    " ON p.id = l.product_id WHERE l.order_id = o.id AND p.active) AS s FROM orders o",
    "having_subquery": "SELECT customer_id AS id, count(*) AS n FROM orders o GROUP BY customer_id"
    " HAVING customer_id IN (SELECT id FROM customers WHERE region = '1')",
    "right_join": "SELECT c.id, o.id AS o FROM orders o RIGHT JOIN customers c"
    " ON c.id = o.customer_id AND o.state = '1'",
    "right_join_of_joins": "SELECT p.id, count(o.id) AS n FROM orders o JOIN lines l"
    " ON l.order_id = o.id RIGHT JOIN products p ON p.id = l.product_id GROUP BY p.id",
    "left_then_right": "SELECT c.id, count(l.n) AS n FROM orders o LEFT JOIN lines l"
    " ON l.order_id = o.id RIGHT JOIN customers c ON c.id = o.customer_id GROUP BY c.id",
    "full_join": "SELECT coalesce(c.id, o.customer_id) AS id, o.id AS o, c.region FROM customers c"
    " FULL JOIN orders o ON o.customer_id = c.id AND o.state = c.region",
    "full_join_twice": "SELECT coalesce(c.id, o.customer_id, t.author_id) AS id, o.id AS o, t.id"
    " AS t FROM customers c FULL JOIN orders o ON o.customer_id = c.id FULL JOIN tweets t"
    " ON coalesce(c.id, o.customer_id) = t.author_id",
    "full_join_grouped": "SELECT coalesce(o.customer_id, c.id) AS id, count(o.id) AS n, min(c.id)"
    " AS c FROM customers c FULL JOIN orders o ON c.id = o.customer_id GROUP BY 1",
    "left_join_below_left": "SELECT coalesce(q.customer_id, t.author_id) AS id, c.id AS c"
    " FROM tweets t LEFT JOIN (SELECT o.customer_id, o.id FROM lines l LEFT JOIN orders o"
    " ON o.id = l.order_id) q ON q.customer_id = t.author_id LEFT JOIN customers c"
    " ON c.id = q.customer_id",
}
CASES: dict[str, View] = {name: each for name, each in STRICT.items() if name not in _OTHERS} | {
    name: View(sql=sql, key=("id",)) for name, sql in _MORE.items()
}
Rows = dict[tuple[Any, ...], dict[str, Any]]
_CUTS = examples(600)
# Few values, so that most rows join.
_KEYS = (1, 2, 3)
_VALUES = (1, 2, 1, 2, 1, 2, 3, None)
_AMOUNTS = (0, 1, 4, 60, 60, None)


def _rows(chosen: Random, version: Version, most: int) -> Rows:
    rows: Rows = {}
    for _ in range(chosen.randint(0, most)):
        row: dict[str, Any] = {}
        for each in version.columns:
            values = _AMOUNTS if each.name in {"qty", "price"} else _VALUES
            value = chosen.choice(_KEYS if each.name in version.key else values)
            row[each.name] = str(value) if each.type == "text" and value else value
        rows[tuple(row[name] for name in version.key)] = row
    return rows


def _cut(chosen: Random, view: ViewPlan) -> dict[str, tuple[Rows, Rows]]:
    """Return each table's rows before and after a cut that changes few of them."""
    found = {}
    for name in sorted(view.tables):
        before = _rows(chosen, TABLES[name], 6)
        after = dict(before)
        for key, row in _rows(chosen, TABLES[name], chosen.choice([0, 0, 2])).items():
            if chosen.random() < 0.5:
                after[key] = row
            else:
                after.pop(key, None)
        found[name] = before, after
    return found


def _load(connection: sqlite3.Connection, tables: Mapping[str, tuple[Rows, Rows]]) -> None:
    for name, (before, after) in tables.items():
        states = {
            OLD: before.values(),
            NEW: after.values(),
            REMOVED: [row for key, row in before.items() if after.get(key) != row],
            ADDED: [row for key, row in after.items() if before.get(key) != row],
        }
        columns = [each.name for each in TABLES[name].columns]
        for state, rows in states.items():
            connection.execute(f"CREATE TABLE `{state} {name}` ({', '.join(columns)})")
            places = ", ".join("?" * len(columns))
            connection.executemany(
                f"INSERT INTO `{state} {name}` VALUES ({places})",
                [[row[each] for each in columns] for row in rows],
            )


@pytest.mark.parametrize("name", CASES)
def test_no_changed_row_has_an_anchor_that_is_not_affected(name: str) -> None:
    view = plan(name, {**VIEWS, **CASES}, TABLES)
    assert not view.full_for
    names, changed = list(view.columns), 0
    places = [names.index(each) for each in view.anchor]
    for seed in range(_CUTS):
        with closing(sqlite3.connect(":memory:")) as connection:
            _load(connection, _cut(Random(seed), view))
            old, new = (Counter(connection.execute(sql)) for sql in (view.old, view.new))
            affected = {row for each in view.affected for row in connection.execute(each.sql)}
            for row in (old - new) + (new - old):
                changed += 1
                assert tuple(row[at] for at in places) in affected, f"seed {seed}"
    assert changed > _CUTS // 60, "the cuts change the view"
