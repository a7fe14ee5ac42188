"""`cdc spark`: what spark-submit is to be given."""

from __future__ import annotations

from pathlib import Path

import click

from cdc.cli.options import as_json as json_option
from cdc.cli.options import example, next_step, print_json


@click.group(epilog=example("cdc spark jars", "cdc spark pack lockstep.zip"))
def spark() -> None:
    """Prepare spark-submit: the jars that Spark lacks, our code for a cluster."""


@spark.command(
    epilog=example(
        "cdc spark jars",
        "cdc spark jars --packages",
        "cdc spark jars --json",
    )
)
@click.option("--packages", is_flag=True, help="Print Maven coordinates instead; fetch nothing.")
@json_option
def jars(*, packages: bool, as_json: bool) -> None:
    """Fetch the jars that Spark lacks (Delta, the Kafka source) and print their paths.

    As spark-submit takes them: spark-submit --jars "$(cdc spark jars)". Every jar is checked
    against its sha256. With --packages Spark fetches them itself, at every start.
    """
    from cdc.local import spark as files  # noqa: PLC0415 - not for --help
    from cdc.local.progress import Terminal  # noqa: PLC0415

    found = files.coordinates() if packages else [str(path) for path in files.jars(Terminal())]
    if as_json:
        print_json(found)
    else:
        click.echo(",".join(found))


@spark.command(epilog=example("cdc spark pack lockstep.zip"))
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
def pack(target: Path) -> None:
    """Write our own code into the zip TARGET, for a cluster's --py-files.

    It holds Python only: what we import besides (lockstep-cdc[spark]'s dependencies) is to be
    installed on every worker.
    """
    from cdc.local import spark as files  # noqa: PLC0415 - not for --help

    many = files.pack(target)
    click.echo(f"{target}: {many} files")
    next_step(f"spark-submit --py-files {target} {files.job('snapshot')} --config lockstep.yaml")
