"""`cdc topics acknowledge`: continue with topics that differ from the resume record."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cdc.cli.options import (
    as_json,
    confirm_differences,
    example,
    next_step,
    print_done,
    print_json,
    print_unchanged,
    with_config,
    yes,
)

if TYPE_CHECKING:
    from cdc.config import Config


@click.group(epilog=example("cdc topics acknowledge"))
def topics() -> None:
    """Continue with topics that have changed."""


@topics.command(epilog=example("cdc topics acknowledge", "cdc topics acknowledge --yes"))
@with_config
@yes
@as_json
def acknowledge(config: Config, *, yes: bool, as_json: bool) -> None:
    """Accept added partitions and emptied topics, and start a new epoch on them.

    For when the daemon has stopped with exit code 78 because a topic got more partitions, or was
    emptied sooner than log.retention_hours allows. From the new epoch on, a key of a topic with
    more partitions may be in another partition: readers that take order from partitions only must
    first have read everything before it; `seq` orders both. Only while no daemon runs. Asks first.
    """
    from cdc.operate.commands import acknowledge as control  # noqa: PLC0415 - not for --help

    changed = control.survey(config)
    epoch = changed.identity.epoch
    if changed.what:
        question = f"Start epoch {epoch + 1} at seq {changed.position.seq}?"
        confirm_differences(changed.what, question, yes=yes, as_json=as_json)
        epoch = control.acknowledge(config, changed)
    if as_json:
        print_json({"acknowledged": changed.what, "epoch": epoch, "seq": changed.position.seq})
        return
    if not changed.what:
        print_unchanged(f"every topic is as the resume record has it, in epoch {epoch}")
    else:
        print_done(f"epoch {epoch} starts after seq {changed.position.seq}")
    next_step("cdc run")
