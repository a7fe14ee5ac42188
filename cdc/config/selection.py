"""What the configuration captures, by table and by column.

Pure: nothing here knows what the database holds. `Selection` answers for any table, also for one
that the configuration does not mention; `cdc.publication.plan` and the doctor compare the answers
with the catalog, and the daemon asks for each relation that the stream describes.

Several sections of `tables` may match one table. They are combined in the order of the file:
`exclude` and `mask` add up; of two masks for a column the last one is used, and so is the last
value of every other setting.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.config.patterns import NamePattern, TablePattern, parse_name, parse_table_pattern

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cdc.config.snapshot import SnapshotKind
    from cdc.config.tables import Cleanup, Mask, TableRule

# Migrations create their objects there: `*.*` means the user's tables.
OWN_SCHEMA: Final = "lockstep"


class TableSelection(NamedTuple):
    """What is captured of one table, and how."""

    included: tuple[NamePattern, ...] | None  # None: every column
    excluded: tuple[NamePattern, ...]
    where: str | None
    key: tuple[str, ...] | None
    masks: tuple[tuple[NamePattern, Mask], ...]
    hidden: frozenset[str]  # columns hidden by name in a section of this table's own
    snapshot: SnapshotKind = "log"
    snapshot_where: str | None = None
    cleanup: Cleanup | None = None

    def captures(self, column: str) -> bool:
        """Return whether the column is captured, masked or not."""
        if self.included is not None and not _any(self.included, column):
            return False
        return not _any(self.excluded, column)

    def mask(self, column: str) -> Mask | None:
        """Return the column's mask; with `keep` and None it is not masked."""
        return next((mask for name, mask in reversed(self.masks) if name.matches(column)), None)

    @property
    def is_partial(self) -> bool:
        """Whether some columns or rows are not captured."""
        return self.included is not None or bool(self.excluded) or self.where is not None


ALL = TableSelection(None, (), None, None, (), frozenset())


class PatternRule(NamedTuple):
    """A section of `tables`."""

    pattern: TablePattern
    rule: TableRule

    def columns(self) -> dict[str, list[NamePattern]]:
        """Return the columns that it names, by setting."""
        rule = self.rule
        return {
            "columns": [parse_name(each) for each in rule.columns or ()],
            "exclude": [parse_name(each) for each in rule.exclude],
            "key": [NamePattern(each, each, None) for each in rule.key or ()],
            "mask": [parse_name(each) for each in rule.mask],
        }


class Selection:
    """The configuration's selection for every table."""

    def __init__(
        self, tables: Iterable[str], exclude: Iterable[str], rules: Mapping[str, TableRule]
    ) -> None:
        self.patterns = _parsed(tables)
        self.excluded = _parsed(exclude)
        self.rules = [PatternRule(parse_table_pattern(at), rule) for at, rule in rules.items()]

    def includes(self, schema: str, table: str) -> bool:
        """Return whether the table is captured; one of ours only where its schema is named."""
        patterns = self.patterns
        if schema == OWN_SCHEMA:
            patterns = tuple(each for each in patterns if each.schema.exact == schema)
        tables = any(each.matches(schema, table) for each in patterns)
        return tables and not self.excludes(schema, table)

    def excludes(self, schema: str, table: str) -> bool:
        """Return whether the table is left out by name."""
        return any(each.matches(schema, table) for each in self.excluded)

    def of(self, *names: tuple[str, str]) -> TableSelection:
        """Return what is captured of the table of that schema and name.

        A partition has several names: its own and those of the tables it is a part of.
        """
        chosen = ALL
        for rule in self.rules:
            if any(rule.pattern.matches(*name) for name in names):
                chosen = _combined(chosen, rule)
        return chosen

    @cached_property
    def schemas(self) -> list[str] | None:
        """The schemas that captured tables may be in; None where they may be in any."""
        exact = [each.schema.exact for each in self.patterns]
        named = [each for each in exact if each is not None]
        return named if len(named) == len(exact) else None


def _combined(below: TableSelection, section: PatternRule) -> TableSelection:
    rule, named = section.rule, section.columns()
    masks = tuple((parse_name(name), mask) for name, mask in rule.mask.items())
    hiding = [*named["exclude"], *(name for name, mask in masks if mask.kind != "keep")]
    if section.pattern.exact is None:
        hiding = []  # of many tables, some may lack the column
    return TableSelection(
        below.included if rule.columns is None else tuple(named["columns"]),
        below.excluded + tuple(named["exclude"]),
        below.where if rule.where is None else rule.where,
        below.key if rule.key is None else rule.key,
        below.masks + masks,
        below.hidden | {name.exact for name in hiding if name.exact is not None},
        rule.snapshot or below.snapshot,
        below.snapshot_where if rule.snapshot_where is None else rule.snapshot_where,
        rule.cleanup or below.cleanup,
    )


def _any(patterns: Iterable[NamePattern], name: str) -> bool:
    return any(each.matches(name) for each in patterns)


def _parsed(texts: Iterable[str]) -> tuple[TablePattern, ...]:
    return tuple(parse_table_pattern(text) for text in texts)
