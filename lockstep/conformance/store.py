"""What the suite needs from a store's plugin, and the tables and changes that it uses."""

from __future__ import annotations

from typing import Any, Final, Protocol

import msgspec

from cdc.events import LSN
from lockstep.sinks.contract import Applied, Change, Changes, Column, Sink, Version

Row = dict[str, Any]
STARTED_AT_US: Final = 1_767_323_045_123_456


class StoreUnderTest(Protocol):
    """A separate empty store for each test, which outlives the sinks created for it."""

    rounds: int  # how many random histories take a few seconds
    keyless: bool  # whether it takes tables without a key; else `begin` refuses them by name

    def sink(self) -> Sink:
        """Return a new sink on the store, as another process would create it."""
        ...

    def rows(self, table: str) -> dict[bytes, Row]:
        """Return what a reader of the store sees of `schema.table`, by key, in the log's form.

        Read directly from the store, not through the sink. Rows of a table without a key may have
        any keys.
        """
        ...

    def lose(self) -> None:
        """Delete the data without the sinks' knowledge, as a flush or a deleted index does."""
        ...


VALUES: Final[dict[str, object]] = {
    "decimal.handling.mode": "string",
    "time.precision.mode": "adaptive",
    "binary.handling.mode": "bytes",
    "interval.handling.mode": "postgres",
    "hstore.handling.mode": "text",
    "bigint.handling.mode": "number",
    "money.fraction.digits": 2,
    "unavailable.value.placeholder": "__debezium_unavailable_value",
    "invalid.text.handling.mode": "fail",
}


def _column(name: str, kind: str, type_id: int, modifier: int = -1) -> Column:
    return Column(name, kind, type_id, modifier, nullable=name not in {"id", "no"})


_ID = _column("id", "int8", 20)
_REST: Final = (
    _column("name", "text", 25),
    _column("body", "text", 25),
    _column("amount", "numeric", 1700, (10 << 16 | 2) + 4),
    _column("active", "bool", 16),
)
USERS: Final = Version(1, "public", "users", "shop.public.users", ("id",), (_ID, *_REST), VALUES)
LINES: Final = Version(
    2,
    "public",
    "lines",
    "shop.public.lines",
    ("no", "id"),
    (_ID, _column("no", "int4", 23), *_REST),
    VALUES,
)
CLICKS: Final = Version(3, "public", "clicks", "shop.public.clicks", (), (_ID, *_REST), VALUES)
# The first table, with one more column.
WIDER: Final = USERS._replace(schema_id=4, columns=(*USERS.columns, _column("age", "int4", 23)))


def key(version: Version, *values: int) -> bytes:
    return msgspec.json.encode(dict(zip(version.key, values, strict=True)))


def change(
    version: Version,
    seq: int,
    row: Row | None,
    *key_values: int,
    unchanged: tuple[str, ...] = (),
    before: Row | None = None,
    op: str = "u",
) -> Change:
    """Return a change; `row` is complete, its `unchanged` columns get the placeholder."""
    sent = row and {
        name: "__debezium_unavailable_value" if name in unchanged else value
        for name, value in row.items()
    }
    return Change(
        key=key(version, *key_values) if version.key else None,
        seq=seq,
        row=None if sent is None else msgspec.json.encode(sent),
        schema_id=version.schema_id,
        commit_lsn=0x16E9000 + seq,
        committed_at_us=STARTED_AT_US + seq * 1_000,
        unchanged=unchanged,
        before=None if before is None else msgspec.json.encode(before),
        op="d" if row is None else op,
    )


def row(version: Version, seq: int, *key_values: int, **values: object) -> Row:
    """Return a row of the table; its values identify the seq that wrote it."""
    complete: Row = dict(zip(version.key, key_values, strict=True)) if key_values else {"id": seq}
    complete |= {
        "name": f"n{seq}",
        "body": f"long {seq}",
        "amount": f"{seq}.50",
        "active": seq % 2 > 0,
    }
    if any(column.name == "age" for column in version.columns):
        complete["age"] = seq
    complete |= values
    return {column.name: complete[column.name] for column in version.columns}


def applied(seq: int, *, generation: int = 1) -> Applied:
    """Return the frontier at a seq."""
    return Applied(
        pipeline="shop",
        generation=generation,
        epoch=1,
        lsn=LSN(0x16E9000 + seq + 1),
        seq=seq,
        committed_at_us=STARTED_AT_US + seq * 1_000,
        place=seq,
        ends={"shop.public.users": (seq, 0, 3 * seq)},
    )


def apply(sink: Sink, seq: int, *tables: Changes) -> int:
    """Write one cut as a follower does; return how many changes were applied."""
    sink.begin(seq, [version for changes in tables for version in changes.versions])
    applied_changes = sum(sink.write(changes) for changes in tables)
    sink.commit(applied(seq))
    return applied_changes
