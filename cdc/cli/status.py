"""`cdc status`: how far the log is, and the pipeline's verdict."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any, Final

import click

from cdc.cli.options import as_json, echo, example, next_step, print_json, with_config
from cdc.errors import printable
from cdc.operate.findings import Level
from cdc.operate.readable import duration, size

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.operate.status import Status
    from cdc.operate.verdict import Verdict

# Wider lines are hard to read, on any terminal.
_MOST_COLUMNS: Final = 100


@click.command(epilog=example("cdc status", "cdc status --json | jq .lag_bytes"))
@with_config
@as_json
def status(config: Config, *, as_json: bool) -> int:
    """Show the lag of log and followers, and the pipeline's verdict.

    Reads the log and the source; the daemon, where it answers at http.listen, adds what it is
    doing. For each follower: the LSN up to which its store holds everything, its lag in bytes, how
    long the log has held what it lacks, and the age of the newest canary that it has applied. For
    each webhook: whether it delivers, what it has not acknowledged, and what it has given up.

    The level is ok, degraded or failed, with each cause, since when, and what to do. Exits 0 when
    it is ok or degraded (late, but advancing, or it may pass by itself); 1 when something has
    failed or is stalled: no daemon reads, a snapshot was skipped, a renamed table was not read
    again, a follower has applied nothing for three minutes, a webhook does not run or has given up
    events; 69 or 77 when a server does not answer
    or refuses us; 78 when the pipeline is not set up or a person is needed.
    """
    from cdc.operate.status import read_status  # noqa: PLC0415 - not for --help

    found = read_status(config)
    if as_json:
        print_json(found.fields())
    else:
        _print(found)
        _causes(found.verdict)
    return found.verdict.exit_code


def _causes(verdict: Verdict) -> None:
    """Print what is wrong, the worst last, so that it is next to the prompt."""
    for cause in reversed(verdict.causes):
        failed = cause.level is Level.FAILED
        mark = click.style("✗" if failed else "!", fg="red" if failed else "yellow", bold=True)
        since = f", since {cause.since}" if cause.since else ""
        _echo_wrapped(f"{mark} ", f"{cause.what}{since}", 2)
        if cause.remedy:
            _echo_wrapped(f"    {click.style('fix:', dim=True)} ", cause.remedy, 9)
    if verdict.level is Level.OK:
        echo(f"{click.style('✓', fg='green', bold=True)} {verdict.sentence}")
        next_step("cdc tail shows what arrives")
    else:
        next_step("cdc doctor examines it")


def _snapshot(fields: dict[str, Any]) -> str:
    """Return the progress of the initial snapshot, from the daemon's report or only the log."""
    if fields["stage"] == "done":
        return f"{fields['rows']:,} rows, done in {fields['seconds']:.0f} s"
    if "percent" not in fields:
        return str(fields["stage"])
    left = "" if fields["seconds_left"] is None else f", {fields['seconds_left']:.0f} s left"
    return f"{fields['percent']:.0f} %, {fields['rows']:,} rows{left}"


def _follower(fields: dict[str, Any]) -> str:
    parts = [str(fields["state"]).replace("_", " ")]
    if fields["lsn"] is not None:
        parts.append(f"holds all up to {fields['lsn']}, seq {fields['seq']}")
        bytes_, seconds = fields["lag_bytes"], fields["lag_seconds"]
        lag = [size(bytes_)] if bytes_ is not None else []
        lag += [f"{seconds:.1f} s"] if seconds is not None else []
        parts.append(f"lags by {', '.join(lag)}" if lag else "")
    if fields["canary_age_seconds"] is not None:
        parts.append(f"canary {fields['canary_age_seconds']:.1f} s ago")
    return "; ".join(filter(None, parts))


def _webhook(fields: dict[str, Any]) -> str:
    parts = [str(fields["state"]).replace("_", " ")]
    if fields["lag"] is not None:
        parts.append(f"{fields['members']} members, {fields['lag']:,} offsets not acknowledged")
    if fields["failing"]:
        parts.append(f"{fields['failing']:,} keys are refused")
    if fields["undelivered"]:
        parts.append(f"{fields['undelivered']:,} given up")
    return "; ".join(parts)


def _print(found: Status) -> None:
    fields = found.fields()
    source, resume = fields["source"], fields["resume"]
    frontier = found.frontier
    rows: list[tuple[str, str]] = [("pipeline", found.pipeline)]
    if source:
        rows.append(("source", f"{source['database']}, WAL ends at {source['wal_lsn']}"))
    if resume:
        rows.append(("log", f"holds all up to {resume['end_lsn']}, seq {resume['seq']}"))
        age = f"{resume['age_seconds']:.0f} s ago by {resume['owner']}"
        rows.append(("written", age))
    if frontier:
        rows.append(("frontier", f"{frontier.lsn}, seq {frontier.seq}"))
    if snapshot := fields["snapshot"]:
        rows.append(("snapshot", _snapshot(snapshot)))
    if found.lag_bytes is not None:
        seconds = fields["lag_seconds"]
        late = f", {seconds:.1f} s" if seconds is not None else ""
        rows.append(("lag", f"{size(found.lag_bytes)}{late}"))
    rows += _slot(found)
    rows += _daemon(found)
    for each in found.incremental_snapshots:
        if each.active:
            why = f": {each.why}" if each.why else ""
            rows.append(("snapshot", f"{each.id} of {each.name}, {each.rows:,} rows{why}"))
    rows += [(each["name"], _follower(each)) for each in fields["followers"]]
    rows += [(each["name"], f"webhook, {_webhook(each)}") for each in fields["webhooks"]]
    width = max(9, *(len(name) for name, _ in rows))
    for name, value in rows:
        _echo_wrapped(click.style(f"{name:<{width}} ", dim=True), value, width + 1)


def _echo_wrapped(head: str, text: str, indent: int) -> None:
    """Print the text after `head`, with its further lines at column `indent`.

    80 columns suffice, and piped output is never wrapped.
    """
    room = min(_MOST_COLUMNS, shutil.get_terminal_size().columns)
    lines = [text]
    if sys.stdout.isatty() and room > indent + 20:
        lines = textwrap.wrap(
            printable(text), room - indent, break_long_words=False, break_on_hyphens=False
        )
    for line in lines:
        echo(f"{head}{line}")
        head = " " * indent


def _daemon(found: Status) -> list[tuple[str, str]]:
    daemon = found.daemon
    rows = [("daemon", f"{daemon['state']}: {daemon['reason']}")] if daemon else []
    if found.refused_messages:
        rows.append(("refused", f"messages not obeyed: {found.refused_messages}"))
    return rows


def _slot(found: Status) -> list[tuple[str, str]]:
    slot, retention = found.slot, found.retention
    if slot is None or retention is None:
        return []
    reader = f"pid {slot.active_pid}" if slot.active_pid else "nobody"
    kept = size(slot.retained_bytes or 0)
    rows = [("slot", f"{slot.name}, {slot.wal_status}, read by {reader}, keeps {kept}")]
    if (seconds := retention.lost_in_seconds) is not None:
        rows.append(("lasts", f"about {duration(seconds)} more, if nobody reads from it"))
    return rows
