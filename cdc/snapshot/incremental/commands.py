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
# How many snapshots may be active when a message starts more, by its prefix: each has a record in
# the log and metrics. `cdc` must be able to read every table of a large database; a signal's sender
# has no other right.
MAX_ACTIVE: Final = {COMMAND: 10_000, SIGNAL: 1_000}
_MAX_TABLES: Final = 100  # of a message; `cdc` writes one for each table
_MAX_NAME: Final = 200  # characters of a snapshot's id, which each watermark repeats, or of a table

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


_decode: Final = msgspec.json.Decoder(Command).decode
_decode_signal: Final = msgspec.json.Decoder(_Signal).decode


def encode(command: Command) -> bytes:
    return msgspec.json.encode(command)


def parse(prefix: str, content: bytes) -> list[Command]:
    """Return the commands in a message of `COMMAND` or `SIGNAL`; CommandError where unreadable.

    A signal of several tables with conditions of their own is several commands.
    """
    try:
        read = _decode(content) if prefix == COMMAND else _decode_signal(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CommandError("it is not a command") from error
    return [_checked(read)] if isinstance(read, Command) else _of_signal(read)


def _of_signal(signal: _Signal) -> list[Command]:
    do = _DOES.get(signal.type)
    if do is None:
        return []  # the same table may hold other types of signals, for Debezium
    data = signal.data or _Data()
    _expect_few(max(len(data.collections), len(data.conditions)))
    tables = dict.fromkeys(map(_table, data.collections))
    if do != "start":
        return [_checked(Command(do=do, tables=tuple(tables)))]
    _checked(Command(do=do, id=signal.id, tables=tuple(tables), keys=data.keys))
    if not tables:
        raise CommandError("a signal execute-snapshot without data-collections")
    where = {_table(each.collection): each.filter for each in data.conditions}
    alone = len(tables) == 1
    return [
        Command(
            do=do,
            id=signal.id if alone else f"{signal.id}-{number}",
            tables=(table,),
            where=where.get(table),
            keys=data.keys,
        )
        for number, table in enumerate(tables, 1)
    ]


def _checked(command: Command) -> Command:
    number = command.id or ""
    if len(number) > _MAX_NAME or not number.isprintable():
        raise CommandError(f"an id of more than {_MAX_NAME} characters, or with unprintable ones")
    _expect_few(len(command.tables))
    if any(len(each.schema) + len(each.table) > _MAX_NAME for each in command.tables):
        raise CommandError(f"a table's name of more than {_MAX_NAME} characters")
    if len(command.tables) > 1 and (command.where is not None or command.keys is not None):
        # Each snapshot's record would repeat them.
        raise CommandError("a condition or keys of several tables: send a message for each")
    if command.empty_first and (command.where is not None or command.keys is not None):
        # The rest of the table would be deleted from every follower.
        raise CommandError("a table that is emptied first is read without a condition or keys")
    return command


def _expect_few(tables: int) -> None:
    if tables > _MAX_TABLES:
        raise CommandError(
            f"it names {tables:,} tables, and a message may name {_MAX_TABLES}: send several"
        )


def _table(text: str) -> TableName:
    try:
        exact = parse_table_pattern(text).exact
    except ValueError:
        exact = None
    if exact is None:
        raise CommandError("a table is not written as schema.table")
    return TableName(*exact)
