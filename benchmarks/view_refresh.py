"""view-refresh: what a cut of a view costs, by a complete computation, and as its tables grow.

A view joins orders to customers and groups them by customer. At each size, transactions change a
thousandth of the orders and of the customers, and others always the same number. `of_full` is the
CPU time of the first by that of computing the view completely over the same mirrors, at the largest
size; `growth` is that of the second at the largest size by that at the smallest. Cuts and complete
computations count once the JVM is warm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from benchmarks import result, servers, slots
from benchmarks.follow_server import RUN
from benchmarks.latency import POSTGRES
from benchmarks.progress import say
from benchmarks.view_run import ViewRun, median

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.options import Options
    from benchmarks.servers import Servers

NAME: Final = "view-refresh"
LIMIT: Final = 0.2
_GROWTH_LIMIT: Final = 1.5
_SIZES: Final = (1_000_000, 10_000_000)
_SHARE: Final = 1_000  # a cut changes one row of so many
_CUTS: Final = 5
# A complete computation runs more code that is compiled: it is warm after one.
_WARM_UP_CUTS: Final = 6
_PER_CUSTOMER: Final = 10
_TRANSACTION_ROWS: Final = 20_000
# Odd and not a multiple of five, so that each row of a round number of rows occurs once.
_STEP: Final = 2_654_435_761
TABLES: Final = {
    "customers": "id int PRIMARY KEY, name text NOT NULL, region text",
    "orders": "id int PRIMARY KEY, customer_id int NOT NULL, price numeric(10,2), state text,"
    " placed timestamptz",
}
VIEWS: Final = {
    "totals": {
        "sql": "SELECT c.id, c.name, count(*) AS orders, sum(o.price) AS total"
        " FROM customers c JOIN orders o ON o.customer_id = c.id GROUP BY c.id, c.name",
        "key": ["id"],
        "refresh": "strict",
    }
}


def run(options: Options) -> dict[str, Any]:
    """Run the workload and return its result."""
    largest = options.rows or _SIZES[-1]
    sizes = [size * largest // _SIZES[-1] for size in _SIZES]
    found, versions = list[dict[str, Any]](), dict[str, str]()
    for size in sizes:
        with servers.running(NAME, POSTGRES, keep=options.keep) as up:
            found.append(_at(up, size, sizes[0] // _SHARE))
            versions = dict(up.versions)
    small, large = found
    return result.build(
        name=NAME,
        unit="of a complete computation",
        value=large["of_full"],
        limit=LIMIT,
        floor=None,
        peer=None,
        cpu_s_per_million=large["cut"]["cpu_s"] / large["changes"] * 1e6,
        peak_rss_mb=max(large["peaks_mb"].values()),
        versions=versions,
        details={
            "of_full": large["of_full"],
            "growth": round(large["same_cut"]["cpu_s"] / small["same_cut"]["cpu_s"], 2),
            "growth_limit": _GROWTH_LIMIT,
            "sizes": found,
        },
    )


def _at(up: Servers, size: int, same: int) -> dict[str, Any]:
    """Return the figures at a size; cuts of the second kind change `same` orders."""
    with up.connect() as connection:
        shown = ViewRun(up, connection, TABLES, VIEWS)
        with slots.created(connection, RUN), shown.mirrored():
            say(f"{size:,} orders")
            for statements in filling(size):
                shown.execute(statements)
            shown.wait_for_mirrors()
            with shown.viewed() as family:
                for number in range(_WARM_UP_CUTS):
                    shown.cut(family, _change(size, number, same), 0.0)
                idle, changes = shown.idle_cores(family), size // _SHARE
                cuts = [
                    shown.cut(family, _change(size, _WARM_UP_CUTS + number, changes), idle)
                    for number in range(_CUTS)
                ]
                again = [
                    shown.cut(family, _change(size, _WARM_UP_CUTS + _CUTS + number, same), idle)
                    for number in range(_CUTS)
                ]
                shown.check("totals")
            full = shown.recomputed()["totals"]
    cut = median(cuts)
    return {
        "orders": size,
        "changes": changes + changes // _PER_CUSTOMER,
        "cut": cut._asdict(),
        "of_full": round(cut.cpu_s / full["cpu_s"], 3),
        "full": full,
        "same_changes": same + same // _PER_CUSTOMER,
        "same_cut": median(again)._asdict(),
        "cuts": [each._asdict() for each in cuts],
        "same_cuts": [each._asdict() for each in again],
        "idle_cores": round(idle, 3),
        "peaks_mb": shown.peaks_mb,
    }


def filling(size: int) -> Iterator[list[str]]:
    """Yield transactions that insert so many orders, and their customers."""
    customers = size // _PER_CUSTOMER
    for first in range(0, customers, _TRANSACTION_ROWS):
        last = min(first + _TRANSACTION_ROWS, customers) - 1
        series = f"generate_series({first}, {last}) i"
        yield [
            f"INSERT INTO customers SELECT i, 'customer ' || i, 'region ' || i % 50 FROM {series}"
        ]
    for first in range(0, size, _TRANSACTION_ROWS):
        last = min(first + _TRANSACTION_ROWS, size) - 1
        values = f"i, (i::bigint * 7919 % {customers})::int, (i % 100000) / 100.0, 'open'"
        series = f"generate_series({first}, {last}) i"
        yield [f"INSERT INTO orders SELECT {values}, clock_timestamp() FROM {series}"]


def _change(size: int, number: int, orders: int) -> list[str]:
    """Return what changes random orders, and customers; others in each cut."""
    customers = orders // _PER_CUSTOMER

    def chosen(count: int, of: int) -> str:
        series = f"generate_series({number * count}, {(number + 1) * count - 1}) i"
        return f"id IN (SELECT (i::numeric * {_STEP} % {of})::int FROM {series})"

    return [
        f"UPDATE orders SET price = price + 1, state = 'paid' WHERE {chosen(orders, size)}",
        f"UPDATE customers SET name = name || '!' WHERE {chosen(customers, size // _PER_CUSTOMER)}",
    ]
