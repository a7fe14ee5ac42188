"""The follower load's tables, a common form for their rows in any store, and what must hold.

In that form a number is its text with its scale, a time microseconds since 1970, bytes are
hexadecimal, a document is its canonical text; everything else stays as it is.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

import orjson
import psycopg

Row = dict[str, Any]
State = dict[str, list[Row]]

DDL: Final = """
CREATE TABLE accounts (
  id bigint PRIMARY KEY, balance numeric(14,2) NOT NULL, n int NOT NULL, note text
);
CREATE TABLE savings (
  owner int, balance numeric(14,2) NOT NULL, pot text, n int NOT NULL, PRIMARY KEY (pot, owner)
);
CREATE TABLE orders (
  id uuid PRIMARY KEY, items int NOT NULL, total numeric(12,2) NOT NULL,
  at timestamptz NOT NULL, spec jsonb
);
CREATE TABLE lines (
  order_id uuid, number int, amount numeric(12,2) NOT NULL, what text,
  PRIMARY KEY (order_id, number)
);
CREATE TABLE events (id bigint PRIMARY KEY, kind text, data bytea);
CREATE TABLE blobs (id int PRIMARY KEY, n int NOT NULL, big text, md5 text);
CREATE TABLE crowd (id int PRIMARY KEY, n int NOT NULL);
CREATE TABLE shapes (id int PRIMARY KEY);
CREATE TABLE clock (
  id int PRIMARY KEY, n bigint NOT NULL, digest text NOT NULL, shape text NOT NULL,
  ticks text NOT NULL
);
CREATE TABLE summer (id int PRIMARY KEY, v text, r float);
CREATE TABLE winter (id int PRIMARY KEY, v text, r float);
-- Without a key, so in mirrors alone.
CREATE SCHEMA loose;
CREATE TABLE loose.ticks (n int, what text);
ALTER TABLE loose.ticks REPLICA IDENTITY FULL;
ALTER TABLE blobs REPLICA IDENTITY FULL;
-- Out of line and not compressed: an update of another column does not send it.
ALTER TABLE accounts ALTER note SET STORAGE EXTERNAL;
ALTER TABLE blobs ALTER big SET STORAGE EXTERNAL;
ALTER TABLE events ALTER data SET STORAGE EXTERNAL;
"""
TOTAL: Final = Decimal("1000000.00")
TABLES: Final[dict[str, dict[str, str]]] = {
    "accounts": {"id": "int", "balance": "number", "n": "int", "note": "text"},
    "savings": {"owner": "int", "balance": "number", "pot": "text", "n": "int"},
    "orders": {"id": "uuid", "items": "int", "total": "number", "at": "time", "spec": "json"},
    "lines": {"order_id": "uuid", "number": "int", "amount": "number", "what": "text"},
    "events": {"id": "int", "kind": "text", "data": "bytes"},
    "blobs": {"id": "int", "n": "int", "big": "text", "md5": "text"},
    "clock": {"id": "int", "n": "int", "digest": "text", "shape": "text", "ticks": "text"},
    "crowd": {"id": "int", "n": "int"},
    "shapes": {},  # any columns: the clock's row names them
    "summer": {"id": "int", "v": "any", "r": "any"},
    "winter": {"id": "int", "v": "any", "r": "any"},
}
# Their rows change without events: right only after they have been read again, and in no digest.
REWRITTEN: Final = ("summer", "winter")
TICKS: Final = "loose.ticks"
KEYS: Final[dict[str, tuple[str, ...]]] = {
    "accounts": ("id",),
    "savings": ("pot", "owner"),
    "orders": ("id",),
    "lines": ("order_id", "number"),
    "events": ("id",),
    "blobs": ("id",),
    "clock": ("id",),
    "crowd": ("id",),
    "shapes": ("id",),
    "summer": ("id",),
    "winter": ("id",),
}
_NOT_IN_DIGEST: Final = {"clock", TICKS, *REWRITTEN}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SHOWN: Final = 3


def row_hash(table: str, row: Row) -> int:
    """Return a row's part in the digest."""
    if not TABLES[table]:
        named = sorted(row.items())
        return int.from_bytes(hashlib.sha256(orjson.dumps([table, named])).digest())
    values = [table, *(_hashed(row[column], kind) for column, kind in TABLES[table].items())]
    return int.from_bytes(hashlib.sha256(orjson.dumps(values)).digest())


def ticks_digest(rows: Iterable[tuple[Any, Any]]) -> str:
    """Return a digest of rows without a key, of which some are alike."""
    counted = sorted(Counter(rows).items())
    return hashlib.sha256(orjson.dumps(counted)).hexdigest()


def _hashed(value: Any, kind: str) -> Any:  # noqa: ANN401 - any column's
    if value is None:
        return None
    return canonical_json(value) if kind == "json" else value


def canonical_json(value: Any) -> str:  # noqa: ANN401 - a document, or its text
    """Return a document in one form, whether a store keeps it as text or as an object."""
    document = orjson.loads(value) if isinstance(value, str) else value
    return orjson.dumps(document, option=orjson.OPT_SORT_KEYS).decode()


def plain(table: str, row: Row) -> Row:
    """Return a row, as read from a store, in the common form."""
    if not TABLES[table]:
        return {name: value for name, value in row.items() if not name.startswith("_")}
    return {column: _plain(row.get(column), kind) for column, kind in TABLES[table].items()}


def _plain(value: Any, kind: str) -> Any:  # noqa: ANN401 - any store's
    if value is None:
        return None
    if kind == "bytes":
        return value.hex() if isinstance(value, bytes) else base64.b64decode(value).hex()
    if kind == "time":
        at = datetime.fromisoformat(value) if isinstance(value, str) else value
        return (at.astimezone(UTC) - _EPOCH) // timedelta(microseconds=1)
    if kind == "number":
        return str(value) if isinstance(value, Decimal) else value
    if kind == "json":
        return value if isinstance(value, str) else canonical_json(value)
    return str(value) if kind == "any" else value


def database_rows(connection: psycopg.Connection[Any]) -> Iterator[tuple[str, Row]]:
    """Yield every row of every table, the clock's too, in the form that stores are read into."""
    for table, kinds in TABLES.items():
        columns = ", ".join(asked(column, kind) for column, kind in kinds.items())
        found = connection.execute(f"SELECT {columns or '*'} FROM {table}".encode())
        names = [each.name for each in found.description or ()]
        for values in found:
            row = dict(zip(kinds or names, values, strict=True))
            # Without the columns that are a follower's own.
            yield table, row if kinds else plain(table, row)


def shaped(state: State) -> list[Row]:
    """Return the rows of `shapes` with the columns that the state's clock names, and no others.

    Stores keep columns that the source has dropped.
    """
    names = ["id", *filter(None, state["clock"][0]["shape"].split(","))]
    return [{name: row.get(name) for name in names} for row in state["shapes"]]


def asked(column: str, kind: str) -> str:
    """Return the SQL of a column in the common form."""
    forms = {
        "number": "{0}::text",
        "uuid": "{0}::text",
        "json": "{0}::text",
        "time": "(extract(epoch from {0}) * 1000000)::bigint",
        "bytes": "encode({0}, 'hex')",
        "any": "{0}::text",
    }
    return forms.get(kind, "{0}").format(column)


def findings(state: State) -> list[str]:
    """Return what is wrong with a state; empty where the database can have had it."""
    clock = state["clock"]
    if not clock:
        return [f"{name} has rows, and there is no clock" for name, rows in state.items() if rows]
    digest = 0
    for table, rows in (state | {"shapes": shaped(state)}).items():
        if table not in _NOT_IN_DIGEST:
            for row in rows:
                digest ^= row_hash(table, row)
    found = [] if f"{digest:064x}" == clock[0]["digest"] else ["the digest of all rows differs"]
    if TICKS in state:
        ticks = ticks_digest((row["n"], row["what"]) for row in state[TICKS])
        found += ["the rows without a key differ"] * (ticks != clock[0]["ticks"])
    return [*found, *_money(state), *_orders(state), *_single(state)]


def _money(state: State) -> list[str]:
    total = sum(
        (Decimal(row["balance"]) for name in ("accounts", "savings") for row in state[name]),
        Decimal(0),
    )
    return [] if total == TOTAL else [f"the money adds up to {total}"]


def _orders(state: State) -> list[str]:
    lines: dict[str, list[Row]] = defaultdict(list)
    for row in state["lines"]:
        lines[row["order_id"]].append(row)
    reported = []
    for order in state["orders"]:
        own = lines.pop(order["id"], [])
        total = sum((Decimal(row["amount"]) for row in own), Decimal(0))
        if len(own) != order["items"] or total != Decimal(order["total"]):
            reported.append(
                f"order {order['id']}: {len(own)} lines of {order['items']}, sum {total}"
            )
    return reported + [
        f"{len(rows)} lines without their order {order}" for order, rows in lines.items()
    ]


def _single(state: State) -> list[str]:
    reported = []
    for table, rows in state.items():
        if table == TICKS:
            continue
        keys = [tuple(row[column] for column in KEYS[table]) for row in rows]
        if len(keys) != len(set(keys)):
            reported.append(f"{table} has a key twice")
    for row in state["blobs"]:
        md5 = hashlib.md5(row["big"].encode(), usedforsecurity=False).hexdigest()
        reported += [f"blob {row['id']} has another's text"] * (md5 != row["md5"])
    return reported


def differences(state: State, source: State) -> list[str]:
    """Return in which keys and values a store differs from the database."""
    reported = []
    for table, rows in source.items():
        own = {_name(table, row): row for row in state[table]}
        theirs = {_name(table, row): row for row in rows}
        for what, keys in (
            ("missing", theirs.keys() - own.keys()),
            ("left over", own.keys() - theirs.keys()),
            (
                "other values",
                {k for k in own.keys() & theirs.keys() if not _same(own[k], theirs[k])},
            ),
        ):
            if keys:
                reported.append(f"{table}: {len(keys)} {what}, such as {sorted(keys)[:_SHOWN]}")
        if len(own) != len(state[table]):
            reported.append(f"{table}: a key twice")
    return reported


def _name(table: str, row: Row) -> str:
    return "/".join(str(row[column]) for column in KEYS[table])


def _same(one: Row, other: Row) -> bool:
    return all(
        canonical_json(one[name]) == canonical_json(other[name])
        if name == "spec" and None not in (one[name], other[name])
        else one.get(name) == other[name]
        for name in other
    )
