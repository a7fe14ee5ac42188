"""drain-tpcb: pgbench's mix, four changes per transaction from four concurrent clients.

Its own tables at scale 10 and its own five statements without the SELECT, which writes nothing to
the WAL; run inside the server, because the embedded Postgres has no pgbench. One thing differs from
pgbench: a delta is never below 1, so that balances only grow and every update can be distinguished
from every other (`benchmarks.contents`).

Reference: https://www.postgresql.org/docs/current/pgbench.html (the `tpcb-like` script)
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import psycopg

from benchmarks.contents import Content, GrowingBalances, TheseRows
from benchmarks.progress import say
from benchmarks.workload import Clock

if TYPE_CHECKING:
    from typing import LiteralString

CHANGES_PER_TRANSACTION: Final = 4
_CLIENTS: Final = 4
_BRANCHES: Final = 10
_TELLERS: Final = 100
_ACCOUNTS: Final = 1_000_000

_CREATE: Final[tuple[LiteralString, ...]] = (
    "CREATE TABLE pgbench_branches (bid int PRIMARY KEY, bbalance int, filler char(88))",
    "CREATE TABLE pgbench_tellers (tid int PRIMARY KEY, bid int, tbalance int, filler char(84))",
    "CREATE TABLE pgbench_accounts (aid int PRIMARY KEY, bid int, abalance int, filler char(84))",
    """CREATE TABLE pgbench_history
        (tid int, bid int, aid int, delta int, mtime timestamp, filler char(22))""",
)
_FILL: Final = (
    f"INSERT INTO pgbench_branches SELECT i, 0 FROM generate_series(1, {_BRANCHES}) i",
    f"""INSERT INTO pgbench_tellers
        SELECT i, 1 + (i - 1) / 10, 0 FROM generate_series(1, {_TELLERS}) i""",
    """INSERT INTO pgbench_accounts
        SELECT i, 1 + (i - 1) / 100000, 0, '' FROM generate_series(1, {accounts}) i""",
)
_TRANSACTIONS: Final = f"""
    DO $$
    DECLARE a int; b int; t int; d int;
    BEGIN
        PERFORM setseed({{seed}});
        FOR i IN 1..{{transactions}} LOOP
            a := 1 + floor(random() * {{accounts}})::int;
            b := 1 + floor(random() * {_BRANCHES})::int;
            t := 1 + floor(random() * {_TELLERS})::int;
            d := 1 + floor(random() * 5000)::int;
            UPDATE pgbench_accounts SET abalance = abalance + d WHERE aid = a;
            UPDATE pgbench_tellers SET tbalance = tbalance + d WHERE tid = t;
            UPDATE pgbench_branches SET bbalance = bbalance + d WHERE bid = b;
            INSERT INTO pgbench_history (tid, bid, aid, delta, mtime)
                VALUES (t, b, a, d, clock_timestamp());
            COMMIT;
        END LOOP;
    END $$"""
# The history table has no key, so all its columns identify a row.
_HISTORY: Final = (
    "SELECT tid, bid, aid, delta, (extract(epoch FROM mtime) * 1000000)::bigint"
    " FROM pgbench_history"
)
# Table, key, balance.
_UPDATED: Final = (
    ("pgbench_accounts", "aid", "abalance"),
    ("pgbench_tellers", "tid", "tbalance"),
    ("pgbench_branches", "bid", "bbalance"),
)


class TpcB:
    """Updates of a large, a small and a tiny table, and an insert into one without a key."""

    name = "drain-tpcb"
    tables = ("pgbench_accounts", "pgbench_tellers", "pgbench_branches", "pgbench_history")
    rows = 1_000_000
    clock = Clock.FIRST_RECORD
    in_progress = False

    def create(self, connection: psycopg.Connection, rows: int) -> None:
        for statement in _CREATE:
            connection.execute(statement)
        for statement in _FILL:
            connection.execute(statement.format(accounts=_accounts(rows)).encode())

    def load(self, connection: psycopg.Connection, rows: int) -> None:
        transactions = rows // CHANGES_PER_TRANSACTION
        shares = [
            transactions // _CLIENTS + (client < transactions % _CLIENTS)
            for client in range(_CLIENTS)
        ]

        def client(number: int) -> None:
            statement = _TRANSACTIONS.format(
                seed=number / 10, transactions=shares[number], accounts=_accounts(rows)
            )
            with psycopg.connect(connection.info.dsn, autocommit=True) as own:
                own.execute(statement.encode())

        say(f"preloading the WAL: {transactions:,} transactions from {_CLIENTS} clients")
        with ThreadPoolExecutor(_CLIENTS) as clients:
            list(clients.map(client, range(_CLIENTS)))

    def contents(self, connection: psycopg.Connection, rows: int) -> dict[str, Content]:
        updates = rows // CHANGES_PER_TRANSACTION
        found: dict[str, Content] = {}
        for table, row_id, balance in _UPDATED:
            query = f"SELECT {row_id}, {balance} FROM {table} WHERE {balance} <> 0"
            final: dict[int, int] = dict(connection.execute(query.encode()).fetchall())
            found[table] = GrowingBalances(table, (row_id, balance), updates, final)
        history = connection.execute(_HISTORY).fetchall()
        columns = ("tid", "bid", "aid", "delta", "mtime")
        found["pgbench_history"] = TheseRows("pgbench_history", columns, history)
        return found


def _accounts(rows: int) -> int:
    """Return scale 10's accounts; fewer in a quick run, where they would take most of the time."""
    return min(_ACCOUNTS, rows)
