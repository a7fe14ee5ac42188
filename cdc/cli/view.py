"""`cdc view`: maintained views, listed, checked, planned, built, verified and dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cdc.cli.options import (
    as_json,
    confirm,
    echo,
    example,
    print_json,
    time_limit,
    with_config,
    yes,
)

if TYPE_CHECKING:
    from cdc.config import Config


@click.group(epilog=example("cdc view check", "cdc view explain order_totals", "cdc view run"))
def view() -> None:
    """Keep the rows of SQL queries, and of Python's functions, equal to the database, in stores.

    See docs/VIEWS.md for what a view can have, and what is refused.
    """


@view.command("list", epilog=example("cdc view list", "cdc view list --json"))
@with_config
@as_json
def list_(config: Config, *, as_json: bool) -> None:
    """List the views, and the followers that hold them."""
    found: list[dict[str, Any]] = [
        {
            "view": name,
            "key": list(each.key),
            "refresh": each.refresh,
            "freshness_seconds": each.freshness_seconds,
            "followers": _holders(config, name),
        }
        for name, each in config.views.items()
    ]
    if as_json:
        print_json(found)
        return
    for each in found:
        where = ", ".join(each["followers"]) or "no follower: name it in a follower's `views`"
        fresh = each["freshness_seconds"]
        rules = f"refresh {each['refresh']}" + (f", at most {fresh:g} s late" if fresh else "")
        echo(f"{each['view']}  key {', '.join(each['key'])}, {rules}, in {where}")
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

    By the affected keys, or completely, and why; and, for each follower, how its job computed the
    view the last time, why, and in how many seconds.
    """
    _become(config, "explain", [*names, *(["--json"] * as_json)], names)


@view.command(epilog=example("cdc view plan", "cdc view plan --json"))
@with_config
@as_json
def plan(config: Config, *, as_json: bool) -> None:
    """Compare the declared views with those that the followers' stores hold, and change nothing.

    For each view and follower: unchanged, new, changed (and what of it), dropped (still in the
    store, and not declared), or refused; with the command that follows. Exits with 0 if there is
    nothing to do, 1 if there is, 78 if a view is refused.
    """
    _become(config, "plan", ["--json"] * as_json, ())


@view.command(
    epilog=example("cdc view apply", "cdc view apply --timeout 30m", "cdc view apply --json")
)
@with_config
@time_limit("10m")
@as_json
def apply(config: Config, timeout: float, *, as_json: bool) -> None:
    """Build each new or changed view in every store, and return once all are there.

    Nothing is changed if any view is refused. Readers see the old rows of a view until all new ones
    are there; in Redis each row is replaced on its own, and rows that the view no longer has are
    deleted last. A follower that runs builds them itself once its job is started again with this
    configuration, and this command waits for it; one that does not run is run by this command. Rows
    of views that are no longer declared stay: `cdc view drop`.

    Exits with 75 after the timeout, and may then be run again.
    """
    given = ["--timeout", str(timeout), *(["--json"] * as_json)]
    _become(config, "apply", given, (), spark=True)


@view.command(
    epilog=example(
        "cdc view drop order_totals",
        "cdc view drop order_totals --yes --json",
        "cdc view drop order_totals --follower cache",
    )
)
@with_config
@click.argument("name", metavar="VIEW")
@click.option(
    "--follower", "followers", metavar="NAME", multiple=True,
    help="Only in this one's store, which may no longer name a view that others hold.",
)  # fmt: skip
@time_limit("10m")
@yes
@as_json
def drop(
    config: Config,
    name: str,
    followers: tuple[str, ...],
    timeout: float,
    *,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete the rows of a view that is no longer declared from the followers' stores.

    In their next cuts; an empty table stays. A follower's job that runs is asked to do it, and then
    computes the view no longer; one that does not run is run by this command. The jobs of their
    mirrors must run. May be repeated, also after it was interrupted. Exits with 75 after the
    timeout.
    """
    _refuse_declared(config, name, followers)
    if not yes:
        where = ", ".join(followers) or "every follower with views"
        confirm(f"Delete all rows of {name} in {where}?")
    given = [name, *(part for each in followers for part in ("--follower", each))]
    given += ["--timeout", str(timeout), *(["--json"] * as_json)]
    _become(config, "drop", given, (), spark=True)


@view.command(epilog=example("cdc view run", "cdc view run --once", "cdc view run --once --json"))
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


@view.command(
    epilog=example(
        "cdc view verify", "cdc view verify order_totals --timeout 10", "cdc view verify --json"
    )
)
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

    For each follower that holds the view, once it has applied all that is committed now. If the
    answer changes during each of five comparisons, the view is computed again from the complete
    mirrors, as they were at a frontier that the store is at. Of a shape in Redis, the columns that
    it has of a row, and whether readers see it; rows that expire are not compared. Exits with 1 if
    rows differ.

    Postgres can't answer a view in Python, one that names such a view, or one of masked columns:
    these are computed from the mirrors, too. With --json, `compared_with` is `postgres` or
    `mirrors`.
    """
    given = [*names, "--timeout", str(timeout), *(["--json"] * as_json)]
    from cdc.config.views import PythonView  # noqa: PLC0415 - not for --help

    is_of_mirrors = any(isinstance(each, PythonView) for each in config.views.values()) or any(
        rule.mask for rule in config.tables.values()
    )
    _become(config, "verify", given, names, spark=is_of_mirrors)


@view.command(
    epilog=example(
        "cdc view rebuild order_totals",
        "cdc view rebuild order_totals --timeout 1h",
        "cdc view rebuild order_totals --json",
    )
)
@with_config
@click.argument("name", metavar="VIEW")
@time_limit("10m")
@as_json
def rebuild(config: Config, name: str, timeout: float, *, as_json: bool) -> None:
    """Compute all rows of a view again, in each store, with the next frontiers of the mirror.

    A follower's job that runs is asked to do it; one that does not run is run by this command. The
    jobs of their mirrors must run. Readers see the old rows until all new ones are there; in Redis
    each row is replaced on its own, and rows that the view no longer has are deleted last. What is
    interrupted is continued by the job, or by this command if it is repeated. A changed definition
    is computed again without this command. Exits with 75 after the timeout.
    """
    _expect_held(config, name)
    given = [name, "--timeout", str(timeout), *(["--json"] * as_json)]
    _become(config, "rebuild", given, (name,), spark=True)


def _expect_held(config: Config, name: str) -> None:
    """Raise ConfigError for a view that no follower holds."""
    from cdc.errors import ConfigError  # noqa: PLC0415 - not for --help

    if name in config.views and not _holders(config, name):
        raise ConfigError(
            f"no follower holds the view {name}",
            hint=f"add {name} to a follower's `views`; `cdc view list` shows who holds which",
        )


def _refuse_declared(config: Config, name: str, followers: tuple[str, ...]) -> None:
    """Raise ConfigError if the view is declared; in these followers, if there are any."""
    from cdc.config import read  # noqa: PLC0415 - not for --help
    from cdc.config.followers import chosen_names  # noqa: PLC0415 - as above
    from cdc.errors import ConfigError  # noqa: PLC0415 - as above

    origins = read(click.get_current_context().params["config_path"]).origins
    for each in chosen_names(config.followers, followers) if followers else ():
        if name in config.followers[each].views:
            at = origins.get(("followers", each, "views"), "the configuration")
            raise ConfigError(
                f"follower {each} names the view {name} in {at}",
                hint=f"remove it from its `views`; then `cdc view drop {name} --follower {each}`",
            )
        if not config.followers[each].views:
            raise ConfigError(f"follower {each} has no views", hint="name one that has")
    if name in config.views and not followers:
        at = origins.get(("views", name, "sql"), "the configuration")
        raise ConfigError(
            f"view {name} is declared in {at}",
            hint="remove it there, and from the followers' `views`; or name a follower that no"
            " longer has it: --follower NAME",
        )


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
