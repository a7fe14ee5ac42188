"""The step of `cdc setup` that changes the publication to what the configuration describes.

An existing publication is changed in one transaction, so that no change is lost in between, and
with a note that shows a running daemon that no table was out of it (`cdc.source.membership`). Only
for removing a table must the daemon be stopped: the log continues without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cdc.errors import ConfigError, GapError
from cdc.log import resume
from cdc.log.records import OPERATIONS
from cdc.operate.commands.steps import Did, Step
from cdc.operate.findings import listed
from cdc.publication.diff import complete
from cdc.publication.plan import Plan, Problem, filter_problems, partition_problems, plan
from cdc.source import abilities, catalog, membership
from cdc.source.columns import columns, partitions

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from cdc.config import Config
    from cdc.log.records import ResumeIdentity, ResumePosition
    from cdc.source.abilities import Refusal
    from cdc.source.server import Server, Slot, Table

    Record = tuple[ResumeIdentity, ResumePosition]


def planned(
    connection: psycopg.Connection, config: Config, server: Server, tables: list[Table]
) -> Plan:
    """Return what the publication should be; raise ConfigError with every problem."""
    wanted = plan(config, server, tables, columns(connection, [each.oid for each in tables]))
    split = partitions(connection, [each.oid for each in tables if each.kind == "p"])
    problems = [*wanted.problems, *partition_problems(config, split)]
    problems = problems or list(filter_problems(connection, wanted))
    if problems:
        raise _refused(problems)
    return wanted


def _refused(problems: list[Problem]) -> ConfigError:
    told = "\n".join(f"  {each.what}\n    fix: {each.fix}" for each in problems)
    return ConfigError(
        f"the tables cannot be captured as configured:\n{told}",
        hint="mend these in the configuration or the database, then `cdc setup` again;"
        " `cdc doctor` tells them too",
    )


def publish(
    connection: psycopg.Connection,
    config: Config,
    wanted: Plan,
    state: membership.State | None,
    record: Record | None,
) -> Iterator[Step]:
    """Create the publication or change it to `wanted`; `check` has found no obstacle."""
    name = config.publication
    names = listed([str(each.table) for each in wanted.members])
    if state is None:
        membership.create(connection, name, wanted)
        yield Step(Did.DONE, f"created the publication {name} of {names}")
    else:
        yield from _change(connection, config, wanted, state, record)
    yield from _notes(wanted)


def _change(
    connection: psycopg.Connection,
    config: Config,
    wanted: Plan,
    state: membership.State,
    record: Record | None,
) -> Iterator[Step]:
    name = config.publication
    tables = {member.table.oid: str(member.table) for member in wanted.members}
    names, excluded, change = difference(connection, config, wanted, state)
    if not change:
        what = listed(list(tables.values()))
        yield Step(Did.LEFT, f"the publication {name} has {what}")
    else:
        membership.alter(connection, name, change, wanted, state)
        if change.drop and record is not None:
            now = catalog.publication(connection, name)
            identity, position = record
            kept = msgspec.structs.replace(identity, publication=now)
            resume.write_fenced(config, kept, position, read=record)
        yield from _told(name, change)
    if change.by_hand:
        yield Step(
            Did.WARN,
            f"row filters or column lists set by hand on"
            f" {listed([entry.name for entry in change.by_hand])} are left as they are; the log"
            " holds only what they pass. Written below `tables`, they are the configuration's",
        )
    extra = [oid for oid in state.published if oid not in tables and oid not in excluded]
    others = sorted(".".join(names[oid]) for oid in extra if oid in names)
    if others and wanted.via_root:
        yield Step(
            Did.WARN,
            f"the publication also has {listed(others)}: they are captured too; source.exclude"
            " takes one out",
        )


def difference(
    connection: psycopg.Connection, config: Config, wanted: Plan, state: membership.State
) -> tuple[dict[int, tuple[str, str]], set[int], membership.Change]:
    """Return the published tables' names, those to remove, and the change to make."""
    names = catalog.names(connection, state.entries.keys() | state.published.keys())
    excluded = {oid for oid, at in names.items() if config.selection.excludes(*at)}
    return names, excluded, membership.difference(wanted, state, excluded)


def refusal(
    connection: psycopg.Connection, config: Config, wanted: Plan, state: membership.State | None
) -> Refusal | None:
    """Return how Postgres refuses to create or change the publication: tried, and rolled back."""
    change = None
    if state is not None:
        *_, change = difference(connection, config, wanted, state)
    return abilities.publication(connection, config.publication, wanted, state, change)


def check(
    connection: psycopg.Connection,
    config: Config,
    wanted: Plan,
    state: membership.State | None,
    slot: Slot | None,
    record: Record | None,
) -> None:
    """Raise where the publication cannot be changed to `wanted`; changes nothing."""
    name = config.publication
    if state is None:
        if record is not None:
            raise GapError(
                f"the publication {name} is gone; changes made since then are not in the stream",
                hint="start anew with `cdc teardown --topics`, then `cdc setup`",
            )
        return
    lacking = set(OPERATIONS) - state.operations
    if lacking:
        raise ConfigError(
            f"the publication {name} does not publish {', '.join(sorted(lacking))}",
            hint=complete(name),
        )
    *_, change = difference(connection, config, wanted, state)
    if "publish_via_partition_root" in change.options and record is not None:
        split = [str(m.table) for m in wanted.members if m.table.kind == "p"]
        if split:
            raise ConfigError(
                f"source.partitions is {config.source.partitions}, but the log holds"
                f" {listed(split)} the other way",
                hint="put it back; or start anew with `cdc teardown --topics`, then `cdc setup`",
            )
    if change.drop and record is not None and slot is not None and slot.active_pid is not None:
        raise ConfigError(
            f"{listed([entry.name for entry in change.drop])} is to leave the publication, and a"
            " daemon is running",
            hint="stop the daemon, then run `cdc setup` again to go on without it",
        )


def _told(name: str, change: membership.Change) -> Iterator[Step]:
    if change.add:
        added = listed([str(each.table) for each in change.add])
        yield Step(Did.DONE, f"added {added} to the publication {name}")
    for member in change.replace:
        which = "every column" if member.columns is None else listed(list(member.columns))
        rows = "every row" if member.where is None else f"rows where {member.where}"
        yield Step(
            Did.DONE,
            f"changed {member.table} in the publication {name}: {which}, {rows}; what the log"
            " holds already stays",
        )
    if change.drop:
        gone = listed([entry.name for entry in change.drop])
        yield Step(Did.DONE, f"took {gone} out of the publication {name}; the log goes on without")
    if change.add_schemas:
        what = listed(change.add_schemas)
        yield Step(Did.DONE, f"the publication {name} takes whole schemas: {what}")
    if change.drop_schemas:
        what = listed(change.drop_schemas)
        yield Step(Did.DONE, f"the publication {name} takes tables one by one: {what}")
    for option, value in change.options.items():
        yield Step(Did.DONE, f"set {option} = {value} on the publication {name}")


def _notes(wanted: Plan) -> Iterator[Step]:
    for table, names in wanted.nulled.items():
        yield Step(
            Did.WARN,
            f"{table}: Postgres sends {listed(names)} all the same; it is null in every event",
        )
    for schema, why in wanted.listed.items():
        yield Step(
            Did.WARN,
            f"tables created later in {schema} are captured only after the next `cdc setup`: {why}",
        )
