"""`cdc tail`: events as they arrive, one line each."""

from __future__ import annotations

import select
import shutil
import signal
import sys
import time
from base64 import b64decode
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from cdc.cli.options import echo, example, next_step, print_waiting, with_config
from cdc.errors import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdc.config import Config, TablePattern
    from cdc.log.tail import Arrived

_COLOURS = {"c": "green", "r": "green", "u": "yellow", "d": "red", "t": "magenta", "m": "cyan"}
_WORDS = {"c": "insert", "r": "read", "u": "update", "d": "delete", "t": "truncate", "m": "message"}
# Nothing has arrived for this long: print a line, and again after twice as long.
_IDLE_SECONDS = 3.0
# Narrow enough to show a few columns side by side.
_VALUE_WIDTH = 24


@click.command(epilog=example("cdc tail", "cdc tail public.users --json | jq .event.after"))
@with_config
@click.argument("tables", nargs=-1, metavar="[TABLE]...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
@click.option("--from-beginning", is_flag=True, help="Start with what the log already holds.")
@click.option("--limit", type=click.IntRange(min=1), help="Stop after this many events.")
def tail(
    config: Config,
    tables: tuple[str, ...],
    *,
    as_json: bool,
    from_beginning: bool,
    limit: int | None,
) -> None:
    """Print events as they arrive in the log, committed ones only, until Ctrl-C.

    TABLE is schema.table or schema.*; without any, all tables and logical messages are printed. A
    line shows the commit's time, how much later it was published, the commit LSN, seq, the
    operation, the table, the key and the row. Where nothing arrives, a line on stderr shows how far
    the log is.
    """
    from cdc.log.tail import tail as follow  # noqa: PLC0415 - not for --help

    # A supervisor's stop is handled like Ctrl-C.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    left = limit
    idle = IdleLine(config)
    line = _json if as_json else _line
    batches = follow(config, _patterns(tables), from_beginning=from_beginning)
    try:
        for batch in batches:
            for arrived in batch[:left]:
                echo(line(arrived))
            if batch:
                sys.stdout.flush()
            idle.note(arrived=bool(batch))
            if left is not None:
                left -= len(batch[:left])
                if left == 0:
                    break
            if not batch and _output_is_closed():
                break
    except KeyboardInterrupt:
        pass
    finally:
        batches.close()
    if not as_json:
        next_step("cdc status shows how far the log is")


class IdleLine:
    """Reports on stderr that nothing arrives, and where the log ends: silence could be a fault."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._since = time.monotonic()
        self._due: float | None = _IDLE_SECONDS

    def note(self, *, arrived: bool) -> None:
        """Note whether something arrived; print a line where nothing has for a while."""
        now = time.monotonic()
        if arrived:
            self._since, self._due = now, _IDLE_SECONDS
        elif self._due is not None and now - self._since >= self._due:
            print_waiting(f"waiting, {self._end_of_log()}")
            # Only once where stderr is no terminal.
            self._due = 2 * self._due if sys.stderr.isatty() else None

    def _end_of_log(self) -> str:
        from cdc.log.reader import read_resume  # noqa: PLC0415 - not for --help

        resumed = read_resume(self._config)
        if resumed is None:
            return "and the log has no resume record: `cdc setup` creates it"
        age = max(0.0, time.time() - resumed[1].at_us / 1e6)
        return f"at LSN {resumed[1].end_lsn}, seq {resumed[1].seq}, written {age:.0f} s ago"


def _output_is_closed() -> bool:
    """Return whether the reader of our output has closed it, as after `| head`."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):
        return False  # not a file descriptor, as in a test
    return any(flags & select.POLLERR for _, flags in poll.poll(0))


def _patterns(tables: Sequence[str]) -> list[TablePattern]:
    from cdc.config.patterns import parse_table_pattern  # noqa: PLC0415 - not for --help

    try:
        return [parse_table_pattern(table) for table in tables]
    except ValueError as error:
        raise click.UsageError(f"{error}; a table is given as schema.table or schema.*") from error


def _json(arrived: Arrived) -> str:
    import orjson  # noqa: PLC0415 - not for --help

    key = orjson.loads(arrived.key) if arrived.key else None
    return orjson.dumps({**arrived._asdict(), "key": key}).decode()


def _line(arrived: Arrived) -> str:
    import orjson  # noqa: PLC0415 - not for --help

    event, source = arrived.event, arrived.event["source"]
    at = datetime.fromtimestamp(event["ts_ms"] / 1_000, UTC).astimezone()
    late_ms = max(0, arrived.published_ms - event["ts_ms"])
    op = event["op"]
    key = orjson.loads(arrived.key) if arrived.key else {}
    head = (
        f"{at:%H:%M:%S}.{at.microsecond // 1_000:03} +{late_ms:<5}",
        f"{source['commit_lsn']:<11} {source['seq']:>8}",
        f"{_WORDS.get(op, op):<8}",
        f"{source['schema']}.{source['table']}" if op != "m" else "",
        " ".join(f"{name}={_short(value)}" for name, value in key.items()),
    )
    absent = dict.fromkeys(source.get("unchanged", ()), "(unchanged)")
    if dead := source.get("dead"):
        absent |= dict.fromkeys(dead["columns"], f"(dead letter {dead['id']})")
    row = _row(event, set(key), absent)
    # What does not fit on the terminal's line is cut; programs use --json.
    room = shutil.get_terminal_size((160, 24)).columns - len("  ".join(head)) - 2
    row = row if len(row) <= room or not sys.stdout.isatty() else row[: max(0, room - 1)] + "…"
    return "  ".join(
        (
            click.style(head[0], dim=True),
            click.style(head[1], dim=True),
            click.style(head[2], fg=_COLOURS.get(op), bold=True),
            click.style(head[3], bold=True),
            click.style(head[4], fg="cyan"),
            row,
        )
    ).rstrip()


def _row(event: dict[str, Any], key: set[str], absent: dict[str, str]) -> str:
    """Return the row's columns without its key; of an update, those that differ from the old row.

    Of a logical message it is the content. `absent` are columns without a value here, with the
    reason.
    """
    if message := event.get("message"):
        if dead := event["source"].get("dead"):
            return f"content=(dead letter {dead['id']})"
        return f"content={_short(b64decode(message['content']).decode(errors='replace'))}"
    before, after = event.get("before") or {}, event.get("after") or {}
    parts = []
    for name, value in (after or before).items():
        if name in key or name in absent:
            continue
        if after and name in before and before[name] == value:
            continue
        parts.append(f"{name}={_short(value)}")
    parts.extend(f"{name}={why}" for name, why in sorted(absent.items()))
    return " ".join(parts)


def _short(value: object) -> str:
    """Return `value` on one line, control characters escaped: rows may hold anything."""
    text = value if isinstance(value, str) else "null" if value is None else str(value)
    text = printable(text[: _VALUE_WIDTH + 1])
    return text if len(text) <= _VALUE_WIDTH else text[: _VALUE_WIDTH - 1] + "…"
