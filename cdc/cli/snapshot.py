"""`cdc snapshot`: read tables again while the daemon streams, or take the initial snapshot."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from cdc.cli.options import (
    as_json,
    echo,
    example,
    next_step,
    print_done,
    print_json,
    print_unchanged,
    print_waiting,
    print_warning,
    wait_options,
    with_config,
)

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.snapshot.incremental.commands import Do
    from cdc.snapshot.incremental.records import IncrementalRecord, Key


class DefaultCommand(click.Group):
    """A group whose first member need not be named: `cdc snapshot TABLE` is `… start TABLE`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {*self.commands, *ctx.help_option_names}
        if not args or args[0] not in known:
            args = ["start", *args]
        return super().parse_args(ctx, args)


_EXAMPLES = (
    "cdc snapshot public.orders",
    "cdc snapshot 'public.*' --wait",
    "cdc snapshot public.orders --where \"region = 'eu'\"",
    "cdc snapshot public.orders --keys '[1, 2, 3]'",
    "cdc snapshot list",
)


@click.group(cls=DefaultCommand, epilog=example(*_EXAMPLES))
def snapshot() -> None:
    """Read tables again while the daemon streams: `cdc snapshot TABLE`.

    The daemon reads each in chunks by its key, between a low and a high watermark in the stream,
    and publishes the rows as `op r`. Changes made meanwhile take precedence. Nothing is locked, no
    transaction stays open, and a daemon that stops continues where it was; where the key is masked,
    from the first row.
    """


@snapshot.command(epilog=example("cdc snapshot start public.orders", *_EXAMPLES))
@with_config
@click.argument("tables", metavar="[TABLE]...", nargs=-1)
@click.option("--where", metavar="SQL", help="Only rows for which this holds.")
@click.option(
    "--keys",
    metavar="JSON",
    help="Only rows with these keys: a list of values, or of lists where the key has more columns.",
)
@click.option(
    "--replace",
    is_flag=True,
    help="Empty the table in the log and in the followers by a truncate (`op t`) first, then read "
    "its rows again. Removes rows that only they have.",
)
@wait_options
@click.option(
    "--initial", is_flag=True, help="Take a new pipeline's initial snapshot, and do not stream."
)
@as_json
def start(
    config: Config,
    tables: tuple[str, ...],
    *,
    where: str | None,
    keys: str | None,
    replace: bool,
    wait: bool,
    timeout: float | None,
    initial: bool,
    as_json: bool,
) -> int:
    """Read TABLEs again (`schema.table`, `*` for any text); the word `start` may be left out.

    With --wait exits 0 when everything is read, 1 when a snapshot failed or was stopped; with
    --timeout 75 when it is not finished in time, 69 when that is because no daemon reads the slot.
    """
    if timeout is not None and not wait:
        raise click.UsageError("--timeout needs --wait")
    if initial:
        if tables or where or keys or replace:
            raise click.UsageError("--initial takes every table, as configured")
        from cdc.cli.initial import initial as take  # noqa: PLC0415 - not for --help

        path = click.get_current_context().params["config_path"]
        return take(config, path, as_json=as_json)
    if not tables:
        raise click.UsageError("name a table, or --initial; `cdc snapshot list` shows what runs")
    from cdc.operate.commands import snapshots  # noqa: PLC0415 - not for --help

    if replace and (where or keys):
        raise click.UsageError(
            "--replace empties the complete table, so it takes no --where and no --keys"
        )
    streams = snapshots.daemon_streams(config)
    asked = snapshots.start(config, tables, where=where, keys=_keys(keys), empty_first=replace)
    if wait:
        found = snapshots.wait(config, list(asked), timeout=timeout, report=print_waiting)
        _print(found, as_json=as_json)
        return int(any(record.state != "done" for record in found))
    if as_json:
        print_json([{"id": number, "table": name} for number, name in asked.items()])
        return 0
    for number, name in asked.items():
        print_done(f"asked for {name}: snapshot {number}")
    if not streams:
        print_warning("no daemon streams: it starts when one does")
    next_step("cdc snapshot list")
    return 0


def _keys(text: str | None) -> tuple[Key, ...] | None:
    if text is None:
        return None
    try:
        given = json.loads(text, parse_float=str, parse_int=str)
    except ValueError as error:
        raise click.UsageError(f"--keys is no JSON: {error}") from error
    if not isinstance(given, list) or not given:
        raise click.UsageError('--keys takes a list of keys, as [1, 2] or [[1, "a"]]')
    rows = [each if isinstance(each, list) else [each] for each in given]
    if any(isinstance(value, (dict, list)) or value is None for row in rows for value in row):
        raise click.UsageError("a key's values are numbers, texts and booleans")
    return tuple(tuple(str(value) for value in row) for row in rows)


def _control(do: Do, about: str, *examples: str) -> None:
    @snapshot.command(do, help=about, epilog=example(*examples))
    @with_config
    @click.argument("number", metavar="[ID]", required=False)
    @as_json
    def control(config: Config, number: str | None, *, as_json: bool) -> None:
        from cdc.operate.commands import snapshots  # noqa: PLC0415 - not for --help

        meant = snapshots.control(config, do, number)
        if as_json:
            print_json({"asked": do, "ids": meant})
            return
        print_done(f"asked to {do} {', '.join(meant)}")
        next_step("cdc snapshot list")


_control(
    "pause",
    "Pause an incremental snapshot, or all of them; chunks in flight are finished.",
    *("cdc snapshot pause", "cdc snapshot pause 3f9a1c20"),
)
_control("resume", "Resume a paused incremental snapshot, or all of them.", "cdc snapshot resume")
_control(
    "stop",
    "Stop an incremental snapshot, or all of them; its rows that are in the log stay. With the ID"
    " of one that has failed: acknowledge it, so that the verdict is without it.",
    "cdc snapshot stop 3f9a1c20",
)


@snapshot.command("list", epilog=example("cdc snapshot list", "cdc snapshot list --json"))
@with_config
@as_json
def list_(config: Config, *, as_json: bool) -> None:
    """List incremental snapshots: id, table, state, rows, estimated total, cause of a wait."""
    from cdc.snapshot.incremental import topic  # noqa: PLC0415 - not for --help

    _print(topic.read(config), as_json=as_json)


def _print(records: list[IncrementalRecord], *, as_json: bool) -> None:
    if as_json:
        also = ("estimate", "where", "withheld", "began_at_us", "at_us")
        print_json(
            [each.summary | {name: getattr(each, name) for name in also} for each in records]
        )
        return
    for record in records:
        of = f" of about {record.estimate:,}" if record.active and record.estimate else ""
        seconds = max(0.0, (record.at_us - record.began_at_us) / 1e6)
        echo(
            f"{click.style(record.id, bold=True)}  {record.name}  {record.state}"
            f"  {record.rows:,} rows{of} in {seconds:.1f} s"
            + (f"  {click.style(record.why, dim=True)}" if record.why else "")
        )
    if not records:
        print_unchanged("the log has no incremental snapshot")
        next_step("cdc snapshot TABLE")
