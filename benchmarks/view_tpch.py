"""view-tpch: the 22 queries of TPC-H as views, kept by one follower under the refresh functions.

The tables are TPC-H's own (`tpchgen-cli`), at scale 0.1; `--rows` is the number of orders at which
they are cut off. A refresh inserts (RF1) or deletes (RF2) a thousandth of the orders with their
lines, in one transaction. The figure, `of_full`, is the CPU time of these cuts of all views by
that of computing each view completely over the same mirrors. After each refresh every view must
have exactly the rows that Postgres answers.

`refused` counts TPC-H's own queries that are no views in this database. Where the text that
`cdc view check` suggests is one, it is measured instead, and named in `rewritten`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from benchmarks import result, servers, slots
from benchmarks.follow_server import RUN
from benchmarks.latency import POSTGRES
from benchmarks.progress import say
from benchmarks.view_run import ViewRun
from cdc.errors import ConfigError
from lockstep.jobs.views.plans import plan
from tests.fixtures import tpch_list

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.family import Family
    from benchmarks.options import Options
    from benchmarks.view_run import Cut
    from cdc.config.views import View
    from lockstep.sinks.contract import Version

NAME: Final = "view-tpch"
LIMIT: Final = 0.6
_SCALE: Final = "0.1"
_REFRESHES: Final = 2
_SHARE: Final = 1_000  # a refresh is one order of so many
_SPARSE: Final = 4  # a quarter of the numbers are keys of orders
_FIRST_DELETED: Final = 100
_BY_ORDER: Final = {"orders": "o_orderkey", "lineitem": "l_orderkey"}


class _Files:
    """TPC-H's tables, and which of their orders are there when."""

    def __init__(self, folder: Path, orders: int | None) -> None:
        """Make them in a folder, without orders after the first `orders`."""
        self._folder = folder
        self._last = orders * _SPARSE if orders else sys.maxsize
        command = [str(Path(sys.executable).with_name("tpchgen-cli")), "--scale-factor", _SCALE]
        subprocess.run([*command, "--output-dir", str(folder)], check=True, capture_output=True)

    def first(self, table: str) -> Iterator[bytes]:
        """Yield a table's rows but those that RF1 inserts later."""
        return self._lines(table, lambda key: not 1 <= key % _SHARE <= _REFRESHES)

    def added(self, number: int) -> dict[str, Iterator[bytes]]:
        """Return what RF1 inserts."""
        return {name: self._lines(name, lambda key: key % _SHARE == number) for name in _BY_ORDER}

    def _lines(self, table: str, wanted: Callable[[int], bool]) -> Iterator[bytes]:
        """Yield rows for COPY, of wanted orders if the table has orders' keys."""
        with (self._folder / f"{table}.tbl").open("rb") as rows:
            for row in rows:
                key = int(row[: row.index(b"|")]) if table in _BY_ORDER else 0
                if table not in _BY_ORDER or (key <= self._last and wanted(key)):
                    yield row.rstrip(b"|\n") + b"\n"


# Postgres answers the queries after each refresh: without these it takes four minutes.
_QUICK_ANSWERS: Final = (
    b"CREATE INDEX ON lineitem (l_partkey, l_suppkey)",
    b"CREATE INDEX ON orders (o_custkey)",
    b"ANALYZE",
)


def run(options: Options) -> dict[str, Any]:
    """Run the workload and return its result."""
    views, rewritten, refused, elsewhere = _views()
    sections = {name: {"sql": view.sql, "key": list(view.key)} for name, view in views.items()}
    tables = {each.table: tpch_list.columns(each.table) for each in tpch_list.TABLES.values()}
    with (
        servers.running(NAME, POSTGRES, keep=options.keep) as up,
        up.connect() as connection,
    ):
        files = _Files(up.place.folder / "tpch", options.rows)
        shown = ViewRun(up, connection, tables, sections)
        with slots.created(connection, RUN), shown.mirrored():
            for name in tables:
                say(f"filling {name}")
                shown.execute({name: files.first(name)})
            shown.wait_for_mirrors()
            for statement in _QUICK_ANSWERS:
                connection.execute(statement)
            with shown.viewed() as family:
                cuts = _refreshed(shown, files, family)
                ways = shown.ways()
            full = shown.recomputed()
        cpu_s = sum(each.cpu_s for each in cuts.values()) / len(cuts)
        of_full = round(cpu_s / sum(each["cpu_s"] for each in full.values()), 2)
        return result.build(
            name=NAME,
            unit="of a complete computation",
            value=of_full,
            limit=LIMIT,
            floor=None,
            peer=None,
            cpu_s_per_million=0.0,
            peak_rss_mb=max(shown.peaks_mb.values()),
            versions=up.versions,
            details={
                "of_full": of_full,
                "refused": len(refused),
                "refused_because": refused,
                "rewritten": rewritten,
                "refused_where_texts_have_another_order": elsewhere,
                "cuts": {name: each._asdict() for name, each in cuts.items()},
                "full": full,
                "ways": ways,  # of the last cut
                "peaks_mb": shown.peaks_mb,
            },
        )


def _refreshed(shown: ViewRun, files: _Files, family: Family) -> dict[str, Cut]:
    """Return the cuts of the refreshes, after each of which every view is Postgres' answer."""
    shown.cut(family, _deleted(0), 0.0)  # what later ones find warm
    idle, cuts = shown.idle_cores(family), {}
    for number in range(1, 1 + _REFRESHES):
        for name, work in (("RF1", files.added(number)), ("RF2", _deleted(number))):
            cuts[f"{name} {number}"] = shown.cut(family, work, idle)
            found = {view: shown.check(view) for view in shown.views}
            say(f"equal to Postgres' answers: {found}")
    return cuts


class _Views(NamedTuple):
    measured: dict[str, View]
    rewritten: list[str]  # of these, those that are measured in another text
    refused: dict[str, str]  # TPC-H's own that are refused, and why
    refused_elsewhere: dict[str, str]  # in a database that does not order texts by their bytes


def _views() -> _Views:
    """Return which of the queries are views in the benchmark's database, whose collation is C."""
    own = {f"q{number}": tpch_list.original(number) for number in tpch_list.QUERIES}
    other = {f"q{number}": tpch_list.rewritten(number) for number in tpch_list.QUERIES}
    refused, elsewhere = (_refused(own, tpch_list.tables(each)) for each in ("C", "linguistic"))
    still = _refused(other, tpch_list.tables("C"))
    rewritten = [name for name in refused if name not in still]
    measured = {name: view for name, view in own.items() if name not in refused}
    measured |= {name: other[name] for name in rewritten}
    return _Views(measured, rewritten, refused, elsewhere)


def _refused(views: dict[str, View], tables: dict[str, Version]) -> dict[str, str]:
    found = {}
    for name in views:
        try:
            plan(name, views, tables)
        except ConfigError as error:
            found[name] = error.what
    return found


def _deleted(number: int) -> list[str]:
    """Return RF2."""
    chosen = f"% {_SHARE} = {_FIRST_DELETED + number}"
    return [f"DELETE FROM {name} WHERE {key} {chosen}" for name, key in _BY_ORDER.items()]
