"""How far a snapshot is: rows, bytes, percent, rate and time left, in all and per table.

Pure but for the clock it is given. Percent is by pages, which are known beforehand; rows and bytes
are those copied. What a task reports of its current range counts until the range's record does.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdc.log.records import SchemaRecord
    from cdc.snapshot.initial.records import RangeRecord, SnapshotPlan

# The rate is that of the last 30 seconds.
_WINDOW_SECONDS: Final = 30.0

At = tuple[int, int]  # table and number of a range


class TableReport(NamedTuple):
    """The progress of one table."""

    table: str
    rows: int
    bytes: int
    percent: float
    estimated_rows: int


class Report(NamedTuple):
    """The progress of the snapshot at one moment."""

    generation: int
    rows: int
    bytes: int
    percent: float
    estimated_rows: int
    estimated_bytes: int  # of pages
    rows_per_second: float
    bytes_per_second: float
    seconds: float  # since it began
    seconds_left: float | None  # None while it can't be estimated
    tables: tuple[TableReport, ...]

    def body(self) -> dict[str, object]:
        """Return the report as JSON-ready values."""
        fields: dict[str, object] = self._asdict()
        numbers = {k: round(v, 1) for k, v in fields.items() if isinstance(v, float)}
        tables = [{**each._asdict(), "percent": round(each.percent, 1)} for each in self.tables]
        return {**fields, **numbers, "tables": tables}

    def brief(self) -> dict[str, object]:
        """Return the fields for a log line, with the tables that are being copied."""
        body = self.body()
        body["tables"] = {t.table: round(t.percent) for t in self.tables if 0 < t.percent < 100}  # noqa: PLR2004 - percent
        return body

    def words(self) -> str:
        """Return it as a line for people."""
        left = "" if self.seconds_left is None else f", {_spelled(self.seconds_left)} left"
        return (
            f"{self.percent:.0f} %, {self.rows:,} rows, {self.rows_per_second:,.0f} rows/s, "
            f"{self.bytes / 1e6:,.1f} MB{left}"
        )


class SnapshotProgress:
    """Collects what tasks report."""

    def __init__(self, plan: SnapshotPlan, now: float) -> None:
        """`now` and later times are monotonic."""
        self._plan = plan
        self._began = now
        self._weights: dict[At, int] = {}
        self._sums = [_Sum() for _ in plan.tables]
        for each in plan.ranges():
            weight = (each.end_page or 1) - (each.first_page or 0)
            self._weights[each.table, each.number] = weight
            self._sums[each.table].weight += weight
        self._total = sum(self._weights.values()) or 1
        self._done: set[At] = set()
        self._running: dict[At, tuple[int, int]] = {}
        self._window: deque[tuple[float, int, int]] = deque()
        self._tables: dict[str, list[int]] = {}
        for index, table in enumerate(plan.tables):
            self._tables.setdefault(_named(plan.schemas[table.schema_id]), []).append(index)

    def restart(self, done: Iterable[RangeRecord]) -> None:
        """Note what is `done` in the log; no task is running."""
        self._running.clear()
        for record in done:
            self.finished(record)

    def finished(self, record: RangeRecord) -> None:
        """Note a range that is in the log."""
        if record.part == "rows" and record.generation == self._plan.generation:
            at = record.table, record.number
            self._running.pop(at, None)
            if at in self._weights and at not in self._done:
                self._done.add(at)
                self._sums[record.table].add(record.rows, record.bytes, self._weights[at])

    def reported(self, table: int, number: int, rows: int, size: int) -> None:
        """Note what a task has read so far of its current range."""
        if (table, number) not in self._done:
            self._running[table, number] = rows, size

    @property
    def complete(self) -> bool:
        """Whether every range is in the log."""
        return len(self._done) == len(self._weights)

    def report(self, now: float) -> Report:
        at_hand: dict[int, list[tuple[int, int]]] = {}
        for (table, _), read in self._running.items():
            at_hand.setdefault(table, []).append(read)
        tables = tuple(self._table(*named, at_hand) for named in self._tables.items())
        rows, size = sum(t.rows for t in tables), sum(t.bytes for t in tables)
        window = self._window
        window.append((now, rows, size))
        while len(window) > 1 and now - window[0][0] > _WINDOW_SECONDS:
            window.popleft()
        seconds = max(now - window[0][0], 0.001)
        share = self._share() + self._share_at_hand()
        took = now - self._began
        left = took * (1 - share) / share if share > 0 else None
        return Report(
            generation=self._plan.generation,
            rows=rows,
            bytes=size,
            percent=100 * share,
            estimated_rows=sum(t.estimated_rows for t in tables),
            estimated_bytes=sum(t.bytes for t in self._plan.tables),
            rows_per_second=(rows - window[0][1]) / seconds,
            bytes_per_second=(size - window[0][2]) / seconds,
            seconds=took,
            seconds_left=left,
            tables=tables,
        )

    def _share(self) -> float:
        if not self._weights:
            return 1.0
        return sum(each.done for each in self._sums) / self._total

    def _share_at_hand(self) -> float:
        """Estimate how much of the current ranges is read, by the rows their pages may have."""
        share = 0.0
        for at, (rows, _) in self._running.items():
            table = self._plan.tables[at[0]]
            expected = table.rows * self._weights[at] / (table.pages or 1)
            share += self._weights[at] * min(0.99, rows / expected if expected else 0.0)
        return share / self._total

    def _table(
        self, name: str, members: list[int], at_hand: dict[int, list[tuple[int, int]]]
    ) -> TableReport:
        sums = [self._sums[i] for i in members]
        reading = [read for i in members for read in at_hand.get(i, ())]
        total = sum(each.weight for each in sums)
        return TableReport(
            table=name,
            rows=sum(each.rows for each in sums) + sum(rows for rows, _ in reading),
            bytes=sum(each.bytes for each in sums) + sum(size for _, size in reading),
            percent=100 * sum(each.done for each in sums) / total if total else 100.0,
            estimated_rows=sum(self._plan.tables[i].rows for i in members),
        )


class _Sum(Struct):
    """What is done of one planned table."""

    rows: int = 0
    bytes: int = 0
    done: int = 0  # pages
    weight: int = 0  # pages in all

    def add(self, rows: int, size: int, weight: int) -> None:
        self.rows += rows
        self.bytes += size
        self.done += weight


def _named(schema: SchemaRecord) -> str:
    return f"{schema.schema}.{schema.table}"


def _spelled(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
