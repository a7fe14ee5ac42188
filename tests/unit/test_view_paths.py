"""By which columns changed rows are followed to anchors, and back, without Spark."""

from __future__ import annotations

from cdc.config.views import View
from lockstep.jobs.views.paths import Hop, Path, Route, read_by
from lockstep.jobs.views.plans import plan
from tests.unit.test_view_plans import TABLES


def routes(sql: str, *key: str) -> tuple[Route, ...]:
    return plan("v", {"v": View(sql=sql, key=key or ("id",))}, TABLES).routes


def test_a_changed_row_is_followed_through_the_joins_to_the_anchor() -> None:
    found = routes(
        "SELECT c.id, sum(l.qty) AS n FROM customers c JOIN orders o ON o.customer_id = c.id"
        " LEFT JOIN lines l ON l.order_id = o.id GROUP BY c.id"
    )
    from_lines = (
        Hop("order_id", "public.orders", "id"),
        Hop("customer_id", "public.customers", "id"),
    )
    assert set(found) == {
        Route("public.customers", (Path("id", (), "id"),)),
        Route("public.orders", (Path("id", from_lines[1:], "id"),)),
        Route("public.lines", (Path("id", from_lines, "id"),)),
    }


def test_each_occurrence_of_a_table_has_a_route_of_its_own() -> None:
    found = routes(
        "SELECT a.id, count(b.id) AS n FROM tweets a JOIN tweets b ON b.author_id = a.author_id"
        " GROUP BY a.id"
    )
    hop = Hop("author_id", "public.tweets", "author_id")
    assert set(found) == {
        Route("public.tweets", (Path("id", (), "id"),)),
        Route("public.tweets", (Path("id", (hop,), "id"),)),
    }


def test_integers_of_other_sizes_are_followed() -> None:
    found = routes(
        "SELECT t.id, f.follower_id FROM tweets t JOIN follows f ON f.followee_id = t.id",
        "id",
        "follower_id",
    )
    assert {each.table: {path.anchor for path in each.paths} for each in found} == {
        "public.tweets": {"id", "follower_id"},
        "public.follows": {"id", "follower_id"},
    }


def test_what_has_equal_values_of_different_bytes_or_none_in_a_mirror_is_not_followed() -> None:
    by_number = "SELECT a.id, b.id AS other FROM odd a JOIN odd b ON b.{0} = a.{0}"
    for column in ("f", "d"):
        found = routes(by_number.format(column), "id", "other")
        assert all(len(each.paths) == 1 for each in found), column


def test_an_anchor_that_is_computed_is_not_followed() -> None:
    [found] = routes("SELECT length(name) AS long, count(*) AS n FROM customers GROUP BY 1", "long")
    assert found == Route("public.customers", ())


def test_tables_are_read_by_the_columns_that_join_them() -> None:
    found = routes(
        "SELECT c.id, sum(l.qty) AS n FROM customers c JOIN orders o ON o.customer_id = c.id"
        " LEFT JOIN lines l ON l.order_id = o.id GROUP BY c.id"
    )
    assert read_by(found) == {
        "public.customers": ("id",),
        "public.lines": ("order_id",),
        "public.orders": ("customer_id", "id"),
    }
