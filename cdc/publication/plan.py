"""What the publication should hold, by configuration and catalog, and what prevents it.

Pure, except `filter_problems`, which has Postgres check the row filters. `cdc setup` creates the
publication this way and refuses what is a problem; the doctor shows both beforehand.

What Postgres requires of a publication: column lists and row filters need 15; neither may leave out
a column of the replica identity that updates and deletes need, or those fail in the application; a
column list under REPLICA IDENTITY FULL makes them fail always. So where Postgres can't leave out a
column, the encoders make it null.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import psycopg
from psycopg import sql

from cdc.config import stores
from cdc.encode.masks import column_mask, subject_column
from cdc.errors import ConfigError
from cdc.source.connection import translate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cdc.config import Config, TableSelection
    from cdc.config.patterns import NamePattern
    from cdc.config.selection import PatternRule
    from cdc.source.connection import Connection
    from cdc.source.server import Server
    from cdc.source.tables import Partition, SourceTable, TableColumn

COLUMN_LISTS = 15  # the major that has them, and row filters, and TABLES IN SCHEMA
ORIGIN = 16
GENERATED = 18


class PlannedTable(NamedTuple):
    """A table as the publication should hold it."""

    table: SourceTable
    columns: tuple[str, ...] | None  # None: every column
    where: str | None
    selection: TableSelection
    identity: tuple[str, ...]  # the columns sent with updates and deletes


class Problem(NamedTuple):
    """What must be fixed before the table may be published this way."""

    check: str
    what: str
    fix: str


class Plan(NamedTuple):
    """The publication as the configuration describes it."""

    members: list[PlannedTable]
    schemas: frozenset[str]  # published as schemas, with the tables that they get later
    refused_schemas: dict[str, str]  # to be published as such, and why they can't
    via_root: bool
    generated: bool
    nulled: dict[str, list[str]]  # by table, columns left out that Postgres sends nevertheless
    problems: list[Problem]


def plan(
    config: Config,
    server: Server,
    tables: Iterable[SourceTable],
    columns: dict[int, list[TableColumn]],
) -> Plan:
    """Return how `tables`, those that `source.tables` matches, should be published."""
    chosen = config.selection
    members, nulled = [], {}
    problems = [*_origin(config, server)]
    for table in tables:
        if not table.publishable:
            continue
        known = columns.get(table.oid, [])
        selection = chosen.of((table.schema, table.name))
        left_out = [c for c in known if not selection.captures(c.name) and c.generated != "v"]
        pushed = bool(left_out) and _can_list(config, server, table)
        names = [c.name for c in known if selection.captures(c.name) and _sent(config, server, c)]
        identity = tuple(c.name for c in known if c.in_identity)
        list_ = tuple(names) if pushed else None
        members.append(PlannedTable(table, list_, selection.where, selection, identity))
        if left_out and not pushed:
            nulled[str(table)] = [c.name for c in left_out if _sent(config, server, c)]
        problems += _table_problems(config, server, members[-1], known)
    problems += _rule_problems(config, members, columns)
    schemas, refused = _schemas(config, server, members)
    return Plan(
        members,
        schemas,
        refused,
        config.source.partitions == "root",
        config.source.generated_columns == "stored" and server.major >= GENERATED,
        nulled,
        problems,
    )


def has_topic(config: Config, table: SourceTable) -> bool:
    """Return whether the table's events go to a topic of the table's name."""
    return table.publishable and (table.kind != "p" or config.source.partitions == "root")


def _can_list(config: Config, server: Server, table: SourceTable) -> bool:
    """Return whether Postgres accepts a column list of the table."""
    by_leaf = table.kind == "p" and config.source.partitions == "leaf"
    return server.major >= COLUMN_LISTS and table.replica_identity != "f" and not by_leaf


def _sent(config: Config, server: Server, column: TableColumn) -> bool:
    """Return whether Postgres can send the column at all."""
    stored = config.source.generated_columns == "stored" and server.major >= GENERATED
    return not column.generated or (column.generated == "s" and stored)


def _schemas(
    config: Config, server: Server, members: list[PlannedTable]
) -> tuple[frozenset[str], dict[str, str]]:
    """Return the schemas to publish as such, and those that can't be, with the reason."""
    chosen = config.selection
    wanted = {name for p in chosen.patterns if (name := p.complete_schema) is not None}
    if config.source.new_tables == "setup":
        return frozenset(), {}
    refused = {}
    for schema in wanted:
        here = [each for each in members if each.table.schema == schema]
        if server.major < COLUMN_LISTS:
            refused[schema] = f"Postgres {server.major} has no TABLES IN SCHEMA"
        elif not server.superuser:
            refused[schema] = f"{server.role} is no superuser"
        elif any(each.columns is not None for each in members):
            refused[schema] = "a publication of a complete schema takes no column list"
        elif any(each.where is not None for each in here):
            refused[schema] = "row filters do not count in a schema that is published completely"
        elif any(p.schema.matches(schema) for p in chosen.excluded):
            refused[schema] = "source.exclude leaves tables out of it"
    return frozenset(wanted - refused.keys()), refused


# --- problems ---


def _origin(config: Config, server: Server) -> Iterator[Problem]:
    if config.source.origin == "none" and server.major < ORIGIN:
        yield Problem(
            "origin",
            f"source.origin: none takes Postgres {ORIGIN}, this is {server.major}",
            "source.origin: any",
        )


def _table_problems(
    config: Config, server: Server, member: PlannedTable, columns: list[TableColumn]
) -> Iterator[Problem]:
    table, selection = member.table, member.selection
    missing = [name for name in member.identity if not selection.captures(name)]
    if missing and table.replica_identity != "f":
        yield Problem(
            "columns",
            f"{table}: {', '.join(missing)} is left out, but belongs to the replica identity: "
            "Postgres would refuse every UPDATE and DELETE",
            f'capture it, and hide it with tables."{table}".mask: {{{missing[0]}: {{hmac: …}}}}',
        )
    if member.where is not None:
        if server.major < COLUMN_LISTS:
            yield Problem(
                "where",
                f"{table}: a row filter takes Postgres {COLUMN_LISTS}, this is {server.major}",
                f'remove tables."{table}".where',
            )
        elif table.kind == "p" and config.source.partitions == "leaf":
            yield Problem(
                "where",
                f"{table}: Postgres filters a partitioned table's rows only through its root",
                "source.partitions: root",
            )
    yield from _key_problems(config, member, columns)
    sent = [c for c in columns if _sent(config, server, c)]
    yield from _subject_problems(member, sent)
    yield from _store_problems(config, member, [c.name for c in sent])
    unsent = [c for c in columns if c.in_identity and c.generated and c not in sent]
    if unsent and server.major >= GENERATED:
        yield Problem(
            "generated",
            f"{table}: the replica identity holds {unsent[0].name}, a generated column that is not "
            "published: Postgres refuses every UPDATE and DELETE",
            "source.generated_columns: stored; a virtual column can't be part of it",
        )


def _key_problems(
    config: Config, member: PlannedTable, columns: list[TableColumn]
) -> Iterator[Problem]:
    table, selection = member.table, member.selection
    names, identity = {c.name for c in columns}, member.identity
    key = selection.key or tuple(c.name for c in columns if c.in_primary_key)
    if table.replica_identity == "i" and selection.key is None:
        key = identity
    if not key and (selection.cleanup or config.log.cleanup) != "delete":
        yield Problem(
            "cleanup",
            f"{table} has no key, so its topic can't be compacted: Kafka refuses its events",
            f'tables."{table}".cleanup: delete, or give it a key',
        )
    unknown = [name for name in key if name not in names]
    if unknown:
        fix = f'correct tables."{table}".key'
        yield Problem("key", f"{table}: the key names {', '.join(unknown)}: no such column", fix)
        return
    unsent = [name for name in key if identity and name not in identity]
    if selection.key is not None and unsent:
        yield Problem(
            "key",
            f"{table}: the key has {', '.join(unsent)}, which Postgres does not send with updates "
            f"and deletes (the replica identity is {', '.join(identity)})",
            f"ALTER TABLE {table.quoted} REPLICA IDENTITY FULL;  -- or USING INDEX of a unique "
            "index that has the key's columns",
        )
    for name in key:
        mask = selection.mask(name)
        if not selection.captures(name):
            fix = f'capture it, or take another tables."{table}".key'
            yield Problem("key", f"{table}: {name} is left out, but is in the key", fix)
        elif mask is not None and mask.kind not in {"keep", "hmac"}:
            yield Problem(
                "mask",
                f"{table}: {name} is in the key, and its mask {mask.kind} would make rows alike",
                "a key's column takes the mask hmac, or none",
            )


def _subject_problems(member: PlannedTable, sent: list[TableColumn]) -> Iterator[Problem]:
    """Find encrypted columns whose subject is not in every row."""
    captured = [column for column in sent if member.selection.captures(column.name)]
    for column in captured:
        mask = column_mask(member.selection, column.name)
        if mask is None or mask.subject is None:
            continue
        try:
            subject_column(captured, column.name, mask)
        except ConfigError as error:
            yield Problem("mask", f"{member.table}: {error}", error.hint or "")


def _store_problems(config: Config, member: PlannedTable, sent: list[str]) -> Iterator[Problem]:
    """Find names that a follower's store has for itself: it would halt at the first event."""
    table, selection = member.table, member.selection
    captured = [name for name in sent if selection.captures(name)]
    for name, follower in config.followers.items():
        if follower.is_derived or not stores.follows(follower, table.schema, table.name):
            continue
        leave = f"leave the table out of followers.{name}.tables"
        if follower.sql is not None and table.name == stores.SQL_FRONTIERS:
            what = f"{table}: followers.{name} keeps its frontiers in a table of this name"
            yield Problem("store_names", what, leave)
            continue
        alike = str.casefold if stores.ignores_case(follower) else str
        counts = Counter(map(alike, (*captured, *stores.own_columns(follower, str(table)))))
        taken = [column for column in captured if counts[alike(column)] > 1]
        if taken:
            yield Problem(
                "store_names",
                f"{table}: {', '.join(taken)} can't be in the store of followers.{name}, which has"
                " a column of the same name, in upper or lower case",
                f'rename it, exclude it (tables."{table}".exclude), or {leave}',
            )


def _rule_problems(
    config: Config, members: list[PlannedTable], columns: dict[int, list[TableColumn]]
) -> Iterator[Problem]:
    """Find rules that name nothing: a mask with a misspelled name hides nothing.

    A rule with a pattern may be a precaution, and is not a problem.
    """
    for rule in config.selection.rules:
        pattern, _ = rule
        section = f'tables."{pattern.text}"'
        tables = [m.table for m in members if pattern.matches(m.table.schema, m.table.name)]
        if not tables and pattern.exact is None:
            continue
        if not tables:
            fix = f"correct or remove {section}; source.tables must match it too"
            yield Problem("tables_rule", f"{section} matches no captured table", fix)
            continue
        known = {c.name for table in tables for c in columns.get(table.oid, [])}
        for setting, name in _named(rule):
            if name.exact is not None and name.exact not in known:
                yield Problem(
                    "tables_rule",
                    f"{section}.{setting} names {name.text}, which {_many(tables)} not have",
                    "correct it: its case counts; name a renamed column by its present name; where"
                    " the daemon named it, of a column that has its old name again, only `cdc run`"
                    " takes it: then take it out",
                )


def _named(rule: PatternRule) -> Iterator[tuple[str, NamePattern]]:
    for setting, names in rule.columns().items():
        if setting != "key":  # reported per table
            for name in names:
                yield setting, name


def _many(tables: list[SourceTable]) -> str:
    return f"{tables[0]} does" if len(tables) == 1 else f"the {len(tables)} tables do"


def partition_problems(config: Config, found: list[Partition]) -> Iterator[Problem]:
    """Find partitions that should be left out: they are published with their table."""
    selection = config.selection
    for each in found:
        if config.source.partitions == "leaf" and selection.excludes(each.schema, each.name):
            yield Problem(
                "exclude",
                f"{each} is a partition: it is captured with its table, not left out alone",
                "take it out of source.exclude, or detach it",
            )


def filter_problems(connection: Connection, wanted: Plan) -> Iterator[Problem]:
    """Have Postgres check the row filters: each must use columns of the replica identity only."""
    for member in wanted.members:
        if member.where is None:
            continue
        table = member.table
        fix = f'correct tables."{table}".where'
        if error := _refusal(connection, member, ()):
            yield Problem("where", f"{table}: Postgres can't read the row filter: {error}", fix)
        elif member.identity and (error := _refusal(connection, member, member.identity)):
            yield Problem(
                "where",
                f"{table}: the row filter names a column outside the replica identity ({error}): "
                "Postgres would refuse every UPDATE and DELETE",
                f"{fix}; or ALTER TABLE {table.quoted} REPLICA IDENTITY FULL;",
            )


def _refusal(connection: Connection, member: PlannedTable, only: tuple[str, ...]) -> str | None:
    """Return why Postgres refuses the filter on the table, or on only these columns of it."""
    table = member.table
    assert member.where is not None
    chosen = sql.SQL(", ").join(map(sql.Identifier, only)) if only else sql.SQL("*")
    try:
        # Planned, never run: the filter can't name a column that is not selected.
        connection.execute(
            sql.SQL("EXPLAIN SELECT FROM (SELECT {} FROM {}) AS {} WHERE ({})").format(
                chosen,
                sql.Identifier(table.schema, table.name),
                sql.Identifier(table.name),
                sql.SQL(member.where),  # from the configuration
            ),
            binary=True,  # by the extended protocol: one statement
        )
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.LockNotAvailable):
        return None  # unknown here; Postgres reports it when the publication is created
    except psycopg.Error as error:
        if error.sqlstate and error.sqlstate[:2] in {"42", "22", "0A"}:
            return str(error.diag.message_primary)
        raise translate(error, f"reading the row filter of {table}") from error
    return None
