"""One task of an initial snapshot: ranges of tables into the log, a Kafka transaction each.

A task has a connection that sees the exported snapshot and a transactional producer of its own. It
fences its predecessor first, and only then reads what the log holds: so no range is written twice,
however often and by whichever process it is started. The range's record is written in the
transaction of its rows.

Rows cross no process boundary except Postgres' and Kafka's: what runs the tasks, Spark or the
daemon, gets the records of ranges back and never a row.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from orjson import dumps

from cdc import failpoints
from cdc.encode.encoder import Encoder
from cdc.encode.masks import column_mask
from cdc.encode.oversize import DeadLetters
from cdc.encode.routes import TableRoute
from cdc.errors import ConfigError, FencedError, ProtocolError, RewrittenError
from cdc.keyring.opening import ciphers_of
from cdc.log import names, topics
from cdc.log.batch import Batch
from cdc.log.limits import limits, ours
from cdc.log.publisher import BoundedPublisher
from cdc.sequence.state import located
from cdc.snapshot.initial import topic
from cdc.snapshot.initial.rate import Pace
from cdc.snapshot.initial.records import RangeRecord, SnapshotTable
from cdc.snapshot.initial.rows import RangeRows, transaction
from cdc.source.connection import take_any_text
from cdc.source.copy_stream import CopyStream
from cdc.source.lookups import look_up
from cdc.source.pinned import connect_for_rows, pinned, shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType
    from typing import Self

    from cdc.config import Config
    from cdc.encode.masks import ColumnMask
    from cdc.log.records import SchemaRecord
    from cdc.snapshot.initial.records import PageRange, SnapshotPlan
    from cdc.source.connection import Connection

    Report = Callable[[int, int], None]  # rows and bytes of the current range, so far

# Assumed minimum speed: it bounds the time that a range's Kafka transaction takes.
_SLOWEST_BYTES_PER_SECOND: Final = 256 << 10
# The assumed size of a row in a table that was never analysed.
_USUAL_ROW_BYTES: Final = 100
# The brokers' own limit, unless transaction.max.timeout.ms changes it.
_LONGEST_SECONDS: Final = 900
_SHORTEST_SECONDS: Final = 300


class CopyTask:
    """Task `number` of a plan. A context manager: it holds connections and a transaction."""

    def __init__(
        self, config: Config, plan: SnapshotPlan, number: int, *, report: Report | None = None
    ) -> None:
        """Nothing is connected yet; `report` is called for each chunk of rows."""
        self._config, self._plan, self._number = config, plan, number
        self._report = report
        self._pace = Pace(config.snapshot, plan.tasks)
        self._batch = Batch(digests=True)
        placeholder = dumps(config.values.unavailable_value_placeholder)
        self._dead = DeadLetters(
            self._batch, names.dead_topic(config.prefix), placeholder, ours(config)
        )
        self._tables: dict[int, tuple[TableRoute, bytes]] = {}
        self._closing = ExitStack()
        self._ciphers = ciphers_of(config)

    def __enter__(self) -> Self:
        """Fence the task's predecessor, check that the plan is still current, connect. Blocks."""
        config, plan = self._config, self._plan
        with ExitStack() as opened:
            self._publisher = BoundedPublisher(
                config,
                f"snapshot.{self._number}",
                transaction_seconds=transaction_seconds(config, plan),
            )
            self._publisher.open()
            opened.callback(self._abort_open)
            self._known = topic.read(config)
            _same_plan(plan, self._known)
            self._admin = topics.admin(config)
            self._sql = connect_for_rows(config)
            opened.callback(self._sql.close)
            self._closing = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._closing.close()

    def unfinished(self) -> list[PageRange]:
        """Return the task's ranges that are not in the log yet."""
        done, plan = self._known.done(self._plan), self._plan
        return [
            each
            for each in plan.ranges_of(self._number)
            if ("rows", each.table, each.number) not in done
            and plan.tables[each.table].kind == "log"
        ]

    def copy(self, each: PageRange) -> RangeRecord:
        """Write a range to the log. Blocks.

        Raises RewrittenError, SnapshotLostError, FencedError: then what was written of the range is
        aborted, and the task can't be used again.
        """
        config, plan, publisher = self._config, self._plan, self._publisher
        began = time.monotonic()
        planned = plan.tables[each.table]
        with pinned(self._sql, plan.snapshot):
            prove(self._sql, planned)
            table, event = self._table(planned)
            rows = RangeRows(table, event, each, self._batch)
            take_any_text(self._sql, config, local=True)
            self._read(range_query(planned, each), rows)
        publisher.flush()
        record = RangeRecord(
            generation=plan.generation,
            table=each.table,
            number=each.number,
            rows=rows.rows,
            bytes=rows.bytes,
            digests=topic.digests_of(self._batch),
            ends=tuple((*place, events) for place, events in self._batch.close().items()),
            seconds=round(time.monotonic() - began, 3),
            first_seq=each.first_seq,
            seqs=each.capacity,
        )
        publisher.add(*topic.range_record(config, record))
        if self._ciphers:
            self._ciphers.make_durable()
        failpoints.reach("before_range_commit")
        publisher.commit()
        failpoints.reach("after_range_commit")
        return record

    def _read(self, query: str, rows: RangeRows) -> None:
        batch, publisher, reported, size = self._batch, self._publisher, 0, 0
        with CopyStream(self._sql, query) as copying:
            while chunk := copying.read():
                try:
                    copying.taken(chunk, rows.feed(chunk))
                except ProtocolError as error:
                    raise located(self._plan.lsn, error) from error
                publisher.produce(batch)
                self._pace.wait(rows.rows - reported, rows.bytes - size)
                reported, size = rows.rows, rows.bytes
                if self._report:
                    self._report(reported, size)

    def _table(self, planned: SnapshotTable) -> tuple[TableRoute, bytes]:
        """Return how rows of a published table are encoded and where they go."""
        found = self._tables.get(planned.schema_id)
        if found is None:
            config, plan = self._config, self._plan
            version = plan.schemas[planned.schema_id]
            name = version.topic
            if not self._dead.knows(name):
                self._dead.limit_to(limits(self._admin, config, [name]))
            encoder = Encoder(
                version,
                plan.database,
                config.prefix,
                planned.partitions,
                masks(config, self._sql, version),
                self._ciphers,
            )
            table = TableRoute(encoder, self._batch.topic(name, encoder.partitions), self._dead)
            members = transaction(plan.epoch, plan.lsn, plan.taken_at_us)
            event = encoder.copied_format(plan.lsn, *members)
            found = self._tables[planned.schema_id] = table, event
        return found

    def _abort_open(self) -> None:
        """Abort an open transaction, so that no reader waits for it."""
        if self._publisher.started:
            self._publisher.abort()


def run_task(config: Config, plan: SnapshotPlan, number: int) -> Iterator[RangeRecord]:
    """Copy what is left of a task; yield each range once it is in the log."""
    with CopyTask(config, plan, number) as task:
        for each in task.unfinished():
            yield task.copy(each)


def prove(connection: Connection, planned: SnapshotTable) -> None:
    """Raise RewrittenError where the snapshot may not see the relation's rows unchanged."""
    found = shape(connection, planned.relation, planned.columns)
    if found != (planned.filenode, planned.attnums):
        what = "columns" if found.filenode == planned.filenode else "rows"
        raise RewrittenError(
            f"the {what} of {planned.relation} were rewritten since the snapshot was taken"
        )


def masks(config: Config, connection: Connection, version: SchemaRecord) -> list[ColumnMask | None]:
    """Return each column's mask; raise ConfigError where they differ from the plan's."""
    relation = version.relation_id
    published = look_up(connection, config.publication, [relation])[relation].published
    selection = config.selection.of((version.schema, version.table), *published.ancestors)
    found = [column_mask(selection, column.name) for column in version.columns]
    if [mask and mask.label for mask in found] != [c.mask for c in version.columns]:
        raise ConfigError(
            f"{version.schema}.{version.table} is masked otherwise here than in the plan of the"
            " snapshot",
            hint="let every task have the configuration that the coordinator has",
        )
    return found


def range_query(planned: SnapshotTable, each: PageRange) -> str:
    """Return the COPY of a range: each column's text, as pgoutput would write it."""
    columns = ", ".join(planned.outputs)
    rows = f"SELECT {columns} FROM {range_rows(planned, each)}"  # noqa: S608 - of the catalog's
    return f"COPY ({rows}) TO STDOUT (FORMAT binary)"


def range_rows(planned: SnapshotTable, each: PageRange) -> str:
    """Return the text after FROM in the query that reads a range's rows."""
    tests = []
    if each.first_page is not None:
        tests.append(f"ctid >= '({each.first_page},0)'::tid AND ctid < '({each.end_page},0)'::tid")
    if planned.where is not None:
        tests.append(f"({planned.where}\n)")
    where = f" WHERE {' AND '.join(tests)}" if tests else ""
    return f"ONLY {planned.relation}{where}"


def transaction_seconds(config: Config, plan: SnapshotPlan) -> int:
    """Return how long a Kafka transaction may be open, so that the largest range fits into it.

    Raises ConfigError where the configured pace makes a range take longer than brokers allow.
    """
    pace = Pace(config.snapshot, plan.tasks)
    most = 0.0
    for table in plan.tables:
        ranges = -(-(table.pages or 1) // (table.pages_per_range or 1)) if table.pages else 1
        estimated = table.rows or table.bytes // _USUAL_ROW_BYTES
        rows, size = estimated // ranges + 1, table.bytes // ranges + 1
        most = max(most, pace.seconds(rows, size) + size / _SLOWEST_BYTES_PER_SECOND)
    if pace.seconds(1, 1) and most > _LONGEST_SECONDS:
        raise ConfigError(
            f"at snapshot.rows_per_second and snapshot.bytes_per_second a range takes {most:.0f} s,"
            f" and a Kafka transaction {_LONGEST_SECONDS} s at most",
            hint="lower snapshot.range_bytes",
        )
    return int(min(max(2 * most, _SHORTEST_SECONDS), _LONGEST_SECONDS))


def _same_plan(plan: SnapshotPlan, known: topic.InitialLog) -> None:
    """Raise FencedError where the log shows that `plan` is not the one being copied."""
    state = known.state
    mine = state is not None and (state.stage, state.generation, state.token) == (
        "running",
        plan.generation,
        plan.token,
    )
    if not mine:
        raise FencedError(
            f"generation {plan.generation} of the snapshot is no longer being copied",
            hint="another coordinator has started a new one, or it is done; this one stops",
        )
