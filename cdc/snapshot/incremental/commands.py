"""Commands of incremental snapshots: messages in the stream itself. Pure.

A command is a transactional logical message of the prefix `lockstep.snapshot`; a row of the signal
table is the same in Debezium's format under `lockstep.signal` (`migrations/`). So a command has a
place in the order like any change, waits for a daemon that is down, and is carried out once: its id
shows that it was read before.

Every role may emit a message, so both are signed (`cdc.source.authority`), and what is read here is
what was signed. A message that can't be read must not stop the stream.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from cdc.config.patterns import parse_table_pattern
from cdc.encode.logical_messages import OURS
from cdc.snapshot.incremental.records import TableName

COMMAND: Final = f"{OURS}snapshot"
SIGNAL: Final = f"{OURS}signal"
_MAX_ID: Final = 200  # characters of a snapshot's id, which each of its watermarks repeats

Do = Literal["start", "pause", "resume", "stop"]
_DOES: Final[dict[str, Do]] = {
    "execute-snapshot": "start",
    "pause-snapshot": "pause",
    "resume-snapshot": "resume",
    "stop-snapshot": "stop",
}


class CommandError(ValueError):
    """A message that is no readable command."""


class Command(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to be done; `id` names a new snapshot, or an existing one (None: every one)."""

    do: Do
    id: str | None = None
    tables: tuple[TableName, ...] = ()
    where: str | None = None
    keys: tuple[tuple[str, ...], ...] | None = None
    # The table's rows in the log are deleted first.
    empty_first: bool = msgspec.field(default=False, name="anew")


class _Condition(msgspec.Struct, frozen=True, rename={"collection": "data-collection"}):
    collection: str
    filter: str


class _Data(
    msgspec.Struct,
    frozen=True,
    rename={"collections": "data-collections", "conditions": "additional-conditions"},
):
    """The fields of Debezium's signals, and `keys`."""

    collections: tuple[str, ...] = ()
    conditions: tuple[_Condition, ...] = ()
    keys: tuple[tuple[str, ...], ...] | None = None


class _Signal(msgspec.Struct, frozen=True):
    id: str
    type: str
    data: _Data | None = None


def encode(command: Command) -> bytes:
    return msgspec.json.encode(command)


def parse(prefix: str, content: bytes) -> list[Command]:
    """Return the commands in a message of `COMMAND` or `SIGNAL`; CommandError where unreadable.

    A signal of several tables with conditions of their own is several commands.
    """
    try:
        if prefix == COMMAND:
            return [_checked(msgspec.json.decode(content, type=Command))]
        signal = msgspec.json.decode(content, type=_Signal)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CommandError("it is not a command") from error
    do = _DOES.get(signal.type)
    if do is None:
        return []  # the same table may hold other types of signals, for Debezium
    if len(signal.id) > _MAX_ID or not signal.id.isprintable():
        raise CommandError(f"an id of more than {_MAX_ID} characters, or with unprintable ones")
    data = signal.data or _Data()
    tables = [_table(each) for each in data.collections]
    if do != "start":
        return [Command(do=do, tables=tuple(tables))]
    if not tables:
        raise CommandError("a signal execute-snapshot without data-collections")
    where = {each.collection: each.filter for each in data.conditions}
    alone = len(tables) == 1
    return [
        Command(
            do=do,
            id=signal.id if alone else f"{signal.id}-{number}",
            tables=(table,),
            where=where.get(name),
            keys=data.keys,
        )
        for number, (name, table) in enumerate(zip(data.collections, tables, strict=True), 1)
    ]


def _checked(command: Command) -> Command:
    if command.empty_first and (command.where is not None or command.keys is not None):
        # The rest of the table would be deleted from every follower.
        raise CommandError("a table that is emptied first is read without a condition or keys")
    return command


def _table(text: str) -> TableName:
    try:
        exact = parse_table_pattern(text).exact
    except ValueError:
        exact = None
    if exact is None:
        raise CommandError("a table is not written as schema.table")
    return TableName(*exact)
