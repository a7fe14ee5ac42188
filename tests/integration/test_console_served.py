"""The console that `cdc run` serves: it costs the daemon nothing, whatever happens to it."""

from __future__ import annotations

import signal

import psutil

from tests.fixtures.console import ConsoleClient, port_in
from tests.fixtures.daemon import Daemon, NewPipeline, wait_until

_TABLE = "CREATE TABLE t (id int PRIMARY KEY)"
_CONSOLE = {"listen": "127.0.0.1:0"}


def children(daemon: Daemon) -> list[psutil.Process]:
    """Return the consoles that a daemon runs."""
    found = psutil.Process(daemon.process.pid).children()
    return [each for each in found if "console" in each.cmdline()]


def incidents(shown: ConsoleClient) -> set[str]:
    """Return the kinds of what the console lists."""
    measured = shown.get("/api/status")[1]["measured"]
    return {each["kind"] for each in measured["incidents"]} if measured else set()


def served(daemon: Daemon) -> ConsoleClient:
    wait_until(lambda: port_in(daemon.log), "the daemon reports no console")
    return ConsoleClient(port_in(daemon.log))


def test_a_daemon_serves_a_console_starts_it_again_and_ends_it(pipeline: NewPipeline) -> None:
    line = pipeline(_TABLE, console=_CONSOLE)
    line.never_time_out()
    daemon = line.start().wait_ready()
    shown = served(daemon)
    # The daemon's port is 0 in the file: the console got the real one.
    wait_until(lambda: shown.verdict()["level"] == "ok", "the daemon is not seen to be well")
    assert shown.ask("/api/status", method="POST")[0] == 405
    [first] = children(daemon)
    assert first.nice() == min(19, psutil.Process(daemon.process.pid).nice() + 10)
    first.send_signal(signal.SIGKILL)
    wait_until(lambda: daemon.log.count("the console is at") == 2, "it is not started again")
    assert "exit code -9" in daemon.log
    wait_until(lambda: served(daemon).ask("/")[0] == 200, "it does not answer")
    daemon.wait_ready()
    assert daemon.metric("lockstep_reconnects_total") == 0
    line.database.execute(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
        f" WHERE slot_name = '{line.config.slot}'"
    )
    wait_until(lambda: "reconnect" in incidents(served(daemon)), "the reconnect is not shown")
    daemon.wait_ready()
    [second] = children(daemon)
    assert daemon.term() == 0
    wait_until(lambda: not second.is_running(), "the console has survived its daemon")


def test_a_console_ends_with_a_daemon_that_is_killed_and_one_that_cannot_listen_stops_none(
    pipeline: NewPipeline,
) -> None:
    line = pipeline(_TABLE, console=_CONSOLE)
    daemon = line.start().wait_ready()
    busy = served(daemon).port
    taken = line.write("taken.yaml", console__listen=f"127.0.0.1:{busy}")
    standby = line.start(config_file=taken)
    standby.wait_state("standby")
    wait_until(lambda: "cannot listen on" in standby.log, "the reason is not in the log")
    wait_until(lambda: "exit code 78" in standby.log, "the end is not in the log")
    [child] = children(daemon)
    daemon.kill()
    wait_until(lambda: not child.is_running(), "the console has survived its daemon")
    standby.wait_ready()
    wait_until(lambda: port_in(standby.log) == busy, "it does not listen once it can")
