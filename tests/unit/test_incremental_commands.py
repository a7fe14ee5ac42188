"""Commands and signals as the daemon reads them, and what it rejects."""

from __future__ import annotations

import json

import pytest

from cdc.snapshot.incremental import commands
from cdc.snapshot.incremental.commands import Command, CommandError, Mark, Of
from cdc.snapshot.incremental.visibility import Snapshot

_ORDERS = Of("public", "orders")


def test_a_command_is_read_as_it_was_written() -> None:
    command = Command(do="start", id="a1", tables=(_ORDERS,), where="id > 5", keys=(("1",),))
    assert commands.commands(commands.COMMAND, commands.encode(command)) == [command]
    mark = Mark("session", "a1", 7, 16384, low=True)
    assert commands.mark(commands.encode(mark)) == mark


def test_a_signal_says_the_same_in_debeziums_words() -> None:
    data = {
        "data-collections": ["public.orders", 'public."Odd. One"'],
        "type": "incremental",
        "additional-conditions": [{"data-collection": "public.orders", "filter": "id > 5"}],
    }
    signal = json.dumps({"id": "s", "type": "execute-snapshot", "data": data}).encode()
    assert commands.commands(commands.SIGNAL, signal) == [
        Command(do="start", id="s-1", tables=(_ORDERS,), where="id > 5"),
        Command(do="start", id="s-2", tables=(Of("public", "Odd. One"),)),
    ]
    pause = json.dumps({"id": "s", "type": "pause-snapshot", "data": None}).encode()
    assert commands.commands(commands.SIGNAL, pause) == [Command(do="pause")]
    other = json.dumps({"id": "s", "type": "log", "data": {"message": "hi"}}).encode()
    assert commands.commands(commands.SIGNAL, other) == []


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
    ],
)
def test_what_is_no_command_is_told_as_such(prefix: str, content: bytes) -> None:
    with pytest.raises(CommandError):
        commands.commands(prefix, content)
    assert commands.mark(content) is None


def test_a_snapshot_sees_what_has_ended_also_when_xids_have_gone_round() -> None:
    snapshot = Snapshot.parse(f"{2**32 - 5}:{2**32 + 3}:{2**32 - 5},{2**32 + 1}")
    assert [snapshot.sees(xid) for xid in (2**32 - 6, 2**32 - 4, 0, 2)] == [True] * 4
    assert [snapshot.sees(xid) for xid in (2**32 - 5, 1, 3, 4, 1_000)] == [False] * 5
