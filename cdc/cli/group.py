"""`cdc group`: groups that read the log and acknowledge it: webhooks', and `Client.changes`'."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import click

from cdc.cli.options import as_json, echo, example, next_step, print_done, print_json, with_config

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.log.groups import Start


@click.group(epilog=example("cdc group list", "cdc group seek webhook.billing --to 0/16E9088"))
def group() -> None:
    """List the groups of readers that acknowledge what they have done, move or remove one.

    A webhook's group is named webhook.NAME; applications name theirs in `Client.changes`.
    """


@group.command("list", epilog=example("cdc group list", "cdc group list --json | jq '.[].lag'"))
@with_config
@as_json
def list_(config: Config, *, as_json: bool) -> None:
    """List every group: its members, its tables' topics, and what it has not acknowledged."""
    from cdc.log import group_records, group_states, topics  # noqa: PLC0415 - not for --help

    client, records = topics.admin(config), group_records.read(config).values()
    found = [(each, group_states.state(client, config, each)) for each in records]
    if as_json:
        print_json(
            [
                {
                    "group": state.name,
                    "members": state.members,
                    "topics": sorted(record.topics),
                    "lag": state.lag,
                    "gap": state.gap,
                }
                for record, state in found
            ]
        )
        return
    for record, state in found:
        echo(
            f"{state.name}: {state.members} members, {state.lag:,} offsets are not acknowledged,"
            f" {', '.join(sorted(record.topics))}" + (f"; {state.gap}" if state.gap else "")
        )
    if not found:
        echo("no group has read the log")


@group.command(
    epilog=example(
        "cdc group seek webhook.billing --to beginning",
        "cdc group seek webhook.billing --to 2026-11-24T12:00:00Z",
        "cdc group seek webhook.billing --to 0/16E9088",
    )
)
@with_config
@click.argument("name")
@click.option(
    "--to", "place", required=True, metavar="PLACE", help="beginning, now, an LSN, or a time."
)
@as_json
def seek(config: Config, name: str, place: str, *, as_json: bool) -> None:
    """Let the group NAME, which must have no members, go on at or shortly before PLACE.

    What it receives again it may have done before. Topics that are deleted, or that a webhook is
    configured to read no longer, are left out of the group.
    """
    from cdc.errors import ConfigError  # noqa: PLC0415 - not for --help
    from cdc.log import group_records, groups  # noqa: PLC0415 - as above

    record = group_records.read(config).get(name)
    if record is None:
        raise ConfigError(f"no group {name} has read the log", hint="cdc group list")
    moved = groups.seek(config, record, _start(place))
    if as_json:
        print_json({topic: its.offsets for topic, its in moved.topics.items()})
        return
    print_done(f"the group {name} goes on at {place}")
    next_step("start its members")


@group.command(epilog=example("cdc group remove billing"))
@with_config
@click.argument("name")
@as_json
def remove(config: Config, name: str, *, as_json: bool) -> None:
    """Remove the group NAME, which must have no members and is not needed any more.

    While a group lags, no compacted topic is compacted. A member that starts later begins a new
    group.
    """
    from cdc.errors import ConfigError  # noqa: PLC0415 - not for --help
    from cdc.log import group_records, groups  # noqa: PLC0415 - as above

    if name not in group_records.read(config):
        raise ConfigError(f"no group {name} has read the log", hint="cdc group list")
    if name in map(group_records.webhook_group, config.webhooks):
        raise ConfigError(
            f"{name} is the group of a configured webhook",
            hint="take the webhook out of the configuration first",
        )
    groups.remove(config, name)
    if as_json:
        print_json({"removed": name})
        return
    print_done(f"the group {name} is removed")


def _start(place: str) -> Start:
    from cdc.events import LSN  # noqa: PLC0415 - not for --help

    if place in {"beginning", "now"}:
        return place
    try:
        return LSN.parse(place) if "/" in place else datetime.fromisoformat(place).astimezone()
    except ValueError as error:
        raise click.UsageError(
            f"{place!r} is no place: beginning, now, an LSN like 0/16E9088, or a time like"
            " 2026-11-24T12:00:00Z"
        ) from error
