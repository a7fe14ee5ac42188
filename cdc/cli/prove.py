"""`cdc prove`: that log and archive hold what the daemon wrote, all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cdc.cli.options import as_json, example, with_config

if TYPE_CHECKING:
    from cdc.config import Config


@click.command(
    epilog=example(
        "cdc prove",
        "cdc prove --lsn 0/16E9088",
        "cdc prove --offline --json",
        "cdc prove --offline --chain N1uYV0mGkqkqkq8mL0sS5cV2jdV0Qe0p7WzZ0k9bY3s",
        "cdc prove --digests s3a://audit/shop",
    )
)
@with_config
@click.option("--lsn", metavar="LSN", help="Only up to this LSN, such as 0/16E9088.")
@click.option("--offline", is_flag=True, help="Read the archive alone: no broker is needed.")
@click.option(
    "--chain",
    metavar="CHAIN",
    help="A chain that was noted before: one of the frontiers must have it.",
)
@click.option(
    "--digests",
    metavar="PLACE",
    help="Where `cdc archive digests` has noted chains: log and archive must have each of them.",
)
@as_json
def prove(
    config: Config,
    lsn: str | None,
    chain: str | None,
    digests: str | None,
    *,
    offline: bool,
    as_json: bool,
) -> None:
    """Recompute every digest of topics and archive; name what was altered, dropped or swapped.

    The topics are compared with the digests in the frontier records, as far back as they reach; the
    archive (if one is configured) with its files' and commits' digests, its Merkle roots, both
    chains, and the end that its job has reported to the log. The output has the chain at the end:
    note it elsewhere, and give it later as --chain: then not even the owner of all storage can have
    changed the past. `cdc archive digests` notes chains by itself, for --digests. With --offline
    only these two show that nothing is missing at the archive's end. Exits with 1 if anything was
    found.
    """
    from cdc.cli.follow import become  # noqa: PLC0415 - not for --help
    from cdc.errors import ConfigError  # noqa: PLC0415 - as above
    from cdc.runtime import extras  # noqa: PLC0415 - as above

    if offline and config.archive.path is None:
        raise ConfigError(
            "--offline reads the archive, and none is configured",
            hint="set archive.path, or leave --offline out to read the topics",
        )
    extras.require("cdc prove", "spark")
    given = [
        *(("--lsn", lsn) if lsn else ()),
        *(("--chain", chain) if chain else ()),
        *(("--digests", digests) if digests else ()),
        *(("--offline",) if offline else ()),
        *(("--json",) if as_json else ()),
    ]
    become("archived", given, "prove", spark=False)
