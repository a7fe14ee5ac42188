"""The network between Postgres and the daemon: cut, silent, slow, fragmented."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest

from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.load import TABLES, Load
from tests.fixtures.proxy import Proxy
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
