"""Which changes a client of a table's stream wants, by the query of its request. Pure.

A change is left out only where the log shows that it does not match: a value that it does not have
(`unchanged`, or the old row without REPLICA IDENTITY FULL) may match.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import orjson

from cdc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdc.log.records import SchemaRecord
    from cdc.log.table_cuts import LoggedChange

OPERATIONS: Final = "crudt"
_COLUMN: Final = "column."
_MOST_CONDITIONS: Final = 20
_MOST_CHARACTERS: Final = 1_000
# What chooses where the stream starts, and no changes.
_OTHERS: Final = frozenset({"from"})
_FORMS: Final = "op=c,u · key={JSON} · column.NAME=VALUE · from=SEQ or LSN"


class _Source(msgspec.Struct):
    commit_lsn: str
    schema_id: int
    tx_id: int | None = msgspec.field(default=None, name="txId")
    unchanged: tuple[str, ...] = ()
    dead: msgspec.Raw | None = None


class _Event(msgspec.Struct):
    op: str
    source: _Source
    ts_us: int
    before: msgspec.Raw = msgspec.Raw(b"null")
    after: msgspec.Raw = msgspec.Raw(b"null")


class _Body(msgspec.Struct):
    seq: int
    op: str
    lsn: str
    xid: int | None
    at_us: int
    schema_id: int
    key: msgspec.Raw
    before: msgspec.Raw
    after: msgspec.Raw
    unchanged: tuple[str, ...]
    dead: msgspec.Raw | None


_decoder: Final = msgspec.json.Decoder(_Event)
_encoder: Final = msgspec.json.Encoder()


class Sent:
    """One change as clients get it. Values are the log's own bytes, never parsed and written."""

    __slots__ = ("_event", "_key", "_rows", "body", "op", "seq")

    def __init__(self, change: LoggedChange) -> None:
        event = _decoder.decode(change.value)
        source = event.source
        self.seq, self.op = change.seq, event.op
        self._event, self._key = event, change.key
        self._rows: tuple[Any, list[Any]] | None = None
        body = _Body(
            change.seq, event.op, source.commit_lsn, source.tx_id, event.ts_us, source.schema_id,
            msgspec.Raw(change.key or b"null"), event.before, event.after, source.unchanged,
            source.dead,
        )  # fmt: skip
        # JSON has no raw line breaks, so a field of an event has the complete value.
        self.body = b"id: %d\nevent: change\ndata: %s\n\n" % (change.seq, _encoder.encode(body))

    @property
    def rows(self) -> tuple[Any, list[Any]]:
        """Return the key, and the rows that the change has, parsed once for all clients."""
        if self._rows is None:
            key = orjson.loads(self._key) if self._key else None
            rows = [msgspec.json.decode(each) for each in (self._event.after, self._event.before)]
            self._rows = key, [each for each in rows if each is not None]
        return self._rows

    @property
    def unknown(self) -> tuple[str, ...]:
        """Return the columns whose value Postgres did not send."""
        return self._event.source.unchanged


class StreamFilter(NamedTuple):
    """What a client wants; empty is everything. Values of one column are alternatives."""

    ops: frozenset[str] = frozenset()
    key: Any = None
    columns: tuple[tuple[str, frozenset[str]], ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.ops or self.key is not None or self.columns)

    def matches(self, sent: Sent) -> bool:
        if self.ops and sent.op not in self.ops:
            return False
        if sent.op == "t":
            return True  # it concerns every row
        if self.key is None and not self.columns:
            return True
        key, rows = sent.rows
        if self.key is not None and key != self.key:
            return False
        return not rows or any(self._may_match(row, sent.unknown) for row in rows)

    def _may_match(self, row: dict[str, Any], unknown: tuple[str, ...]) -> bool:
        return all(
            name not in row or name in unknown or _text(row[name]) in values
            for name, values in self.columns
        )


def _text(value: object) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def parse(query: Iterable[tuple[str, str]], version: SchemaRecord | None) -> StreamFilter:
    """Return the filter of a query, for a table; raise ConfigError, which repeats nothing of it.

    Without a version only operations can be chosen.
    """
    ops: frozenset[str] = frozenset()
    key = None
    columns: dict[str, frozenset[str]] = {}
    for count, (name, value) in enumerate(query):
        if count >= _MOST_CONDITIONS or max(len(name), len(value)) > _MOST_CHARACTERS:
            raise ConfigError(
                "the query is too long",
                hint=f"at most {_MOST_CONDITIONS} conditions, {_MOST_CHARACTERS} characters each",
            )
        if name == "op":
            ops |= _operations(value)
        elif name != "key" and not name.startswith(_COLUMN):
            if name not in _OTHERS:
                raise ConfigError("the query has an unknown parameter", hint=_FORMS)
        elif version is None:
            raise ConfigError("the table has had no change yet", hint="filter by op alone")
        elif name == "key":
            key = _key(value, version)
        else:
            column = _column(name.removeprefix(_COLUMN), version)
            columns[column] = columns.get(column, frozenset()) | {value}
    return StreamFilter(ops, key, tuple(columns.items()))


def _operations(value: str) -> frozenset[str]:
    ops = frozenset(value.split(","))
    if not ops <= frozenset(OPERATIONS):
        raise ConfigError(
            "op has an unknown operation",
            hint="c insert, u update, d delete, t truncate, r row of a snapshot: op=c,u",
        )
    return ops


def _key(value: str, version: SchemaRecord) -> dict[str, Any]:
    if not version.key:
        raise ConfigError("the table has no key", hint="filter by column.NAME=VALUE")
    try:
        key = orjson.loads(value)
    except orjson.JSONDecodeError:
        key = None
    if not isinstance(key, dict) or key.keys() != set(version.key):
        raise ConfigError(
            "key is not the JSON of a key of this table",
            hint=f"a JSON object with {', '.join(version.key)}, as in the events",
        )
    return key


def _column(name: str, version: SchemaRecord) -> str:
    for column in version.columns:
        if column.name == name:
            if column.mask is not None:
                raise ConfigError(
                    "the query names a masked column", hint="its values are not in the log"
                )
            return name
    shown = ", ".join(each.name for each in version.columns if each.mask is None)
    raise ConfigError("the table has no such column", hint=f"it has {shown}")
