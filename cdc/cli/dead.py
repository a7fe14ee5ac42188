"""`cdc dead list|show`: events that were too large for their topics, and a complete one."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from cdc.cli.options import as_json, echo, example, next_step, print_json, with_config
from cdc.operate.readable import size

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.log.dead_letters import DeadLetterHead


_REASONS = {"size": "too large for its topic"}


@click.group(epilog=example("cdc dead list", "cdc dead show 1-42 > event.json"))
def dead() -> None:
    """List dead letters, or show a complete one.

    An event too large for its topic is in the topic without its large values, and refers to the
    complete event in the topic of dead letters. Nothing needs to be replayed: the event has its
    place already.
    """


@dead.command("list", epilog=example("cdc dead list", "cdc dead list --json | jq '.[].id'"))
@with_config
@as_json
def list_(config: Config, *, as_json: bool) -> None:
    """List the dead letters: id, commit, position, operation, row, size, and why."""
    from msgspec.structs import asdict  # noqa: PLC0415 - not for --help

    from cdc.log import dead_letter_topic  # noqa: PLC0415

    heads = dead_letter_topic.heads(config)
    if as_json:
        print_json([asdict(head) for head in heads])
        return
    head = None
    for head in heads:
        echo(_line(head))
    if head:
        next_step("cdc dead show ID prints the complete event")
    else:
        echo("there are no dead letters")


def _line(head: DeadLetterHead) -> str:
    at = datetime.fromtimestamp(head.committed_at_us / 1e6, UTC).astimezone()
    return "  ".join(
        (
            click.style(f"{head.id:<10}", bold=True),
            click.style(f"{at:%Y-%m-%d %H:%M:%S}", dim=True),
            click.style(f"{head.commit_lsn:<11} {head.ordinal:>6}", dim=True),
            head.op,
            click.style(f"{head.schema}.{head.table}" if head.table else head.topic, bold=True),
            click.style(head.key or "(no key)", fg="cyan"),
            f"{size(head.bytes)} ({', '.join(head.columns)})",
            _REASONS[head.reason],
        )
    )


@dead.command(epilog=example("cdc dead show 1-42", "cdc dead show 1-42 | jq .after.body"))
@with_config
@click.argument("letter_id", metavar="ID")
def show(config: Config, letter_id: str) -> None:
    """Write the complete event of the dead letter ID, as it would be in its topic."""
    from cdc.log import dead_letter_topic  # noqa: PLC0415 - not for --help

    click.echo(dead_letter_topic.event(config, letter_id))
