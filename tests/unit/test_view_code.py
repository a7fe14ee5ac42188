"""What a decorated function may return, how executors call it, and how it is planned."""

from __future__ import annotations

import hashlib
import pickle
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pytest

import lockstep
from cdc.config.views import PythonView, View
from lockstep.jobs.views.code import Task, compute, loaded, reported
from lockstep.jobs.views.plans import ADDED, plan
from lockstep.jobs.views.refusing import UnsupportedError
from lockstep.sinks.contract import Column
from tests.unit.test_view_plans import TABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COLUMNS = {
    "id": "int4", "big": "int8", "f": "float8", "m": "numeric(5,2)", "t": "text", "d": "date",
    "at": "timestamp", "z": "timestamptz", "ok": "bool", "s": "int2",
}  # fmt: skip
ROW = {
    "id": 1, "big": 2, "f": 0.5, "m": Decimal("1.5"), "t": "x", "d": date(2026, 1, 1),
    "at": datetime(2026, 1, 1, 12),  # noqa: DTZ001 - without a time zone
    "z": datetime(2026, 1, 1, 12, tzinfo=UTC), "ok": True, "s": 3,
}  # fmt: skip


def _returning(rows: Any) -> Callable[..., pa.Table]:  # noqa: ANN401 - of the cases
    @lockstep.view(reads={"given": "t"}, key=["id"], columns=COLUMNS)
    def some(given: pa.Table) -> Any:  # noqa: ANN401 - as above
        del given
        return rows

    return some


def test_rows_and_arrow_tables_become_the_declared_types() -> None:
    nothing, odd = dict.fromkeys(COLUMNS) | {"id": 2}, ROW | {"id": 3, "m": 7, "f": 1}
    found = _returning([ROW, nothing, odd])([])
    assert found.to_pylist() == [ROW, nothing, odd]
    assert [str(each) for each in found.schema.types] == [
        "int32", "int64", "double", "decimal128(5, 2)", "string", "date32[day]", "timestamp[us]",
        "timestamp[us, tz=UTC]", "bool", "int16",
    ]  # fmt: skip
    wider = pa.table(
        {name: pa.array([ROW[name]]) for name in reversed(COLUMNS)} | {"m": pa.array([7])}
    )
    again = _returning(wider)(given=[])
    assert again.schema == found.schema
    assert again.to_pylist() == [ROW | {"m": Decimal(7)}]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"id": 1}], "a row with the columns id"),
        ([ROW | {"more": 1}], "a row with the columns id, big"),
        (pa.table({"id": [1]}), "the columns id"),
        ([ROW | {"id": "1"}], "text as id, which is a whole number"),
        ([ROW | {"id": "1"}, ROW], "a value as id that is no int32"),
        ([ROW | {"id": True}], "true or false as id, which is a whole number"),
        ([ROW | {"m": 1.5}], "a value as m that is no decimal128(5, 2)"),
        ([ROW | {"at": ROW["z"]}], "a timestamp with time zone as at, which is a timestamp"),
        ([ROW | {"id": 1 << 31}], "a value as id that is no int32"),
        ([ROW | {"big": 1.5}], "floating point as big, which is a whole number"),
        ([ROW | {"m": Decimal("1.555")}], "a value as m that is no decimal128(5, 2)"),
        ([ROW | {"m": 1000}], "a value as m that is no decimal128(5, 2)"),
        ([ROW | {"t": 1}], "a whole number as t, which is text"),
        ([ROW | {"id": None}], "a row without id"),
        ([ROW, ROW], "several rows with one id"),
    ],
)
def test_what_is_not_as_declared_is_refused_without_its_values(rows: Any, says: str) -> None:  # noqa: ANN401 - of the cases
    with pytest.raises(lockstep.ConfigError) as caught:
        _returning(rows)([])
    assert caught.value.what.startswith("view some: its code returned ")
    assert says in caught.value.what
    assert "1.555" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("id", ["1"], "returned text as id, which is a whole number"),
        ("big", [1.0], "returned a number of floating point as big, which is a whole number"),
        ("at", [datetime(2026, 1, 1, tzinfo=UTC)], "returned a timestamp with time zone as at"),
        ("t", [[1]], "returned list<item: int64> as t, which is text"),
        ("id", [1 << 40], "returned a value as id that is no int32"),
    ],
)
def test_columns_of_another_kind_are_refused(name: str, values: list[Any], says: str) -> None:
    table = pa.table({each: pa.array([ROW[each]]) for each in COLUMNS} | {name: pa.array(values)})
    with pytest.raises(lockstep.ConfigError) as caught:
        _returning(table)([])
    assert says in caught.value.what


def test_only_types_that_every_store_has_can_be_declared() -> None:
    for kind in ("jsonb", "numeric", "numeric(39,2)", "int", "text[]"):
        with pytest.raises(lockstep.ConfigError, match="there is no type"):
            lockstep.transform(reads="t", key=["a"], columns={"a": kind})(list)


# --- in executors ---

SUMS = """\
import lockstep
@lockstep.view(reads={"a": "t", "b": "u"}, by=["k"], key=["k"], columns={"k": "int4", "n": "int8"})
def sums(a, b):
    rows = [*a.to_pylist(), *b.to_pylist()]
    return [{"k": k, "n": sum(r["v"] for r in rows if r["k"] == k)} for k in {r["k"] for r in rows}]
"""
ROWS = [{"k": n % 40, "v": n} for n in range(100)]


def _batches(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
    kind = pa.struct({"k": pa.int32(), "v": pa.int64()})
    rows = [(each, None) for each in a] + [(None, each) for each in b]
    columns = [pa.array([row[at] for row in rows], kind) for at in (0, 1)]
    yield from pa.table(columns, names=["0", "1"]).to_batches(max_chunksize=7)


def _computed(source: str, by: tuple[str, ...] = ("k",)) -> list[dict[str, Any]]:
    task = Task("sums", source, ("a", "b"), by, is_transform=False)
    batches = _batches(ROWS[:60], ROWS[60:])
    return [
        row
        for each in compute(pickle.loads(pickle.dumps(task)), batches)  # noqa: S301 - our own
        for row in each.to_pylist()
    ]


def _failure(source: str, by: tuple[str, ...] = ("k",)) -> lockstep.ConfigError:
    with pytest.raises(RuntimeError) as caught:
        _computed(source, by)
    found = reported(RuntimeError(f"Traceback: {caught.value}\n  more"))
    assert found is not None
    assert caught.value.__suppress_context__
    return found


def test_a_view_gets_all_rows_of_its_inputs() -> None:
    wanted = {k: sum(row["v"] for row in ROWS if row["k"] == k) for k in range(40)}
    assert {row["k"]: row["n"] for row in _computed(SUMS)} == wanted
    assert {row["k"]: row["n"] for row in _computed(SUMS, ())} == wanted


def test_a_transform_is_called_with_each_batch() -> None:
    source = (
        "import lockstep\n"
        '@lockstep.transform(reads="t", key=["k", "n"], columns={"k": "int4", "n": "int8"})\n'
        "def sums(rows):\n"
        '    return [{"k": r["k"], "n": n} for r in rows.to_pylist() for n in range(r["v"] % 3)]\n'
    )
    task = Task("sums", source, ("rows",), ("k", "v"), is_transform=True)
    batches = pa.Table.from_pylist(ROWS[:30], pa.schema({"k": pa.int32(), "v": pa.int64()}))
    with pytest.raises(RuntimeError):  # a column of `by` is not returned
        list(compute(task, iter(batches.to_batches(max_chunksize=4))))
    found = list(compute(task._replace(by=("k",)), iter(batches.to_batches(max_chunksize=4))))
    assert sum(each.num_rows for each in found) == sum(row["v"] % 3 for row in ROWS[:30])


def test_an_exception_is_reported_with_its_line_and_the_rows_and_no_value() -> None:
    body = "    if 77 in [row['v'] for row in b.to_pylist()]:\n        raise ValueError('secret')\n"
    found = _failure(SUMS.replace("    rows =", f"{body}    rows ="))
    digest = hashlib.md5(b"37", usedforsecurity=False).hexdigest()
    assert found.what == (
        "view sums: its code raised ValueError in sums.py, line 5, for the rows whose `by` has the"
        f" MD5 {digest}"
    )
    assert found.exit_code == 78
    without = _failure(SUMS.replace("    rows =", "    exit(0)\n    rows ="), ())
    assert without.what == "view sums: its code raised SystemExit in sums.py, line 4"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("sum(r", "id(rows) % 10**9 + sum(r", "some of the same rows"),
        ("sum(r", "len(rows) + sum(r", "some of the same rows"),
        ('{"k": k,', '{"k": k + 1000,', "a row with a k that no row has"),
        ('"k": k, "n": sum', '"k": 1, "n": sum', "several rows with one k"),
        ("if r", 'if r["v"] > 10 and r', None),
    ],
)
def test_a_function_that_depends_on_more_than_its_rows_is_refused(
    old: str, new: str, says: str | None
) -> None:
    assert old in SUMS
    if says is None:
        assert _computed(SUMS.replace(old, new))
        return
    assert says in _failure(SUMS.replace(old, new)).what


def test_an_order_that_shows_is_refused_where_all_rows_are_read() -> None:
    first = SUMS.replace("sum(r", "rows[0]['v'] + sum(r")
    assert "the same rows in another order" in _failure(first, ()).what


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import nowhere_to_be_found", "ModuleNotFoundError in v.py, line 1 (no module nowhere"),
        ("x = 1\n1 / 0", "ZeroDivisionError in v.py, line 2"),
        ("v = 1", "v.py has no function of that name any more"),
    ],
)
def test_a_file_that_cannot_be_run_is_refused_with_its_line(source: str, says: str) -> None:
    with pytest.raises(lockstep.ConfigError) as caught:
        loaded("v", source)
    assert says in caught.value.what


# --- plans ---


def _code(reads: dict[str, str], by: str = "id", *, is_transform: bool = False) -> PythonView:
    return PythonView(
        sql="",
        key=("id", "n"),
        source="…",
        is_transform=is_transform,
        reads=reads,
        by=tuple(by.split()),
        columns={"id": "int4", "n": "int8"},
    )


def test_changed_rows_lead_to_by_through_the_inputs_own_joins() -> None:
    joined = "SELECT c.id, o.state FROM customers c JOIN orders o ON o.customer_id = c.id"
    views: dict[str, View] = {"v": _code({"a": joined, "b": "customers"})}
    found = plan("v", views, TABLES)
    assert (found.anchor, dict(found.full_for)) == (("id",), {})
    assert {each.table for each in found.affected} == {"public.customers", "public.orders"}
    assert len([each for each in found.affected if each.changed == ADDED]) == 3
    assert found.version.name == "views.v"


def test_a_transform_is_by_its_tables_key() -> None:
    views: dict[str, View] = {"v": _code({"rows": "customers"}, "", is_transform=True)}
    assert plan("v", views, TABLES).anchor == ("id",)
    views["v"] = _code({"rows": "public.customers"}, "", is_transform=True)
    assert plan("v", views, TABLES).anchor == ("id",)
    of_view = {"w": View(sql="SELECT id FROM orders", key=("id",))}
    views = {"v": _code({"rows": "w"}, "", is_transform=True), **of_view}
    assert plan("v", views, TABLES).anchor == ("id",)
    with pytest.raises(lockstep.ConfigError, match="is read by order_id, which is not in"):
        plan("v", {"v": _code({"rows": "lines"}, "", is_transform=True)}, TABLES)


def test_a_column_of_a_left_join_leads_to_no_rows() -> None:
    joined = "FROM customers c LEFT JOIN orders o ON o.customer_id = c.id"
    for sql, by in (
        (f"SELECT o.id {joined}", "id"),
        (f"SELECT c.id, o.id::bigint AS n {joined}", "id n"),
    ):
        found = plan("v", {"v": _code({"a": sql}, by)}, TABLES)
        assert set(found.full_for) == {"public.customers", "public.orders"}
        assert found.affected == ()


def test_without_by_and_over_views_in_python_all_rows_are_computed() -> None:
    all_rows = plan("v", {"v": _code({"a": "customers"}, "")}, TABLES)
    assert all_rows.full_for == {"public.customers": "its code reads all rows: it has no `by`"}
    views = {
        "v": _code({"a": "customers"}),
        "s": View(sql="SELECT v.id, v.n FROM v JOIN orders o ON o.id = v.n", key=("id", "n")),
        "c": _code({"a": "s"}),
    }
    over = plan("s", views, TABLES)
    assert over.full_for == {"public.customers": "the view v, which it reads, is in Python"}
    assert {each.table for each in over.affected} == {"public.orders"}
    assert [each.name for each in over.made] == ["v"]
    twice = plan("c", views, TABLES)
    assert ([each.name for each in twice.made], set(twice.full_for)) == (
        ["v"],
        {"public.customers"},
    )
    strict = msgspec.structs.replace(views["s"], refresh="strict")
    with pytest.raises(
        UnsupportedError, match=r"refresh: strict with changes of public\.customers"
    ):
        plan("s", views | {"s": strict}, TABLES)


def test_a_changed_file_and_a_changed_view_in_python_are_other_definitions() -> None:
    views = {"v": _code({"a": "customers"}), "s": View(sql="SELECT id, n FROM v", key=("id", "n"))}
    changed = views | {"v": msgspec.structs.replace(views["v"], source="… ")}
    for name in views:
        one, other = (plan(name, each, TABLES).definition for each in (views, changed))
        assert one.fingerprint != other.fingerprint
        assert plan(name, views, TABLES).definition == one


@pytest.mark.parametrize(
    ("reads", "says"),
    [
        ({"a": "nowhere"}, "there is no table public.nowhere"),
        ({"a": "v"}, "views v -> v are made of each other"),
        ({"a": "w"}, "views v -> w -> v are made of each other"),
        ({"a": "SELECT name FROM customers"}, "v: a has no column id of type int4"),
        ({"a": "SELECT name AS id FROM customers"}, "v: a has no column id of type int4"),
        ({"a": "SELECT lower(name) AS id FROM customers"}, "lower"),
    ],
)
def test_what_an_input_cannot_be_is_refused_by_name(reads: dict[str, str], says: str) -> None:
    views: dict[str, View] = {"v": _code(reads), "w": _code({"a": "v"})}
    with pytest.raises(lockstep.ConfigError) as caught:
        plan("v", views, TABLES)
    assert says in str(caught.value)


def test_masked_columns_are_read_as_their_masked_values() -> None:
    """Those whose values have no use are refused until a SELECT leaves them out."""
    customers = TABLES["public.customers"]
    masked = [
        Column(each.name, each.type, 0, -1, nullable=True, mask=mask)
        for each, mask in zip(customers.columns, (None, "hmac:0a1b2c3d", "null", None), strict=True)
    ]
    tables = {**TABLES, "public.customers": customers._replace(columns=tuple(masked))}
    with pytest.raises(UnsupportedError, match="whose values are masked"):
        plan("v", {"v": _code({"a": "customers"})}, tables)
    found = plan("v", {"v": _code({"a": "SELECT id, name FROM customers"})}, tables)
    assert found.code is not None
    assert "`name`" in found.code.inputs[0].new
    names = View(sql="SELECT id, name FROM customers", key=("id",))
    dates = View(sql="SELECT id, since FROM customers", key=("id",))
    assert [plan("v", {"v": each}, tables).is_of_mirrors for each in (names, dates)] == [
        True,
        False,
    ]
