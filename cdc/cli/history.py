"""`cdc history`: every version of one row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cdc.cli.options import as_json, example, with_config

if TYPE_CHECKING:
    from cdc.config import Config


@click.command(
    epilog=example(
        "cdc history public.users 7",
        """cdc history public.order_lines '{"order_id":7,"line":2}'""",
        "cdc history public.users 7 --json",
    )
)
@with_config
@click.argument("table")
@click.argument("key")
@as_json
def history(_: Config, table: str, key: str, *, as_json: bool) -> None:
    """Print every version of the row of TABLE with KEY: when, by which transaction, before, after.

    TABLE is `schema.table`. KEY is the value of a key of one column, or a JSON object of all key
    columns. Versions come from the archive, and those that it does not hold yet from the topic.
    Who made a change, and why, is printed if its transaction has a logical message with the prefix
    `audit`, see docs/ARCHIVE.md. A changed key is the end of one row and the start of
    another. Masked columns are masked here too.
    """
    from cdc.cli.follow import become  # noqa: PLC0415 - not for --help
    from cdc.runtime import extras  # noqa: PLC0415 - as above

    extras.require("cdc history", "spark")
    become("archived", [*(["--json"] * as_json), "--", table, key], "history", spark=False)
