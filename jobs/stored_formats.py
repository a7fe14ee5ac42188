"""Print which formats archive, bases and OpenSearch have, as JSON: for `cdc upgrade --check`.

Only the newest commit of the archive and of its bases is read, and a follower's record. A store
that does not answer does not hide the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cdc.cli.options import print_json, with_config
from cdc.errors import CDCError
from cdc.log.records import format_of
from cdc.operate.formats import KindFound
from cdc.operate.upgrade import stores
from lockstep.jobs.apply import app

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config


@click.command("stored_formats", epilog="\b\nExample:\n  python jobs/stored_formats.py")
@with_config
def main(config: Config) -> None:
    """Print the formats of the stores as JSON; see `cdc upgrade`."""
    kinds, unread = list[KindFound](), list[str]()
    for name in stores(config):
        try:
            kinds += _found(config, name)
        except CDCError as error:
            unread.append(f"{name}: {error.what}")
    print_json({"kinds": [each._asdict() for each in kinds], "not_checked": unread})


def _found(config: Config, name: str) -> Iterator[KindFound]:
    """Yield what one store has; nothing if it is still to be created."""
    if name == "archive":
        yield from _archived(config)
        return
    # These need the extra `opensearch`.
    from lockstep.sinks.opensearch import record  # noqa: PLC0415
    from lockstep.sinks.opensearch.client import OpenSearchClient  # noqa: PLC0415
    from lockstep.sinks.opensearch.mapping import index_part  # noqa: PLC0415

    follower = name.removeprefix("followers.")
    store = config.followers[follower].opensearch
    assert store is not None, "it is one of `stores`"
    client = OpenSearchClient(store.url, store.user, store.password, store.ca_file)
    alias = f"{index_part(store.prefix or config.prefix)}-followers"
    stored = record.FollowerRecords(client, alias, follower, config.pipeline).stored_format()
    if stored is not None:
        yield KindFound("follower's record", name, 1, stored, record.FORMAT)


def _archived(config: Config) -> Iterator[KindFound]:
    from lockstep.jobs.archiving import layout  # noqa: PLC0415 - of the extra `spark`
    from lockstep.jobs.archiving.running import opened  # noqa: PLC0415 - as above
    from lockstep.jobs.compacting import layout as bases_layout  # noqa: PLC0415 - as above
    from lockstep.jobs.compacting.bases import bases_of  # noqa: PLC0415 - as above

    for kind, table, field, reads in (
        ("archived cut", opened(config), "cut", layout.FORMAT),
        ("base", bases_of(config), "base", bases_layout.FORMAT),
    ):
        text = table.stated().get(field) if table.find() else None
        if text is not None:
            yield KindFound(kind, table.path, 1, format_of(text.encode()), reads)


if __name__ == "__main__":
    app.run(main)
