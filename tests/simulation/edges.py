"""The real modules' edges, replaced by those of the current world while schedules run.

The only place that knows what the product's modules import: when one of them needs something more
from outside, it is added here.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NoReturn, cast
from unittest import mock

import cdc.daemon.pipeline
import cdc.daemon.takeover
import cdc.failpoints
import cdc.log.absence
import cdc.log.consumer
import cdc.log.producer_pool
import cdc.log.publisher
import cdc.publication.check
import cdc.publication.continuity
import cdc.sequence.intake
import cdc.sequence.table_versions
import cdc.source.stream
from cdc.config import Config
from cdc.encode.encoder import Encoder
from cdc.log import records
from cdc.log.publisher import Publisher
from cdc.sequence.spool import Spool
from cdc.snapshot.incremental.topic import IncrementalLog, completeness
from cdc.source.lookups import Lookup, SentTable, TableFacts
from cdc.source.publications import PublicationVersion
from cdc.source.stream import Stream
from cdc.source.timelines import System
from tests.property.histories import KEYS
from tests.property.played import NO_WAKE_FD, PlayedWalsender
from tests.simulation.broker import Producer
from tests.simulation.lookups import Consumer
from tests.simulation.slot import Wire
from tests.simulation.world import Nothing, World

# The bytes of a few events.
_SMALL_BYTES: Final = 2_500
# So that batches with little for each partition are written directly, too.
_WIDE_PARTITIONS: Final = 2
# The patience with a silent walsender, as a multiple of its timeout.
_NEVER: Final = 10**9


class SimulatedStream(Stream):
    """The real stream, except for how it connects and sleeps."""

    def __init__(
        self, config: Config, _wake_fd: int, *, committed_only: bool = False, patience: int = 1
    ) -> None:
        assert patience >= 1
        self.world = World.current
        # Half of the schedules stream; a session that must reread a transaction does not.
        streaming = self.world.streams and not committed_only
        wire = Wire(self.world.slot, self.world.scheduler, streaming=streaming)
        walsender: Any = PlayedWalsender(wire, timeout_seconds=9.0)
        super().__init__(config, NO_WAKE_FD, patience=_NEVER, walsender=walsender)
        self.streaming = "on" if streaming else "off"

    def identify(self) -> System:
        return System("7", 1)

    def start(self) -> None:
        self._wire.start(b"")

    def wait(self, seconds: float, *, for_frames: bool) -> None:  # noqa: ARG002 - as the real
        self.world.turn(seconds)


@lru_cache(maxsize=4_096)
def _encoder(version: records.SchemaRecord, database: str, name: str, partitions: int) -> Encoder:
    return Encoder(version, database, name, partitions)


def _refuse(*_: object) -> NoReturn:
    raise AssertionError("the world has no such thing")


class _Clock:
    """The module `time` of the current world."""

    def monotonic(self) -> float:
        return World.current.clock.monotonic()

    def time_ns(self) -> int:
        return World.current.clock.time_ns()

    def sleep(self, seconds: float) -> None:
        World.current.clock.sleep(seconds)


def _producer(settings: dict[str, Any]) -> Producer:
    return Producer(World.current.broker, World.current.scheduler, settings)


def _reach(failpoint: str) -> None:
    World.current.scheduler.reach(failpoint)


def _lookup(name: str) -> Callable[..., Any]:
    def ask(*about: Any) -> Any:  # noqa: ANN401 - stands for any of them
        return getattr(World.current.lookups, name)(*about)

    return ask


class _Direct(Publisher):
    """`DirectPublisher`, which guarantees the same as `Publisher`."""

    def __init__(self, config: Config, name: str, transaction_seconds: int) -> None:
        super().__init__(config, name, transaction_seconds=transaction_seconds)

    def close(self) -> None:
        """Do nothing: no connection is open."""


class _Catalog(Nothing):
    """A connection on which every query finds nothing."""

    def execute(self, *_: object) -> _Catalog:
        return self

    def fetchall(self) -> list[tuple[Any, ...]]:
        return []


class _Quiet(Nothing):
    """A topic monitor that finds nothing."""

    def pin(self, identity: records.ResumeIdentity) -> records.ResumeIdentity:
        return identity


class _Agreeing:
    """Columns of today's catalog that always equal those of the stream."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class _Current:
    """The current world's objects under these names, looked up at each use."""

    def __init__(self, **calls: Any) -> None:  # noqa: ANN401 - stands for any module
        self.__dict__.update(calls)


def _look_up(
    _sql: object, _publication: str, relations: Iterable[int], _known: object = None
) -> dict[int, Lookup]:
    return {
        oid: Lookup(TableFacts(KEYS.get(oid, ()), {}), SentTable(cast("Any", _Agreeing()), None))
        for oid in relations
    }


_PUBLICATION = records.PinnedPublication(name="p", oid=1, tables={})
_VERSION = PublicationVersion(1, 1, None, 0, None, None)


def _replaced(emptied: Callable[[Path], Spool]) -> dict[Any, dict[str, Any]]:
    """Return what replaces the real edges, by module or class and name."""
    return {
        cdc.failpoints: {"reach": _reach},
        cdc.source.stream: {"time": _Clock()},
        cdc.sequence.intake: {"Spool": emptied},
        Spool: {"close": Nothing.keep},
        # Some batches of each history are small, and some are not.
        cdc.log.producer_pool: {
            "time": _Clock(),
            "DirectPublisher": _Direct,
            "SMALL_BYTES": _SMALL_BYTES,
            "WIDE_PARTITIONS": _WIDE_PARTITIONS,
        },
        cdc.log.publisher: {
            "time": _Clock(),
            "Producer": lambda settings: Producer(
                World.current.broker, World.current.scheduler, settings
            ),
        },
        cdc.log.consumer: {
            "time": _Clock(),
            "Consumer": lambda _: Consumer(World.current.broker, World.current.lookups),
        },
        cdc.log.absence: {
            **{name: _lookup(name) for name in ("named", "listed", "spans")},
            "pause": _Clock().sleep,
        },
        cdc.daemon.pipeline: {
            "time": _Clock(),
            "Stream": SimulatedStream,
            "incremental_topic": _Current(
                load=lambda *_: IncrementalLog([], [], []), completeness=completeness
            ),
            "SourceMonitor": lambda *_: Nothing(),
        },
        cdc.daemon.takeover: {
            "connect_for_lookups": lambda _: _Catalog(),
            "topics": _Current(admin=lambda _: None),
            "catalog": Nothing(),
            "TopicMonitor": lambda *_: _Quiet(),
            "continuity": _Current(
                start_lsn=lambda _: World.current.slot.confirmed,
                require_same_writer=lambda *_: None,
                check=lambda _, identity, position, *__: World.current.proven(identity, position),
            ),
        },
        cdc.publication.check: {
            "tables_by_oid": lambda *_: set(),
            "read_publication_version": lambda *_: _VERSION,
            "read_pinned_with_tables": lambda *_: (_PUBLICATION, frozenset()),
        },
        cdc.sequence.table_versions: {
            "topics": _Current(data_topic=_refuse, ensure=_refuse),
            "limits": lambda *_: {},
            "look_up": _look_up,
            "current_snapshot": lambda _: "1000000000:1000000000:",
            "Encoder": lambda version, database, name, partitions, *_: _encoder(
                version, database, name, partitions
            ),
        },
    }


@contextlib.contextmanager
def played() -> Iterator[None]:
    """Replace the real edges by the world's within this context."""
    stack = contextlib.ExitStack()
    # One spool for all: creating one takes as long as a session.
    spool = Spool(Path(stack.enter_context(tempfile.TemporaryDirectory())))
    stack.callback(spool.close)

    def emptied(_directory: Path) -> Spool:
        for xid in spool.open_xids:
            spool.abort(xid, xid)
        return spool

    with stack:
        for module, names_ in _replaced(emptied).items():
            for name, value in names_.items():
                stack.enter_context(mock.patch.object(module, name, value))
        yield
