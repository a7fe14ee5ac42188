"""`cdc view`: maintained views, listed, checked, explained, run, verified and built again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cdc.cli.options import as_json, echo, example, print_json, with_config

if TYPE_CHECKING:
    from cdc.config import Config


@click.group(epilog=example("cdc view check", "cdc view explain order_totals", "cdc view run"))
def view() -> None:
    """Keep the rows of SQL queries equal to Postgres' own answer, in stores.

    See docs/VIEWS.md for what a view can have, and what is refused.
    """


@view.command("list", epilog=example("cdc view list", "cdc view list --json"))
@with_config
@as_json
def list_(config: Config, *, as_json: bool) -> None:
    """List the views, and the followers that hold them."""
    found = [
        {
            "view": name,
            "key": list(each.key),
            "refresh": each.refresh,
            "followers": _holders(config, name),
        }
        for name, each in config.views.items()
    ]
    if as_json:
        print_json(found)
        return
    for each in found:
        where = ", ".join(each["followers"]) or "no follower: name it in a follower's `views`"
        echo(f"{each['view']}  key {', '.join(each['key'])}, refresh {each['refresh']}, in {where}")
    if not found:
        echo("no views are configured: see docs/VIEWS.md")


@view.command(epilog=example("cdc view check", "cdc view check order_totals --json"))
@with_config
@click.argument("names", metavar="[VIEW]...", nargs=-1)
@as_json
def check(config: Config, names: tuple[str, ...], *, as_json: bool) -> None:
    """Find what is wrong in views (default: all), or not supported, and what to write instead.

    Reads the tables' columns from the log. Exits with 78 if a view is refused.
    """
    _become(config, "check", [*names, *(["--json"] * as_json)], names)


@view.command(epilog=example("cdc view explain order_totals", "cdc view explain --json"))
@with_config
@click.argument("names", metavar="[VIEW]...", nargs=-1)
@as_json
def explain(config: Config, names: tuple[str, ...], *, as_json: bool) -> None:
    """Show how changes of each table lead to a view's rows, and what Spark runs for it.

    By the affected keys, or completely, and why.
    """
    _become(config, "explain", [*names, *(["--json"] * as_json)], names)


@view.command(epilog=example("cdc view run", "cdc view run --once"))
@with_config
@click.option("--once", is_flag=True, help="End when all that is in the log now is applied.")
@click.option("--until", metavar="LSN", help="End when this LSN is applied, such as 0/16E9088.")
@as_json
def run(config: Config, until: str | None, *, once: bool, as_json: bool) -> None:
    """Follow with the followers that hold views, and with no others, until stopped.

    The same as `cdc follow` with their names. Their mirrors' followers must run too: a view is
    advanced from one frontier of these to the next.
    """
    from cdc.cli.follow import become, need  # noqa: PLC0415 - not for --help
    from cdc.errors import ConfigError  # noqa: PLC0415 - as above

    names = [name for name, each in config.followers.items() if each.views]
    if not names:
        raise ConfigError(
            "no follower holds a view", hint="name views in a follower's `views`: docs/VIEWS.md"
        )
    need("cdc view run", config, names)
    given = ["--followers", ",".join(names), *(("--until", until) if until else ())]
    become("follow", given + ["--once"] * once + ["--json"] * as_json)


@view.command(epilog=example("cdc view verify", "cdc view verify order_totals --timeout 10"))
@with_config
@click.argument("names", metavar="[VIEW]...", nargs=-1)
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="How long a follower may take to reach the source's present state.",
)
@as_json
def verify(config: Config, names: tuple[str, ...], timeout: float, *, as_json: bool) -> None:
    """Compare views (default: all) with what Postgres itself answers.

    For each Delta follower that holds the view: once it has applied all that is committed now, and
    if the answer does not change meanwhile. Exits with 1 if rows differ.
    """
    given = [*names, "--timeout", str(timeout), *(["--json"] * as_json)]
    _become(config, "verify", given, names)


@view.command(epilog=example("cdc view rebuild order_totals"))
@with_config
@click.argument("name", metavar="VIEW")
@as_json
def rebuild(config: Config, name: str, *, as_json: bool) -> None:
    """Compute all rows of a view again, in each store, with the next frontier of the mirror.

    Readers see the old rows until all new ones are there. A changed definition is computed again
    without this command.
    """
    _become(config, "rebuild", [name, *(["--json"] * as_json)], (name,), spark=True)


def _holders(config: Config, name: str) -> list[str]:
    return [each for each, follower in config.followers.items() if name in follower.views]


def _become(
    config: Config, command: str, given: list[str], names: tuple[str, ...], *, spark: bool = False
) -> None:
    """Run the job, which needs the extra `spark`; ConfigError for a view that does not exist."""
    from cdc.cli.follow import become, need  # noqa: PLC0415 - not for --help
    from cdc.errors import ConfigError  # noqa: PLC0415 - as above

    unknown = [name for name in names if name not in config.views]
    if unknown or not config.views:
        raise ConfigError(
            f"there is no view {', '.join(unknown)}".rstrip(),
            hint=f"the views are {', '.join(config.views)}"
            if config.views
            else "add it to the section views, or to view_files: docs/VIEWS.md",
        )
    holders = [name for name, each in config.followers.items() if each.views]
    need(f"cdc view {command}", config, holders)
    become("view", given, command, spark=spark)
