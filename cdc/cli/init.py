"""`cdc init`: a configuration to start from."""

from __future__ import annotations

import os
from pathlib import Path

import click

from cdc.cli.options import as_json, example, next_step, print_done, print_json
from cdc.errors import ConfigError


@click.command(epilog=example("cdc init --pipeline shop --dsn postgresql://me@localhost/shop"))
@click.argument("path", type=click.Path(path_type=Path), default=Path("lockstep.yaml"))
@click.option("--pipeline", default="shop", show_default=True, help="The pipeline's name.")
@click.option(
    "--dsn",
    default="postgresql://postgres@localhost:5432/postgres",
    show_default=True,
    help="The database, as a libpq URL; keep the password out of it.",
)
@click.option(
    "--bootstrap-servers",
    default="localhost:9092",
    show_default=True,
    help="Kafka brokers, host:port, separated by commas.",
)
@click.option(
    "--table", "tables", multiple=True, help="A table to publish; repeat it. Default: public.*"
)
@click.option("--force", is_flag=True, help="Overwrite the file if it exists.")
@as_json
def init(
    path: Path,
    pipeline: str,
    dsn: str,
    bootstrap_servers: str,
    tables: tuple[str, ...],
    *,
    force: bool,
    as_json: bool,
) -> None:
    """Write a commented configuration to PATH (default lockstep.yaml)."""
    from cdc.config.template import render  # noqa: PLC0415 - not for --help

    values: dict[str, object] = {
        "pipeline": pipeline,
        "source.dsn": dsn,
        "source.tables": tables or ("public.*",),
        "log.bootstrap_servers": bootstrap_servers,
        "control.secret": os.urandom(32).hex(),
    }
    # Another user must not read the secret, nor a password that is added later.
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL)
    try:
        with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)  # of a file that is overwritten, too
            file.write(render(values))
    except FileExistsError as error:
        raise ConfigError(
            f"{path} exists already", hint="edit it, or overwrite it with --force"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", hint="choose another path: cdc init PATH"
        ) from error
    if as_json:
        print_json({"wrote": str(path), "pipeline": pipeline})
        return
    print_done(f"wrote {path}")
    next_step(f"edit {path}, then cdc doctor -c {path} shows what is missing")
