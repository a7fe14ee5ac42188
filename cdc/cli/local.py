"""`cdc local`: the embedded stack from the command line."""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from cdc.cli.options import as_json, example, next_step, print_json
from cdc.runtime.progress import Terminal

if TYPE_CHECKING:
    from cdc.playground.servers.stack import ServerStatus

_SERVERS: Final = ("postgres", "kafka", "redis", "opensearch")
_MAJORS: Final = ("14", "15", "16", "17", "18")
_FOLLOW_SECONDS: Final = 0.3
_INTERRUPTED: Final = 130  # as in shells: ended by SIGINT

_home = click.option(
    "--home",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="LOCKSTEP_HOME",
    default=".lockstep",
    show_default=True,
    help="Folder of data and logs; another folder is another stack.",
)


@click.group(epilog=example("cdc local up", "cdc local up redis", "cdc local status --json"))
def local() -> None:
    """Run Postgres, Kafka, Redis and OpenSearch here, to try out Lockstep.

    Real servers as plain processes on loopback, without containers. They keep running when the
    command ends; cdc local down stops them and keeps their data.
    """


@local.command(
    epilog=example("cdc local up", "cdc local up postgres --pg 16", "cdc local up kafka redis")
)
@click.argument("servers", nargs=-1, type=click.Choice(_SERVERS))
@_home
@click.option("--pg", "pg_major", type=click.Choice(_MAJORS), help="Postgres major.  [default: 17]")
@as_json
def up(servers: tuple[str, ...], home: Path, pg_major: str | None, *, as_json: bool) -> None:
    """Start SERVERS that do not run yet (default: postgres and kafka).

    The first start downloads them, about 60 MB, into a cache that all stacks share. Running servers
    are left unchanged.
    """
    from cdc.playground.servers.stack import DEFAULT_SERVERS, LocalStack  # noqa: PLC0415

    began = time.monotonic()
    stack = LocalStack(home, progress=Terminal())
    major = None if pg_major is None else int(pg_major)
    try:
        ends = stack.up(servers or DEFAULT_SERVERS, pg_major=major)
    except KeyboardInterrupt:
        click.echo("cdc: interrupted; what has arrived is kept", err=True)
        next_step("`cdc local up` continues; `cdc local down` stops what runs")
        # At once: threads that download or wait for a server cannot be interrupted.
        os._exit(_INTERRUPTED)
    if as_json:
        print_json(asdict(ends))
        return
    click.echo(f"up in {time.monotonic() - began:.1f} s")
    _print_table(stack.status())
    given = [("--dsn", ends.postgres_dsn), ("--bootstrap-servers", ends.kafka_bootstrap)]
    known = "".join(f" {option} {value}" for option, value in given if value)
    next_step(f"`cdc init{known}` writes a configuration; `cdc local down` stops them")


@local.command(epilog=example("cdc local status", "cdc local status --json"))
@_home
@as_json
def status(home: Path, *, as_json: bool) -> int:
    """Show what runs, where, and how much memory it takes. Exits with 1 if nothing runs."""
    from cdc.playground.servers.stack import LocalStack  # noqa: PLC0415

    found = LocalStack(home).status()
    running = any(server.running for server in found)
    if as_json:
        print_json([asdict(server) for server in found])
    elif running:
        _print_table(found)
        next_step("`cdc local logs NAME` shows a server's log; `cdc local down` stops them")
    else:
        click.echo(f"nothing runs in {home}")
        next_step("`cdc local up` starts Postgres and Kafka")
    return 0 if running else 1


@local.command(epilog=example("cdc local down", "cdc local down --json"))
@_home
@as_json
def down(home: Path, *, as_json: bool) -> None:
    """Stop what runs. Data, ports and settings are kept for the next up."""
    from cdc.playground.servers.stack import LocalStack  # noqa: PLC0415

    stopped = LocalStack(home).down()
    if as_json:
        print_json({"stopped": stopped})
    elif stopped:
        click.echo(f"stopped {', '.join(stopped)}; the data is in {home}")
        next_step(f"`cdc local up` starts them again; `rm -r {home}` deletes the data")
    else:
        click.echo(f"nothing runs in {home}")
        next_step("`cdc local up` starts Postgres and Kafka")


@local.command(epilog=example("cdc local logs kafka", "cdc local logs postgres -f"))
@click.argument("server", type=click.Choice(_SERVERS))
@_home
@click.option("-n", "--lines", default=40, show_default=True, help="How many of the last lines.")
@click.option("-f", "--follow", is_flag=True, help="Continue with new lines, until Ctrl-C.")
def logs(server: str, home: Path, lines: int, *, follow: bool) -> int:
    """Print the end of SERVER's log."""
    from cdc.playground.servers.home import Home  # noqa: PLC0415

    path = Home(home).log(server)
    if not path.exists():
        click.echo(f"{server} has no log in {home}", err=True)
        next_step(f"`cdc local up {server}` starts it")
        return 1
    _print_log(path, lines, follow=follow)
    return 0


def _print_log(path: Path, lines: int, *, follow: bool) -> None:
    with path.open(encoding="utf-8", errors="replace") as log:
        for line in deque(log, lines):
            click.echo(line, nl=False)
        while follow:
            if line := log.readline():
                click.echo(line, nl=False)
            elif path.stat().st_size < log.tell():  # rotated: by copy and truncate
                log.seek(0)
            else:
                time.sleep(_FOLLOW_SECONDS)


def _print_table(servers: list[ServerStatus]) -> None:
    for server in servers:
        if not server.running:
            click.echo(f"  {server.name:<11} down")
            continue
        click.echo(
            f"  {server.name:<11} {server.version:<7} {server.url:<48} "
            f"pid {server.pid}, {server.memory_mb:.0f} MB"
        )
