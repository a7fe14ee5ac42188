"""Tables added to a running pipeline, and removed from one: `cdc table add|remove|list`.

The publication is changed and, in the same transaction, the command is sent to the daemon: so the
snapshot of the table starts at the exact position in the stream from which on the table's changes
are in it. A table that is removed is noted as removed on purpose (`cdc.source.membership`), so that
it does not count as a gap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdc.errors import ConfigError, GapError, PermissionDeniedError
from cdc.log import reader
from cdc.log.client import reach
from cdc.operate.commands import setup_publication
from cdc.operate.commands.setup_columns import HiddenColumns
from cdc.operate.commands.snapshots import new_id, pattern_of
from cdc.operate.findings import listed
from cdc.snapshot.incremental import commands
from cdc.source import membership
from cdc.source import server as inspection
from cdc.source import setup as source_setup
from cdc.source.connection import connect
from cdc.source.members import Member, members, require_secret, send_command
from cdc.source.membership import Change

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdc.config import Config
    from cdc.publication import plan
    from cdc.publication.plan import Plan
    from cdc.source.catalog import Connection
    from cdc.source.membership import State

_NOTHING = Change([], [], [], [], [], {}, [])


class Added(NamedTuple):
    """The result of adding a table."""

    table: str
    snapshot: str | None  # its id, where it is read


def add(config: Config, tables: Sequence[str], *, read: bool = True) -> list[Added]:
    """Add tables that the configuration captures, and snapshot them; return the snapshots' ids.

    A table that was captured before is emptied in the log first: what it lost meanwhile is in no
    stream. So a membership that ended by a drop, or manually, is noted as ended on purpose.
    """
    if read:
        require_secret(config)
        reach(config)
    with connect(config) as connection:
        wanted, state = _standing(connection, config)
        by_name = {str(each.table): each for each in wanted.members}
        chosen = [by_name[name] for name in _named(tables, list(by_name), config)]
        there = [str(each.table) for each in chosen if each.table.oid in state.published]
        if there:
            raise ConfigError(
                f"{listed(there)} is captured already",
                hint="`cdc snapshot` reads a table again",
            )
        if read:
            _readable(chosen)
        hidden = HiddenColumns(connection, config, [each.table for each in chosen])
        hidden.look()
        hidden.refuse_beside(inspection.slot(connection, config.slot))
        for _ in hidden.write():
            pass
        ids = {}
        lost = _lost(config, chosen) if read else frozenset()
        with connection.transaction():
            change = _NOTHING._replace(add=chosen)
            try:
                membership.alter(connection, config.publication, change, wanted, state, lost)
            except PermissionDeniedError as error:
                raise _not_ours(error, connection, config, change) from error
            known = {str(each): each for each in members(connection, config.publication)}
            for member in chosen if read else ():
                name = str(member.table)
                leaves = [each for each in known.values() if each.root == name]
                assert name in known or leaves, "a table that was just added is published"
                for each in [known[name]] if name in known else leaves:
                    number = ids[str(each)] = new_id()
                    of = commands.Of(each.schema, each.table)
                    start = commands.Command(do="start", id=number, tables=(of,), anew=True)
                    send_command(connection, config, commands.COMMAND, commands.encode(start))
    return [Added(name, number) for name, number in ids.items()] or [
        Added(str(each.table), None) for each in chosen
    ]


def _readable(chosen: list[plan.Member]) -> None:
    """Raise where existing rows could not be read: they must not be left out unnoticed."""
    refused = [each.table for each in chosen if not each.table.may_select]
    if refused:
        grants = ", ".join(each.quoted for each in refused)
        raise PermissionDeniedError(
            f"our role may not read {listed([str(each) for each in refused])}, so the rows there"
            " are could not go into the log; nothing was changed",
            hint=f"GRANT SELECT ON {grants} TO our role (and USAGE on the schema); or"
            " --no-snapshot, to capture changes only",
        )


def _not_ours(
    error: PermissionDeniedError, connection: Connection, config: Config, change: Change
) -> PermissionDeniedError:
    """Return the refusal with a way that loses no rows: an owner adds the table, we read it."""
    statements = membership.alterations(config.publication, change)
    text = " ".join(f"{each.as_string(connection)};" for each in statements)
    names = " ".join(str(each.table) for each in change.add)
    return PermissionDeniedError(
        f"{error.what}; nothing was changed",
        hint=f"run `cdc table add` as a role that owns publication and tables; or let such a role"
        f" run: {text}  and then `cdc snapshot {names}`, which reads the rows that are there"
        " already: without it only later changes are in the log",
    )


def _lost(config: Config, chosen: list[plan.Member]) -> frozenset[int]:
    """Return the memberships under which the log still knows the tables."""
    resumed = reader.read_resume(config)
    known = resumed[0].publication.tables if resumed else {}
    names = (each.table.catalog_name for each in chosen)
    return frozenset(known[name] for name in names if known.get(name))


def remove(config: Config, tables: Sequence[str]) -> list[str]:
    """Remove tables from the publication; the log continues without them. A daemon may run."""
    with connect(config) as connection:
        wanted, state = _standing(connection, config)
        entries = {
            entry.name.replace('"', ""): (oid, entry) for oid, entry in state.entries.items()
        }
        gone = _named(tables, list(entries), config)
        kept = [each for each in gone if config.selection.takes(*each.split(".", 1))]
        if kept:
            raise ConfigError(
                f"the configuration captures {listed(kept)}, so `cdc setup` would add it again",
                hint="name it below source.exclude first, then `cdc table remove`",
            )
        change = _NOTHING._replace(drop=[entries[each][1] for each in gone])
        ended = frozenset(
            state.published.get(entries[each][0], entries[each][1].membership) for each in gone
        )
        membership.alter(connection, config.publication, change, wanted, state, ended)
    return gone


def captured(config: Config) -> list[Member]:
    """Return every table that is captured."""
    with connect(config) as connection:
        return members(connection, config.publication)


def _standing(connection: Connection, config: Config) -> tuple[Plan, State]:
    state = membership.state(connection, config.publication)
    if state is None:
        raise GapError(
            f"there is no publication {config.publication}", hint="`cdc setup` creates it"
        )
    if state.all_tables:
        raise ConfigError(
            f"the publication {config.publication} is FOR ALL TABLES",
            hint="every table is captured already, and none can be taken out",
        )
    server = inspection.server(connection)
    tables = source_setup.matched_tables(connection, config)
    return setup_publication.planned(connection, config, server, tables), state


def _named(wanted: Sequence[str], known: list[str], config: Config) -> list[str]:
    """Return the names in `known` that the patterns match; ConfigError where one matches none."""
    chosen: list[str] = []
    for text in wanted:
        pattern = pattern_of(text)
        found = [name for name in known if pattern.matches(*name.split(".", 1))]
        if not found:
            raise ConfigError(
                f"{text} names no table of the database that could be meant",
                hint="to add one, make it, and let source.tables take it: it takes"
                f" {listed(list(config.source.tables))}; `cdc table list` shows what is captured",
            )
        chosen += [name for name in found if name not in chosen]
    return chosen
