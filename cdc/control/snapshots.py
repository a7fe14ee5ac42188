"""Live snapshots from beside the daemon: commands into the stream, and what the log says."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

from cdc.config.patterns import TablePattern, parse_table_pattern
from cdc.control.findings import listed
from cdc.errors import ConfigError
from cdc.log import reader
from cdc.snapshot.live import commands
from cdc.snapshot.live import topic as live_topic
from cdc.source import inspection
from cdc.source.connection import connect
from cdc.source.members import emit, members

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdc.config import Config
    from cdc.snapshot.live.records import Key, LiveRecord
    from cdc.source.members import Member


def start(
    config: Config,
    tables: Sequence[str],
    *,
    where: str | None = None,
    keys: tuple[Key, ...] | None = None,
    anew: bool = False,
) -> dict[str, str]:
    """Ask for a snapshot of each table; return their names by the snapshots' ids."""
    asked = {}
    with connect(config) as connection:
        for member in _chosen(members(connection, config.publication), tables):
            number = new_id()
            command = commands.Command(
                do="start",
                id=number,
                tables=(commands.Of(member.schema, member.table),),
                where=where,
                keys=keys,
                anew=anew,
            )
            emit(connection, commands.COMMAND, commands.encode(command))
            asked[number] = str(member)
    return asked


def tell(config: Config, do: commands.Do, number: str | None) -> list[str]:
    """Pause, resume or stop one, or each; return the ids meant. ConfigError where there is none."""
    active = [record.id for record in live_topic.read(config) if record.active]
    meant = [each for each in active if number in (None, each)]
    if not meant:
        raise ConfigError(
            "no live snapshot is running" if number is None else f"{number} is not running",
            hint=f"running: {listed(active)}" if active else "`cdc snapshot TABLE` begins one",
        )
    with connect(config) as connection:
        content = commands.encode(commands.Command(do=do, id=number))
        emit(connection, commands.COMMAND, content)
    return meant


def listing(config: Config) -> list[LiveRecord]:
    """Return the live snapshots that the log knows, oldest first."""
    return live_topic.read(config)


def wait(config: Config, numbers: Sequence[str], seconds: float = 0.5) -> list[LiveRecord]:
    """Return the snapshots' records once all are over, however long it takes."""
    while True:
        found = [record for record in live_topic.read(config) if record.id in numbers]
        if len(found) == len(numbers) and not any(record.active for record in found):
            return found
        time.sleep(seconds)


def daemon_streams(config: Config) -> bool:
    """Whether somebody reads the slot, and so will hear a command now."""
    if reader.read_resume(config) is None:
        raise ConfigError(
            f'there is no log of pipeline "{config.pipeline}"', hint="`cdc setup` begins it"
        )
    with connect(config) as connection:
        slot = inspection.slot(connection, config.slot)
    return slot is not None and slot.active_pid is not None


def new_id() -> str:
    """Return an id for a snapshot."""
    return uuid.uuid4().hex[:8]


def pattern_of(text: str) -> TablePattern:
    """Return the pattern of tables that a command was given; ConfigError where it is none."""
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
