"""A store's rows of a view are given to Postgres as it reads them, to be compared with its own."""

from __future__ import annotations

from typing import Any

import msgspec

from cdc.config import Config, Log, Source
from cdc.config.views import View
from lockstep.jobs.views import types
from lockstep.jobs.views.plans import plan
from lockstep.jobs.views.verifying import StoredView
from lockstep.sinks.contract import Version

_COLUMNS = tuple(
    kind.column(name)
    for name, kind in {"id": types.INT4, "d": types.DATE, "at": types.PgType("timestamp")}.items()
)
_TABLES = {"public.items": Version(1, "public", "items", "x.public.items", ("id",), _COLUMNS, {})}
_CONFIG = Config(
    pipeline="x",
    source=Source(dsn="postgresql://nobody"),
    log=Log(bootstrap_servers="localhost:1", prefix="x"),
)


def test_dates_and_times_have_postgres_texts_in_arrays_too() -> None:
    sql = (
        "SELECT d, array_agg(d ORDER BY id) AS days, array_agg(at ORDER BY id) AS times,"
        " array_agg(id ORDER BY id) AS ids FROM items GROUP BY d"
    )
    found = plan("v", {"v": View(sql=sql, key=("d",))}, _TABLES)
    row: dict[str, Any] = {"d": 1, "days": [1, None], "times": [1_500_000], "ids": [7, 8]}
    (text,) = StoredView(_CONFIG, found, None).as_text([msgspec.json.encode(row)])
    assert msgspec.json.decode(text) == [
        {
            "d": "1970-01-02",
            "days": ["1970-01-02", None],
            "times": ["1970-01-01 00:00:01.500000"],
            "ids": [7, 8],
        }
    ]
