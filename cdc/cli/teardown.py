"""`cdc teardown`: remove what `cdc setup` created."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cdc.cli.options import as_json, confirm, example, next_step, print_steps, with_config, yes

if TYPE_CHECKING:
    from cdc.config import Config


@click.command(epilog=example("cdc teardown", "cdc teardown --topics --yes"))
@with_config
@click.option("--topics", "with_topics", is_flag=True, help="Delete the log as well.")
@click.option(
    "--other-source",
    is_flag=True,
    help="With --topics: a log, too, that comes from another database, as after pg_upgrade.",
)
@yes
@as_json
def teardown(
    config: Config, *, with_topics: bool, other_source: bool, yes: bool, as_json: bool
) -> None:
    """Drop the slot and the publication, and with --topics every topic of the pipeline.

    The slot's WAL is released, so changes that the log does not hold by then are lost. A log that
    comes from another database than source.dsn leads to may be one that a pipeline there writes:
    it is deleted with --other-source only. Asks first.
    """
    from cdc.operate.commands.setup import survey, tear_down  # noqa: PLC0415 - not for --help

    remains = survey(config)
    if not yes:
        doomed = [f"the slot {config.slot}"] if remains.own_slot else []
        doomed += [f"the publication {config.publication}"] if remains.publication else []
        if with_topics and remains.topics:
            doomed.append(f"{len(remains.topics)} topics with all their events")
        if doomed:
            confirm(f"Drop {', '.join(doomed)}?")
    steps = tear_down(config, remains, with_topics=with_topics, other_source=other_source)
    print_steps(steps, as_json=as_json)
    if as_json:
        return
    if with_topics or not remains.topics:
        next_step("cdc setup starts a new log")
    else:
        next_step(
            "cdc teardown --topics deletes the log too, so that cdc setup can start a new one"
        )
