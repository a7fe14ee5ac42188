"""Tables in Postgres and in SQLite: types, changed tables, foreign keys, what readers see."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Barrier
from typing import Any

import msgspec
import psycopg
import pytest

from cdc.errors import ConfigError, OvertakenError, StoreLostError, UnavailableError
from lockstep.conformance.store import LINES, USERS, applied, apply, change, key, row
from lockstep.sinks.contract import Change, Changes, Sink, Version
from lockstep.sinks.sql.database import Database as SqlDatabase
from lockstep.sinks.sql.sink import SqlSettings, SqlSink
from lockstep.sinks.sql.types import ColumnValues
from tests.fixtures.decoded import Decoded
from tests.fixtures.servers import Database
from tests.fixtures.store_postgres import PostgresStore, url_of
from tests.fixtures.store_sqlite import SqliteStore
from tests.integration.test_opensearch_types import wide
from tests.integration.test_values_types import OPTIONS, fill
from tests.integration.value_table import VALUES

Store = PostgresStore | SqliteStore


@pytest.fixture(params=["postgres", "sqlite"])
def store(request: pytest.FixtureRequest) -> Store:
    found: Store = request.getfixturevalue(f"{request.param}_store")
    return found


@pytest.fixture
def sink(store: Store) -> Iterator[Sink]:
    made = store.sink()
    made.open()
    yield made
    made.close()


def query(store: Store, statement: str) -> list[dict[str, Any]]:
    """Return a query's rows, as any reader of the database gets them."""
    if isinstance(store, SqliteStore):
        return store.query(statement)
    with psycopg.connect(store.database.dsn, row_factory=psycopg.rows.dict_row) as connection:
        return connection.execute(statement.encode()).fetchall()


def retyped(kind: str, type_id: int, schema_id: int) -> Version:
    """Return a version of the table `users` whose column `body` has another type."""
    columns = [c._replace(type=kind, type_id=type_id) if c.name == "body" else c
               for c in USERS.columns]  # fmt: skip
    return USERS._replace(schema_id=schema_id, columns=tuple(columns))


def test_every_value_of_every_type_is_exact_in_postgres(
    decoded: Decoded, database: Database
) -> None:
    """Its text is the source's under every option, in its own type where that can be."""
    for each in (
        'CREATE SCHEMA other CREATE TABLE "odd.Table" (id int)',
        "CREATE TYPE other.\"Odd\" AS ENUM ('x')",
        "CREATE TYPE other.mood AS ENUM ('glad', 'so, so')",
    ):
        decoded.sql.execute(each.encode())
    values = VALUES | {"other.mood": ("glad", "so, so")}
    tables = {kind: f"t{i}" for i, kind in enumerate(values)}
    for kind, table in tables.items():
        fill(decoded, f"public.{table}", kind, values[kind])
    frames = decoded.frames()
    sink = SqlSink(SqlSettings(url_of(database), "copy", "copied"))
    sink.open()
    for number, options in enumerate(OPTIONS, 1):
        made, rows = wide(frames, options, number)
        keys = [b'{"id":%d}' % at for at in range(len(rows))]
        first = 10_000 * number
        changes = [Change(at, first, row, number, 1, 1) for at, row in zip(keys, rows, strict=True)]
        assert apply(sink, first, Changes((made,), changes)) == len(rows)
        differ = {
            (kind, column, number)
            for kind, table in tables.items()
            for column in ("v", "a")
            if kind != "money"  # numbers, without a currency
            and texts(decoded, f"copied.{made.table}", f"{table}_{column}")
            != texts(decoded, f"public.{table}", column)
        }
        assert differ == set()
        before = contents(database, made)
        back = [
            Change(at, first + 1, row, number, 1, 1) for at, row in sink.rows(made, keys).items()
        ]
        assert apply(sink, first + 1, Changes((made,), back)) == len(rows)
        assert contents(database, made) == before
    kept = "SELECT data_type FROM information_schema.columns WHERE column_name = %s"
    with database.connect() as connection:
        for kind, wanted in _KEPT.items():
            found = connection.execute(kept, [f"{tables[kind]}_v"]).fetchone()
            assert found == (wanted,), kind
    sink.close()


_KEPT = {
    "numeric(6,4)": "numeric",
    "timestamptz": "timestamp with time zone",
    "other.mood": "text",
    "money": "numeric",
    "jsonb": "jsonb",
    "varbit": "bit varying",
}


def texts(decoded: Decoded, table: str, column: str) -> list[tuple[str]]:
    """Return a column's values as its type's output function writes them."""
    query = f"SELECT format('%s', {column}) FROM {table} WHERE {column} IS NOT NULL ORDER BY 1"
    found: list[tuple[str]] = decoded.sql.execute(query.encode()).fetchall()
    return found


def contents(database: Database, made: Version) -> list[object]:
    """Return all rows of the copy, without our own column."""
    with database.connect() as connection:
        query = f"SELECT to_jsonb(w) - '_lockstep_seq' FROM copied.{made.table} w ORDER BY id"
        return list(connection.execute(query.encode()).fetchall())


def test_sqlite_has_its_own_values_and_postgres_text(
    decoded: Decoded, sqlite_store: SqliteStore
) -> None:
    values = {
        kind: VALUES[kind]
        for kind in ("boolean", "bigint", "double precision", "bytea", "numeric", "timestamptz",
                     "date", "money", "interval")
    }  # fmt: skip
    tables = {kind: f"t{i}" for i, kind in enumerate(values)}
    for kind, table in tables.items():
        fill(decoded, f"public.{table}", kind, values[kind])
    made, rows = wide(decoded.frames(), OPTIONS[0], 1)
    sink = sqlite_store.sink()
    sink.open()
    changes = [Change(b'{"id":%d}' % at, 100 + at, row, 1, 1, 1) for at, row in enumerate(rows)]
    apply(sink, 999, Changes((made,), changes))

    def stored(kind: str) -> set[Any]:
        name = f"{tables[kind]}_v"
        found = sqlite_store.query(f"SELECT {name} FROM w1 WHERE {name} IS NOT NULL")
        return {each[name] for each in found}

    assert stored("boolean") == {1, 0}
    assert stored("bigint") == {int(each) for each in VALUES["bigint"]}
    assert {"NaN", "-Infinity", 5e-324, 100.0} < stored("double precision")
    assert stored("bytea") == {bytes.fromhex(each[2:]) for each in VALUES["bytea"]}
    assert {"NaN", "12300", "-0.000001", "0.00"} < stored("numeric")
    assert stored("date") == set(VALUES["date"])
    assert {"infinity", "2026-01-02 03:04:05.123456+00"} < stored("timestamptz")
    assert {"-92233720368547758.08", "-0.05"} < stored("money")
    assert {"00:00:00", "1 year 2 mons -3 days +04:05:06.7"} < stored("interval")
    assert len(sink.rows(made, [change.key or b"" for change in changes])) == len(rows)
    sink.close()


def test_a_dropped_column_keeps_its_values_and_a_renamed_one_is_new(
    sink: Sink, store: Store
) -> None:
    apply(sink, 2, Changes((USERS,), [change(USERS, n, row(USERS, n, n), n) for n in (1, 2)]))
    renamed = USERS._replace(
        schema_id=9,
        columns=tuple(
            c._replace(name="Title % ?") if c.name == "name" else c for c in USERS.columns
        ),
    )
    new = {"id": 2, "Title % ?": "t", "body": None, "amount": "1.00", "active": None}
    apply(sink, 3, Changes((renamed,), [change(renamed, 3, new, 2)]))
    found = query(store, 'SELECT id, name, "Title % ?" AS title FROM users ORDER BY id')
    assert found == [{"id": 1, "name": "n1", "title": None}, {"id": 2, "name": None, "title": "t"}]
    assert msgspec.json.decode(sink.rows(renamed, [key(USERS, 2)])[key(USERS, 2)]) == new


def test_a_column_that_gets_another_type_keeps_every_value(sink: Sink, store: Store) -> None:
    """As a number where all texts are numbers, else as text; also from one cut to the next."""
    number, text = retyped("int4", 23, 8), retyped("text", 25, 9)

    def bodies() -> dict[int, Any]:
        return {each["id"]: each["body"] for each in query(store, "SELECT id, body FROM users")}

    apply(sink, 1, Changes((USERS,), [change(USERS, 1, row(USERS, 1, 1, body="17"), 1)]))
    apply(sink, 2, Changes((number,), [change(number, 2, row(number, 2, 2, body=18), 2)]))
    assert bodies() == {1: 17, 2: 18}
    both = [change(number, 3, row(number, 3, 3, body=19), 3),
            change(text, 4, row(text, 4, 4, body="x"), 4)]  # fmt: skip
    apply(sink, 4, Changes((number, text), both))
    assert bodies() == {1: "17", 2: "18", 3: "19", 4: "x"}
    apply(sink, 5, Changes((number,), [change(number, 5, row(number, 5, 5, body=20), 5)]))
    # SQLite has a value of another type in the same column, Postgres a column of text.
    twenty = 20 if isinstance(store, SqliteStore) else "20"
    assert {n: str(body) for n, body in bodies().items()}[4] == "x"
    assert bodies()[5] == twenty
    assert str(bodies()[1]) == "17"


def test_another_key_is_refused_unless_there_are_no_rows(sink: Sink, store: Store) -> None:
    other = USERS._replace(schema_id=9, key=("name",))
    apply(sink, 1, Changes((USERS,), [change(USERS, 1, row(USERS, 1, 1), 1)]))
    new = change(USERS, 3, row(USERS, 3, 1), 1)._replace(schema_id=9, key=b'{"name":"n3"}')
    with pytest.raises(ConfigError, match=r"public\.users has another key now \(name\)"):
        apply(sink, 3, Changes((other,), [new]))
    apply(sink, 3, Changes((other,), [new], truncated=2))
    deleted = Change(b'{"name":"n3"}', 4, None, 9, 1, 1, op="d")
    assert [each["id"] for each in query(store, "SELECT id FROM users")] == [1]
    apply(sink, 4, Changes((other,), [deleted]))
    assert query(store, "SELECT id FROM users") == []


def test_a_key_column_that_became_text_still_finds_its_rows(postgres_store: PostgresStore) -> None:
    """A key that holds texts gets the type of numbers, of which those are none."""
    named = USERS._replace(key=("name",))
    columns = [c._replace(type="int4", type_id=23) if c.name == "name" else c
               for c in USERS.columns]  # fmt: skip
    number = named._replace(schema_id=8, columns=tuple(columns))
    sink = postgres_store.sink()
    sink.open()
    old = change(USERS, 1, row(USERS, 1, 1), 1)._replace(key=b'{"name":"n1"}')
    apply(sink, 1, Changes((named,), [old]))
    new = change(number, 2, row(USERS, 2, 2, name=7), 2)._replace(key=b'{"name":7}')
    apply(sink, 2, Changes((number,), [new]))
    assert [each["name"] for each in query(postgres_store, "SELECT name FROM users")] == ["n1", "7"]
    assert msgspec.json.decode(sink.rows(number, [b'{"name":7}'])[b'{"name":7}'])["name"] == 7
    apply(sink, 3, Changes((number,), [new._replace(seq=3, row=None)]))
    assert [each["name"] for each in query(postgres_store, "SELECT name FROM users")] == ["n1"]
    sink.close()


def test_foreign_keys_hold_whatever_the_order_of_a_cut(postgres_store: PostgresStore) -> None:
    """And a cut that violates one is refused with its name, and leaves nothing."""
    sink = postgres_store.sink()
    sink.open()

    def line(seq: int, number: int, user: int | None) -> Changes:
        new = None if user is None else row(LINES, seq, number, user)
        return Changes((LINES,), [change(LINES, seq, new, number, user or 1)])

    def user(seq: int, number: int, *, there: bool = True) -> Changes:
        new = row(USERS, seq, number) if there else None
        return Changes((USERS,), [change(USERS, seq, new, number)])

    apply(sink, 2, user(1, 1), line(2, 7, 1))
    postgres_store.database.execute(
        "ALTER TABLE lines ADD CONSTRAINT of_user FOREIGN KEY (id) REFERENCES users"
        " DEFERRABLE INITIALLY DEFERRED"
    )
    apply(sink, 4, line(4, 8, 2), user(3, 2))  # the child first
    apply(sink, 6, user(5, 1, there=False), line(6, 7, None))  # the parent first
    assert set(postgres_store.rows("public.lines")) == {key(LINES, 8, 2)}
    with pytest.raises(ConfigError, match="violates the constraint of_user"):
        apply(sink, 7, user(7, 2, there=False))
    sink.close()
    state = sink.open()
    assert state is not None
    assert (state.applied.seq, state.reached) == (6, 7)
    assert set(postgres_store.rows("public.users")) == {key(USERS, 2)}
    truncated = [Changes((each,), [], truncated=9) for each in (USERS, LINES)]
    apply(sink, 9, *truncated)
    assert postgres_store.rows("public.users") == {}
    sink.close()


def test_a_readers_transaction_sees_rows_and_frontier_of_one_cut(store: Store) -> None:
    writer = store.sink()
    writer.open()
    seen = "SELECT (SELECT max(id) FROM users) AS id, seq FROM lockstep_frontiers"
    for seq in range(1, 6):
        cut = Changes((USERS,), [change(USERS, seq, row(USERS, seq, seq), seq)])
        writer.begin(seq, [USERS])
        writer.write(cut)
        if seq > 1:
            assert query(store, seen) == [{"id": seq - 1, "seq": seq - 1}]
        writer.commit(applied(seq))
        assert query(store, seen) == [{"id": seq, "seq": seq}]
    writer.close()


def test_a_connection_that_is_lost_between_cuts_is_replaced(
    postgres_store: PostgresStore,
) -> None:
    """And one that is lost in a cut is a temporary error, after which the cut is written again."""
    sink = postgres_store.sink()
    sink.open()
    lose = (
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE pid <> pg_backend_pid() AND datname = current_database()"
    )
    apply(sink, 1, Changes((USERS,), [change(USERS, 1, row(USERS, 1, 1), 1)]))
    postgres_store.database.execute(lose)
    apply(sink, 2, Changes((USERS,), [change(USERS, 2, row(USERS, 2, 2), 2)]))
    third = Changes((USERS,), [change(USERS, 3, row(USERS, 3, 3), 3)])
    sink.begin(3, [USERS])
    sink.write(third)
    postgres_store.database.execute(lose)
    with pytest.raises(UnavailableError, match="does not answer"):
        sink.commit(applied(3))
    assert sink.open() is not None
    apply(sink, 3, third)
    assert set(postgres_store.rows("public.users")) == {key(USERS, each) for each in (1, 2, 3)}
    sink.close()


def test_a_table_of_somebody_else_is_not_written_to(sink: Sink, store: Store) -> None:
    """As when the database is the source itself."""
    _execute(store, "CREATE TABLE users (id int PRIMARY KEY, name text)")
    with pytest.raises(ConfigError, match="exists already"):
        apply(sink, 1, Changes((USERS,), [change(USERS, 1, row(USERS, 1, 1), 1)]))


def test_columns_of_readers_stay_and_a_missing_table_is_noticed(sink: Sink, store: Store) -> None:
    apply(sink, 1, Changes((USERS,), [change(USERS, 1, row(USERS, 1, 1), 1)]))
    _execute(store, "ALTER TABLE users ADD COLUMN note text", "UPDATE users SET note = 'mine'")
    apply(sink, 2, Changes((USERS,), [change(USERS, 2, row(USERS, 2, 1), 1)]))
    assert query(store, "SELECT name, note FROM users") == [{"name": "n2", "note": "mine"}]
    _execute(store, "DROP TABLE users")
    with pytest.raises(StoreLostError, match="users"):
        apply(sink, 3, Changes((USERS,), [change(USERS, 3, row(USERS, 3, 2), 2)]))
    with pytest.raises(StoreLostError, match="users"):
        sink.open()
    sink.start_over(2)
    assert sink.open() is None
    assert sink.current() == 2
    apply(sink, 2, Changes((USERS,), [change(USERS, 2, row(USERS, 2, 1), 1)]))
    assert list(store.rows("public.users")) == [key(USERS, 1)]


def test_a_missing_frontier_is_noticed_and_no_row_outlives_it(sink: Sink, store: Store) -> None:
    apply(sink, 1, Changes((USERS,), [change(USERS, 1, row(USERS, 1, 1), 1)]))
    _execute(store, "DELETE FROM lockstep_frontiers")
    with pytest.raises(StoreLostError, match="another store"):
        sink.begin(2, [USERS])
    with pytest.raises(StoreLostError, match="lockstep_frontiers is missing"):
        sink.open()
    sink.start_over(2)
    assert store.rows("public.users") == {}
    other = store.sink()
    _execute(store, "DELETE FROM lockstep_frontiers")
    apply_to_new = Changes((USERS,), [change(USERS, 1, row(USERS, 1, 1), 1)])
    assert other.open() is None
    if isinstance(store, PostgresStore):  # its tables stay, and this process does not know them
        with pytest.raises(ConfigError, match="exists already"):
            apply(other, 1, apply_to_new)
    else:
        assert apply(other, 1, apply_to_new) == 1
    other.close()


def test_a_key_that_is_too_long_for_the_log_is_found_by_the_old_row(
    sink: Sink, store: Store
) -> None:
    hashed = b'{"sha256":"00"}'
    new = Change(hashed, 1, msgspec.json.encode(row(USERS, 1, 1)), 1, 1, 1)
    apply(sink, 1, Changes((USERS,), [new]))
    apply(sink, 2, Changes((USERS,), [Change(hashed, 2, None, 1, 1, 1, before=b'{"id":1}')]))
    assert store.rows("public.users") == {}


@pytest.mark.parametrize("url", ["mysql://h/d", "x", "postgresql://h", "sqlite://"])
def test_a_url_of_another_database_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="names no database in Postgres or SQLite"):
        SqlSink(SqlSettings(url, "copy"))


def test_sqlite_has_no_schemas(sqlite_store: SqliteStore) -> None:
    with pytest.raises(ConfigError, match="no schemas"):
        SqlSink(SqlSettings(f"sqlite:///{sqlite_store.path}", "copy", "x"))


def _execute(store: Store, *statements: str) -> None:
    if isinstance(store, PostgresStore):
        store.database.execute(*statements)
        return
    for each in statements:
        store.query(each)


def test_a_load_that_another_copy_overtakes_has_no_effect(postgres_store: PostgresStore) -> None:
    """Each loads a table of its own, and the first cut drops both; a row loaded twice is one."""
    url = url_of(postgres_store.database)
    sinks = [SqlSink(SqlSettings(url, "copy")) for _ in range(2)]
    for sink in sinks:
        sink.open()
    loaders = [sink.loader(USERS) for sink in sinks]
    for seq, sink, loader in zip((10, 20), sinks, loaders, strict=True):
        assert loader is not None
        many = Changes((USERS,), [change(USERS, seq, row(USERS, seq, n), n) for n in range(50)])
        copied = pickle.loads(pickle.dumps(loader))  # noqa: S301 - our own
        assert [copied.write(many), copied.write(many)] == [50, 50]
        copied.close()
        sink.begin(seq, [USERS])
    first, second = loaders
    assert first is not None
    assert second is not None
    assert sinks[0].take(first, 10) == 50
    sinks[0].commit(applied(10))
    with pytest.raises(OvertakenError, match="another copy"):
        sinks[1].take(second, 20)
    with pytest.raises(OvertakenError, match="another copy"):
        second.write(Changes((USERS,), [change(USERS, 20, row(USERS, 20, 1), 1)]))
    second.close()
    stored = postgres_store.rows(USERS.name).values()
    assert [row["body"] for row in stored] == ["long 10"] * 50
    for sink in sinks:
        sink.close()


@pytest.mark.parametrize("is_postgres", [True, False])
@pytest.mark.parametrize("value", [{"text": "foo"}, {"text": None}, {"a": "b", "text": "c"}, {}])
def test_an_hstore_of_any_keys_is_kept(value: dict[str, str | None], *, is_postgres: bool) -> None:
    column = USERS.columns[0]._replace(name="h", type="public.hstore")
    for mode in ("precise", "string"):
        options = {"hstore.handling.mode": "map", "decimal.handling.mode": mode}
        values = ColumnValues(column, options, postgres=is_postgres)
        stored = values.stored(value)
        pairs = [f'"{k}"=>' + ("NULL" if v is None else f'"{v}"') for k, v in value.items()]
        assert stored == ", ".join(pairs)
        assert values.stored(values.json(stored)) == stored


def test_sqlite_names_what_helps_where_a_key_has_another_type(sqlite_store: SqliteStore) -> None:
    columns = [c._replace(type="text", type_id=25) if c.name == "id" else c
               for c in USERS.columns]  # fmt: skip
    text = USERS._replace(schema_id=8, columns=tuple(columns))
    with closing(sqlite_store.sink()) as sink:
        sink.open()
        apply(sink, 1, Changes((USERS,), [change(USERS, 1, row(USERS, 1, 1), 1)]))
        new = change(text, 2, row(text, 2, 2, id="2"), 2)._replace(key=b'{"id":"2"}')
        with pytest.raises(ConfigError, match="another key now") as refused:
            apply(sink, 2, Changes((text,), [new]))
        assert "cdc rebuild" in refused.value.hint


def test_followers_that_start_first_on_one_database_at_once_all_do(
    postgres_store: PostgresStore,
) -> None:
    """The tables and the schema that they share do not exist, and two copies are of one."""
    url = url_of(postgres_store.database)
    names = ["copy", "copy", *(f"f{n}" for n in range(6))]
    sinks = [SqlSink(SqlSettings(url, name, "shared")) for name in names]
    together = Barrier(len(sinks))

    def start(sink: SqlSink) -> None:
        together.wait()
        sink.open()

    with ThreadPoolExecutor(len(sinks)) as pool:
        for done in [pool.submit(start, each) for each in sinks]:
            done.result()
    for each in sinks:
        each.close()
    frontiers = query(postgres_store, "SELECT count(*) FROM shared.lockstep_frontiers")
    assert frontiers == [{"count": len(set(names))}]


def test_a_dead_peer_is_noticed_by_the_server(postgres_store: PostgresStore) -> None:
    database = SqlDatabase(url_of(postgres_store.database))
    with database.transaction() as connection:
        shown = "SELECT current_setting('tcp_keepalives_idle'), inet_server_addr() IS NULL"
        seconds, is_local = connection.exec_driver_sql(shown).one()
    database.close()
    assert seconds == "10" or is_local
