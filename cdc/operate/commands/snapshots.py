"""Control incremental snapshots from outside the daemon: commands in the stream, and the log."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Final

from cdc.config.patterns import TablePattern, parse_table_pattern
from cdc.errors import CDCError, ConfigError, Exit
from cdc.log import reader
from cdc.log.client import reach
from cdc.operate.readable import listed
from cdc.snapshot.incremental import commands
from cdc.snapshot.incremental import topic as incremental_topic
from cdc.snapshot.incremental.records import IncrementalRecord, Key, TableName
from cdc.source import conditions
from cdc.source.chunks import COMPARED_HINT, CONDITION_HINT
from cdc.source.column_types import read_column_types
from cdc.source.commands import require_secret, send_command
from cdc.source.connection import connect, translated
from cdc.source.members import Member, read_members
from cdc.source.slots import read_slot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cdc.config import Config
    from cdc.source.connection import Connection


# The interval at which a wait reports progress.
REPORT_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.5
# A table that a session has locked exclusively can't be looked up: report that rather than wait.
_LOCK_TIMEOUT: Final = b"SET lock_timeout = '10s'"


class NotOverError(CDCError):
    """A snapshot did not end within the timeout."""

    exit_code = Exit.TEMPORARY


def start(
    config: Config,
    tables: Sequence[str],
    *,
    where: str | None = None,
    keys: tuple[Key, ...] | None = None,
    empty_first: bool = False,
) -> dict[str, str]:
    """Request a snapshot of each table; return their names by the snapshots' ids."""
    require_secret(config)
    _expect_initial(config)
    try:
        conditions.parse(where or "true")
    except conditions.ConditionError as error:
        raise ConfigError(f"--where can't be read: {error}", hint=CONDITION_HINT) from error
    with connect(config) as connection:
        with translated("limiting the wait for locks"):
            connection.execute(_LOCK_TIMEOUT)
        chosen = _chosen(read_members(connection, config.publication), tables)
        if where is not None:
            expect_comparable(connection, chosen, where)
        return request(connection, config, chosen, where=where, keys=keys, empty_first=empty_first)


def expect_comparable(connection: Connection, chosen: Sequence[Member], where: str) -> None:
    """Raise ConfigError where a condition compares a column whose type does not allow it."""
    for member in chosen:
        with translated(f"looking up the types of {member}"):
            types = read_column_types(connection, member.oid)
        try:
            conditions.parse(where, types)
        except conditions.ConditionError as error:
            raise ConfigError(
                f"--where can't be used for {member}: {error}", hint=COMPARED_HINT
            ) from error


def _expect_initial(config: Config) -> None:
    """Raise ConfigError while the initial snapshot is due: the stream starts after it."""
    resumed = reader.read_resume(config)
    if resumed is not None and resumed[0].snapshot == "due":
        raise ConfigError(
            "the initial snapshot is not taken yet, so a request for another would be ignored",
            hint="it reads every table; `cdc run`, or `cdc snapshot --initial`, takes it, and"
            " `cdc status` shows how far it is",
        )


def request(
    connection: Connection,
    config: Config,
    chosen: Iterable[Member],
    *,
    where: str | None = None,
    keys: tuple[Key, ...] | None = None,
    empty_first: bool = False,
) -> dict[str, str]:
    """Write a command for each table into the stream; return their names by the snapshots' ids."""
    requested = {}
    for member in chosen:
        number = uuid.uuid4().hex[:8]
        command = commands.Command(
            do="start",
            id=number,
            tables=(TableName(member.schema, member.table),),
            where=where,
            keys=keys,
            empty_first=empty_first,
        )
        send_command(connection, config, commands.COMMAND, commands.encode(command))
        requested[number] = str(member)
    return requested


def control(config: Config, do: commands.Do, number: str | None) -> list[str]:
    """Pause, resume or stop one, or all; return their ids. ConfigError where there is none."""
    require_secret(config)
    known = incremental_topic.read(config)
    active = [record.id for record in known if record.active]
    meant = [each for each in active if number in (None, each)]
    if do == "stop":  # acknowledges a failed one
        meant += [each.id for each in known if (each.id, each.state) == (number, "failed")]
    if not meant:
        hints = [f"running: {listed(active)}"] if active else []
        failed = [record.id for record in known if record.state == "failed"]
        if do == "stop" and failed:
            hints.append(f"failed: {listed(failed)}; `cdc snapshot stop ID` acknowledges one")
        raise ConfigError(
            "no incremental snapshot is running" if number is None else f"{number} is not running",
            hint="; ".join(hints) or "`cdc snapshot TABLE` starts one",
        )
    with connect(config) as connection:
        content = commands.encode(commands.Command(do=do, id=number))
        send_command(connection, config, commands.COMMAND, content)
    return meant


def wait(
    config: Config,
    numbers: Sequence[str],
    *,
    timeout: float | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> list[IncrementalRecord]:
    """Return the snapshots' records once all are over.

    `report` is called at once where no daemon reads the slot, and then every `REPORT_SECONDS`.
    Raises NotOverError when `timeout` has passed (None: never).
    """
    began = reported_at = time.monotonic()
    no_daemon = _no_daemon(config)
    if no_daemon:
        report(no_daemon)
    seen: dict[str, IncrementalRecord] = {}  # also of those that the log has forgotten since
    while True:
        seen |= {each.id: each for each in incremental_topic.read(config) if each.id in numbers}
        found = [*seen.values()]
        if len(found) == len(numbers) and not any(record.active for record in found):
            return found
        now = time.monotonic()
        over = timeout is not None and now - began >= timeout
        if over or now - reported_at >= REPORT_SECONDS:
            reported_at, no_daemon = now, _no_daemon(config)
            so_far = _so_far(numbers, found) + (f"; {no_daemon}" if no_daemon else "")
            if over:
                raise _not_over(so_far, now - began, reads=not no_daemon)
            report(so_far)
        time.sleep(_PAUSE_SECONDS)


def _no_daemon(config: Config) -> str:
    """Return a sentence where no daemon reads the slot; an empty text where one does."""
    if daemon_streams(config):
        return ""
    return f"no daemon reads the slot {config.slot}: it starts when one does (cdc run)"


def _so_far(numbers: Sequence[str], found: list[IncrementalRecord]) -> str:
    known = {record.id: record for record in found}
    parts = []
    for number in numbers:
        record = known.get(number)
        if record is None:
            parts.append(f"{number} has not started")
        elif record.active:
            why = f" ({record.why})" if record.why else ""
            parts.append(f"{number} of {record.name} is {record.state}, {record.rows:,} rows{why}")
    return "; ".join(parts)


def _not_over(so_far: str, seconds: float, *, reads: bool) -> NotOverError:
    remedy = "`cdc snapshot list` shows how far it is; wait for longer" if reads else "cdc run"
    error = NotOverError(f"not over after {seconds:.0f} s: {so_far}", hint=remedy)
    error.exit_code = Exit.TEMPORARY if reads else Exit.UNAVAILABLE
    return error


def daemon_streams(config: Config) -> bool:
    """Whether a daemon reads the slot, and so receives a command now."""
    reach(config)
    if reader.read_resume(config) is None:
        raise ConfigError(
            f'there is no log of pipeline "{config.pipeline}"', hint="`cdc setup` creates it"
        )
    with connect(config) as connection:
        slot = read_slot(connection, config.slot)
    return slot is not None and slot.active_pid is not None


def pattern_of(text: str) -> TablePattern:
    """Return the table pattern in a command's argument; ConfigError where it is none."""
    try:
        return parse_table_pattern(text)
    except ValueError as error:
        raise ConfigError(
            f"{text} is not schema.table", hint="write it with its schema, as public.orders"
        ) from error


def _chosen(known: list[Member], wanted: Sequence[str]) -> list[Member]:
    """Return the tables that the patterns name; ConfigError where one names none."""
    chosen: dict[str, Member] = {}
    for text in wanted:
        pattern = pattern_of(text)
        exact = ".".join(pattern.exact) if pattern.exact else None
        found = [
            each
            for each in known
            if pattern.matches(each.schema, each.table) or (exact and each.root == exact)
        ]
        if not found:
            raise ConfigError(
                f"no captured table is {text}",
                hint=f"captured: {listed([str(each) for each in known])}; `cdc table add` adds one",
            )
        chosen |= {str(each): each for each in found}
    return list(chosen.values())
