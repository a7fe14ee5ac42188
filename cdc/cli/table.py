"""`cdc table add|remove|list`: what a running pipeline captures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cdc.cli.options import (
    as_json,
    echo,
    example,
    next_step,
    print_done,
    print_json,
    print_waiting,
    wait_options,
    with_config,
)
from cdc.operate.readable import size

if TYPE_CHECKING:
    from cdc.config import Config


@click.group(epilog=example("cdc table add public.orders", "cdc table list"))
def table() -> None:
    """Add a table to a running pipeline, remove one, or list what is captured."""


@table.command(epilog=example("cdc table add public.orders"))
@with_config
@click.argument("tables", metavar="TABLE...", nargs=-1, required=True)
@click.option("--no-snapshot", is_flag=True, help="Capture changes only, not the rows there are.")
@wait_options
@as_json
def add(
    config: Config,
    tables: tuple[str, ...],
    *,
    no_snapshot: bool,
    wait: bool,
    timeout: float | None,
    as_json: bool,
) -> int:
    """Add TABLEs to the publication, and have the daemon read the rows that they have.

    source.tables must match them. Publication and command are one transaction, so the rows are read
    as of the position from which on changes are streamed: nothing is missing and nothing is
    duplicated.

    With --wait exits 0 when everything is read, 1 when it failed; with --timeout 75 when it is not
    finished in time, 69 when that is because no daemon reads the slot.
    """
    from cdc.operate.commands import tables as control  # noqa: PLC0415 - not for --help

    if (wait and no_snapshot) or (timeout is not None and not wait):
        raise click.UsageError("--timeout needs --wait, and --wait waits for a snapshot")
    added = control.add(config, tables, read=not no_snapshot)
    if as_json:
        print_json([{"table": name, "snapshot": number} for name, number in added.items()])
    else:
        for name, number in added.items():
            print_done(f"added {name}" + (f": snapshot {number}" if number else ""))
    failed = False
    if wait:
        from cdc.operate.commands import snapshots  # noqa: PLC0415 - not for --help

        numbers = [*filter(None, added.values())]
        found = snapshots.wait(config, numbers, timeout=timeout, report=print_waiting)
        for record in found:
            print_waiting(f"snapshot {record.id} of {record.name} is {record.state}")
        failed = any(record.state != "done" for record in found)
    if not as_json:
        next_step("cdc snapshot list" if not no_snapshot else "cdc status")
    return int(failed)


@table.command(epilog=example("cdc table remove public.orders"))
@with_config
@click.argument("tables", metavar="TABLE...", nargs=-1, required=True)
@as_json
def remove(config: Config, tables: tuple[str, ...], *, as_json: bool) -> None:
    """Remove TABLEs from the publication; their topics stay unchanged.

    source.exclude must match them. The daemon may run: it is informed that they were removed on
    purpose, so it reports no gap.
    """
    from cdc.operate.commands import tables as control  # noqa: PLC0415 - not for --help

    removed = control.remove(config, tables)
    if as_json:
        print_json(removed)
        return
    for each in removed:
        print_done(f"removed {each}; the log continues without it")
    next_step("cdc table list")


@table.command("list", epilog=example("cdc table list", "cdc table list --json"))
@with_config
@as_json
def list_(config: Config, *, as_json: bool) -> None:
    """List the captured tables, with their size and an estimate of their rows."""
    from cdc.operate.commands import tables as control  # noqa: PLC0415 - not for --help

    found = control.captured(config)
    if as_json:
        keep = ("schema", "table", "rows")
        print_json(
            [{name: getattr(each, name) for name in keep} | {"bytes": n} for each, n in found]
        )
        return
    for each, bytes_ in found:
        rows = f"about {each.rows:,} rows" if each.rows or not bytes_ else "not counted yet"
        echo(f"{each}  {rows}, {size(bytes_)}")
    next_step("cdc snapshot TABLE reads one again")
