"""`cdc diff`: what changed in a table between two moments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cdc.cli.options import as_json, example, with_config

if TYPE_CHECKING:
    from cdc.config import Config


@click.command(
    epilog=example(
        "cdc diff public.users --from 0/16E9088 --to 0/2A00000",
        "cdc diff public.users --from 2026-11-24T08:00:00Z --to 2026-11-24T09:00:00Z --json",
    )
)
@with_config
@click.argument("table")
@click.option("--from", "first", metavar="PLACE", required=True, help="The earlier state.")
@click.option("--to", "last", metavar="PLACE", required=True, help="The later state.")
@as_json
def diff(_: Config, table: str, first: str, last: str, *, as_json: bool) -> None:
    """Print which rows of TABLE differ between two states of the archive, with both values.

    TABLE is `schema.table`. A state is given as an LSN, a seq, or a time with its zone: the last
    frontier not above it is taken. A row that was deleted and inserted in between counts once,
    with what it was before and after. With --json one object a line. Masked columns are masked
    here too. Exit code 1 if nothing differs.
    """
    from cdc.cli.follow import become  # noqa: PLC0415 - not for --help
    from cdc.runtime import extras  # noqa: PLC0415 - as above

    extras.require("cdc diff", "spark")
    given = ["--from", first, "--to", last, *(["--json"] * as_json), "--", table]
    become("archived", given, "diff", spark=False)
