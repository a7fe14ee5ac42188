"""`cdc token`: the LSN up to which the source has been written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cdc.cli.options import as_json, example, next_step, print_json, with_config

if TYPE_CHECKING:
    from cdc.config import Config


@click.command(epilog=example("cdc token", 'cdc wait --token "$(cdc token)" --for cache'))
@with_config
@as_json
def token(config: Config, *, as_json: bool) -> None:
    """Print a token of everything that is committed in the source by now.

    It is an LSN and its database: 0/16B3748@7431…/shop. Applications take theirs on the connection
    that has committed, with lockstep.Client.
    """
    from cdc.source.connection import connect  # noqa: PLC0415 - not for --help
    from cdc.source.token import take  # noqa: PLC0415

    with connect(config) as connection:
        taken = take(connection)
    if as_json:
        print_json({"token": str(taken), **taken._asdict()})
        return
    click.echo(str(taken))
    next_step("cdc wait --token TOKEN waits until followers have applied it")
