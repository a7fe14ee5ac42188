"""The tables that have clients: a channel each, and what the log knows of them."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.console.channel import Channel
from cdc.errors import GapError, UnavailableError
from cdc.events import table_name
from cdc.log import names, reader
from cdc.log.frontier_search import FrontierSearch
from cdc.log.table_cuts import TableCuts, oldest_seq, start_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config
    from cdc.log.records import SchemaRecord
    from cdc.log.table_cuts import TableCut

# Each holds a thread, connections to the brokers and up to `channel.KEPT_BYTES`.
MOST_TABLES: Final = 32
# A table without clients is followed on for so long: they come back.
_UNUSED_SECONDS: Final = 60.0
# How soon a table that was created is found.
_LOOK_SECONDS: Final = 3.0


class PastError(GapError):
    """The log no longer holds everything after a seq; `oldest` is the lowest that it does."""

    def __init__(self, oldest: int) -> None:
        super().__init__(
            f"the log no longer has every change after this seq: it has those after {oldest}",
            hint="read the table's rows, then the stream without Last-Event-ID",
        )
        self.oldest = oldest


class Table(NamedTuple):
    """A table of the log; `version` is its newest, None before its first change."""

    topic: str
    partitions: int
    version: SchemaRecord | None = None


class Hub:
    """Opens channels. Its methods are for threads other than the server's, unless they say so."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._tables: dict[str, Table] = {}
        self._looked_at = float("-inf")
        self._topics: dict[str, Followed] = {}

    def close(self) -> None:
        with self._lock:
            for each in self._topics.values():
                each.channel.close()

    def table(self, name: str) -> Table | None:
        """Return the table with this name, as the configuration writes it; None if none has it."""
        with self._lock:
            if time.monotonic() - self._looked_at > _LOOK_SECONDS:
                self._tables = _tables(self._config)
                self._looked_at = time.monotonic()
            return self._tables.get(name)

    def followed(self, table: Table, loop: asyncio.AbstractEventLoop, *, earlier: bool) -> Followed:
        """Return the table's channel, opened if need be and kept for a client that will join."""
        topic = table.topic
        with self._lock:
            self._close_unused()
            found = self._topics.get(topic)
            if found is None or found.channel.error:
                if found is None and len(self._topics) >= MOST_TABLES:
                    raise UnavailableError(
                        f"{MOST_TABLES} tables are streamed already",
                        hint="close the streams of one of them, or start another console",
                    )
                was = found
                found = Followed(loop)
                found.channel = Channel(
                    self._config,
                    topic,
                    table.partitions,
                    found.changed,
                    earlier=earlier and was is None,
                )
                self._topics[topic] = found
            found.left_at = time.monotonic()
            return found

    def _close_unused(self) -> None:
        now = time.monotonic()
        for topic, each in list(self._topics.items()):
            if not each.clients and now - each.left_at > _UNUSED_SECONDS:
                each.channel.close()
                del self._topics[topic]

    def backlog(self, table: Table, seq: int) -> Backlog:
        """Return a reader of what is above a seq; raise PastError if the log lacks some of it."""
        return Backlog(self._config, table, seq)

    def seq_at(self, lsn: int) -> int:
        """Return the seq of the newest frontier not above an LSN; raise PastError if it is lost."""
        with closing(FrontierSearch(self._config)) as search:
            placed = search.newest_that(lambda record: record.lsn <= lsn)
            if placed is not None:
                return placed.record.seq
            first = search.at_or_after(search.first)
            raise PastError(first.record.seq if first else 0)


class Followed:
    """A channel, how many clients it has, and how they wait for it. Belongs to the server's loop.

    Only the loop changes `clients`.
    """

    channel: Channel

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.clients = 0
        self.left_at = 0.0
        self._loop = loop
        self._event = asyncio.Event()

    def changed(self) -> None:
        """Wake the clients; for the channel's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    @property
    def event(self) -> asyncio.Event:
        """What is set when the channel has more than now."""
        return self._event

    def leave(self) -> None:
        self.clients -= 1
        self.left_at = time.monotonic()


class Backlog:
    """Reads one table's cuts for one client, up to where the channel has them."""

    def __init__(self, config: Config, table: Table, seq: int) -> None:
        topic = table.topic
        with closing(FrontierSearch(config)) as search:
            numbers = [(topic, number) for number in range(table.partitions)]
            oldest = oldest_seq(config, search, numbers)
            start = start_at(search, seq)
        if start is None or seq < oldest:
            raise PastError(oldest)
        self.record = start.record if start.seq == seq else None
        self._cuts = TableCuts(config, topic, start)
        self._found: Iterator[TableCut] = iter(())

    def next(self) -> TableCut | None:
        """Return the next cut; None if none has arrived for a moment."""
        found = next(self._found, None)
        if found is None:
            self._found = self._cuts.read(0.5)
            found = next(self._found, None)
        return found

    def close(self) -> None:
        self._cuts.close()


def _tables(config: Config) -> dict[str, Table]:
    resume = reader.read_resume(config)
    partitions = resume[0].partitions if resume else {}
    own = f"{config.prefix}.cdc."
    found = {
        names.table_name(config.prefix, topic): Table(topic, count)
        for topic, count in partitions.items()
        if not topic.startswith(own)
    }
    for record in reader.read_schemas(config):  # oldest first
        if record.topic in partitions:
            name = table_name(record.schema, record.table)
            found[name] = Table(record.topic, partitions[record.topic], record)
    return found
