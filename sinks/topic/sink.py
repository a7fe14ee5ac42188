"""The topic sink: rows in compacted topics, each cut with its frontier in one Kafka transaction.

A reader of committed records sees a cut completely or not at all, and the frontier record names the
offsets that belong to it. A cut is gathered first, so each key has at most one record in it. Only
the writer that has opened the transactional id last can commit: one that finds another was there
reads the frontier again, leaves out what the other has written, and sends the rest. So two copies
only repeat each other's work, and no record is in a topic twice. A change at or below the frontier
was applied: deletes need no more than Kafka's tombstones.

A store has one generation: `sinks.contract.Generations` is optional.
"""

from __future__ import annotations

import time
from secrets import token_hex
from typing import TYPE_CHECKING, Final

from cdc import failpoints
from cdc.encode.partition import partition_of
from cdc.errors import (
    ConfigError,
    FencedError,
    InvariantError,
    OutcomeUnknownError,
    StoreLostError,
)
from cdc.events import LSN
from cdc.log.partitions import OffsetRange
from lockstep.sinks.contract import StoreState, expect_alone, expect_key, expect_keyed
from lockstep.sinks.topic import records
from lockstep.sinks.topic.cluster import FollowerTopics
from lockstep.sinks.topic.records import Started, TopicFrontier
from lockstep.sinks.topic.rows import TopicRow, TopicRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from lockstep.sinks.contract import Altered, Applied, Change, Changes, Version
    from lockstep.sinks.topic.cluster import TopicSettings
    from lockstep.sinks.topic.records import TopicTable

# How often a step is repeated that another copy of the follower has fenced.
_TRIES: Final = 5
# After this many transactions in a row that brokers have timed out, the cut takes too long: a copy
# that was frozen once has only one.
_TIMED_OUT: Final = 2


class _Cut:
    """The cut that is being gathered."""

    def __init__(self, floor: int, above: int | None) -> None:
        self.floor, self.above = floor, above  # `floor`: the frontier's seq that it is written at
        self.tables: dict[str, TopicTable] = {}


class TopicSink:
    """One follower's topics."""

    complete_rows = True
    parallel = False

    def __init__(self, settings: TopicSettings) -> None:
        self._settings = settings
        self._cluster = FollowerTopics(settings)
        self._known: tuple[TopicFrontier, Started] | None = None  # once it is opened
        self._token = ""
        self._cut: _Cut | None = None
        self._sending_since: float | None = None  # when the transaction of a cut began
        self._rows: TopicRows | None = None
        self._read: dict[str, tuple[int, ...]] = {}  # by table, the ends at which `_rows` has it

    def current(self) -> int | None:
        known = self._cluster.read()
        return known[0].generation if known else None

    def open(self) -> StoreState | None:
        self._end_cut()
        self._cluster.open()
        known = self._cluster.read() or self._created()
        if known[0].token != self._token:
            self._forget()
        self._known, self._token = known, known[0].token
        frontier, started = known
        self._cluster.expect_held(frontier.tables.values())
        self._cluster.expect_complete(frontier.tables.values())
        reached = max(frontier.seq, started.reached)
        return StoreState(frontier.state, reached) if reached else None

    def start_over(self, generation: int) -> None:
        self._end_cut()
        self._cluster.open()
        self._forget()

        def empty() -> None:
            self._cluster.fence()
            self._cluster.read()  # raises if it is another follower's
            tables = self._cluster.leftovers()
            for name, table in tables.items():
                self._load(name, table)
                self._stored.clear(name, 0)
            self._put(*self._new(generation, self._send(tables)))

        self._alone(empty)
        self._end_cut()

    def histories(self) -> frozenset[str]:
        return frozenset()

    def begin(self, reached: int, versions: Sequence[Version], above: int | None = None) -> None:
        expect_keyed(versions, "a compacted topic keeps a row by its key")

        def record() -> None:
            self._end_cut()
            frontier, started = self._opened()
            wanted = {each.name: each for each in versions}
            held = {name: its for name, its in frontier.tables.items() if name in wanted}
            self._cluster.expect_held(held.values())
            if above is not None:
                last = max(frontier.seq, started.reached)
                expect_alone(above, reached, applied=frontier.seq, started=last)
            self._cut = _Cut(frontier.seq, above)
            self._cut.tables = held
            self._take([each for name, each in wanted.items() if name not in held])
            started = Started(self._token, max(reached, started.reached))
            self._cluster.put({records.STARTED: records.encode(started)})
            self._known = frontier, started

        self._alone(record)

    def write(self, changes: Changes) -> int:
        cut, version = self._started_cut(), changes.version
        if changes.truncated is not None and changes.truncated > cut.floor:
            self._synced(version.name)
            self._stored.clear(version.name, changes.truncated, changes.truncated)
        new = [each for each in changes.changes if each.seq > cut.floor]
        if new:
            self._expect_key(cut, changes, new[0].schema_id)
        limit, made = self._cluster.limit(cut.tables[version.name].topic), []
        for each in new:
            key, row = each.key or b"", each.row
            if len(key) + len(row or b"") > limit:
                raise _too_large(version, each, limit)
            made.append(TopicRow(version.name, key, each.seq, each.commit_lsn, row))
        self._stored.put(made)
        return len(new)

    def alter(self, altered: Altered) -> None:
        cut, name = self._started_cut(), altered.version.name
        if altered.seq > cut.floor:
            self._synced(name)
            self._stored.alter(altered)
            cut.tables[name] = cut.tables[name].with_key(altered.version.key)

    def commit(self, applied: Applied) -> None:
        cut = self._started_cut()

        def write() -> None:
            frontier, started = self._opened()
            if frontier.seq != cut.floor:  # another copy was faster
                if cut.above is not None:
                    expect_alone(cut.above, applied.seq, applied=frontier.seq, started=0)
                self._stored.applied_up_to(frontier.seq)
                cut.floor = frontier.seq
            before = frontier.state
            if (applied.seq, applied.lsn) >= (before.seq, before.lsn):
                mine = {
                    name: frontier.tables.get(name, table).with_key(table.key)
                    for name, table in cut.tables.items()
                }
                before_it = frontier.tables | mine
                tables = self._send(before_it)
                self._put(frontier.at(applied, tables), started)
                self._keep(before_it, tables)

        self._alone(write)
        self._end_cut()

    def rows(self, version: Version, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        self._synced(version.name)
        return self._stored.rows(version.name, keys)

    def contents(self, version: Version) -> Iterator[tuple[bytes, int, bytes]]:
        self._synced(version.name)
        yield from self._stored.all(version.name)

    def close(self) -> None:
        self._forget()
        self._cut = None
        self._cluster.close()

    # --- the only writer ---

    def _alone(self, step: Callable[[], None]) -> None:
        """Call a step that ends in a transaction; again if another copy has fenced this one."""
        timed_out = 0
        for left in reversed(range(_TRIES)):
            self._sending_since = None
            try:
                step()
            except (FencedError, OutcomeUnknownError) as error:
                timed_out = timed_out + 1 if self._is_timed_out() else 0
                self._cluster.let_go()
                if timed_out == _TIMED_OUT:
                    raise _too_slow(self._cluster.transaction_seconds) from error
                if not left:
                    raise FencedError(
                        "other copies of the follower open its transactional id all the time",
                        hint="run one copy of it, and any other with --standby",
                    ) from error
            except BaseException:
                self._cluster.let_go()
                raise
            else:
                return

    def _is_timed_out(self) -> bool:
        """Return whether brokers may have ended the transaction: it fences its writer."""
        since = self._sending_since
        return since is not None and time.monotonic() - since >= self._cluster.transaction_seconds

    def _opened(self) -> tuple[TopicFrontier, Started]:
        """Return what the own topic has, as its only writer."""
        if self._cluster.publisher is None:
            self._cluster.fence()
            self._known = self._cluster.read()
        if self._known is None or self._known[0].token != self._token:
            raise StoreLostError("another generation, or another store, is in its place")
        return self._known

    def _created(self) -> tuple[TopicFrontier, Started]:
        """Write the first records of a store that has none; return them."""
        if self._cluster.leftovers():
            raise StoreLostError(f"the frontier record in {self._cluster.own} is missing")

        def create() -> None:
            self._cluster.fence()
            self._known = self._cluster.read()  # another copy may have been faster
            if self._known is None:
                self._put(*self._new(1, {}))

        self._alone(create)
        assert self._known is not None, "it was read or written"
        return self._known

    def _new(self, generation: int, tables: dict[str, TopicTable]) -> tuple[TopicFrontier, Started]:
        self._token = token_hex(8)
        frontier = TopicFrontier(
            pipeline=self._settings.pipeline,
            follower=self._settings.follower,
            generation=generation,
            token=self._token,
            tables=tables,
        )
        return frontier, Started(self._token, 0)

    def _send(self, tables: Mapping[str, TopicTable]) -> dict[str, TopicTable]:
        """Hand over the cut's records; return the topics with their ends after them."""
        publisher = self._cluster.publisher
        assert publisher is not None, "the caller has opened it"
        self._sending_since = time.monotonic()
        for table, key, seq, lsn, value in self._stored.changes():
            headers = {records.SEQ: b"%d" % seq, records.FOLLOWER: self._cluster.owner}
            if lsn:
                headers[records.LSN_OF] = str(LSN(lsn)).encode()
            its = tables[table]
            number = partition_of(key, len(its.ends))
            publisher.send(its.topic, key, value, headers, number)
        publisher.flush()
        failpoints.reach("topic_sent")
        return self._cluster.written_ends(tables)

    def _put(self, frontier: TopicFrontier, started: Started) -> None:
        """Write both records, and commit."""
        encode = records.encode
        self._cluster.put({records.FRONTIER: encode(frontier), records.STARTED: encode(started)})
        self._known = frontier, started

    # --- the cut, and what topics hold ---

    def _started_cut(self) -> _Cut:
        if self._cut is None:
            raise InvariantError("a topic sink is written to without a cut")
        return self._cut

    def _end_cut(self) -> None:
        self._cut = None
        if self._rows is not None:
            self._rows.end_cut()

    def _take(self, versions: Sequence[Version]) -> None:
        """Create the topics of tables that are new; delete what an earlier filling left in them."""
        cut = self._started_cut()
        for name, (table, has_rows) in self._cluster.take(versions).items():
            cut.tables[name] = table
            if has_rows:
                self._load(name, table)
                self._stored.clear(name, cut.floor + 1)

    def _expect_key(self, cut: _Cut, changes: Changes, schema_id: int) -> None:
        """Raise ConfigError if the changes have another key than the table's rows."""
        name = changes.version.name
        key = next(each.key for each in changes.versions if each.schema_id == schema_id)
        stored, table = None, cut.tables[name]
        if table.key != key:
            self._synced(name)
            stored = table.key if self._stored.has(name) else None
        expect_key(changes._replace(truncated=None), stored, cut.floor)
        cut.tables[name] = table.with_key(key)

    @property
    def _stored(self) -> TopicRows:
        if self._rows is None:
            self._rows = TopicRows()
        return self._rows

    def _synced(self, name: str) -> None:
        """Have a table's rows as they are at the frontier."""
        table = self._known and self._known[0].tables.get(name)
        if table:
            self._load(name, table)

    def _load(self, name: str, table: TopicTable) -> None:
        """Read a table's topic, unless its rows are known at these ends.

        Always from the start: Kafka keeps a tombstone for `delete.retention.ms` only, so what is
        new in the topic need not say which of the rows that were read before are deleted by now.
        """
        if self._read.get(name) == table.ends:
            return
        self._read.pop(name, None)
        self._stored.unload(name)
        ranges = {
            place: OffsetRange(0, end)
            for place, end in zip(table.partitions, table.ends, strict=True)
            if end
        }
        for found in self._cluster.records(ranges):
            self._stored.load(name, found)
        self._read[name] = table.ends

    def _keep(self, before: Mapping[str, TopicTable], after: Mapping[str, TopicTable]) -> None:
        """Take the committed cut into the rows that were known, so that none is read again."""
        for name, table in after.items():
            if name in self._read and self._read[name] == before[name].ends:
                self._stored.keep(name)
                self._read[name] = table.ends

    def _forget(self) -> None:
        if self._rows is not None:
            self._rows.close()
        self._rows = None
        self._read.clear()


def _too_large(version: Version, change: Change, limit: int) -> ConfigError:
    return ConfigError(
        f"a row of {version.name}, of seq {change.seq}, is larger than the {limit} bytes that its"
        " topic takes",
        hint="raise max.message.bytes of the topic (kafka-configs.sh --alter) and message.max.bytes"
        " under the follower's `topic.kafka`; or leave the table out of its `tables`. Nothing of"
        " the cut was written",
    )


def _too_slow(seconds: float) -> ConfigError:
    return ConfigError(
        f"a cut takes longer to send than the {seconds:g} s after which brokers end a transaction",
        hint="set transaction.timeout.ms under the follower's `topic.kafka`, and raise the brokers'"
        " transaction.max.timeout.ms if it is lower. Nothing of the cut is visible",
    )
