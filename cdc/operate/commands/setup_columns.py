"""The step of `cdc setup` that records which columns are hidden, by number.

The configuration hides columns by name. From here on each is identified by its number, so that
nothing is shown when a name passes to another column, before the daemon has seen the table or while
it is stopped (`cdc.publication.column_identity`). What was recorded stays: repeating the setup after such a
change is refused, as the daemon would refuse it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from cdc.decode.messages import Column
from cdc.errors import ConfigError
from cdc.log import column_numbers, reader
from cdc.operate.commands.steps import Did, Step
from cdc.operate.findings import listed
from cdc.publication import column_identity
from cdc.source import catalog
from cdc.source.columns import partitions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config, TableSelection
    from cdc.log.records import ColumnNumbers
    from cdc.source.catalog import Connection
    from cdc.source.server import Slot, Table


class _Hiding(NamedTuple):
    """A relation that the stream describes, and may have a hidden column."""

    oid: int
    selection: TableSelection

    def shown(self, numbers: ColumnNumbers) -> list[column_identity.Shown]:
        columns = [
            Column(False, c.name, c.type_id, c.type_modifier, c.attnum)  # noqa: FBT003 - of no key
            for c in numbers.columns
            if not c.dropped
        ]
        found = column_identity.places(columns, None, numbers)
        return column_identity.shown(self.selection, columns, found, numbers.hidden)


class HiddenColumns:
    """The hidden columns of the tables that are set up."""

    def __init__(self, connection: Connection, config: Config, tables: list[Table]) -> None:
        self._connection, self._config = connection, config
        # Oldest first: the newest takes precedence.
        self._known = {n.relation_id: n for n in reader.read_column_numbers(config)}
        self._written = dict(self._known)
        self._relations = _hiding(connection, config, tables)

    def look(self) -> None:
        """Read the current numbers; raise ConfigError where a hidden column has lost its name.

        Each look adds to the earlier ones.
        """
        bare = []
        now = catalog.all_column_numbers(
            self._connection, self._config.publication, [each.oid for each in self._relations]
        )
        for relation in self._relations:
            found = now[relation.oid].numbers
            if not found.columns:
                continue  # dropped just now
            known = self._known.get(relation.oid)
            hidden = known.hidden if known else {}
            found = replace(found, hidden=column_identity.hidden(relation.selection, hidden, found))
            bare += [(found, each) for each in relation.shown(found)]
            self._known[relation.oid] = found
        if bare:
            raise _refused(bare)

    def refuse_beside(self, slot: Slot | None) -> None:
        """Raise ConfigError where a daemon runs and a mask will hide a column that was not hidden.

        The daemon hides by the configuration with which it started; a column that the publication
        leaves out is hidden by Postgres.
        """
        if slot is None or slot.active_pid is None:
            return
        selections = {each.oid: each.selection for each in self._relations}
        masked = [
            f"{numbers.schema}.{numbers.table} ({name})"
            for numbers in self.new
            for attnum, name in numbers.hidden.items()
            if not self._was_hidden(numbers.relation_id, attnum)
            and _is_masked(selections[numbers.relation_id], name)
        ]
        if masked:
            raise ConfigError(
                f"to be masked from now on: {listed(masked)}; and the daemon that runs (pid"
                f" {slot.active_pid} of the server) masks by the configuration that it began with",
                hint="stop the daemon, repeat this command, and start the daemon again; nothing was"
                " changed",
            )

    def _was_hidden(self, relation_id: int, attnum: int) -> bool:
        there = self._written.get(relation_id)
        return there is not None and attnum in there.hidden

    @property
    def new(self) -> list[ColumnNumbers]:
        """Return what the log does not have yet."""
        return [n for n in self._known.values() if n.hidden and not self._is_written(n)]

    def write(self) -> Iterator[Step]:
        """Write to the log what it does not have, and report it."""
        if new := self.new:
            column_numbers.write(self._config, new)
            yield self.written()

    def written(self) -> Step:
        """Note that the log has what is new; return the step that reports it."""
        new = self.new
        self._written |= {n.relation_id: n for n in new}
        names = [f"{n.schema}.{n.table} ({_named(n)})" for n in new]
        return Step(Did.DONE, f"recorded the hidden columns by number: {listed(names)}")

    def _is_written(self, numbers: ColumnNumbers) -> bool:
        there = self._written.get(numbers.relation_id)
        return there is not None and replace(there, lsn=numbers.lsn) == numbers


def _is_masked(selection: TableSelection, name: str) -> bool:
    mask = selection.mask(name)
    return mask is not None and mask.kind != "keep"


def _hiding(connection: Connection, config: Config, tables: list[Table]) -> list[_Hiding]:
    """Return the relations where the configuration hides columns."""
    by_leaf = config.source.partitions == "leaf"
    chosen: dict[tuple[str, str], TableSelection] = {}
    for table in tables:
        if table.kind == "p" and by_leaf:
            # The stream describes each partition, which has numbers of its own.
            named: dict[tuple[str, str], tuple[tuple[str, str], ...]] = {
                (leaf.schema, leaf.name): ((leaf.schema, leaf.name), (table.schema, table.name))
                for leaf in partitions(connection, [table.oid])
            }
        else:
            named = {(table.schema, table.name): ((table.schema, table.name),)}
        chosen |= {at: config.selection.of(*names) for at, names in named.items()}
    oids = {(table.schema, table.name): table.oid for table in tables}
    if by_leaf:
        oids = catalog.oids(connection, chosen)
    return [
        _Hiding(oids[at], its)
        for at, its in chosen.items()
        if at in oids and column_identity.hides_something(its)
    ]


def _named(numbers: ColumnNumbers) -> str:
    alive = {c.attnum for c in numbers.columns if not c.dropped}
    return ", ".join(
        f"{name}: column {attnum}" for attnum, name in numbers.hidden.items() if attnum in alive
    )


def _refused(bare: list[tuple[ColumnNumbers, column_identity.Shown]]) -> ConfigError:
    told = "\n".join(
        f"  {n.schema}.{n.table}: column {each.attnum} was hidden as {each.hidden_as}, and would be"
        f" shown as {each.name}\n"
        f'    fix: hide it by that name too: tables."{n.schema}.{n.table}".mask: {{{each.name}: …}}'
        for n, each in bare
    )
    return ConfigError(
        f"hidden columns would be shown:\n{told}",
        hint="then `cdc setup` again; once `cdc run` has passed the change, `keep` in place of the"
        " mask shows what may be shown",
    )
