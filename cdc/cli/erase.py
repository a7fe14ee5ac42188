"""`cdc erase`: a row's events out of archive, bases, topics and followers' lakes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cdc.cli.options import as_json, confirm, example, with_config, yes

if TYPE_CHECKING:
    from cdc.config import Config


@click.command(
    epilog=example(
        "cdc erase public.users 7",
        "cdc erase public.users 7 --topics --yes",
        """cdc erase public.order_lines '{"order_id":7,"line":2}' --yes --json""",
    )
)
@with_config
@click.argument("table")
@click.argument("key")
@click.option(
    "--topics", is_flag=True, help="Delete the topics' records too; stop the daemon first."
)
@click.option("--mirrors", is_flag=True, help="Erase it from followers' Delta tables too.")
@click.option(
    "--messages",
    "prefixes",
    metavar="PREFIX",
    multiple=True,
    help="Erase logical messages with this prefix of its transactions too; `audit` has authors.",
)
@yes
@as_json
def erase(
    config: Config,
    table: str,
    key: str,
    *,
    topics: bool,
    mirrors: bool,
    prefixes: tuple[str, ...],
    yes: bool,
    as_json: bool,
) -> None:
    """Erase every event of the row of TABLE with KEY from the archive and its bases, for good.

    Delete the row in the source first: it is refused while the row exists, or its delete is not
    archived. Keys that the row had before or after are erased with it. The salted Merkle leaves
    stay, so that `cdc prove` still passes; it prints how many events are erased. An audit record
    without data is kept. Older bases, and older versions of the Delta tables, can't be read
    afterwards.

    The topics have the events until their retention deletes them, or with --topics no longer: all
    records of the row's partitions up to its last event are deleted, once every follower has
    applied them, and a new epoch starts, as with `cdc topics acknowledge`.

    With --mirrors the table's Delta mirrors, and those of views, are written again without the row:
    its versions in a history, soft deletes, deletion vectors. Their older versions and generations
    are deleted. Followers must have applied its delete; stop a mirror's follower if it is in the
    middle of a cut. What other stores keep of deleted rows is printed, and how many logical
    messages of its transactions are kept. If it was killed, run it again. Asks first.
    """
    from cdc.cli.archive import need  # noqa: PLC0415 - not for --help
    from cdc.cli.follow import become  # noqa: PLC0415 - as above

    need("cdc erase", config)
    if not yes:
        confirm(f"Erase the row of {table} from the archive, for good?")
    given = [
        *(["--topics"] * topics),
        *(["--mirrors"] * mirrors),
        *(each for prefix in prefixes for each in ("--messages", prefix)),
        *(["--json"] * as_json),
        "--",
        table,
        key,
    ]
    become("archived", given, "erase", spark=False)
