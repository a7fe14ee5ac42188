"""The step of `cdc setup` that changes the publication to what the configuration describes.

An existing publication is changed in one transaction, so that no change is lost in between, and
with a note that shows a running daemon that no table was out of it
(`cdc.source.publication_note`). Only for removing a table must the daemon be stopped: the log
continues without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cdc.errors import ConfigError, GapError
from cdc.log import resume
from cdc.operate.commands.steps import CommandStep, Did
from cdc.operate.readable import listed
from cdc.publication import change as change_publication
from cdc.publication.change import PublicationChange
from cdc.publication.diff import publish_all_sql
from cdc.publication.plan import Plan
from cdc.source.publications import Publication, read_pinned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config
    from cdc.log.resume import Resume
    from cdc.source.connection import Connection
    from cdc.source.slots import Slot


def refuse_problems(wanted: Plan) -> None:
    """Raise ConfigError with every problem of the plan."""
    if not wanted.problems:
        return
    lines = "\n".join(f"  {each.what}\n    fix: {each.fix}" for each in wanted.problems)
    raise ConfigError(
        f"the tables cannot be captured as configured:\n{lines}",
        hint="fix these in the configuration or the database, then `cdc setup` again;"
        " `cdc doctor` shows them, too",
    )


def publish(
    connection: Connection,
    config: Config,
    wanted: Plan,
    state: Publication | None,
    record: Resume | None,
) -> Iterator[CommandStep]:
    """Create the publication or change it to `wanted`; `check` has found no obstacle."""
    name = config.publication
    names = listed([str(each.table) for each in wanted.members])
    if state is None:
        change_publication.create(connection, name, wanted)
        yield CommandStep(Did.DONE, f"created the publication {name} of {names}")
    else:
        yield from _change(connection, config, wanted, state, record)
    yield from _notes(wanted)


def _change(
    connection: Connection,
    config: Config,
    wanted: Plan,
    state: Publication,
    record: Resume | None,
) -> Iterator[CommandStep]:
    name = config.publication
    tables = {member.table.oid: str(member.table) for member in wanted.members}
    change = change_publication.difference(wanted, state, config.selection)
    if not change:
        what = listed(list(tables.values()))
        yield CommandStep(Did.LEFT, f"the publication {name} has {what}")
    else:
        change_publication.alter(connection, name, change, wanted, state)
        if change.drop and record is not None:
            now = read_pinned(connection, name)
            identity, position = record
            kept = msgspec.structs.replace(identity, publication=now)
            resume.write_fenced(config, kept, position, read=record)
        yield from _change_steps(name, change)
    if change.by_hand:
        yield CommandStep(
            Did.WARN,
            f"row filters or column lists set by hand on"
            f" {listed([entry.name for entry in change.by_hand])} are left as they are; the log"
            " holds only what they pass. Written below `tables`, they are the configuration's",
        )
    others = sorted(
        f"{each.schema}.{each.table}"
        for oid, each in state.published.items()
        if oid not in tables and not config.selection.excludes(each.schema, each.table)
    )
    if others and wanted.via_root:
        yield CommandStep(
            Did.WARN,
            f"the publication also has {listed(others)}: they are captured too; source.exclude"
            " leaves one out",
        )


def check(
    config: Config,
    wanted: Plan,
    state: Publication | None,
    slot: Slot | None,
    record: Resume | None,
) -> None:
    """Raise where the publication cannot be changed to `wanted`; changes nothing."""
    name = config.publication
    if state is None:
        if record is not None:
            raise GapError(
                f"the publication {name} is missing; changes since it was dropped are not in the"
                " stream",
                hint="start over with `cdc teardown --topics`, then `cdc setup`",
            )
        return
    lacking = state.unpublished_operations
    if lacking:
        raise ConfigError(
            f"the publication {name} does not publish {', '.join(lacking)}",
            hint=publish_all_sql(name),
        )
    change = change_publication.difference(wanted, state, config.selection)
    if "publish_via_partition_root" in change.options and record is not None:
        split = [str(m.table) for m in wanted.members if m.table.kind == "p"]
        if split:
            raise ConfigError(
                f"source.partitions is {config.source.partitions}, but the log holds"
                f" {listed(split)} the other way",
                hint="put it back; or start over with `cdc teardown --topics`, then `cdc setup`",
            )
    if change.drop and record is not None and slot is not None and slot.active_pid is not None:
        raise ConfigError(
            f"{listed([entry.name for entry in change.drop])} would leave the publication, and a"
            " daemon is running",
            hint="stop the daemon, then run `cdc setup` again to continue without it",
        )


def _change_steps(name: str, change: PublicationChange) -> Iterator[CommandStep]:
    if change.add:
        added = listed([str(each.table) for each in change.add])
        yield CommandStep(Did.DONE, f"added {added} to the publication {name}")
    for member in change.replace:
        which = "every column" if member.columns is None else listed(list(member.columns))
        rows = "every row" if member.where is None else f"rows where {member.where}"
        yield CommandStep(
            Did.DONE,
            f"changed {member.table} in the publication {name}: {which}, {rows}; what the log"
            " holds already is kept",
        )
    if change.drop:
        dropped = listed([entry.name for entry in change.drop])
        yield CommandStep(
            Did.DONE, f"removed {dropped} from the publication {name}; the log continues without"
        )
    if change.add_schemas:
        what = listed(change.add_schemas)
        yield CommandStep(Did.DONE, f"the publication {name} publishes complete schemas: {what}")
    if change.drop_schemas:
        what = listed(change.drop_schemas)
        yield CommandStep(Did.DONE, f"the publication {name} publishes tables one by one: {what}")
    for option, value in change.options.items():
        yield CommandStep(Did.DONE, f"set {option} = {value} on the publication {name}")


def _notes(wanted: Plan) -> Iterator[CommandStep]:
    for table, names in wanted.nulled.items():
        yield CommandStep(
            Did.WARN,
            f"{table}: Postgres sends {listed(names)} nevertheless; it is null in every event",
        )
    for schema, why in wanted.refused_schemas.items():
        yield CommandStep(
            Did.WARN,
            f"tables created later in {schema} are captured only after the next `cdc setup`: {why}",
        )
