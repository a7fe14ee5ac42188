"""What a campaign does to a pipeline: one function per kind of fault, on every boundary.

Each injects its fault and repairs what would not recover by itself; it does not check whether
anything is lost. It returns its kind, by which the campaign counts.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import psycopg

from tests.faults.crew import Crew

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.playground.servers.stack import LocalStack
    from tests.fixtures.daemon import PipelineUnderTest
    from tests.fixtures.proxy import Proxy


class Ward:
    """Everything that faults are injected into."""

    def __init__(
        self,
        pipeline: PipelineUnderTest,
        stack: LocalStack,
        crew: Crew,
        proxies: dict[str, Proxy],
        chance: random.Random,
    ) -> None:
        self.pipeline = pipeline
        self.stack = stack
        self.crew = crew
        self.proxies = proxies
        self.chance = chance

    def while_it_lasts(self, low: float, high: float) -> None:
        time.sleep(self.chance.uniform(low, high))


def kill_daemon(ward: Ward) -> str:
    """Kill the working daemon, or at times the standby."""
    works = ward.chance.random() < 0.85
    daemon = ward.crew.working if works else ward.crew.waiting
    ward.crew.forgive(daemon)
    daemon.kill()
    return "daemon killed" if works else "standby killed"


def freeze_daemon(ward: Ward) -> str:
    """Stop the working daemon; half the time the standby takes over, and it wakes as a zombie."""
    daemon = ward.crew.working
    daemon.freeze()
    try:
        if ward.chance.random() < 0.5:
            ward.while_it_lasts(0.1, 0.8)
            return "daemon stopped and continued"
        with suppress(psycopg.Error):
            _terminate_walsender(ward)
        ward.while_it_lasts(0.7, 1.5)
        return "daemon replaced and continued"
    finally:
        daemon.thaw()


def terminate_walsender(ward: Ward) -> str:
    with suppress(psycopg.Error):
        _terminate_walsender(ward)
    return "walsender terminated"


def _terminate_walsender(ward: Ward) -> None:
    pid = ward.pipeline.slot("active_pid")
    if pid is not None:
        ward.pipeline.query("SELECT pg_terminate_backend(%s)", pid)


def freeze_walsender(ward: Ward) -> str:
    pid = None
    with suppress(psycopg.Error):
        pid = ward.pipeline.slot("active_pid")
    if pid is not None:
        with _stopped(pid):
            ward.while_it_lasts(0.1, 0.8)
    return "walsender stopped and continued"


def kill_server(name: str) -> Callable[[Ward], str]:
    def kill(ward: Ward) -> str:
        ward.stack[name].kill()
        ward.while_it_lasts(0.0, 0.4)
        ward.stack.start(name)
        return f"{name} killed"

    return kill


def restart_postgres(ward: Ward) -> str:
    """Stop it in pg_ctl's fast or immediate mode; fast waits for walsenders to catch up."""
    how = ward.chance.choice((signal.SIGINT, signal.SIGQUIT))
    process = ward.stack["postgres"].state.process
    process.signal(how)
    if not process.wait(5.0):
        ward.stack["postgres"].kill()
    ward.stack.start("postgres")
    return "postgres shut down fast" if how is signal.SIGINT else "postgres shut down at once"


def freeze_broker(ward: Ward) -> str:
    with _stopped(ward.stack["kafka"].pid):
        ward.while_it_lasts(0.1, 1.5)
    return "kafka stopped and continued"


@contextmanager
def _stopped(pid: int | None) -> Iterator[None]:
    assert pid is not None
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def cut(to: str) -> Callable[[Ward], str]:
    def harm(ward: Ward) -> str:
        ward.proxies[to].cut()
        return f"connections to {to} reset"

    return harm


def refuse(to: str) -> Callable[[Ward], str]:
    def harm(ward: Ward) -> str:
        proxy = ward.proxies[to]
        proxy.refusing = True
        proxy.cut()
        ward.while_it_lasts(0.1, 0.6)
        proxy.refusing = False
        return f"{to} refused connections"

    return harm


def silence(to: str) -> Callable[[Ward], str]:
    """Hold all bytes back for a while; then deliver them, or reset the connection."""

    def harm(ward: Ward) -> str:
        proxy = ward.proxies[to]
        proxy.freeze()
        ward.while_it_lasts(0.1, 0.8)
        if ward.chance.random() < 0.5:
            proxy.cut()
            return f"connections to {to} silent, then reset"
        proxy.thaw()
        return f"connections to {to} silent"

    return harm


def slow(to: str) -> Callable[[Ward], str]:
    def harm(ward: Ward) -> str:
        proxy = ward.proxies[to]
        kind = ward.chance.choice(("late", "in crumbs", "slow"))
        proxy.delay_seconds = 0.02 if kind == "late" else 0.0
        proxy.fragment_bytes = ward.chance.randint(1, 60) if kind == "in crumbs" else 0
        proxy.bytes_per_second = 200_000 if kind == "slow" else 0
        ward.while_it_lasts(0.2, 0.7)
        proxy.delay_seconds, proxy.fragment_bytes, proxy.bytes_per_second = 0.0, 0, 0
        return f"bytes to and from {to} {kind}"

    return harm


# With their weights; a killed broker is admitted again only after its session has expired.
FAULTS: Final[tuple[tuple[int, Callable[[Ward], str]], ...]] = (
    (30, kill_daemon),
    (8, freeze_daemon),
    (12, terminate_walsender),
    (6, freeze_walsender),
    (2, kill_server("kafka")),
    (4, kill_server("postgres")),
    (4, restart_postgres),
    (5, freeze_broker),
    (8, cut("postgres")),
    (8, cut("kafka")),
    (3, refuse("postgres")),
    (3, refuse("kafka")),
    (4, silence("postgres")),
    (4, silence("kafka")),
    (4, slow("postgres")),
    (4, slow("kafka")),
)
# Recovery from these takes seconds.
HEAVY: Final = frozenset({"kafka killed"})
