"""Reading rows runs no function of a role that owns a type, whatever the role has made of it.

Each such function here fails where one of our sessions runs it, so a read that succeeds, or is
refused for its types, has run none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from cdc.config import Config, Log, Source, TableRule
from cdc.errors import CDCError, ConfigError
from cdc.operate.commands import snapshots
from cdc.source.chunks import Chunk, ChunkReader, ChunkRequest
from cdc.source.connection import connect
from cdc.source.described import describe_tables
from cdc.source.members import read_members
from tests.fixtures.servers import Database

_FAILS = """LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN
    IF current_setting('application_name') LIKE 'lockstep%%' THEN
        RAISE EXCEPTION 'it ran as %%', current_user;
    END IF;
    RETURN {result};
END $$"""
_TYPES = (
    "CREATE TYPE low.mood AS ENUM ('glad', 'sad', 'so so')",
    "CREATE TYPE low.other AS ENUM ('glad')",
    f"CREATE FUNCTION low.checked(text) RETURNS bool {_FAILS.format(result='true')}",
    "CREATE DOMAIN low.feeling AS low.mood CHECK (low.checked(VALUE::text))",
    "CREATE DOMAIN low.feelings AS low.feeling CHECK (low.checked('x'))",
    "CREATE DOMAIN low.word AS text CHECK (low.checked(VALUE))",
    "CREATE DOMAIN low.number AS int CHECK (low.checked('x'))",
    "CREATE TYPE low.pair AS (a int, b low.word)",
    "CREATE TYPE low.span AS RANGE (subtype = int4)",
    "CREATE TYPE low.spans AS RANGE (subtype = low.word)",
)
# Casts that would make an operator of pg_catalog take the type, and those that a type's owner may
# create from a type of the server.
_FROM = (
    "low.mood", "low.other", "low.pair", "low.span", "low.spans", "low.mood[]", "low.word[]",
    "low.feeling[]", "low.pair[]",
)  # fmt: skip
_TO = ("text", "bool", "int4", "numeric", "timestamptz")
_TABLE = """CREATE TABLE things (
    id int PRIMARY KEY, mood low.mood NOT NULL, also low.mood, other low.other,
    feeling low.feeling NOT NULL, feelings low.feelings NOT NULL, word low.word NOT NULL,
    number low.number NOT NULL, pair low.pair NOT NULL, span low.span NOT NULL,
    spans low.spans NOT NULL, moods low.mood[] NOT NULL, words low.word[] NOT NULL,
    feeling_list low.feeling[] NOT NULL, pairs low.pair[] NOT NULL,
    label text, day date, at timestamptz, amount numeric, yes bool, title citext NOT NULL,
    titles citext[] NOT NULL)"""
_ROW = """INSERT INTO things VALUES
    ({0}, 'sad', 'glad', 'glad', 'so so', 'glad', 'w', 7, '(1,x)', '[1,5)', '[a,b)', '{{glad}}',
     '{{x}}', '{{sad}}', '{{"(1,x)"}}', 'l', '2020-01-01', '2020-01-01', 1.5, true, 'Title',
     '{{Ti}}')"""
# What a condition may say of columns of users' types, and whether it holds for both rows.
_CONDITIONS = {
    "mood = 'sad'": True, "'sad' = mood": True, "mood <> 'sad'": False, "mood != 'sad'": False,
    "mood < 'so so'": True, "mood <= 'glad'": False, "mood > 'glad'": True, "mood >= 'sad'": True,
    "mood = also": False, "mood > also": True, "(mood) = ('sad')": True, "feeling = 'so so'": True,
    "mood <> feelings": True, "feeling > feelings": True, "mood IN ('sad', 'glad')": True,
    "mood NOT IN ('sad', also)": False, "mood BETWEEN 'glad' AND 'sad'": True,
    "mood NOT BETWEEN also AND 'glad'": True, "mood IS DISTINCT FROM 'glad'": True,
    "mood IS NOT DISTINCT FROM 'sad'": True, "other IS DISTINCT FROM NULL": True,
    "mood = NULL": False, "mood = NULL OR NOT mood = 'glad'": True, "mood IS NOT NULL": True,
    "pair IS NOT NULL AND span IS NOT NULL AND words IS NOT NULL": True, "pairs IS NULL": False,
    "word = 'w' AND number = 7": True, "word IN ('w', 'v') AND number BETWEEN 1 AND '8'": True,
    "word LIKE 'w%' AND word IS DISTINCT FROM 'v' AND - number < 0": True,
    "title = 'Title' AND title <> label": True, "titles = '{Ti}'": True, "title LIKE 'T%'": True,
    "id IN (1, '2') AND amount > '1' AND day = '2020-01-01' AND at <= now()": True,
    "label = 'l' AND yes AND amount = 1.5 AND at = day": True,
}  # fmt: skip
_REFUSED = (
    "mood", "NOT mood", "mood AND yes", "mood IS TRUE", "mood + 1 = 2", "- mood = 1",
    "mood = label", "label = mood", "label IN ('x', mood)", "mood = 'sad'::text", "mood = 1",
    "mood = TRUE", "mood = other", "mood LIKE 's%'", "feeling ILIKE 's%'", "label LIKE mood",
    "mood BETWEEN label AND 'x'", "id BETWEEN 1 AND mood", "mood IS DISTINCT FROM label",
    "amount IS DISTINCT FROM mood", "mood = (yes)", "pair = '(1,x)'", "pair = pair",
    "span = '[1,5)'", "spans < '[a,b)'", "moods = '{glad}'", "words = '{x}'", "words <> words",
    "feeling_list = '{sad}'", "pairs IN ('{}')", "pair IS NOT DISTINCT FROM NULL",
)  # fmt: skip
_READ = ("id", "mood", "feeling", "feelings", "word", "number", "title", "titles", "moods", "span")
_NOT_COMPARED = ("pair", "spans", "words", "feeling_list", "pairs")


@pytest.fixture
def things(database: Database) -> Iterator[Database]:
    """A published table with columns of another role's types, and that role's casts."""
    low = f"low_{database.name}"
    database.execute(
        f"CREATE ROLE {low}",
        f"CREATE SCHEMA low AUTHORIZATION {low}",
        "CREATE EXTENSION citext SCHEMA public",
    )
    try:
        with database.connect() as sql:
            sql.execute(f"SET ROLE {low}".encode())
            for statement in (*_TYPES, *hostile_casts()):
                sql.execute(statement.replace("%%", "%").encode())
        database.execute(
            _TABLE,
            _ROW.format(1),
            "CREATE PUBLICATION lockstep_functions FOR TABLE things",
        )
        yield database
    finally:
        database.execute(f"DROP OWNED BY {low} CASCADE", f"DROP ROLE {low}")


def hostile_casts() -> Iterator[str]:
    pairs = [(source, to) for source in _FROM for to in _TO]
    pairs += [(to, "low.mood") for to in (*_TO, "citext", "date")]
    for number, (source, to) in enumerate(pairs):
        made = f"low.cast_{number}"
        yield f"CREATE FUNCTION {made}({source}) RETURNS {to} {_FAILS.format(result='NULL')}"
        yield f"CREATE CAST ({source} AS {to}) WITH FUNCTION {made}({source}) AS IMPLICIT"


def config(database: Database, *key: str) -> Config:
    return Config(
        pipeline="functions",
        source=Source(dsn=database.dsn),
        log=Log(bootstrap_servers="localhost:1"),
        tables={"public.things": TableRule(key=key)} if key else {},
    )


def request(**more: Any) -> ChunkRequest:  # noqa: ANN401 - any of its fields
    nothing = ChunkRequest(0, None, None, None, None, (), rows=10, bytes=1 << 20)
    return nothing._replace(**more)


def read(database: Database, asked: ChunkRequest) -> Chunk:
    with closing(ChunkReader(config(database))) as reader:
        oid, _ = reader.find("public", "things")
        return reader.read(asked._replace(relation_id=oid))


def test_no_condition_runs_a_function_of_a_types_owner(things: Database) -> None:
    for where, holds in _CONDITIONS.items():
        assert bool(read(things, request(where=where)).rows) is holds, where
    for where in _REFUSED:
        with pytest.raises(ConfigError, match=r"has the type low\.") as raised:
            read(things, request(where=where))
        assert "IS NULL" in raised.value.what, where


def test_a_command_with_such_a_condition_is_refused_before_it_is_sent(things: Database) -> None:
    with closing(connect(config(things))) as connection:
        members = read_members(connection, "lockstep_functions")
        snapshots.expect_comparable(connection, members, "mood = 'sad' AND pair IS NULL")
        with pytest.raises(ConfigError, match=r"public\.things: the column pair has the type low"):
            snapshots.expect_comparable(connection, members, "id = 1 OR pair = '(1,x)'")


def test_what_a_condition_says_of_an_enum_is_what_postgres_says(things: Database) -> None:
    """Without casts, for every pair of labels and NULL."""
    things.execute(
        "CREATE TABLE plain (id int PRIMARY KEY, mood low.other, also low.other)",
        "ALTER TYPE low.other ADD VALUE 'sad'",
        "ALTER TYPE low.other ADD VALUE 'so so' BEFORE 'sad'",
        *(f"DROP CAST (low.other AS {to})" for to in _TO),
    )
    things.execute(
        "INSERT INTO plain SELECT row_number() OVER (), a, b FROM"
        " (SELECT unnest(enum_range(NULL::low.other)) UNION ALL SELECT NULL) x(a),"
        " (SELECT unnest(enum_range(NULL::low.other)) UNION ALL SELECT NULL) y(b)",
        "ALTER PUBLICATION lockstep_functions ADD TABLE plain",
    )
    with closing(ChunkReader(config(things))) as reader, things.connect() as sql:
        oid, _ = reader.find("public", "plain")
        for where in (
            *(f"mood {sign} also" for sign in ("=", "<>", "<", "<=", ">", ">=")),
            "mood IN ('sad', also)", "mood NOT IN ('sad', also)", "mood IN ('sad', NULL)",
            "mood IS DISTINCT FROM also", "mood IS NOT DISTINCT FROM also",
            "mood BETWEEN also AND 'sad'", "mood NOT BETWEEN also AND 'sad'",
            "NOT (mood = also OR mood > 'so so')", "also IS NULL", "mood IS NOT DISTINCT FROM NULL",
        ):  # fmt: skip
            query = f"SELECT count(*) FROM plain WHERE {where}"
            expected = sql.execute(query.encode()).fetchone()
            rows = reader.read(request(relation_id=oid, where=where, rows=100)).rows
            assert (len(rows),) == expected, where


@pytest.mark.parametrize("key", _READ)
def test_reading_by_a_key_runs_none(things: Database, key: str) -> None:
    """Where a cast makes an operator ambiguous, Postgres refuses it: nothing is read."""
    things.execute(f"CREATE UNIQUE INDEX ON things ({key})")
    with closing(ChunkReader(config(things, key))) as reader:
        oid, _ = reader.find("public", "things")
        position = (text_of(things, key),)
        for asked in (
            request(relation_id=oid, key=(key,)),
            request(relation_id=oid, key=(key,), after=position),
            request(relation_id=oid, key=(key,), keys=(position,)),
        ):
            assert "it ran as" not in outcome(reader, asked)
        # Where a cast made an operator ambiguous, Postgres refused it.
        things.execute(*(f"DROP CAST IF EXISTS ({one} AS {to})" for one in _FROM for to in _TO))
        chunk = reader.read(request(relation_id=oid, key=(key,)))
        assert chunk.to == (text_of(things, key),)
        assert len(chunk.rows) == 1
        again = reader.read(request(relation_id=oid, key=(key,), keys=(chunk.to,)))
        assert again.rows == chunk.rows
        assert not reader.read(request(relation_id=oid, key=(key,), after=chunk.to)).rows


def outcome(reader: ChunkReader, asked: ChunkRequest) -> str:
    try:
        return str(len(reader.read(asked).rows))
    except CDCError as error:
        return error.what


def text_of(database: Database, column: str) -> str:
    with database.connect() as sql:
        found = sql.execute(f"SELECT format('%s', {column}) FROM things".encode()).fetchone()
    assert found is not None
    return str(found[0])


@pytest.mark.parametrize("key", _NOT_COMPARED)
def test_a_key_whose_comparison_may_run_one_is_refused(things: Database, key: str) -> None:
    things.execute(f"CREATE UNIQUE INDEX ON things ({key})")
    with closing(ChunkReader(config(things, key))) as reader:
        oid, _ = reader.find("public", "things")
        with pytest.raises(ConfigError, match=f"key's column {key} .* has the type low") as raised:
            reader.read(request(relation_id=oid, key=(key,)))
    assert "tables" in raised.value.hint


def test_a_snapshots_columns_run_none_though_a_type_is_renamed(things: Database) -> None:
    """Between plan and reading a name may pass to another type, with a cast to it."""
    with closing(connect(config(things))) as connection:
        (table,) = describe_tables(connection, "lockstep_functions")
        before = _rows(connection, table.outputs)
        with things.connect() as sql:
            for statement in renamed():
                sql.execute(statement.replace("%%", "%").encode())
        assert _rows(connection, table.outputs) == before


def renamed() -> Iterator[str]:
    """Put another type in the place of each, with a function in the way."""
    fails = _FAILS.format(result="NULL")
    for name in ("mood", "pair", "span"):
        yield f"ALTER TYPE low.{name} RENAME TO {name}_before"
        yield f"CREATE TYPE low.{name} AS ENUM ('x')"
        yield f"CREATE FUNCTION low.swap(low.{name}_before) RETURNS low.{name} {fails}"
        yield (
            f"CREATE CAST (low.{name}_before AS low.{name})"
            f" WITH FUNCTION low.swap(low.{name}_before)"
        )


def _rows(connection: psycopg.Connection[Any], outputs: tuple[str, ...]) -> list[Any]:
    query = f"SELECT {', '.join(outputs)} FROM public.things"
    return connection.execute(query.encode()).fetchall()
