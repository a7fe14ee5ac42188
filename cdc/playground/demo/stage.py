"""The run of the demo from an empty folder to the closing line.

Servers start while the schema is created in the first of them, with rows in its tables; then the
followers, whose programs take some seconds to load and which wait for the log; publication, slot
and topics; the daemon, which copies those rows first; the generator, which writes meanwhile; and
the listeners that feed the view. At the end the generator
stops first, the proof is made with daemon and followers running, and everything that was started is
stopped, each after the last that needs it. Ctrl-C ends the run early in the same way; a second one
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
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psutil
import psycopg
import yaml
from psycopg.conninfo import make_conninfo

from cdc.config import Config, load
from cdc.log import names
from cdc.operate.commands.setup import set_up
from cdc.playground.demo.browser import open_when_served
from cdc.playground.demo.chaos import Chaos
from cdc.playground.demo.child import DaemonChild, FollowersChild, follower_settings
from cdc.playground.demo.flow import Flow, Kill
from cdc.playground.demo.generator_process import Generator
from cdc.playground.demo.home import claimed
from cdc.playground.demo.proof import DemoProof, prove
from cdc.playground.demo.readers import Listener, ReportReader, StatePoller
from cdc.playground.demo.schema import DDL, OLD
from cdc.playground.demo.stores import FollowersProof, prove_followers
from cdc.playground.demo.view import DemoView, Scene
from cdc.playground.demo.views import VIEWS
from cdc.playground.servers import ports
from cdc.playground.servers.stack import Endpoints, LocalStack
from cdc.runtime import extras, spark
from cdc.runtime.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

    from cdc.playground.servers.home import Home

_T = TypeVar("_T")
_PIPELINE: Final = "demo"
_SERVERS: Final = ("postgres", "kafka")
_STORES: Final = ("redis", "opensearch")
_TURN_SECONDS: Final = 0.05
_FIRST_SECONDS: Final = 60.0
_INTERRUPTED: Final = 130  # as in shells


@dataclass(frozen=True)
class DemoOptions:
    home: Path
    seconds: float | None
    chaos: bool
    followers: bool
    seed: int
    rate: float
    keep: bool
    browser: bool = False  # open the console in one


@dataclass
class DemoOutcome:
    """The contents of the closing line."""

    options: DemoOptions
    proof: DemoProof | None = None  # None when a second Ctrl-C skipped it
    seconds: float = 0.0
    first_change_seconds: float | None = None  # from the start of the command
    late_ms: tuple[int, int, int] = (0, 0, 0)  # median, 99th percentile, maximum
    kills: list[Kill] = field(default_factory=list)
    followers: FollowersProof | None = None  # None where there are none, or Ctrl-C skipped it
    every_store_seconds: float | None = None  # from the start, until each store had a change

    @property
    def failed(self) -> bool:
        """Whether a proof was made and failed."""
        return self.proof is not None and not self.equal

    @property
    def equal(self) -> bool:
        """Whether everything that was requested was proved."""
        followed = self.followers is None or self.followers.equal
        return self.proof is not None and self.proof.equal and followed


class InterruptedEarly(Exception):  # noqa: N818 - not an error: the user's wish
    """Ctrl-C before there was anything to prove."""


class Interrupts:
    """Ctrl-C and similar signals: the first requests an end, the second is KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._take)

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested.is_set():
            raise KeyboardInterrupt
        self.requested.set()

    @staticmethod
    def ignore() -> None:
        """Ignore interrupts during the cleanup."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)


class DemoRun:
    """One run; `run` returns its outcome or raises the reason that there is none."""

    def __init__(self, options: DemoOptions, view: DemoView, progress: Progress) -> None:
        self._options = options
        self._view = view
        self._progress = progress
        self._outcome = DemoOutcome(options)
        self._interrupts = Interrupts()
        self._entered = psutil.Process().create_time()

    def run(self) -> DemoOutcome:
        with claimed(self._options.home, keep=self._keeps) as home, ExitStack() as stack:
            try:
                config, followers = self._prepare(home, stack)
                self._run(home, config, followers, stack)
            finally:
                self._interrupts.ignore()
        return self._outcome

    def _keeps(self) -> bool:
        return self._options.keep or self._outcome.failed

    # -- before the first change ------------------------------------------------------------

    def _prepare(self, home: Home, stack: ExitStack) -> tuple[Config, FollowersChild | None]:
        """Start the servers and the followers, create the schema, and set up the pipeline."""
        servers = LocalStack(home.path, progress=self._progress, tied=True)
        up = _started(lambda: self._start_servers(servers))
        stack.callback(servers.down)
        dsn = ""
        while not up.done():
            if self._interrupts.requested.is_set():
                # Downloads can't be interrupted. The stack is tied to this process and ends with
                # it.
                self._view.say("demo: interrupted; the servers that were starting are stopped")
                self._view.close()
                os._exit(_INTERRUPTED)
            url = servers.endpoints().postgres_dsn
            if url and not dsn:
                # Not up yet, or not quite; once all servers are up, this is tried for the last
                # time.
                with suppress(psycopg.OperationalError):
                    dsn = _make_schema(url)
            time.sleep(_TURN_SECONDS)
        ends = up.result()
        dsn = dsn or _make_schema(str(ends.postgres_dsn))
        config = _configure(home, dsn, ends, followed=self._options.followers)
        followers = None
        if self._options.followers:
            followers = FollowersChild(home, _file(home))
            stack.callback(followers.stop)
            followers.start()
        for _ in set_up(config):
            if self._interrupts.requested.is_set():
                raise InterruptedEarly
        return config, followers

    def _start_servers(self, servers: LocalStack) -> Endpoints:
        """Start the servers, and prepare what followers need in addition to Spark."""
        if not self._options.followers:
            return servers.up(_SERVERS)
        ends = servers.up((*_SERVERS, *_STORES))
        spark.jars(self._progress)
        spark.make_classes(self._progress)
        return ends

    # -- while changes flow -----------------------------------------------------------------

    def _run(
        self, home: Home, config: Config, followers: FollowersChild | None, stack: ExitStack
    ) -> None:
        options = self._options
        daemon = DaemonChild(home, _file(home), config)
        stack.callback(daemon.stop)
        daemon.start()
        if config.console.listen:
            url = f"http://{config.console.listen}/"
            self._view.say(f"demo: watch it in a browser: {url}")
            if options.browser:
                open_when_served(url)
        flow = Flow(names.frontier_topic(config.prefix), config.followers)
        if followers is not None:
            reader = ReportReader(config, flow)
            stack.callback(reader.close)
            reader.start()
        generator = Generator(home, config.source.dsn, options.seed, options.rate)
        stack.callback(generator.stop)
        listener, poller = Listener(config, flow), StatePoller(daemon)
        for thread in (listener, poller):
            stack.callback(thread.close)
            thread.start()
        # No progress lines from here on: lines about restarts would garble the screen.
        servers = LocalStack(home.path)
        chaos = None
        if options.chaos:
            chaos = Chaos(servers, daemon, followers, flow, options.seed)
        title, began = self._title(), time.time()

        def turn() -> None:
            """Supervise, check for failures, show."""
            daemon.supervise()
            if followers is not None:
                followers.supervise()
            listener.check()
            now, written = time.time(), generator.written
            scene = Scene(
                flow, title, began, now, written, poller.answer, daemon.pid, daemon.starts
            )
            self._view.show(scene)
            time.sleep(_TURN_SECONDS)

        self._run_for(turn, flow, generator, chaos)
        self._outcome.seconds = time.time() - began
        generator.stop()
        self._prove(config, turn)
        with flow.lock:
            if flow.followed_at is not None:
                self._outcome.every_store_seconds = flow.followed_at - self._entered
            self._outcome.kills = list(flow.kills)
            self._outcome.late_ms = (*flow.overall_lateness_ms(), round(flow.worst_late_ms))

    def _title(self) -> str:
        title = f"Lockstep demo: Postgres → Kafka, seed {self._options.seed}"
        if self._options.followers:
            title = title.replace("Kafka", "Kafka → Delta, Redis, OpenSearch, views")
        return title + ", with kill -9" * self._options.chaos

    def _run_for(
        self, turn: Callable[[], None], flow: Flow, generator: Generator, chaos: Chaos | None
    ) -> None:
        """Run for the requested time, and until the last kill is recovered from.

        Changes start when the first rows of the snapshot have arrived: they are after its
        consistent point then, while the rest of it is still copied. The time, and kills, start with
        the first change; where none arrives, the time starts after a minute.
        """
        seconds = self._options.seconds
        began = time.monotonic() + _FIRST_SECONDS
        while not self._interrupts.requested.is_set():
            turn()
            generator.check()
            if flow.tables:
                generator.start()
            if chaos is not None:
                chaos.check()
            if flow.first_at is not None and self._outcome.first_change_seconds is None:
                self._outcome.first_change_seconds = flow.first_at - self._entered
                began = time.monotonic()
                if chaos is not None:
                    chaos.start()
            if seconds is not None and time.monotonic() - began >= seconds:
                break
        if chaos is not None:
            chaos.over.set()
            while chaos.is_alive():
                turn()
            chaos.check()

    def _prove(self, config: Config, turn: Callable[[], None]) -> None:
        """Prove it while view and supervisor run; a second Ctrl-C skips it."""
        self._view.say("the generator has stopped; comparing the log with the database …")
        proof = self._in_background(turn, lambda: prove(config))
        self._outcome.proof = proof
        if proof is None or proof.frontier is None or not config.followers:
            return
        self._view.say("… and what the followers' stores hold, as soon as they are there …")
        reached = proof.frontier.lsn
        self._outcome.followers = self._in_background(
            turn, lambda: prove_followers(config, reached)
        )

    @staticmethod
    def _in_background(turn: Callable[[], None], call: Callable[[], _T]) -> _T | None:
        """Call it in a thread while the turns continue; return None where Ctrl-C skips it."""
        result = _started(call)
        try:
            while not result.done():
                turn()
        except KeyboardInterrupt:
            return None
        return result.result()


def _started(call: Callable[[], _T]) -> Future[_T]:
    """Start the call in a thread that does not outlive this process."""
    future: Future[_T] = Future()

    def fulfil() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=fulfil, daemon=True).start()
    return future


def _make_schema(url: str) -> str:
    """Create the demo's database on the server, with its initial rows; return its DSN."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE demo TEMPLATE template0")
    dsn = make_conninfo(url, dbname="demo")
    with psycopg.connect(dsn) as connection:
        connection.execute(DDL)
        connection.execute(OLD)
    return dsn


def _file(home: Home) -> Path:
    """Return the pipeline's configuration file."""
    return home.path / "lockstep.yaml"


def _configure(home: Home, dsn: str, ends: Endpoints, *, followed: bool) -> Config:
    """Write the pipeline's configuration and return it as the daemon will read it."""
    file = _file(home)
    settings: dict[str, Any] = {
        "pipeline": _PIPELINE,
        "source": {"dsn": dsn, "tables": ["public.*"]},
        "log": {"bootstrap_servers": ends.kafka_bootstrap},
        # One task: more tasks take longer to start than this few rows take to copy.
        "snapshot": {"mode": "initial", "runner": "local", "max_parallel": 1},
        # On two cores, changes that share a Kafka transaction leave time for Spark to start.
        "batch": {"linger_ms": 50},
        "control": {"secret": os.urandom(32).hex()},
        "http": {"listen": f"{ports.LOOPBACK}:{ports.choose(home.remembered_ports())}"},
    }
    if extras.is_installed("console"):
        taken = {*home.remembered_ports(), int(settings["http"]["listen"].rpartition(":")[2])}
        settings["console"] = {"listen": f"{ports.LOOPBACK}:{ports.choose(taken)}"}
    if followed:
        settings["views"] = VIEWS
        settings["followers"] = follower_settings(home, ends)
    file.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return load(file)
