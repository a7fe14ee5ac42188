"""The run of the demo from an empty folder to the closing line.

Servers come up while the schema is made in the first of them; then publication, slot and topics,
the daemon, the generator, and the listener that feeds the view. At the end the generator stops
first, the proof is made with the daemon running, and everything that was started is stopped, in the
order in which each may still be needed. Ctrl-C ends the run early in the same way; a second one
skips the proof.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import psutil
import psycopg
import yaml
from psycopg.conninfo import make_conninfo

from cdc.config import load
from cdc.control.setup import set_up
from cdc.demo.chaos import Chaos
from cdc.demo.daemon import Daemon
from cdc.demo.flow import Flow, Kill
from cdc.demo.home import claimed
from cdc.demo.proof import Proof, prove
from cdc.demo.readers import Asker, Listener
from cdc.demo.schema import DDL
from cdc.demo.view import Scene, View
from cdc.demo.writing import Generator
from cdc.local import ports
from cdc.local.progress import Progress
from cdc.local.stack import Endpoints, LocalStack
from cdc.log import names

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

    from cdc.config import Config
    from cdc.local.home import Home

_PIPELINE: Final = "demo"
_SERVERS: Final = ("postgres", "kafka")
_TURN_SECONDS: Final = 0.05
_INTERRUPTED: Final = 130  # as shells say it


@dataclass(frozen=True)
class Options:
    """What the command was asked for."""

    home: Path
    seconds: float | None
    chaos: bool
    seed: int
    rate: float
    keep: bool


@dataclass
class Outcome:
    """What the closing line tells."""

    options: Options
    proof: Proof | None = None  # None when a second Ctrl-C skipped it
    seconds: float = 0.0
    first_change_seconds: float | None = None  # from the start of the command
    late_ms: tuple[int, int, int] = (0, 0, 0)  # median, 99th percentile, maximum
    kills: list[Kill] = field(default_factory=list)


class InterruptedEarly(Exception):  # noqa: N818 - not an error: the user's wish
    """Ctrl-C before there was anything to prove."""


class Interrupts:
    """Ctrl-C and its kin: the first asks for an end, the second is KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._take)

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked.is_set():
            raise KeyboardInterrupt
        self.asked.set()

    @staticmethod
    def ignore() -> None:
        """Let nothing interrupt the cleaning up."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)


class Stage:
    """One run; `run` returns its outcome or raises why there is none."""

    def __init__(self, options: Options, view: View, progress: Progress) -> None:
        self._options = options
        self._view = view
        self._progress = progress
        self._outcome = Outcome(options)
        self._interrupts = Interrupts()
        self._entered = psutil.Process().create_time()

    def run(self) -> Outcome:
        with claimed(self._options.home, keep=self._options.keep) as home, ExitStack() as stack:
            try:
                config = self._prepare(home, stack)
                self._play(home, config, stack)
            finally:
                self._interrupts.ignore()
        return self._outcome

    # -- before the first change ------------------------------------------------------------

    def _prepare(self, home: Home, stack: ExitStack) -> Config:
        """Bring the servers up, the schema and the pipeline into being."""
        servers = LocalStack(home.path, progress=self._progress, tied=True)
        up: Future[Endpoints] = Future()
        threading.Thread(
            target=_settle, args=(up, lambda: servers.up(_SERVERS)), daemon=True
        ).start()
        stack.callback(servers.down)
        dsn = ""
        while not up.done():
            if self._interrupts.asked.is_set():
                # Downloads can't be broken off. The stack is tied to this process and goes with it.
                self._view.say("demo: interrupted; the servers that were starting are stopped")
                self._view.close()
                os._exit(_INTERRUPTED)
            url = servers.endpoints().postgres_dsn
            if url and not dsn:
                # Not up yet, or not quite; once all servers are, this is tried for the last time.
                with suppress(psycopg.OperationalError):
                    dsn = _make_schema(url)
            time.sleep(_TURN_SECONDS)
        ends = up.result()
        dsn = dsn or _make_schema(str(ends.postgres_dsn))
        config = _configure(home, dsn, str(ends.kafka_bootstrap))
        for _ in set_up(config):
            self._check_interrupt()
        return config

    def _check_interrupt(self) -> None:
        if self._interrupts.asked.is_set():
            raise InterruptedEarly

    # -- while changes flow -----------------------------------------------------------------

    def _play(self, home: Home, config: Config, stack: ExitStack) -> None:
        options = self._options
        daemon = Daemon(home, home.path / "lockstep.yaml", config)
        stack.callback(daemon.stop)
        daemon.start()
        generator = Generator(home, config.source.dsn, options.seed, options.rate)
        stack.callback(generator.stop)
        flow = Flow(names.frontier_topic(config.prefix))
        listener, asker = Listener(config, flow), Asker(daemon)
        for thread in (listener, asker):
            stack.callback(thread.close)
            thread.start()
        # Silent from here on: lines about restarts would tear the picture.
        servers = LocalStack(home.path)
        chaos = Chaos(servers, daemon, flow, options.seed) if options.chaos else None
        began = time.time()
        turn = self._turn(flow, began, daemon, generator, listener, asker)
        self._flow_on(turn, flow, generator, chaos)
        self._outcome.seconds = time.time() - began
        generator.stop()
        self._prove(config, turn)
        self._note(flow)

    def _turn(
        self,
        flow: Flow,
        began: float,
        daemon: Daemon,
        generator: Generator,
        listener: Listener,
        asker: Asker,
    ) -> Callable[[], None]:
        """Return what is done over and over: supervise, look for failures, show."""
        title = f"Lockstep demo: Postgres → Kafka, seed {self._options.seed}"
        if self._options.chaos:
            title += ", with kill -9"

        def turn() -> None:
            daemon.supervise()
            listener.check()
            scene = Scene(
                flow,
                title,
                began,
                time.time(),
                generator.written,
                asker.answer,
                daemon.pid,
                daemon.starts,
            )
            self._view.show(scene)
            time.sleep(_TURN_SECONDS)

        return turn

    def _flow_on(
        self, turn: Callable[[], None], flow: Flow, generator: Generator, chaos: Chaos | None
    ) -> None:
        """Let changes flow for as long as was asked, and until the last kill is recovered from."""
        seconds = self._options.seconds
        began = time.monotonic()
        if chaos is not None:
            chaos.start()
        while not self._interrupts.asked.is_set():
            turn()
            generator.check()
            if chaos is not None:
                chaos.check()
            if flow.first_at is not None and self._outcome.first_change_seconds is None:
                self._outcome.first_change_seconds = flow.first_at - self._entered
            if seconds is not None and time.monotonic() - began >= seconds:
                break
        if chaos is not None:
            chaos.stop()
            while chaos.is_alive():
                turn()
            chaos.check()

    def _prove(self, config: Config, turn: Callable[[], None]) -> None:
        """Prove it beside the view and the supervisor; a second Ctrl-C goes without."""
        self._view.say("the generator has stopped; comparing the log with the database …")
        proof: Future[Proof] = Future()
        threading.Thread(target=_settle, args=(proof, lambda: prove(config)), daemon=True).start()
        try:
            while not proof.done():
                turn()
        except KeyboardInterrupt:
            return
        self._outcome.proof = proof.result()

    def _note(self, flow: Flow) -> None:
        with flow.lock:
            self._outcome.kills = list(flow.kills)
            self._outcome.late_ms = (*flow.overall_lateness_ms(), round(flow.worst_late_ms))


def _settle(future: Future[object], call: Callable[[], object]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
        future.set_exception(error)


def _make_schema(url: str) -> str:
    """Create the demo's database on the server; return its DSN."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE demo TEMPLATE template0")
    dsn = make_conninfo(url, dbname="demo")
    with psycopg.connect(dsn) as connection:
        connection.execute(DDL)
    return dsn


def _configure(home: Home, dsn: str, bootstrap: str) -> Config:
    """Write the pipeline's configuration and return it as the daemon will read it."""
    file = home.path / "lockstep.yaml"
    settings = {
        "pipeline": _PIPELINE,
        "source": {"dsn": dsn, "tables": ["public.*"]},
        "log": {"bootstrap_servers": bootstrap},
        "snapshot": {"mode": "never"},  # the tables are new
        "http": {"listen": f"{ports.LOOPBACK}:{ports.choose(home.remembered_ports())}"},
    }
    file.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return load(file)
