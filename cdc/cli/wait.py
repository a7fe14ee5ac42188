"""`cdc wait`: wait until followers have applied what was committed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import click

from cdc.cli.options import (
    as_json,
    example,
    print_done,
    print_json,
    print_waiting,
    print_warning,
    time_limit,
    with_config,
)
from cdc.errors import CDCError, Exit, LagError, UnavailableError

if TYPE_CHECKING:
    from cdc.client import Client, FollowerLag
    from cdc.config import Config
    from cdc.log.completeness import IncompleteTopic
    from cdc.log.follower_reports import FollowerRecord


# The interval at which a wait reports what it waits for.
REPORT_SECONDS: Final = 3.0


@click.command(
    epilog=example(
        "cdc wait --for cache,search --timeout 5s",
        "cdc wait --lsn 0/16B3748 --for mirror",
        "cdc wait --for view:order_totals --json",
    )
)
@with_config
@click.option("--lsn", help="Wait for all up to this LSN.  [default: all committed by now]")
@click.option("--token", help="Wait for the LSN of a token, from cdc token or lockstep.Client.")
@click.option(
    "--for",
    "followers",
    help="Followers by name, or view:NAME for each that holds a view, with commas.  [default: all]",
)
@time_limit("10s")
@as_json
def wait(
    config: Config,
    *,
    lsn: str | None,
    token: str | None,
    followers: str | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Return as soon as every named follower has applied everything up to an LSN.

    From then on its store shows what was committed up to there, except in tables that it names: of
    those the log is incomplete. Reads the followers' reports in the log, and no store.

    Exits 0 when all have, 75 when one lags, 69 when one or the daemon is not running, 78 when one
    has halted and needs a person, or when the token is of another database.
    """
    from cdc.client import Client  # noqa: PLC0415 - not for --help
    from cdc.source.connection import connect  # noqa: PLC0415
    from cdc.source.token import take  # noqa: PLC0415

    if lsn and token:
        raise click.UsageError("--lsn and --token are alternatives; keep one of them")
    given = lsn or token
    if given is None:
        with connect(config) as connection:
            given = str(take(connection))
    names = None if followers is None else [name.strip() for name in followers.split(",")]
    began = time.monotonic()
    with Client(config) as client:
        applied = _wait_with_reports(config, client, given, names, timeout)
        seconds = time.monotonic() - began
        incomplete = _incomplete(client)
    if as_json:
        keep = ("lsn", "seq", "epoch", "state")
        each = {who: {name: getattr(at, name) for name in keep} for who, at in applied.items()}
        differ = [topic.fields() for topic in incomplete]
        print_json({"seconds": round(seconds, 3), "followers": each, "incomplete_topics": differ})
        return
    for name, record in applied.items():
        print_done(f"{name} has applied all up to {record.lsn}, seq {record.seq}")
    for topic in incomplete:
        print_warning(f"{topic.what}; stores may differ from the table: {topic.remedy}")


def _incomplete(client: Client) -> list[IncompleteTopic]:
    try:
        return client.incomplete()
    except CDCError as error:  # the wait itself has succeeded
        print_warning(f"whether a topic is incomplete is not known: {error.what}")
        return []


def _wait_with_reports(
    config: Config, client: Client, given: str, names: list[str] | None, timeout: float
) -> dict[str, FollowerRecord]:
    """Wait, and report every few seconds for what; a missing daemon is reported at once."""
    deadline = time.monotonic() + timeout
    while True:
        left = max(0.0, deadline - time.monotonic())
        try:
            return client.wait(given, names, min(left, REPORT_SECONDS))
        except UnavailableError as error:  # the log does not answer for a moment
            if time.monotonic() >= deadline:
                raise
            print_waiting(error.what)
        except LagError as error:
            late = cast("tuple[FollowerLag, ...]", error.lagging)
            source = _source(config)
            if source.why:
                error.hint = f"{source.remedy}: {source.why}; then {error.hint}"
            if any(each.hopeless for each in late) or time.monotonic() >= deadline:
                if not source.is_read and error.exit_code == Exit.TEMPORARY:
                    error.exit_code = Exit.UNAVAILABLE
                raise
            reasons = (f"{each.follower} {each.why}" for each in late)
            print_waiting("; ".join(filter(None, (source.why, *reasons))))


class _Source(NamedTuple):
    """Whether somebody reads the source; if nothing is streamed, why, and what to do."""

    is_read: bool
    why: str = ""
    remedy: str = ""


def _source(config: Config) -> _Source:
    from cdc.operate.commands.snapshots import daemon_streams  # noqa: PLC0415 - not for --help
    from cdc.snapshot.initial import due  # noqa: PLC0415 - as above

    if daemon_streams(config):
        return _Source(is_read=True)
    state = due.state(config)
    if state is not None and state.stage != "done":
        what = "the initial snapshot is not finished, and nothing is streamed before"
        return _Source(is_read=True, why=what, remedy="cdc status shows how far it is")
    why = f"no daemon reads the slot {config.slot}"
    return _Source(is_read=False, why=why, remedy="cdc run")
