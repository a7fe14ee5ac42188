"""`cdc replay`: a range of the past, published to a topic of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cdc.cli.options import as_json, example, with_config

if TYPE_CHECKING:
    from cdc.config import Config


@click.command(
    epilog=example(
        "cdc replay --from 0/16E9088 --to 0/2A00000 --into replay-of-users --table public.users",
        "cdc replay --from beginning --to 2026-11-24T09:00:00Z --into replay-of-all --json",
    )
)
@with_config
@click.option("--from", "first", metavar="PLACE", required=True, help="Events after this place.")
@click.option("--to", "last", metavar="PLACE", required=True, help="Events up to this place.")
@click.option(
    "--table",
    "tables",
    metavar="TABLE",
    multiple=True,
    help="Only events of this table; repeatable.",
)
@click.option("--into", metavar="TOPIC", required=True, help="The topic; created if missing.")
@as_json
def replay(
    _: Config, first: str, last: str, into: str, tables: tuple[str, ...], *, as_json: bool
) -> None:
    """Publish the events between two places of the past to a topic, in seq order, each once.

    A place is an LSN, a seq, a time with its zone, `beginning` or `latest`: the last frontier not
    above it is taken. Events come from the archive, and from the topics after it, with their bytes
    and tombstones; headers have the seq and the topic of each. The topic must be new, or the one of
    the same replay, which then continues where it was stopped or killed. It can't be one of the
    pipeline's own. To fill a store with a state of the past, use `cdc rebuild --as-of`.
    """
    from cdc.cli.follow import become  # noqa: PLC0415 - not for --help
    from cdc.runtime import extras  # noqa: PLC0415 - as above

    extras.require("cdc replay", "spark")
    given = ["--from", first, "--to", last, "--into", into, *(["--json"] * as_json)]
    given += [each for table in tables for each in ("--table", table)]
    become("archived", given, "replay", spark=False)
