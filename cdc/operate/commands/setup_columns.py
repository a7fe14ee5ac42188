"""The step of `cdc setup` that records which columns are hidden, by number.

The configuration hides columns by name. From here on each is identified by its number, so that
nothing is shown when a name passes to another column, before the daemon has seen the table or while
it is stopped (`cdc.publication.column_identity`). What was recorded stays: repeating the setup
after such a change is refused, as the daemon would refuse it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from cdc.decode.messages import RelationColumn
from cdc.errors import ConfigError
from cdc.log import column_numbers
from cdc.operate.commands.steps import CommandStep, Did
from cdc.operate.readable import listed
from cdc.publication import column_identity
from cdc.publication.plan import GENERATED
from cdc.source.lookups import look_up_column_numbers
from cdc.source.tables import SourceTable, read_partitions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cdc.config import Config, TableSelection
    from cdc.log.records import ColumnNumbers
    from cdc.source.connection import Connection
    from cdc.source.slots import Slot


class HiddenColumns:
    """The hidden columns of the tables that are set up."""

    def __init__(
        self,
        connection: Connection,
        config: Config,
        tables: list[SourceTable],
        numbers: Iterable[ColumnNumbers],
    ) -> None:
        """`numbers`: those that the log has, oldest first."""
        self._connection, self._config = connection, config
        self._known = {n.relation_id: n for n in numbers}  # the newest takes precedence
        self._written = dict(self._known)
        self._selections = _hiding(connection, config, tables)

    def read_numbers(self) -> None:
        """Read the current numbers; raise ConfigError where a hidden column has lost its name.

        Each call adds to the earlier ones.
        """
        shown = []
        now = look_up_column_numbers(
            self._connection, self._config.publication, list(self._selections)
        )
        for oid, selection in self._selections.items():
            found = now[oid]
            if not found.columns:
                continue  # dropped just now
            known = self._known.get(oid)
            hidden = known.hidden if known else {}
            found = self._as_sent(found)
            found = replace(found, hidden=column_identity.hidden_columns(selection, hidden, found))
            shown += [(found, each) for each in _shown(selection, found)]
            self._known[oid] = found
        if shown:
            raise _refused(shown)

    def _as_sent(self, numbers: ColumnNumbers) -> ColumnNumbers:
        """Return the numbers as the publication will send them, which it may not do yet."""
        major = self._connection.info.server_version // 10_000
        sent = self._config.source.generated_columns == "stored" and major >= GENERATED
        return replace(
            numbers,
            columns=tuple(
                replace(each, sent=sent) if each.computed_from else each for each in numbers.columns
            ),
        )

    def refuse_new_masks(self, slot: Slot | None) -> None:
        """Raise ConfigError where a daemon runs and a mask will hide a column that was not hidden.

        The daemon hides by the configuration with which it started; a column that the publication
        leaves out is hidden by Postgres.
        """
        if slot is None or slot.active_pid is None:
            return
        masked = [
            f"{numbers.schema}.{numbers.table} ({name})"
            for numbers in self.new
            for attnum, name in numbers.hidden.items()
            if not self._was_hidden(numbers.relation_id, attnum)
            and _is_masked(self._selections[numbers.relation_id], name)
        ]
        if masked:
            raise ConfigError(
                f"to be masked from now on: {listed(masked)}; and the daemon that runs (pid"
                f" {slot.active_pid} of the server) masks by the configuration that it started"
                " with",
                hint="stop the daemon, repeat this command, and start the daemon again; nothing was"
                " changed",
            )

    def _was_hidden(self, relation_id: int, attnum: int) -> bool:
        written = self._written.get(relation_id)
        return written is not None and attnum in written.hidden

    @property
    def new(self) -> list[ColumnNumbers]:
        """Return what the log does not have yet."""
        return [n for n in self._known.values() if n.hidden and not self._is_written(n)]

    def write(self) -> Iterator[CommandStep]:
        """Write to the log what it does not have, and report it."""
        if new := self.new:
            column_numbers.write(self._config, new)
            yield self.written()

    def written(self) -> CommandStep:
        """Note that the log has what is new; return the step that reports it."""
        new = self.new
        self._written |= {n.relation_id: n for n in new}
        names = [f"{n.schema}.{n.table} ({_column_names(n)})" for n in new]
        return CommandStep(Did.DONE, f"recorded the hidden columns by number: {listed(names)}")

    def _is_written(self, numbers: ColumnNumbers) -> bool:
        written = self._written.get(numbers.relation_id)
        return written is not None and replace(written, lsn=numbers.lsn) == numbers


def _shown(
    selection: TableSelection, numbers: ColumnNumbers
) -> list[column_identity.ExposedColumn]:
    columns = [
        RelationColumn(False, c.name, c.type_id, c.type_modifier, c.attnum)  # noqa: FBT003 - of no key
        for c in numbers.columns
        if not c.dropped
    ]
    found = column_identity.possible_positions(columns, None, numbers)
    return column_identity.exposed_columns(selection, columns, found, numbers.hidden)


def _is_masked(selection: TableSelection, name: str) -> bool:
    mask = selection.mask(name)
    return mask is not None and mask.kind != "keep"


def _hiding(
    connection: Connection, config: Config, tables: list[SourceTable]
) -> dict[int, TableSelection]:
    """Return the relations where the configuration hides columns, as the stream describes them."""
    by_leaf = config.source.partitions == "leaf"
    chosen: dict[int, TableSelection] = {}
    for table in tables:
        name = (table.schema, table.name)
        if table.kind == "p" and by_leaf:
            # The stream describes each partition, which has numbers of its own.
            for leaf in read_partitions(connection, [table.oid]):
                chosen[leaf.oid] = config.selection.of((leaf.schema, leaf.name), name)
        else:
            chosen[table.oid] = config.selection.of(name)
    return {
        oid: selection
        for oid, selection in chosen.items()
        if column_identity.hides_something(selection)
    }


def _column_names(numbers: ColumnNumbers) -> str:
    alive = {c.attnum for c in numbers.columns if not c.dropped}
    return ", ".join(
        f"{name}: column {attnum}" for attnum, name in numbers.hidden.items() if attnum in alive
    )


def _refused(shown: list[tuple[ColumnNumbers, column_identity.ExposedColumn]]) -> ConfigError:
    lines = "\n".join(
        f"  {n.schema}.{n.table}: {_why(n, each)}\n"
        f'    fix: hide it by that name too: tables."{n.schema}.{n.table}".mask: {{{each.name}: …}}'
        for n, each in shown
    )
    return ConfigError(
        f"hidden columns would be shown:\n{lines}",
        hint="then `cdc setup` again; once `cdc run` has passed the change, `keep` in place of the"
        " mask shows what may be shown",
    )


def _why(numbers: ColumnNumbers, each: column_identity.ExposedColumn) -> str:
    origins = column_identity.computed_from_hidden(numbers, numbers.hidden, each.attnum)
    if origins and each.name == each.hidden_as:
        return f"column {each.attnum}, {each.name}, is computed from {', '.join(origins)}"
    return f"column {each.attnum} was hidden as {each.hidden_as}, and would be shown as {each.name}"
