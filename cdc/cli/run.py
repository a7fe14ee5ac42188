"""`cdc run`: the daemon."""

from __future__ import annotations

import faulthandler
from typing import TYPE_CHECKING

import click

from cdc.cli.options import example, with_config
from cdc.runtime import waiting

if TYPE_CHECKING:
    from cdc.config import Config


@click.command(epilog=example("cdc run -c lockstep.yaml"))
@with_config
@click.option(
    "--log-format",
    type=click.Choice(["auto", "json", "text"]),
    default="auto",
    show_default=True,
    help="Log lines for people or for programs; auto decides by the terminal.",
)
def run(config: Config, log_format: str) -> int:
    """Run the daemon: from the slot into the log, until it is stopped.

    On a new pipeline it first copies the rows that the tables have (snapshot.mode).

    It keeps no state of its own: it resumes from the log, so it may be killed at any time. A second
    one for the same pipeline waits as standby and takes over. SIGTERM or Ctrl-C stops it after the
    open Kafka transaction; health and metrics are served at http.listen.
    """
    from cdc.daemon import process  # noqa: PLC0415 - heavy, and not for --help
    from cdc.operate.logs import setup_logging  # noqa: PLC0415

    # A crash below Python would end the daemon without a message.
    faulthandler.enable()
    waiting.show_with(None)  # the log reports it
    setup_logging(config.log_level, as_json={"json": True, "text": False}.get(log_format))
    return process.run(config, click.get_current_context().params["config_path"])
