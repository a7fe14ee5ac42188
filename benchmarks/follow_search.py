"""follow-search: the log into OpenSearch: documents per second in a backlog, commit to visible.

The figure is documents per second of a backlog, each with its seq as version, exactly once; the
result also has the time from a commit to the frontier that a search finds, at 500 single-row
commits a second. The floor is the same rows written to the same node by bulk requests of
opensearch-py's own helper, without a version, a frontier or a log. The run has no peer.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import orjson
from opensearchpy import OpenSearch
from opensearchpy.helpers import bulk

from benchmarks import follow_server, rows
from benchmarks.failure import BenchmarkError
from benchmarks.follow_run import FOLLOWER
from benchmarks.follow_server import RUN, Workload, sink_alone
from cdc.playground.servers.opensearch import OpenSearch as OpenSearchServer
from cdc.playground.servers.stack import LocalStack
from cdc.runtime.artifacts import ArtifactCache, default_cache
from cdc.runtime.progress import Terminal
from lockstep.sinks.contract import Change, Column, Version
from lockstep.sinks.opensearch.mapping import properties
from lockstep.sinks.opensearch.sink import OpenSearchSink
from lockstep.sinks.opensearch.tables import OpenSearchOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cdc.playground.servers.home import ServerState

NAME: Final = "follow-search"
_ALONE: Final = 50_000
_WRITTEN_AT_ONCE: Final = 10_000
# A different text for each row, as long as the workload's.
_ROW: Final = b'{"id":%d,"k":0,"payload":"%0150x","amount":"0.00"}'
_COLUMNS: Final = (
    Column("id", "int8", 20, -1, nullable=False),
    Column("k", "int4", 23, -1, nullable=False),
    Column("payload", "text", 25, -1, nullable=False),
    Column("amount", "numeric", 1700, (10 << 16 | 2) + 4, nullable=False),
)
_VERSION: Final = Version(1, "public", "bench", "bench", ("id",), _COLUMNS, {})
_SETTINGS: Final = {"number_of_replicas": 0}
# The heap of OpenSearch's own start scripts. The embedded stack's, for demo and tests, is 256 MB.
_HEAP: Final = ("-Xms1g", "-Xmx1g")


class StockNode(OpenSearchServer):
    """The embedded node with the memory and the compilers that OpenSearch has by default."""

    def command(self, state: ServerState) -> list[str]:
        small = ("-Xms", "-Xmx", "-XX:TieredStopAtLevel", "-XX:MaxDirectMemorySize")
        program, *given = super().command(state)
        return [program, *_HEAP, *(each for each in given if not each.startswith(small))]


class SearchStore:
    """One node of OpenSearch, as the embedded stack starts it."""

    follower = FOLLOWER

    def __init__(self, url: str, pid: int) -> None:
        self._url = url
        self._client = OpenSearch(url, timeout=120)
        self.section: dict[str, Any] = {"opensearch": {"url": url, "settings": _SETTINGS}}
        self.pids: tuple[int, ...] = (pid,)

    def seq(self) -> int:
        # 404 before there is a record, 503 just after its index was created, 429 when busy.
        how = {"_source_includes": "seq,applying", "ignore": (404, 429, 503)}
        response = self._client.get(index=f"{RUN}-followers", id=self.follower, params=how)
        found = response.get("_source", {})
        return 0 if found.get("applying") or not found.get("seq") else int(found["seq"])

    def check(self, count: int) -> None:
        found = self._client.count(index=f"{RUN}-public.{rows.TABLE}")["count"]
        if found != count:
            raise BenchmarkError(
                f"a search finds {found:,} documents for {count:,} rows",
                hint="the figure would not count",
            )

    def version(self) -> str:
        return str(self._client.info()["version"]["number"])

    def alone(self, _: int) -> tuple[float, dict[str, float]]:
        # The first run meets a server that has compiled nothing yet, so it does not count.
        self._floor()
        alone = self._sink_alone()
        return self._floor(), alone

    def _floor(self) -> float:
        """Return the documents per second of the library's helper into the same fields."""
        self._client.indices.create(
            index="floor",
            body={
                "settings": {"refresh_interval": "-1", **_SETTINGS},
                "mappings": {"properties": properties(_VERSION, {})},
            },
        )
        began = time.monotonic()
        made = (orjson.loads(_ROW % (number, number**20)) for number in range(_ALONE))
        bulk(
            self._client,
            ({"_id": str(row["id"]), "_source": row} for row in made),
            index="floor",
            chunk_size=2_000,
        )
        self._client.indices.refresh(index="floor")
        seconds = time.monotonic() - began
        self._client.indices.delete(index="floor")
        return _ALONE / seconds

    def _sink_alone(self) -> dict[str, float]:
        sink = OpenSearchSink(
            OpenSearchOptions(self._url, "alone", "alone", "alone", settings=_SETTINGS)
        )
        changes = [
            Change(b'{"id":%d}' % number, number, _ROW % (number, number**20), 1, number, 0)
            for number in range(1, _ALONE + 1)
        ]
        shown = sink_alone(sink, _VERSION, changes, _WRITTEN_AT_ONCE, self, "document")
        self._client.indices.delete(index="alone-public.*-g*")
        return shown

    def close(self) -> None:
        self._client.close()


@contextmanager
def running(folder: Path) -> Iterator[SearchStore]:
    """Run an OpenSearch for the duration of the block."""
    stack = LocalStack(folder, tied=True)
    try:
        stack.up([])  # tied: its servers end with this process
        node = StockNode(stack.home, ArtifactCache(default_cache(), Terminal()), Terminal())
        with stack.home.lock():
            node.start()
        store = SearchStore(node.url(), node.pid)
        try:
            yield store
        finally:
            store.close()
    finally:
        stack.down()


_WORKLOAD: Final = Workload(
    name=NAME,
    server="opensearch",
    each="document",
    limit=13_000.0,
    p50_limit_ms=450.0,
    p99_limit_ms=1_200.0,
    rows=300_000,
    floor_by="opensearch-py's helpers.bulk, chunks of 2,000, into the same fields",
    running=running,
)
run: Final = partial(follow_server.run, _WORKLOAD)
