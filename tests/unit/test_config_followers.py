"""Followers are loaded as they are written, and an error about one names its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cdc.config import Config, load, read, show
from cdc.config.followers import Follower, chosen_names
from cdc.errors import ConfigError

HEAD = """\
pipeline: shop
source: {dsn: postgresql://me@localhost/shop}
log: {bootstrap_servers: localhost:9092}
"""
FOLLOWERS = """\
followers:
  mirror:
    delta:
  cache:
    tables: [public.users]
    redis:
      url: redis://:hunter2@localhost:6379/0
      shapes:
        'public."odd.name"': {key: "user:{id}", form: hash, fields: [a, b]}
  orders:
    mirror: mirror
    max_events: ${MANY}
    opensearch:
      url: http://me:hunter2@localhost:9200
      user: me
      password: hunter2
      ca_file: ca.pem
      settings: {number_of_shards: 3, index: {refresh_interval: "${EVERY}"}}
      mappings: {orders: {title: {type: text, fields: {raw: {type: keyword}}}}}
    documents:
      orders:
        table: public.orders
        children:
          lines: {table: public.order_lines, by: {order_id: id}}
delta: {path: s3a://lake/shop}
"""
MIRRORED = "m: {delta: {}, tables: [a.*]}\n  a: {redis: {url: 'redis://h'}, mirror: m, documents:"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lockstep.yaml"


def loaded(path: Path, text: str) -> Config:
    path.write_text(HEAD + text, encoding="utf-8")
    return load(path, {"MANY": "7", "EVERY": "1s"})


def test_followers_are_loaded_as_they_are_written(path: Path) -> None:
    config = loaded(path, FOLLOWERS)
    mirror, cache, orders = config.followers.values()
    assert list(config.followers) == ["mirror", "cache", "orders"]
    # A section with only defaults is a section too.
    assert mirror.delta is not None
    assert mirror.redis is None
    assert mirror.delta.deletes == "hard"
    assert cache.redis is not None
    # By the name that sinks have for the table, which they compare with the schema topic's.
    assert cache.redis.shapes['public."odd.name"'].fields == ("a", "b")
    assert orders.opensearch is not None
    assert orders.max_events == 7
    assert orders.opensearch.settings["index"] == {"refresh_interval": "1s"}
    assert orders.opensearch.mappings["orders"]["title"] == {
        "type": "text",
        "fields": {"raw": {"type": "keyword"}},
    }
    assert orders.opensearch.ca_file == str(path.parent / "ca.pem")
    assert orders.documents["orders"].children["lines"].by == {"order_id": "id"}


def test_canaries_are_sent_where_there_are_followers(path: Path) -> None:
    assert loaded(path, "").canary_seconds == 0
    assert loaded(path, FOLLOWERS).canary_seconds == 5
    path.write_text(HEAD + FOLLOWERS, encoding="utf-8")
    env = {"MANY": "7", "EVERY": "1s", "LOCKSTEP_SOURCE_CANARY_SECONDS": "0"}
    assert load(path, env).canary_seconds == 0


def test_what_is_shown_has_no_secret_and_has_its_origin(path: Path) -> None:
    loaded(path, FOLLOWERS)
    rows = show(read(path, {"MANY": "7", "EVERY": "1s"}))
    assert "hunter2" not in str(rows)
    shown = {at: (value, origin.rpartition(":")[2]) for at, value, origin in rows}
    assert shown["followers.cache.redis.url"] == ("redis://:***@localhost:6379/0", "10")
    assert shown["followers.orders.opensearch.password"] == ("***", "19")
    assert shown["followers.orders.max_events"] == (7, "15")
    assert shown["followers.cache.max_events"] == (300_000, "default")
    assert "followers.cache.delta" not in shown


REDIS, OPENSEARCH = "redis: {url: 'redis://u:p@h/0'", "opensearch: {url: 'http://h:9200'"
SQL = "sql: {url: 'postgresql://h/copy'"
BY_MAIL, BY_MAIL_TOO = "{a.b: {key: 'm:{mail}'}}", "{a.c: {key: 'm:{mail}'}}"


@pytest.mark.parametrize(
    ("one", "other", "table"),
    [
        (f"{{{REDIS}}}}}", "{redis: {url: 'redis://h:6379'}}", "*.*"),
        (f"{{tables: [a.b], {REDIS}}}}}", f"{{tables: ['a.*'], {REDIS}}}}}", "a.b"),
        (f"{{tables: [a.b], {REDIS}}}}}", f"{{tables: [a.c], {REDIS}}}}}", None),
        (f"{{{REDIS}}}}}", "{redis: {url: 'redis://h/1'}}", None),
        (f"{{{REDIS}}}}}", "{redis: {url: 'redis://h:99999'}}", None),
        (f"{{{REDIS}}}}}", f"{{{REDIS}, prefix: x}}}}", None),
        (f"{{tables: [a.b], {REDIS}}}}}", f"{{tables: [a.b], {REDIS}, shapes: {BY_MAIL}}}}}", None),
        (
            f"{{tables: [a.b], {REDIS}, shapes: {BY_MAIL}}}}}",
            f"{{tables: [a.c], {REDIS}, prefix: x, shapes: {BY_MAIL_TOO}}}}}",
            "a.c",
        ),
        (f"{{{OPENSEARCH}}}}}", f"{{tables: [a.b], {OPENSEARCH}}}}}", "a.b"),
        (f"{{tables: [a.b], {OPENSEARCH}, aliases: {{a.b: x}}}}}}", f"{{{OPENSEARCH}}}}}", None),
        (f"{{{OPENSEARCH}}}}}", f"{{{REDIS}}}}}", None),
        (f"{{{SQL}}}}}", f"{{tables: [a.b], {SQL}}}}}", "a.b"),
        (f"{{{SQL}}}}}", f"{{{SQL}, schema: x}}}}", None),
        (f"{{{SQL}}}}}", "{sql: {url: 'postgresql:///copy?host=/run'}}", None),
        ("{topic: {prefix: x}}", "{tables: [a.b], topic: {prefix: x}}", "*.*"),
        ("{topic: {}}", "{topic: {}}", None),
        ("{topic: {prefix: x}}", "{topic: {prefix: x, bootstrap_servers: 'h:1'}}", None),
        (f"{{{REDIS}}}}}", f"{{mirror: m, documents: {{d: {{table: a.b}}}}, {REDIS}}}}}", None),
    ],
)
def test_two_followers_that_write_to_the_same_keys_are_refused(
    path: Path, one: str, other: str, table: str | None
) -> None:
    followers = f"followers:\n  m: {{delta: {{path: /m}}}}\n  a: {one}\n  b: {other}\n"
    if table is None:
        assert set(loaded(path, followers).followers) == {"m", "a", "b"}
        return
    with pytest.raises(ConfigError, match=re.escape(f": a has {table} in the same place")):
        loaded(path, followers)


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (
            "a: {}",
            ":5: followers.a: has no store; expected exactly one of delta, redis, opensearch",
        ),
        ("a: 3", ":5: followers.a: expected names with values below it"),
        ("A: {delta: {}}", "followers.A: 'A' cannot name a follower"),
        ("a: {delta: {}, redis: {url: 'redis://h'}}", "followers.a: has delta and redis; expected"),
        ("a: {detla: {}}", "followers.a.detla: unknown name; did you mean delta?"),
        ("a: {redis: {urll: x}}", "followers.a.redis.urll: unknown name; did you mean url?"),
        ("a: {redis: {prefix: x}}", "followers.a.redis.url: missing; expected text, not empty"),
        ("a: {redis: {url: 'x://hunter2@h'}}", "a.redis.url: is no URL of Redis"),
        (
            "a: {redis: {url: 'redis://h', shapes: {public.t: {key: '{slug}'}}}}",
            "key: starts with a column, whose values could be any other key",
        ),
        ("a: {redis: {url: [hunter2]}}", "a.redis.url: given a list; expected text, not empty"),
        ("a: {sql: {url: 'mysql://hunter2@h/d'}}", "a.sql.url: is no URL of a database"),
        ("a: {topic: {prefix: a.b}}", "a.topic.prefix: 'a.b' cannot start a topic's name"),
        ("a: {topic: {prefix: shop}}", "a.topic.prefix: is that of the pipeline's own topics"),
        ("a: {topic: {bootstrap_servers: h}}", "a.topic.bootstrap_servers: 'h' is no"),
        ("a: {topic: {kafka: {acks: 1}}}", "a.topic.kafka.acks: is set by Lockstep"),
        ("a: {plugin: {kind: ''}}", "a.plugin.kind: given text; expected text, not empty"),
        ("a: {opensearch: {url: h}}", "a.opensearch.url: is no URL of OpenSearch"),
        ("a: {opensearch: {url: 'http://h', user: x}}", "user and password go together"),
        ("a: {opensearch: {url: 'http://h', aliases: {x: y}}}", "'x' names no single table"),
        ("a: {opensearch: {url: 'http://h', settings: {x: 2026-01-01}}}", "settings.x: given some"),
        (
            "a: {opensearch: {url: 'http://h', aliases: {x.y: z, x.z: z}}}",
            "a.opensearch.aliases.x.z: x.y has this alias",
        ),
        ("a: {tables: x, delta: {}}", "a.tables: given text, 'x'; expected a list of text"),
        ("a: {tables: [x], delta: {}}", "a.tables: 'x' names no table"),
        ("a: {tables: [x], redis: {url: 'redis://h'}}", "a.tables: 'x' names no table"),
        ("a: {tables: [], delta: {}}", "a.tables: is empty"),
        ("a: {max_events: 0, delta: {}}", "a.max_events: given a whole number, '0'; expected"),
        ("a: {delta: {deletes: some}}", "a.delta.deletes: given text, 'some'; expected one of"),
        ("a: {delta: {history: ['a.*']}}", "a.delta.history: 'a.*' names no single table"),
        ("a: {delta: {cluster: {a.b: [c]}, partition: {a.b: [c]}}}", "is partitioned already"),
        ("a: {delta: {}}\n  b: {delta: {}}", "followers.b.delta.path: a has its mirrors there"),
        ("a: {redis: {url: 'redis://h', shapes: {a.b: {form: zset}}}}", "a.b.member: missing"),
        ("a: {redis: {url: 'redis://h', shapes: {a.b: {value: x}}}}", "a.b.value: is for the form"),
        (
            "a: {delta: {}, mirror: a}",
            "followers.a.mirror: is what documents and views are made from",
        ),
        ("a: {redis: {url: 'redis://h'}, documents: {d: {table: a.b}}}", "a.mirror: missing"),
        (
            "a: {redis: {url: 'redis://h'}, mirror: a, documents: {d: {table: a.b}}}",
            "followers.a.mirror: a is no delta follower",
        ),
        (
            "a: {redis: {url: 'redis://h'}, mirror: x, documents: {d: {table: a.b}}}",
            "followers.a.mirror: there is no follower x",
        ),
        (
            f"{MIRRORED} {{d: {{table: a.b, children: {{c: {{table: a.c}}}}}}}}}}",
            "followers.a.documents.d.children.c.by: missing",
        ),
        (
            f"{MIRRORED} {{d: {{table: a.b, children: {{c: {{by: {{x: y}}}}}}}}}}}}",
            "followers.a.documents.d.children.c.table: missing",
        ),
        (
            f"{MIRRORED} {{d: {{table: y.b}}}}}}",
            "followers.a.documents.d.table: y.b is not among the mirror's tables",
        ),
        (
            "a: {delta: {}, documents: {d: {table: a.b}}}",
            "a.documents: are stored in Redis or OpenSearch",
        ),
        ("a: {delta: {}, views: [v]}", "a.mirror: missing; documents and views are made from"),
        ("a: {delta: {}, mirror: a, views: [v]}", "a.mirror: a has views"),
        ("a: {delta: {path: x}}\n  b: {delta: {}, mirror: a, views: [v]}", "there is no view v"),
        (
            "a: {delta: {path: x}}\n  b: {delta: {deletes: soft}, mirror: a, views: [v]}",
            "b.delta.deletes: a view has no deleted rows",
        ),
        (
            "a: {delta: {path: x}}\n  b: {delta: {}, mirror: a, views: [v], tables: [a.b]}",
            "b.tables: views name their own tables",
        ),
    ],
)
def test_a_wrong_follower_is_refused_with_its_place(path: Path, written: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(path, f"followers:\n  {written}\ndelta: {{path: s3a://lake/shop}}\n")
    assert says in caught.value.what
    assert "lockstep.yaml:" in caught.value.what
    assert "hunter2" not in caught.value.what


def test_a_follower_is_named_or_all_are() -> None:
    both = {"cache": Follower(), "search": Follower()}
    assert chosen_names(both, None) == ["cache", "search"]
    assert chosen_names(both, ["search", "cache", "search"]) == ["search", "cache"]
    for followers, wanted, says, hint in (
        (both, ["x", "cache", "y"], "there is no follower x, y", "has cache, search"),
        (both, [], "there is no follower", "has cache, search"),
        ({}, None, "there is no follower", "add it to the section"),
    ):
        with pytest.raises(ConfigError) as caught:
            chosen_names(followers, wanted)
        assert (caught.value.what, hint in caught.value.hint) == (says, True)


def test_a_mirror_needs_a_path_somewhere(path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(path, "followers: {a: {delta: {}}}")
    assert "followers.a.delta.path: missing; expected text, here or in delta.path" in str(
        caught.value
    )
