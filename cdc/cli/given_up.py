"""What `cdc webhook` and `cdc queue` share: events that were given up, shown and decided on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from cdc.cli.options import confirm, echo, next_step, print_done, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdc.config import Config
    from cdc.log.group_records import UndeliveredRecord

ids: Final = click.argument("ids", metavar="[ID]...", nargs=-1)


def show(records: Sequence[UndeliveredRecord], what: str, decide: str) -> None:
    """Print what `what` gave up, and `decide` as the next step if something is undecided."""
    for each in records:
        decided = f" by {each.decided_by}" if each.decided_by else ""
        place = f"{each.topic} [{each.partition}] {each.offset}"
        echo(f"{each.id}  {place}  {each.why} ({each.attempts} attempts)  {each.state}{decided}")
    if any(each.state == "undelivered" for each in records):
        next_step(decide)
    elif not records:
        echo(f"{what} has given up nothing")


def discard(
    config: Config, group: str, chosen: tuple[str, ...], why: str, *, yes: bool, as_json: bool
) -> None:
    """Discard these events, or all; asks first, with `why` that matters."""
    from cdc.deliver import undelivered  # noqa: PLC0415 - not for --help

    if not yes:
        confirm(f"Discard {', '.join(chosen) or 'all that it gave up'}? {why}")
    done = undelivered.discard(config, group, chosen)
    if as_json:
        print_json(done)
    else:
        print_done(f"discarded {len(done)} events; the decision is recorded")
