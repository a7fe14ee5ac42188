"""Commands and signals as the daemon reads them, and what it rejects."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cdc.decode.pg_snapshot import PgSnapshot
from cdc.snapshot.incremental import commands, watermarks
from cdc.snapshot.incremental.commands import Command, CommandError
from cdc.snapshot.incremental.records import TableName
from cdc.snapshot.incremental.watermarks import Watermark

_ORDERS = TableName("public", "orders")


def test_a_command_is_read_as_it_was_written() -> None:
    command = Command(do="start", id="a1", tables=(_ORDERS,), where="id > 5", keys=(("1",),))
    assert commands.parse(commands.COMMAND, commands.encode(command)) == [command]
    watermark = Watermark("session", "a1", 7, 16384, low=True)
    assert watermarks.decode(watermarks.encode(watermark)) == watermark


def test_a_signal_is_the_same_command_in_debeziums_format() -> None:
    data = {
        "data-collections": ["public.orders", 'public."Odd. One"'],
        "type": "incremental",
        "additional-conditions": [{"data-collection": "public.orders", "filter": "id > 5"}],
    }
    signal = json.dumps({"id": "s", "type": "execute-snapshot", "data": data}).encode()
    assert commands.parse(commands.SIGNAL, signal) == [
        Command(do="start", id="s-1", tables=(_ORDERS,), where="id > 5"),
        Command(do="start", id="s-2", tables=(TableName("public", "Odd. One"),)),
    ]
    pause = json.dumps({"id": "s", "type": "pause-snapshot", "data": None}).encode()
    assert commands.parse(commands.SIGNAL, pause) == [Command(do="pause")]
    other = json.dumps({"id": "s", "type": "log", "data": {"message": "hi"}}).encode()
    assert commands.parse(commands.SIGNAL, other) == []


def signal(*tables: str, **more: object) -> bytes:
    data = {"data-collections": tables, **more}
    return json.dumps({"id": "s", "type": "execute-snapshot", "data": data}).encode()


def command(*names: str, **more: Any) -> bytes:  # noqa: ANN401 - any field
    tables = tuple(TableName("public", name) for name in names)
    return commands.encode(Command(do="start", tables=tables, **more))


def test_one_message_asks_for_a_bounded_number_of_snapshots() -> None:
    many = [f"public.t{number}" for number in range(101)]
    assert len(commands.parse(commands.SIGNAL, signal(*many[:100]))) == 100
    assert len(commands.parse(commands.SIGNAL, signal(*["public.orders"] * 100))) == 1
    with pytest.raises(CommandError, match="names 101 tables, and a message may name 100"):
        commands.parse(commands.SIGNAL, signal(*many))
    with pytest.raises(CommandError, match="names 101 tables"):
        commands.parse(commands.COMMAND, command(*many))
    with pytest.raises(CommandError, match="names 101 tables"):
        commands.parse(commands.SIGNAL, signal(*many).replace(b"execute", b"stop"))


@pytest.mark.parametrize(
    ("prefix", "content"),
    [
        (commands.COMMAND, b""),
        (commands.COMMAND, b'{"do":"drop"}'),
        (commands.COMMAND, b'{"do":"stop","more":1}'),
        (commands.COMMAND, b"\xff\xfe"),
        (commands.SIGNAL, b'{"id":"s","type":"execute-snapshot","data":{}}'),
        (
            commands.SIGNAL,
            b'{"id":"s","type":"execute-snapshot","data":{"data-collections":["orders"]}}',
        ),
        (
            commands.SIGNAL,
            b'{"id":"a\\nb","type":"execute-snapshot","data":{"data-collections":["a.b"]}}',
        ),
        (
            commands.SIGNAL,
            b'{"id":"%s","type":"execute-snapshot","data":{"data-collections":["a.b"]}}'
            % (b"w" * 201),
        ),
        (commands.COMMAND, command("orders", id="w" * 201)),
        (commands.COMMAND, command("w" * 201)),
        (commands.SIGNAL, signal("public." + "w" * 201)),
        # Their records would each repeat it.
        (commands.COMMAND, command("a", "b", where="id > 5")),
        (commands.COMMAND, command("a", "b", keys=(("1",),))),
        (commands.SIGNAL, signal("public.a", "public.b", keys=[["1"]])),
    ],
)
def test_content_that_is_not_a_command_is_rejected(prefix: str, content: bytes) -> None:
    with pytest.raises(CommandError):
        commands.parse(prefix, content)
    assert watermarks.decode(content) is None


def test_a_snapshot_sees_what_has_ended_also_after_xids_wrapped_around() -> None:
    snapshot = PgSnapshot.parse(f"{2**32 - 5}:{2**32 + 3}:{2**32 - 5},{2**32 + 1}")
    assert [snapshot.sees(xid) for xid in (2**32 - 6, 2**32 - 4, 0, 2)] == [True] * 4
    assert [snapshot.sees(xid) for xid in (2**32 - 5, 1, 3, 4, 1_000)] == [False] * 5
