"""The demo's two views: home timelines in Redis, order totals in OpenSearch and SQL.

Each view's store is read as its own readers would, and compared with what Postgres answers to the
view's SQL.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, LiteralString, NamedTuple

from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import psycopg

    from cdc.config.followers import Follower
    from cdc.playground.servers.home import Home
    from cdc.playground.servers.stack import Endpoints
    from cdc.verify.frontiers import Findings

# A follow, an unfollow, a new or a deleted tweet changes only the timelines that it concerns.
TIMELINES: Final = """
SELECT follower, tweet, posted_at FROM (
    SELECT f.follower, t.id AS tweet, t.posted_at, row_number() OVER (
        PARTITION BY f.follower ORDER BY t.posted_at DESC, t.id DESC) AS place
    FROM public.follows f JOIN public.tweets t ON t.author = f.followee) AS x
WHERE place <= 100
"""
TOTALS: Final = """
SELECT o.customer, u.name, count(*) AS orders, sum(o.total) AS total
FROM public.orders o JOIN public.users u ON u.id = o.customer GROUP BY o.customer, u.name
"""
_SQL: Final[Mapping[str, LiteralString]] = {"timelines": TIMELINES, "order_totals": TOTALS}
_KEYS: Final = {"timelines": ["follower", "tweet"], "order_totals": ["customer"]}
VIEWS: Final = {name: {"sql": query, "key": _KEYS[name]} for name, query in _SQL.items()}
# What to select of a view for rows as its stores return them.
_SELECTED: Final[Mapping[str, LiteralString]] = {
    "timelines": (
        "'timeline:' || follower, tweet::text, (extract(epoch FROM posted_at) * 1000000)::bigint"
    ),
    "order_totals": "customer, name, orders, total::text",
}
_MICROSECONDS: Final = 1_000_000
_TOTALS_COLUMNS: Final = ("customer", "name", "orders", "total")


def view_followers(mirror: str, home: Home, ends: Endpoints) -> dict[str, Any]:
    """Return the followers that hold the views, by name."""
    timeline = {
        "form": "zset",
        "key": "timeline:{follower}",
        "member": "{tweet}",
        "score": "posted_at",
    }
    redis = {"url": ends.redis_url, "prefix": "home", "shapes": {"views.timelines": timeline}}
    search = {"url": ends.opensearch_url, "prefix": "totals"}
    file = f"sqlite:///{home.data}/totals.db"
    return {
        "timelines": {"mirror": mirror, "views": ["timelines"], "redis": redis},
        "totals": {"mirror": mirror, "views": ["order_totals"], "opensearch": search},
        "totals_sql": {"mirror": mirror, "views": ["order_totals"], "sql": {"url": file}},
    }


class ComparedViews(NamedTuple):
    """How many rows Postgres' answers have, and one value of each view as its store has it."""

    rows: int
    examples: tuple[str, ...]


def compare_views(
    connection: psycopg.Connection, name: str, follower: Follower, findings: Findings
) -> ComparedViews:
    """Compare a follower's views with Postgres' own answers."""
    count, examples = 0, list[str]()
    for view in follower.views:
        query = sql.SQL("SELECT {} FROM ({}) AS v").format(
            sql.SQL(_SELECTED[view]), sql.SQL(_SQL[view])
        )
        wanted = Counter(connection.execute(query).fetchall())
        found = Counter(_stored(follower))
        for what, rows in (
            (f"rows of {name} are not in Postgres' answer", found - wanted),
            (f"rows of Postgres' answer are missing from {name}", wanted - found),
        ):
            if rows:
                findings.add(f"views.{view}: {rows.total()} {what}")
        count += wanted.total()
        if found:
            examples.append(_EXAMPLES[view](name, found))
    return ComparedViews(count, tuple(examples))


def _timeline(name: str, rows: Counter[tuple[Any, ...]]) -> str:
    """Describe the longest timeline, the first of these by name."""
    tweets = Counter[str](key for key, *_ in rows)
    key = min(tweets, key=lambda each: (-tweets[each], each))
    newest = max((posted_at, tweet) for of, tweet, posted_at in rows if of == key)[1]
    user = key.removeprefix("timeline:")
    return (
        f"{name}: the home timeline of user {user} has {tweets[key]} tweets, the newest is {newest}"
    )


def _total(name: str, rows: Counter[tuple[Any, ...]]) -> str:
    """Describe the customer with the most orders, the first of these by number."""
    customer, who, orders, total = min(rows, key=lambda row: (-row[2], row[0]))
    return f"{name}: customer {customer}, {who}, has {orders} orders of {total} in total"


_EXAMPLES: Final = {"timelines": _timeline, "order_totals": _total}


def _stored(follower: Follower) -> Iterator[tuple[Any, ...]]:
    if follower.redis is not None:
        return _timelines(follower.redis.url)
    if follower.opensearch is not None:
        return _documents(follower.opensearch.url, follower.opensearch.prefix or "")
    assert follower.sql is not None
    return _sqlite(Path(follower.sql.url.removeprefix("sqlite:///")))


def _timelines(url: str) -> Iterator[tuple[Any, ...]]:
    """Yield key, member and score of the sorted sets."""
    import redis  # noqa: PLC0415 - a store's client, only where it is followed

    client: redis.Redis = redis.Redis.from_url(url, decode_responses=True)
    with closing(client):
        for key in client.scan_iter(match="timeline:*"):
            members: Any = client.zrange(key, 0, -1, withscores=True)
            for member, score in members:
                yield key, member, round(score * _MICROSECONDS)


def _documents(url: str, prefix: str) -> Iterator[tuple[Any, ...]]:
    from opensearchpy import OpenSearch  # noqa: PLC0415 - as above
    from opensearchpy.helpers import scan  # noqa: PLC0415

    with closing(OpenSearch(url)) as client:
        for found in scan(client, index=f"{prefix}-views.order_totals"):
            yield tuple(found["_source"][name] for name in _TOTALS_COLUMNS)


def _sqlite(file: Path) -> Iterator[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
        yield from connection.execute("SELECT customer, name, orders, total FROM order_totals")
