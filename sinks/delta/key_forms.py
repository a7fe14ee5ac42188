"""The key of a row in one form, however the log writes it.

The log may have several keys of one row: 0 and -0 are one key in Postgres, a number may have
another scale, and the options by which values are written may change. The mirror compares values,
so this form is made of them.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from lockstep.sinks.contract import Change, Changes
from lockstep.sinks.delta import json as delta_json
from lockstep.sinks.delta.keys import unsigned_zero
from lockstep.sinks.delta.layout import OURS
from lockstep.sinks.delta.rows import batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.sinks.contract import Column, Version
    from lockstep.sinks.delta.columns import ColumnReader
    from lockstep.sinks.delta.targets import Target


def vary(schema: pa.Schema, versions: Sequence[Version]) -> bool:
    """Return whether the log may have several keys of one row of a mirror."""
    kinds = [schema.field(name).type for name in versions[-1].key]
    if any(pa.types.is_floating(kind) or pa.types.is_decimal(kind) for kind in kinds):
        return True
    forms = [
        (each.values, [(column.type, column.modifier) for column in _key_columns(each)])
        for each in versions
    ]
    return any(form != forms[0] for form in forms)


class KeyForms:
    """Writes keys of a table as its newest version does, and 0 for -0."""

    def __init__(self, target: Target, versions: Sequence[Version]) -> None:
        self._key = target.key
        self._schema = pa.schema([target.schema.field(name) for name in (*target.key, *OURS)])
        self._versions = tuple(each._replace(columns=_key_columns(each)) for each in versions)
        self._readers: dict[int, ColumnReader] = {}

    def of(self, keys: Sequence[tuple[bytes, int]]) -> list[bytes]:
        """Return the keys, which are given with the number of their version."""
        # The seqs are their order.
        changes = [Change(key, at, None, id_, 0, 0) for at, (key, id_) in enumerate(keys)]
        rows = batch(Changes(self._versions, changes), self._schema, self._readers).rows
        for at, name in enumerate(self._key):
            values = unsigned_zero(rows[name].combine_chunks())
            rows = rows.set_column(at, rows.schema.field(at), values)
        return [key for key, _ in delta_json.rows(rows, self._versions[-1])]


def _key_columns(version: Version) -> tuple[Column, ...]:
    return tuple(column for column in version.columns if column.name in version.key)
