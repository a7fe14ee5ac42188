"""A view without an answer at a frontier waits for the next one with an answer, and says why."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import msgspec
import psycopg
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc.config.views import View
from cdc.errors import NoAnswerError, UnavailableError
from cdc.events import LSN
from lockstep.conformance.memory import STORES, MemorySink
from lockstep.jobs.views import states
from lockstep.jobs.views.plans import plan
from lockstep.jobs.views.value_errors import no_answer
from lockstep.sinks.contract import Changes, Column, Version
from tests.fixtures.servers import Database
from tests.fixtures.viewed import Shop, same

_TABLES = {
    "vals": "id int PRIMARY KEY, g int, a int, big numeric(38,0), m numeric(12,4), n numeric(12,1),"
    " t text"
}
_TEXT = "UPDATE vals SET t = "
_ROW = "INSERT INTO vals VALUES (1, 1, 5, 10, 1.5, 2.5), (2, 1, 6, 20, 2.5, 3.5)"
_LARGE = "9" * 38
_FIXED = "UPDATE vals SET big = 12 WHERE g = 1"
_IN_POSTGRES = "view v has no answer, in Postgres neither: "
_SUM = "SELECT g AS id, sum(big) AS b FROM vals GROUP BY g"


_CASES = (
    "sum", "product", "integer", "smallint", "bigint", "cast", "numeric", "date", "year",
    "text-int", "text-large", "text-numeric", "text-empty", "text-bool",
    "text-float", "text-small",
    "text-date", "text-year", "text-form", "text-nan",
    "zero", "remainder", "quotient", "root", "jsonb-key", "json-key", "inexact", "several", "null",
    "subquery",
)  # fmt: skip


@pytest.mark.parametrize(
    ("sql", "change", "says", "fix"),
    [
        (_SUM, f"UPDATE vals SET big = {_LARGE}", "more than 38 digits", _FIXED),
        (
            "SELECT id, big * a AS b FROM vals",
            f"UPDATE vals SET big = {_LARGE} WHERE id = 1",
            "more than 38 digits",
            _FIXED,
        ),
        (
            "SELECT id, a + 1 AS b FROM vals",
            "UPDATE vals SET a = 2147483647 WHERE id = 2",
            _IN_POSTGRES,
            "UPDATE vals SET a = 3 WHERE id = 2",
        ),
        (
            "SELECT id, a::smallint + 1::smallint AS b FROM vals",
            "UPDATE vals SET a = 32767 WHERE id = 2",
            _IN_POSTGRES,
            "DELETE FROM vals WHERE id = 2",
        ),
        (
            "SELECT g AS id, sum(a) * 100000000 * 1000000000 AS b FROM vals GROUP BY g",
            "UPDATE vals SET a = 2147483647 WHERE id = 2",
            _IN_POSTGRES,
            "UPDATE vals SET a = -6 WHERE id = 2",
        ),
        (
            "SELECT id, big::int AS b FROM vals",
            f"UPDATE vals SET big = {_LARGE} WHERE id = 1",
            _IN_POSTGRES,
            _FIXED,
        ),
        (
            "SELECT id, big::numeric(9,2) AS b FROM vals",
            f"UPDATE vals SET big = {_LARGE} WHERE id = 1",
            _IN_POSTGRES,
            _FIXED,
        ),
        (
            "SELECT id, make_date(2026, a, 1) AS b FROM vals",
            "UPDATE vals SET a = 13 WHERE id = 2",
            _IN_POSTGRES,
            "UPDATE vals SET a = 12 WHERE id = 2",
        ),
        (
            "SELECT id, make_date(a, 1, 1) AS b FROM vals",
            "UPDATE vals SET a = 0 WHERE id = 2",
            _IN_POSTGRES,
            "UPDATE vals SET a = 1 WHERE id = 2",
        ),
        *(
            (f"SELECT id, t::{kind} AS b FROM vals", _TEXT + f"'{text}'", _IN_POSTGRES, _TEXT + fix)
            for kind, text, fix in (
                ("int", "12a", "' 12 '"),
                ("smallint", "40000", "'-4'"),
                ("numeric(5,2)", "1e4", "'.5e1'"),
                ("numeric(5,2)", "", "'5.'"),
                ("boolean", "o", "'Of'"),
                ("float8", "1e309", "'-1e308'"),
                ("float8", "0.01e-330", "'0e5'"),
                ("date", "2026-02-29", "'2028-2-29'"),
                ("timestamp", "0000-01-01 10:00", "'2026-01-01 10:00'"),
            )
        ),
        *(
            (f"SELECT id, t::{kind} AS b FROM vals", f"{_TEXT}'{text}'", "not read", _TEXT + fix)
            for kind, text, fix in (
                ("date", "Jan 2 2026", "'2026-01-02'"),
                ("numeric(5,2)", "NaN", "NULL"),
            )
        ),
        (
            "SELECT id, 7 / a AS b FROM vals",
            "UPDATE vals SET a = 0 WHERE id = 2",
            _IN_POSTGRES,
            "UPDATE vals SET a = 4 WHERE id = 2",
        ),
        (
            "SELECT id, 7 % a AS b FROM vals",
            "UPDATE vals SET a = 0 WHERE id = 2",
            _IN_POSTGRES,
            "UPDATE vals SET a = 4 WHERE id = 2",
        ),
        (
            "SELECT id, m / n AS b FROM vals",
            "UPDATE vals SET m = 0.0001, n = 99999999999.9 WHERE id = 1",
            "a standard deviation, of more digits than a store has",
            "UPDATE vals SET n = 2 WHERE id = 1",
        ),
        (
            "SELECT g AS id, stddev(m * 0.001) AS b FROM vals GROUP BY g",
            "UPDATE vals SET m = 1.5 + id * 0.0001",
            "a standard deviation, of more digits than a store has",
            "UPDATE vals SET m = id",
        ),
        (
            "SELECT g AS id, jsonb_object_agg(a::text, n ORDER BY id) AS b FROM vals GROUP BY g",
            "UPDATE vals SET a = NULL WHERE id = 2",
            _IN_POSTGRES,
            "UPDATE vals SET a = 5 WHERE id = 2",
        ),
        (
            "SELECT g AS id, json_object_agg(a, t ORDER BY id) AS b FROM vals GROUP BY g",
            "UPDATE vals SET a = NULL WHERE id = 2",
            _IN_POSTGRES,
            "UPDATE vals SET a = 5 WHERE id = 2",
        ),
        (
            "SELECT id, m + 1 AS b FROM vals",
            "UPDATE vals SET m = 'NaN' WHERE id = 1",
            "public.vals.m, which has a value that is only text in its mirror",
            "UPDATE vals SET m = 7 WHERE id = 1",
        ),
        (
            "SELECT g AS id, a FROM vals",
            "INSERT INTO vals VALUES (3, 9), (4, 9)",
            "several rows",
            "DELETE FROM vals WHERE id = 4",
        ),
        (
            "SELECT nullif(a, 0) AS id, n FROM vals",
            "INSERT INTO vals VALUES (3, 1, 0)",
            "without id",
            "UPDATE vals SET a = 8 WHERE id = 3",
        ),
        (
            "SELECT id, (SELECT o.a FROM vals o WHERE o.n > 3) AS b FROM vals",
            "UPDATE vals SET n = 9",
            _IN_POSTGRES,
            "UPDATE vals SET n = 9 WHERE id = 1; UPDATE vals SET n = 1 WHERE id = 2",
        ),
    ],
    ids=_CASES,
)  # fmt: skip
@pytest.mark.long(
    "small tables are read in one of two ways",
    sample=[*(f"rows-{case}" for case in _CASES), "files-sum", "files-text-int", "files-several"],
)
@pytest.mark.parametrize("reads", ["rows", "files"])
def test_a_view_without_an_answer_stays_as_it_is_until_the_row_is_corrected(  # noqa: PLR0917 - a case each
    database: Database,
    tmp_path: Path,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    sql: str,
    change: str,
    says: str,
    fix: str,
    reads: str,
) -> None:
    """The store keeps what it has, the error has no value of a row, and a later cut continues."""
    if reads == "files":
        monkeypatch.setattr(states, "SMALL_ROWS", 0)
    shop = Shop(database, tmp_path / "lake", {"v": View(sql=sql, key=("id",))}, None, _TABLES)
    name, restarted = str(tmp_path), reads == "files"
    rows = _ROW if "g AS id, a" not in sql else _ROW.replace("(2, 1,", "(2, 2,")
    database.execute(rows)
    shop.cut()
    shop.follow(spark, lambda: MemorySink(name))
    before = dict(STORES[name].rows("views.v"))
    assert before
    database.execute(change)
    shop.cut()
    with pytest.raises(NoAnswerError, match=says) as raised:
        shop.follow(spark, lambda: MemorySink(name), restarted=restarted)
    assert f"at {LSN(shop.seq)}, after changes of public.vals since" in raised.value.what
    assert _LARGE not in str(raised.value)
    if says == _IN_POSTGRES:
        with pytest.raises(psycopg.Error) as of_postgres:
            shop.select(sql)
        # Without the value that some of them have.
        text = of_postgres.value.diag.message_primary or ""
        message = re.sub(r'(: )?"[^"]*" ?|: \d+-\d\d-\d\d$', "", text)
        assert message in raised.value.what
    else:
        assert shop.select(sql)
    assert STORES[name].rows("views.v") == before
    if not restarted:  # the same rows have no other answer
        shop.idle()
        with pytest.raises(NoAnswerError) as again:
            shop.follow(spark, lambda: MemorySink(name), restarted=False)
        assert again.value is raised.value
    database.execute(fix)
    shop.cut()
    shop.follow(spark, lambda: MemorySink(name), restarted=restarted)
    assert shop.differences("v", list(STORES[name].rows("views.v").values())) == ""


@pytest.mark.parametrize("restarted", [False, True], ids=["same-job", "next-job"])
def test_what_a_cut_without_an_answer_has_written_is_replaced(
    database: Database, tmp_path: Path, spark: SparkSession, *, restarted: bool
) -> None:
    """Rows of one view were written when another had no answer; some have no row any more."""
    views = {
        "a": View(sql="SELECT id, m FROM vals", key=("id",)),
        "v": View(sql="SELECT id, 7 / a AS b FROM vals", key=("id",)),
    }
    shop, name = Shop(database, tmp_path / "lake", views, None, _TABLES), str(tmp_path)
    database.execute(_ROW, "UPDATE vals SET a = 0 WHERE id = 2")
    shop.cut()
    for _ in range(2):
        with pytest.raises(NoAnswerError, match="view v has no answer"):
            shop.follow(spark, lambda: MemorySink(name), restarted=restarted)
    assert len(STORES[name].rows("views.a")) == 2
    database.execute("DELETE FROM vals WHERE id = 2")
    shop.cut()
    if restarted:  # it finds an interrupted cut, which it has to repeat
        with pytest.raises(NoAnswerError, match="view v has no answer"):
            shop.follow(spark, lambda: MemorySink(name))
    shop.follow(spark, lambda: MemorySink(name), restarted=False)
    for view in views:
        stored = list(STORES[name].rows(f"views.{view}").values())
        assert len(stored) == 1
        assert shop.differences(view, stored) == ""


class Away(MemorySink):
    """A store that fails at the first write of a cut that it has recorded."""

    def write(self, changes: Changes) -> int:
        raise UnavailableError(f"the store is away: {changes.version.name}", hint="")


@pytest.mark.parametrize("restarted", [False, True], ids=["same-job", "next-job"])
@pytest.mark.parametrize("is_first", [False, True], ids=["later-cut", "first-cut"])
def test_a_replacing_cut_that_is_interrupted_is_repeated_as_one(
    database: Database, tmp_path: Path, spark: SparkSession, *, is_first: bool, restarted: bool
) -> None:
    """Not as the difference: rows of the cut before it are at neither end of that."""
    quotients = View(sql="SELECT id, 7 / a AS b FROM vals", key=("id",))
    views = {"a": View(sql="SELECT id, m FROM vals", key=("id",)), "v": quotients}
    shop, name = Shop(database, tmp_path / "lake", views, None, _TABLES), str(tmp_path)
    database.execute(_ROW)
    if not is_first:
        was = views | {"v": msgspec.structs.replace(quotients, sql="SELECT id, a AS b FROM vals")}
        now = shop.config
        shop.config = msgspec.structs.replace(now, views=was)
        shop.cut()
        shop.follow(spark, lambda: MemorySink(name))
        shop.config = now
    database.execute("INSERT INTO vals VALUES (3, 1, 0)")
    shop.cut()
    with pytest.raises(NoAnswerError, match="view v has no answer"):
        shop.follow(spark, lambda: MemorySink(name))
    assert len(STORES[name].rows("views.a")) == 3
    database.execute("DELETE FROM vals WHERE id = 3")
    shop.cut()
    with pytest.raises(UnavailableError):
        shop.follow(spark, lambda: Away(name), restarted=False)
    shop.follow(spark, lambda: MemorySink(name), restarted=restarted)
    for view in views:
        stored = list(STORES[name].rows(f"views.{view}").values())
        assert shop.differences(view, stored) == ""


_FLOATS = ("1e308", "-1e308", "1e-200", "-3e-320", "0", "1.5", "Infinity", "NaN", None)
_SMALL_FLOATS = ("3e38", "-3e38", "1e-30", "-1e-44", "0", "1.1", "-Infinity", "NaN", None)


@pytest.mark.slow
def test_floats_out_of_range_are_errors_and_others_are_postgres_own(
    database: Database, spark: SparkSession
) -> None:
    """Each pair of them, of 4 and of 8 bytes; Postgres says for which there is no answer."""
    database.execute(
        "CREATE TABLE floats (id int PRIMARY KEY, f float8, g float8, r float4, s float4)"
    )
    values = list(product(zip(_FLOATS, _SMALL_FLOATS, strict=True), repeat=2))
    rows = [(at, f, g, r, s) for at, ((f, r), (g, s)) in enumerate(values)]
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.executemany("INSERT INTO floats VALUES (%s, %s, %s, %s, %s)", rows)
    kinds = {"id": "int4", "f": "float8", "g": "float8", "r": "float4", "s": "float4"}
    columns = tuple(Column(name, kind, 0, -1, nullable=True) for name, kind in kinds.items())
    tables = {"public.floats": Version(1, "public", "floats", "x", ("id",), columns, {})}
    made = [(at, *(None if each is None else float(each) for each in row)) for at, *row in rows]
    spark.createDataFrame(
        made, "id int, f double, g double, r float, s float"
    ).createOrReplaceTempView("`new public.floats`")
    wrong = list[tuple[object, ...]]()
    for sign, (one, other) in product("+-*/", [("f", "g"), ("r", "s"), ("f", "s")]):
        of = f"{one} {sign} {other}"
        answers, errors = dict[int, float | None](), dict[int, str]()
        with database.connect() as connection:
            for at in range(len(rows)):
                query = f"SELECT ({of})::float8 FROM floats WHERE id = {at}"
                try:
                    ((answers[at],),) = connection.execute(query).fetchall()
                except psycopg.Error as error:
                    errors[at] = error.diag.message_primary or ""
                    connection.rollback()
        where = f" WHERE id NOT IN ({', '.join(map(str, errors))})" if errors else ""
        view = View(sql=f"SELECT id, {of} AS x FROM floats{where}", key=("id",))
        collected = spark.sql(plan("v", {"v": view}, tables).new).collect()
        found = {row["id"]: row["x"] for row in collected}
        wrong += [
            (of, rows[at], answer, found[at])
            for at, answer in answers.items()
            if not same(answer, found[at])
        ]
        for text in set(errors.values()):
            at = next(each for each, of_it in errors.items() if of_it == text)
            view = View(sql=f"SELECT id, {of} AS x FROM floats WHERE id = {at}", key=("id",))
            with pytest.raises(PySparkException) as raised:
                spark.sql(plan("v", {"v": view}, tables).new).collect()
            found_text = no_answer("v", str(raised.value))
            if found_text is None or text not in found_text.what:
                wrong.append((of, rows[at], text, found_text))
    assert wrong == []
