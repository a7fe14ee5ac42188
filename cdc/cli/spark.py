"""`cdc spark`: the arguments for spark-submit."""

from __future__ import annotations

from pathlib import Path

import click

from cdc.cli.options import as_json, example, next_step, print_json
from cdc.runtime.progress import Terminal


@click.group(
    epilog=example("cdc spark jars", "cdc spark app follow", "cdc spark pack lockstep.zip")
)
def spark() -> None:
    """Prepare spark-submit: our applications, the jars that Spark lacks, our code for a cluster."""


@spark.command(
    epilog=example(
        "cdc spark jars",
        "cdc spark jars --packages",
        "cdc spark jars --json",
    )
)
@click.option("--packages", is_flag=True, help="Print Maven coordinates instead; fetch nothing.")
@as_json
def jars(*, packages: bool, as_json: bool) -> None:
    """Fetch the jars that Spark lacks (Delta, the Kafka source) and print their paths.

    In the form for spark-submit: spark-submit --jars "$(cdc spark jars)". Every jar is checked
    against its sha256. With --packages Spark fetches them itself, at every start.
    """
    from cdc.runtime import spark as files  # noqa: PLC0415 - not for --help

    found = files.coordinates() if packages else [str(path) for path in files.jars(Terminal())]
    if as_json:
        print_json(found)
    else:
        click.echo(",".join(found))


@spark.command(epilog=example("cdc spark conf", "cdc spark conf --job", "cdc spark conf --json"))
@click.option("--job", is_flag=True, help="Also the settings of the driver's JVM for our own jobs.")
@as_json
def conf(*, job: bool, as_json: bool) -> None:
    """Print the settings that a Spark session needs for our mirrors, in the form for spark-submit.

    spark-submit $(cdc spark conf) --jars "$(cdc spark jars)" app.py: `read_as_of` and Delta's SQL
    work in it, and times are UTC. With --job also for our own applications: Spark logs only
    warnings, and its JVM ends when memory runs out.
    """
    from cdc.runtime import spark as files  # noqa: PLC0415 - not for --help

    if as_json:
        print_json(files.conf(quiet=job))
    else:
        click.echo(" ".join(files.conf_options(quiet=job)))


@spark.command(epilog=example("cdc spark app follow", "cdc spark app follow --json"))
@click.argument("name", type=click.Choice(["follow", "rebuild", "snapshot", "archive", "compact"]))
@as_json
def app(name: str, *, as_json: bool) -> None:
    """Print the path of the application NAME, in the form for spark-submit.

    It is installed with the package, so this path is correct after `pip install` and in a checkout:
    spark-submit --jars "$(cdc spark jars)" "$(cdc spark app follow)" --config lockstep.yaml.
    """
    from cdc.runtime import spark as files  # noqa: PLC0415 - not for --help

    path = str(files.job(name))
    if as_json:
        print_json({"app": name, "path": path})
    else:
        click.echo(path)


@spark.command(epilog=example("cdc spark pack lockstep.zip", "cdc spark pack lockstep.zip --json"))
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
@as_json
def pack(target: Path, *, as_json: bool) -> None:
    """Write our own code into the zip TARGET, for a cluster's --py-files.

    It holds Python only: other packages that we import (lockstep-cdc[spark]'s dependencies) must be
    installed on every worker.
    """
    from cdc.runtime import spark as files  # noqa: PLC0415 - not for --help

    many = files.pack(target)
    if as_json:
        print_json({"path": str(target), "files": many})
        return
    click.echo(f"{target}: {many} files")
    app_path = files.job("follow")
    next_step(f"spark-submit --py-files {target} {app_path} --config lockstep.yaml")
