"""The doctor's checks of followers that need no store: what they name exists and has a key.

What a store itself lacks is found by its follower, which halts; here is what the configuration and
the database show beforehand. Pure functions from facts to findings.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.config import Config, stores
from cdc.config.patterns import parse_table_pattern
from cdc.operate.findings import Finding, error, note, ok, warning
from cdc.operate.readable import listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config.followers import Document, Follower, RedisShape
    from cdc.source.tables import SourceTable, TableColumn

_PLACE: Final = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")


class CapturedTables(NamedTuple):
    """What is captured, by name as in the configuration, and the columns of each by its oid."""

    tables: dict[str, SourceTable]
    columns: dict[int, list[TableColumn]]


def check_followers(config: Config, facts: CapturedTables) -> Iterator[Finding]:
    """Yield what is wrong with what followers name, and what they will lack."""
    if not config.followers:
        return
    found = [
        finding
        for name, follower in config.followers.items()
        # `cdc view check` checks the tables that views are made of.
        if not follower.views
        for finding in _follower(config, facts, name, follower)
    ]
    yield from found
    if not found:
        yield ok("followers", "the tables and columns that they name are captured, with keys")
    if not config.canary_seconds:
        what = "no canary is sent: on an idle database nothing shows whether followers would work"
        yield note("canary", what, "source.canary_seconds: 5")


def _follower(
    config: Config, facts: CapturedTables, name: str, follower: Follower
) -> Iterator[Finding]:
    at = f"followers.{name}"
    yield from _patterns(facts, at, follower)
    for place, table, columns in _named(follower):
        if table in facts.tables:
            yield from _columns(config, facts, f"{at}.{place}", table, columns)
        else:
            what = f"{at}.{place} names {table}, which is not captured"
            yield warning("followers_tables", what, "name it in source.tables, then `cdc setup`")
    followed = [table for table in facts.tables.values() if _follows(follower, table)]
    keyless = [table for table in followed if not _key(config, facts, table)]
    if keyless and follower.delta is None and follower.plugin is None:
        yield error(
            "followers_key",
            f"{name} follows tables without a key, whose rows it can't distinguish:"
            f" {listed([str(each) for each in keyless])}",
            f"give them a primary key, or leave them out of {at}.tables",
        )
    yield from _expiring(facts, name, follower)


def _patterns(facts: CapturedTables, at: str, follower: Follower) -> Iterator[Finding]:
    for text in follower.tables:
        pattern = parse_table_pattern(text)
        if not any(pattern.matches(each.schema, each.name) for each in facts.tables.values()):
            what = f"{at}.tables: nothing that is captured matches {text}"
            yield warning("followers_tables", what, "name it in source.tables, then `cdc setup`")


def _follows(follower: Follower, table: SourceTable) -> bool:
    if follower.documents:
        return any(each.table == str(table) for each in _every(follower.documents))
    return stores.follows(follower, table.schema, table.name)


def _key(config: Config, facts: CapturedTables, table: SourceTable) -> tuple[str, ...]:
    """Return the key columns of the table's events."""
    chosen = config.selection.of((table.schema, table.name)).key
    if chosen is not None:
        return chosen
    columns = facts.columns.get(table.oid, [])
    if table.replica_identity == "i":
        return tuple(each.name for each in columns if each.in_identity)
    return tuple(each.name for each in columns if each.in_primary_key)


# --- what is named ---


def _named(follower: Follower) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield every place where a single table is named, the table, and the columns named with it."""
    if (delta := follower.delta) is not None:
        yield from (("delta.history", table, ()) for table in delta.history)
        for setting in ("cluster", "partition"):
            named = getattr(delta, setting).items()
            yield from ((f"delta.{setting}", table, columns) for table, columns in named)
    if follower.redis is not None:
        for table, shape in follower.redis.shapes.items():
            if table not in follower.documents:
                yield "redis.shapes", table, _shaped(shape)
    if (search := follower.opensearch) is not None:
        tables = dict.fromkeys([*search.aliases, *search.mappings])
        for table in tables:
            if table not in follower.documents:
                # A mapping may be for a field that is not a column.
                yield "opensearch", table, ()
    for document in _every(follower.documents):
        joined = [column for child in document.children.values() for column in child.by.values()]
        named = (*document.columns, *document.order, *document.by, *joined)
        yield "documents", document.table, named


def _every(documents: dict[str, Document]) -> Iterator[Document]:
    for document in documents.values():
        yield document
        yield from _every(document.children)


def _shaped(shape: RedisShape) -> tuple[str, ...]:
    """Return the columns that a shape needs."""
    templates = (shape.key, shape.value, shape.member)
    filled = [name for each in templates for name in _PLACE.findall(each or "") if name]
    return (*shape.fields, *filled, *((shape.score,) if shape.score else ()))


def _columns(
    config: Config, facts: CapturedTables, at: str, table: str, named: tuple[str, ...]
) -> Iterator[Finding]:
    found = facts.tables[table]
    columns = {each.name for each in facts.columns.get(found.oid, [])}
    selection = config.selection.of((found.schema, found.name))
    for column in dict.fromkeys(named):
        if column not in columns:
            what = f"{at}: {table} has no column {column}"
            yield error("followers_columns", what, "name one that it has")
        elif not selection.captures(column):
            what = f"{at}: {table}.{column} is not captured"
            yield error("followers_columns", what, f'capture it: tables."{table}", then cdc setup')


def _expiring(facts: CapturedTables, name: str, follower: Follower) -> Iterator[Finding]:
    """Warn about updates of expired rows: they lack the large values that they did not change."""
    shapes = follower.redis.shapes if follower.redis else {}
    blind = [
        table
        for table, shape in shapes.items()
        if shape.ttl_seconds
        and table in facts.tables
        and facts.tables[table].replica_identity != "f"
    ]
    if blind:
        yield note(
            "followers_ttl",
            f"{name}: an update of a row that has expired lacks the large values (TOAST)"
            f" that it did not change, and such a row is not written again: {listed(blind)}",
            "where they have such columns: ALTER TABLE … REPLICA IDENTITY FULL",
        )
