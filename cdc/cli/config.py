"""`cdc config check|show`: check and show the configuration, without connecting to anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cdc.cli.options import as_json, config_file, echo, example, next_step, print_done, print_json

if TYPE_CHECKING:
    from pathlib import Path


@click.group(epilog=example("cdc config check", "cdc config show"))
def config() -> None:
    """Check or show the configuration; nothing is connected to."""


@config.command(epilog=example("cdc config check -c lockstep.yaml", "cdc config check --json"))
@config_file
@as_json
def check(config_path: Path, *, as_json: bool) -> None:
    """Check every field, and report all errors at once.

    Exits 0 when the configuration is good and 78 when it is not.
    """
    from cdc.config import read  # noqa: PLC0415 - not for --help

    effective = read(config_path)
    if as_json:
        print_json({"path": str(config_path), "pipeline": effective.config.pipeline, "ok": True})
        return
    print_done(f"{config_path}: the pipeline {effective.config.pipeline} is configured correctly")
    next_step("cdc doctor checks the servers that it names")


@config.command(epilog=example("cdc config show", "LOCKSTEP_LOG_PARTITIONS=8 cdc config show"))
@config_file
@as_json
def show(config_path: Path, *, as_json: bool) -> None:
    """Show every field's effective value and where it comes from; secrets are masked."""
    from cdc.config import read  # noqa: PLC0415 - not for --help
    from cdc.config import show as rows_of  # noqa: PLC0415

    rows = rows_of(read(config_path))
    if as_json:
        print_json([{"field": at, "value": value, "from": origin} for at, value, origin in rows])
        return
    widths = [max(len(str(row[i])) for row in rows) for i in (0, 1)]
    for at, value, origin in rows:
        shown = ", ".join(value) if isinstance(value, list) else str(value)
        shown = "" if value is None else shown
        echo(f"{at:<{widths[0]}}  {shown:<{widths[1]}}  {click.style(origin, dim=True)}")
    next_step("cdc doctor checks the servers that it names")
