"""Rebuild a follower, as a Spark app: `spark-submit jobs/rebuild.py FOLLOWER --config …`.

`cdc rebuild` submits it. `jobs.generations.rebuilding` describes what it does and why it may be
killed anywhere; a running follower continues with the old generation until the switch moves it to
the new one.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

import click

from cdc.cli.options import as_json as json_option
from cdc.cli.options import print_json, with_config
from cdc.config.followers import chosen_names
from cdc.errors import ConfigError
from cdc.events import LSN
from cdc.log.follower_reports import read
from lockstep.jobs.apply import app
from lockstep.jobs.spark.starting import session_of

if TYPE_CHECKING:
    from cdc.config import Config
    from lockstep.jobs.generations.in_place import InPlace
    from lockstep.jobs.generations.rebuilding import Rebuild, RebuildOutcome


@click.command(
    "rebuild", epilog="\b\nExample:\n  python jobs/rebuild.py cache --config lockstep.yaml"
)
@with_config
@click.argument("follower")
@click.option("--table", "tables", multiple=True, help="Only this one, `schema.table`.")
@click.option(
    "--as-of", "place", help="The state at this LSN, seq or time, in a separate generation."
)
@click.option("--drop-old", is_flag=True, help="Delete what readers do not see.")
@json_option
def main(
    config: Config,
    follower: str,
    tables: tuple[str, ...],
    place: str | None,
    *,
    drop_old: bool,
    as_json: bool,
) -> None:
    """Rebuild a follower alongside its current generation; see `cdc rebuild`."""
    app.begin(config)
    app.suit_followers()
    rebuild = rebuild_of(config, follower)
    if drop_old:
        dropped = rebuild.drop_old()
        if as_json:
            print_json({"dropped": dropped})
        else:
            click.echo(
                f"dropped {', '.join(map(str, dropped)) or 'nothing: there is one generation'}"
            )
        return
    if place is not None:
        outcome = rebuild.as_of(_lsn(config, place))
    else:
        outcome = rebuild.run(frozenset(tables) or None)
    if as_json:
        print_json(_as_json(outcome))
    else:
        click.echo(_words(follower, outcome, is_as_of=place is not None))


def _lsn(config: Config, place: str) -> LSN:
    """Return the LSN that a place names, or that of the last frontier not above it."""
    from lockstep.jobs.cuts.frontiers import parse  # noqa: PLC0415 - with Spark
    from lockstep.jobs.generations.from_archive import lsn_at  # noqa: PLC0415 - as above

    return lsn_at(config, parse(place))


def rebuild_of(config: Config, name: str) -> Rebuild | InPlace:
    """Return what rebuilds a follower."""
    from lockstep.jobs.apply import stores  # noqa: PLC0415 - with Spark
    from lockstep.jobs.generations.builders import LogBuilder, MirrorBuilder, switching  # noqa: PLC0415
    from lockstep.jobs.generations.in_place import InPlace  # noqa: PLC0415 - as above
    from lockstep.jobs.generations.rebuilding import Rebuild  # noqa: PLC0415 - as above
    from lockstep.sinks.contract import Generations  # noqa: PLC0415 - as above

    chosen_names(config.followers, [name])
    follower = config.followers[name]
    if follower.views:
        raise ConfigError(
            f"{name} holds views", hint="`cdc view rebuild VIEW` computes one again, in its place"
        )
    session = partial(session_of, f"lockstep rebuild of {name}", config, [name])
    sink = stores.sink(config, name, follower)
    last = read(config).get(name)
    reported = last.generation if last else 0
    report = partial(switching, config, name)
    if not isinstance(sink, Generations):
        log = LogBuilder(config, name, cache(session), _print_progress)
        return InPlace(sink, log, report, reported)
    builder = (
        MirrorBuilder(config, name, _print_progress, cache(session))
        if follower.documents
        else LogBuilder(config, name, cache(session), _print_progress)
    )
    return Rebuild(sink, builder, _print_progress, report, reported)


def _print_progress(what: str) -> None:
    click.echo(f"rebuild: {what}", err=True)


def _as_json(outcome: RebuildOutcome) -> dict[str, Any]:
    return {
        "generation": outcome.generation,
        "former": outcome.former,
        "lsn": str(outcome.applied.lsn),
        "seq": outcome.applied.seq,
        "tables": [
            {
                "table": each.table,
                "rows": each.rows,
                "differ": each.differ,
                "differences": [difference._asdict() for difference in each.differences],
            }
            for each in outcome.tables
        ],
    }


def _words(follower: str, outcome: RebuildOutcome, *, is_as_of: bool) -> str:
    at = f"generation {outcome.generation} of {follower} is at {outcome.applied.lsn}"
    if is_as_of:
        return f"{at}, in a shadow build; `cdc rebuild {follower} --drop-old` deletes it"
    differ = sum(each.differ for each in outcome.tables)
    compared = f"; of generation {outcome.former} {differ:,} keys differed"
    return (
        f"{at}, and readers see it{compared if outcome.tables else ''}"
        + f"\n`cdc rebuild {follower} --drop-old` deletes the old one"
        * (outcome.former is not None)
    )


if __name__ == "__main__":
    app.run(main)
