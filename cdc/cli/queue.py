"""`cdc queue`: work queues of `Client.queue`, and what they gave up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cdc.cli import given_up
from cdc.cli.options import (
    as_json,
    echo,
    example,
    print_done,
    print_json,
    with_config,
    yes,
)

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.log.group_records import UndeliveredRecord


@click.group(epilog=example("cdc queue list", "cdc queue undelivered emails"))
def queue() -> None:
    """List work queues, and decide on what they gave up.

    A queue is started by its first member: `Client.queue` in docs/QUEUES.md.
    """


@queue.command("list", epilog=example("cdc queue list", "cdc queue list --json"))
@with_config
@as_json
def list_(config: Config, *, as_json: bool) -> None:
    """List every queue: its topics, where it started, and how many events it gave up."""
    from cdc.log.group_records import queue_group, read_once  # noqa: PLC0415 - not for --help

    readings = read_once(config)
    found: list[dict[str, Any]] = [
        {
            "queue": name,
            "topics": sorted(record.topics),
            "start_seq": record.start_seq,
            "lock_seconds": record.lock_seconds,
            "undelivered": sum(
                each.state == "undelivered" for each in readings.undelivered_of(queue_group(name))
            ),
        }
        for name, record in readings.queues.items()
    ]
    if as_json:
        print_json(found)
        return
    for each in found:
        echo(
            f"{each['queue']}: after seq {each['start_seq']:,} of {', '.join(each['topics'])},"
            f" {each['undelivered']:,} events given up"
        )
    if not found:
        echo("no queue was started")


@queue.command(
    epilog=example("cdc queue undelivered emails", "cdc queue undelivered emails --json")
)
@with_config
@click.argument("name")
@as_json
def undelivered(config: Config, name: str, *, as_json: bool) -> None:
    """List what the queue NAME gave up, and what was decided on it; with --json, the events too."""
    import msgspec  # noqa: PLC0415 - not for --help

    from cdc.deliver import undelivered as found  # noqa: PLC0415 - as above
    from cdc.log.group_records import queue_group  # noqa: PLC0415 - as above

    records = list(found.read(config, queue_group(name)))
    if as_json:
        print_json([msgspec.structs.asdict(each) | _event(config, each) for each in records])
        return
    given_up.show(
        records,
        f"the queue {name}",
        f"cdc queue retry {name} ID; or cdc queue discard {name} ID, where it needs no more work",
    )


def _event(config: Config, record: UndeliveredRecord) -> dict[str, Any]:
    """Return the event of an undecided record, None where the log has it no longer, or damaged."""
    import orjson  # noqa: PLC0415 - not for --help

    from cdc.deliver import undelivered as found  # noqa: PLC0415 - as above
    from cdc.errors import GapError, UnreadableError  # noqa: PLC0415 - as above

    if record.state != "undelivered":
        return {}
    try:
        value = found.event(config, record)
    except (GapError, UnreadableError):
        value = b""
    return {"event": orjson.loads(value) if value else None}


@queue.command(
    epilog=example("cdc queue retry emails shop-1-1042", "cdc queue retry emails --json")
)
@with_config
@click.argument("name")
@given_up.ids
@as_json
def retry(config: Config, name: str, ids: tuple[str, ...], *, as_json: bool) -> None:
    """Give out again what the queue NAME gave up (default: all), as often as its members try.

    An event that was given out again before may be named once more.
    """
    from cdc.deliver import undelivered as found  # noqa: PLC0415 - not for --help
    from cdc.log.group_records import queue_group  # noqa: PLC0415 - as above

    done = found.queue_again(config, queue_group(name), ids)
    if as_json:
        print_json(done)
    else:
        print_done(f"{len(done)} events are in the queue again; the decision is recorded")


@queue.command(
    epilog=example("cdc queue discard emails shop-1-1042", "cdc queue discard emails --yes")
)
@with_config
@click.argument("name")
@given_up.ids
@yes
@as_json
def discard(config: Config, name: str, ids: tuple[str, ...], *, yes: bool, as_json: bool) -> None:
    """Decide that events which the queue NAME gave up (default: all) need no more work."""
    from cdc.log.group_records import queue_group  # noqa: PLC0415 - not for --help

    why = "No member gets it again."
    given_up.discard(config, queue_group(name), ids, why, yes=yes, as_json=as_json)
