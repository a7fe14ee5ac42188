"""`cdc console`: the pipeline in a browser."""

from __future__ import annotations

import faulthandler
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cdc.cli.options import echo, example, next_step, with_config

if TYPE_CHECKING:
    from cdc.config import Config


@click.command(
    epilog=example(
        "cdc console",
        "cdc console --listen 127.0.0.1:9000",
        "cdc console --listen 0.0.0.0:8600 --token-file token --host cdc.example.com",
    )
)
@with_config
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:8600",
    show_default=True,
    help="Where it listens; port 0 takes a free one.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="Ask every viewer for the token in this file. Required unless only this machine reaches "
    "the address.",
)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Another name by which it is called, such as a proxy's. May be repeated.",
)
def console(config: Config, listen: str, token_file: Path | None, hosts: tuple[str, ...]) -> None:
    """Show the pipeline in a browser, until Ctrl-C: verdict, flow, slot, tables and changes.

    Read-only, and a process of its own: it measures as `cdc status` does, in the background, reads
    the log as `cdc tail` does, and works while Postgres, Kafka or the daemon is down. Needs the
    extra `console`. See docs/CONSOLE.md; for its streams of tables, docs/PUSH.md.
    """
    from cdc.runtime import extras  # noqa: PLC0415 - not for --help

    extras.require("cdc console", "console")
    from cdc.console import serving  # noqa: PLC0415 - as above
    from cdc.runtime import waiting  # noqa: PLC0415 - as above

    # A crash below Python would end it without a message.
    faulthandler.enable()
    waiting.show_with(None)  # the page shows it

    token = serving.read_token(token_file)
    listening = serving.bind(listen, token)
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host

    def started() -> None:
        echo(f"the console is at http://{shown}:{port}/")
        next_step("open it in a browser; Ctrl-C ends it")

    path = Path(click.get_current_context().params["config_path"])
    serving.serve(config, path, listening, hosts, token, started=started)
