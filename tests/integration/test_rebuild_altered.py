"""A store is built again though DDL has changed rows without an event of theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from lockstep.jobs.generations.builders import LogBuilder
from lockstep.jobs.generations.rebuilding import DivergedError, Rebuild
from tests.fixtures.daemon import NewPipeline
from tests.fixtures.followed import Followed
from tests.fixtures.store_opensearch import OpenSearchStore
from tests.integration.test_altered_tables import alter

if TYPE_CHECKING:
    import redis

_TABLE = "CREATE TABLE t (id int PRIMARY KEY, a text)"
_NO_SPARK: Any = None  # only small cuts


class Unaltered(LogBuilder):
    """Takes each row's own event for its newest change."""

    def altered_at(self, *_: object) -> int:
        return 0


def test_rows_that_ddl_has_changed_are_built_and_proved(
    pipeline: NewPipeline,
    redis_url: str,
    redis_client: redis.Redis,
    opensearch_store: OpenSearchStore,
) -> None:
    search = {"url": opensearch_store.url, "prefix": opensearch_store.prefix}
    followers: dict[str, object] = {
        "cache": {"redis": {"url": redis_url}},
        "search": {"opensearch": search},
    }
    line = pipeline(_TABLE, followers=followers)
    line.start().wait_ready()
    line.database.execute("INSERT INTO t SELECT i, 'a' || i FROM generate_series(1, 30) i")
    made = Followed(line, _NO_SPARK)
    made.follow("cache", "search")
    alter(line, "ALTER TABLE t ADD b text DEFAULT 'old', ADD n int DEFAULT 4")
    line.database.execute("UPDATE t SET b = 'new' WHERE id < 6", "DELETE FROM t WHERE id > 28")
    alter(line, "ALTER TABLE t RENAME a TO c")
    line.database.execute("UPDATE t SET n = 5 WHERE id BETWEEN 4 AND 9")
    made.follow("cache", "search")
    reported: list[str] = []
    for name in ("cache", "search"):
        builder = LogBuilder(
            line.config, name, lambda: pytest.fail("no Spark here"), reported.append
        )
        outcome = Rebuild(made.sink(name), builder, reported.append).run()
        assert outcome.generation == 2
        assert [each.differences for each in outcome.tables] == [()], reported
    found = {
        key.decode().rpartition(":")[2]: msgspec.json.decode(cast("bytes", redis_client.get(key)))
        for key in redis_client.scan_iter(f"{made.prefix}:public.t:*")
    }
    wanted = made.rows("SELECT id::text, to_jsonb(t) FROM t")
    assert found == wanted
    hits = opensearch_store.hits("public.t").values()
    assert {str(hit["_source"]["id"]): hit["_source"] for hit in hits} == wanted
    # Only where DDL has changed rows may a row have another seq than its event.
    builder = Unaltered(line.config, "cache", lambda: pytest.fail("no Spark here"), reported.append)
    with pytest.raises(DivergedError, match=r"22 keys of public\.t differ"):
        Rebuild(made.sink("cache"), builder, reported.append).run()
