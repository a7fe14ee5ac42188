"""`cdc setup`: publication, topics, slot and the first resume record."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cdc.cli.options import as_json, example, next_step, print_steps, with_config

if TYPE_CHECKING:
    from cdc.config import Config


@click.command(epilog=example("cdc setup"))
@with_config
@click.option(
    "--adopt-slot",
    is_flag=True,
    help="Start at the position of an existing slot, although the log has no record of it.",
)
@as_json
def setup(config: Config, *, adopt_slot: bool, as_json: bool) -> None:
    """Create publication, topics and slot, and write where the log starts.

    May be repeated: it creates what is missing and leaves the rest, and adds tables that
    source.tables newly matches. It never recreates a slot, since that would hide lost changes.
    """
    from cdc.operate.commands.setup import set_up  # noqa: PLC0415 - not for --help

    print_steps(set_up(config, adopt_slot=adopt_slot), as_json=as_json)
    if as_json:
        return
    next_step("cdc run, and in another terminal: cdc tail")
