"""A workload whose every committed state can be verified by itself, in any store.

One writer, transactions over several tables: money moves between `accounts` and `savings`; orders
are inserted and deleted with their lines; `events` is truncated; keys change, also back and forth;
rows keep TOAST values that Postgres does not send; DDL changes the columns of `shapes`; `crowd` is
changed in storms, of more rows than followers apply in their drivers. Each transaction ends by
writing its number and a digest of all rows of all tables into the row of `clock`. So any state that
a reader sees is one that the database had, or does not match its digest: a row that is missing,
old, duplicated, torn or left over is found.

The digest is an XOR of the rows' hashes, kept up to date by a model in memory. After a lost
connection the model is read from the database.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

import psycopg

from tests.faults.follower_ddl import Alterations, Shapes
from tests.faults.follower_rows import (
    KEYS,
    REWRITTEN,
    TABLES,
    TICKS,
    TOTAL,
    Row,
    database_rows,
    row_hash,
    ticks_digest,
)
from tests.fixtures.writing import Writing

_ACCOUNTS: Final = 40
_BULK: Final = 400
# More than a follower's `max_events` in the campaign: a cut of one large transaction.
_FLOOD: Final = 3_000
# How many of the transactions begin with DDL, if the log has the one before.
_ALTERING: Final = 0.12
# As many as a storm has rows: each is inserted and updated, and most are deleted. So it has more
# events than a follower's driver applies by itself: while Spark runs, or at any time.
_STORMS: Final = (21_000, 21_000, 52_000)
_SIZES: Final = (2_000, 60_000, 150_000)


class Model:
    """The rows of all tables but the clock, by key, and the digest of all of them."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[tuple[Any, ...], Row]] = {name: {} for name in TABLES}
        self.shapes = Shapes([], {})
        self.ticks: Counter[tuple[int, str]] = Counter()
        self.digest = 0
        self.n = 0

    def put(self, table: str, row: Row) -> None:
        """Write a complete row, in place of the one with its key."""
        self.drop(table, self.key(table, row))
        self.rows[table][self.key(table, row)] = row
        self.digest ^= row_hash(table, row)

    def drop(self, table: str, key: tuple[Any, ...]) -> None:
        old = self.rows[table].pop(key, None)
        if old is not None:
            self.digest ^= row_hash(table, old)

    def clear(self, table: str) -> None:
        for key in list(self.rows[table]):
            self.drop(table, key)

    @staticmethod
    def key(table: str, row: Row) -> tuple[Any, ...]:
        return tuple(row[column] for column in KEYS[table])

    @property
    def reported(self) -> str:
        digest = self.digest
        for row in self.shapes.rows.values():
            digest ^= row_hash("shapes", row)
        return f"{digest:064x}"

    @classmethod
    def read(cls, connection: psycopg.Connection[Any]) -> Model:
        """Read the rows from the database."""
        model, shapes = cls(), list[Row]()
        for table, row in database_rows(connection):
            if table == "clock":
                model.n = row["n"]
            elif table == "shapes":
                shapes.append(row)
            elif table not in REWRITTEN:
                model.put(table, row)
        model.shapes = Shapes.read(connection, shapes)
        model.ticks.update(connection.execute(f"SELECT n, what FROM {TICKS}".encode()).fetchall())
        return model


class FollowerLoad(Writing):
    """Writes from `with` to its end; `commits` counts the transactions."""

    def __init__(self, dsn: str, seed: int, *, per_second: float = 60.0) -> None:
        super().__init__("follower load")
        self._dsn = dsn
        self._chance = random.Random(f"{seed}/followers")
        self._pause = 1.0 / per_second
        self.model = Model()
        self.altered: Counter[str] = Counter()
        self.sizes: Counter[int] = Counter()  # how many transactions have more events than this
        self._storm = threading.Event()
        self._changed = 0  # rows, in the open transaction
        self._alterations = Alterations(self._chance, self._run_sql)
        self._cursor: psycopg.Cursor[Any]

    def _write(self) -> None:
        with psycopg.connect(self._dsn, connect_timeout=5) as connection:
            self.model = Model.read(connection)
            connection.commit()
            self._alterations.forget()
            while not self._over.is_set():
                with connection.cursor() as self._cursor:
                    self._changed = 0
                    self.transaction()
                connection.commit()
                self._commits += 1
                self.sizes.update(each for each in _SIZES if self._changed > each)
                time.sleep(self._pause)

    # -- transactions ---------------------------------------------------------------------------

    def transaction(self) -> None:
        """Make some changes, and record the digest of all tables."""
        if self._chance.random() < _ALTERING and self._alterations.may_follow(self._cursor):
            self.altered[self._alterations.alter(self.model.shapes)] += 1
        if self._storm.is_set():
            self._crowd()
            self._storm.clear()
        for _ in range(self._chance.choice((1, 1, 1, 2, 3, 6))):
            (deed,) = self._chance.choices(_DEEDS, _WEIGHTS)
            deed(self)
        self.model.n += 1
        self._run_sql(
            "INSERT INTO clock VALUES (1, %s, %s, %s, %s) ON CONFLICT (id) DO UPDATE"
            " SET n = excluded.n, digest = excluded.digest, shape = excluded.shape,"
            " ticks = excluded.ticks",
            self.model.n,
            self.model.reported,
            ",".join(self.model.shapes.columns),
            ticks_digest(self.model.ticks.elements()),
        )

    def begin_with(self, connection: psycopg.Connection[Any]) -> None:
        """Fill the tables in one transaction."""
        with connection.transaction(), connection.cursor() as self._cursor:
            share = TOTAL / _ACCOUNTS
            for number in range(1, _ACCOUNTS + 1):
                self._put("accounts", id=number, balance=f"{share:.2f}", n=0, note=self._long())
            for _ in range(12):
                self._order()
                self._blob()
            # A table that is never written to is in no store.
            self._happen(3)
            self._move_money()
            self._shape()
            self._tick()
            self._season("summer")
            self._season("winter")
            self._crowd(100)
            self.transaction()

    def once(self) -> None:
        """Write one transaction, which stores show once they have all before it."""
        with psycopg.connect(self._dsn) as connection, connection.cursor() as self._cursor:
            self.model = Model.read(connection)
            self.transaction()

    def storm(self) -> None:
        """Have one of the next transactions be a very large one."""
        self._storm.set()

    def _run_sql(self, statement: str, *values: object) -> None:
        self._cursor.execute(statement.encode(), values)
        self._changed += max(0, self._cursor.rowcount)

    def _put(self, table: str, **row: object) -> None:
        places = ", ".join(_placed(kind) for kind in TABLES[table].values())
        values = [row[column] for column in TABLES[table]]
        columns = ", ".join(TABLES[table])
        self._run_sql(f"INSERT INTO {table} ({columns}) VALUES ({places})", *values)
        self.model.put(table, row)

    def _change(self, table: str, row: Row, **changed: object) -> None:
        """Update the named columns, key columns too, and no others."""
        sets = ", ".join(f"{name} = {_placed(TABLES[table][name])}" for name in changed)
        where, key = self._where(table, row)
        self._run_sql(f"UPDATE {table} SET {sets} WHERE {where}", *changed.values(), *key)
        assert self._cursor.rowcount == 1, f"{table}: the model is not the database"
        self.model.drop(table, self.model.key(table, row))
        self.model.put(table, row | changed)

    def _delete(self, table: str, row: Row) -> None:
        where, key = self._where(table, row)
        self._run_sql(f"DELETE FROM {table} WHERE {where}", *key)
        self.model.drop(table, self.model.key(table, row))

    @staticmethod
    def _where(table: str, row: Row) -> tuple[str, list[Any]]:
        where = " AND ".join(f"{name} = {_placed(TABLES[table][name])}" for name in KEYS[table])
        return where, [row[name] for name in KEYS[table]]

    def _any(self, table: str) -> Row | None:
        rows = self.model.rows[table]
        return self._chance.choice(list(rows.values())) if rows else None

    def _long(self) -> str:
        return self._chance.randbytes(self._chance.choice((10, 1_300, 2_500))).hex()

    # -- changes --------------------------------------------------------------------------------

    def _move_money(self) -> None:
        """Move money from an account into a pot; long notes do not change."""
        account = self._any("accounts")
        assert account is not None
        amount = Decimal(self._chance.randrange(1, 10_000)) / 100
        owner, pot = self._chance.randrange(9), self._chance.choice(("car", "house", "ü 'n'"))
        saved = self.model.rows["savings"].get((pot, owner))
        balance = f"{Decimal(account['balance']) - amount:.2f}"
        self._change("accounts", account, balance=balance, n=account["n"] + 1)
        if saved is None:
            self._put("savings", owner=owner, balance=f"{amount:.2f}", pot=pot, n=0)
        else:
            more = f"{Decimal(saved['balance']) + amount:.2f}"
            self._change("savings", saved, balance=more, n=saved["n"] + 1)

    def _close_pot(self) -> None:
        saved, account = self._any("savings"), self._any("accounts")
        if saved is None or account is None:
            return
        self._delete("savings", saved)
        balance = f"{Decimal(account['balance']) + Decimal(saved['balance']):.2f}"
        self._change("accounts", account, balance=balance, n=account["n"] + 1)

    def _rewrite(self) -> None:
        account = self._any("accounts")
        assert account is not None
        self._change("accounts", account, note=self._chance.choice((None, self._long())))

    def _renumber(self) -> None:
        """Change a key to a new one, or to one that was used before; sometimes back at once."""
        account = self._any("accounts")
        assert account is not None
        new = self._chance.randrange(1, 3 * _ACCOUNTS)
        if (new,) in self.model.rows["accounts"]:
            return
        self._change("accounts", account, id=new, n=account["n"] + 1)
        if self._chance.random() < 0.3:
            self._change("accounts", self.model.rows["accounts"][new,], id=account["id"])

    def _replace(self) -> None:
        """Delete a row and insert its key again."""
        account = self._any("accounts")
        assert account is not None
        self._delete("accounts", account)
        self._put("accounts", **account | {"n": 0, "note": "again"})

    def _order(self) -> None:
        order = str(uuid.UUID(int=self._chance.getrandbits(128), version=4))
        amounts = [Decimal(self._chance.randrange(1, 9_999)) / 100 for _ in range(4)]
        amounts = amounts[: self._chance.randrange(1, 5)]
        spec = self._chance.choice((None, '{"a": [1, 2.50, "\\"ü"]}', "{}"))
        at = 1_700_000_000_000_000 + self._chance.randrange(10**15)
        self._put(
            "orders", id=order, items=len(amounts), total=f"{sum(amounts):.2f}", at=at, spec=spec
        )
        for number, amount in enumerate(amounts):
            self._put("lines", order_id=order, number=number, amount=f"{amount:.2f}", what="w")

    def _lines_of(self, order: Row) -> list[Row]:
        return [row for row in self.model.rows["lines"].values() if row["order_id"] == order["id"]]

    def _add_line(self) -> None:
        order = self._any("orders")
        if order is None:
            return
        amount = Decimal(self._chance.randrange(1, 9_999)) / 100
        number = 1 + max((row["number"] for row in self._lines_of(order)), default=0)
        total = f"{Decimal(order['total']) + amount:.2f}"
        self._put("lines", order_id=order["id"], number=number, amount=f"{amount:.2f}", what=None)
        self._change("orders", order, items=order["items"] + 1, total=total)

    def _move_order(self) -> None:
        """Give an order another key, and its lines with it."""
        order = self._any("orders")
        if order is None:
            return
        new = str(uuid.UUID(int=self._chance.getrandbits(128), version=4))
        for line in self._lines_of(order):
            self._change("lines", line, order_id=new)
        self._change("orders", order, id=new)

    def _cancel(self) -> None:
        order = self._any("orders")
        if order is None or len(self.model.rows["orders"]) < 5:
            return
        for line in self._lines_of(order):
            self._delete("lines", line)
        self._delete("orders", order)

    def _happen(self, count: int = 0) -> None:
        """Insert events, which `_forget` truncates."""
        for _ in range(count or self._chance.randrange(1, 4)):
            number = self._chance.randrange(100_000)
            if (number,) not in self.model.rows["events"]:
                data = self._chance.randbytes(self._chance.choice((0, 9, 3_000))).hex()
                self._put("events", id=number, kind=self._chance.choice("abc"), data=data)

    def _much(self) -> None:
        self._happen(_BULK)

    def _flood(self) -> None:
        """Insert or update more rows than a cut may have of several transactions, then some."""
        events = list(self.model.rows["events"].values())
        if len(events) < _FLOOD:
            self._insert_flood()
        else:
            self._run_sql("UPDATE events SET kind = 'f'")
            for event in events:
                self.model.put("events", event | {"kind": "f"})

    def _insert_flood(self) -> None:
        known, rows = self.model.rows["events"], dict[int, Row]()
        for _ in range(_FLOOD):
            number = self._chance.randrange(100_000, 200_000)
            if (number,) not in known:
                data = self._chance.randbytes(8).hex()
                rows[number] = {"id": number, "kind": "i", "data": data}
        self._run_sql(
            "INSERT INTO events SELECT id, 'i', decode(data, 'hex')"
            " FROM unnest(%s::bigint[], %s::text[]) AS new (id, data)",
            list(rows),
            [row["data"] for row in rows.values()],
        )
        for row in rows.values():
            self.model.put("events", row)

    def _forget(self) -> None:
        """Truncate the events, and at times insert some again in the same transaction."""
        self._run_sql("TRUNCATE events")
        self.model.clear("events")
        if self._chance.random() < 0.5:
            self._happen()

    def _drop_event(self) -> None:
        event = self._any("events")
        if event is not None:
            self._delete("events", event)

    def _blob(self) -> None:
        number, big = self._chance.randrange(60), self._long()
        self._delete("blobs", {"id": number})
        md5 = hashlib.md5(big.encode(), usedforsecurity=False).hexdigest()
        self._put("blobs", id=number, n=0, big=big, md5=md5)

    def _touch_blob(self) -> None:
        for _ in range(self._chance.randrange(1, 4)):
            blob = self._any("blobs")
            if blob is not None:
                self._change("blobs", blob, n=blob["n"] + 1)

    def _crowd(self, many: int = 0) -> None:
        """Insert and change many rows, and delete most of them again."""
        many, rows = many or self._chance.choice(_STORMS), self.model.rows["crowd"]
        first, kept = self._chance.randrange(10**6), self._chance.randrange(100)
        self._run_sql(
            "INSERT INTO crowd SELECT id, 0 FROM generate_series(%s::int, %s::int) AS new (id)"
            " ON CONFLICT (id) DO UPDATE SET n = 0",
            first,
            first + many - 1,
        )
        self._run_sql("UPDATE crowd SET n = n + 1")
        self._run_sql("DELETE FROM crowd WHERE id %% 100 <> %s", kept)
        numbers = {id_: row["n"] + 1 for (id_,), row in rows.items()}
        numbers.update(dict.fromkeys(range(first, first + many), 1))
        self.model.clear("crowd")
        for id_, n in numbers.items():
            if id_ % 100 == kept:
                self.model.put("crowd", {"id": id_, "n": n})

    def _tick(self) -> None:
        """Insert rows without a key, some of them alike, or change or delete one of such."""
        n, count = self._chance.randrange(4), self._chance.randrange(1, 5)
        self._run_sql(f"INSERT INTO {TICKS} SELECT %s, 'x' FROM generate_series(1, %s)", n, count)
        ticks = self.model.ticks
        ticks[n, "x"] += count
        for _ in range(count - 1):
            old = self._chance.choice(sorted(ticks))
            one = f"ctid = (SELECT ctid FROM {TICKS} WHERE n = %s AND what = %s LIMIT 1)"
            if self._chance.random() < 0.5:
                new = (old[0] + 1, "y")
                self._run_sql(f"UPDATE {TICKS} SET n = %s, what = %s WHERE {one}", *new, *old)
                ticks[new] += 1
            else:
                self._run_sql(f"DELETE FROM {TICKS} WHERE {one}", *old)
            self.model.ticks = ticks = ticks - Counter([old])

    def _season(self, table: str = "") -> None:
        """Write a row of a table that faults rename, and rewrite without events."""
        table, key = table or self._chance.choice(REWRITTEN), self._chance.randrange(50)
        if self._chance.random() < 0.2:
            self._run_sql(f"DELETE FROM {table} WHERE id = %s", key)
        value = str(self._chance.randrange(1_000))
        self._run_sql(
            f"INSERT INTO {table} (id, v, r) VALUES (%s, %s, 0.5)"
            " ON CONFLICT (id) DO UPDATE SET v = excluded.v",
            key,
            value,
        )

    def _shape(self) -> None:
        self._alterations.write(self.model.shapes)

    def _undone(self) -> None:
        """Change many rows in a subtransaction and roll it back: nothing of it is published."""
        self._run_sql("SAVEPOINT before")
        self._run_sql("UPDATE accounts SET balance = 0, n = -1")
        self._run_sql("DELETE FROM lines")
        self._run_sql("ROLLBACK TO SAVEPOINT before")


def _placed(kind: str) -> str:
    forms = {
        "number": "%s::numeric",
        "uuid": "%s::uuid",
        "json": "%s::jsonb",
        "time": "'epoch'::timestamptz + %s * interval '1 microsecond'",
        "bytes": "decode(%s, 'hex')",
        "int": "%s::bigint",
    }
    return forms.get(kind, "%s")


_CHOICES: Final[dict[Callable[[FollowerLoad], None], int]] = {
    FollowerLoad._move_money: 20,
    FollowerLoad._close_pot: 3,
    FollowerLoad._rewrite: 4,
    FollowerLoad._renumber: 5,
    FollowerLoad._replace: 3,
    FollowerLoad._order: 6,
    FollowerLoad._add_line: 6,
    FollowerLoad._move_order: 3,
    FollowerLoad._cancel: 5,
    FollowerLoad._happen: 8,
    FollowerLoad._much: 1,
    FollowerLoad._flood: 1,
    FollowerLoad._forget: 2,
    FollowerLoad._drop_event: 3,
    FollowerLoad._blob: 4,
    FollowerLoad._touch_blob: 8,
    FollowerLoad._shape: 6,
    FollowerLoad._tick: 6,
    FollowerLoad._season: 3,
    FollowerLoad._undone: 2,
}
_DEEDS: Final = tuple(_CHOICES)
_WEIGHTS: Final = tuple(_CHOICES.values())
