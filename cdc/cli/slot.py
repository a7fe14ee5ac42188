"""`cdc slot show|alter|drop`: the replication slot, and what it costs the source."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cdc.cli.options import (
    as_json,
    confirm,
    echo,
    example,
    next_step,
    print_done,
    print_json,
    with_config,
    yes,
)
from cdc.errors import GapError
from cdc.operate.readable import duration, size

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.source.slots import Slot


@click.group(epilog=example("cdc slot show", "cdc slot show --all"))
def slot() -> None:
    """Show, alter or drop the replication slot.

    A slot keeps WAL for its reader, also for one that never comes back: so nothing is lost, but a
    forgotten slot fills a disk.
    """


@slot.command(epilog=example("cdc slot show", "cdc slot show --all --json"))
@with_config
@click.option("--all", "everyone", is_flag=True, help="All logical slots of the server.")
@as_json
def show(config: Config, *, everyone: bool, as_json: bool) -> None:
    """Show the slot's state, its reader, and the WAL that it keeps."""
    from cdc.source.connection import connect  # noqa: PLC0415
    from cdc.source.slots import read_slots  # noqa: PLC0415

    with connect(config) as connection:
        slots = read_slots(connection, None if everyone else config.slot)
    if not slots and not everyone:
        raise GapError(
            f"there is no slot {config.slot}",
            hint="`cdc setup` creates it; `cdc slot show --all` lists all",
        )
    if as_json:
        found = [{**each._asdict(), "ours": each.name == config.slot} for each in slots]
        print_json(found if everyone else found[0])
        return
    for each in slots:
        _print(each)
        if each.name == config.slot:
            _print_copies(config)
    next_step("cdc status shows how far the log is")


def _print(slot: Slot) -> None:
    reader = f"pid {slot.active_pid}" if slot.active_pid else "nobody"
    if slot.active_pid is None and slot.inactive_seconds is not None:
        reader += f", for {duration(slot.inactive_seconds)}"
    room = "no limit" if slot.safe_wal_bytes is None else size(slot.safe_wal_bytes)
    state = slot.wal_status or "unknown"
    if slot.invalidation_reason:
        state += f" ({slot.invalidation_reason})"
    echo(click.style(slot.name, bold=True))
    for name, value in (
        ("database", slot.database),
        ("plugin", slot.plugin),
        ("read by", reader),
        ("state", state),
        ("confirmed", slot.confirmed_flush_lsn),
        ("restarts at", slot.restart_lsn),
        ("keeps", f"{size(slot.retained_bytes or 0)} of WAL"),
        ("lost after", f"{room} more of WAL" if room != "no limit" else room),
        ("failover", _failover(slot)),
        ("two-phase", "on: cdc refuses it" if slot.two_phase else ""),
    ):
        if value:
            echo(f"  {name:<12} {value}")


def _failover(slot: Slot) -> str:
    if slot.synced:
        return "a copy of the primary's" + (", not yet usable" if slot.temporary else "")
    return "standbys may copy it" if slot.failover else "no: it does not survive a promotion"


def _print_copies(config: Config) -> None:
    """Show which of the other hosts that source.dsn names have the slot."""
    from cdc.operate.doctor.failover import ask_hosts  # noqa: PLC0415 - not for --help

    for host in ask_hosts(config):
        if host.server is None:
            state = "does not answer"
        elif not host.server.in_recovery:
            continue
        elif host.slot is None:
            state = "has no copy"
        else:
            state = f"{_failover(host.slot)}, up to {host.slot.confirmed_flush_lsn}"
        echo(f"  {'standby':<12} {host.place}: {state}")


@slot.command(epilog=example("cdc slot alter --failover", "cdc slot alter --no-two-phase"))
@with_config
@click.option(
    "--failover/--no-failover",
    default=None,
    help="Whether standbys may copy it, so that it survives a promotion (Postgres 17 and later).",
)
@click.option(
    "--no-two-phase", is_flag=True, help="Decode prepared transactions at their end (18 and later)."
)
@as_json
def alter(config: Config, *, failover: bool | None, no_two_phase: bool, as_json: bool) -> None:
    """Change the pipeline's slot; no daemon may be running, and no standby waiting."""
    from cdc.publication.objects import alter_slot  # noqa: PLC0415 - not for --help

    if failover is None and not no_two_phase:
        raise click.UsageError("choose what to change: --failover, --no-failover or --no-two-phase")
    alter_slot(config, config.slot, failover=failover, two_phase=False if no_two_phase else None)
    if as_json:
        print_json({"altered": config.slot})
        return
    print_done(f"altered the slot {config.slot}")
    next_step("cdc slot show, then cdc run")


@slot.command(epilog=example("cdc slot drop", "cdc slot drop forgotten_slot --yes"))
@with_config
@click.argument("name", required=False)
@yes
@as_json
def drop(config: Config, name: str | None, *, yes: bool, as_json: bool) -> None:
    """Drop the slot NAME (default: the pipeline's), and release the WAL it keeps.

    Changes that were not read from it are lost; a log that was fed from it cannot be continued.
    """
    from cdc.publication import objects as source_setup  # noqa: PLC0415
    from cdc.source.connection import connect  # noqa: PLC0415
    from cdc.source.slots import read_slot  # noqa: PLC0415

    name = name or config.slot
    with connect(config) as connection:
        slot = read_slot(connection, name)
        if slot is None:
            raise GapError(f"there is no slot {name}", hint="`cdc slot show --all` lists them")
        kept = size(slot.retained_bytes or 0)
        if not yes:
            confirm(f"Drop the slot {name} and the {kept} of WAL it keeps?")
        source_setup.drop_slot(connection, name)
    if as_json:
        print_json({"dropped": name, "released_bytes": slot.retained_bytes})
        return
    print_done(f"dropped the slot {name}; it released {kept} of WAL")
    next_step("cdc teardown removes the rest of the pipeline, cdc doctor shows what is left")
