"""`cdc console`: the pipeline in a browser."""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from cdc.cli.options import echo, example, next_step, with_config

if TYPE_CHECKING:
    from cdc.config import Config

_LISTEN: Final = "127.0.0.1:8600"


@click.command(
    epilog=example(
        "cdc console",
        "cdc console --listen 127.0.0.1:9000",
        "cdc console --allow-actions",
        "cdc console --listen 0.0.0.0:8600 --token-file token --host cdc.example.com",
        "cdc console --listen 0.0.0.0:8600 --host cdc.example.com --oidc-issuer "
        "https://accounts.example.com --oidc-audience lockstep --viewer group:eng "
        "--allow-actions --actor group:oncall",
    )
)
@with_config
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Where it listens; port 0 takes a free one.  [default: console.listen, or 127.0.0.1:8600]",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="Ask every viewer for the token in this file. Required unless only this machine reaches "
    "the address, or --oidc-issuer is given. With both either is enough.  [default: "
    "console.token_file]",
)
@click.option(
    "--oidc-issuer",
    metavar="URL",
    help="Ask every viewer for a token that this issuer has signed, which a proxy forwards.  "
    "[default: console.oidc.issuer]",
)
@click.option(
    "--oidc-audience",
    metavar="ID",
    help="For whom that token must be made.  [default: console.oidc.audience]",
)
@click.option(
    "--oidc-header",
    metavar="NAME",
    help="The header that has it.  [default: console.oidc.header, or Authorization]",
)
@click.option(
    "--oidc-keys",
    metavar="URL|FILE",
    help="The issuer's public keys.  [default: console.oidc.keys, or as the issuer describes]",
)
@click.option(
    "--viewer",
    "viewers",
    multiple=True,
    metavar="KIND:NAME",
    help="Who may view: email:…, group:… or sub:…. May be repeated.  [default: "
    "console.oidc.viewers, or all to whom the issuer gives a token]",
)
@click.option(
    "--actor",
    "actors",
    multiple=True,
    metavar="KIND:NAME",
    help="Who of them may run commands with --allow-actions. May be repeated.  [default: "
    "console.oidc.actors]",
)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Another name by which it is called, such as a proxy's, in addition to console.hosts. May "
    "be repeated.",
)
@click.option(
    "--allow-actions",
    "acts",
    is_flag=True,
    help="Let every viewer, or with an issuer the actors, run the commands that the page shows: "
    "snapshot, pause, resume, stop, rebuild, and send or discard what was given up.",
)
@click.option("--child", is_flag=True, hidden=True, help="As `cdc run` starts it.")
def console(
    config: Config,
    *,
    listen: str | None,
    token_file: Path | None,
    oidc_issuer: str | None,
    oidc_audience: str | None,
    oidc_header: str | None,
    oidc_keys: str | None,
    viewers: tuple[str, ...],
    actors: tuple[str, ...],
    hosts: tuple[str, ...],
    acts: bool,
    child: bool,
) -> None:
    """Show the pipeline in a browser, until Ctrl-C: verdict, flow, slot, tables and changes.

    Read-only without --allow-actions, and a process of its own: it measures as `cdc status` does,
    in the background, reads the log as `cdc tail` does, and works while Postgres, Kafka or the
    daemon is down. With console.listen `cdc run` serves it, too. Without an archive it indexes the
    topics in which keys are searched, in files of console.index_dir. Needs the extra `console`. See
    docs/CONSOLE.md; for its streams of tables, docs/PUSH.md.
    """
    from cdc.runtime import extras  # noqa: PLC0415 - not for --help

    extras.require("cdc console", "console")
    from cdc.console import server  # noqa: PLC0415 - as above
    from cdc.console.child import end_with_parent  # noqa: PLC0415 - as above
    from cdc.operate.logs import setup_logging  # noqa: PLC0415 - as above
    from cdc.runtime import waiting  # noqa: PLC0415 - as above

    # A crash below Python would end it without a message.
    faulthandler.enable()
    waiting.show_with(None)  # the page shows it
    # The daemon puts a child's lines into its own log.
    setup_logging(config.log_level, as_json=False if child else None)
    if child:
        end_with_parent()

    given = config.console
    token = server.read_token(token_file or (Path(given.token_file) if given.token_file else None))
    named = {
        "issuer": oidc_issuer,
        "audience": oidc_audience,
        "header": oidc_header,
        "keys": oidc_keys,
        "viewers": viewers,
        "actors": actors,
    }
    named = {name: each for name, each in named.items() if each}
    oidc = server.checked(msgspec.structs.replace(given.oidc, **named), acts=acts)
    is_guarded = token is not None or oidc is not None
    listening = server.bind(listen or given.listen or _LISTEN, is_guarded=is_guarded)
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host

    def started() -> None:
        echo(f"the console is at http://{shown}:{port}/")
        if not child:
            next_step("open it in a browser; Ctrl-C ends it")
        sys.stdout.flush()

    path = Path(click.get_current_context().params["config_path"]).absolute()
    names = (*given.hosts, *hosts)
    server.serve(config, path, listening, names, token, oidc, acts=acts, started=started)
