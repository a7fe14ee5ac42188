"""Random values of every family of types, written to a real server, are read back the same."""

from __future__ import annotations

import json
import math
from datetime import date, datetime, time
from typing import Any

import psycopg
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from psycopg import sql

from cdc.config.value_options import Values
from tests.fixtures.decoded import Decoded
from tests.integration.test_values_types import come_back

_characters = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
_texts = st.text(_characters, max_size=10) | st.sampled_from(
    ["NULL", "null", "", "{}", '"', "\\", ",", ";", "{a,b}", "[0:1]={1,2}", "\n\t", "%b"]
)
_numerics = st.decimals(allow_nan=False, allow_infinity=False).map("{:f}".format) | st.sampled_from(
    ["NaN", "Infinity", "-Infinity", "0.000", "-0.10"]
)


def _float(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(value).replace("inf", "Infinity")


def _far(text: str) -> str:
    """Return the text in a year with five digits, or before Christ."""
    # Postgres' years start in 4713 BC, and leap years differ there.
    before = int(text[:4]) < 4700 and text[5:10] != "02-29" and int(text[3]) % 2
    return f"{text} BC" if before else f"1{text}"


_dates = st.dates(date(1, 1, 1)).map("{:%Y-%m-%d}".format).map(lambda text: text.rjust(10, "0"))
_odd = st.sampled_from(["infinity", "-infinity"])
_moments = st.datetimes(datetime(1, 1, 1)).map(lambda at: at.isoformat(" ").rjust(19, "0"))  # noqa: DTZ001 - Postgres' has none
_intervals = st.builds(  # whose seconds the oldest major can read
    "{} months {} days {}.{:06} seconds".format,
    st.integers(-(10**8), 10**8), st.integers(-(10**8), 10**8),
    st.integers(-(10**9), 10**9), st.integers(0, 999_999),
)  # fmt: skip


def _integers(bits: int) -> st.SearchStrategy[str]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).map(str)


TYPES: dict[str, st.SearchStrategy[str]] = {
    "bool": st.sampled_from("tf"),
    "int2": _integers(16),
    "int4": _integers(32),
    "int8": _integers(64) | _integers(55),
    "float4": st.floats(width=32).map(_float),
    "float8": st.floats().map(_float),
    "numeric": _numerics,
    "numeric(20,5)": st.decimals(-(10**14), 10**14, places=5).map(str),
    "money": st.integers(-(2**63), 2**63 - 1).map(lambda n: f"{n // 100}.{n % 100:02}" if n >= 0
                                                 else f"-{-n // 100}.{-n % 100:02}"),
    "text": _texts,
    "varchar(20)": _texts.map(lambda text: text[:20]),
    "char(6)": _texts.map(lambda text: text[:6]),
    "jsonb": st.recursive(
        st.none() | st.booleans() | st.integers() | _texts.filter(str.isprintable),
        lambda inner: st.lists(inner, max_size=2), max_leaves=4,
    ).map(json.dumps),
    "bytea": st.binary(max_size=12).map(lambda data: "\\x" + data.hex()),
    "date": _dates | _dates.map(_far) | _odd,
    "time": st.times().map(time.isoformat) | st.just("24:00:00"),
    "time(3)": st.times().map(time.isoformat),
    "timetz": st.builds(
        lambda at, hours: f"{at.isoformat()}{hours:+03}", st.times(), st.integers(-15, 15)
    ),
    "timestamp": _moments | _moments.map(_far) | _odd,
    "timestamp(3)": _moments | _odd,
    "timestamptz": _moments.map("{}+00".format) | _odd,
    "interval": _intervals,
    "bit(4)": st.text("01", min_size=4, max_size=4),
    "varbit": st.text("01", max_size=9),
    "uuid": st.uuids().map(str),
    "inet": st.ip_addresses().map(str),
    "numrange": st.tuples(st.integers(), st.integers()).map(lambda p: f"[{min(p)},{max(p)}.5)"),
}  # fmt: skip
RANDOM_OPTIONS = st.builds(
    Values,
    decimal_handling_mode=st.sampled_from(["string", "precise", "double"]),
    time_precision_mode=st.sampled_from(
        ["adaptive", "adaptive_time_microseconds", "connect", "isostring", "microseconds",
         "nanoseconds"]
    ),
    binary_handling_mode=st.sampled_from(["bytes", "base64-url-safe", "hex"]),
    interval_handling_mode=st.sampled_from(["postgres", "string"]),
    bigint_handling_mode=st.sampled_from(["number", "string"]),
    invalid_text_handling_mode=st.sampled_from(["fail", "base64"]),
)  # fmt: skip


@st.composite
def arrays(draw: st.DrawFn, values: st.SearchStrategy[str]) -> Any:  # noqa: ANN401 - nested lists
    """Draw a list of values and NULLs, or lists of it of one length."""
    each = values | st.none()
    if draw(st.booleans()):
        return draw(st.lists(each, max_size=4))
    width = draw(st.integers(1, 2))
    return draw(st.lists(st.lists(each, min_size=width, max_size=width), min_size=1, max_size=2))


def array_of(value: Any) -> sql.Composable:  # noqa: ANN401 - nested lists
    if isinstance(value, list):
        return sql.SQL("ARRAY[{}]").format(sql.SQL(", ").join(map(array_of, value)))
    return sql.Literal(value)


RANDOM_ROW = st.fixed_dictionaries(
    {name: st.tuples(values | st.none(), arrays(values)) for name, values in TYPES.items()}
)


def fill(connection: psycopg.Connection, rows: list[dict[str, tuple[str | None, Any]]]) -> None:
    """Recreate public.t, with a column and an array of each type, from these rows."""
    types = [sql.SQL(name) for name in TYPES]
    columns = [
        sql.SQL("v{0} {1}, a{0} {1}[]").format(sql.SQL(str(i)), type_)
        for i, type_ in enumerate(types)
    ]
    connection.execute("DROP TABLE IF EXISTS public.t")
    connection.execute(
        sql.SQL("CREATE TABLE public.t (id serial PRIMARY KEY, {})").format(
            sql.SQL(", ").join(columns)
        )
    )
    for row in rows:
        values = [
            sql.SQL("{}::{}, {}::{}[]").format(sql.Literal(value), type_, array_of(array), type_)
            for type_, (value, array) in zip(types, [row[name] for name in TYPES], strict=True)
        ]
        connection.execute(
            sql.SQL("INSERT INTO public.t VALUES (DEFAULT, {})").format(sql.SQL(", ").join(values))
        )


@settings(
    max_examples=25,
    # No shrinking: a failing example is small enough.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    deadline=None,
)
@given(rows=st.lists(RANDOM_ROW, min_size=3, max_size=6), options=RANDOM_OPTIONS)
def test_random_values_come_back(
    decoded: Decoded, rows: list[dict[str, tuple[str | None, Any]]], options: Values
) -> None:
    decoded.events()  # what a failed example left unread
    fill(decoded.sql, rows)
    [events] = decoded.events(options)
    come_back(decoded, "public.t", events, options)
