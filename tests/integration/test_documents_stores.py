"""Nested documents from SQL to the stores: real daemon, mirror and followers, cut after cut.

The documents in OpenSearch and in Redis are compared with the result of one SQL query.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import pytest
import redis
from opensearchpy import OpenSearch

from cdc.errors import UnavailableError
from lockstep.sinks.opensearch.reader import OpenSearchReader
from lockstep.sinks.redis.reader import RedisReader
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest
from tests.fixtures.followed import Followed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TABLES: Final = (
    "CREATE TABLE people (id int PRIMARY KEY, name text, mail text)",
    "CREATE TABLE products (code text PRIMARY KEY, name text, weight numeric)",
    "CREATE TABLE orders (id bigint PRIMARY KEY, buyer int, note text, total numeric(12,2))",
    "CREATE TABLE items (order_id bigint, line int, product text, price numeric(10,2))",
    "ALTER TABLE items ADD PRIMARY KEY (order_id, line)",
    "CREATE SEQUENCE moved START 100",
    "CREATE TABLE parts (no serial PRIMARY KEY, order_id bigint, line int, name text)",
    # Part of no document, and not among the mirror's tables.
    "CREATE TABLE visits (id int PRIMARY KEY)",
)
MIRRORED: Final = [f"public.{each}" for each in ("people", "products", "orders", "items", "parts")]
DOCUMENT: Final = {
    "table": "public.orders",
    "columns": ["id", "note", "total"],
    "children": {
        "buyer": {
            "table": "public.people",
            "by": {"id": "buyer"},
            "one": True,
            "columns": ["name"],
        },
        "items": {
            "table": "public.items",
            "by": {"order_id": "id"},
            "columns": ["line", "price"],
            "order": ["-price"],
            "children": {
                "product": {"table": "public.products", "by": {"code": "product"}, "one": True},
                "parts": {
                    "table": "public.parts",
                    "by": {"order_id": "order_id", "line": "line"},
                    "columns": ["name"],
                    "order": ["name"],
                },
            },
        },
    },
}
# The definition of a document again, in SQL.
EXPECTED: Final = """
SELECT o.id::text, jsonb_build_object('id', o.id, 'note', o.note, 'total', o.total::text,
  'buyer', (SELECT jsonb_build_object('name', name) FROM people WHERE id = o.buyer),
  'items', (SELECT coalesce(jsonb_agg(jsonb_build_object('line', i.line, 'price', i.price::text,
      'product', (SELECT jsonb_build_object('code', code, 'name', name, 'weight', weight::text)
        FROM products WHERE code = i.product),
      'parts', (SELECT coalesce(jsonb_agg(jsonb_build_object('name', name)
          ORDER BY name COLLATE "C", no), '[]')
        FROM parts p WHERE (p.order_id, p.line) = (i.order_id, i.line)))
    ORDER BY i.price DESC, i.order_id, i.line), '[]') FROM items i WHERE i.order_id = o.id))
FROM orders o
"""
_TOTALS: Final = (
    "UPDATE orders o SET total = s.total FROM (SELECT o.id, coalesce(sum(price), 0)::numeric(12,2)"
    " AS total FROM orders o LEFT JOIN items ON order_id = o.id GROUP BY o.id) s"
    " WHERE s.id = o.id AND o.total IS DISTINCT FROM s.total"
)
WRITES: Final = (
    """INSERT INTO orders VALUES ({order}, {who}, 'n''{what}')
       ON CONFLICT (id) DO UPDATE SET buyer = NULLIF({who}, 0)""",
    """INSERT INTO items VALUES ({order}, {line}, '{what}', {amount}.50)
       ON CONFLICT (order_id, line) DO UPDATE SET price = items.price + 1""",
    # A child moves, with or without its own children.
    """UPDATE items SET order_id = {other}, line = nextval('moved')
       WHERE order_id = {order} AND line = {line}""",
    "UPDATE parts SET order_id = {other} WHERE order_id = {order} AND line = {line}",
    "INSERT INTO parts (order_id, line, name) VALUES ({order}, {line}, '{what}')",
    "UPDATE items SET product = '{what}' WHERE order_id = {order} AND line = {line}",
    """INSERT INTO products VALUES ('{what}', 'tea', 1.{who}0)
       ON CONFLICT (code) DO UPDATE SET name = products.name || '{who}'""",
    """INSERT INTO people VALUES ({who}, 'Zoë', 'x')
       ON CONFLICT (id) DO UPDATE SET name = '{what}{who}', mail = 'y'""",
    "DELETE FROM items WHERE order_id = {order} AND line = {line}",
    "DELETE FROM parts WHERE order_id = {order}",
    "DELETE FROM people WHERE id = {who}",
    "DELETE FROM products WHERE code = '{what}'",
    "DELETE FROM orders WHERE id = {order}",
    "UPDATE orders SET id = nextval('moved') WHERE id = {order}",
)
_ORDERS, _PEOPLE, _LINES = 12, 4, 4
_LOOK_SECONDS: Final = 0.05

Documents = dict[str, Any]


class Shop(Followed):
    """Orders with their items, in a mirror, and as documents in two stores."""

    def __init__(
        self,
        made: PipelineUnderTest,
        spark: SparkSession,
        client: redis.Redis,
        search: OpenSearch,
    ) -> None:
        super().__init__(made, spark)
        self._caches = RedisReader(client, "docs", "cache")
        self._index = OpenSearchReader(search, self.prefix, "index")
        self.alias = f"{self.prefix}-documents.order"
        self.chance = Random(6)

    def cached(self) -> Documents:
        def read(client: redis.Redis) -> Documents:
            names = sorted(client.scan_iter("docs:documents.order:*", count=1_000))
            values = client.mget(names) if names else []
            ids = [name.decode().rpartition(":")[2] for name in names]
            return {key: json.loads(value) for key, value in zip(ids, values, strict=True) if value}

        return self._caches.read(read).found

    def indexed(self, query: object = None) -> Documents:
        body = {"query": query or {"match_all": {}}, "size": 1_000}

        def search(client: OpenSearch) -> Documents:
            found = client.search(index=self.alias, body=body)
            assert not found["_shards"]["failed"]
            return {hit["_id"]: hit["_source"] for hit in found["hits"]["hits"]}

        return self._index.read(search).found

    def transaction(self, *statements: str) -> None:
        """Run the statements in one transaction, which also corrects the totals."""
        with self.pipeline.database.connect() as connection, connection.transaction():
            for statement in (*statements, _TOTALS):
                connection.execute(statement.encode())

    def write(self, times: int) -> None:
        """Make random changes to orders, items, their children and their parents."""
        chance = self.chance
        for _ in range(times):
            order, other = chance.sample(range(_ORDERS), 2)
            named = {
                "order": order,
                "other": other,
                "line": chance.randrange(_LINES),
                "who": chance.randrange(_PEOPLE),
                "what": chance.choice("abcü"),
                "amount": chance.randrange(9),
            }
            chosen = chance.sample(WRITES, chance.randint(1, 5))
            self.transaction(*(each.format(**named) for each in chosen))

    def check(self) -> Documents:
        """Fail unless both stores hold the query's result; return it."""
        wanted = self.rows(EXPECTED)
        assert self.indexed() == wanted
        assert self.cached() == wanted
        return wanted

    @contextmanager
    def watched(self) -> Iterator[list[str]]:
        """Read both stores during the block; yield the documents that no commit has produced."""
        wrong: list[str] = []
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_LOOK_SECONDS):
                for store, read in (("index", self.indexed), ("cache", self.cached)):
                    try:
                        wrong.extend(f"{store}: {each}" for each in read().values() if _torn(each))
                    except UnavailableError:
                        time.sleep(_LOOK_SECONDS)

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            yield wrong
        finally:
            over.set()
            watching.join()


def _torn(document: Any) -> bool:  # noqa: ANN401 - JSON
    """Return whether an order and its items are from different transactions."""
    prices = sum(round(100 * float(item["price"])) for item in document["items"])
    return prices != round(100 * float(document["total"] or 0))


@pytest.fixture
def shop(
    pipeline: NewPipeline,
    spark: SparkSession,
    redis_client: redis.Redis,
    redis_url: str,
    opensearch_url: str,
    tmp_path: Path,
) -> Iterator[Shop]:
    documents: dict[str, object] = {"mirror": "lake", "documents": {"order": DOCUMENT}}
    followers: dict[str, object] = {
        "lake": {"delta": {"path": str(tmp_path / "lake")}, "tables": MIRRORED},
        "cache": {"redis": {"url": redis_url, "prefix": "docs"}, **documents},
        "index": {"opensearch": {"url": opensearch_url}, **documents},
    }
    made = pipeline(*TABLES, followers=followers)
    made.start().wait_ready()
    made.database.execute("INSERT INTO visits VALUES (1)")
    with OpenSearch(opensearch_url, timeout=60, pool_maxsize=2) as search:
        yield Shop(made, spark, redis_client, search)
        search.indices.delete(index=f"{made.config.prefix}-*", ignore_unavailable=True)


@pytest.mark.long("all stores and Spark; test_documents_mirror has the documents")
@pytest.mark.slow
def test_documents_in_every_store_are_what_sql_makes_of_the_rows(shop: Shop) -> None:
    """Children and their children are moved, deleted and added; so are parents; then truncates."""
    shop.write(40)
    with shop.following("lake", "cache", "index") as runs:
        shop.reach(*runs.values())
        shop.check()
        with shop.watched() as wrong:
            for _ in range(3):
                shop.write(15)
                shop.reach(*runs.values())
                assert len(shop.check()) > 2
            shop.transaction(
                "INSERT INTO orders SELECT n, 1, 'many' FROM generate_series(5000, 5099) n",
                "INSERT INTO items SELECT n, 1, 'a', 2 FROM generate_series(5000, 5099) n",
                "INSERT INTO products VALUES ('a', 'green tea', 0.5)"
                " ON CONFLICT (code) DO UPDATE SET name = 'green tea'",
            )
            shop.reach(*runs.values())
            assert len(shop.check()) > 100
        assert wrong == []
        nested = {"path": "items", "query": {"match": {"items.product.name": "green"}}}
        ids = shop.rows("SELECT order_id::text, 1 FROM items WHERE product = 'a'").keys()
        roots = shop.rows("SELECT id::text, 1 FROM orders").keys()
        assert shop.indexed({"nested": nested}).keys() == ids & roots
        shop.transaction("TRUNCATE parts", "TRUNCATE items", "DELETE FROM orders WHERE id % 2 = 1")
        shop.reach(*runs.values())
        assert all(each["items"] == [] for each in shop.check().values())
        shop.write(10)
        shop.reach(*runs.values())
        shop.check()
        shop.transaction("TRUNCATE orders", "INSERT INTO orders VALUES (1, 1, 'last')")
        shop.reach(*runs.values())
        assert shop.check().keys() == {"1"}
