"""`cdc archive run|status|compact`: every record of the log, kept in a Delta table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cdc.cli.options import as_json, example, with_config

if TYPE_CHECKING:
    from cdc.config import Config


@click.group(epilog=example("cdc archive run", "cdc archive status", "cdc archive status --json"))
def archive() -> None:
    """Keep every record of the log in one Delta table, or show what it holds.

    With the archive, Kafka needs to keep the log only until it is archived: see docs/ARCHIVE.md.
    """


@archive.command(
    epilog=example("cdc archive run", "cdc archive run --once", "cdc archive run --until 0/16E9088")
)
@with_config
@click.option("--once", is_flag=True, help="End when all that is in the log now is archived.")
@click.option("--until", metavar="LSN", help="End when this LSN is archived, such as 0/16E9088.")
@as_json
def run(config: Config, until: str | None, *, once: bool, as_json: bool) -> None:
    """Archive the log, until stopped: each record exactly once, one commit for each cut.

    Runs jobs/archive.py on Spark, as `cdc follow` runs followers. The position is in the table: the
    job may be killed at any time, and run twice without harm. Before anything of a cut is written,
    its records are compared with the counts and digests of the log.
    """
    from cdc.cli.follow import become  # noqa: PLC0415 - not for --help

    need("cdc archive run", config)
    given = [*(("--until", until) if until else ()), *(("--once",) if once else ())]
    become("archive", given + ["--json"] * as_json)


@archive.command(epilog=example("cdc archive status", "cdc archive status --json"))
@with_config
@as_json
def status(config: Config, *, as_json: bool) -> None:
    """Show up to where the log is archived, how large the archive is, and how fast it grows.

    Of its bases: how many are kept, how large they are, where the newest is, and how many events
    were archived since.
    """
    from cdc.cli.follow import become  # noqa: PLC0415 - not for --help

    need("cdc archive status", config)
    become("archived", ["--json"] * as_json, "status", spark=False)


@archive.command(epilog=example("cdc archive compact", "cdc archive compact --json"))
@with_config
@as_json
def compact(config: Config, *, as_json: bool) -> None:
    """Compact the archive: the newest event of each key up to its newest frontier, as a base.

    A base is a consistent copy of the database in the log's own form. `cdc rebuild` starts from
    the newest one, and reads the archive and the topics only after it. It is made from the base
    before and what was archived since, costs what changed since, and appears by one commit: the job
    may be killed at any time, and run as often as you like, for example once a day. The newest
    `archive.bases_kept` are kept. Many changes are compacted on Spark, as `cdc follow` runs
    followers.
    """
    from cdc.cli.follow import become  # noqa: PLC0415 - not for --help

    need("cdc archive compact", config)
    become("compact", ["--json"] * as_json)


@archive.command(
    epilog=example(
        "cdc archive digests --into s3a://audit/shop --follow",
        "cdc archive digests --into /mnt/worm/shop --json",
    )
)
@with_config
@click.option(
    "--into", required=True, metavar="PLACE", help="A folder, or a place in a bucket, of its own."
)
@click.option(
    "--follow", is_flag=True, help="Note the newest chain again and again, until stopped."
)
@click.option(
    "--every",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="With --follow: how often.",
)
@as_json
def digests(config: Config, into: str, every: float, *, follow: bool, as_json: bool) -> None:
    """Note the chain of the log's newest frontier where the archive's writer can't change it.

    Each is a small object that is created and never replaced; its login needs no other right than
    to create objects. A chain covers every record of the log up to its frontier. So `cdc prove
    --digests`, which compares log and archive with all that was noted, also finds what somebody has
    changed consistently in both. The login of the bucket is in the environment. No archive is
    needed.
    """
    from cdc.cli.follow import become  # noqa: PLC0415 - not for --help
    from cdc.runtime import extras  # noqa: PLC0415 - as above

    del config
    extras.require("cdc archive digests", "spark")
    given = ["--into", into, "--every", str(every), *["--follow"] * follow, *["--json"] * as_json]
    become("archived", given, "digests", spark=False)


def need(what: str, config: Config) -> None:
    """Raise ConfigError without an archive, MissingExtraError without its extra."""
    from cdc.errors import ConfigError  # noqa: PLC0415 - not for --help
    from cdc.runtime import extras  # noqa: PLC0415 - as above

    if config.archive.path is None:
        raise ConfigError(
            "no archive is configured", hint="set archive.path to where its table shall be"
        )
    extras.require(what, "spark")
