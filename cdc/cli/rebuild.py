"""`cdc rebuild`: a follower built again alongside the current one, by spark-submit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cdc.cli.options import as_json, example, with_config

if TYPE_CHECKING:
    from cdc.config import Config


@click.command(
    epilog=example(
        "cdc rebuild cache",
        "cdc rebuild search --table public.products",
        "cdc rebuild mirror --as-of 0/16E9088",
        "cdc rebuild mirror --as-of 2026-11-24T08:00:00Z",
        "cdc rebuild cache --drop-old",
    )
)
@with_config
@click.argument("follower")
@click.option(
    "--table", "tables", metavar="TABLE", multiple=True,
    help="Only this table, `schema.table`; may be given several times.",
)  # fmt: skip
@click.option(
    "--as-of", "lsn", metavar="PLACE",
    help="Build the state at the last frontier not above this LSN, seq, or time with its zone; "
    "readers keep the current one.",
)  # fmt: skip
@click.option("--drop-old", is_flag=True, help="Delete the generations that readers do not see.")
@as_json
def rebuild(
    config: Config,
    follower: str,
    tables: tuple[str, ...],
    lsn: str | None,
    *,
    drop_old: bool,
    as_json: bool,
) -> None:
    """Build FOLLOWER again, as a new generation alongside the current one, and switch to it.

    From the archive's newest base, and what came after it (`cdc archive compact`); without a base
    from the log's start where the topics still hold it, else from the archive, or from rows that
    the daemon reads again (`cdc snapshot`). Readers see the old generation until the new one holds
    what the log has; differences from the old one are reported (by --json, how many keys of each
    table differ, and the first 1,000). The old one is kept until --drop-old. If killed, it resumes
    where it was when started again. A running follower may continue meanwhile.
    """
    from cdc.cli.follow import become, need  # noqa: PLC0415 - not for --help
    from cdc.config.followers import chosen_names  # noqa: PLC0415 - as above

    if (drop_old and (lsn or tables)) or (lsn and tables):
        raise click.UsageError("--table, --as-of and --drop-old exclude each other")
    need("cdc rebuild", config, chosen_names(config.followers, [follower]))
    given = [follower]
    given += [part for table in tables for part in ("--table", table)]
    given += ["--as-of", lsn] if lsn else []
    given += ["--drop-old"] * drop_old + ["--json"] * as_json
    become("rebuild", given)
