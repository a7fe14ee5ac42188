"""`cdc table add|remove|list`: what a running pipeline captures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cdc.cli.options import (
    Duration,
    as_json,
    did,
    example,
    next_step,
    print_json,
    waited,
    with_config,
)

if TYPE_CHECKING:
    from cdc.config import Config


@click.group(epilog=example("cdc table add public.orders", "cdc table list"))
def table() -> None:
    """Add a table to a running pipeline, remove one, or list what is captured."""


@table.command(epilog=example("cdc table add public.orders"))
@with_config
@click.argument("tables", metavar="TABLE...", nargs=-1, required=True)
@click.option("--no-snapshot", is_flag=True, help="Capture changes only, not the rows there are.")
@click.option("--wait", is_flag=True, help="Return when the rows are read.")
@click.option(
    "--timeout", type=Duration(), help="With --wait: give up after so long, such as 30s or 5m."
)
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
        raise click.UsageError("--timeout is of --wait, and --wait waits for a snapshot")
    added = control.add(config, tables, read=not no_snapshot)
    if as_json:
        print_json([{"table": each.table, "snapshot": each.snapshot} for each in added])
    else:
        for each in added:
            did(f"added {each.table}" + (f": snapshot {each.snapshot}" if each.snapshot else ""))
    failed = False
    if wait:
        from cdc.operate.commands import snapshots  # noqa: PLC0415 - not for --help

        numbers = [each.snapshot for each in added if each.snapshot]
        found = snapshots.wait(config, numbers, timeout=timeout, tell=waited)
        for record in found:
            waited(f"snapshot {record.id} of {record.name} is {record.state}")
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

    gone = control.remove(config, tables)
    if as_json:
        print_json(gone)
        return
    for each in gone:
        did(f"took {each} out; the log goes on without")
    next_step("cdc table list")


@table.command("list", epilog=example("cdc table list", "cdc table list --json"))
@with_config
@as_json
def list_(config: Config, *, as_json: bool) -> None:
    """List the captured tables, with their size and an estimate of their rows."""
    from cdc.operate.commands import tables as control  # noqa: PLC0415 - not for --help
    from cdc.operate.findings import size  # noqa: PLC0415

    found = control.captured(config)
    if as_json:
        keep = ("schema", "table", "rows", "bytes")
        print_json([{name: getattr(each, name) for name in keep} for each in found])
        return
    for each in found:
        rows = f"about {each.rows:,} rows" if each.rows or not each.bytes else "not counted yet"
        click.echo(f"{each}  {rows}, {size(each.bytes)}")
    next_step("cdc snapshot TABLE reads one again")
