"""A follower built anew, as a Spark app: `spark-submit jobs/rebuild.py FOLLOWER --config …`.

`cdc rebuild` submits it. What it does and why it may be killed anywhere stands in
`jobs.rebuilding`; a running follower goes on with the old generation and is moved over by the
switch.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from cdc.cli.options import as_json as json_option
from cdc.cli.options import print_json, with_config
from cdc.errors import CDCError, ConfigError, Exit
from cdc.events import LSN

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from cdc.config import Config
    from jobs.rebuilding import Outcome, Rebuild
    from sinks.contract import Generations


@click.command(epilog="\b\nExample:\n  python jobs/rebuild.py cache --config lockstep.yaml")
@with_config
@click.argument("follower")
@click.option("--table", "tables", multiple=True, help="Only this one, `schema.table`.")
@click.option("--as-of", "lsn", type=LSN.parse, help="The state at this LSN, aside.")
@click.option("--drop-old", is_flag=True, help="Delete what readers do not see.")
@json_option
def main(
    config: Config,
    follower: str,
    tables: tuple[str, ...],
    lsn: LSN | None,
    *,
    drop_old: bool,
    as_json: bool,
) -> None:
    """Build a follower anew, beside what there is; see `cdc rebuild`."""
    path = Path(click.get_current_context().params["config_path"]).absolute()
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("py4j").setLevel(logging.WARNING)
    rebuild = _rebuild(config, path, follower)
    if drop_old:
        gone = rebuild.drop_old()
        if as_json:
            print_json({"dropped": gone})
        else:
            click.echo(f"dropped {', '.join(map(str, gone)) or 'nothing: there is one generation'}")
        return
    outcome = rebuild.as_of(lsn) if lsn is not None else rebuild.anew(frozenset(tables) or None)
    if as_json:
        print_json(_told(outcome))
    else:
        click.echo(_words(follower, outcome, is_still=lsn is not None))


def _rebuild(config: Config, path: Path, name: str) -> Rebuild:
    from jobs import stores  # noqa: PLC0415 - with Spark
    from jobs.rebuild_builders import LogBuilder, MirrorBuilder, switching  # noqa: PLC0415
    from jobs.rebuilding import Rebuild  # noqa: PLC0415 - as above

    follower = config.followers.get(name)
    if follower is None:
        raise ConfigError(
            f"there is no follower {name}",
            hint=f"the section followers has {', '.join(config.followers) or 'none'}",
        )
    sink = cast("Generations", stores.sink(config, name, follower))
    builder = (
        MirrorBuilder(config, name, _tell)
        if follower.documents
        else LogBuilder(config, path, name, _session(config, name), _tell)
    )
    return Rebuild(sink, builder, _tell, partial(switching, config, name))


def _session(config: Config, name: str) -> Callable[[], SparkSession]:
    """Return what starts the session, once."""

    @cache
    def start() -> SparkSession:
        from cdc.local import spark as files  # noqa: PLC0415 - only without spark-submit
        from cdc.local.progress import Progress  # noqa: PLC0415 - as above
        from jobs.session import session, submitted  # noqa: PLC0415 - pyspark takes a second

        jars = () if submitted() else files.jars(Progress())
        delta = config.followers[name].delta is not None
        return session(f"lockstep rebuild of {name}", delta=delta, jars=jars)

    return start


def _tell(what: str) -> None:
    click.echo(f"rebuild: {what}", err=True)


def _told(outcome: Outcome) -> dict[str, Any]:
    return {
        "generation": outcome.generation,
        "former": outcome.former,
        "lsn": str(outcome.applied.lsn),
        "seq": outcome.applied.seq,
        "tables": [
            {
                "table": each.table,
                "rows": each.rows,
                "differences": [difference._asdict() for difference in each.differences],
            }
            for each in outcome.tables
        ],
    }


def _words(follower: str, outcome: Outcome, *, is_still: bool) -> str:
    at = f"generation {outcome.generation} of {follower} stands at {outcome.applied.lsn}"
    if is_still:
        return f"{at}, aside; `cdc rebuild {follower} --drop-old` deletes it"
    differ = sum(len(each.differences) for each in outcome.tables)
    compared = f"; of generation {outcome.former} {differ:,} keys were others"
    return (
        f"{at}, and readers see it{compared if outcome.tables else ''}"
        + f"\n`cdc rebuild {follower} --drop-old` deletes the old one"
        * (outcome.former is not None)
    )


def run() -> None:
    """Run the command; leave the process with the code that its outcome has."""
    code = int(Exit.OK)
    try:
        main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = Exit.USAGE
    except CDCError as error:
        click.echo(f"rebuild: {error.what}\nwhat to do: {error.hint}", err=True)
        code = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of the JVM's or of a client's must not keep the process.
    os._exit(code)


if __name__ == "__main__":
    run()
