"""`cdc publication acknowledge`: continue with a publication that was altered manually."""

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
from cdc.operate.readable import listed

if TYPE_CHECKING:
    from cdc.config import Config


@click.group(epilog=example("cdc publication acknowledge"))
def publication() -> None:
    """Continue with a publication that was altered manually."""


@publication.command(
    epilog=example("cdc publication acknowledge", "cdc publication acknowledge --yes")
)
@with_config
@click.option(
    "--no-snapshot",
    is_flag=True,
    help="Do not read the tables again, as where only the publication's owner was changed.",
)
@yes
@as_json
def acknowledge(config: Config, *, no_snapshot: bool, yes: bool, as_json: bool) -> None:
    """Accept the publication as it is, and have the tables concerned read again.

    For when the daemon has stopped with exit code 78 because the publication was altered: what it
    did not publish meanwhile is in no stream. Each table concerned is emptied in the log and read
    again, as by `cdc snapshot TABLE --replace`, once a daemon runs. Only while no daemon runs. Asks
    first.
    """
    from cdc.operate.commands import acknowledge_publication as control  # noqa: PLC0415 - not for --help

    altered = control.survey(config)
    asked: dict[str, str] = {}
    if altered.gaps:
        reading = "" if no_snapshot else f", and read {listed(altered.tables)} again"
        question = f"Accept the publication as it is{reading}?"
        confirm_differences((gap.what for gap in altered.gaps), question, yes=yes, as_json=as_json)
        asked = control.acknowledge(config, altered, read=not no_snapshot)
    if as_json:
        snapshots = [{"id": number, "table": name} for number, name in asked.items()]
        what = [gap.what for gap in altered.gaps]
        print_json({"acknowledged": what, "snapshots": snapshots})
        return
    if not altered.gaps:
        print_unchanged("the publication is as the resume record has it")
    else:
        print_done(f"the log continues with the publication {altered.publication.name} as it is")
    if asked:
        print_done(f"asked for {len(asked)} snapshots, of {listed(list(asked.values()))}")
    next_step("cdc run")
