"""The network between Postgres and the daemon: cut, silent, slow, fragmented."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from cdc.config import Config, Log, Source
from cdc.errors import UnavailableError
from cdc.runtime.background import BackgroundThread
from cdc.snapshot.incremental.fetcher import Fetcher
from cdc.source import connection as connection_module
from cdc.source.chunks import ChunkReader, InProgress
from cdc.source.lookups import current_snapshot
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.load import TABLES, Load
from tests.fixtures.proxy import Proxy
from tests.fixtures.servers import Database
from tests.fixtures.witness import Witness

NewProxy = Callable[[str, int], Proxy]

# After this long without a reply a walsender gives up; nothing reports that to the daemon.
_WAL_SENDER_TIMEOUT_SECONDS = 5
# To notice a dead peer: a few times the server's own timeout.
_NOTICE_SECONDS = 120.0
_SMALL = {"max_events": 200, "max_wait_ms": 50}


class ProxiedDaemon:
    """A pipeline whose daemon reaches Postgres through a proxy only."""

    def __init__(
        self, new: NewPipeline, new_proxy: NewProxy, seconds: int = _WAL_SENDER_TIMEOUT_SECONDS
    ) -> None:
        self.pipeline: PipelineUnderTest = new(*TABLES, batch=_SMALL)
        database = self.pipeline.database
        timeout = f"SET wal_sender_timeout = '{seconds}s'"
        database.execute(f"ALTER DATABASE {database.name} {timeout}")
        self.witness = Witness(self.pipeline)
        with database.connect() as connection:
            self.proxy = new_proxy(connection.info.host, connection.info.port)
        dsn = psycopg.conninfo.make_conninfo(database.dsn, host="127.0.0.1", port=self.proxy.port)
        self.daemon = self.pipeline.start(
            config_file=self.pipeline.write("proxied.yaml", source__dsn=dsn)
        )

    def moves(self, events: int = 50, seconds: float = 120.0) -> float:
        """Wait until `events` further events are published; return the seconds."""
        seen = self.daemon.metric("lockstep_events_total")
        return wait_until(
            lambda: self.daemon.metric("lockstep_events_total") >= seen + events,
            f"nothing moves, the daemon is {self.daemon.state}",
            seconds,
        )

    def reconnects(self, times: int) -> None:
        """Wait until it has reconnected `times` times."""
        wait_until(
            lambda: self.daemon.metric("lockstep_reconnects_total") >= times, "it does not notice"
        )


@pytest.fixture
def proxied(pipeline: NewPipeline, new_proxy: NewProxy) -> ProxiedDaemon:
    return ProxiedDaemon(pipeline, new_proxy)


@pytest.fixture
def kept(pipeline: NewPipeline, new_proxy: NewProxy) -> ProxiedDaemon:
    """Its walsender is more patient than a busy machine makes a process wait."""
    return ProxiedDaemon(pipeline, new_proxy, 30)


def test_a_lookup_that_a_frozen_server_does_not_answer_ends(
    database: Database, new_proxy: NewProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel, here the proxy, acknowledges keepalives, so that TCP notices nothing."""
    monkeypatch.setattr(connection_module, "LOOKUP_SECONDS", 1.0)
    with database.connect() as connection:
        proxy = new_proxy(connection.info.host, connection.info.port)
    dsn = psycopg.conninfo.make_conninfo(database.dsn, host="127.0.0.1", port=proxy.port)
    config = Config(pipeline="shop", source=Source(dsn=dsn), log=Log(bootstrap_servers="x:1"))
    with connection_module.connect_for_lookups(config) as sql:
        assert current_snapshot(sql)
        proxy.freeze()
        with pytest.raises(UnavailableError, match="which transactions are visible"):
            current_snapshot(sql)
        assert sql.closed


def test_a_chunk_that_a_frozen_server_does_not_send_ends_with_its_session(
    database: Database, new_proxy: NewProxy
) -> None:
    """Else the next session, which has the same worker, would wait for it."""
    with database.connect() as connection:
        proxy = new_proxy(connection.info.host, connection.info.port)
    dsn = psycopg.conninfo.make_conninfo(database.dsn, host="127.0.0.1", port=proxy.port)
    config = Config(pipeline="shop", source=Source(dsn=dsn), log=Log(bootstrap_servers="x:1"))
    asked = threading.Event()

    class Asked(ChunkReader):
        def in_progress(self) -> InProgress:
            proxy.freeze()
            asked.set()
            return super().in_progress()

    worker = BackgroundThread()
    fetcher = Fetcher(worker, lambda: Asked(config))
    barrier: Any = SimpleNamespace(is_due=lambda _: True)
    fetcher.poll(barrier)
    assert asked.wait(60)
    fetcher.close()
    assert worker.submit(lambda: "the next session's").result(60)
    worker.close()


def test_connections_that_are_reset_again_and_again_lose_nothing(proxied: ProxiedDaemon) -> None:
    proxied.daemon.wait_ready()
    with Load(proxied.pipeline.database.dsn, seed=1):
        for number in range(1, 4):
            proxied.moves()
            proxied.proxy.cut()
            proxied.reconnects(number)
        proxied.moves()
    proxied.witness.check()


def test_a_network_that_is_away_is_waited_for(proxied: ProxiedDaemon) -> None:
    proxied.daemon.wait_ready()
    with Load(proxied.pipeline.database.dsn, seed=2):
        proxied.moves()
        proxied.proxy.refusing = True
        proxied.proxy.cut()
        proxied.daemon.wait_state("reconnecting")
        tries = proxied.proxy.accepted
        wait_until(lambda: proxied.proxy.accepted >= tries + 2, "it gave up")
        assert proxied.daemon.health()["status"] == 503
        proxied.proxy.refusing = False
        proxied.moves()
    proxied.witness.check()


def test_a_half_open_connection_is_noticed_and_left(proxied: ProxiedDaemon) -> None:
    """The peer disappears and no reset ever comes: only the silence shows it."""
    proxied.daemon.wait_ready()
    with Load(proxied.pipeline.database.dsn, seed=3, steps_per_second=200):
        proxied.moves()
        proxied.proxy.freeze()
        proxied.moves(seconds=_NOTICE_SECONDS)
    proxied.witness.check()


@pytest.mark.long("waits almost for a timeout")
def test_silence_shorter_than_the_timeout_costs_nothing(kept: ProxiedDaemon) -> None:
    kept.daemon.wait_ready()
    with Load(kept.pipeline.database.dsn, seed=4, steps_per_second=200) as load:
        kept.moves()
        kept.proxy.freeze()
        seen = load.commits
        wait_until(lambda: load.commits > seen + 20, "no load")
        kept.proxy.thaw()
        kept.moves()
    kept.witness.check()
    assert kept.daemon.metric("lockstep_reconnects_total") == 0


@pytest.mark.long("bad lines of other kinds", sample=["crumbs"])
@pytest.mark.parametrize("way", ["crumbs", "slow", "late"])
def test_a_bad_line_is_only_slow(way: str, kept: ProxiedDaemon) -> None:
    """One byte at a time; 60 kB a second; every chunk 50 ms late."""
    setting = {"crumbs": ("fragment_bytes", 1), "slow": ("bytes_per_second", 60_000)}
    setattr(kept.proxy, *setting.get(way, ("delay_seconds", 0.05)))
    kept.daemon.wait_ready()
    with Load(kept.pipeline.database.dsn, seed=5, steps_per_second=100):
        kept.moves(100)
    kept.witness.check()
    assert kept.daemon.metric("lockstep_reconnects_total") == 0
