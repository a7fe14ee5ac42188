"""The doctor's checks of what is captured: tables, columns, rows, keys, masks, the publication.

Everything that Postgres would answer with an error in the application, or that would hide less than
intended, is reported before the table is published. Pure functions from facts
(`cdc.operate.facts`) to findings. The SQL uses Postgres' own quoting (`cdc.source`).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from cdc.errors import ConfigError
from cdc.log import names as log_names
from cdc.operate.findings import Finding, error, note, ok, warning
from cdc.operate.readable import listed
from cdc.publication import change as change_publication
from cdc.publication.plan import COLUMN_LISTS, GENERATED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config
    from cdc.operate.facts import TablesFacts
from cdc.publication.plan import Plan

_PUBLISHED_BY_CDC = "cdc setup"


def check_tables(config: Config, facts: TablesFacts) -> list[Finding]:
    return [
        *_problems(facts.wanted),
        *_origin(config),
        *_ignored(facts),
        *_columns(facts),
        *_partitioned(config, facts),
        *_topics(config, facts),
        *_publication(config, facts),
        *_new_tables(facts),
    ]


def _problems(wanted: Plan) -> Iterator[Finding]:
    for problem in wanted.problems:
        yield error(problem.check, problem.what, problem.fix)
    if not wanted.problems and any(
        m.selection.is_partial or m.selection.masks for m in wanted.members
    ):
        yield ok("selection", "columns, row filters, keys and masks fit the tables")


def _origin(config: Config) -> Iterator[Finding]:
    if config.source.origin == "none":
        what = "changes that reach this database by replication are not captured"
        yield note("origin", f"{what} (source.origin: none)")


def _ignored(facts: TablesFacts) -> Iterator[Finding]:
    """Name what a pattern skips; unlogged tables, which could be captured, are reported apart."""
    passed = [each for each in facts.tables if not each.publishable and each.persistence != "u"]
    if passed:
        what = listed([f"{each} ({each.description})" for each in passed])
        yield note("ignored", f"not captured, since they write no changes to the WAL: {what}")


def _columns(facts: TablesFacts) -> Iterator[Finding]:
    for table, names in facts.wanted.nulled.items():
        major = facts.server.major
        why = (
            f"Postgres {major} has no column lists"
            if major < COLUMN_LISTS
            else (
                "a column list needs a replica identity other than FULL, and no partitions by leaf"
            )
        )
        what = f"{table}: {listed(names)} is sent nevertheless, and null in every event ({why})"
        yield note("excluded_columns", what)
    stored: list[str] = []
    virtual: list[str] = []
    for member in facts.wanted.members:
        for column in facts.columns.get(member.table.oid, []):
            if column.generated and member.selection.captures(column.name):
                place = stored if column.generated == "s" else virtual
                place.append(f"{member.table}.{column.name}")
    if stored and not facts.wanted.generated:
        why = (
            f"Postgres sends them from {GENERATED} on"
            if facts.server.major < GENERATED
            else "source.generated_columns: stored captures them"
        )
        yield note("generated", f"in no event: {listed(stored)}; {why}")
    if virtual:
        yield note("generated", f"in no event, since no row holds them: {listed(virtual)}")


def _partitioned(config: Config, facts: TablesFacts) -> Iterator[Finding]:
    split = [str(m.table) for m in facts.wanted.members if m.table.kind == "p"]
    if not split:
        return
    how = "one topic each" if facts.wanted.via_root else "one topic for each partition"
    yield ok(
        "partitions", f"{listed(split)}: {how} (source.partitions: {config.source.partitions})"
    )
    blind = [str(each) for each in facts.partitions if not each.identifies_rows]
    if blind:
        yield warning(
            "partition_identity",
            f"without a key: {listed(blind)}; once published, Postgres refuses "
            "every UPDATE and DELETE on them",
            "give the partitioned table a primary key, or each partition REPLICA IDENTITY FULL",
        )


def _topics(config: Config, facts: TablesFacts) -> Iterator[Finding]:
    """Find topics whose names differ only in `.` and `_`, which Kafka does not distinguish."""
    clashing: dict[str, list[str]] = defaultdict(list)
    for member in facts.wanted.members:
        try:
            topic = log_names.data_topic(config.prefix, member.table.schema, member.table.name)
        except ConfigError as failure:
            yield error("topic_name", failure.what, failure.hint)
            continue
        clashing[topic.replace(".", "_")].append(str(member.table))
    for tables in clashing.values():
        if len(tables) > 1:
            yield error(
                "topic_name",
                f"{listed(tables)}: their topics differ only in dots and underscores, which Kafka "
                "does not distinguish",
                "leave all but one of them out with source.exclude",
            )


def _publication(config: Config, facts: TablesFacts) -> Iterator[Finding]:
    name, state, wanted = config.publication, facts.state, facts.wanted
    if state is None:
        return
    tables = {m.table.oid for m in wanted.members}
    change = change_publication.difference(wanted, state, config.selection)
    if change.add:
        missing = listed([str(m.table) for m in change.add])
        yield warning(
            "publication_tables",
            f"{name} lacks {missing}: their changes are not captured",
            _PUBLISHED_BY_CDC,
        )
    differing = [str(m.table) for m in change.replace]
    differing += [entry.name for entry in change.drop]
    if differing:
        yield warning(
            "publication_differs",
            f"{name} has other columns or rows of {listed(differing)} than the configuration",
            _PUBLISHED_BY_CDC,
        )
    if change.by_hand:
        narrowed = listed([entry.name for entry in change.by_hand])
        yield warning(
            "publication_filters",
            f"row filters or column lists set by hand on {narrowed}: the log holds only what they"
            " pass",
            "write them below `tables` in the configuration, or remove them",
        )
    for option, value in change.options.items():
        what = f"{name}: {option} is not {value}, as the configuration wants it"
        yield warning("publication_options", what, _PUBLISHED_BY_CDC)
    schemas = change.add_schemas + change.drop_schemas
    if schemas:
        what = f"{name} publishes {listed(schemas)} differently from source.new_tables"
        yield warning("publication_schemas", what, _PUBLISHED_BY_CDC)
    extra = sorted(".".join(at) for oid, at in state.names.items() if oid not in tables)
    if extra and wanted.via_root and not change.drop:
        yield note("publication_extra", f"published beyond the configuration: {listed(extra)}")
    if not change and not state.unpublished_operations:
        yield ok("publication", f"{name} publishes {len(state.published)} tables as configured")


def _new_tables(facts: TablesFacts) -> Iterator[Finding]:
    for schema, why in facts.wanted.refused_schemas.items():
        yield warning(
            "new_tables",
            f"tables created later in {schema} are captured only after `cdc setup`: {why}",
            "source.new_tables: setup, or fix that",
        )
    if facts.wanted.schemas:
        blind = "Postgres refuses UPDATE and DELETE on one that has no key"
        yield note(
            "new_tables",
            f"tables created later in {listed(sorted(facts.wanted.schemas))} are captured from"
            f" their first row; {blind}",
        )
