"""Table versions by `schema_id`, read from the log when an unknown one occurs.

A version's record is in the log before its events, so one read of the topic finds it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from cdc.config.value_options import Values
from cdc.decode.types import ValueKind, names_of
from cdc.errors import GapError
from cdc.log import names
from cdc.log.reader import read_schemas
from lockstep.sinks.contract import Column, Version

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdc.config import Config
    from cdc.log.records import SchemaRecord


KeyForm: TypeAlias = "tuple[tuple[str, bool], ...]"

_INTEGERS: Final = names_of(ValueKind.INTEGER)


def version(record: SchemaRecord) -> Version:
    """Return a table version as sinks get it."""
    return Version(
        schema_id=record.schema_id,
        schema=record.schema,
        table=record.table,
        topic=record.topic,
        key=record.key,
        columns=tuple(
            Column(
                each.name,
                each.type,
                each.type_id,
                each.type_modifier,
                each.nullable,
                each.mask,
                each.attnum,
                each.collation,
            )
            for each in record.columns
        ),
        values=msgspec.to_builtins(record.values or Values()),
    )


def key_form(table: SchemaRecord | Version) -> KeyForm:
    """Return the key's columns, and which of them the log writes as integers.

    Two versions with one form write the same key for a row. An integer becomes a text with the same
    digits, and another key.
    """
    integers = {each.name for each in table.columns if each.type in _INTEGERS and each.mask is None}
    return tuple((name, name in integers) for name in table.key)


def key_forms(tables: Iterable[SchemaRecord | Version]) -> dict[str, set[KeyForm]]:
    """Return the forms that the keys of tables have had, by topic."""
    found = defaultdict[str, set[KeyForm]](set)
    for each in tables:
        found[each.topic].add(key_form(each))
    return found


class Schemas:
    """The versions known so far."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._known: dict[int, Version] = {}
        self._newest: dict[str, int] = {}  # by topic, among the requested ones

    def of(self, topic: str, schema_ids: Iterable[int]) -> tuple[Version, ...]:
        """Return these versions of a topic's table, and last the newest ever requested.

        Raises GapError if the log lacks one of them.
        """
        wanted = set(schema_ids)
        if wanted - self._known.keys():
            self.refresh()
        if missing := wanted - self._known.keys():
            raise GapError(
                f"events of {topic} are of table version {min(missing)}, which is not in"
                f" {names.schema_topic(self._config.prefix)}",
                hint="the topic lost records: it must be compacted, never emptied",
            )
        if topic in self._newest:
            wanted.add(self._newest[topic])
        self._newest[topic] = max(wanted)
        return tuple(self._known[each] for each in sorted(wanted))

    def between(self, topic: str, first: int, last: int) -> tuple[Version, ...]:
        """Return every version of a topic's table from one to another."""
        between = {each for each in self.known(topic) if first <= each <= last}
        return self.of(topic, {first, last} | between)

    def known(self, topic: str) -> dict[int, Version]:
        """Return every version of a topic's table that is known so far."""
        return {id_: each for id_, each in self._known.items() if each.topic == topic}

    def refresh(self) -> None:
        """Read all that the log has."""
        for record in read_schemas(self._config):
            self._known[record.schema_id] = version(record)
