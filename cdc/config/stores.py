"""Refuse followers that contradict themselves, each other or the rest of the configuration.

What only the database can show, such as whether a table is captured, is left to `cdc doctor`; what
only a store can show, to the follower.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec

from cdc.config.meaning import OWNED_KAFKA_SETTINGS, bootstrap_servers
from cdc.config.patterns import parse_table_pattern
from cdc.config.places import conflicts
from cdc.config.secrecy import LOGIN, MISREAD, has_login, is_misread
from cdc.events import table_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from cdc.config.followers import (
        DeltaFollower,
        Document,
        Follower,
        RedisShape,
        SqlFollower,
        TopicFollower,
    )
    from cdc.config.model import Config

    Complaint = tuple[tuple[str, ...], str]  # the path, and what is wrong there

_STORES: Final = ("delta", "redis", "opensearch", "sql", "topic", "plugin")
_VIEW_NAME: Final = re.compile(r"[a-z0-9_]{1,40}")
_NAME: Final = re.compile(r"[a-z0-9_-]{1,40}")
_PREFIX: Final = re.compile(r"[A-Za-z0-9_-]{1,100}")
_STARTS_WITH_A_COLUMN: Final = re.compile(r"\{(?!\{)")
_REDIS_URL: Final = re.compile(r"(rediss?|unix)://.+")
_SQL_URL: Final = re.compile(r"(postgres(ql)?|sqlite)(\+\w+)?://.+")
_HTTP_URL: Final = re.compile(r"https?://[^/\s]+.*")
_DEFAULT_TABLES: Final = ("*.*",)
# Which forms accept a field of a shape, and which of these need it.
_FORMS_OF_FIELD: Final = {
    "fields": ({"fields", "hash"}, set[str]()),
    "value": ({"text"}, {"text"}),
    "member": ({"set", "zset"}, {"set", "zset"}),
    "score": ({"zset"}, {"zset"}),
    # A member has no expiry of its own, and a collection that lacks some members is wrong.
    "ttl_seconds": ({"row", "fields", "text", "hash"}, set[str]()),
}


def with_plain_names(follower: Follower) -> Follower:
    """Return it with each single table's name as sinks write it, `schema.table` without quotes."""
    given: dict[str, object] = {}
    for name in _STORES:
        if (store := getattr(follower, name)) is not None:
            found = {field: getattr(store, field, None) for field in _BY_TABLE}
            named = {field: _named_in(each) for field, each in found.items() if each}
            given[name] = msgspec.structs.replace(store, **named)
    given["documents"] = {name: _plain_document(d) for name, d in follower.documents.items()}
    return msgspec.structs.replace(follower, **given)


_BY_TABLE: Final = ("history", "shapes", "cluster", "partition", "aliases", "mappings")


def _named_in(names: dict[str, object] | tuple[str, ...]) -> object:
    if isinstance(names, dict):
        return {_named(name): each for name, each in names.items()}
    return tuple(map(_named, names))


def _plain_document(document: Document) -> Document:
    children = {name: _plain_document(each) for name, each in document.children.items()}
    return msgspec.structs.replace(document, table=_named(document.table), children=children)


def _named(name: str) -> str:
    exact = _exact(name)
    return table_name(*exact) if exact else name


def _exact(name: str) -> tuple[str, str] | None:
    """Return schema and name of the single table that `name` describes; None where it is none."""
    try:
        return parse_table_pattern(name).exact
    except ValueError:
        return None


def complaints(followers: Mapping[str, Follower | None]) -> Iterator[Complaint]:
    """Yield what is wrong with followers of the right types; None is already reported."""
    for name, follower in followers.items():
        at = ("followers", name)
        if not _NAME.fullmatch(name):
            yield at, f"{name!r} cannot name a follower; expected 1 to 40 of a-z 0-9 _ -"
        if follower is not None:
            for below, what in _follower(follower, followers):
                yield (*at, *below), what


def contradictions(config: Config) -> Iterator[Complaint]:
    """Yield contradictions between followers and the other sections."""
    paths: dict[str, str] = {}
    for name, follower in config.followers.items():
        if follower.delta is None:
            continue
        at = ("followers", name, "delta", "path")
        path = follower.delta.path or config.delta.path
        if path is None:
            yield at, "missing; expected text, here or in delta.path"
        elif (other := paths.setdefault(path.rstrip("/"), name)) != name:
            yield at, f"{other} has its mirrors there; each follower needs a path of its own"
    yield from _views(config)
    yield from conflicts(config)


def _views(config: Config) -> Iterator[Complaint]:
    for name in config.views:
        if not _VIEW_NAME.fullmatch(name) or name == "definitions":
            what = "cannot name a view; expected 1 to 40 of a-z 0-9 _, and not definitions"
            yield ("views", name), f"{name!r} {what}"
    for name, follower in config.followers.items():
        for view in follower.views:
            if view not in config.views:
                at = ("followers", name, "views")
                yield at, f"there is no view {view}; the views are {list(config.views)}"
                continue
            fresh, waits = config.views[view].freshness_seconds, longest_wait(config, name)
            if fresh is not None and waits >= fresh:
                of = " and ".join(filter(None, (name, follower.mirror)))
                what = f"{fresh:g} s; expected more than every_seconds of {of}, {waits:g} s"
                yield ("views", view, "freshness_seconds"), what


def seconds_between_cuts(config: Config, name: str) -> float:
    """Return the least time between two cuts of a follower."""
    fresh = [limit for _, limit in freshness(config, name)]
    return config.followers[name].every_seconds or min(fresh, default=0.0) / 2


def longest_wait(config: Config, name: str) -> float:
    """Return how long a change may wait by the settings of a follower and its mirror."""
    mirror = config.followers.get(config.followers[name].mirror or "")
    return seconds_between_cuts(config, name) + (mirror.every_seconds if mirror else 0.0)


def freshness(config: Config, name: str) -> list[tuple[str, float]]:
    """Return how late a follower's views may be, of those that say so."""
    views = {each: config.views.get(each) for each in config.followers[name].views}
    found = {each: view.freshness_seconds for each, view in views.items() if view is not None}
    return [(each, limit) for each, limit in found.items() if limit is not None]


def _follower(follower: Follower, others: Mapping[str, Follower | None]) -> Iterator[Complaint]:
    stores = [name for name in _STORES if getattr(follower, name) is not None]
    if len(stores) != 1:
        found = f"has {' and '.join(stores)}" if stores else "has no store"
        yield (), f"{found}; expected exactly one of {', '.join(_STORES)}"
    for text in follower.tables:
        try:
            parse_table_pattern(text)
        except ValueError:
            yield ("tables",), f"{text!r} names no table; expected schema.table or schema.*"
    if not follower.tables:
        yield ("tables",), "is empty; leave it out, and every captured table is followed"
    yield from _documents(follower, others)
    if follower.delta is not None:
        yield from _delta(follower.delta)
    if follower.redis is not None:
        yield from _redis(follower)
    if follower.opensearch is not None:
        yield from _opensearch(follower)
    if follower.sql is not None:
        yield from _sql(follower.sql)
    if follower.topic is not None:
        yield from _topic(follower.topic)


# --- each store ---


def _delta(delta: DeltaFollower) -> Iterator[Complaint]:
    if delta.path is not None and has_login(delta.path):
        yield ("delta", "path"), LOGIN
    for text in delta.history:
        yield from _one_table(("delta", "history"), text)
    for name in ("cluster", "partition"):
        yield from _tables(("delta", name), getattr(delta, name), ())
    for table in delta.cluster.keys() & delta.partition.keys():
        at = ("delta", "cluster", table)
        yield at, "is partitioned already; a table is partitioned or clustered"


def _redis(follower: Follower) -> Iterator[Complaint]:
    assert follower.redis is not None
    if not _REDIS_URL.fullmatch(follower.redis.url):
        yield ("redis", "url"), "is no URL of Redis; expected redis://, rediss:// or unix://"
    elif is_misread(follower.redis.url):
        yield ("redis", "url"), MISREAD
    shapes = follower.redis.shapes
    yield from _tables(("redis", "shapes"), shapes, follower.documents)
    for table, shape in shapes.items():
        for field, what in _shape(shape):
            yield ("redis", "shapes", table, field), what


def _shape(shape: RedisShape) -> Iterator[tuple[str, str]]:
    for field, (taken, needed) in _FORMS_OF_FIELD.items():
        if getattr(shape, field) and shape.form not in taken:
            forms = " and ".join(sorted(taken))
            yield field, f"is for the form {forms}; this is {shape.form}"
        elif not getattr(shape, field) and shape.form in needed:
            yield field, f"missing; the form {shape.form} needs it"
    if shape.form in {"set", "zset"} and shape.key is None:
        yield "key", f"missing; the form {shape.form} needs the collection's key"
    if shape.key and _STARTS_WITH_A_COLUMN.match(shape.key):
        what = "starts with a column, whose values could be any other key; start with text that"
        yield "key", f"{what} nothing else in this Redis has, such as user:{{id}}"


def _opensearch(follower: Follower) -> Iterator[Complaint]:
    store = follower.opensearch
    assert store is not None
    if not _HTTP_URL.fullmatch(store.url):
        yield ("opensearch", "url"), "is no URL of OpenSearch; expected http:// or https://"
    elif is_misread(store.url):
        yield ("opensearch", "url"), MISREAD
    if (store.user is None) != (store.password is None):
        yield ("opensearch", "user"), "user and password go together; one of them is missing"
    for name in ("aliases", "mappings"):
        yield from _tables(("opensearch", name), getattr(store, name), follower.documents)


def _sql(store: SqlFollower) -> Iterator[Complaint]:
    if not _SQL_URL.fullmatch(store.url):
        yield ("sql", "url"), "is no URL of a database; expected postgresql:// or sqlite:///"
    elif is_misread(store.url):
        yield ("sql", "url"), MISREAD


def _topic(store: TopicFollower) -> Iterator[Complaint]:
    if store.prefix is not None and not _PREFIX.fullmatch(store.prefix):
        what = "cannot start a topic's name; expected 1 to 100 of A-Z a-z 0-9 _ -"
        yield ("topic", "prefix"), f"{store.prefix!r} {what}"
    if store.bootstrap_servers is not None:
        for what in bootstrap_servers(store.bootstrap_servers):
            yield ("topic", "bootstrap_servers"), what
    for name in store.kafka.keys() & OWNED_KAFKA_SETTINGS:
        what = "is set by Lockstep: exactly-once depends on it; remove it"
        yield ("topic", "kafka", name), what


# --- documents ---


def _documents(follower: Follower, others: Mapping[str, Follower | None]) -> Iterator[Complaint]:
    if follower.views:
        yield from _of_views(follower, others)
        return
    if not follower.documents:
        if follower.mirror is not None:
            yield ("mirror",), "is what documents and views are made from, and there are none"
        return
    if follower.redis is None and follower.opensearch is None:
        yield ("documents",), "are stored in Redis or OpenSearch; other stores hold tables"
    if follower.tables != _DEFAULT_TABLES:
        yield ("tables",), "documents name their own tables; leave it out"
    mirror = others.get(follower.mirror or "")
    yield from _mirror(follower, others)
    for name, document in follower.documents.items():
        at = ("documents", name)
        if document.by:
            yield (*at, "by"), "a root has no parent; leave it out"
        for below, what in _document(document, mirror):
            yield (*at, *below), what


def _of_views(follower: Follower, others: Mapping[str, Follower | None]) -> Iterator[Complaint]:
    if follower.documents:
        yield ("views",), "a follower has documents or views; make another one"
    if follower.tables != _DEFAULT_TABLES:
        yield ("tables",), "views name their own tables; leave it out"
    if follower.delta is not None and follower.delta.deletes == "soft":
        yield ("delta", "deletes"), "a view has no deleted rows; leave it out"
    yield from _mirror(follower, others)


def _mirror(follower: Follower, others: Mapping[str, Follower | None]) -> Iterator[Complaint]:
    name = follower.mirror
    mirror = others.get(name or "")
    if name is None:
        what = "documents and views are made from a delta follower's tables: its name"
        yield ("mirror",), f"missing; {what}"
    elif name not in others:
        yield ("mirror",), f"there is no follower {name}"
    elif mirror is not None and mirror.delta is None:
        yield ("mirror",), f"{name} is no delta follower"
    elif mirror is not None and mirror.is_derived:
        yield ("mirror",), f"{name} has views; name the follower that has the tables"


def _document(document: Document, mirror: Follower | None) -> Iterator[Complaint]:
    exact = _exact(document.table)
    if exact is None:
        yield from _one_table(("table",), document.table)
    elif mirror is not None and _parse(mirror) and not follows(mirror, *exact):
        yield ("table",), f"{document.table} is not among the mirror's tables"
    for name, child in document.children.items():
        if not child.by:
            what = "missing; expected its columns, each with the parent's: {order_id: id}"
            yield ("children", name, "by"), what
        for below, what in _document(child, mirror):
            yield ("children", name, *below), what


def follows(follower: Follower, schema: str, table: str) -> bool:
    """Return whether a follower's `tables` match; the table need not be captured."""
    return any(parse_table_pattern(each).matches(schema, table) for each in follower.tables)


# What mirrors, and tables of SQL stores, have in addition to the source's columns.
_MIRRORS: Final = ("_seq", "_commit_lsn", "_committed_at", "_exact")
_SOFT: Final = ("_deleted",)
_HISTORY: Final = ("_valid_to_lsn", "_valid_to", "_current")
_SQLS: Final = ("_lockstep_seq",)
SQL_FRONTIERS: Final = "lockstep_frontiers"  # a table


def own_columns(follower: Follower, table: str) -> tuple[str, ...]:
    """Return the names of a store's own columns in its copy of a table, for sinks of ours."""
    if follower.sql is not None:
        return _SQLS
    if follower.delta is None:
        return ()
    if table in follower.delta.history:
        return _MIRRORS + _HISTORY
    return _MIRRORS + (_SOFT if follower.delta.deletes == "soft" else ())


def ignores_case(follower: Follower) -> bool:
    """Return whether two columns whose names differ in case only are one to the store."""
    sqlite = follower.sql is not None and follower.sql.url.startswith("sqlite")
    return follower.delta is not None or sqlite


def _parse(follower: Follower) -> bool:
    """Return whether its `tables` are valid patterns; where not, that is reported elsewhere."""
    try:
        return bool([parse_table_pattern(each) for each in follower.tables])
    except ValueError:
        return False


def _tables(
    at: tuple[str, ...], names: Iterable[str], documents: Iterable[str]
) -> Iterator[Complaint]:
    for name in names:
        if name not in documents:
            yield from _one_table((*at, name), name)


def _one_table(at: tuple[str, ...], name: str) -> Iterator[Complaint]:
    if _exact(name) is None:
        yield at, f"{name!r} names no single table; expected schema.table"
