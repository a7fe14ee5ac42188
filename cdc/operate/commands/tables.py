"""Tables added to a running pipeline, and removed from one: `cdc table add|remove|list`.

The publication is changed and, in the same transaction, the command is sent to the daemon: so the
snapshot of the table starts at the exact position in the stream from which on the table's changes
are in it. A table that is removed is noted as removed on purpose (`cdc.source.publication_note`),
so that it does not count as a gap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.errors import ConfigError, GapError, PermissionDeniedError
from cdc.log import reader
from cdc.log.client import reach
from cdc.operate import facts
from cdc.operate.commands import setup_publication
from cdc.operate.commands.setup_columns import HiddenColumns
from cdc.operate.commands.snapshots import pattern_of, request
from cdc.operate.readable import listed
from cdc.publication import change as change_publication
from cdc.publication import objects as source_setup
from cdc.publication.change import NO_CHANGE, PublicationChange
from cdc.source.commands import require_secret
from cdc.source.connection import connect
from cdc.source.members import Member, read_members, read_sizes
from cdc.source.publications import Publication, read_publication
from cdc.source.server import read_server
from cdc.source.slots import read_slot
from cdc.source.tables import read_tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cdc.config import Config
    from cdc.publication import plan
    from cdc.publication.plan import Plan
    from cdc.source.connection import Connection


def add(config: Config, tables: Sequence[str], *, read: bool = True) -> dict[str, str | None]:
    """Add tables that the configuration captures; return the ids of their snapshots, by table.

    A table that was captured before is emptied in the log first: what it lost meanwhile is in no
    stream. So a membership that ended by a drop, or manually, is noted as ended on purpose.
    """
    if read:
        require_secret(config)
        reach(config)
    with connect(config) as connection:
        wanted, state = _plan_and_state(connection, config)
        by_name = {str(each.table): each for each in wanted.members}
        chosen = [by_name[name] for name in _matching(tables, list(by_name), config)]
        captured_already = [str(each.table) for each in chosen if each.table.oid in state.published]
        if captured_already:
            raise ConfigError(
                f"{listed(captured_already)} is captured already",
                hint="`cdc snapshot` reads a table again",
            )
        if read:
            _readable(chosen)
        hidden = HiddenColumns(
            connection,
            config,
            [each.table for each in chosen],
            reader.read_column_numbers(config),
        )
        hidden.read_numbers()
        hidden.refuse_new_masks(read_slot(connection, config.slot))
        for _ in hidden.write():
            pass
        requested: dict[str, str] = {}
        lost = _lost(config, chosen) if read else frozenset()
        with connection.transaction():
            change = NO_CHANGE._replace(add=chosen)
            try:
                change_publication.alter(
                    connection, config.publication, change, wanted, state, lost
                )
            except PermissionDeniedError as error:
                raise _needs_owner(error, connection, config, change) from error
            if read:
                published = _published(connection, config, [str(each.table) for each in chosen])
                requested = request(connection, config, published, empty_first=True)
    if not read:
        return dict.fromkeys(str(each.table) for each in chosen)
    return {name: number for number, name in requested.items()}


def _published(connection: Connection, config: Config, added: list[str]) -> Iterator[Member]:
    """Yield the tables, or the partitions that the publication sends in place of one."""
    known = read_members(connection, config.publication)
    for name in added:
        found = [each for each in known if str(each) == name]
        found = found or [each for each in known if each.root == name]
        assert found, "a table that was just added is published"
        yield from found


def _readable(chosen: list[plan.PlannedTable]) -> None:
    """Raise where existing rows could not be read: they must not be left out unnoticed."""
    refused = [each.table for each in chosen if not each.table.may_select]
    if refused:
        grants = ", ".join(each.quoted for each in refused)
        raise PermissionDeniedError(
            f"our role may not read {listed([str(each) for each in refused])}, so their existing"
            " rows could not go into the log; nothing was changed",
            hint=f"GRANT SELECT ON {grants} TO our role (and USAGE on the schema); or"
            " --no-snapshot, to capture changes only",
        )


def _needs_owner(
    error: PermissionDeniedError, connection: Connection, config: Config, change: PublicationChange
) -> PermissionDeniedError:
    """Return the refusal with a way that loses no rows: an owner adds the table, we read it."""
    statements = change_publication.alterations(config.publication, change)
    text = " ".join(f"{each.as_string(connection)};" for each in statements)
    names = " ".join(str(each.table) for each in change.add)
    return PermissionDeniedError(
        f"{error.what}; nothing was changed",
        hint=f"run `cdc table add` as a role that owns publication and tables; or have such a role"
        f" run: {text}  and then `cdc snapshot {names}`, which reads the existing rows:"
        " without it only later changes are in the log",
    )


def _lost(config: Config, chosen: list[plan.PlannedTable]) -> frozenset[int]:
    """Return the memberships under which the log still knows the tables."""
    resumed = reader.read_resume(config)
    known = resumed[0].publication.tables if resumed else {}
    names = (each.table.catalog_name for each in chosen)
    return frozenset(known[name] for name in names if known.get(name))


def remove(config: Config, tables: Sequence[str]) -> list[str]:
    """Remove tables from the publication; the log continues without them. A daemon may run."""
    with connect(config) as connection:
        wanted, state = _plan_and_state(connection, config)
        entries = {f"{each.schema}.{each.table}": each for each in state.entries.values()}
        removed = _matching(tables, list(entries), config)
        kept = [each for each in removed if config.selection.includes(*each.split(".", 1))]
        if kept:
            raise ConfigError(
                f"the configuration captures {listed(kept)}, so `cdc setup` would add it again",
                hint="name it below source.exclude first, then `cdc table remove`",
            )
        change = NO_CHANGE._replace(drop=[entries[each] for each in removed])
        ended = frozenset(state.first_membership(entries[each]) for each in removed)
        change_publication.alter(connection, config.publication, change, wanted, state, ended)
    return removed


def captured(config: Config) -> list[tuple[Member, int]]:
    """Return every captured table, and its bytes. Waits for sessions that hold one exclusively."""
    with connect(config) as connection:
        found = read_members(connection, config.publication)
        sizes = read_sizes(connection, [each.oid for each in found])
    return [(each, sizes.get(each.oid, 0)) for each in found]


def _plan_and_state(connection: Connection, config: Config) -> tuple[Plan, Publication]:
    tables = source_setup.matched_tables(config, read_tables(connection, config.selection))
    state = read_publication(connection, config.publication)
    found = facts.tables_facts(connection, config, read_server(connection), tables, state)
    if state is None:
        raise GapError(
            f"there is no publication {config.publication}", hint="`cdc setup` creates it"
        )
    if state.all_tables:
        raise ConfigError(
            f"the publication {config.publication} is FOR ALL TABLES",
            hint="every table is captured already, and none can be removed",
        )
    setup_publication.refuse_problems(found.wanted)
    return found.wanted, state


def _matching(wanted: Sequence[str], known: list[str], config: Config) -> list[str]:
    """Return the names in `known` that the patterns match; ConfigError where one matches none."""
    chosen: list[str] = []
    for text in wanted:
        pattern = pattern_of(text)
        found = [name for name in known if pattern.matches(*name.split(".", 1))]
        if not found:
            raise ConfigError(
                f"{text} matches no table of the database",
                hint="to add one, create it, and name it in source.tables, which has"
                f" {listed(list(config.source.tables))}; `cdc table list` shows what is captured",
            )
        chosen += [name for name in found if name not in chosen]
    return chosen
