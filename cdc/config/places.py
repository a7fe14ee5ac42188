"""Refuse followers that would write to the same place, and would overwrite each other's rows.

Pure. Only what the configuration itself shows: one server under two names, or two patterns that do
not match each other, look like two places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import parse_qs, urlsplit

from cdc.config.patterns import TablePattern, parse_table_pattern
from cdc.events import table_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cdc.config.followers import Follower
    from cdc.config.model import Config

    Complaint = tuple[tuple[str, ...], str]  # the path, and what is wrong there

_PORTS: Final = {"redis": 6379, "rediss": 6379, "http": 80, "https": 443, "postgresql": 5432}
_ANY: Final = parse_table_pattern("*.*")
# The setting that gives a follower a place of its own.
_SETTING: Final = {"redis": "prefix", "opensearch": "prefix", "sql": "schema", "topic": "prefix"}


class _Destination(NamedTuple):
    """Where a follower writes."""

    store: str
    server: str
    prefix: str
    tables: tuple[TablePattern, ...]
    named: Mapping[str, str]  # by table, the configured place, instead of the one with the prefix
    are_documents: bool  # `*.*` does not match these


def conflicts(config: Config) -> Iterator[Complaint]:
    """Yield which followers would write to the same place, of those with a place on a server."""
    earlier: dict[str, _Destination] = {}
    for name, follower in config.followers.items():
        mine = _destination(config, name, follower)
        if mine is None:
            continue
        at = ("followers", name, mine.store)
        if mine.store == "topic" and (mine.server, mine.prefix) == _of_log(config):
            yield (*at, "prefix"), "is that of the pipeline's own topics; give it another one"
        if mine.store == "opensearch":
            first: dict[str, str] = {}
            for table, alias in mine.named.items():
                if (other := first.setdefault(alias, table)) != table:
                    yield (
                        (*at, "aliases", table),
                        f"{other} has this alias; expected one of its own",
                    )
        for other, theirs in earlier.items():
            if both := _shared_table(mine, theirs):
                setting = _SETTING[mine.store]
                what = f"{other} has {both} in the same place; give one a {setting}, or names"
                yield (*at, setting), f"{what}, of its own"
                break
        earlier[name] = mine


def _destination(config: Config, name: str, follower: Follower) -> _Destination | None:
    redis, opensearch = follower.redis, follower.opensearch
    named: dict[str, str]
    if redis is not None:
        named = {table: shape.key for table, shape in redis.shapes.items() if shape.key}
        store, server, prefix = "redis", _server(redis.url), redis.prefix
    elif opensearch is not None:
        named = dict(opensearch.aliases)
        store, server, prefix = "opensearch", _server(opensearch.url), opensearch.prefix
    elif follower.sql is not None:
        named = {}
        store, server, prefix = "sql", _server(follower.sql.url), follower.sql.schema
    elif (topic := follower.topic) is not None:
        # A prefix is one follower's, whatever its tables are.
        server = topic.bootstrap_servers or config.log.bootstrap_servers
        prefix = topic_prefix(config, name, follower)
        return _Destination("topic", server, prefix, (_ANY,), {}, are_documents=False)
    else:
        return None
    tables = follower.tables
    if follower.documents:
        tables = tuple(f'documents."{name}"' for name in follower.documents)
        named = {table_name("documents", table): at for table, at in named.items()}
    elif follower.views:
        tables = tuple(f'views."{name}"' for name in follower.views)
    parsed = tuple(parse_table_pattern(each) for each in tables)
    documents = follower.is_derived
    return _Destination(store, server, prefix or config.prefix, parsed, named, documents)


def topic_prefix(config: Config, name: str, follower: Follower) -> str:
    """Return the prefix of the topics of a follower in topics."""
    assert follower.topic is not None, "the caller has checked"
    return follower.topic.prefix or f"{config.prefix}-{name}"


def _of_log(config: Config) -> tuple[str, str]:
    return config.log.bootstrap_servers, config.prefix


def _shared_table(one: _Destination, other: _Destination) -> str | None:
    """Return a table that both would write to the same place; None if there is none."""
    if (one.store, one.server) != (other.store, other.server):
        return None
    for table, place in one.named.items():
        if place in other.named.values():
            return table
    if (one.prefix, one.are_documents) != (other.prefix, other.are_documents):
        return None
    for mine in one.tables:
        for theirs in other.tables:
            found = _overlap(mine, theirs)
            if found and table_name(*found) not in {**one.named, **other.named}:
                return table_name(*found)
    return None


def _overlap(one: TablePattern, other: TablePattern) -> tuple[str, str] | None:
    """Return the table, or the pattern, that is in both."""
    for each, against in ((one, other), (other, one)):
        schema = each.schema.exact or each.schema.text
        table = each.table.exact or each.table.text
        if against.matches(schema, table):
            return schema, table
    return None


def _server(url: str) -> str:
    """Return the part of a URL that identifies the server and the database in it."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:  # no port or address; the client reports that
        return url
    path, query = parts.path.strip("/"), parse_qs(parts.query)
    if parts.scheme.startswith("redis"):
        path = (query.get("db") or [path or "0"])[0]
    host = parts.hostname or (query.get("host") or [""])[0]  # where libpq takes it, too
    return f"{host}:{port}/{path}"
