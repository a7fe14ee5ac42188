"""`cdc upgrade --check`: whether this version can take over, and whether there is a way back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cdc.cli.options import (
    as_json,
    echo,
    example,
    next_step,
    print_done,
    print_json,
    print_warning,
    with_config,
)

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.operate.formats import KindFound
    from cdc.operate.upgrade import UpgradeCheck


@click.command(epilog=example("cdc upgrade --check", "cdc upgrade --check --json | jq .can_run"))
@with_config
@click.option("--check", "checks", is_flag=True, help="Compare formats, and change nothing.")
@as_json
def upgrade(config: Config, *, checks: bool, as_json: bool) -> int:
    """Check that this version can take over what another one has written.

    Run it with the version that you want to run next; the present one may go on meanwhile. For each
    kind of record in the log's own topics, for the archive and its bases, and for followers in
    OpenSearch it compares the newest format there is with the one that this version reads and
    writes. Of frontiers, dead letters and logical messages it reads the end of the topic.

    What this version will write in a newer format is named: a version that does not know that
    format refuses it, so once this one has run there may be no way back.

    Exits with 0 if this version can run, also where there is no way back; 78 if it would refuse
    something, or if the log has nothing of this pipeline; 69 or 77 if the brokers do not answer or
    refuse us.
    """
    from cdc.operate.upgrade import check  # noqa: PLC0415 - not for --help

    if not checks:
        raise click.UsageError(
            "this command only checks: cdc upgrade --check. A version is installed by pip, or as an"
            " image; docs/HOWTO.md, “Upgrade”, has the steps"
        )
    found = check(config, Path(click.get_current_context().params["config_path"]))
    if as_json:
        print_json(found.fields())
    else:
        _print(found)
    return found.exit_code


def _print(found: UpgradeCheck) -> None:
    from cdc import __version__  # noqa: PLC0415 - as above

    width = max(len(each.kind) for each in found.found)
    for each in found.found:
        echo(f"{click.style(f'{each.kind:<{width}}', dim=True)}  {_formats(each)}")
    for name in found.unread:
        print_warning(f"not checked: {name}")
    if found.refused:
        for each in found.refused:
            echo(f"{click.style('✗', fg='red', bold=True)} {each.place}: {_refusal(each)}")
        next_step("keep the version that runs, or install one that is at least as new")
        return
    print_done(f"Lockstep {__version__} can take over")
    if found.rising:
        kinds = ", ".join(f"{each.kind} {each.reads}" for each in found.rising)
        print_warning(
            f"it will write newer formats: {kinds}. A version that does not know them refuses them:"
            " once this one has run, do not go back to one that reads only what is there now"
        )
    next_step("upgrade the followers first, then the daemon: docs/HOWTO.md, “Upgrade”")


def _formats(each: KindFound) -> str:
    reads = f"this version reads up to {each.reads}"
    if each.is_readable and each.will_rise:
        reads = f"this version reads it, and writes {each.reads}"
    return f"format {each.newest} in {each.place}; {reads}"


def _refusal(each: KindFound) -> str:
    if each.newest > each.reads:
        return f"a {each.kind} has format {each.newest}, and this version reads up to {each.reads}"
    return each.problem
